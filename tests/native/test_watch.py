"""What looks at the computing of graphs, asked as ggml's scheduler asks it. A node is its place in `OPS`."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.llama.library import library
from cbatch.backend.llama.structs import NativeWatchParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHORT, LONG, ATTENTION, WANTED = range(4)
OPS = [*map(ctypes.create_string_buffer, (b"RMS_NORM", b"MUL_MAT", b"FLASH_ATTN_EXT", b"ADD"))]
NAMES = [*map(ctypes.create_string_buffer, (b"wanted more", b"result_norm", b"kq", b"wanted"))]
TEXT = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
OF_NAME = TEXT([*map(ctypes.addressof, NAMES)].__getitem__)
OF_OP = TEXT([*map(ctypes.addressof, OPS)].__getitem__)
TURN = ctypes.CFUNCTYPE(ctypes.c_double)


class Watch:
    """A watch, and the graphs that are computed under it."""

    def __init__(self, last: bytes | None = None, turn: Callable[[], float] | None = None) -> None:
        self.lib = library()
        self._turn = None if turn is None else TURN(turn)
        at = (ctypes.cast(f, ctypes.c_void_p) if f else None for f in (OF_NAME, OF_OP, self._turn))
        get_name, get_op, take_turn = at
        self._params = NativeWatchParams(get_name, get_op, last, take_turn)
        self.pointer = self.lib.cbatch_watch_init(ctypes.addressof(self._params))

    def close(self) -> None:
        self.lib.cbatch_watch_free(self.pointer)

    def computed(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the places behind which there was a pause, and those of the nodes that were computed."""
        ask = self.lib.cbatch_watch_callback
        pauses, n_done = [], 0
        for i, node in enumerate(nodes):
            if ask(node, True, self.pointer):
                pauses.append(i)
                n_done = i + 1
                if not ask(node, False, self.pointer):
                    return pauses, [*range(n_done)]
        return pauses, [*range(len(nodes))]


@pytest.fixture
def make() -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def one(*args: object, **given: object) -> Watch:
        made.append(Watch(*args, **given))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for watch in made:
        watch.close()


LAYER = [SHORT, LONG, SHORT, ATTENTION]


def test_graph_ends_behind_the_named_node_alone(make: Callable[..., Watch]) -> None:
    assert make(b"wanted").computed([SHORT, WANTED, SHORT]) == ([1], [0, 1])
    assert make().computed([SHORT, WANTED, SHORT]) == ([], [0, 1, 2])


def test_pauses_are_behind_every_eighth_long_node(make: Callable[..., Watch]) -> None:
    pauses, done = make().computed(LAYER * 9)
    assert pauses == [15, 31]
    assert len(done) == 36


def test_graph_is_broken_off_at_the_next_pause_once_it_is_stopped(
    make: Callable[..., Watch],
) -> None:
    watch = make()
    watch.lib.cbatch_watch_stop(watch.pointer)
    assert watch.computed(LAYER * 9) == ([15], [*range(16)])


def test_turns_are_taken_behind_each_long_node_while_others_wait(
    make: Callable[..., Watch],
) -> None:
    taken: list[float] = []
    watch = make(turn=lambda: taken.append(0.0) or 0.0)  # type: ignore[func-returns-value]
    assert watch.computed(LAYER * 2)[0] == [1, 3, 5, 7]
    assert len(taken) == 4


def test_turn_says_for_how_long_to_go_on(make: Callable[..., Watch]) -> None:
    taken: list[float] = []
    watch = make(turn=lambda: taken.append(0.0) or 3600.0)  # type: ignore[func-returns-value]
    assert watch.computed(LAYER * 4)[0] == [*range(1, 16, 2)]
    assert len(taken) == 1
    watch.lib.cbatch_watch_hurry(watch.pointer)
    watch.computed(LAYER)
    watch.computed(LAYER)
    assert len(taken) == 2


def test_pauses_are_few_while_nothing_waits(make: Callable[..., Watch]) -> None:
    watch = make(turn=lambda: math.inf)
    assert watch.computed(LAYER * 12)[0] == [1, 15, 31, 47]
    watch.lib.cbatch_watch_hurry(watch.pointer)
    assert watch.computed(LAYER * 4)[0] == [1, 15]


@pytest.mark.parametrize("said", [-1.0, math.nan])
def test_turn_breaks_the_graph_off(make: Callable[..., Watch], said: float) -> None:
    assert make(turn=lambda: said).computed(LAYER) == ([1], [0, 1])
