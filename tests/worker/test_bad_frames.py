"""Frames of any kind: a worker that sends what cannot be read is dead; requests end once, and calls are answered."""

from __future__ import annotations

import io
import math
import random
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.msgpack import decode, encode

import cbatch
from cbatch import BatchResult, CBatchError, Engine, EngineClosedError
from cbatch.worker.client import Workers
from cbatch.worker.framing import N_FRAME_MAX, read_frames
from tests.profiles import examples
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

READY = {"cbatch": 2, "parallel": 2, "n_window": 64}
N_FRAMES = 25
"""Most frames of one worker."""

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "context_shifts": 0}
TIMES = {"queue_s": 0.1, "ttft_s": 0.2, "total_s": 1, "prompt_tps": None, "generation_tps": 3.5}


def result(id: str, **more: Any) -> dict[str, Any]:
    said = {"id": id, "text": "hi", "token_ids": [1, 2], "finish_reason": "length", "seed": 1}
    return {**said, "usage": USAGE, "timings": TIMES, "error": None, "origin": 0, **more}


def chunk(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "text": "a", "token_ids": [1], **more}


def token(id: int, logprob: float, top: Any = ()) -> dict[str, Any]:
    return {"token_id": id, "data": b"a", "logprob": logprob, "top": top}


FRAMES: list[dict[str, Any]] = [
    {},
    {"unknown kind": [1]},
    {"admitted": ["0", "1", "9"]},
    {"chunks": [chunk("0"), chunk("9")]},
    {
        "chunks": [chunk("1", text="", token_ids=[], finish_reason="stop")],
        "results": [result("1", finish_reason="stop")],
    },
    {"results": [result("9"), result("2", logprobs=[token(1, math.nan, [token(2, -math.inf)])])]},
    {"results": [result("0", choices=[result("0")], stop_reason="x", reasoning="r")]},
    {"results": [result("0"), result("0", text="again")]},
    {"results": [result("2", tool_calls=[{"id": "c", "name": "f", "arguments": "{}"}])]},
    {"results": [result("1", error={"type": "PromptError", "message": "no", "values": {"n": 1}})]},
    {"logs": [["cbatch.far", 10, "a line", {"n": 1}]]},
    {"errors": [{"type": "ConfigError", "message": "a line was wrong"}]},
    {"died": [{"type": "EngineClosedError", "message": "it is over"}]},
    {"replies": [[0, ["0", "1", "2"]], [99, 5], ["x", 1]]},
    {"replies": [[1, 7]]},
    {"replies": [[1, None, {"type": "NoSuchError", "message": "m", "cause": None}]]},
]
WRONG: list[Any] = [
    *(None, True, -1, 2**64 - 1, 0.5, "", "x", [], [[]], [None], {}, {"id": []}, {"type": 1}),
    *(
        [1, 2, 3, 4, 5, 6],
        "0",
        ["0"],
        [["0"]],
        [{"id": "0"}],
        b"\xff",
        [{"id": "0", "text": 1}],
        {"chunks": 1},
    ),
]
RAW = [b"", b"{", b"\x81", b"\xc0", b"\xa1x", b"\xff\xfe", b"\0" * 9, b"\x91" * 3000]
RAW += [b"\x81\xa6chunks" + b"\x91" * 3000, b"\x81\xa4logs\xdd\xff\xff\xff\xff"]


def changed(chance: random.Random, value: Any) -> Any:
    """Return a value with a wrong one somewhere inside."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice([*value])
        if chance.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        i = chance.randrange(len(value))
        return [*value[:i], changed(chance, value[i]), *value[i + 1 :]]
    return chance.choice(WRONG)


def frame(chance: random.Random) -> bytes:
    """Return a frame with its length: mostly whole, else wrong inside, or no frame at all."""
    kind = chance.random()
    if kind < 0.02:
        data = chance.choice(RAW)
    else:
        said = chance.choice(FRAMES)
        data = encode(changed(chance, said) if kind < 0.2 else said)
    if kind > 0.995:
        data = data[: chance.randrange(len(data) + 1)]
    n_bytes = len(data)
    if 0.98 < kind < 0.985:  # what follows is read in the wrong places
        n_bytes = chance.choice([0, n_bytes + 1, max(0, n_bytes - 1), N_FRAME_MAX + 1, 2**32 - 1])
    return struct.pack("<I", n_bytes) + data


class FramesLink:
    """A worker that sends given bytes, once it has been sent some lines, and is gone then."""

    def __init__(self, data: bytes, first: object = READY, n_lines: int = 0) -> None:
        self._data, self._first, self._n_lines = data, first, n_lines
        self._came = threading.Condition()
        self._replies: list[bytes] = []
        self.n_taken = 0
        self.n_ends = 0

    def send(self, line: bytes) -> None:
        said = decode(line[4:])
        with self._came:
            self._n_lines -= 1
            if said["op"] == "run":  # its caller waits for the answer
                ids = [item["id"] for item in said["items"]]
                self._replies.append(encode({"replies": [[said["n"], ids]]}))
            self._came.notify_all()

    def frames(self) -> Iterator[bytes]:
        yield encode(self._first)
        while self._n_lines > 0 or self._replies:
            with self._came:
                assert self._came.wait_for(lambda: self._n_lines <= 0 or self._replies, PATIENCE_S)
                replies, self._replies = self._replies, []
            yield from replies
        for found in read_frames(io.BytesIO(self._data)):
            self.n_taken += 1
            yield found

    def kill(self, why: str = "") -> None:
        with self._came:
            self._n_lines = 0
            self._came.notify_all()

    def is_stopped(self) -> bool:
        return False

    def end(self) -> str:
        self.n_ends += 1
        return "gone"


def engine_at(link: FramesLink) -> Engine:
    return Engine(opener=lambda stop: Workers([lambda: link], can_replace=False, is_stopped=stop))


def count(engine: Engine) -> object:
    """Put a question to a worker that may say anything; the answer is a number, or a typed error."""
    try:
        return engine.count_tokens("x")
    except CBatchError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_frames_end_every_request_once(seed: int) -> None:
    chance = random.Random(seed)
    n_left = examples(10_000)
    while n_left > 0:
        data = b"".join(frame(chance) for _ in range(N_FRAMES))
        link = FramesLink(data, n_lines=2)
        with engine_at(link) as engine:
            responses = []
            with suppress(EngineClosedError):  # the frames have ended the engine already
                responses += [engine.run(["a", "b"])]
                responses += [engine.run(["c"])]
            if chance.random() < 0.5:
                asking = threading.Thread(target=lambda e=engine: check_count(count(e)))
                asking.start()
            else:
                asking = None
            for response in responses:
                check_response(response, chance)
            link.kill()
            if asking is not None:
                asking.join(PATIENCE_S)
                assert not asking.is_alive()
        assert link.n_ends == 1
        n_left -= max(1, link.n_taken)


def check_count(found: object) -> None:
    assert isinstance(found, CBatchError) or type(found) is int


def check_response(response: cbatch.BatchResponse, chance: random.Random) -> None:
    """Read a response to its end: each item has one result, of the right types."""
    if chance.random() < 0.5:
        ends = [c for c in response if c.finish_reason is not None]
        assert sorted({chunk.id for chunk in ends}) == sorted(response.ids)
        assert len(ends) == len({(chunk.id, chunk.index) for chunk in ends})
    try:
        results = response.results(timeout=PATIENCE_S)
    except cbatch.BatchError as error:
        results = error.results
    assert [r.id for r in results] == response.ids
    for found in results:
        check_result(found)


def check_result(found: BatchResult) -> None:
    assert type(found.text) is str
    assert all(type(token) is int for token in found.token_ids)
    assert found.error is None or isinstance(found.error, CBatchError)
    assert type(found.usage.prompt_tokens + found.usage.completion_tokens) is int
    assert isinstance(found.timings.total_s, int | float)


@pytest.mark.parametrize(
    "first",
    [*WRONG, {**READY, "cbatch": 3}, {**READY, "parallel": 0}, {**READY, "n_window": "64"}],
)
def test_first_frame_of_any_kind_gives_a_typed_error(first: object) -> None:
    link = FramesLink(b"", first)
    engine = engine_at(link)
    with pytest.raises(cbatch.EngineError, match="worker"):
        engine.open()
    engine.close()
    assert link.n_ends == 1


def test_worker_of_another_version_is_refused_by_its_number() -> None:
    engine = engine_at(FramesLink(b"", {**READY, "cbatch": 3}))
    with pytest.raises(
        cbatch.EngineError, match="speaks version 3 of the protocol, this cbatch version 2"
    ):
        engine.open()
    engine.close()


@pytest.mark.parametrize(
    "said",
    [
        {"chunks": [chunk("0", text=5)]},
        {"chunks": [chunk("0", index=7)]},
        {"results": [result("0", usage={"prompt_tokens": "1", "completion_tokens": 1})]},
        {"results": [result("0", choices=[result("0")] * 2)]},
        {"results": [result("0", finish_reason="soon")]},
        {"results": [result("0"), {"id": "1"}]},
        {"replies": [[2, "many"]]},
    ],
    ids=str,
)
def test_worker_that_says_what_cannot_be_is_dead_for_all_it_has(said: dict[str, Any]) -> None:
    data, more = encode(said), encode({"results": [result("1")]})
    link = FramesLink(b"".join(struct.pack("<I", len(d)) + d for d in (data, more)), n_lines=3)
    with engine_at(link) as engine:
        response = engine.run(["a"])
        other = engine.run(["b"])
        assert isinstance(count(engine), CBatchError)
        for each in (response, other):
            with pytest.raises(cbatch.BatchError) as caught:
                each.results(timeout=PATIENCE_S)
            [found] = caught.value.results
            assert "cannot be read" in str(found.error)
    assert link.n_taken == 1
