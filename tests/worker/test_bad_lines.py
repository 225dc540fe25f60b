"""Lines of any kind: each with a number gets one reply, and nothing stops the host or changes other answers."""

from __future__ import annotations

import io
import json
import struct
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError
from cbatch.options import RunOptions
from cbatch.runtime.local import LocalRuntime
from cbatch.worker.framing import N_LINE_MAX, framed, read_frames
from cbatch.worker.host import SessionEnd
from cbatch.worker.outbox import Outbox
from cbatch.worker.service import serve_client
from tests.profiles import examples
from tests.worker.programs import Program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cbatch.response import BatchResult

NEIGHBOUR = {"prompt": "neighbour", "id": "neighbour"}
OWN = {"max_tokens": 20, "seed": 3, "ignore_eos": True}

ITEM = {"prompt": "abc", "id": "x", "options": {"max_tokens": 3, "temperature": 0.5}}
RESULT = {
    "id": "x",
    "token_ids": [65, 66],
    "finish_reason": "length",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "timings": {},
    "seed": 1,
    "origin": 0,
}
MESSAGES: dict[str, dict[str, Any]] = {
    "run": {
        "items": [ITEM],
        "options": {"stop": ["q"], "n": 2},
        "stream": True,
        "by_token": True,
        "seconds": 5,
        "age_s": 0.5,
        "fed": False,
        "may_wait": True,
    },
    "extend": {"prompt": ITEM, "options": {}, "result": RESULT, "n_tokens": 3, "stream": True},
    "stream": {"ids": ["x"]},
    "cancel": {"ids": ["x", "y"], "waiting": True},
    "take_back": {"ids": ["x"]},
    "pause": {"id": "x"},
    "resume": {"id": "x", "n_tokens": 2},
    "compare_rows": {"ids": ["x"]},
    "count": {"prompt": ITEM, "options": {}},
    "tokens": {"prompt": ITEM},
    "token_lists": {"texts": ["ab", ""]},
    "text": {"prompt": ITEM},
    "pieces": {"tokens": [65]},
    "model_facts": {},
    "check": {"prompt": ITEM},
    "check_options": {"options": {"top_k": 3}},
    "slots": {},
    "stats": {},
    "reset_stats": {},
    "record_steps": {"on": True},
    "exactness": {},
    "fingerprint": {},
    "credit": {"bytes": 5},
    "dance": {},
}
RAW = {
    "@deep": "[" * 10_000 + "]" * 10_000,
    "@digits": "9" * 5000,
    "@huge": "1e999",
    "@nan": "NaN",
    "@surrogate": r'"\ud800"',
    "@twice": '1, "n": 2, "n": 3',
}
"""Text of JSON, or what looks like it, that Python's own writer does not write."""

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**53 + 1, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["x", "y", "", "a\0", "x\0" + "0", *RAW]),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["prompt", "id", "messages", "n", "role"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
numbers = st.one_of(st.integers(0, 3), st.sampled_from(["a", ""]), values)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A message with something wrong in it, or nothing; as text, and that may be damaged."""
    op = draw(st.sampled_from([*MESSAGES]))
    message: dict[str, Any] = {"op": op, **MESSAGES[op]}
    if draw(st.booleans()):
        message["n"] = draw(numbers)
    for _ in range(draw(st.integers(0, 2))):
        message = changed(draw, message)
    text = json.dumps(message)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    line = text.encode()
    damage = draw(st.sampled_from(["", "", "", "cut", "bytes", "cr", "twice", "empty", "noise"]))
    at = draw(st.integers(0, len(line)))
    return {
        "": line,
        "cut": line[:at],
        "bytes": line[:at] + b"\xff\x00" + line[at:],
        "cr": line + b"\r",
        "twice": line + line,
        "empty": b"",
        "noise": draw(st.binary(max_size=20)).replace(b"\n", b""),
    }[damage]


def changed(draw: st.DrawFn, value: Any) -> Any:
    """Return a value with a wrong one somewhere inside."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from([*value]))
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [changed(draw, value[0]), *value[1:]]
    return draw(values)


class Numbered(msgspec.Struct):
    """What is read of any line; what else is in it need not be readable."""

    n: Any = None


def numbers_of(lines: list[bytes], kind: Any) -> Counter[str]:
    """Return the numbers that lines are to be answered by, as JSON, where they are read as a kind."""
    found = Counter[str]()
    for line in lines:
        with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            message = msgspec.json.decode(line, type=kind)
            number = message.get("n") if isinstance(message, dict) else getattr(message, "n", None)
            if type(number) is float and number.is_integer() and kind is Numbered:
                number = int(number)
            if type(number) in (int, str):
                found[json.dumps(number)] += 1
    return found


def expected() -> str:
    with Engine(FakeBackend(3, 64)) as engine:
        return engine.submit("neighbour", options=OWN).result().text


TEXT = expected()


@pytest.mark.parametrize("schedule", [None, ScheduleOptions(max_queue=2)], ids=["plain", "limit"])
@settings(max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(wrong=st.lists(lines(), min_size=20, max_size=20))
def test_random_lines_are_answered_and_stop_nobody(
    schedule: ScheduleOptions | None, wrong: list[bytes]
) -> None:
    options = RunOptions(max_tokens=8)
    with Program(FakeBackend(3, 64), schedule=schedule, options=options) as program:
        program.read()
        program.send("run", n="own", items=[NEIGHBOUR], options=OWN)
        for line in wrong:
            program.raw(line)
        found = program.rest()
        assert program.ending is SessionEnd.DONE
        assert [slot.status for slot in program.runtime.slots()] == ["free"] * 3
        assert not [*program.runtime.orders.routes]
    [result] = [r for r in found["results"] if r["id"] == "neighbour"]
    assert result["text"] == TEXT
    told = Counter(json.dumps(number) for number, *_ in found["replies"])
    told['"own"'] -= 1
    assert not numbers_of(wrong, Any) - told
    assert not told - numbers_of(wrong, Numbered)
    bugs = [said for said in found["replies"] if len(said) == 3 and "a bug" in said[2]["message"]]
    bugs += [said for said in found.get("errors", ()) if "a bug" in said["message"]]
    assert bugs == []


def test_request_with_the_id_of_one_that_just_ended_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its id comes when the result is written, before the thread that computes goes on."""
    own = {"max_tokens": 40, "ignore_eos": True}
    again = {"items": [{"prompt": "b", "id": "x"}], "options": own, "paused": True}
    deliver = Outbox.deliver

    def delivered(outbox: Outbox, chunks: Any, results: Sequence[BatchResult]) -> None:
        deliver(outbox, chunks, results)
        if results and not are_known.is_set():
            are_written.set()
            are_known.wait(0.5)  # longer where the second has to wait for this one

    are_written, are_known = threading.Event(), threading.Event()
    monkeypatch.setattr(Outbox, "deliver", delivered)
    with Program(FakeBackend(1, 64)) as program:
        program.read()
        program.send("run", items=[{"prompt": "a", "id": "x"}], options={"max_tokens": 1})
        are_written.wait()
        program.read_until("results")
        assert program.call("run", **again) == ["x"]
        are_known.set()
        [result] = program.rest()["results"]
        assert [slot.status for slot in program.runtime.slots()] == ["free"]
    assert len(result["token_ids"]) == 40


def test_last_number_of_a_wrong_line_is_answered() -> None:
    with Program(FakeBackend(1, 64)) as program:
        program.read()
        program.raw(b'{"op": "dance", "n": [], "n": 2, "n": 3}')
        [(number, _, error)] = program.rest()["replies"]
    assert (number, error["message"][:22]) == (3, "op must be one of run,")


@pytest.mark.slow
def test_line_of_70_mib_is_left_out_by_name() -> None:
    with Program(FakeBackend(1, 64)) as program:
        program.read()
        program.raw(b'{"op": "count", "n": 1, "prompt": {"prompt": "' + b"x" * 70 * 2**20 + b'"}}')
        program.send("count", n=2, prompt={"prompt": "abc"})
        found = program.rest()
    assert N_LINE_MAX < 70 * 2**20
    assert found["replies"] == [[2, 3]]
    [error] = found["errors"]
    assert "too long" in error["message"]


@pytest.mark.parametrize(
    "first",
    [b"", b"\x00\xff", b"[]", b"{", b'{"cbatch": 2.0}', b'{"cbatch": 9}', b'{"cbatch": 2, "x": 1}'],
)
def test_wrong_first_line_is_refused_by_name(first: bytes) -> None:
    with Program(FakeBackend(1, 64), first=first or b"\r") as program:
        said = program.read()
        assert said["cbatch"] == 2
        assert said["error"]["type"] == "ConfigError"
        assert program.rest() == {}
        assert program.ending is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", 0) + b"\x81", "not a frame"),
        (struct.pack("<I", 1) + b"\xc1", "not a frame"),
        (struct.pack("<I", 2) + b"\x91\x01", "not a frame"),
        (struct.pack("<I", N_LINE_MAX + 1) + b"\x81", "at most 67,108,864"),
        (struct.pack("<I", 100) + b"\x81bc", "cut off"),
        (struct.pack("<I", 100), "cut off"),
        (b"\x05\0", "cut off"),
    ],
)
def test_what_is_no_frame_ends_the_input_and_is_told(
    tmp_path: Path, data: bytes, words: str
) -> None:
    run = {"op": "run", "n": 1, "items": [NEIGHBOUR], "options": OWN}
    first = json.dumps({"cbatch": 2, "frames": "msgpack"}).encode()
    source = io.BytesIO(first + b"\n" + framed(msgspec.msgpack.encode(run), "msgpack") + data)
    runtime = LocalRuntime(FakeBackend(3, 64), ScheduleOptions())
    with open(tmp_path / "sink", "w+b") as sink:
        with pytest.raises(ConfigError, match=words):
            serve_client(runtime, source, sink.fileno())
        sink.seek(0)
        _, *frames = map(msgspec.msgpack.decode, read_frames(sink))
    runtime.close()
    found = {kind: values for frame in frames for kind, values in frame.items()}
    assert words in found["errors"][0]["message"]
    assert found["results"][0]["text"] == TEXT
