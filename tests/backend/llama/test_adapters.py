"""Adapters on a real llama.cpp: they change what is computed as they should, and no file ends the process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import gguf
import llama_cpp
import numpy as np
import pytest

import cbatch
from cbatch.backend.llama.adapters import Adapters
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError
from tests.backend.lora import ALL, ALPHA, write_lora

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

    Logits = NDArray[np.float32]

PROMPT = (5, 300, 301, 302, 303)
N_SEQUENCES = 16


@pytest.fixture(scope="module", autouse=True)
def quiet_llama() -> Iterator[None]:
    log = llama_log()
    log.install()
    yield
    log.remove()


@pytest.fixture(scope="module")
def files(test_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two adapters for it, `one` and `two`."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_lora(folder / f"{name}.gguf", test_model, seed=seed, targets=ALL)
        for seed, name in enumerate(("one", "two"))
    }


class Context:
    """A context to decode rows of tokens in; each ends with the logits of its last tokens."""

    def __init__(self, model: LlamaModel, *, flash_attn: int = 0) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 64 * N_SEQUENCES, N_SEQUENCES
        params.n_batch = params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = flash_attn
        self._n_vocab = model.vocab.n_vocab
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        assert self.pointer

    def logits(self, *prompts: Sequence[int]) -> Logits:
        """Return (n_prompts, n_vocab): each prompt computed alone, then the last tokens of all in one step."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.pointer), True)
        for i, prompt in enumerate(prompts):
            self._decode([(i, at, token) for at, token in enumerate(prompt[:-1])])
        self._decode([(i, len(prompt) - 1, prompt[-1]) for i, prompt in enumerate(prompts)])
        rows = [llama_cpp.llama_get_logits_ith(self.pointer, i) for i in range(len(prompts))]
        return np.array([np.ctypeslib.as_array(row, shape=(self._n_vocab,)) for row in rows])

    def _decode(self, rows: Sequence[tuple[int, int, int]]) -> None:
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (sequence, at, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = llama_cpp.llama_decode(self.pointer, batch)
        llama_cpp.llama_batch_free(batch)
        assert code == 0

    def close(self) -> None:
        llama_cpp.llama_free(self.pointer)


@pytest.fixture
def ctx(model: LlamaModel) -> Iterator[Context]:
    with closing(Context(model)) as made:
        yield made


@pytest.fixture
def adapters(
    model: LlamaModel, files: dict[str, Path], ctx: Context
) -> Iterator[Adapters]:  # the context is freed before them
    loaded = Adapters(model, files)
    yield loaded
    loaded.use(ctx.pointer, ())
    loaded.close()


# --- what they do ---


@pytest.mark.parametrize(("flash_attn", "exact"), [(0, True), (1, False)])
def test_adapter_changes_the_logits_and_without_it_they_are_the_models(
    test_model: Path, files: dict[str, Path], flash_attn: int, exact: bool
) -> None:
    model = open_model(test_model, EngineOptions(exact=exact))
    ctx, adapters = Context(model, flash_attn=flash_attn), Adapters(model, files)
    base = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, (("one", 1.0),))
    adapted = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, ())
    assert np.isfinite(adapted).all()
    assert np.abs(adapted - base).max() > 0.1
    assert np.array_equal(ctx.logits(PROMPT), base)
    for thing in (ctx, adapters, model):
        thing.close()


@pytest.mark.parametrize("target", ["attn_q", "ffn_down", "output.weight"])
def test_adapter_computes_what_merged_weights_compute(
    synth: SynthFactory, tmp_path: Path, target: str
) -> None:
    base = synth("test", type="f32")
    lora = write_lora(tmp_path / "a.gguf", base, targets=[target], type="f32", alpha=12.0)
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(base.read_bytes())
    _merge(merged, lora, scale=0.5 * 12.0 / 4)
    model = open_model(base)
    ctx, adapters = Context(model), Adapters(model, {"a": lora})
    unadapted = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, (("a", 0.5),))
    found = ctx.logits(PROMPT)
    assert np.abs(found - unadapted).max() > 0.1
    for thing in (ctx, adapters, model):
        thing.close()
    with closing(open_model(merged)) as other, closing(Context(other)) as ctx:
        assert np.abs(found - ctx.logits(PROMPT)).max() < 1e-3


def _merge(model: Path, lora: Path, scale: float) -> None:
    """Add an adapter to the float32 weights of a model's file."""
    halves = {str(t.name): np.array(t.data) for t in gguf.GGUFReader(lora).tensors}
    for tensor in gguf.GGUFReader(model, "r+").tensors:
        if f"{tensor.name}.lora_a" in halves:
            a, b = halves[f"{tensor.name}.lora_a"], halves[f"{tensor.name}.lora_b"]
            tensor.data[:] += np.float32(scale) * (b @ a)
            tensor.data.flush()


def test_scale_turns_the_change_round_with_its_sign(
    model: LlamaModel, ctx: Context, test_model: Path, tmp_path: Path
) -> None:
    def negated(name: str, array: Logits) -> Logits:
        return -array if name.endswith("_b") else array

    base = ctx.logits(PROMPT)
    plus = write_lora(tmp_path / "plus.gguf", test_model)
    minus = write_lora(tmp_path / "minus.gguf", test_model, change=negated)
    adapters, found = Adapters(model, {"plus": plus, "minus": minus}), []
    for name, scale in (("plus", -0.5), ("minus", 0.5), ("plus", 0.5), ("plus", 0.0)):
        adapters.use(ctx.pointer, ((name, scale),))
        found.append(ctx.logits(PROMPT).tobytes())
    assert found[0] == found[1] != found[2]
    assert found[3] == base.tobytes()
    adapters.use(ctx.pointer, ())
    adapters.close()


def test_two_adapters_are_both_computed(adapters: Adapters, ctx: Context) -> None:
    found = []
    for used in (("one",), ("two",), ("one", "two")):
        adapters.use(ctx.pointer, tuple((name, 1.0) for name in used))
        found.append(ctx.logits(PROMPT))
    adapters.use(ctx.pointer, (("two", 1.0), ("one", 1.0)))
    assert np.array_equal(ctx.logits(PROMPT), found[2])
    assert np.abs(found[2] - found[0]).max() > 0.1
    assert np.abs(found[2] - found[1]).max() > 0.1


def test_new_context_begins_without_adapters(
    model: LlamaModel, files: dict[str, Path], ctx: Context
) -> None:
    base = ctx.logits(PROMPT)
    adapters, found = Adapters(model, files), []
    for _ in range(3):  # each may well stand where the one before stood
        with closing(Context(model)) as other:
            assert np.array_equal(other.logits(PROMPT), base)
            adapters.use(other.pointer, (("one", 1.0),))
            found.append(other.logits(PROMPT))
    assert not np.array_equal(found[0], base)
    assert all(np.array_equal(logits, found[0]) for logits in found)
    adapters.close()


def test_context_that_was_made_before_computes_with_many(
    model: LlamaModel, files: dict[str, Path], ctx: Context
) -> None:
    base = ctx.logits(PROMPT)
    adapters = Adapters(model, {f"a{i}": files["one"] for i in range(8)})  # > 1024 nodes of a graph
    adapters.use(ctx.pointer, tuple((name, 1 / 8) for name in adapters.names))
    together = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, (("a0", 1.0),))
    assert np.abs(together - ctx.logits(PROMPT)).max() < np.abs(together - base).max() / 4
    adapters.use(ctx.pointer, ())
    adapters.close()


def test_logits_do_not_depend_on_company_with_blocks_of_eight_bits(
    model: LlamaModel, ctx: Context, test_model: Path, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "a.gguf", test_model, targets=ALL, type="q8_0", rank=32)
    adapters = Adapters(model, {"a": lora})
    adapters.use(ctx.pointer, (("a", 1.0),))
    prompts = [tuple(range(300 + 20 * i, 310 + 21 * i)) for i in range(N_SEQUENCES)]
    alone = ctx.logits(prompts[0])[0]
    for width in (2, 8, 16):
        assert np.array_equal(ctx.logits(*prompts[:width])[0], alone)
    adapters.use(ctx.pointer, ())
    adapters.close()


# --- names, digests, ends ---


def test_unknown_name_is_refused_and_changes_nothing(adapters: Adapters, ctx: Context) -> None:
    assert adapters.names == ("one", "two")
    adapters.use(ctx.pointer, (("one", 1.0),))
    before = ctx.logits(PROMPT)
    with pytest.raises(ConfigError, match="'three'; loaded: one, two"):
        adapters.use(ctx.pointer, (("one", 2.0), ("three", 1.0)))
    assert np.array_equal(ctx.logits(PROMPT), before)


def test_fingerprint_tells_which_name_has_which_adapter(
    test_model: Path, files: dict[str, Path]
) -> None:
    one, two = files["one"], files["two"]
    found = []
    for adapters in ({"a": one, "b": two}, {"b": two, "a": one}, {"b": one, "a": two}):
        with cbatch.load(test_model, adapters=adapters) as engine:
            found.append(engine.fingerprint["adapters"])
    assert found[0] == found[1] != found[2]


def test_digest_is_of_the_file_that_was_loaded(
    model: LlamaModel, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: tmp_path / name for name in ("one", "two")}
    for path in paths.values():
        path.write_bytes(files["one"].read_bytes())
    adapters = Adapters(model, paths)
    for path in paths.values():
        path.unlink()
    expected = f"sha256:{hashlib.sha256(files['one'].read_bytes()).hexdigest()}"
    assert [adapters.digest(name) for name in paths] == [expected] * 2
    with pytest.raises(ConfigError, match="'three'"):
        adapters.digest("three")
    adapters.close()
    monkeypatch.setattr("cbatch.backend.llama.adapters.is_unchanged", lambda _: False)
    adapters = Adapters(model, files)
    with pytest.raises(OSError, match="'two' was replaced while it was loaded"):
        adapters.digest("two")
    adapters.close()


def test_close_twice_is_harmless_and_then_none_can_be_used(
    model: LlamaModel, files: dict[str, Path], ctx: Context
) -> None:
    adapters = Adapters(model, files)
    adapters.close()
    adapters.close()
    adapters.use(ctx.pointer, ())
    with pytest.raises(EngineClosedError, match="'one'"):
        adapters.use(ctx.pointer, (("one", 1.0),))


def test_adapters_of_a_llama_object_leave_it_alive(
    test_model: Path, files: dict[str, Path]
) -> None:
    llama = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    model = open_model(llama)
    ctx, adapters = Context(model), Adapters(model, files)
    base = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, (("two", 1.0),))
    assert not np.array_equal(ctx.logits(PROMPT), base)
    for thing in (ctx, adapters, model):
        thing.close()
    assert llama.eval(list(PROMPT)) is None
    llama.close()


def test_where_one_fails_the_others_are_freed(
    model: LlamaModel, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[Any] = []
    free = llama_cpp.llama_adapter_lora_free

    def count(pointer: Any) -> None:
        freed.append(pointer)
        free(pointer)

    monkeypatch.setattr(llama_cpp, "llama_adapter_lora_free", count)
    with pytest.raises(ModelLoadError, match=r"adapter 'none': .*none\.gguf: .*No such file"):
        Adapters(model, {**files, "none": tmp_path / "none.gguf"})
    assert len(freed) == 2


# --- files that are no adapters of the model ---


def _refusal(model: LlamaModel, path: Path) -> str:
    """Return the words with which the file is refused, after the adapter's name and its own."""
    with pytest.raises(ModelLoadError) as caught:
        Adapters(model, {"mine": path})
    words = str(caught.value)
    assert words.startswith(f"adapter 'mine': {path}: ")
    return words.removeprefix(f"adapter 'mine': {path}: ")


def test_what_is_no_adapter_is_refused(model: LlamaModel, test_model: Path, tmp_path: Path) -> None:
    assert "of type 'model', not an adapter" in _refusal(model, test_model)
    assert "folder" in _refusal(model, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in _refusal(model, tmp_path / "pipe")
    assert "null" in _refusal(model, tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04", "not a GGUF"),
        (b"GGUF", "cut off"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\x09\0\0\0" + b"\0" * 64, "llama.cpp refuses"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "cut off"),
        (b"GGUF\x03\0\0\0" + b"\0" * 16, "of type 'model'"),
    ],
)
def test_file_of_other_bytes_is_refused(
    model: LlamaModel, tmp_path: Path, data: bytes, reason: str
) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    assert reason in _refusal(model, tmp_path / "a.gguf")


@pytest.mark.parametrize("n_left", [4, 100, 700, -3000, -1])
def test_file_that_is_cut_off_is_refused(
    model: LlamaModel, files: dict[str, Path], tmp_path: Path, n_left: int
) -> None:
    (tmp_path / "a.gguf").write_bytes(files["one"].read_bytes()[:n_left])
    words = _refusal(model, tmp_path / "a.gguf")
    assert "cut off" in words or "incomplete" in words


def _only(half: str) -> Callable[[str, Logits], Logits | None]:
    return lambda name, array: array if name.endswith(half) else None


NO_FIT: list[tuple[dict[str, Any], str]] = [
    *(
        ({"change": change, "rank": 33, "type": "f32"}, reason)
        for change, reason in (
            (lambda name, array: None, "holds no LoRA weights"),
            (_only("lora_a"), "holds no LoRA weights"),
            (
                lambda name, array: None if name == "blk.1.attn_q.weight.lora_b" else array,
                "missing one",
            ),
            (lambda name, array: array[:, :-32].copy(), "does not fit"),
            (lambda name, array: array[:3].copy() if name.endswith("a") else array, "does not fit"),
            (
                lambda name, array: array[:, :-32] if name.endswith("a") else array,
                "incorrect shape",
            ),
            (lambda name, array: array[:-32] if name.endswith("b") else array, "incorrect shape"),
            (lambda name, array: np.stack([array, array]), "does not fit"),
            (lambda name, array: array[None, None].repeat(2, 0), "does not fit"),
            (lambda name, array: array[:0] if name.endswith("a") else array[:, :0], "does not fit"),
        )
    ),
    *(
        ({"metadata": metadata}, reason)
        for metadata, reason in (
            ({"general.type": None}, "of type 'model'"),
            ({"general.type": 8}, "general.type is of another type"),
            ({"general.type\0": 8, "general.type": "adapter"}, "occurs twice"),
            ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
            ({"general.architecture": 8}, "general.architecture is of another type"),
            ({"adapter.type": None}, "of type None"),
            ({"adapter.type": "control_vector"}, "'control_vector'"),
            ({"adapter.type": 8}, "adapter.type is of another type"),
            ({ALPHA: 8}, "lora.alpha is of another type"),
            ({ALPHA: float("nan")}, "lora.alpha is nan"),
            ({ALPHA: float("inf")}, "lora.alpha is inf"),
            ({"adapter.alora.invocation_tokens": [1, 2]}, "activated LoRA"),
        )
    ),
    ({"targets": ["token_embd.weight"]}, "uses it for its output, too"),
]


@pytest.mark.parametrize(("given", "reason"), NO_FIT)
def test_adapter_that_does_not_fit_is_refused(
    model: LlamaModel, test_model: Path, tmp_path: Path, given: dict[str, Any], reason: str
) -> None:
    assert reason in _refusal(model, write_lora(tmp_path / "a.gguf", test_model, **given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "incorrect shape"),
        ({"targets": ["output.weight"]}, "does not exist in base model"),
    ],
)
def test_adapter_of_a_larger_model_is_refused(
    model: LlamaModel, random_model: Path, tmp_path: Path, given: dict[str, Any], reason: str
) -> None:
    assert reason in _refusal(model, write_lora(tmp_path / "a.gguf", random_model, **given))


def test_embedding_is_adapted_if_its_halves_fit(random_model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"targets": ["token_embd.weight"]}
    lora = write_lora(tmp_path / "a.gguf", random_model, **given)
    given["change"] = lambda name, array: array[:, :2].copy() if name.endswith("b") else array
    wrong = write_lora(tmp_path / "b.gguf", random_model, **given)
    model = open_model(random_model)
    ctx, adapters = Context(model), Adapters(model, {"a": lora})
    base = ctx.logits(PROMPT)
    adapters.use(ctx.pointer, (("a", 1.0),))
    assert np.abs(ctx.logits(PROMPT) - base).max() > 0.1
    assert "does not fit" in _refusal(model, wrong)
    for thing in (ctx, adapters, model):
        thing.close()


def test_type_that_has_no_product_is_refused(
    model: LlamaModel, test_model: Path, tmp_path: Path
) -> None:
    path = write_lora(tmp_path / "a.gguf", test_model)
    data = path.read_bytes()
    f16, i8 = (int(n).to_bytes(4, "little") for n in (1, 24))
    at = data.index(b".lora_a") + len(b".lora_a") + 4 + 2 * 8
    assert data[at : at + 4] == f16
    path.write_bytes(data[:at] + i8 + data[at + 4 :])
    assert "as type 24" in _refusal(model, path)


def test_feed_forward_weights_that_cannot_be_adapted_are_refused(
    synth: SynthFactory, tmp_path: Path
) -> None:
    base = synth("test", metadata={"general.file_type": llama_cpp.LLAMA_FTYPE_MOSTLY_NVFP4})
    path = write_lora(tmp_path / "a.gguf", base, targets=ALL)
    with closing(open_model(base)) as model:
        assert "NVFP4" in _refusal(model, path)


FUZZ = """
import random, sys, pathlib
from cbatch.backend.llama.adapters import Adapters
from cbatch.backend.load.open_model import open_model
from cbatch.errors import ModelLoadError
from tests.backend.damage import damaged
from tests.backend.llama.test_adapters import PROMPT, Context
base, path, seed = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
data, rng = path.read_bytes(), random.Random(seed)
n_header = data.rindex(b".lora_b") + 40
model = open_model(base)
ctx = Context(model)
n_refused = 0
for i in range(200):
    path.write_bytes(damaged(data, n_header, rng, is_cut=i % 4 == 0))
    try:
        adapters = Adapters(model, {"a": path})
    except ModelLoadError:
        n_refused += 1
        continue
    adapters.use(ctx.pointer, (("a", 1.0),))
    ctx.logits(PROMPT)
    adapters.use(ctx.pointer, ())
    adapters.close()
print(n_refused)
"""


@pytest.mark.parametrize(("target", "seed"), [("attn_q", 1), ("token_embd.weight", 2)])
def test_damaged_files_never_end_the_process(
    random_model: Path, tmp_path: Path, target: str, seed: int
) -> None:
    path = write_lora(tmp_path / "a.gguf", random_model, targets=[target])
    command = [sys.executable, "-c", FUZZ, str(random_model), str(path), str(seed)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 50 < int(done.stdout.splitlines()[-1]) < 200
