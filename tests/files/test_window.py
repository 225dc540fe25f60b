"""The window: like beginnings together, long before short, nobody forgotten, bounded."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.files.input.item import Item
from cbatch.files.window import Entry, ItemWindow, beginning, length, n_held
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterable


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


def entry(i: int, text: str = "", n_chars: int = 1, n_held: int = 0) -> Entry:
    prompt = BatchPrompt(prompt=f"{text or i} " + "." * 80)
    return Entry(Item(i, "", str(i), prompt), prompt, b"", n_chars, n_held)


def filled(entries: Iterable[Entry], n_max: int = 100) -> ItemWindow:
    window = ItemWindow(n_max)
    for e in entries:
        window.add(e)
    return window


def taken(window: ItemWindow) -> list[int]:
    return [window.take().item.number for _ in range(len(window))]


@pytest.mark.parametrize(("has_ended", "expected"), [(False, [2, 0, 3, 1]), (True, [3, 2, 1, 0])])
def test_like_beginnings_go_together_until_the_end_the_longest_first(
    has_ended: bool, expected: list[int]
) -> None:
    window = filled(entry(i, "abab"[i], n_chars=i) for i in range(4))
    if has_ended:
        window.end()
    assert taken(window) == expected


def test_nobody_is_passed_by_more_than_twice_the_window() -> None:
    window = filled([entry(0, "a", n_chars=1)], n_max=5)
    n_passed = 0
    while True:
        while window.has_room:
            window.add(entry(n_passed + 1, "a", n_chars=9))
        if window.take().item.number == 0:
            break
        n_passed += 1
    assert n_passed <= 10


def test_empty_window_has_room_whatever_its_bounds() -> None:
    window = ItemWindow(2, max_held=1)
    assert window.has_room
    window.add(entry(0, n_held=100))
    assert not window.has_room
    window.take()
    assert window.has_room
    with pytest.raises(IndexError):
        window.take()


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9), st.booleans()), max_size=200),
)
def test_every_item_comes_out_once(n_max: int, items: list[tuple[str, int, bool]]) -> None:
    window, out = ItemWindow(n_max), list[int]()
    for i, (text, n_chars, takes) in enumerate(items):
        while not window.has_room or (takes and len(window)):
            out.append(window.take().item.number)
            takes = False
        window.add(entry(i, text, n_chars))
        assert len(window) <= n_max
    window.end()
    out += taken(window)
    assert sorted(out) == list(range(len(items)))


@pytest.mark.usefixtures("new_objects_only")
def test_window_keeps_nothing_of_what_it_gave_out() -> None:
    window = ItemWindow(4)
    for i in range(40):  # the first of a full window is the shortest: it goes late, out of turn
        window.add(entry(i, "a", n_chars=i))
        if not window.has_room:
            window.take()
    gc.collect()
    assert sum(isinstance(found, Entry) for found in gc.get_objects()) == len(window)


def test_beginning_is_the_system_message_or_the_first_characters() -> None:
    system = {"role": "system", "content": "s" * 100}
    user = {"role": "user", "content": "u" * 100}
    assert beginning(BatchPrompt([system, user])) == "s" * 100
    assert beginning(BatchPrompt([user])) == "u" * 64
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    called = {"role": "assistant", "tool_calls": calls}
    assert beginning(BatchPrompt([called, user])) == ""
    assert beginning(BatchPrompt(tokens=range(99))) == tuple(range(16))


def test_length_counts_the_longest_answer_too() -> None:
    assert length(BatchPrompt(prompt="abc"), RunOptions(max_tokens=5)) == 3 + 20
    assert length(BatchPrompt(tokens=[1, 2]), RunOptions()) == 8


def test_picture_is_held_but_is_no_text() -> None:
    parts = [PICTURE, {"type": "text", "text": "What is it?"}]
    prompt = BatchPrompt([{"role": "user", "content": parts}])
    assert beginning(prompt) == "What is it?"
    assert length(prompt, RunOptions()) == len("What is it?")
    assert 1000 < n_held(Item(1, "", "1", prompt)) < 1200
    assert n_held(Item(1, "", "1", prompt, weight=5000)) == 5000


@pytest.mark.parametrize(
    ("extra", "n"),
    [
        (None, 0),
        ({"a": "four", "b": b"more", "c": {"d": ["x" * 9, None, 1]}}, 4 + 4 + 9),
        ({"vector": [0.5] * 10}, 40),
    ],
)
def test_item_holds_its_row_too(extra: object, n: int) -> None:
    assert n_held(Item(1, "", "1", BatchPrompt(prompt="abc"), None, extra)) == 3 + n
    assert n_held(Item(1, "", "1", None, None, extra)) == n
