"""Bad input gets a typed error that names value and limit, and changes nothing."""

from __future__ import annotations

import inspect
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.engine import Engine
from cbatch.errors import (
    CBatchError,
    ConfigError,
    DuplicateIdError,
    ModelLoadError,
    PromptError,
    PromptTooLongError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.runtime.scoring import Tokenizer, WholeText
from tests.runtime.backends import PATIENCE_S, all_results, runtime_of, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cbatch.messages import Prompt
    from tests.conftest import SynthFactory

    Make = Callable[[Path, SynthFactory], Path]

SMALL: dict[str, Any] = {"parallel": 2, "ctx_per_seq": 256, "n_threads": 1}
GOOD = BatchPrompt(tokens=[300, 301, 302], options={"max_tokens": 4, "temperature": 0})
HI = [{"role": "user", "content": "Hi"}]

# ---- load: the file ----


def truncated(folder: Path, synth: SynthFactory) -> Path:
    data = synth("test").read_bytes()
    path = folder / "half.gguf"
    path.write_bytes(data[: len(data) // 2])
    return path


def text_file(folder: Path, synth: SynthFactory) -> Path:
    path = folder / "letter.gguf"
    path.write_text("Dear model,")
    return path


def empty_file(folder: Path, synth: SynthFactory) -> Path:
    path = folder / "empty.gguf"
    path.touch()
    return path


def with_metadata(**metadata: object) -> Make:
    named = {key.replace("__", "."): value for key, value in metadata.items()}
    return lambda folder, synth: synth("test", metadata=named)


WRONG_FILES: dict[str, tuple[Make, str]] = {
    "missing": (lambda folder, synth: folder / "none.gguf", "No such file"),
    "folder": (lambda folder, synth: folder, "folder"),
    "empty": (empty_file, "is empty"),
    "not a GGUF": (text_file, "GGUF"),
    "truncated": (truncated, "(?i)bytes|ends|truncated"),
    "encoder": (with_metadata(general__architecture="bert"), "refuses|encoder"),
    "unknown architecture": (with_metadata(general__architecture="unheard-of"), "unheard-of"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_file_is_refused_by_name(name: str, tmp_path: Path, synth: SynthFactory) -> None:
    make, reason = WRONG_FILES[name]
    path = make(tmp_path, synth)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        cbatch.load(path, **SMALL)
    assert str(path) in str(caught.value)


# ---- load: the settings ----

WRONG_SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"parallel": 0}, "parallel must be 1 … 256, not 0"),
    ({"cache_type_k": "q3"}, "cache_type_k must be one of f16, f32, .* not 'q3'"),
    ({"tensor_split": [1] * 17}, "tensor_split has 17 shares, but llama.cpp supports at most"),
    ({"rpc_servers": ["nowhere"]}, "'host:port' with a port of 1 … 65535, not 'nowhere'"),
    ({"n_ctx": 20, "parallel": 16}, "n_ctx=20 leaves 1 cells for each of 16 slots"),
    ({"n_ctx": 4096, "ctx_per_seq": 256}, "n_ctx .* or ctx_per_seq .* not both"),
    (
        {"ctx_per_seq": 2**31 - 1, "parallel": 1},
        "need 2147483648 cells; llama.cpp allows at most 2147483647",
    ),
    ({"n_threads": 2**31 - 1}, "n_threads must be 1 … 512, not 2147483647"),
    ({"n_batch": 8}, "n_batch=8 is less than parallel=16"),
    ({"chat_template": "nonsense"}, "chat_template='nonsense' is neither"),
    ({"chat_template": "{% nonsense %}"}, "chat_template does not compile"),
    ({"options": {"temperature": -1}}, "temperature must be 0"),
    ({"options": "hot"}, "options must be"),
)


@pytest.mark.parametrize(("settings", "words"), WRONG_SETTINGS)
def test_wrong_setting_is_refused_with_its_limits(
    test_model: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cbatch.load(test_model, **{"parallel": 16, **settings})


def test_empty_name_of_a_setting_is_refused_as_it_is() -> None:
    with pytest.raises(UnsupportedOptionError, match="unknown option ''") as caught:
        cbatch.load(**dict[str, Any]({"": 1}))
    assert caught.value.option == ""


@pytest.mark.parametrize("name", ["n_slots", "verbose"])
def test_unknown_setting_is_refused_by_name(test_model: Path, name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name) as caught:
        cbatch.load(test_model, **dict[str, Any]({name: 1}))
    assert caught.value.option == name


def test_closed_llama_is_refused(test_model: Path) -> None:
    import llama_cpp

    borrowed = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    borrowed.close()
    with pytest.raises(ModelLoadError, match="closed"):
        cbatch.load(borrowed, **SMALL)


@pytest.mark.parametrize("model", [7, [], b"\xff\0"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"not {type(model).__name__}"):
        cbatch.load(model, **SMALL)


# ---- run: refused whole ----

WRONG_CALLS: tuple[tuple[Any, Any, str], ...] = (
    ([], None, "the batch is empty"),
    ("", None, "the prompt is empty"),
    ([GOOD, []], None, r"prompts\[1\]: the prompt is empty: messages has no message"),
    ([[1, 2, 3]], None, r"prompts\[0\]: these are numbers.*BatchPrompt\(tokens"),
    (None, None, "must be a list of prompts, not NoneType"),
    ([HI, HI[0]], None, r"prompts\[1\]: this is a single message"),
    ([GOOD, b"bytes"], None, r"prompts\[1\]"),
    ([HI, [{"content": "Hi"}]], None, r"prompts\[1\]: messages\[0\] has no role"),
    ([[*HI, "x"]], None, r"messages\[1\] must be a mapping .*not str"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], None, "a picture without url"),
    ([GOOD], {"max_tokens": 0}, "max_tokens must be 1 … 2147483647, not 0"),
    ([GOOD], {"max_tokens": 2**31}, "max_tokens must be 1 … .*not 2147483648"),
    ([GOOD], {"max_tokens": 1, "max_completion_tokens": 1}, "the same option"),
    ([GOOD], {"temperature": -0.1}, "temperature must be 0 … 10000, not -0.1"),
    ([GOOD], {"temperature": math.nan}, "temperature must be a finite number, not nan"),
    ([GOOD], {"top_p": 1.01}, "top_p must be 0 … 1, not 1.01"),
    ([GOOD], {"seed": -1}, "seed must be 0 … 18446744073709551615, not -1"),
    ([GOOD], {"stop": 7}, "stop must be a string"),
    ([GOOD], {"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
    ([GOOD], {"stop_token_ids": [7, 1536]}, "has 1536, .*vocabulary of 1536"),
    ([GOOD], {"stop_token_ids": [10**5000]}, "has this int, .*vocabulary|serialize ints"),
    ([GOOD], {"logit_bias": {1536: 1.0}}, "logit_bias has 1536, .*vocabulary of 1536"),
    ([GOOD], {"logit_bias": {3: 1e5}}, "logit_bias of token 3 .*-10000 … 10000, not 100000"),
    ([GOOD], {"dry_sequence_breakers": ["a" * 41]}, "has 41 bytes; at most 40 are allowed"),
    ([GOOD], "hot", "options must be RunOptions or a mapping, not str"),
)


@dataclass
class Watched:
    """An engine, and what a good request gives on it."""

    engine: cbatch.Engine
    expected: list[tuple[str, tuple[int, ...]]]

    def state(self) -> tuple[object, ...]:
        stats = self.engine.stats()
        done = (stats.n_submitted, stats.n_steps, stats.n_finished)
        in_flight = (stats.n_waiting, stats.n_running, [*runtime_of(self.engine).ids])
        return *done, *in_flight, self.engine.slots()

    def check_works(self) -> None:
        assert streams(self.engine.submit(GOOD)) == self.expected


@pytest.fixture(scope="module", params=[None, 1], ids=["thread", "worker"])
def watched(request: pytest.FixtureRequest, test_model: Path) -> Iterator[Watched]:
    with cbatch.load(test_model, **SMALL, replicas=request.param) as engine:
        yield Watched(engine, streams(engine.submit(GOOD)))


@pytest.mark.parametrize(("prompts", "options", "words"), WRONG_CALLS)
def test_wrong_call_is_refused_and_changes_nothing(
    watched: Watched, prompts: Any, options: Any, words: str
) -> None:
    before = watched.state()
    with pytest.raises(ConfigError, match=words):
        watched.engine.run(prompts, options=options)
    assert watched.state() == before
    watched.check_works()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mirostat", "max_tokens"),
        ("guided_json", "max_tokens"),
        ("temprature", "did you mean temperature?"),
        ("__init__", "max_tokens"),
        ("", "max_tokens"),
    ],
)
def test_unknown_option_is_refused_by_name_wherever_it_stands(
    watched: Watched, name: str, told: str
) -> None:
    before = watched.state()
    said: dict[str, Any] = {name: 1}
    calls: list[Callable[[], object]] = [
        lambda: watched.engine.run([GOOD], options=said),
        lambda: BatchPrompt(prompt="Hi", options=said),
        lambda: cbatch.RunOptions(**said),
    ]
    for call in calls:
        with pytest.raises(UnsupportedOptionError, match=re.escape(told)) as caught:
            call()
        assert caught.value.option == name
    assert watched.state() == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of messages, prompt and tokens, not none"),
        ({"prompt": "a", "tokens": [1]}, "give one of .*prompt.*tokens"),
        ({"prompt": 7}, "prompt must be a string, not int"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"tokens": []}, "tokens has no token"),
        ({"tokens": [1, -1]}, "not -1"),
        ({"tokens": [1.0]}, "not 1.0"),
        ({"tokens": "12"}, "not str"),
        ({"messages": "Hi"}, 'such as {"role": "user"'),
        ({"messages": HI[0]}, "not dict"),
        ({"prompt": "a", "id": ""}, "non-empty string, not ''"),
        ({"prompt": "a", "id": 7}, "non-empty string, not 7"),
        ({"prompt": "a", "options": {"top_p": 2}}, "top_p must be 0 … 1, not 2"),
    ],
)
def test_wrong_item_is_refused_where_it_is_made(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchPrompt(**given)


def test_id_twice_in_a_batch_or_in_flight_is_refused(watched: Watched) -> None:
    before = watched.state()
    twice = [BatchPrompt(prompt=text, id="same") for text in "ab"]
    with pytest.raises(DuplicateIdError, match="same") as caught:
        watched.engine.run(twice)
    assert caught.value.id == "same"
    assert watched.state() == before
    response = watched.engine.run(
        [BatchPrompt(prompt="a", id="long", options={"ignore_eos": True})]
    )
    again: list[Prompt] = ["b", BatchPrompt(prompt="a", id="long", options={"max_tokens": 1})]
    with pytest.raises(DuplicateIdError, match="long"):
        watched.engine.run(again)
    assert [(r.id, r.finish_reason) for r in all_results(response)] == [("long", "window")]
    assert {r.error for r in all_results(watched.engine.run(again))} == {None}


# ---- run: an item's own error ----


def error_between_neighbours(watched: Watched, item: Any) -> CBatchError:
    """Run the item between good ones, which it must not harm; return its error."""
    n_running = watched.engine.stats().n_running
    first, ours, last = all_results(watched.engine.run([GOOD, item, GOOD]))
    for good in (first, last):
        assert [(good.finish_reason, good.token_ids)] == watched.expected
    assert (ours.finish_reason, ours.text, ours.token_ids) == ("error", "", ())
    assert ours.usage.completion_tokens == 0
    assert ours.error is not None
    assert watched.engine.stats().n_running == n_running == 0
    with pytest.raises(type(ours.error)):
        watched.engine.submit(item).result(timeout=PATIENCE_S)
    return ours.error


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens"), [(256, None), (300, None), (10, 247), (255, 2), (3, 2**31 - 1)]
)
def test_item_over_the_window_gets_the_numbers(
    watched: Watched, n_prompt: int, max_tokens: int | None
) -> None:
    options = {"max_tokens": max_tokens, "strict_max_tokens": True}
    item = BatchPrompt(tokens=[300] * n_prompt, options=options)
    error = error_between_neighbours(watched, item)
    assert isinstance(error, PromptTooLongError)
    assert (error.n_prompt, error.n_limit, error.n_output) == (n_prompt, 256, max_tokens or 1)
    for words in (
        str(n_prompt),
        "256",
        f"raise ctx_per_seq to at least {n_prompt + (max_tokens or 1)}",
    ):
        assert words in str(error)
    beyond = ", beyond the 2048 tokens that the model was trained for"
    assert str(error).endswith(beyond) == (n_prompt + (max_tokens or 1) > 2048)
    # only ways by which this prompt would run
    assert ("lower max_tokens" in str(error)) == (n_prompt < 256)
    assert ("answer needs" in str(error)) == (n_prompt <= 256)


def test_prompt_too_long_for_the_trained_length_says_so() -> None:
    beyond = "beyond the 4096 tokens that the model was trained for"
    assert beyond in str(PromptTooLongError(5000, 2048, n_trained=4096))
    assert beyond in str(PromptTooLongError(5000, 2048, is_least=True, n_trained=4096))
    assert "trained" not in str(PromptTooLongError(3000, 2048, n_trained=4096))
    assert "trained" not in str(PromptTooLongError(5000, 2048))


def test_prompt_too_long_is_told_of_n_discard_where_that_helps() -> None:
    chat = [{"role": "user", "content": "a" * 300}]
    memory = KvCapabilities("partitioned", 512, can_shift=True)
    with Engine(FakeBackend(2, 256, 64, memory=memory), threaded=False) as engine:
        text, message, scored = engine.run(
            [
                BatchPrompt(tokens=[300] * 300),
                BatchPrompt(chat),
                BatchPrompt(tokens=[300] * 300, options={"prefill_only": True}),
            ]
        ).results(return_errors=True)
    assert "set n_discard" in str(text.error)
    for result in (message, scored):
        assert isinstance(result.error, PromptTooLongError)
        assert "n_discard" not in str(result.error)


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(255, None), (255, 1), (10, 246)])
def test_item_that_just_fits_runs(watched: Watched, n_prompt: int, max_tokens: int | None) -> None:
    options = {"max_tokens": max_tokens, "ignore_eos": True}
    [result] = all_results(
        watched.engine.submit(BatchPrompt(tokens=[300] * n_prompt, options=options))
    )
    assert len(result.token_ids) == 256 - n_prompt
    assert result.finish_reason == ("length" if max_tokens else "window")


@pytest.mark.parametrize("token", [1536, 2**31, 2**70])
def test_token_out_of_the_vocabulary_is_the_items_error(watched: Watched, token: int) -> None:
    error = error_between_neighbours(watched, BatchPrompt(tokens=[300, token]))
    assert isinstance(error, PromptError)
    assert str(token) in str(error)
    assert "1536" in str(error)


def test_half_a_surrogate_pair_is_the_items_error(watched: Watched) -> None:
    assert "Unicode" in str(error_between_neighbours(watched, "a\ud800"))
    messages = [{"role": "user", "content": "a\ud800"}]
    assert "Unicode" in str(error_between_neighbours(watched, messages))


def test_extreme_options_run(watched: Watched) -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 5e-324},
        {"temperature": 1e4, "top_k": 0, "top_p": 1, "min_p": 0},
        {"top_k": 2**31 - 1, "seed": 2**64 - 1},
        {"top_p": 0, "min_p": 1, "seed": 0},
        {"stop_token_ids": list(range(1536)), "stop": [""] * 100},
        {"stop": ["x" * 4_095, "\0"]},
        {"repeat_penalty": 100, "presence_penalty": 100, "frequency_penalty": -100},
        {"repeat_penalty": 0.01, "repeat_last_n": 2**20, "dry_penalty_last_n": 2**20},
        {"dry_multiplier": 100, "dry_base": 100, "dry_allowed_length": 0},
        {"typical_p": 0, "top_n_sigma": 1e3, "xtc_probability": 1, "xtc_threshold": 0},
        {"logit_bias": dict.fromkeys(range(1535), -math.inf)},
        {"logit_bias": dict.fromkeys(range(1536), 1e4)},
    ]
    items = [BatchPrompt(prompt="Hi", options={"max_tokens": 3, **o}) for o in extremes]
    assert {r.error for r in all_results(watched.engine.run(items))} == {None}


# ---- templates ----


def test_model_without_a_template_refuses_chats_and_runs_text(synth: SynthFactory) -> None:
    path = synth("test", metadata={"tokenizer.chat_template": None})
    with cbatch.load(path, **SMALL) as engine:
        watched = Watched(engine, streams(engine.submit(GOOD)))
        error = error_between_neighbours(watched, HI)
    assert isinstance(error, RequestFailedError)
    assert "chat_template" in str(error)


def test_template_that_raises_fails_its_own_item(test_model: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}"
        "{% elif m.content == 'divide' %}{{ 1 // 0 }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with cbatch.load(test_model, chat_template=template, **SMALL) as engine:
        watched = Watched(engine, streams(engine.submit(GOOD)))
        for content, words in (("no", "not that"), ("divide", "zero")):
            error = error_between_neighbours(watched, [{"role": "user", "content": content}])
            assert isinstance(error, RequestFailedError)
            assert words in str(error)
        assert all_results(engine.run([HI], options={"max_tokens": 1}))[0].error is None


def test_model_whose_own_sampling_is_out_of_range_still_runs(synth: SynthFactory) -> None:
    path = synth("test", metadata={"general.sampling.temp": 1e9, "general.sampling.top_k": 7})
    with cbatch.load(path, **SMALL) as engine:
        assert all_results(engine.run([HI], options={"max_tokens": 2}))[0].error is None


def test_call_from_deep_in_a_recursion_fails_alone() -> None:
    options = {"max_tokens": 4, "ignore_eos": True}
    with Engine(FakeBackend(2, 64, 16), threaded=False) as engine:
        other = engine.run(["other"], options={**options, "max_tokens": 40})
        n_failed = 0
        for n_left in range(200, 0, -5):

            def call(n_calls: int) -> object:
                return (
                    call(n_calls - 1)
                    if n_calls
                    else all_results(engine.run(["a"], options=options))
                )

            try:
                call(sys.getrecursionlimit() - len(inspect.stack(0)) - n_left)
            except (RecursionError, ConfigError):
                n_failed += 1
        assert n_failed > 10
        [result] = all_results(engine.run(["b"], options=options))
        assert result.finish_reason == "length"
        assert len(all_results(other)) == 1


def test_text_without_a_token_is_not_scored() -> None:
    tokenizer = Tokenizer(lambda _: [], lambda _: "", n_window=8, first_token=-1)
    with pytest.raises(PromptError, match="no token"):
        WholeText.of("text").requests(tokenizer)
