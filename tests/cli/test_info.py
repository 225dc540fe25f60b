"""`cbatch info`: what a model file is, the same window as a loaded engine has, the probe on request."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import typer

import cbatch
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import RowShape
from cbatch.cli import app
from cbatch.cli.info import as_text
from tests.cli.conftest import forbid_opening, invoke
from tests.runtime.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SynthFactory


def info(model: Path, *args: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = invoke("info", model, "--json", *args)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_info_knows_the_file(synth: SynthFactory) -> None:
    model = synth(
        metadata={"general.name": "Name", "general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    )
    found = info(model)
    assert found["path"] == str(model)
    assert (found["name"], found["architecture"], found["file_type"]) == ("Name", "llama", "q8_0")
    assert found["n_bytes"] == model.stat().st_size
    assert found["has_chat_template"]
    assert found["end_tokens"] == [2, 4]
    assert found["sampling_defaults"] == {"temperature": 0.5, "top_k": 7}
    assert found["exactness"] is None


def test_info_tells_of_company_what_is_known_or_was_tried(
    zoo: Callable[[str], Path], test_model: Path
) -> None:
    assert info(test_model)["company"].startswith("together: llama")
    assert info(zoo("jamba"))["company"] is None
    assert (
        "requests run   together, unless a test while loading"
        in invoke("info", zoo("jamba")).stdout
    )
    assert info(zoo("jamba"), "--company")["company"].startswith("together: a trial")
    said = invoke("info", zoo("cogvlm"), "--company", "--parallel", 4).stdout
    assert "requests run   one at a time: llama.cpp gives other results for a prompt" in said
    assert "slots          1\n" in said


def test_terminal_obeys_no_name_of_a_model(synth: SynthFactory, tmp_path: Path) -> None:
    model = synth(metadata={"general.name": "a\x1b]0;b\x07 \u202ec"})
    assert r"'a\x1b]0;b\x07 \u202ec'" in invoke("info", model).stdout
    missing = invoke("info", tmp_path / "\x1b[31mred.gguf")
    assert r"\x1b[31mred.gguf: cannot be read" in missing.stderr


def test_info_counts_every_part_of_a_split_model(synth: SynthFactory, tmp_path: Path) -> None:
    whole = synth("test")
    first = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(whole, first)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"0" * 1000)
    assert info(first)["n_bytes"] == whole.stat().st_size + 1000


def test_info_of_a_silent_file_says_so(synth: SynthFactory) -> None:
    model = synth(metadata={"general.name": None, "tokenizer.chat_template": None})
    found = info(model)
    assert (found["name"], found["has_chat_template"]) == ("", False)
    said = invoke("info", model).stdout
    assert "name           none in the file\n" in said
    assert "chat template  none: give --chat-template" in said
    assert "sampling       none in the file\n" in said


def test_info_takes_whatever_run_takes_that_changes_sizes() -> None:
    others = {"model", "policy", "adapter", "cache_dir", "chat_template"}
    of_run = {p.name for p in _options("run") if p.rich_help_panel == "Model"} - others
    assert of_run <= {p.name for p in _options("info")}


def _options(command: str) -> list[Any]:
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    return [p for p in commands[command].params if p.param_type_name == "option"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel": 2, "ctx_per_seq": 300},
        {"parallel": 2, "n_ctx": 600},
        {"cache_type_k": "q8_0", "cache_type_v": "q4_0"},
        {"memory_mib": 12},
        {"kv": "unified", "parallel": 3},
    ],
    ids=str,
)
def test_info_tells_window_and_memory_of_a_loaded_engine(
    test_model: Path, settings: dict[str, Any]
) -> None:
    args = [part for k, v in settings.items() for part in (f"--{k.replace('_', '-')}", v)]
    found = info(test_model, *args)
    with cbatch.load(test_model, n_threads=1, **settings) as engine:
        memory = backend_of(engine, LlamaBackend).memory
        assert (found["parallel"], found["n_window"]) == (engine.parallel, engine.n_window)
    assert found["n_cells"] == memory.n_cells
    assert 0 <= memory.saved_bytes_per_cell - found["n_cell_bytes"] <= 12
    assert found["n_memory_bytes"] == memory.n_cells * found["n_cell_bytes"]
    assert not found["is_about"]


def test_info_says_what_else_would_fit(synth: SynthFactory) -> None:
    found = info(synth("test"), "--memory-mib", 4, "--ctx-per-seq", 512, "--parallel", 4)
    assert found["n_cell_bytes"] == 256
    assert found["n_budget_bytes"] == 4 * 2**20
    assert found["n_slots_fit"] == 4 * 2**20 // (512 * 256) == 32
    assert found["n_window_fit"] == 4 * 2**20 // (4 * 256) == 4096
    assert found["n_weight_bytes"] <= found["n_bytes"]
    assert found["n_free_bytes"] > 0
    wide = info(synth("test"), "--parallel", 4)
    assert wide["n_budget_bytes"] == pytest.approx(wide["n_free_bytes"] / 2, abs=1)
    assert wide["n_window_fit"] == wide["n_ctx_train"]
    most = "at most        32 slots of 512 tokens (--parallel), or 4 slots of 4,096 (--ctx-per-seq)"
    assert most in as_text(found)


def test_info_of_a_model_with_states_counts_them_by_slot(synth: SynthFactory) -> None:
    found = info(synth("mamba"), "--parallel", 3)
    assert found["n_cell_bytes"] == 0
    assert found["n_memory_bytes"] == 3 * found["n_state_bytes"] > 0
    said = invoke("info", synth("mamba"), "--parallel", 3).stdout
    assert f"KV cache       {found['n_state_bytes']:,} bytes a slot, " in said


def test_info_of_a_file_that_does_not_tell_says_so(
    synth: SynthFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = synth("test", n_ctx_train=512)
    found = info(model)
    assert found["n_window_why"] == "what the model was trained for"
    assert "KV cache       about 256 bytes a token, about " in as_text({**found, "is_about": True})
    monkeypatch.setattr("cbatch.backend.load.sizing.footprint", lambda *args: None)
    found = info(model)
    assert (found["n_cell_bytes"], found["n_memory_bytes"], found["is_about"]) == (None, None, True)
    said = as_text(found)
    assert "KV cache       not known from the file" in said
    assert "at most        not known" in said


def test_info_reads_no_weights(synth: SynthFactory) -> None:
    """What it reads of a file with weights of 13 MB is its header, by the pages that came into memory."""
    model = synth("tiny")
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(model):
        pytest.skip("this file system keeps its files in memory")
    assert info(model)["n_weight_bytes"] > 10**7
    assert resident(model) < model.stat().st_size / 2
    assert info(model, "--exactness", "--threads", 1)["exactness"]
    assert resident(model) > 10**7


def resident(path: Path) -> int:
    """The bytes of a file that are in memory."""
    libc, n = ctypes.CDLL(None), path.stat().st_size
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with path.open("rb") as file:
        at = ctypes.c_void_p(libc.mmap(None, n, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0))
    pages = (ctypes.c_ubyte * -(-n // mmap.PAGESIZE))()
    libc.mincore(at, ctypes.c_size_t(n), pages)
    libc.munmap(at, ctypes.c_size_t(n))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("given", "n_cells"),
    [
        ((), 1024),
        (("--kv", "partitioned"), 0),
        (("--ctx-per-seq", 256), 0),
        (("--memory-mib", 9), 0),
    ],
)
def test_info_tells_of_the_pool_for_short_sequences(
    test_model: Path, given: tuple[object, ...], n_cells: int
) -> None:
    found = info(test_model, "--parallel", 4, *given)
    assert found["n_short_cells"] == n_cells
    assert found["n_short_bytes"] == n_cells * found["n_cell_bytes"]
    assert ("second cache" in as_text(found)) == bool(n_cells)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (),
            "on if this model supports it (llama.cpp's default; loading the model measures whether off is faster)",
        ),
        (("--flash-attn", "off"), "off (as asked for)"),
        (("--kv", "unified"), "on if this model supports it (llama.cpp's default)"),
    ],
)
def test_info_tells_where_the_choice_of_flash_attention_comes_from(
    test_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert f"flash attn     {said}\n" in invoke("info", test_model, *given).stdout


def test_info_in_lines_is_aligned_and_complete(test_model: Path) -> None:
    result = invoke("info", test_model, "--parallel", 2, "--ctx-per-seq", 256)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line[:15].strip() for line in lines] == [
        *("name", "architecture", "file type", "file size", "parameters", "trained for"),
        *("chat template", "vocabulary", "end tokens", "sampling", "what it does", "vectors"),
        *("slots", "window", "threads"),
        *("weights", "KV cache", "flash attn", "memory", "at most", "requests run"),
    ]
    assert all(line[13:15] == "  " and line[15] != " " for line in lines)
    assert "slots          2 (as asked for)" in lines
    window = "256 tokens per slot, for prompt and answer; 512 in all"
    assert f"window         {window} (as asked for)" in lines


CORES = "the cores that it may use; fewer where that is faster"


@pytest.mark.parametrize(
    ("args", "reasons"),
    [
        ((), ("the default", "the default", "the default", CORES)),
        (("--memory-mib", 20), ("what the memory holds", "the default", "the default", None)),
        (("--memory-mib", 2), ("what the memory holds", "what the memory holds", None, None)),
        (("--ctx-per-seq", 256), ("the default", "as asked for", None, None)),
        (("--parallel", 2, "--n-ctx", 600), ("as asked for", "as asked for", None, None)),
        (("--kv", "unified", "--threads", 1), (None, None, "as asked for", "as asked for")),
    ],
    ids=str,
)
def test_info_says_where_sizes_come_from(
    test_model: Path, args: tuple[object, ...], reasons: tuple[str | None, ...]
) -> None:
    found = info(test_model, *args)
    names = ("parallel_why", "n_window_why", "kv_why", "n_threads_why")
    said = [found[name] for name in names]
    assert [a for a, b in zip(said, reasons, strict=True) if b] == [b for b in reasons if b]


def test_info_on_a_narrow_terminal_keeps_values_in_their_column(test_model: Path) -> None:
    found = info(test_model, "--parallel", 256)
    wide, narrow = as_text(found).splitlines(), as_text(found, 40).splitlines()
    assert max(map(len, narrow)) <= 40 < max(map(len, wide))
    more = [line for line in narrow if line.startswith(" ")]
    assert len(narrow) - len(more) == len(wide)
    assert all(line[:15] == " " * 15 and line[15] != " " for line in more)
    assert as_text(found, 200).splitlines() == wide


def test_model_without_permission_is_named(
    test_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_opening(test_model, monkeypatch)
    for command in (("info", test_model), ("ask", "Hi", "-m", test_model)):
        result = invoke(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"cbatch: {test_model}: cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        ("bitwise", ["decoding       in steps of 8 rows or more, in multiples of 4"]),
        ("not guaranteed: so", []),
    ],
)
def test_info_asks_the_probe_as_the_model_would_be_loaded(
    test_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    lines: list[str],
) -> None:
    asked: list[bool] = []

    def probe(model: object, options: Any, is_stopped: object) -> str:
        asked.append(options.exact)
        return "found"

    def find_exact(model: object, options: Any, is_stopped: object) -> Tuning:
        asked.append(options.exact)
        return Tuning(options, exactness=said, shape=RowShape(8, 4))

    monkeypatch.setattr("cbatch.backend.load.loader.probe", probe)
    monkeypatch.setattr("cbatch.backend.load.exact_notes.find_exact", find_exact)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert info(test_model, "--exactness")["exactness"] == "found"
    assert info(test_model, "--exact")["exactness"] == said
    assert asked == [False, True]
    plain = invoke("info", test_model, "--exactness").stdout.splitlines()
    assert plain[-1] == "exactness      found"
    found = invoke("info", test_model, "--exact").stdout.splitlines()
    wanted = [
        f"exactness      {said}",
        *lines,
        "probe          took 0.0 s in an earlier load, and is remembered",
    ]
    assert found[-len(wanted) :] == wanted
    assert asked == [False, True, False]


def test_info_answers_what_the_engine_answers(synth: SynthFactory) -> None:
    model = synth("test", type="f32")
    found = info(model, "--exactness", "--parallel", 2, "--threads", 1)
    with cbatch.load(model, parallel=2, n_threads=1) as engine:
        assert found["exactness"] == engine.exactness


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("none.gguf",), "none.gguf: cannot be read"),
        ((".",), "cbatch: ."),
        (("none.gguf", "--parallel", 0), "parallel must be 1 … 256, not 0"),
        (("none.gguf", "--cache-type-k", "q3"), "cache_type_k must be one of f16, f32, "),
        (("none.gguf", "--flash-attn", "off", "--cache-type-v", "q8_0"), "needs flash attention"),
        (("MODEL", "--parallel", 256, "--ctx-per-seq", 2**30), "llama.cpp allows at most"),
    ],
    ids=str,
)
def test_bad_input_of_info_is_one_line(
    test_model: Path, args: tuple[object, ...], words: str
) -> None:
    result = invoke("info", *(test_model if part == "MODEL" else part for part in args))
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_file_type_is_told_also_where_the_file_is_silent(
    synth: SynthFactory, tmp_path: Path, type: str
) -> None:
    model = tmp_path / "silent.gguf"
    data = synth("test", type=type).read_bytes()
    model.write_bytes(data.replace(b"general.file_type", b"general.file_typo"))
    assert f"file type      {type}\n" in invoke("info", model).stdout


def test_info_says_what_checkpoints_may_take_where_memory_cannot_be_cut(
    synth: SynthFactory,
) -> None:
    assert info(synth("test"))["checkpoint_mib"] is None
    assert 1 <= info(synth("test", n_window=16))["checkpoint_mib"] <= 4096
    assert info(synth("mamba"), "--checkpoint-mib", 5)["checkpoint_mib"] == 5
    told = invoke("info", synth("mamba"), "--checkpoint-mib", 5)
    assert "checkpoints    5.0 MiB at most" in told.stdout


def test_info_of_a_model_for_embeddings_tells_its_vectors(synth: SynthFactory) -> None:
    model = synth("bert")
    found = info(model)
    assert (found["can_generate"], found["can_embed"], found["can_rerank"]) == (False, True, False)
    assert (found["pooling"], found["n_embedding"], found["n_embed_max"]) == ("mean", 64, 512)
    said = as_text(found)
    assert "embeds texts" in said
    assert "64 numbers, pooling mean, for up to 512 tokens" in said
    assert "slots" not in said
    assert info(synth("test"))["can_generate"]


COSTS = {
    "rows_s": {"1": 0.001, "2": 0.0015},
    "prompt_s": 0.0005,
    "token_s": 0.00012,
    "cell_s": 1e-7,
    "budget_tokens": {"1": 40, "2": 64},
    "width": 2,
    "cpu_share": 0.98,
}


@pytest.mark.parametrize("share", [0.98, 0.4])
def test_info_tells_what_steps_cost_where_that_is_asked_for(
    test_model: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    asked: list[tuple[Path, dict[str, Any]]] = []

    def fitted(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
        asked.append((model, settings))
        return {**COSTS, "cpu_share": share}

    monkeypatch.setattr("cbatch.bench.fitted_costs.fitted_costs", fitted)
    assert info(test_model)["costs"] is None
    assert not asked
    assert info(test_model, "--costs", "--parallel", 2)["costs"] == {**COSTS, "cpu_share": share}
    [(model, settings)] = asked
    assert (model, settings["parallel"]) == (test_model, 2)
    lines = invoke("info", test_model, "--costs").stdout.splitlines()[-5:]
    assert lines[-1].startswith("best width     2 rows, 1,333 tokens/s")
    assert "decoding step  1 ms with 1, 1.5 ms with 2 rows" in lines
    assert (
        "prompts        0.5 ms more for a step with prompts, and 0.12 ms for each prompt token (0.22 ms after 1,000 "
        "others)"
    ) in lines
    assert any(line.startswith("prompt budget  40 beside 1, 64 beside 2 rows") for line in lines)
    assert any(line.startswith("measured       with 40% of the cores") for line in lines) == (
        share < 0.7
    )
