"""Caches, continuing and moving windows on llama.cpp itself, with the model that ships."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.cache.store import CacheStore
from cbatch.errors import CacheError, ConfigError, PromptTooLongError
from cbatch.messages import BatchPrompt
from cbatch.models.recipe.tasks import SHORT_TASKS, held_out_chats, is_right
from cbatch.verify.one_model import difference, rounding_of
from tests.runtime.backends import all_results, streams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from cbatch.engine import Engine
    from cbatch.response import BatchResult
    from tests.conftest import SynthFactory

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 16}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "ignore_eos": True, "max_tokens": 16}
SAVED: dict[str, Any] = {"cache_key": "k", "save_cache": True}
REQUIRED: dict[str, Any] = {"cache_key": "k", "cache_required": True}
EXACT: dict[str, Any] = {"exact": True, "n_ubatch": 32}
W = 256


def load(path: Path | str, folder: Path, **settings: Any) -> Engine:
    said = {"ctx_per_seq": W, "n_threads": 1, "parallel": 2, "cache_dir": folder, **settings}
    return cbatch.load(path, **said)


def prompt(n: int, start: int = 0) -> list[int]:
    return [300 + (7 * i + start) % 1200 for i in range(n)]


def ask(engine: Engine, tokens: list[int], **options: Any) -> BatchResult:
    [result] = all_results(engine.run([BatchPrompt(tokens=tokens)], options=options))
    return result


def alone(path: Path, tokens: list[int], **said: Any) -> tuple[int, ...]:
    """What a prompt gives in an engine of its own."""
    options = {k: said.pop(k) for k in list(said) if k in (*SEEDED, "adapter")}
    with load(path, path.parent, **{**said, "parallel": 1}) as engine:
        return ask(engine, tokens, **options).token_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cells"


@pytest.fixture(scope="session")
def window_model(synth: SynthFactory) -> Path:
    """Return the path of a model whose layers but each fourth look back over 32 positions only."""
    return synth("test", type="f32", n_layer=4, n_window=32, full_every=4)


# ---- saved, and begun with by another engine ----


def test_next_engine_under_exact_goes_on_as_one_run_computing_what_is_new(
    test_model: Path, folder: Path
) -> None:
    with load(test_model, folder, **EXACT) as engine:
        first = ask(engine, prompt(100), **SAVED, **SEEDED)
        n_first = engine.stats().n_prompt_tokens
    with load(test_model, folder, **EXACT) as engine:
        second = ask(engine, prompt(100), **REQUIRED, **SEEDED)
        n_second = engine.stats().n_prompt_tokens
    assert (first.warnings, second.warnings) == ((), ())
    assert (n_first, n_second, second.usage.cached_tokens) == (100, 4, 96)
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "unified", "n_ctx": 512, "ctx_per_seq": None},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"},
    ],
    ids=["unified", "q8_0"],
)
def test_chat_goes_on_in_the_next_engine_and_computes_what_is_new(
    test_model: Path, folder: Path, settings: dict[str, Any]
) -> None:
    chat: list[dict[str, str]] = [{"role": "user", "content": "What is 3 + 4?"}]
    options: dict[str, Any] = {**SAVED, "temperature": 0}
    with load(test_model, folder, **settings) as engine:
        [first] = engine.run([chat], options=options).results()
    chat += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Say red."},
    ]
    with load(test_model, folder, **settings) as engine:
        [second] = engine.run([chat], options={**options, "cache_required": True}).results()
        n_computed = engine.stats().n_prompt_tokens
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert n_computed == second.usage.prompt_tokens - second.usage.cached_tokens
    with load(test_model, folder, **settings) as engine:
        [whole] = engine.run([chat], options={"temperature": 0}).results()
    assert (first.text, second.text) == ("7", whole.text)


@pytest.mark.parametrize(("n_before", "n_after"), [(1, 2), (6, 2)])
def test_file_serves_another_number_of_slots(
    test_model: Path, folder: Path, n_before: int, n_after: int
) -> None:
    with load(test_model, folder, **EXACT, parallel=n_before) as engine:
        first = ask(engine, prompt(100), **SAVED, **GREEDY)
    with load(test_model, folder, **EXACT, parallel=n_after) as engine:
        second = ask(engine, prompt(100), **REQUIRED, **GREEDY)
    assert (second.usage.cached_tokens, second.token_ids) == (96, first.token_ids)


def test_next_turn_under_exact_is_bit_for_bit_what_one_run_gives(
    test_model: Path, folder: Path
) -> None:
    settings: dict[str, Any] = {**EXACT, "ctx_per_seq": 512, "parallel": 5}
    with load(test_model, folder, **settings) as engine:
        first = ask(engine, prompt(100), **SAVED, **SEEDED)
    tokens = [*prompt(100), *first.token_ids, 301, 302]
    with load(test_model, folder, **settings) as engine:
        others = engine.run([BatchPrompt(tokens=prompt(60, i)) for i in range(9)], options=SEEDED)
        result = ask(engine, tokens, **REQUIRED, **SEEDED)
        all_results(others)
    assert result.usage.cached_tokens == 96
    assert result.token_ids == alone(test_model, tokens, **settings, **SEEDED)


def test_recurrent_state_goes_on_from_the_end_of_its_file_or_of_its_prompt(
    synth: SynthFactory, folder: Path
) -> None:
    path = synth("mamba")
    with load(path, folder) as engine:
        first = ask(engine, prompt(60), **SAVED, **GREEDY)
    asked = [[*prompt(60), *first.token_ids, 301], [*prompt(60), 301], prompt(60), prompt(59)]
    with load(path, folder) as engine:
        *found, late = [ask(engine, tokens, **REQUIRED, **GREEDY) for tokens in asked]
    assert [result.usage.cached_tokens for result in found] == [75, 59, 59]
    assert isinstance(late.error, CacheError)
    with load(path, folder, share_prefixes=False) as engine:
        expected = [ask(engine, tokens, **GREEDY) for tokens in asked[:3]]
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("falcon-h1", "partitioned"),
        ("qwen3next", "unified"),
        ("gemma3", "unified"),
        ("gpt-oss", "partitioned"),
    ],
)
def test_hybrids_and_windows_go_on_from_the_end_of_a_prompt(
    zoo: Callable[[str], Path], folder: Path, name: str, kv: str
) -> None:
    """A file of slots of their own is begun with in a pool too, and the other way round."""
    prompts = [[5 + 7 * i % 90 for i in range(100)]]
    prompts += [[*prompts[0], 3, 9], [*prompts[0], 8, 4]]
    other = {"partitioned": "unified", "unified": "partitioned"}[kv]
    said = {**GREEDY, "logprobs": 1}
    with load(zoo(name), folder, kv=kv) as engine:
        ask(engine, prompts[0], **SAVED, **said)
    for kind in (kv, other):
        with load(zoo(name), folder, kv=kind) as engine:
            asked = [BatchPrompt(tokens=p, options=REQUIRED) for p in prompts]
            found = all_results(engine.run(asked, options=said))
        with load(zoo(name), folder, kv=kind, share_prefixes=False) as engine:
            asked = [BatchPrompt(tokens=p) for p in prompts]
            expected = all_results(engine.run(asked, options=said))
        assert [r.usage.cached_tokens for r in found] == [99] * 3
        for a, b in zip(expected, found, strict=True):
            assert not difference(a.logprobs or (), b.logprobs or (), rounding_of("f32"))


@pytest.mark.parametrize(
    ("settings", "n_cached"),
    [({"flash_attn": "off"}, 200), (EXACT, 192)],
    ids=["off", "exact"],
)
def test_file_of_a_longer_window_serves_a_shorter_one(
    test_model: Path, folder: Path, settings: dict[str, Any], n_cached: int
) -> None:
    with load(test_model, folder, ctx_per_seq=1024, **settings) as engine:
        ask(engine, prompt(700), **SAVED, prefill_only=True)
    with load(test_model, folder, **settings) as engine:
        result = ask(engine, prompt(201), **REQUIRED, **GREEDY)
        other = ask(engine, prompt(50, 3), **GREEDY)
    assert (result.error, result.usage.cached_tokens) == (None, n_cached)
    for tokens, found in ((prompt(201), result), (prompt(50, 3), other)):
        assert found.token_ids == alone(test_model, tokens, **settings, **GREEDY)


POOL: dict[str, Any] = {"kv": "unified", "n_ctx": 512, "ctx_per_seq": None}


@pytest.mark.parametrize(
    ("model", "before", "behind"),
    [
        ("full", {}, POOL),
        ("windows", POOL, {"parallel": 3}),
        ("windows", {"flash_attn": "on"}, {"flash_attn": "off"}),
        ("full", {"flash_attn": "off"}, {**POOL, "flash_attn": "on"}),
    ],
)
def test_file_of_slots_serves_a_pool_and_back(
    test_model: Path,
    window_model: Path,
    folder: Path,
    model: str,
    before: dict[str, Any],
    behind: dict[str, Any],
) -> None:
    path = test_model if model == "full" else window_model
    with load(path, folder, **before) as engine:
        first = ask(engine, prompt(80), **SAVED, **GREEDY)
    tokens = [*prompt(80), *first.token_ids, 301]
    with load(path, folder, **behind) as engine:
        ask(engine, prompt(30, 3), **GREEDY)
        result = ask(engine, tokens, **REQUIRED, **GREEDY)
    assert result.usage.cached_tokens == 95
    assert result.token_ids == alone(path, tokens, **{**behind, "parallel": 2}, **GREEDY)


def test_many_readers_begin_with_one_file(test_model: Path, folder: Path) -> None:
    with load(test_model, folder, **EXACT, parallel=6) as engine:
        ask(engine, prompt(128), **SAVED, prefill_only=True)
    prompts = [[*prompt(128), 301 + i, 302] for i in range(20)]
    with load(test_model, folder, **EXACT, parallel=6) as engine:
        items = [BatchPrompt(tokens=p) for p in prompts]
        results = all_results(engine.run(items, options={**REQUIRED, **GREEDY}))
        n_computed = engine.stats().n_prompt_tokens
    assert [r.usage.cached_tokens for r in results] == [128] * 20
    assert n_computed == 2 * 20
    with load(test_model, folder, **EXACT, share_prefixes=False) as engine:
        assert streams(engine.run(items, options=GREEDY)) == [
            (r.finish_reason, r.token_ids) for r in results
        ]


# ---- files that do not fit ----


def test_file_of_other_settings_or_another_model_is_told_apart(
    test_model: Path, random_model: Path, folder: Path
) -> None:
    with load(test_model, folder) as engine:
        ask(engine, prompt(60), **SAVED, **GREEDY)
    for path, settings, words in (
        (test_model, {"cache_type_k": "q8_0"}, "cache_type_k is q8_0, but was f16"),
        (test_model, {"exact": True}, "exact is True, but was False"),
        (test_model, {"rope_freq_base": 9e4}, "rope_freq_base is 90000.0"),
        (random_model, {}, "model is sha256"),
    ):
        said: dict[str, Any] = settings
        with load(path, folder, **said) as engine:
            failed = ask(engine, prompt(60), **REQUIRED, **GREEDY)
            warned = ask(engine, prompt(60), cache_key="k", **GREEDY)
        assert isinstance(failed.error, CacheError)
        assert words in failed.error.reason
        assert words in warned.warnings[0]
        assert warned.token_ids == alone(path, prompt(60), **GREEDY, **said)


def test_same_model_at_another_place_has_the_same_files(
    test_model: Path, folder: Path, tmp_path: Path
) -> None:
    with load(test_model, folder) as engine:
        ask(engine, prompt(60), **SAVED, **GREEDY)
    copied = shutil.copy(test_model, tmp_path / "another name.gguf")
    with load(copied, folder) as engine:
        assert ask(engine, prompt(60), **REQUIRED, **GREEDY).usage.cached_tokens == 59


def rewrite(folder: Path, change: Callable[[NDArray[np.uint8]], object]) -> None:
    """Change the cells in the only file there is, and give it the digests that go with them."""
    store = CacheStore(folder, 2**30)
    [file] = store.files()
    cells = store.read(file.key, file.fingerprint)
    change(cells.data)
    store.write(file.key, cells, file.fingerprint)


def not_a_number(data: NDArray[np.uint8]) -> None:
    data[-400:-8] = 0xFF  # numbers of the last layer


def one_slot_more(data: NDArray[np.uint8]) -> None:
    data[8] += 1


def another_type(data: NDArray[np.uint8]) -> None:
    i_type = 16 + 12 * int(data[12:16].view("<u4")[0]) + 8
    data[i_type] ^= 1


BAD_CELLS: dict[str, tuple[Callable[[NDArray[np.uint8]], object], str]] = {
    "slots": (one_slot_more, "cut off"),
    "type": (another_type, "have another layout"),
}
CELLS_OF: dict[str, dict[str, Any]] = {
    "slots": {"flash_attn": "off"},
    "pool": {**POOL, "flash_attn": "off"},
    "states": {},
}


@pytest.mark.parametrize("kind", CELLS_OF)
def test_nan_that_a_model_computed_reaches_no_neighbour_from_its_file(
    test_model: Path, synth: SynthFactory, folder: Path, kind: str
) -> None:
    path = synth("mamba") if kind == "states" else test_model
    settings = CELLS_OF[kind]
    items = [BatchPrompt(tokens=prompt(60)), BatchPrompt(tokens=prompt(20, 3))]
    with load(path, folder, **settings) as engine:
        ask(engine, prompt(59), **SAVED, prefill_only=True)
        expected = streams(engine.run(items, options=GREEDY))
    rewrite(folder, not_a_number)
    with load(path, folder, **settings) as engine:
        failed = ask(engine, prompt(60), **REQUIRED, **GREEDY)
        first, second = all_results(engine.run(items, options={"cache_key": "k", **GREEDY}))
        again = streams(engine.run(items, options=GREEDY))
    assert isinstance(failed.error, CacheError)
    assert "NaN or infinite numbers" in failed.error.reason
    assert first.warnings == (f"cache_key: {failed.error.reason}",)
    assert [(r.finish_reason, r.token_ids) for r in (first, second)] == expected == again


@pytest.mark.parametrize("case", BAD_CELLS)
def test_bad_cells_with_right_digests_are_told(test_model: Path, folder: Path, case: str) -> None:
    change, words = BAD_CELLS[case]
    with load(test_model, folder) as engine:
        ask(engine, prompt(60), **SAVED, **GREEDY)
    rewrite(folder, change)
    with load(test_model, folder) as engine:
        failed = ask(engine, prompt(60), **REQUIRED, **GREEDY)
        warned = ask(engine, prompt(60), cache_key="k", **GREEDY)
    assert words in str(failed.error)
    assert words in warned.warnings[0]
    assert warned.token_ids == alone(test_model, prompt(60), **GREEDY)


LLAMA: dict[str, Any] = {"flash_attn": "on", "repack": "llama"}


def large_values(data: NDArray[np.uint8]) -> None:
    """Have the first layer's values add up to more than f16 holds, in which llama.cpp's attention adds them."""
    n_cells = int(data[12:16].view("<u4")[0])
    at = 24 + 12 * n_cells
    n_layers = int(data[at - 4 : at].view("<u4")[0])
    for _ in range(n_layers):
        at += 12 + n_cells * int(data[at + 4 : at + 12].view("<u8")[0])
    n_bytes = n_cells * int(data[at + 4 : at + 12].view("<u8")[0])
    data[at + 12 : at + 12 + n_bytes].view("<f2")[:] = 6e4


@pytest.mark.parametrize("last", ["answer", "prompt"])
def test_slot_in_which_numbers_became_none_serves_the_next_as_ever(
    test_model: Path, folder: Path, last: str
) -> None:
    said = {**GREEDY, "prefill_only": last == "prompt"}
    with load(test_model, folder, parallel=2, **LLAMA) as engine:
        ask(engine, prompt(120), **SAVED, prefill_only=True)
    rewrite(folder, large_values)
    with load(test_model, folder, parallel=2, **LLAMA) as engine:
        bad = ask(engine, prompt(150), **REQUIRED, **said)
        others = [ask(engine, prompt(n, n), **GREEDY) for n in (100, 70, 110, 65)]
    assert bad.usage.cached_tokens == 120
    assert (bad.error is None) is (last == "prompt")
    for n, result in zip((100, 70, 110, 65), others, strict=True):
        expected = alone(test_model, prompt(n, n), **LLAMA, **GREEDY)
        assert (result.error, result.token_ids) == (None, expected)


# ---- prompts alone ----


def test_prompt_alone_fills_the_window_and_its_follower_computes_the_rest(
    test_model: Path, folder: Path
) -> None:
    with load(test_model, folder) as engine:
        whole = ask(engine, prompt(W), prefill_only=True)
        late = ask(engine, prompt(W + 1), prefill_only=True)
        no_room = ask(engine, prompt(W), **GREEDY)
        n_before = engine.stats().n_prompt_tokens
        follower = ask(engine, [*prompt(W - 30), 301], **GREEDY)
        n_computed = engine.stats().n_prompt_tokens - n_before
    assert (whole.finish_reason, whole.text, whole.usage.completion_tokens) == ("length", "", 0)
    for refused in (late, no_room):
        assert isinstance(refused.error, PromptTooLongError)
    assert (n_computed, follower.usage.cached_tokens) == (1, W - 30)


def test_window_is_one_slots_part_of_the_context(test_model: Path, folder: Path) -> None:
    with load(test_model, folder, ctx_per_seq=None, n_ctx=2 * W) as engine:
        fits, late = (ask(engine, prompt(n), **GREEDY) for n in (W - 16, W - 15))
        huge = ask(engine, prompt(9), **{**GREEDY, "max_tokens": 2**31 - 1})
    assert (fits.finish_reason, len(fits.token_ids)) == ("length", 16)
    assert (late.finish_reason, len(late.token_ids)) == ("window", 15)
    assert (huge.finish_reason, len(huge.token_ids)) == ("window", W - 9)


# ---- continuing ----


@pytest.mark.parametrize(("is_taken", "options"), [(False, GREEDY), (True, SEEDED)])
def test_two_parts_under_exact_are_one_run(
    test_model: Path, folder: Path, is_taken: bool, options: dict[str, Any]
) -> None:
    with load(test_model, folder, **EXACT, parallel=1) as engine:
        first = ask(engine, prompt(70), **options)
        if is_taken:
            ask(engine, prompt(100, 3), **options)
        n_before = engine.stats().n_prompt_tokens
        result = engine.extend(first, 24).result()
        n_computed = engine.stats().n_prompt_tokens - n_before
    whole = alone(test_model, prompt(70), **EXACT, **{**options, "max_tokens": 40})
    assert result.token_ids == whole
    assert n_computed == (70 if is_taken else 0)


def test_parts_of_a_chat_are_one_run_and_compute_its_prompt_once(
    test_model: Path, folder: Path
) -> None:
    settings: dict[str, Any] = {"kv": "unified", "n_ctx": 512, "ctx_per_seq": None}
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    with load(test_model, folder, **settings) as engine:
        [whole] = engine.run([chat], options={**options, "max_tokens": 24}).results()
    with load(test_model, folder, **settings) as engine:
        [result] = engine.run([chat], options={**options, "max_tokens": 4}).results()
        for _ in range(5):
            response = engine.extend(result, 4)
            text = "".join(chunk.text for chunk in response)
            [result] = response.results()
            assert text == result.text
        assert engine.stats().n_prompt_tokens == whole.usage.prompt_tokens
    assert (result.text, result.token_ids) == (whole.text, whole.token_ids)


def test_recurrent_parts_are_one_run(synth: SynthFactory, folder: Path) -> None:
    path = synth("mamba")
    with load(path, folder) as engine:
        first = ask(engine, prompt(40), **GREEDY)
        result = engine.extend(first, 16).result()
        n_computed = engine.stats().n_prompt_tokens
    assert n_computed == 40
    assert result.token_ids == alone(path, prompt(40), **{**GREEDY, "max_tokens": 32})


# ---- windows that move on ----


@pytest.mark.parametrize(
    "settings",
    [{"cache_type_k": "f32"}, {"kv": "unified", "n_ctx": 768}],
    ids=["f32", "unified"],
)
def test_answer_goes_past_its_window_and_those_beside_it_are_right(
    test_model: Path, folder: Path, settings: dict[str, Any]
) -> None:
    examples = [e for e in held_out_chats(seed=7, n=120) if e.task in SHORT_TASKS][:30]
    mover = BatchPrompt(
        tokens=prompt(200), options={**GREEDY, "max_tokens": 1500, "n_discard": 32, "n_keep": 9}
    )
    with load(test_model, folder, **settings) as engine:
        long = engine.run([mover])
        beside = engine.run([e.prompt for e in examples], options={"temperature": 0}).results()
        [moved] = all_results(long)
        behind = engine.run([e.prompt for e in examples], options={"temperature": 0}).results()
    assert (moved.finish_reason, len(moved.token_ids)) == ("length", 1500)
    assert moved.usage.context_shifts == -(-(200 + 1500 - 1 - W) // 32)
    assert moved.warnings == ()
    for results in (beside, behind):
        n_right = sum(is_right(e, r.text) for e, r in zip(examples, results, strict=True))
        assert n_right >= 26


@pytest.mark.parametrize("n_discard", [1, W - 2])
def test_text_goes_past_its_window_as_far_as_it_is_asked_to(
    test_model: Path, folder: Path, n_discard: int
) -> None:
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 3 * W}
    with load(test_model, folder) as engine:
        [result] = engine.run(["tell me"], options={**options, "n_discard": n_discard}).results()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 3 * W)
    assert result.usage.context_shifts >= 3 * W // n_discard - W // n_discard - 1


def test_shift_that_cannot_be_is_refused(
    test_model: Path, synth: SynthFactory, folder: Path
) -> None:
    with load(test_model, folder, exact=True) as engine, pytest.raises(ConfigError, match="exact"):
        engine.submit("Hi", options={"n_discard": 32})
    with (
        load(synth("mamba"), folder) as engine,
        pytest.raises(ConfigError, match="cannot be moved"),
    ):
        engine.submit("Hi", options={"n_discard": 32})
    turned = load(test_model, folder, cache_type_k="q8_0")
    with turned as engine, pytest.raises(ConfigError, match="cannot be moved"):
        engine.submit("Hi", options={"n_discard": 32})
    with load(test_model, folder) as engine:
        result = ask(engine, prompt(W - 5), temperature=0, ignore_eos=True)
    assert (result.finish_reason, result.usage.context_shifts) == ("window", 0)


def test_full_pool_of_movers_loses_nobody(test_model: Path, folder: Path) -> None:
    settings: dict[str, Any] = {"kv": "unified", "n_ctx": 512, "ctx_per_seq": 256, "parallel": 4}
    for swap_mib in (0, 64):
        with load(test_model, folder, **settings, swap_mib=swap_mib) as engine:
            items = [BatchPrompt(tokens=prompt(60 + i, i)) for i in range(6)]
            options = {**GREEDY, "max_tokens": 300, "n_discard": 40}
            results = all_results(engine.run(items, options=options))
            chat = [{"role": "user", "content": "What is 3 + 4?"}]
            [alright] = engine.run([chat], options={"temperature": 0}).results()
        assert [(r.finish_reason, len(r.token_ids)) for r in results] == [("length", 300)] * 6
        assert all(r.usage.context_shifts >= 3 for r in results)
        assert (alright.text, alright.finish_reason) == ("7", "stop")
