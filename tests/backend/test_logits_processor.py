"""A caller's own processor of logits: what it gets, what it changes, and what becomes of it where it fails."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llama_cpp import LogitsProcessorList

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.errors import (
    ConfigError,
    InsideStepError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from tests.kinds import chosen, engine_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.engine import Engine
    from cbatch.messages import Prompt
    from cbatch.response import BatchResult

    Row = NDArray[np.float32]
    Ids = NDArray[np.int32]

OPTIONS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "seed": 1, "temperature": 0}
PROMPTS = ["a", "neighbour", "another one", "b"]
FORCED = 65


def force(token_ids: Ids, logits: Row) -> None:
    logits[:] = -np.inf
    logits[FORCED] = 0


def nothing(token_ids: Ids, logits: Row) -> None:
    """Change nothing."""


def with_own(processor: Any, **more: Any) -> BatchPrompt:
    return BatchPrompt(prompt="mine", id="mine", options={"logits_processor": processor, **more})


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"exact": True},
    "pool": {"kv": "unified"},
}


@pytest.fixture
def fake() -> Iterator[Engine]:
    with engine_on(FakeBackend(4, 256, 64), options=OPTIONS) as engine:
        yield engine


@pytest.fixture(
    scope="module", params=["fake", *(pytest.param(m, marks=pytest.mark.real) for m in MODELS)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine on the fake backend, and on the model that ships in each way to compute it."""
    if request.param == "fake":
        with engine_on(FakeBackend(6, 256, 64), options=OPTIONS) as engine:
            yield engine
        return
    settings: dict[str, Any] = {
        "parallel": 6,
        "ctx_per_seq": 256,
        "n_threads": 1,
        "options": OPTIONS,
    }
    path = request.getfixturevalue("test_model")
    with cbatch.load(path, **settings, **MODELS[request.param]) as engine:
        yield engine


def answer(engine: Engine, processor: Any, **more: Any) -> BatchResult:
    [result] = answers(engine, with_own(processor, **more))
    return result


def answers(engine: Engine, *prompts: BatchPrompt | str) -> list[BatchResult]:
    given: list[Prompt] = [*prompts]
    return engine.run(given).results(return_errors=True)


def what(result: BatchResult) -> object:
    return result.token_ids, result.text, result.finish_reason, repr(result.logprobs), result.error


def test_processor_that_changes_nothing_changes_no_bit(engine: Engine) -> None:
    options = {"temperature": 0.9, "repeat_penalty": 1.2, "logprobs": 3}
    assert what(answer(engine, nothing, **options)) == what(answer(engine, None, **options))


def test_processor_forces_and_bans_tokens(engine: Engine) -> None:
    plain = answer(engine, None).token_ids

    def ban(token_ids: Ids, logits: Row) -> None:
        logits[[*plain]] = -np.inf

    assert answer(engine, force).token_ids == (FORCED,) * 6
    found = answer(engine, ban).token_ids
    assert len(found) == 6
    assert not {*plain} & {*found}


def test_processor_gets_prompt_and_answer_and_a_row_of_its_own(engine: Engine) -> None:
    seen: list[list[int]] = []
    kept: list[Row] = []

    def look(token_ids: Ids, logits: Row) -> None:
        assert (token_ids.dtype.name, logits.dtype.name) == ("int32", "float32")
        assert (token_ids.ndim, logits.shape) == (1, (engine.model_facts.n_vocab,))
        assert logits.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            token_ids[0] = 0
        seen.append(token_ids.tolist())
        kept.append(logits)

    result = answer(engine, look)
    assert result.error is None
    given = engine.tokenize("mine")
    assert seen[0][-len(given) :] == given
    n_prompt = result.usage.prompt_tokens
    assert seen == [[*seen[0][:n_prompt], *result.token_ids[:i]] for i in range(6)]
    for row in kept:
        row[:] = np.nan  # kept too long: nobody else's memory
    assert answer(engine, None).token_ids == result.token_ids


def test_neighbours_are_the_same_bits(engine: Engine) -> None:
    options = {"temperature": 0.9, "logprobs": 2}
    prompts = [BatchPrompt(prompt=p, options=options) for p in PROMPTS]
    with_force = answers(engine, *prompts[:2], with_own(force), *prompts[2:])
    without = answers(engine, *prompts[:2], with_own(nothing), *prompts[2:])
    for i in (0, 1, 3, 4):
        assert what(with_force[i]) == what(without[i])


def test_returned_rows_count_as_rows_changed_in_place(engine: Engine) -> None:
    def returned(token_ids: Ids, logits: Row) -> Any:
        row = np.full(logits.shape, -np.inf)
        row[FORCED] = 1e300  # of a float64: beyond float32 it would be +∞
        row[FORCED] = 5
        return row

    processors = LogitsProcessorList([lambda _, scores: scores, returned])
    assert answer(engine, processors).token_ids == (FORCED,) * 6
    assert what(answer(engine, LogitsProcessorList())) == what(answer(engine, None))


def test_log_probabilities_are_the_models_own(engine: Engine) -> None:
    plain, forced = answer(engine, None, logprobs=2), answer(engine, force, logprobs=2)
    assert plain.logprobs
    assert forced.logprobs
    if engine.model_facts.path:  # the fake backend makes them up
        assert forced.logprobs[0].top == plain.logprobs[0].top
        assert forced.logprobs[0].logprob < plain.logprobs[0].logprob


def raising(token_ids: Ids, logits: Row) -> None:
    if len(token_ids) % 2:
        raise KeyError("odd")


class Hiding(np.ndarray):
    """An array whose own code fails."""

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        raise KeyError("shape")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError


class OddError(KeyError, metaclass=Nameless):
    """An error that cannot be shown."""


def raising_odd(token_ids: Ids, logits: Row) -> None:
    raise OddError


def emptied(token_ids: Ids, logits: Row) -> None:
    logits.resize(0, refcheck=False)


def leaving(token_ids: Ids, logits: Row) -> None:
    if len(token_ids) % 2:
        sys.exit(3)


def cancelling(token_ids: Ids, logits: Row) -> None:
    raise asyncio.CancelledError


FAILING: dict[str, tuple[Callable[[Ids, Row], Any], str]] = {
    "raises": (raising, "logits_processor raised KeyError: 'odd'"),
    "leaves": (leaving, "logits_processor raised SystemExit: 3"),
    "cancels": (cancelling, "logits_processor raised CancelledError"),
    "shape": (lambda _, row: row[1:], "must return None or a numpy array of .* floats"),
    "rows": (lambda _, row: row[None], "must return None or a numpy array of .* floats"),
    "type": (lambda _, row: row.astype(np.int64), "not an array of shape .* and type int64"),
    "list": (lambda _, row: row.tolist(), "floats, not list"),
    "own code": (lambda _, row: row.view(Hiding), "logits_processor raised KeyError"),
    "odd error": (raising_odd, "logits_processor raised an error that cannot be shown"),
    "emptied": (emptied, "must return None or a numpy array of .* floats"),
    "nan": (lambda _, row: row.__setitem__(3, np.nan), r"left NaN or \+∞"),
    "infinite": (lambda _, row: row + np.inf, r"left NaN or \+∞"),
    "too large": (lambda _, row: row.astype(np.float64) + 1e300, r"left NaN or \+∞"),
    "all banned": (
        lambda _, row: row.fill(-np.inf),
        "every token is ruled out by logits_processor",
    ),
}


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("fake", name) for name in FAILING),
        *(
            pytest.param(kind, name, marks=pytest.mark.real)
            for kind, name in zip(
                ["plain", "exact", "pool"] * 2 + ["plain"],
                ["leaves", "raises", "shape", "own code", "emptied", "nan", "all banned"],
                strict=True,
            )
        ),
    ],
    indirect=["engine"],
)
def test_failing_processor_ends_its_request_alone(engine: Engine, name: str) -> None:
    processor, said = FAILING[name]
    alone = [r.token_ids for r in answers(engine, *PROMPTS[:1], with_own(nothing), *PROMPTS[1:])]
    found = answers(engine, *PROMPTS[:1], with_own(processor), *PROMPTS[1:])
    [_, failed, *_] = found
    assert (failed.finish_reason, type(failed.error)) == ("error", RequestFailedError)
    with pytest.raises(RequestFailedError, match=said):
        raise failed.error  # type: ignore[misc]
    assert failed.error is not None
    kinds = (KeyError, SystemExit, asyncio.CancelledError) if "raised" in said else type(None)
    assert isinstance(failed.error.__cause__, kinds)
    assert [r.token_ids for i, r in enumerate(found) if i != 1] == [*alone[:1], *alone[2:]]
    assert answer(engine, None).error is None


class Incomparable:
    """A processor that cannot be compared."""

    def __call__(self, token_ids: Ids, logits: Row) -> Any:
        logits.flags.writeable = False  # its own copy
        return logits.astype(np.float64) * 1e-60  # below float32

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


def test_processor_of_any_kind_works_wherever_numpy_raises(engine: Engine) -> None:
    with np.errstate(all="raise"):
        assert answer(engine, Incomparable()).error is None


def test_wrong_request_with_a_processor_of_any_kind_is_refused_alone(fake: Engine) -> None:
    prompts: list[Prompt] = ["a", with_own(Incomparable(), slot=99)]
    good, wrong = fake.run(prompts).results(return_errors=True)
    assert good.error is None
    assert isinstance(wrong.error, ConfigError)


def test_grammar_binds_what_a_processor_leaves(engine: Engine) -> None:
    grammar = "0" if not engine.model_facts.path else "[AB]+"
    found = answer(engine, nothing, regex=grammar)
    assert what(found) == what(answer(engine, None, regex=grammar))
    if engine.model_facts.path:
        failed = answer(engine, force, regex="B+")
        assert "logits_processor, logit_bias" in str(failed.error) or failed.text.startswith("B")


def test_each_choice_is_processed(engine: Engine) -> None:
    result = answer(engine, force, n=3)
    assert [c.token_ids for c in result.choices] == [(FORCED,) * 6] * 3


@pytest.mark.parametrize("is_other", [False, True], ids=["itself", "another"])
def test_orders_inside_are_done_behind_the_step(engine: Engine, is_other: bool) -> None:
    said: list[bool] = []
    caught: list[BaseException] = []

    def order(token_ids: Ids, logits: Row) -> None:
        if not said:
            said.append(engine.cancel("other" if is_other else "mine"))
            try:
                engine.submit("more").result()
            except InsideStepError as error:
                caught.append(error)

    other = BatchPrompt(prompt="other", id="other", options={"max_tokens": 200})
    first, second = answers(engine, with_own(order, max_tokens=100), other)
    assert said == [True]
    assert len(caught) == 1
    cancelled, whole = (second, first) if is_other else (first, second)
    assert cancelled.finish_reason == "cancelled"
    assert whole.finish_reason == "length"
    assert answer(engine, None).error is None


@pytest.mark.parametrize("is_fake", [True, pytest.param(False, marks=pytest.mark.real)])
def test_what_is_no_exception_is_raised_by_the_step(is_fake: bool) -> None:
    def stop(token_ids: Ids, logits: Row) -> None:
        if not calls:
            calls.append(0)
            raise KeyboardInterrupt

    calls: list[int] = []
    if is_fake:
        loaded = engine_on(FakeBackend(2, 256, 64), threaded=False, options=OPTIONS)
    else:
        sizes: dict[str, Any] = {"parallel": 2, "ctx_per_seq": 256, "n_threads": 1}
        loaded = cbatch.load(**sizes, options=OPTIONS, threaded=False)
    with loaded as engine:
        plain = [r.token_ids for r in answers(engine, with_own(nothing), "b")]
        given: list[Prompt] = [with_own(stop), "b"]
        response = engine.run(given)
        with pytest.raises(KeyboardInterrupt):
            all(iter(engine.step, False))
        assert [r.token_ids for r in response.results()] == plain


def test_processor_that_nothing_is_sampled_for_is_told(fake: Engine) -> None:
    result = answer(fake, force, prefill_only=True)
    assert result.warnings == ("logits_processor has no effect if nothing is sampled",)


def test_extended_answer_is_processed_on(fake: Engine) -> None:
    seen: list[int] = []

    def count(token_ids: Ids, logits: Row) -> None:
        seen.append(len(token_ids))

    first = answer(fake, count)
    fake.extend(first, 3).result()
    n = first.usage.prompt_tokens
    assert seen == [*range(n, n + 9)]


# ---- where it cannot be ----


async def later(token_ids: Ids, logits: Row) -> None:
    """Do nothing."""


@pytest.mark.parametrize("value", ["f", 3, [force], {"a": force}, later])
def test_option_is_a_function(value: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"logits_processor works only in this process, and must be a Python function",
    ):
        RunOptions(logits_processor=value)


def test_other_process_takes_none() -> None:
    with chosen("pool"), engine_on(FakeBackend(4, 256, 64), options=OPTIONS) as engine:
        mixed: list[Prompt] = ["a", with_own(force)]
        asks: list[Callable[[], object]] = [
            lambda: engine.run(["a"], options={"logits_processor": force}),
            lambda: engine.run(mixed),
            lambda: engine.submit(with_own(force)),
        ]
        for ask in asks:
            with pytest.raises(ConfigError, match="logits_processor: works only in this process"):
                ask()
        assert answers(engine, "a")[0].error is None


def test_run_over_files_takes_none(tmp_path: Path, fake: Engine) -> None:
    from cbatch.files.file_run import run_file

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "a"}), encoding="utf-8")
    with pytest.raises(UnsupportedOptionError, match="works only in this process"):
        run_file(source, tmp_path / "out.jsonl", engine=fake, options={"logits_processor": force})
    source.write_text(
        json.dumps({"prompt": "a", "options": {"logits_processor": "f"}}), encoding="utf-8"
    )
    run_file(source, tmp_path / "out.jsonl", engine=fake)
    said = (tmp_path / "out.jsonl").read_text("utf-8")
    assert "must be a Python function" in said
    assert "only in this process" in said
