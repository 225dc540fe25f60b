"""Slots and windows: as many as fit, what was said as it was said, and the measure of prompts that come."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cbatch
from cbatch.backend.llama.context import DEFAULT_WINDOW
from cbatch.backend.llama.layout import Footprint
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.load import attention, sizing
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.backend.load.sizing import (
    COMMON_FOR_UNIFIED,
    Room,
    SlotSizes,
    WorkloadProfile,
    check_fits,
    choose_kv,
    choose_sizes,
    find_room,
    n_common_tokens,
    read_profile,
    settle,
    trained_window,
    wanted_window,
)
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, ModelLoadError
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

MIB = 2**20
KIB_A_CELL = 1024


def room(n_cells: int | None, n_state_bytes: int = 0) -> Room:
    """Room for so many cells of a KiB; None for one that nobody knows."""
    n_budget = None if n_cells is None else n_cells * KIB_A_CELL
    return Room(Footprint(KIB_A_CELL, n_state_bytes), n_budget)


@pytest.fixture(scope="module")
def model(synth: SynthFactory) -> Iterator[LlamaModel]:
    """A model of 256 bytes a cell, trained for 32,768 positions."""
    with closing(open_model(synth("test"))) as opened:
        yield opened


@pytest.fixture(autouse=True)
def usual_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not faster without flash attention."""
    monkeypatch.setattr(attention, "find_attention", lambda model, options: None)


def look(*prompts: BatchPrompt, is_all: bool = True, **options: Any) -> LookAhead:
    return LookAhead(
        [(p, RunOptions.of(p.options).over(RunOptions(**options))) for p in prompts], is_all
    )


def tokens(n: int, first: int = 300, **options: Any) -> BatchPrompt:
    return BatchPrompt(tokens=[first, *[301] * (n - 1)], options=options)


# ---- what fits ----


@pytest.mark.parametrize(
    ("parallel", "n_most", "fits", "chosen"),
    [
        (None, 2048, room(16 * 2048), SlotSizes(16, 2048)),
        (None, 2048, room(10**9), SlotSizes(16, 2048)),
        (None, 2048, room(16 * 2048 - 1), SlotSizes(15, 2048)),
        (None, 2048, room(2 * 2048 - 1), SlotSizes(1, 2048)),
        (None, 2048, room(2048 - 1), SlotSizes(1, 1792)),
        (None, 2048, room(256), SlotSizes(1, 256)),
        (8, 2048, room(8 * 2048), SlotSizes(8, 2048)),
        (8, 2048, room(8 * 2048 - 1), SlotSizes(8, 1792)),
        (64, 2048, room(64 * 256), SlotSizes(64, 256)),
        (100, 2048, room(100 * 2048), SlotSizes(100, 2048)),
        # states count for each slot
        (None, 2048, room(8 * 2048 + 8, n_state_bytes=KIB_A_CELL), SlotSizes(8, 2048)),
        (None, 2048, Room(Footprint(0, 100), 1000), SlotSizes(10, 2048)),
        # what nobody knows is no limit
        *(
            (parallel, 4096, unknown, SlotSizes(parallel or 16, 4096))
            for parallel in (None, 256)
            for unknown in (room(None), Room(None, 5), Room(None, None))
        ),
    ],
)
def test_slots_give_way_unless_they_were_said_and_then_the_window(
    parallel: int | None, n_most: int, fits: Room, chosen: SlotSizes
) -> None:
    assert choose_sizes(parallel, n_most, fits) == chosen


@pytest.mark.parametrize(
    ("parallel", "n_cells"), [(None, 255), (None, 0), (2, 511), (64, 64 * 255)]
)
def test_nothing_that_fits_is_an_error_with_numbers_and_ways_out(
    parallel: int | None, n_cells: int
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        choose_sizes(parallel, 2048, room(n_cells))
    words = str(caught.value)
    assert words.startswith(f"{parallel or 1} slot")
    for part in (
        f"{(parallel or 1) * 256 / 1024:,.1f} MiB",
        f"{n_cells / 1024:,.1f} MiB",
        *("memory_mib", "parallel", "cache_type_k", "ctx_per_seq"),
    ):
        assert part in words


@given(st.integers(1, 20), st.integers(1, 5000), st.integers(0, 40_000))
def test_widest_window_fits_and_the_next_does_not(n_slots: int, n_most: int, n_cells: int) -> None:
    fits = room(n_cells)
    found = fits.most_window(n_slots, n_most)
    steps = [n for n in range(256, n_most + 1, 256) if fits.holds(n_slots, n)]
    assert found == (n_most if fits.holds(n_slots, n_most) else max(steps, default=0))


# ---- the window that is wanted ----


@pytest.mark.parametrize(
    ("demand", "n_trained", "n_window"),
    [
        (WorkloadProfile(), 32768, 2048),
        (WorkloadProfile(), 100, 100),
        (WorkloadProfile(), 0, 2048),
        (WorkloadProfile(700, is_all=True), 32768, 768),
        (WorkloadProfile(700), 32768, 2048),
        (WorkloadProfile(5000), 32768, 5120),
        (WorkloadProfile(5000, is_all=True), 32768, 5120),
        (WorkloadProfile(5000, is_all=True), 4096, 4096),
        (WorkloadProfile(700, is_all=True), 0, 768),
        (WorkloadProfile(is_all=True), 32768, 2048),
    ],
)
def test_window_is_what_prompts_need(
    demand: WorkloadProfile, n_trained: int, n_window: int
) -> None:
    assert wanted_window(demand, n_trained) == n_window


def test_yarn_widens_what_a_model_is_made_for(model: LlamaModel, synth: SynthFactory) -> None:
    assert trained_window(model, EngineOptions()) == 32768
    sizes: dict[str, Any] = {"parallel": 1, "ctx_per_seq": 256, "n_threads": 1}
    yarn = EngineOptions(rope_scaling="yarn", rope_freq_scale=0.25, **sizes)
    assert trained_window(model, yarn) == 4 * 32768
    with closing(open_model(synth("test"))) as opened:  # as llama.cpp corrects its own number
        LlamaBackend(opened, Tuning(yarn), owns_model=False).close()
        assert llama_cpp.llama_model_n_ctx_train(opened.pointer) == 4 * 32768
    assert trained_window(model, EngineOptions(rope_scaling="yarn")) == 32768
    said = EngineOptions(rope_scaling="yarn", rope_freq_scale=0.5, yarn_orig_ctx=1000)
    assert trained_window(model, said) == 2000


# ---- prompts that come ----


PICTURE = BatchPrompt(
    [
        {
            "role": "user",
            "content": [{"type": "image", "image": bytes(30_000)}, {"type": "text", "text": "Hm?"}],
        }
    ]
)


@pytest.mark.parametrize(
    ("prompts", "options", "n_window"),
    [
        ([tokens(100, max_tokens=50), tokens(90, max_tokens=70)], {"max_tokens": 7}, 160),
        ([tokens(100)], {"max_tokens": 7}, 107),
        ([tokens(100)], {}, 2048),
        ([tokens(3000)], {}, 3000 + 512),
        ([BatchPrompt(prompt="half \ud83d"), tokens(10)], {"max_tokens": 5}, 15),
        ([BatchPrompt(prompt="half \ud83d")], {}, 0),
        ([PICTURE], {"max_tokens": 1}, DEFAULT_WINDOW),
    ],
    ids=["longest", "cap of all", "no cap", "long", "one unreadable", "unreadable", "picture"],
)
def test_window_of_prompts_is_that_of_the_longest_with_its_output(
    model: LlamaModel, prompts: list[BatchPrompt], options: dict[str, Any], n_window: int
) -> None:
    assert read_profile(model.vocab, look(*prompts, **options)).n_window == n_window


def test_prompts_that_are_looked_at_are_counted_with_their_answers(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = look(tokens(100, max_tokens=50, best_of=3), tokens(90, max_tokens=70))
    n_common, n_cells = (90 + 2 * 100) / 4, (3 * 150 + 160) / 4  # answers to one prompt share it
    assert read_profile(model.vocab, ahead) == WorkloadProfile(160, n_common, n_cells, is_all=True)
    monkeypatch.setattr(sizing, "N_LOOKED_AT", 2)
    some = look(tokens(10), tokens(20), tokens(3000), max_tokens=1)
    found = WorkloadProfile(21, 10 / 2, (11 + 21) / 2, is_all=False)
    assert read_profile(model.vocab, some) == found
    monkeypatch.setattr(sizing, "N_LOOKED_AT", 3)
    monkeypatch.setattr(sizing, "N_TOKENS_READ", 30)
    assert read_profile(model.vocab, some) == found


def test_text_and_chats_are_read_as_the_model_does(model: LlamaModel) -> None:
    chat = [{"role": "user", "content": "Say red."}]
    n_text, n_chat = len(model.vocab.tokenize("Say red.")), len(model.vocab.render(chat))
    assert n_chat > n_text
    assert (
        read_profile(model.vocab, look(BatchPrompt(prompt="Say red."), max_tokens=1)).n_window
        == n_text + 1
    )
    assert read_profile(model.vocab, look(BatchPrompt(chat), max_tokens=1)).n_window == n_chat + 1


@pytest.mark.parametrize(
    ("prompts", "n_common"),
    [
        ([], 0),
        ([[1, 2, 3]], 0),
        ([[1, 2], [3, 4]], 0),
        ([[1, 2, 3, 4], [1, 2, 9, 9]], 2),
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[5], [1, 2, 3, 4], [6], [1, 2, 3, 5], [1, 2, 3]], 6),
        ([[1, 2], [1, 2, 3, 4]], 2),
    ],
)
def test_common_prefixes_are_counted_once_per_request_that_reuses_them(
    prompts: list[list[int]], n_common: int
) -> None:
    assert n_common_tokens(prompts) == n_common


def test_one_pool_is_for_much_in_common_where_it_may_be() -> None:
    def chosen(n_common: float, n_cells: float, *, has_states: bool = False) -> str:
        demand = WorkloadProfile(n_common=n_common, n_cells=n_cells)
        return choose_kv(EngineOptions(), demand, has_states=has_states)

    n = COMMON_FOR_UNIFIED
    assert chosen(n, 1.5 * n) == "unified"
    assert chosen(n, 1.5 * n + 1) == "partitioned"
    assert chosen(n - 1, n) == "partitioned"
    assert chosen(n, n, has_states=True) == "partitioned"


def test_look_ahead_of_other_things_is_refused(test_model: Path) -> None:
    wrong: list[Any] = [[BatchPrompt(prompt="a")], [("a", RunOptions())], [(tokens(3), {})], [1]]
    for pairs in wrong:
        with pytest.raises(ConfigError, match="pairs of a BatchPrompt"):
            LookAhead(pairs)
    with pytest.raises(ConfigError, match="look_ahead"):
        cbatch.load(test_model, look_ahead=wrong[0])


# ---- options, settled ----

ALIKE = (tokens(700, max_tokens=9),) * 12


@pytest.mark.parametrize(
    ("settings", "ahead", "settled"),
    [
        ({}, None, {"parallel": 16, "ctx_per_seq": 2048, "n_ctx": None, "kv": "partitioned"}),
        ({"parallel": 3}, None, {"parallel": 3, "ctx_per_seq": 2048}),
        ({"kv": "unified"}, None, {"parallel": 16, "ctx_per_seq": None, "n_ctx": 32768}),
        ({"n_ctx": 4096}, None, {"parallel": 16, "ctx_per_seq": None, "n_ctx": 4096}),
        ({"ctx_per_seq": 300}, None, {"parallel": 16, "ctx_per_seq": 300, "n_ctx": None}),
        (
            {"kv": "unified", "ctx_per_seq": 300, "n_ctx": 999},
            None,
            {"parallel": 16, "ctx_per_seq": 300, "n_ctx": 999},
        ),
        ({"kv": "unified", "ctx_per_seq": 300}, None, {"ctx_per_seq": 300, "n_ctx": None}),
        ({}, look(tokens(9), max_tokens=9), {"ctx_per_seq": 256, "kv": "partitioned"}),
        ({}, look(tokens(9000), max_tokens=9), {"ctx_per_seq": 9216, "parallel": 16}),
        ({}, look(*ALIKE), {"kv": "unified", "n_ctx": 16 * 768, "ctx_per_seq": None}),
        ({"exact": True}, look(*ALIKE), {"kv": "partitioned", "ctx_per_seq": 768}),
        ({"kv": "partitioned"}, look(*ALIKE), {"kv": "partitioned"}),
        ({"ctx_per_seq": 512}, look(tokens(9000)), {"ctx_per_seq": 512}),
        ({"n_ctx": 8192}, look(*ALIKE), {"kv": "unified", "n_ctx": 8192}),
    ],
)
def test_what_was_not_said_is_settled(
    model: LlamaModel, settings: dict[str, Any], ahead: LookAhead | None, settled: dict[str, Any]
) -> None:
    found = settle(model, EngineOptions.of(settings), Room(Footprint(256), 10**9), ahead)
    assert {name: getattr(found, name) for name in settled} == settled


def test_recurrent_model_keeps_states_of_its_own_whatever_comes(synth: SynthFactory) -> None:
    with closing(open_model(synth("mamba"))) as mamba:
        assert settle(mamba, EngineOptions(), Room(None, None), look(*ALIKE)).kv == "partitioned"


def test_window_that_was_said_is_tried_even_where_it_does_not_fit(model: LlamaModel) -> None:
    tight = Room(Footprint(256), 3 * 512 * 256)
    assert settle(model, EngineOptions(ctx_per_seq=512), tight).parallel == 3
    assert settle(model, EngineOptions(ctx_per_seq=4096), tight).parallel == 1
    assert settle(model, EngineOptions(ctx_per_seq=4096, parallel=5), tight).parallel == 5


def test_cells_that_the_host_cannot_hold_are_refused_with_numbers(
    model: LlamaModel, test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = EngineOptions(parallel=2, ctx_per_seq=2**20)
    monkeypatch.setattr(sizing, "host_most", lambda: MIB)
    with pytest.raises(ModelLoadError, match=r"and 1\.0 MiB are free"):
        cbatch.load(test_model, parallel=1, ctx_per_seq=2**16)
    described = describe_model(test_model, EngineOptions(ctx_per_seq=2**16), asks_probe=False)
    assert described["n_memory_bytes"] > MIB
    monkeypatch.setattr(sizing, "host_most", lambda: 511 * MIB)
    with pytest.raises(ModelLoadError, match="2,097,152 cells for 2 slots") as caught:
        check_fits(model, said, Room(Footprint(256), None))
    for words in ("512.0 MiB of memory, and 511.0 MiB are free", "parallel", "ctx_per_seq"):
        assert words in str(caught.value)
    check_fits(model, said, Room(Footprint(256, is_about=True), None))
    check_fits(model, said, Room(None, None))
    monkeypatch.setattr(sizing, "host_most", lambda: 512 * MIB)
    check_fits(model, said, Room(Footprint(256), None))


def test_less_than_wanted_is_said_in_the_log(
    model: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cbatch"):
        settle(model, EngineOptions(), Room(Footprint(256), 16 * 2048 * 256))
        settle(model, EngineOptions(parallel=3, ctx_per_seq=256), Room(Footprint(256), 10**9))
        assert not caplog.records
        settle(model, EngineOptions(), Room(Footprint(256), 3 * MIB))
        settle(model, EngineOptions(parallel=8), Room(Footprint(256), 3 * MIB))
        settle(model, EngineOptions(ctx_per_seq=4096), Room(Footprint(256), 3 * MIB))
    slots, window, said = (r.getMessage() for r in caplog.records)
    assert "6 slots of 2048 tokens: 16 slots of 2048 would take 8.0 MiB" in slots
    assert "budget is 3.0 MiB; memory_mib sets another" in slots
    assert window.startswith("8 slots of 1536 tokens: 8 slots of 2048")
    assert said.startswith("3 slots of 4096 tokens: 16 slots of 4096")


@pytest.mark.parametrize(
    ("settings", "n_projector", "n_free", "n_budget"),
    [
        ({}, None, 10_000, 5000),
        ({"memory_mib": 7}, None, 10_000, 7 * MIB),
        ({}, 3000, 10_000, 3500),
        ({}, None, None, None),
    ],
    ids=["half", "said", "beside a projector", "unknown"],
)
def test_budget_is_what_was_said_or_half_of_what_is_free(
    model: LlamaModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    n_projector: int | None,
    n_free: int | None,
    n_budget: int | None,
) -> None:
    def free(model: object, options: object, *, n_unloaded: int) -> int | None:
        return None if n_free is None else n_free - n_unloaded

    monkeypatch.setattr(sizing, "free_for_cells", free)
    if n_projector is not None:
        (tmp_path / "p.gguf").write_bytes(bytes(n_projector))
    projector = None if n_projector is None else tmp_path / "p.gguf"
    found = find_room(model, EngineOptions.of({**settings, "mmproj": projector}))
    assert (found.n_budget, found.footprint) == (n_budget, Footprint(256))


# ---- from load on ----


def test_engine_has_the_slots_that_its_budget_holds(test_model: Path) -> None:
    n_cell_bytes = describe_model(test_model, EngineOptions(), asks_probe=False)["n_cell_bytes"]
    n_mib = -(-5 * 2048 * n_cell_bytes // MIB)
    with cbatch.load(test_model, memory_mib=n_mib, n_threads=1) as engine:
        assert (engine.parallel, engine.n_window) == (5, 2048)
    with cbatch.load(test_model, memory_mib=1, n_threads=1) as engine:
        assert (engine.parallel, engine.n_window) == (1, 256)
    with pytest.raises(
        ModelLoadError, match=r"3 slots of 256 cells, .* the memory budget is 1.0 MiB"
    ):
        cbatch.load(test_model, memory_mib=1, parallel=3)


def test_cells_take_the_memory_that_sizing_says(synth: SynthFactory) -> None:
    """A context of 32 times the cells is larger by their bytes; what it computes in does not grow with them."""
    path = synth("tiny")
    sizes = [rss_of_a_load(path, n) for n in (1024, 64 * 1024)]
    n_cell_bytes = describe_model(path, EngineOptions(), asks_probe=False)["n_cell_bytes"]
    n_expected = 63 * 1024 * n_cell_bytes
    assert sizes[1] - sizes[0] == pytest.approx(n_expected, rel=0.15)


def rss_of_a_load(path: Path, n_ctx: int) -> int:
    """Bytes of a process of its own with an engine of one slot of so many cells, whose buffers llama.cpp clears."""
    code = (
        "import sys, cbatch\n"
        "with cbatch.load(sys.argv[1], parallel=1, n_ctx=int(sys.argv[2]), n_threads=1, flash_attn='on'):\n"
        "    words = open('/proc/self/status').read().split()\n"
        "    print(words[words.index('RssAnon:') + 1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(n_ctx)],
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout) * 1024


def test_engine_is_made_to_the_measure_of_prompts(test_model: Path) -> None:
    short = look(tokens(200, max_tokens=100), tokens(20, 305, max_tokens=100))
    with cbatch.load(test_model, look_ahead=short, n_threads=1) as engine:
        assert (engine.parallel, engine.n_window) == (16, 512)
    some = LookAhead(short.prompts)
    with cbatch.load(test_model, look_ahead=some, parallel=2, n_threads=1) as engine:
        assert engine.n_window == 2048
    with cbatch.load(test_model, look_ahead=short, ctx_per_seq=300, n_threads=1) as engine:
        assert engine.n_window == 512


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"ctx_per_seq": 512}, True),
        ({"n_ctx": 1024}, True),
        ({"kv": "unified", "ctx_per_seq": 512, "n_ctx": 1024}, True),
        ({"ctx_per_seq": 256}, False),
        ({"ctx_per_seq": 512, "rope_scaling": "yarn", "rope_freq_scale": 0.25}, False),
        ({"ctx_per_seq": 512, "rope_freq_base": 1e6}, False),
        ({}, False),
    ],
    ids=str,
)
def test_load_warns_once_of_windows_beyond_the_trained_length(
    synth: SynthFactory, settings: dict[str, Any], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = synth("test", metadata={"llama.context_length": 200})
    with caplog.at_level(logging.WARNING, "cbatch"), cbatch.load(model, parallel=2, **settings):
        said = [r.getMessage() for r in caplog.records if "was trained for" in r.getMessage()]
    words = "a slot holds 512 tokens, but the model was trained for 200: "
    assert [line.startswith(words) for line in said] == [True] * is_warned
