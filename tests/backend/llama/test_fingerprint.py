"""What saved cells depend on: the same for the same cells, another wherever they would be read as something else."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest

from cbatch.backend.llama import fingerprint as subject
from cbatch.backend.llama.fingerprint import (
    answer_settings,
    digest_of_loaded,
    file_digest,
    fingerprint,
    model_parts,
    rope_factors,
)
from cbatch.backend.llama.llama_backend import LlamaBackend
from cbatch.backend.llama.model_tuning import Tuning
from cbatch.backend.llama.pad_rows import ANY_SHAPE, RowShape
from cbatch.backend.load.open_model import open_model
from cbatch.core.span import ANYWHERE, PromptCuts
from cbatch.engine_options import EngineOptions
from tests.zoo import write_arch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backend.slots import MakeBackend
    from tests.conftest import SynthFactory


def of(path: Path, **given: Any) -> dict[str, str]:
    return fingerprint(file_digest(model_parts(str(path))), EngineOptions(**given))


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    file_digest.cache_clear()


# ---- the model ----


def test_two_models_differ_in_the_model_alone(synth: SynthFactory) -> None:
    first, second = of(synth("test")), of(synth("test", seed=1))
    assert {name for name in first if first[name] != second[name]} == {"model"}
    assert first["llama-cpp-python"] == llama_cpp.__version__


def test_one_file_at_two_places_is_one_model(synth: SynthFactory, tmp_path: Path) -> None:
    copied = tmp_path / "other-name.gguf"
    shutil.copy(synth("test"), copied)
    os.utime(copied, (1, 1))
    assert of(copied) == of(synth("test"))
    link = tmp_path / "link.gguf"
    link.symlink_to(copied)
    assert of(link) == of(copied)


def test_weights_that_change_in_place_or_grow_are_noticed(
    synth: SynthFactory, tmp_path: Path
) -> None:
    path, data = tmp_path / "model.gguf", synth("test").read_bytes()
    digests = set[str]()
    for i_changed in (None, 100, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        if i_changed is not None:
            changed[i_changed] ^= 1
        path.write_bytes(changed)
        os.utime(path, ns=(7, i_changed or 7))
        digests.add(of(path)["model"])
    path.write_bytes(data + b"\0")
    assert len({*digests, of(path)["model"]}) == 5


def test_places_far_apart_in_a_large_file_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_N_HEAD_BYTES", 1000), ("_N_SAMPLE_BYTES", 10), ("_N_SAMPLES", 8)):
        monkeypatch.setattr(subject, name, value)
    path, data = tmp_path / "model.gguf", bytearray(8000)
    digests = list[str]()
    for i_changed in (None, 999, 7000, 7009, 6999):
        changed = data.copy()
        if i_changed is not None:
            changed[i_changed] = 1
        path.write_bytes(changed)
        digests.append(file_digest(((path, len(data), len(digests)),)))
    assert digests[0] == digests[4]  # between two samples: the limit that the docstring names
    assert len(set(digests)) == 4


def parts(folder: Path, *contents: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    names = [f"m-{i + 1:05}-of-{len(contents):05}.gguf" for i in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    return folder / names[0]


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    split = [b"one", b"two", b"three"]
    digests = {of(parts(tmp_path / "0", *split))["model"]}
    for i in range(3):
        changed = [*split[:i], split[i] + b"!", *split[i + 1 :]]
        digests.add(of(parts(tmp_path / str(i + 1), *changed))["model"])
    digests.add(of(parts(tmp_path / "4", *split[:2]))["model"])
    digests.add(of(parts(tmp_path / "5", *split[::-1]))["model"])
    assert len(digests) == 6


def test_split_model_is_read_once_until_a_part_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parts(tmp_path, b"one", b"two")
    before = of(path)
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"another")
    (tmp_path / "other-00002-of-00002.gguf").write_bytes(b"another")
    (tmp_path / "m-large-00002-of-00002.gguf").write_bytes(b"another")
    file_digest.cache_clear()
    assert of(path) == before
    monkeypatch.setattr(hashlib, "sha256", lambda: pytest.fail("read twice"))
    assert of(path) == before
    monkeypatch.undo()
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"TWO")
    assert of(path)["model"] != before["model"]


def test_large_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(2**40)  # holes: a TiB that takes no room
    start = time.process_time()
    of(path)
    assert time.process_time() - start < 5


# ---- what else the cells depend on ----

CHANGES: dict[str, Any] = {
    "cache_type_k": "q8_0",
    "cache_type_v": "f32",
    "exact": True,
    "rope_scaling": "yarn",
    "rope_freq_base": 10_000.0,
    "rope_freq_scale": 0.5,
    "yarn_ext_factor": 0.5,
    "yarn_attn_factor": 0.5,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 512,
}


def test_every_setting_that_is_named_is_tried_here() -> None:
    assert set(CHANGES) == set(subject._SETTINGS)


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_changes_what_it_is_named_after_alone(synth: SynthFactory, name: str) -> None:
    before, after = of(synth("test")), of(synth("test"), **{name: CHANGES[name]})
    assert {key for key in before if before[key] != after[key]} == {name}


def test_flash_attention_changes_exact_cells_alone(synth: SynthFactory) -> None:
    path = synth("test")
    for given in ({"flash_attn": "off"}, {"n_threads": 1}, {"n_batch": 64}, {"parallel": 2}):
        assert of(path, **given) == of(path)
    assert of(path, exact=True, flash_attn="off") != of(path, exact=True)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"cache_type_k": "q8_0"}, {"cache_type_k"}),
        ({"cache_type_v": "q8_0"}, {"cache_type_v"}),
        ({"rope_freq_base": 5e5}, {"rope"}),
        ({"rope_scaling": "yarn", "yarn_orig_ctx": 4096}, {"rope"}),
        ({"exact": True}, {"exact"}),
        ({"parallel": 3, "n_ctx": 4096, "n_threads": 7, "n_gpu_layers": 3, "n_ubatch": 64}, set()),
        ({"kv": "unified", "offload_kqv": False, "swap_mib": 1, "policy": "shortest"}, set()),
        ({"flash_attn": "off"}, set()),
    ],
)
def test_answers_depend_on_what_changes_more_than_the_rounding(
    given: dict[str, Any], names: set[str]
) -> None:
    plain = answer_settings(EngineOptions(), ANY_SHAPE, ANYWHERE, 2048)
    other = answer_settings(EngineOptions(**given), ANY_SHAPE, ANYWHERE, 2048)
    assert {name for name in plain if plain[name] != other[name]} == names


@pytest.mark.parametrize(
    "given", [{"n_gpu_layers": 3}, {"offload_kqv": False}, {"flash_attn": "off"}]
)
def test_exact_answers_depend_on_what_changes_the_rounding(given: dict[str, Any]) -> None:
    def settings(*, n_chunk: int = 512, shape: RowShape = ANY_SHAPE, **said: Any) -> object:
        return answer_settings(
            EngineOptions(exact=True, **said), shape, PromptCuts.every(n_chunk), 2048
        )

    exact = settings()
    assert exact not in (settings(n_chunk=64), settings(**given), settings(shape=RowShape(2, 1)))
    assert exact == settings(parallel=3)
    # a lone row's cells are divided among threads by flash attention alone
    assert exact != settings(n_threads=7)
    assert settings(flash_attn="off") == settings(flash_attn="off", n_threads=7)


def test_exact_answers_do_not_depend_on_slots_where_no_prompt_is_cut(make: MakeBackend) -> None:
    two, three = (
        make("partitioned", exact=True, parallel=n, n_ctx=None, ctx_per_seq=256) for n in (2, 3)
    )
    assert two.cuts != three.cuts
    assert two.answer_settings == three.answer_settings


@pytest.mark.parametrize("kind", ["partitioned", "unified", "recurrent"])
def test_number_of_slots_and_their_window_do_not_count(make: MakeBackend, kind: str) -> None:
    plain = make(kind).fingerprint(())
    assert plain == make(kind, parallel=2, n_ctx=512).fingerprint(())
    assert all(isinstance(value, str) for value in plain.values())
    if kind == "partitioned":
        assert plain == make("unified").fingerprint(())
        exact = make("partitioned", exact=True).fingerprint(())
        assert {key for key in plain if plain[key] != exact[key]} == {"exact", "pieces"}


@pytest.mark.real
@pytest.mark.parametrize(
    ("said", "n_ctx_seq", "factors"),
    [
        ({}, 512, "one"),
        ({"type": "yarn", "original_context_length": 300}, 512, "one"),
        ({"type": "longrope"}, 4096, "short"),
        ({"type": "longrope"}, 4097, "long"),
        ({"type": "longrope", "original_context_length": 300}, 300, "short"),
        ({"type": "longrope", "original_context_length": 300}, 301, "long"),
    ],
    ids=str,
)
def test_window_beyond_the_original_one_takes_the_long_factors(
    tmp_path: Path, said: dict[str, Any], n_ctx_seq: int, factors: str
) -> None:
    metadata = {"context_length": 4096, **{f"rope.scaling.{key}": said[key] for key in said}}
    path = write_arch("llama", tmp_path / "model.gguf", metadata=metadata)
    with closing(open_model(path)) as model:
        assert rope_factors(model, n_ctx_seq) == factors


@pytest.mark.real
def test_windows_that_take_other_factors_differ_in_them_alone(longrope_model: Path) -> None:
    found = []
    for n_window in (512, 1024, 1280):
        options = EngineOptions(kv="partitioned", parallel=2, ctx_per_seq=n_window)
        with closing(LlamaBackend(open_model(longrope_model), Tuning(options))) as backend:
            found.append(backend.fingerprint(()))
    shorter, short, long = found
    assert short == shorter
    assert {key for key in short if short[key] != long[key]} == {"rope factors"}
    assert (short["rope factors"], long["rope factors"]) == ("short", "long")


# ---- the file that was loaded ----


@pytest.mark.parametrize("change", ["replaced", "rewritten", "gone"])
def test_file_that_is_not_the_one_that_was_loaded_has_no_fingerprint(
    tmp_path: Path, change: str
) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    path.write_bytes(b"weights")
    os.utime(path, (1, 1))
    loaded = model_parts(str(path))
    if change == "replaced":
        other.write_bytes(b"WEIGHTS")
        other.replace(path)
    elif change == "rewritten":
        path.write_bytes(b"more weights")
        os.utime(path, (1, 1))
    else:
        path.unlink()
    with pytest.raises(OSError, match="removed or replaced"):
        fingerprint(digest_of_loaded(loaded), EngineOptions())


def test_file_that_changes_amid_its_load_has_no_fingerprint(
    synth: SynthFactory, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(synth("test"), path)

    def is_stopped() -> bool:
        os.utime(path, (1, 1))
        return False

    model = open_model(path, is_stopped=is_stopped)
    with closing(model), pytest.raises(OSError, match="removed or replaced"):
        fingerprint(model.digest, EngineOptions())


def test_fingerprint_is_of_the_file_that_was_loaded(
    synth: SynthFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(synth("test"), tmp_path / "m.gguf")
    monkeypatch.chdir(tmp_path)
    options = EngineOptions(parallel=2, n_ctx=512, n_threads=1)
    backend = LlamaBackend(open_model("m.gguf"), Tuning(options))
    monkeypatch.chdir("/")
    try:
        before = backend.fingerprint(())
        assert before["model"] == of(synth("test"))["model"]
        os.utime(tmp_path / "m.gguf", (1, 1))
        file_digest.cache_clear()
        assert backend.fingerprint(()) == before
        (tmp_path / "m.gguf").unlink()
        assert backend.fingerprint(()) == before
    finally:
        backend.close()
