"""Values of every type on their way over the border: what comes out is what went in, to the bit."""

from __future__ import annotations

import inspect
import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import errors
from cbatch.errors import CBatchError, ConfigError, RequestFailedError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import (
    DRAFT_COUNTS,
    BatchOutputChunk,
    BatchResult,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from cbatch.runtime.row_comparison import RowComparison
from cbatch.runtime.step_record import StepRecord, StepRow
from cbatch.stats import EngineStats, Percentiles
from cbatch.worker import wire
from tests.cli.test_sets import VALUES, options_with
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMBERS = st.integers(0, 2**31 - 1)
SECONDS = st.floats(0, 1e9)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
TEXTS = st.text() | st.sampled_from(["", "\0", "a\0b", "\u2028", '"\\', "é\U0001f600", "\x7f\x85"])


def sent(value: object, kind: Any, frames: wire.Frames = "msgpack") -> Any:
    """What arrives of a value."""
    return wire.decode(wire.encode(value, frames), kind, frames)


BOTH = pytest.mark.parametrize("frames", ["lines", "msgpack"])


# ---- to the worker ----


@BOTH
@pytest.mark.parametrize("name", VALUES)
def test_option_is_the_same_on_the_other_side(name: str, frames: wire.Frames) -> None:
    options = RunOptions(pause_every=4) if name == "pause_every" else options_with(name)
    assert wire.heard_options(sent(wire.told_options(options), dict, frames)) == options


FLOATS = st.floats(0, 1)


@BOTH
@settings(max_examples=examples(100))
@given(numbers=st.tuples(FLOATS, FLOATS, st.floats(-1e4, 1e4)), seed=st.integers(0, 2**64 - 1))
def test_numbers_of_options_cross_to_the_bit(
    frames: wire.Frames, numbers: tuple[float, float, float], seed: int
) -> None:
    top_p, xtc, bias = numbers
    stop = ["\0", "\u2028é\U0001f600"]
    options = RunOptions(
        top_p=top_p, xtc_threshold=xtc, logit_bias={7: bias}, seed=seed, stop=stop, cache_key="é"
    )
    assert wire.heard_options(sent(wire.told_options(options), dict, frames)) == options


"""Options that others exclude or need, with a value."""
MESSAGES = st.lists(
    st.builds(
        lambda role, content, name: {"role": role, "content": content, **name},
        st.sampled_from(["system", "user"]),
        st.text(min_size=1) | st.just([{"type": "text", "text": "part"}]),
        st.just({}) | st.just({"name": "Ann", "extra": {"deep": [1, None, 2**60, 0.1]}}),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(100))
@given(
    st.one_of(
        st.builds(lambda m: {"messages": m}, MESSAGES),
        st.builds(lambda t: {"prompt": t}, TEXTS.filter(bool)),
        st.builds(lambda t: {"tokens": t}, st.lists(NUMBERS, min_size=1, max_size=9)),
    ),
    st.text("ab é\n", min_size=1, max_size=9),
)
def test_prompt_is_the_same_on_the_other_side(kind: dict[str, Any], id: str) -> None:
    prompt = BatchPrompt(**kind, id=id, options={"seed": 2**64 - 1})
    for frames in get_args(wire.Frames):
        assert sent(wire.WireItem.of(prompt, id, "name"), wire.WireItem, frames).made() == prompt


@pytest.mark.parametrize(
    "said",
    [
        {"prompt": "a", "id": ""},
        {"prompt": "a", "id": "x\0y"},
        {"prompt": "a", "id": 5},
        {"prompt": "a", "tokens": [1]},
        {"prompt": "a", "options": {"color": "red"}},
        {"prompt": "a", "options": [1]},
        [],
    ],
)
def test_malformed_prompt_is_refused_by_name(said: object) -> None:
    with pytest.raises(CBatchError):
        sent(said, wire.WireItem).made()


@pytest.mark.parametrize("value", [object(), "\ud800", 2**70, {(): 1}.keys()])
def test_value_that_cannot_be_sent_as_it_is_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="only plain values"):
        wire.encode_call({"messages": [{"role": "user", "content": "a", "when": value}]})


@BOTH
def test_whatever_a_worker_says_can_be_read(frames: wire.Frames) -> None:
    said = {"half": "a\ud800", "large": 2**70, "set": {1}, "other": KeyError, "nan": math.nan}
    found = sent(said, dict, frames)
    assert (found["half"], str(found["large"]), found["set"]) == ("a?", str(2**70), [1])


def test_value_that_is_too_deep_or_no_object_is_refused() -> None:
    value: object = 0
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match="only plain values"):
        wire.encode_call(value)
    for frames in get_args(wire.Frames):
        opening = b"[" if frames == "lines" else b"\x91"
        with pytest.raises(ConfigError, match="recursion depth"):
            wire.reader(Any, frames)(opening * 100_000)
        for line in (b"", b"{", b"\xff\xfe", b"[1]", b"null", b"{} {}"):
            with pytest.raises(ConfigError):
                wire.decode(line, dict, frames)


# ---- from the worker ----


def logprobs(depth: int = 1) -> st.SearchStrategy[TokenLogprob]:
    top: st.SearchStrategy[Sequence[TokenLogprob]] = st.just(())
    if depth:
        top = st.lists(logprobs(depth - 1), max_size=2)
    return st.builds(
        TokenLogprob,
        NUMBERS,
        st.binary(max_size=6),
        st.floats(max_value=0.0) | st.sampled_from([math.nan, -math.inf]) | st.just(-0.0),
        top.map(tuple),
    )


def bits(tokens: Sequence[TokenLogprob | None] | None) -> object:
    """Log-probabilities that are equal by their bits alone."""
    return tokens and [
        t
        and (
            t.token_id,
            t.data,
            b"nan" if math.isnan(t.logprob) else struct.pack("<d", t.logprob),
            bits(t.top),
        )
        for t in tokens
    ]


@st.composite
def results(draw: st.DrawFn, n_choices: int = 2) -> BatchResult:
    maybe = st.none() | SECONDS
    gone = errors.CacheError("k", "gone", is_missing=True)
    scored = st.lists(st.none() | logprobs(), max_size=3).map(tuple)
    counts = [draw(NUMBERS) for _ in DRAFT_COUNTS]
    return BatchResult(
        id="x",
        text=draw(TEXTS),
        token_ids=tuple(draw(st.lists(NUMBERS, max_size=5))),
        finish_reason=draw(st.sampled_from(["stop", "length", "window", "tool_calls", "error"])),
        error=draw(st.sampled_from([None, RequestFailedError("it broke é"), gone])),
        usage=Usage(*(draw(NUMBERS) for _ in range(7))),
        timings=Timings(
            draw(SECONDS),
            draw(maybe),
            draw(SECONDS),
            draw(maybe),
            draw(maybe),
            draw(maybe),
            *counts,
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        warnings=tuple(draw(st.lists(TEXTS, max_size=2))),
        tool_calls=draw(st.just(()) | st.just((ToolCall("id", "f", '{"a": "é"}'),))),
        reasoning=draw(TEXTS),
        logprobs=draw(st.none() | st.lists(logprobs(), max_size=3).map(tuple)),
        prompt_logprobs=draw(st.none() | scored),
        stop_reason=draw(st.none() | TEXTS.filter(bool) | NUMBERS),
        choices=tuple(draw(st.lists(results(0), max_size=2))) if n_choices else (),
        choice_probs=draw(st.none() | st.dictionaries(TEXTS, st.floats(0, 1), max_size=2)),
    )


def same(one: BatchResult, other: BatchResult) -> bool:
    """Whether results are equal; errors and NaN are equal to themselves alone."""
    plain = [
        {**{n: getattr(r, n) for n in BatchResult.__slots__ if n not in APART}}
        for r in (one, other)
    ]
    return (
        plain[0] == plain[1]
        and bits(one.logprobs) == bits(other.logprobs)
        and bits(one.prompt_logprobs) == bits(other.prompt_logprobs)
        and same_error(one.error, other.error)
        and len(one.choices) == len(other.choices)
        and all(map(same, one.choices, other.choices))
    )


APART = {"error", "logprobs", "prompt_logprobs", "choices", "origin"}


def same_error(one: BaseException | None, other: BaseException | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        type(one) is type(other)
        and str(one) == str(other)
        and vars(one) == vars(other)
        and same_error(one.__cause__, other.__cause__)
    )


@settings(max_examples=examples(150))
@given(results())
def test_result_is_the_same_on_the_other_side(result: BatchResult) -> None:
    said = sent(wire.told_result(result), BatchResult)
    assert same(wire.heard_result(said, "x", lambda *_: None), result)


@given(
    st.builds(
        BatchOutputChunk,
        st.just("x"),
        TEXTS,
        st.lists(NUMBERS).map(tuple),
        NUMBERS,
        logprobs=st.none() | st.lists(logprobs(), max_size=3).map(tuple),
    )
)
def test_chunk_is_the_same_on_the_other_side(chunk: BatchOutputChunk) -> None:
    found = sent(chunk, BatchOutputChunk)
    assert replace(found, logprobs=None) == replace(chunk, logprobs=None)
    assert bits(found.logprobs) == bits(chunk.logprobs)


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CBatchError)
]


def made(kind: type[CBatchError]) -> CBatchError:
    """An error of a class, with a value for each that it asks for."""
    values: dict[str, Any] = {"int": 7, "float": 0.5, "str": "x", "Path": "x", "Sequence[str]": ()}
    if kind.__init__ in (Exception.__init__, ValueError.__init__):
        return kind("it broke")
    asked = [*inspect.signature(kind.__init__).parameters.values()][1:]
    return kind(*(values[p.annotation] for p in asked if p.default is p.empty))


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_every_class_keeps_its_type_words_and_numbers(kind: type[CBatchError]) -> None:
    error = made(kind)
    error.__cause__ = errors.DecodeError(-3)
    error.__cause__.__cause__ = OSError("the disk is gone")
    for frames in get_args(wire.Frames):
        assert same_error(sent(error, CBatchError, frames), error)


class UnknownError(Exception):
    """Of somebody else."""


@pytest.mark.parametrize(
    "foreign",
    [UnknownError("it broke"), KeyboardInterrupt(), UnicodeDecodeError("utf-8", b"a", 0, 1, "no")],
)
def test_error_and_cause_of_another_class_are_told_by_their_names(foreign: BaseException) -> None:
    error = RequestFailedError("no")
    error.__cause__ = foreign
    for found in (sent(foreign, CBatchError), sent(error, CBatchError).__cause__):
        assert type(found) is RequestFailedError
        assert type(foreign).__name__ in str(found)


# ---- figures ----


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(SECONDS, st.integers(1, 5)), max_size=9), st.integers(0, 99))
def test_statistics_are_the_same_on_the_other_side(
    counted: Sequence[tuple[float, int]], n: int
) -> None:
    stats = EngineStats(n_steps=n, decode_s=n / 7, n_finished={"length": n, "error": 1})
    for seconds, times in counted:
        stats.queue_s.add(seconds, times)
        stats.itl_s.add(seconds / 3, times)
    found = sent(stats, EngineStats)
    assert figures(found) == figures(stats)
    found.add(stats)
    assert (found.n_steps, found.queue_s.n) == (2 * n, 2 * stats.queue_s.n)
    assert found.n_finished == {"length": 2 * n, "error": 2}
    for percent in (0, 50, 99):
        assert found.queue_s.at(percent) == stats.queue_s.at(percent)


def figures(stats: EngineStats) -> dict[str, object]:
    values = {name: getattr(stats, name) for name in EngineStats.__slots__}
    return {
        name: value.buckets() if isinstance(value, Percentiles) else value
        for name, value in values.items()
    }


@given(st.lists(st.builds(StepRow, NUMBERS, TEXTS, NUMBERS, NUMBERS, NUMBERS), max_size=3), SECONDS)
def test_record_of_a_step_is_the_same_on_the_other_side(
    rows: list[StepRow], start_s: float
) -> None:
    times = (0.1, 0.2, 0.3, 1e-9, 0.0, 7.5, 1 / 3)
    record = StepRecord(start_s, 3, 2, 9, 4, -3, *times, tuple(rows), first_s=0.7)
    assert sent(record, StepRecord) == record


@given(ANY_FLOAT, ANY_FLOAT)
def test_comparison_of_rows_is_the_same_to_the_bit(shared: float, single: float) -> None:
    found = sent(RowComparison("x", 1, 7, 2, 5, shared, 6, single), RowComparison)
    assert (found.id, found.slot, found.position, found.n_rows) == ("x", 1, 7, 2)
    assert (found.shared_token, found.single_token) == (5, 6)
    assert [repr(found.shared_logprob), repr(found.single_logprob)] == [repr(shared), repr(single)]
