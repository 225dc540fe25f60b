"""Pictures that cannot be cut, on llama.cpp: rows that share positions (M-RoPE), and rows that attend to later ones."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.log import llama_log
from cbatch.backend.llama.memory import LlamaCells
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_projector import write_projector
from cbatch.core.plan import Binding, Slot, StepPlan
from cbatch.engine_options import EngineOptions
from cbatch.errors import ModelLoadError
from cbatch.media import Medium
from cbatch.options import GREEDY as GREEDILY
from cbatch.support.picture_tokens import FIRST_PICTURE, PictureTokens, edges_of, place_of
from tests.backend.llama.media import WITH_RIVALS, chat_with, clear_tokens
from tests.backend.llama.test_pictures import GREEDY, chat, picture, png
from tests.backend.llama.test_sounds import tone
from tests.backend.slots import FailingStepper, Failures, chunk, go_on, is_refused
from tests.oracle.pictures import PlainSeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.conftest import SynthFactory

pytestmark = [pytest.mark.real, pytest.mark.own_library]

KINDS = ("qwen2-vl", "gemma3")
SIZES = ((90, 60), (200, 70), (40, 160))
ALL_MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"

each_kind = pytest.mark.parametrize("kind", KINDS)


class Pair:
    """A model with its projector."""

    def __init__(self, kind: str, model: Path, projector: Path) -> None:
        self.kind, self.model, self.projector = kind, model, projector

    def load(self, **options: Any) -> cbatch.Engine:
        plain = {"ctx_per_seq": 512, "cache_type_k": "f32", "cache_type_v": "f32"}
        return cbatch.load(self.model, mmproj=self.projector, **{**plain, **options})


@pytest.fixture(scope="module")
def pairs(synth: SynthFactory, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    folder = tmp_path_factory.mktemp("projectors")
    metadata = {"tokenizer.chat_template": ALL_MESSAGES}
    return {
        kind: Pair(
            kind,
            synth(kind, type="f32", metadata=metadata),  # what is sampled shows no rounding
            write_projector(folder / f"{kind}.gguf", 64, kind=kind, seed=1),
        )
        for kind in KINDS
    }


PROMPTS: dict[str, tuple[str, Any]] = {
    "one": ("Look: <__media__> What is it?", [0]),
    "first": ("<__media__>What is it?", [1]),
    "two": ("Look: <__media__> What is it? <__media__> And this?", [0, 1]),
    "the same twice": ("Look: <__media__> and <__media__> Hm?", [2, 2]),
    "in a row": ("Look: <__media__><__media__><__media__> Hm?", [0, 1, 0]),
}


@pytest.mark.parametrize(
    ("kind", "kv"), [("qwen2-vl", "partitioned"), ("qwen2-vl", "unified"), ("gemma3", "unified")]
)
def test_answers_are_those_of_llama_cpps_own_helper(
    pairs: Mapping[str, Pair], kind: str, kv: Any
) -> None:
    pair = pairs[kind]
    with PlainSeer(pair.model, pair.projector) as plain:
        expected = {
            name: plain.answer(text, [picture(i, *SIZES[i]) for i in seen], 8)
            for name, (text, seen) in PROMPTS.items()
        }
    found = {}
    with pair.load(parallel=2, kv=kv) as engine:
        for name, (text, seen) in PROMPTS.items():
            first, *texts = text.split("<__media__>")
            parts = [
                x for i, t in zip(seen, texts, strict=True) for x in (picture(i, *SIZES[i]), t)
            ]
            asked = chat(*([first] if first else []), *parts)
            [result] = engine.run([asked], options=GREEDY).results()
            found[name] = result.token_ids
            assert 0 < result.usage.image_tokens < result.usage.prompt_tokens
    assert found == expected


def test_sounds_beside_pictures_that_share_positions(
    pairs: Mapping[str, Pair], tmp_path: Path
) -> None:
    """A sound's rows have a position each, in all sections of M-RoPE."""
    model = pairs["qwen2-vl"].model
    path = write_projector(tmp_path / "p.gguf", 64, kind="qwen2-omni", seed=1)
    seen, heard = picture(0), tone(1)
    with PlainSeer(model, path) as plain:
        text = "Look: <__media__> Hear: <__media__> What is it? <__media__> Hm?"
        expected = plain.answer(text, [seen, heard, seen], 8)
        first = plain.answer("<__media__><__media__> Hm?", [heard, seen], 8)
    [shown], [played] = chat("Look: ", seen), chat_with("audio", " Hear: ", heard, " What is it? ")
    [turned] = chat_with("audio", heard)
    with Pair("qwen2-omni", model, path).load(parallel=2) as engine:
        asked = [[shown, played, *chat(seen, " Hm?")], [turned, *chat(seen, " Hm?")]]
        found = engine.run(asked, options=GREEDY).results()
    assert [r.token_ids for r in found] == [expected, first]
    assert {r.usage.audio_tokens for r in found} == {30}
    assert all(r.usage.image_tokens for r in found)


@each_kind
def test_second_turn_goes_on_behind_the_first(pairs: Mapping[str, Pair], kind: str) -> None:
    pair = pairs[kind]
    with pair.load(parallel=2) as engine:
        asked = chat("Look: ", picture(0), " What is it? " * 4)
        [first] = engine.run([asked], options=GREEDY).results()
        asked += [{"role": "assistant", "content": "A thing."}, *chat(" And: ", picture(1), " Hm?")]
        [second] = engine.run([asked], options=GREEDY).results()
    text = "Look: <__media__>" + " What is it? " * 4 + "A thing. And: <__media__> Hm?"
    with PlainSeer(pair.model, pair.projector) as plain:
        assert second.token_ids == plain.answer(text, [picture(0), picture(1)], 8)
    assert first.error is None
    assert second.usage.cached_tokens > first.usage.image_tokens


def chats(seed: int) -> list[list[dict[str, Any]]]:
    """Twelve chats, of which some begin alike."""
    draw = random.Random(seed)
    begins = [chat("a" * 40, picture(0, *SIZES[1])), chat("ab" * 30), chat(picture(1))]
    asked = []
    for n in (1, 0, 2, 1, 3, 1, 0, 2, 1, 1, 2, 1):
        seen = [draw.randrange(3) for _ in range(n)]
        text = draw.choice(["What is it?", "Describe it. " * 12, "Hm"])
        asked.append([*draw.choice(begins), *chat(*(picture(i, *SIZES[i]) for i in seen), text)])
    return asked


SETTINGS: dict[str, dict[str, Any]] = {
    "partitioned": {"parallel": 4},
    "many slots": {"parallel": 12},
    "pool": {"parallel": 4, "kv": "unified"},
    "small pool": {"parallel": 6, "kv": "unified", "n_ctx": 512},
    "small steps": {"parallel": 4, "n_batch": 24, "n_ubatch": 24, "prefill_chunk": 8},
    "turns": {"parallel": 2, "policy": "round_robin", "quantum": 2},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("qwen2-vl", name) for name in ("many slots", "small pool", "turns")),
        *(("gemma3", name) for name in ("partitioned", "pool", "small steps")),
    ],
)
def test_company_changes_no_answer(pairs: Mapping[str, Pair], kind: str, name: str) -> None:
    asked, is_small = chats(3), name == "small pool"
    greedy = {**GREEDY, "max_tokens": 60 if is_small else 8, **WITH_RIVALS}
    with pairs[kind].load(parallel=1) as engine:
        alone = [engine.run([each], options=greedy).results()[0] for each in asked] * 2
    with pairs[kind].load(**SETTINGS[name]) as engine:
        together = engine.run(asked * 2, options=greedy).results(return_errors=True)
        stats = engine.stats()
    assert [r.error for r in together if r.error] == []
    found, expected = clear_tokens(together, alone, near=0.02)
    assert sum(map(len, expected)) > sum(len(r.token_ids) for r in alone) / 2
    assert found == expected
    assert [r.usage.image_tokens for r in together] == [r.usage.image_tokens for r in alone]
    assert [r.usage.prompt_tokens for r in together] == [r.usage.prompt_tokens for r in alone]
    assert is_small or stats.n_preempted == 0  # in the small pool, as the prompts happen to meet


@each_kind
def test_common_beginning_with_a_picture_is_computed_once(
    pairs: Mapping[str, Pair], kind: str
) -> None:
    asked = [chat("Look:" * 10, picture(2), f"Question {i}?") for i in range(12)]
    with pairs[kind].load(parallel=4) as engine:
        results = engine.run(asked, options=GREEDY).results()
        n_computed = engine.stats().n_prompt_tokens
    assert n_computed < sum(r.usage.prompt_tokens for r in results) / 2


def test_picture_larger_than_a_graph_run_is_refused_at_load(pairs: Mapping[str, Pair]) -> None:
    words = r"gemma3.gguf cannot be used: a picture takes 16 rows.*n_ubatch=8.*to 16 or more"
    with pytest.raises(ModelLoadError, match=words):
        pairs["gemma3"].load(parallel=1, n_ubatch=8)


def test_picture_larger_than_a_batch_is_a_step_of_its_own(pairs: Mapping[str, Pair]) -> None:
    asked = chat("Look: ", picture(0, 300, 300), " What?")
    with pairs["qwen2-vl"].load(parallel=2) as engine:
        [plain] = engine.run([asked], options=GREEDY).results()
    with pairs["qwen2-vl"].load(parallel=2, n_batch=16, n_ubatch=16) as engine:
        results = engine.run([asked, chat("Hm? " * 20), asked], options=GREEDY).results()
    assert plain.usage.image_tokens > 64
    assert [results[0].token_ids, results[2].token_ids] == [plain.token_ids] * 2


@pytest.fixture
def flat(pairs: Mapping[str, Pair]) -> Iterator[tuple[LlamaBackend, Failures]]:
    """A backend of a model whose rows of a picture share a position, and what becomes of its native runs."""
    log, failures, pair = llama_log(), Failures(), pairs["qwen2-vl"]
    log.install()
    options = EngineOptions(
        parallel=3, n_ctx=768, n_batch=256, n_threads=1, cache_type_k="f32", cache_type_v="f32"
    )
    stepper = partial(FailingStepper, failures=failures)
    backend = LlamaBackend(open_model(pair.model), Tuning(options), stepper=stepper)
    backend.see_with(str(pair.projector))
    yield backend, failures
    backend.close()
    log.remove()


def begun(backend: LlamaBackend) -> tuple[PictureTokens, list[int]]:
    """The tokens of a text with two pictures, with which all slots are bound, and the places where pictures begin."""
    assert backend.projector is not None
    pictures = [backend.projector.picture(Medium(png(i))) for i in range(2)]
    backend.projector.encode(pictures)
    texts = [backend.vocab.tokenize(text) for text in ("Look: ", " and ", " Hm?")]
    parts = [texts[0], pictures[0].tokens, texts[1], pictures[1].tokens, texts[2]]
    tokens = PictureTokens([token for part in parts for token in part], pictures)
    starts = [i for i, t in enumerate(tokens) if t >= FIRST_PICTURE and not place_of(t)[1]]
    slots = [Slot(i) for i in range(backend.n_slots)]
    binds = tuple(Binding(slot, len(tokens), GREEDILY, (), tuple(tokens)) for slot in slots)
    backend.run(StepPlan((), binds=binds))
    return tokens, starts


def test_cells_move_with_the_pictures_in_them(flat: tuple[LlamaBackend, Failures]) -> None:
    backend, _ = flat
    tokens, (first, second) = begun(backend)
    end = edges_of(tokens)[1]
    expected = go_on(backend, 0, tokens, 6)
    assert backend.n_cells[0] == len(tokens) + 5
    assert LlamaCells(backend.ctx).count(0) < backend.n_cells[0] - 8
    for n in (second, end, first):
        copies, clears = ((Slot(0), Slot(1), n),), (Slot(1),)
        given: dict[str, Any] = {"start": n, "copies": copies, "clears": clears}
        assert go_on(backend, 1, tokens[n:], 6, **given) == expected
    backend.run(StepPlan((), saves=((Slot(0), 7),)))
    for n in (len(tokens) - 1, second, end, first):
        loads, clears = ((Slot(2), 7, n),), (Slot(2),)
        given = {"start": n, "loads": loads, "clears": clears}
        assert go_on(backend, 2, tokens[n:], 6, **given) == expected
    for n in (len(tokens) - 1, second, end, first):
        assert go_on(backend, 0, tokens[n:], 6, start=n, trims=((Slot(0), n),)) == expected
    for n in (first + 1, end - 1, second + 2):
        assert is_refused(backend, StepPlan((), trims=((Slot(0), n),)))
        assert is_refused(backend, StepPlan((), copies=((Slot(0), Slot(1), n),), clears=(Slot(1),)))
        assert is_refused(backend, StepPlan((), loads=((Slot(1), 7, n),), clears=(Slot(1),)))


@pytest.mark.parametrize(("code", "i_failing"), [(1, 0), (2, 1), (-3, 2)])
def test_failed_step_leaves_whole_pictures(
    flat: tuple[LlamaBackend, Failures], code: int, i_failing: int
) -> None:
    backend, failures = flat
    tokens, (_, second) = begun(backend)
    expected = go_on(backend, 0, tokens, 6)
    backend.run(StepPlan((chunk(1, 0, tokens[:second]),)))
    failures += [*[None] * i_failing, (code, 0)]
    result = backend.run(StepPlan((chunk(2, 0, tokens),)))
    assert (result.code, backend.n_cells[2]) == (code, 0)
    assert go_on(backend, 2, tokens, 6) == expected
    failures.append((code, 0))
    result = backend.run(StepPlan((chunk(1, second, tokens[second:]),)))
    assert (result.code, backend.n_cells[1]) == (code, second)
    assert go_on(backend, 1, tokens[second:], 6) == expected


def test_step_that_fails_behind_pictures_keeps_its_tokens(
    flat: tuple[LlamaBackend, Failures],
) -> None:
    backend, failures = flat
    tokens, _ = begun(backend)
    expected = go_on(backend, 0, tokens, 6)
    [token] = go_on(backend, 1, tokens, 1)
    failures.append((2, 3))
    result = backend.run(StepPlan((chunk(1, len(tokens), [token]),), n_steps=5))
    assert (result.n_steps, result.n_kept) == (3, (len(tokens) + 3,))
    assert [token, *result.tokens[0]] == expected[:4]
    assert go_on(backend, 1, expected[3:4], 2) == expected[4:]
