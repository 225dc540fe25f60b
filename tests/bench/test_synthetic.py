"""Synthetic models: the same bytes every time, loadable in every type, and not dull when greedy."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cbatch
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic import SHAPES, Shape, write_model
from cbatch.bench.synthetic_shapes import WEIGHT_TYPES
from cbatch.bench.synthetic_tensors import tensors_of
from cbatch.bench.synthetic_tokenizer import take_tokenizer
from cbatch.bench.synthetic_vocabulary import CONTROL_TOKENS, MIN_VOCAB, vocabulary
from cbatch.errors import ConfigError, OutputError
from tests.profiles import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from cbatch.backend.llama.model import LlamaModel
    from tests.conftest import SynthFactory

SMALLEST = Shape(1, 32, 1, 1, 32, 400, "f32")
QUANTISABLE = Shape(1, 256, 4, 2, 256, 400, "q4_k_m")
DIRECT = [name for name, kind in WEIGHT_TYPES.items() if kind.is_direct]
MIXED = [name for name, kind in WEIGHT_TYPES.items() if not kind.is_direct]
LONG = {"iq1_m", "iq2_xs"}
"""Each takes llama.cpp seconds for a table that another mix needs too."""
MIXTURE: dict[str, Any] = {"n_expert": 4, "n_expert_used": 2}
WINDOWS: dict[str, Any] = {"n_window": 16}
SIZES: dict[str, Any] = {"ctx_per_seq": 256, "n_threads": 1}


def _logits(context: object, n_vocab: int) -> npt.NDArray[np.float32]:
    row = llama_cpp.llama_get_logits_ith(context, -1)
    copied: npt.NDArray[np.float32] = np.ctypeslib.as_array(row, (n_vocab,)).copy()
    return copied


def _greedy(model: LlamaModel, prompt: str, n: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return n greedy tokens after the prompt, and the last logits, (n_vocab,) float32."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    tokens, output = model.vocab.tokenize(prompt), list[int]()
    for _ in range(n):
        given = (ctypes.c_int32 * len(tokens))(*tokens)  # the batch only points to it
        batch = llama_cpp.llama_batch_get_one(given, len(tokens))
        assert llama_cpp.llama_decode(context, batch) == 0
        logits = _logits(context, model.vocab.n_vocab)
        tokens = [int(logits.argmax())]
        output += tokens
    llama_cpp.llama_free(context)
    return output, logits


@pytest.mark.real
@pytest.mark.parametrize(
    "shape", [SMALLEST, replace(QUANTISABLE, type="iq3_s")], ids=lambda s: s.type
)
def test_write_model_gives_the_same_bytes_for_the_same_seed(tmp_path: Path, shape: Shape) -> None:
    first, again, other = (
        write_model(tmp_path / name, shape, seed=seed).read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again != other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_write_model_over_a_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="force=True"):
        write_model(path, SMALLEST)
    assert path.read_bytes() == b"precious"
    assert write_model(path, SMALLEST, force=True).read_bytes()[:4] == b"GGUF"


def test_write_model_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="Unknown type"):
        write_model(tmp_path / "a.gguf", SMALLEST, metadata={"odd": [object()]})
    with pytest.raises(OutputError, match="bytes of disk"):  # before a byte
        write_model(tmp_path / "a.gguf", replace(SMALLEST, n_vocab=2**31 - 1, n_embd=2**26))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        write_model(tmp_path / "a.gguf", SMALLEST)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"type": "q9"}, "q9"),
        ({"n_layer": 0}, "at least 1"),
        ({"n_embd": 48, "type": "q8_0"}, "n_embd to be a multiple of 32"),
        ({"n_ff": 40, "type": "q4_0"}, "n_ff to be a multiple of 32"),
        ({"n_head": 2, "n_kv_head": 3}, "multiple of n_kv_head"),
        ({"n_head": 3}, "even"),
        ({"n_vocab": 0}, "at least 1"),
        ({"n_embd": 2**32}, "at most"),
        ({"n_layer": 513}, "512 layers"),
        ({"n_expert": 1, "n_expert_used": 1}, "0 or at least 2"),
        ({"n_expert": 4}, "n_expert_used must be 1"),
        ({"n_expert": 4, "n_expert_used": 5}, "n_expert_used must be 1"),
        ({"n_expert_used": 1}, "needs n_expert"),
        ({"n_expert": 2000, "n_expert_used": 1}, "1024 experts"),
        ({"n_window": -1}, "at least 0"),
        ({"n_window": 8}, "full_every must be 2"),
        ({"n_window": 8, "n_layer": 4, "full_every": 5}, "full_every must be 2"),
        ({"n_window": 8, "n_layer": 4, "full_every": 1}, "full_every must be 2"),
        ({"type": "q4_k_m"}, "multiple of 256"),
        (
            {"n_embd": 48, "n_ff": 256, "type": "iq2_xxs"},
            "n_embd or n_ff to be a multiple of|n_embd to be a multiple of",
        ),
        ({"type": "mxfp4_moe"}, "experts"),
        ({"architecture": "mamba", "n_ff": 64, "n_expert": 2, "n_expert_used": 1}, "no experts"),
        ({"architecture": "mamba", "n_ff": 64, "n_layer": 2, "n_window": 2}, "no sliding window"),
        ({"architecture": "rwkv"}, "rwkv"),
        ({"architecture": "mamba"}, "2 × n_embd"),
        ({"architecture": "mamba", "n_ff": 64, "n_head": 2}, "no heads"),
    ],
)
def test_shape_that_does_not_fit_is_refused(change: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        replace(SMALLEST, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        *((SMALLEST, {"type": type, "tied": i % 2 > 0}) for i, type in enumerate(DIRECT)),
        *(("mamba", {"type": type}) for type in ("f32", "q4_0")),
    ],
    ids=str,
)
def test_model_of_every_type_loads_and_decodes(
    synth: SynthFactory, shape: Any, sizes: dict[str, Any]
) -> None:
    model = open_model(synth(shape, **sizes))
    assert model.file_type == sizes["type"]
    assert (model.architecture == "mamba") == (shape == "mamba")
    assert llama_cpp.llama_model_is_recurrent(model.pointer) == (shape == "mamba")
    _, logits = _greedy(model, "Hello", 2)
    assert np.isfinite(logits).all()
    model.close()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("test", {}),
        ("test", {"tied": True}),
        ("test", MIXTURE),
        ("test", WINDOWS),
        ("test", {**MIXTURE, **WINDOWS, "tied": True}),
        ("exact", {"n_layer": 24, "tied": True, "type": "q4_0"}),
        ("exact", {"n_layer": 24}),
        ("mamba", {}),
    ],
    ids=str,
)
def test_greedy_outputs_differ_and_wander(
    synth: SynthFactory, shape: str, sizes: dict[str, Any]
) -> None:
    model = open_model(synth(shape, **sizes))
    prompts = ["Say red.", "Say blue.", "What is the colour of the sea?", "a", "tell me " * 40]
    runs = [_greedy(model, prompt, 64) for prompt in prompts]
    for i, (output, logits) in enumerate(runs):
        assert len(set(output)) > 24, prompts[i]
        shares = np.exp(logits - logits.max())
        assert 0.02 < 1 / shares.sum() < 0.95  # the likeliest token: neither flat nor one-hot
        others = [other for j, (other, _) in enumerate(runs) if j != i]
        assert all(np.mean(np.array(output) == np.array(other)) < 0.2 for other in others)
    model.close()


def test_types_have_the_numbers_that_gguf_says() -> None:
    known = {kind.name.partition("_")[2].lower(): kind.value for kind in gguf.LlamaFileType}
    assert {name: known[name] for name in WEIGHT_TYPES} == {
        name: kind.file_type for name, kind in WEIGHT_TYPES.items()
    }


@pytest.mark.parametrize("type", [type for type in MIXED if type not in LONG])
def test_model_of_every_mix_loads_and_decodes(synth: SynthFactory, type: str) -> None:
    sizes = MIXTURE if type == "mxfp4_moe" else {}
    model = open_model(synth(QUANTISABLE, type=type, **sizes))
    assert model.file_type == type
    kinds = {tensor.type for tensor in model.read_header().tensors.values()}
    assert gguf.GGMLQuantizationType[WEIGHT_TYPES[type].tensor_type] in kinds
    output, logits = _greedy(model, "Hello", 32)
    assert np.isfinite(logits).all()
    assert len(set(output)) > 8
    model.close()


def test_mix_of_narrow_rows_has_what_llama_cpp_gives_them(synth: SynthFactory) -> None:
    """As in files of Qwen2.5-0.5B, which is 896 wide."""
    shape = replace(QUANTISABLE, n_embd=96, n_head=2, n_kv_head=1, n_ff=256)
    assert shape.substituted_rows == [96]
    model = open_model(synth(shape))
    header = model.read_header()
    kinds = gguf.GGMLQuantizationType
    assert header.tensors["blk.0.attn_q.weight"].type == kinds.Q5_0
    assert header.tensors["blk.0.ffn_down.weight"].type in (kinds.Q4_K, kinds.Q6_K)
    model.close()


@pytest.mark.parametrize(("name", "type"), [("0.5b", "q4_k_m"), ("1b", "q8_0"), ("3b", "q8_0")])
def test_one_layer_of_a_known_shape_loads_and_decodes(
    synth: SynthFactory, name: str, type: str
) -> None:
    shape = SHAPES[name]
    model = open_model(synth(shape, type=type, n_layer=1, n_vocab=400))
    header = model.read_header()
    sizes = {name: tensor.sizes[:2] for name, tensor in header.tensors.items()}
    n_kv = shape.n_kv_head * shape.n_head_dim
    assert sizes["token_embd.weight"] == (shape.n_embd, 400)
    assert sizes["blk.0.attn_k.weight"] == (shape.n_embd, n_kv)
    assert sizes["blk.0.ffn_down.weight"] == (shape.n_ff, shape.n_embd)
    assert ("output.weight" in sizes) != shape.tied
    output, logits = _greedy(model, "Hello", 12)
    assert np.isfinite(logits).all()
    assert len(set(output)) > 4
    model.close()


def test_known_shapes_have_as_many_weights_as_their_models() -> None:
    """Source: the model cards of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B."""
    counts = {
        name: sum(math.prod(tensor.sizes) for tensor in tensors_of(SHAPES[name]))
        for name in ("0.5b", "1b", "3b", "8b")
    }
    # Qwen's biases of queries, keys and values are left out
    assert counts["0.5b"] == 494_032_768 - 24 * (896 + 2 * 128)
    assert counts["1b"] == 1_235_814_400
    assert counts["3b"] == 3_212_749_824
    assert counts["8b"] == 8_030_261_248


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    n_head = draw(st.sampled_from([1, 2, 3, 4, 6]))
    n_kv_head = draw(st.sampled_from([n for n in (1, 2, 3) if n_head % n == 0]))
    n_layer = draw(st.integers(1, 4))
    n_expert = draw(st.sampled_from([0, 0, 2, 5, 8]))
    return Shape(
        n_layer=n_layer,
        n_embd=n_head * draw(st.sampled_from([32, 64, 96])),
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_ff=draw(st.sampled_from([32, 96, 256])),
        n_vocab=draw(st.integers(356, 900)),
        type=draw(st.sampled_from(DIRECT)),
        n_ctx_train=draw(st.sampled_from([512, 8192])),
        tied=draw(st.booleans()),
        n_expert=n_expert,
        n_expert_used=draw(st.integers(1, n_expert)) if n_expert else 0,
        n_window=draw(st.sampled_from([0, 0, 1, 7, 600])) if n_layer > 1 else 0,
        full_every=draw(st.integers(2, n_layer)) if n_layer > 1 else 2,
    )


@pytest.mark.real
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(), seed=st.integers(0, 9))
def test_any_shape_loads_and_decodes(tmp_path: Path, shape: Shape, seed: int) -> None:
    model = open_model(write_model(tmp_path / "a.gguf", shape, seed=seed, force=True))
    output, logits = _greedy(model, "the people of the world " * 6, 24)
    assert (model.n_layers, model.vocab.n_vocab) == (shape.n_layer, shape.n_vocab)
    assert llama_cpp.llama_model_n_swa(model.pointer) == shape.n_window
    assert np.isfinite(logits).all()
    assert len(output) == 24  # varied text is promised for shapes that have names
    model.close()


@pytest.mark.parametrize("sizes", [MIXTURE, WINDOWS, {**MIXTURE, **WINDOWS}], ids=str)
def test_answers_in_company_are_those_alone(synth: SynthFactory, sizes: dict[str, Any]) -> None:
    """To the bit: in float32, rounding alone chooses other experts now and then."""
    path = synth("test", n_layer=4, **sizes)
    prompts = [f"Tell me about number {i}: " + "one two three " * (i % 5) for i in range(12)]
    options = {"temperature": 0, "max_tokens": 24}
    answers = []
    for parallel in (1, 5):
        with cbatch.load(path, parallel=parallel, exact=True, **SIZES) as engine:
            answers.append([r.token_ids for r in engine.run(prompts, options=options).results()])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(prompts)


def test_window_tells_in_prompts_that_are_longer(synth: SynthFactory) -> None:
    found: dict[str, list[npt.NDArray[np.float32]]] = {"short": [], "long": []}
    for n_window in (24, 600):
        model = open_model(synth("test", type="f32", n_window=n_window))
        found["short"].append(_greedy(model, "one two", 1)[1])
        found["long"].append(_greedy(model, "one two three " * 20, 1)[1])
        model.close()
    short, long = (float(np.abs(a - b).max()) for a, b in found.values())
    assert short < 1e-3 < 0.1 < long


def test_sampled_answers_are_as_long_as_they_may_be(test_model: Path, tmp_path: Path) -> None:
    """Of a taken vocabulary, tokens that end an answer are as good as never chosen."""
    tokenizer = take_tokenizer(test_model)
    shape = replace(SHAPES["test"], n_vocab=tokenizer.n_tokens)
    path = write_model(tmp_path / "a.gguf", shape, tokenizer=tokenizer)
    prompts = [f"Say {i}." for i in range(20)]
    with cbatch.load(path, parallel=4, ctx_per_seq=256, n_threads=1) as engine:
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 1, "top_k": 0}):
            results = engine.run(prompts, options={**options, "max_tokens": 40}).results()
            assert [len(r.token_ids) for r in results] == [40] * 20
            assert len({r.text for r in results}) == 20


# ---- the disk ----


LIMITED = """
import resource, sys
from cbatch.bench.synthetic import Shape, write_model
from cbatch.errors import OutputError
n_limit, type = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (n_limit, n_limit))
try:
    write_model("a.gguf", Shape(2, 256, 4, 2, 512, 400, type))
except OutputError as error:
    print(error)
"""


@pytest.mark.real
@pytest.mark.parametrize(("type", "n_limit"), [("q8_0", 500_000), ("q4_k_m", 1_000_000)])
def test_disk_that_is_full_is_named_and_nothing_stays(
    tmp_path: Path, type: str, n_limit: int
) -> None:
    """A limit on files stands for it."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(n_limit), type],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a.gguf: the file would be larger than is allowed here")
    assert list(tmp_path.iterdir()) == []


def test_quantiser_that_runs_out_of_room_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp does not look whether its writes succeed: the file is cut off and the code is 0."""

    @contextmanager
    def cutting(source: Path, target: Path, file_type: int, **_: object) -> Iterator[Any]:
        target.write_bytes(source.read_bytes()[:-100])
        yield SimpleNamespace(is_done=lambda timeout_s: True, find_problem=lambda: "")

    monkeypatch.setattr("cbatch.bench.synthetic.quantising", cutting)
    with pytest.raises(OutputError, match="the disk is full"):
        write_model(tmp_path / "a.gguf", QUANTISABLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
@pytest.mark.slow
def test_model_needs_a_small_part_of_its_size_in_memory(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from cbatch.bench.synthetic import Shape, write_model\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "write_model('warm.gguf', Shape(1, 2048, 1, 1, 2048, 4000, 'q8_0'))\n"
        "before = peak()\n"
        "path = write_model('a.gguf', Shape(1, 2048, 1, 1, 2048, 20_000, 'q8_0'))\n"
        "print(peak() - before, path.stat().st_size)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    n_more, n_bytes = map(int, done.stdout.split())
    assert n_bytes > 80e6
    assert n_more < n_bytes / 5


@pytest.mark.parametrize("n_vocab", [356, 1024, 5000, 151_936])
def test_vocabulary_has_distinct_pieces_of_the_size_asked(n_vocab: int) -> None:
    pieces = vocabulary(n_vocab)
    assert len(pieces) == len(set(pieces)) == n_vocab
    assert pieces[: len(CONTROL_TOKENS)] == list(CONTROL_TOKENS)
    assert n_vocab < 1024 or {"▁the", "▁people"} <= set(pieces)


def test_pieces_are_two_earlier_ones_joined() -> None:
    pieces = vocabulary(5000)[MIN_VOCAB:]
    places = {piece: i for i, piece in enumerate([*vocabulary(MIN_VOCAB), *pieces])}
    for piece in pieces:
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        assert any(
            max(places.get(one, len(places)), places.get(two, len(places))) < places[piece]
            for one, two in halves
        )


def test_named_shapes_have_distinct_sizes() -> None:
    generating = [name for name, shape in SHAPES.items() if not shape.pooling]
    sizes = ["test", "exact", "tiny", "small", "0.5b", "1b", "3b", "8b"]
    assert generating == [*sizes, "mamba", "qwen2-vl", "gemma3"]
    assert len(set(SHAPES.values())) == len(SHAPES)
