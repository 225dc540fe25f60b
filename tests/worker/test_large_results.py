"""Results with many log-probabilities: what a client keeps of them is shared, and no frame is long."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from cbatch import ConfigError, Engine
from cbatch.backend.fake import FakeBackend
from cbatch.response import Timings
from cbatch.runtime.output import Origin
from cbatch.runtime.output_size import n_logprobs
from cbatch.worker import connection, wire
from cbatch.worker.framing import FrameSink, read_frames
from cbatch.worker.outbox import N_FRAME_BYTES, Outbox
from tests.places import item, text_of
from tests.runtime.backends import all_results, together
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch import BatchResult

MANY: dict[str, Any] = {
    "max_tokens": 200,
    "ignore_eos": True,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 20,
    "n": 4,
}
SCORED: dict[str, Any] = {**MANY, "n": 2, "max_tokens": 3, "prompt_logprobs": 20}


TIMES = Timings(0.0, None, 0.0, None, None)


def backend() -> FakeBackend:
    return FakeBackend(4, 1024)


def alone(result: BatchResult) -> BatchResult:
    """A result without what differs from run to run."""
    choices = tuple(map(alone, result.choices))
    return replace(result, choices=choices, timings=TIMES)


@pytest.fixture
def told() -> Iterator[list[tuple[int, int]]]:
    """The bytes of each frame that a client reads, and its number of chunks."""
    found: list[tuple[int, int]] = []
    read = connection._read

    def noted(data: bytes) -> wire.Frame:
        frame = read(data)
        found.append((len(data), len(frame.chunks)))
        return frame

    with patch.object(connection, "_read", noted):
        yield found


@pytest.mark.parametrize(
    "options", [MANY, {**MANY, "n": 1}, SCORED, {**MANY, "n": 2, "best_of": 3}]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_large_result_comes_whole_in_short_frames(
    options: dict[str, Any], streamed: bool, told: list[tuple[int, int]]
) -> None:
    prompts = [item(text_of(300), "a", **options), item(text_of(9), "b", max_tokens=5, seed=1)]
    n_sequences = options.get("best_of", options["n"]) + 1
    with Engine(backend()) as here, engine_over(backend()) as there:
        found = []
        for engine in (here, there):
            with together(n_sequences):
                found.append(all_results(engine.run(prompts, streamed=streamed)))
    ours, theirs = found
    is_equal = [*map(alone, theirs)] == [*map(alone, ours)]
    assert is_equal  # all that differs would be long
    assert max(size for size, _ in told) < 2 * N_FRAME_BYTES


def test_long_chunk_comes_in_short_frames(told: list[tuple[int, int]]) -> None:
    echoed = item(text_of(800), "a", **{**MANY, "n": 1, "max_tokens": 3, "echo": True})
    with Engine(backend()) as here, engine_over(backend()) as there:
        ours, theirs = ([*e.run([echoed], streamed=True)] for e in (here, there))
        [result] = all_results(here.run([echoed]))
    for chunks in (ours, theirs):
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == result.token_ids
        assert [t.top for c in chunks for t in c.logprobs or ()] == [
            t.top for t in result.logprobs or ()
        ]
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]
    assert max(size for size, _ in told) < 2 * N_FRAME_BYTES


def test_results_of_one_request_share_its_options() -> None:
    asked = item(
        text_of(3), "a", **{**MANY, "max_tokens": 1}, logit_bias=dict.fromkeys(range(99), 1)
    )
    with engine_over(backend()) as engine:
        [result] = all_results(engine.run([asked]))
        origins = [choice.origin for choice in result.choices]
        [more] = all_results(engine.extend(result.choices[2], 2))
    requests = [origin.request for origin in origins if isinstance(origin, Origin)]
    assert len({id(request.options) for request in requests}) == 1
    assert len({id(request.sampling.logit_bias) for request in requests}) == 1
    assert [request.sampling.seed for request in requests] == [1, 2, 3, 4]
    assert more.seed == 3


def test_streamed_result_shares_the_scores_of_its_chunks() -> None:
    with engine_over(backend()) as engine:
        response = engine.run([item(text_of(3), "a", **{**MANY, "max_tokens": 3})], streamed=True)
        chunks = [*response]
        [result] = all_results(response)
    for i, choice in enumerate(result.choices):
        of_chunks = [t for c in chunks if c.index == i for t in c.logprobs or ()]
        assert [*map(id, choice.logprobs or ())] == [*map(id, of_chunks)]


def test_scores_that_a_result_has_twice_are_told_once() -> None:
    with Engine(backend()) as engine:
        [result] = all_results(engine.run([item(text_of(3), "a", **MANY)]))
    parts, bare = wire.parted(result)
    assert result.logprobs is result.choices[0].logprobs
    assert sum(n_logprobs(part.tokens) for part in parts) == 4 * 200 * 21
    found = wire.joined(bare, parts)
    assert found == result
    assert found.logprobs is found.choices[0].logprobs


def test_echo_that_all_choices_begin_with_is_made_and_told_once() -> None:
    asked = {**MANY, "max_tokens": 2, "echo": True}
    with Engine(backend()) as engine:
        [result] = all_results(engine.run([item(text_of(300), "a", **asked)]))
    parts, bare = wire.parted(result)
    assert sum(n_logprobs(part.tokens) for part in parts) == 1 + 2 * 299 * 21 + 4 * 2 * 21
    found = wire.joined(bare, parts)
    assert repr(found) == repr(result)
    for one in (result, found):
        first, *others = [choice.logprobs or () for choice in one.choices]
        assert all([*map(id, other[:300])] == [*map(id, first[:300])] for other in others)


@pytest.mark.parametrize("n_prompt", [30, 700])  # the second is longer than a part
def test_streamed_echo_of_choices_is_told_once(n_prompt: int, told: list[tuple[int, int]]) -> None:
    asked = item(text_of(n_prompt), "a", **{**MANY, "max_tokens": 9, "echo": True})
    found: list[dict[int, list[Any]]] = []
    with Engine(backend()) as here, engine_over(backend()) as there:
        for engine in (here, there):
            choices: dict[int, list[Any]] = {}
            response = engine.run([asked], streamed=True)
            for chunk in response:
                choices.setdefault(chunk.index, []).extend(chunk.logprobs or ())
                assert len(chunk.logprobs or ()) == len(chunk.token_ids)
            [result] = all_results(response)
            assert [repr(choices[i]) for i in range(4)] == [
                repr([*choice.logprobs]) for choice in result.choices if choice.logprobs
            ]
            found.append(choices)
    assert repr(found[0]) == repr(found[1]) or sorted(found[0]) == sorted(found[1])
    first, *others = [found[1][i] for i in range(4)]
    assert all([*map(id, o[:n_prompt])] == [*map(id, first[:n_prompt])] for o in others)
    n_scores = (
        21 * (2 * n_prompt + 4 * 9) * 2
    )  # of the echo, of the prompt, and as chunks and result
    assert sum(size for size, _ in told) < 60 * n_scores


@pytest.mark.parametrize("n_slots", [4, 1])  # with one they end one after the other
def test_choices_that_nobody_reads_as_they_come_are_told_by_the_result(
    n_slots: int, told: list[tuple[int, int]]
) -> None:
    asked = item(text_of(9), "a", **{**MANY, "max_tokens": 3, "echo": True})
    with (
        Engine(FakeBackend(n_slots, 1024)) as here,
        engine_over(FakeBackend(n_slots, 1024)) as there,
    ):
        found = []
        for engine in (here, there):
            response = engine.run([asked])
            all_results(response)
            found.append(sorted((c.index, c.text, c.token_ids) for c in response))
    assert sum(n_chunks for _, n_chunks in told) == 0
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_part_of_no_choice_is_refused() -> None:
    with Engine(backend()) as engine:
        [result] = all_results(engine.run([item(text_of(3), "a", max_tokens=1)]))
    with pytest.raises(ConfigError, match="parts of choices"):
        wire.joined(result, [wire.ResultPart("a", [0], of_prompt=False, tokens=[])])


@pytest.mark.parametrize("frames", ["lines", "msgpack"])
@pytest.mark.parametrize("text", ["text", "half a pair: \ud800"])
def test_other_client_gets_a_large_result_whole(frames: wire.Frames, text: str) -> None:
    with Engine(backend()) as engine:
        [result] = all_results(
            engine.run([item(text_of(300), "a", **{**SCORED, "max_tokens": 200})])
        )
    result = replace(result, text=text)
    frame: dict[str, Any] = {"results": [result], "replies": [(1, None)]}
    told = {**frame, "results": [wire.told_result(result)]}
    read = wire.reader(Any, frames)
    is_equal = read(wire.encode_frame(frame, frames)) == read(wire.encode(told, frames))
    assert is_equal  # all that differs would be long


def test_no_piece_of_an_encoded_result_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, n_told = wire._ENCODERS["lines"], list[int]()

    def noted(value: Any) -> bytes:
        n_told.append(n_logprobs(value) if isinstance(value, tuple) else 0)
        return encode(value)

    monkeypatch.setattr(wire, "_ENCODERS", {"lines": noted})
    with Engine(backend()) as engine:
        [result] = all_results(engine.run([item(text_of(3), "a", **MANY)]))
    wire.encode_frame({"results": [result]}, "lines")
    assert sum(n_told) == 5 * 200 * 21
    assert max(n_told) < 2 * wire.N_PART


def test_question_is_answered_between_the_parts_of_a_result() -> None:
    with Engine(backend()) as engine:
        [result] = all_results(engine.run([item(text_of(3), "a", **MANY)]))
    read, write = os.pipe()
    outbox = Outbox(FrameSink(write, "msgpack"), print, takes_parts=True)
    outbox.deliver([], [result])  # more than the pipe takes
    outbox.put("replies", (1, None), may_pass=True)
    outbox.put("replies", (2, None))
    outbox.put("replies", (3, None), may_pass=True)
    closing = threading.Thread(target=outbox.close)
    closing.start()
    told: list[Any] = []
    with open(read, "rb") as source:
        frames = read_frames(source)
        while 3 not in told:
            found = wire.decode(next(frames), wire.Frame)
            told += ["part"] * len(found.parts) + ["result"] * len(found.results)
            told += [answer.n for answer in found.replies]
    closing.join()
    os.close(write)
    assert told.index("part") < told.index(1) < told.index("result") < told.index(2)
