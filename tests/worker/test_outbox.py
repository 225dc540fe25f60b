"""What waits for a reader that is slow, or takes only what it has granted."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchOutputChunk, BatchPrompt, BatchResult, RunOptions
from cbatch.errors import ConfigError, GrammarError
from cbatch.response import Timings, TokenLogprob, Usage
from cbatch.runtime.ids import own_id
from cbatch.runtime.interface import Submission
from cbatch.worker.framing import FrameSink
from cbatch.worker.outbox import N_ANSWER_BYTES_MAX, N_ANSWERS_MAX, N_FRAME_BYTES, Outbox
from tests.runtime.backends import PATIENCE_S, GatedBackend
from tests.worker.programs import Program, add, strict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

N_TOKENS = 5000


class Piped:
    """An outbox that writes lines to a pipe."""

    def __init__(self, credit: int | None = None) -> None:
        self.fd, self._sink = os.pipe()
        self.left = threading.Event()
        self.outbox = Outbox(FrameSink(self._sink, "lines"), self.left.set, credit)
        self._pieces = b""

    def deliver(self, *ids: str, result: bool = False, n_tokens: int = N_TOKENS) -> None:
        """Deliver tokens of requests one by one, and their results."""
        for i in range(n_tokens):
            self.outbox.deliver([BatchOutputChunk(id, f"{i} ", (i,)) for id in ids], [])
        if result:
            self.outbox.deliver([], [result_of(id) for id in ids])

    def read(self, n_bytes: int = 2**16) -> dict[str, Any]:
        """Return the next frame, read in pieces of some bytes."""
        while b"\n" not in self._pieces:
            piece = os.read(self.fd, n_bytes)
            assert piece, "the outbox has ended"
            self._pieces += piece
        line, _, self._pieces = self._pieces.partition(b"\n")
        return strict(line)

    def rest(self) -> dict[str, list[Any]]:
        """Close the outbox; return what it says, by kind."""
        closing = threading.Thread(target=self.outbox.close)
        closing.start()
        with open(self.fd, "rb", closefd=False) as source:
            threading.Thread(target=self._hang_up_after, args=(closing,)).start()
            found: dict[str, list[Any]] = {}
            for line in (self._pieces + source.read()).splitlines():
                add(found, strict(line))
        return found

    def _hang_up_after(self, closing: threading.Thread) -> None:
        closing.join()
        os.close(self._sink)


@contextmanager
def piped(credit: int | None = None) -> Iterator[Piped]:
    made = Piped(credit)
    yield made
    os.close(made.fd)


def result_of(id: str) -> BatchResult:
    times = Timings(0.0, None, 0.0, None, None)
    return BatchResult(id, "text", (1,), "stop", None, Usage(1, 1), times, 0)


def tokens_of(chunks: Sequence[Any], id: str) -> list[int]:
    return [t for chunk in chunks if chunk["id"] == id for t in chunk["token_ids"]]


def test_chunks_that_wait_for_credit_are_one_for_each_answer() -> None:
    with piped(credit=1) as reader:
        reader.deliver("a", "b", n_tokens=1)
        first = reader.read()["chunks"]
        reader.deliver("a", "b", "c")
        reader.outbox.grant(10 * N_FRAME_BYTES)
        found = reader.rest()["chunks"]
    assert len(found) <= 4  # what was left of the first, and one of each
    for id in ("a", "b"):
        assert tokens_of([*first, *found], id) == [0, *range(N_TOKENS)]
    [last] = [chunk for chunk in found if chunk["id"] == "c"]
    assert last["text"] == "".join(f"{i} " for i in range(N_TOKENS))


@pytest.mark.parametrize("value", [[7] * (N_FRAME_BYTES // 8), "x" * N_FRAME_BYTES])
def test_large_reply_is_the_last_of_its_frame(value: Any) -> None:
    with piped(credit=0) as reader:
        reader.outbox.put("replies", (0, value), (1, value), (2, None))
        frames = [reader.read() for _ in range(3)]
        assert reader.rest() == {}
    assert [[n for n, _ in frame["replies"]] for frame in frames] == [[0], [1], [2]]


def test_reader_that_grants_a_byte_at_a_time_gets_all_in_order() -> None:
    with piped(credit=1) as reader:
        reader.deliver("a", "b", result=True, n_tokens=100)
        found: dict[str, list[Any]] = {}
        n_frames = 0
        while len(found.get("results", ())) < 2:
            frame = reader.read()
            n_frames += 1
            assert sum(map(len, frame.values())) == 1, "one value uses up the byte"
            add(found, frame)
            for _ in range(len(json.dumps(frame, separators=(",", ":"))) + 1):
                reader.outbox.grant(1)
        assert reader.rest() == {}
    assert tokens_of(found["chunks"], "a") == tokens_of(found["chunks"], "b") == [*range(100)]
    assert n_frames >= 4


def test_reply_comes_behind_output_but_does_not_wait_for_credit() -> None:
    with piped(credit=1) as reader:
        reader.deliver("a", n_tokens=1)
        assert "chunks" in reader.read()
        reader.deliver("a", result=True)
        reader.outbox.put("replies", (1, "x"))
        assert reader.read() == {"replies": [[1, "x"]]}
        reader.outbox.grant(10 * N_FRAME_BYTES)
        reader.outbox.put("replies", (2, "y"))
        found: dict[str, list[Any]] = {}
        while "replies" not in found:
            frame = reader.read()
            add(found, frame)
        assert [*found] == ["chunks", "results", "replies"]
        reader.rest()


def test_id_is_taken_until_its_result_is_written() -> None:
    with piped(credit=1) as reader:
        reader.deliver("a", n_tokens=1)
        reader.read()
        reader.outbox.deliver([], [result_of("a")])
        assert reader.outbox.holds_result_of("a")
        reader.outbox.grant(10_000)
        reader.read()
        assert not reader.outbox.holds_result_of("a")
        reader.rest()


def test_value_that_json_does_not_have_becomes_null() -> None:
    with piped() as reader:
        reader.outbox.put("replies", (1, {"nan": math.nan, "inf": [-math.inf], "other": {1}}))
        [[_, value]] = reader.rest()["replies"]
    assert value == {"nan": None, "inf": [None], "other": [1]}


def test_reader_that_leaves_is_noticed_and_nothing_is_kept() -> None:
    reader = Piped()
    os.close(reader.fd)
    reader.deliver("a", n_tokens=10)
    assert reader.left.wait(PATIENCE_S)
    reader.deliver("a", result=True, n_tokens=10)
    reader.outbox.close()


def test_reader_that_takes_nothing_at_the_end_is_left() -> None:
    reader = Piped()
    reader.outbox.deliver([BatchOutputChunk("a", "x" * 2**20, ())], [])
    assert os.read(reader.fd, 1)  # it writes, and the pipe will be full
    reader.outbox.close(patience_s=0.01)
    os.close(reader.fd)
    assert reader.left.wait(PATIENCE_S)


LONG = "x" * (N_ANSWER_BYTES_MAX // 4)


@pytest.mark.parametrize("reply", [(LONG, None), (1, [LONG]), (1, None, ConfigError(LONG))])
def test_long_numbers_texts_and_errors_count_as_long_replies(reply: Any) -> None:
    with piped() as reader:
        reader.outbox.put("replies", *[reply] * 6)
        waiting = threading.Thread(target=reader.outbox.wait_for_room)
        waiting.start()
        waiting.join(0.05)  # nothing tells that it waits
        assert waiting.is_alive()
        reader.rest()
        waiting.join()


@pytest.mark.parametrize(
    ("n", "n_chars"), [(6, N_ANSWER_BYTES_MAX // 4), (N_ANSWERS_MAX + 100, 1000)]
)
def test_no_more_lines_are_read_while_many_or_long_replies_wait(n: int, n_chars: int) -> None:
    with piped() as reader:
        for i in range(n):
            reader.outbox.put("replies", (i, "x" * n_chars))
        waiting = threading.Thread(target=reader.outbox.wait_for_room)
        waiting.start()
        if n == 6:  # the pipe takes none of them
            waiting.join(0.05)  # nothing tells that it waits
            assert waiting.is_alive()
        numbers: list[int] = []
        while len(numbers) < n:
            numbers += [number for number, _ in reader.read(2**20)["replies"]]
        waiting.join()
        reader.rest()
    assert numbers == [*range(n)]


def test_admitted_requests_are_told_later_without_credit() -> None:
    with piped(credit=1) as reader:
        reader.outbox.put_at_once("admitted", ["a"])
        reader.outbox.put_at_once("admitted", ["b"])
        assert reader.read() == {"admitted": ["a"]}
        assert reader.rest() == {"admitted": ["b"]}


class Awaited:
    """The target of a request of the test's own."""

    is_streamed = wants_tokens = False

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def deliver(self, chunks: object, results: object) -> None:
        if results:
            self.has_ended.set()

    def expect_choices(self, n: int) -> None:
        pass


@pytest.mark.parametrize("hello", [{}, {"credit": 1}], ids=["never reads", "grants nothing"])
def test_engine_goes_on_where_nobody_reads_and_all_is_there_at_the_end(
    hello: dict[str, Any],
) -> None:
    n_requests = 100
    backend = GatedBackend(1, 128, hold_at=1)
    with Program(backend, **hello) as program:
        items = [{"prompt": "a", "id": f"request {i}"} for i in range(n_requests)]
        options = {"max_tokens": 60, "ignore_eos": True}
        program.send("run", items=items, options=options, stream=True)
        program.read()
        program.send("count", n=1, prompt={"prompt": "x"})
        program.read_until("replies")
        backend.wait_until_held()
        backend.release()
        wait_for_turn(program)
        found = program.rest()
    assert len(found["results"]) == n_requests
    n_chunks = 0
    for result in found["results"][-50:]:  # the pipe takes some of the first
        texts = [c["text"] for c in found["chunks"] if c["id"] == result["id"]]
        assert "".join(texts) == result["text"]
        n_chunks += len(texts)
    assert n_chunks <= 50 + 2, "one is cut where a frame was being written, or more"


def wait_for_turn(program: Program) -> None:
    """Wait until a request of the test's own has had its turn, behind all that came before."""
    target = Awaited()
    prompt, id = BatchPrompt(prompt="last"), own_id("own")
    options = RunOptions(max_tokens=1)
    program.runtime.add(Submission([prompt], [id], [""], options, math.inf, target))
    assert target.has_ended.wait(PATIENCE_S)


def test_chunks_that_nobody_reads_are_joined_with_their_parts() -> None:
    reader = Piped(credit=0)
    scores = [TokenLogprob(token, b"a", -1.0) for token in range(4)]
    parts = (("a ", "a ", ""), ("<x", "", ""), ("b", "", "b"), ("c", "c", ""))
    for (text, content, reasoning), score in zip(parts, scores, strict=True):
        chunk = BatchOutputChunk(
            "a", text, (score.token_id,), 0, None, content, reasoning, logprobs=(score,)
        )
        reader.outbox.deliver([chunk], [])
    [joined] = reader.rest()["chunks"]
    assert (joined["text"], joined["token_ids"]) == ("a <xbc", [*range(4)])
    assert (joined["content"], joined["reasoning"]) == ("a c", "b")
    assert [(t["token_id"], t["data"], t["logprob"]) for t in joined["logprobs"]] == [
        (token, "YQ==", -1.0) for token in range(4)
    ]


def test_joined_chunks_have_the_end_of_the_last_one() -> None:
    reader = Piped(credit=0)
    last = BatchOutputChunk("a", "c", (3,), 0, "error", "c", error=GrammarError("regex", "no"))
    for chunk in (*[BatchOutputChunk("a", "b", (1,))] * 2, last):
        reader.outbox.deliver([chunk], [])
    [joined] = reader.rest()["chunks"]
    assert (joined["text"], joined["token_ids"]) == ("bbc", [1, 1, 3])
    assert (joined["finish_reason"], joined["error"]["type"]) == ("error", "GrammarError")
