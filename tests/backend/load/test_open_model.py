"""Loading models: what is read from them, and how every bad file is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import llama_cpp
import pytest

import cbatch
from cbatch.backend.llama.layout import read_layout
from cbatch.backend.load.gguf_check import check_file
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SynthFactory


def test_model_tells_what_it_is(random_model: Path) -> None:
    model = open_model(random_model)
    assert model.n_ctx_train == 32768
    assert model.file_type == "q8_0"
    assert model.architecture == "llama"
    assert model.metadata["llama.block_count"] == "2"
    assert len(model.metadata["tokenizer.chat_template"]) > 100
    assert model.sampling_defaults == {}
    model.close()


def test_long_metadata_is_read_whole(synth: SynthFactory) -> None:
    model = open_model(synth("test", metadata={"general.description": "x" * 5000}))
    assert model.metadata["general.description"] == "x" * 5000
    model.close()


def test_sampling_defaults_come_from_the_file(synth: SynthFactory) -> None:
    said = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.75,
        "general.sampling.min_p": 0.25,
        "general.sampling.xtc_probability": 0.5,
        "general.sampling.xtc_threshold": 0.125,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.penalty_last_n": 256,
    }
    model = open_model(synth("test", metadata=said))
    assert model.sampling_defaults == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.75,
        "min_p": 0.25,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.125,
        "repeat_penalty": 1.5,
        "repeat_last_n": 256,
    }
    assert isinstance(model.sampling_defaults["top_k"], int)
    assert isinstance(model.sampling_defaults["repeat_last_n"], int)
    model.close()


def test_number_of_the_file_is_read_with_a_decimal_comma_too(random_model: Path) -> None:
    model = open_model(random_model)
    said = {"general.sampling.temp": "0,500000", "general.sampling.min_p": "much"}  # as in de_DE
    model.metadata = {**model.metadata, **said}
    assert model.sampling_defaults == {"temperature": 0.5}
    model.close()


def test_sampling_default_out_of_range_is_left_out(synth: SynthFactory) -> None:
    said = {
        "general.sampling.temp": float("nan"),
        "general.sampling.top_p": 7.0,
        "general.sampling.penalty_repeat": 0.0,
        "general.sampling.penalty_last_n": 2**21,
    }
    model = open_model(synth("test", metadata=said))
    assert model.sampling_defaults == {}
    model.close()


def test_close_twice_is_harmless(test_model: Path) -> None:
    model = open_model(test_model, EngineOptions(use_mmap=False, exact=True, n_gpu_layers=0))
    model.close()
    model.close()
    with pytest.raises(EngineClosedError, match=test_model.name):
        _ = model.pointer


def test_llama_object_is_borrowed_and_not_freed(test_model: Path) -> None:
    llama = llama_cpp.Llama(str(test_model), n_ctx=64, verbose=False)
    model = open_model(llama)
    assert model.pointer == llama.model
    n_prompt = len(model.vocab.tokenize("Hi"))
    model.close()
    assert len(llama.tokenize(b"Hi")) == n_prompt
    llama.close()
    with pytest.raises(ModelLoadError, match="closed"):
        open_model(llama)


def test_chat_template_replaces_the_models_own(synth: SynthFactory) -> None:
    path = synth("test", metadata={"tokenizer.chat_template": None})
    model = open_model(path, EngineOptions(chat_template="{{ messages[0]['content'] }}"))
    assert model.vocab.render([{"role": "user", "content": "Hi"}]) == model.vocab.tokenize("Hi")
    model.close()
    with pytest.raises(ConfigError, match="chat_template"):
        open_model(path, EngineOptions(chat_template="{% nonsense %}"))


# --- files that are no models ---


def _refusal(path: Path) -> str:
    """Return the words with which the file is refused, after its name."""
    with pytest.raises(ModelLoadError) as caught:
        open_model(path)
    words = str(caught.value)
    assert words.startswith(f"{path}: ")
    return words.removeprefix(f"{path}: ")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in _refusal(tmp_path / "none.gguf")
    assert "folder" in _refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in _refusal(tmp_path / "pipe")
    with pytest.raises(ModelLoadError, match="null"):
        open_model("a\0.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch(mode=0)
    assert "Permission denied" in _refusal(tmp_path / "a.gguf")


@pytest.mark.real
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF"),
        (b"<html>Not found</html>", "not a GGUF"),
        (b"GGUF", "cut off"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\0\0\0\x03", "big-endian"),
        (b"GGUF\x09\0\0\0" + b"\0" * 64, "llama.cpp refuses"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "cut off"),
        (b"GGUF\x03\0\0\0" + b"\0" * 16, "no weights"),
    ],
)
def test_file_of_other_bytes_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    assert reason in _refusal(tmp_path / "a.gguf")
    if reason == "llama.cpp refuses":  # a load quotes its last errors
        with pytest.raises(ModelLoadError, match=r"refuses it: [^|]+ \| [^|]+ \| [^|]+$"):
            cbatch.load(tmp_path / "a.gguf")


def test_split_model_loads_by_its_first_file(synth: SynthFactory) -> None:
    first = {"split.no": 0, "split.count": 1, "split.tensors.count": 21}
    check_file(synth("test", metadata=first))
    assert "first part" in _refusal(synth("test", metadata={"split.no": 1, "split.count": 2}))


# --- files that llama.cpp writes itself ---


@pytest.mark.parametrize("shape", ["test", "mamba"])
def test_model_that_llama_wrote_loads_and_is_the_same(
    synth: SynthFactory, tmp_path: Path, shape: str
) -> None:
    path = tmp_path / "again.gguf"
    model = open_model(synth(shape), EngineOptions(repack="off"))
    llama_cpp.llama_model_save_to_file(model.pointer, str(path).encode())
    again = open_model(path)
    assert again.metadata[f"{again.architecture}.pooling_type"] == "4294967295"  # unspecified
    assert read_layout(again) == read_layout(model)
    again.close()
    model.close()
    options = {"temperature": 0, "max_tokens": 8}
    answers = []
    for file in (synth(shape), path):
        with cbatch.load(file, parallel=2) as engine:
            answers.append(engine.submit("Once", options=options).result().token_ids)
    assert answers[0] == answers[1]


# --- models that cannot generate text ---


@pytest.mark.parametrize(
    ("metadata", "reason", "pooling"),
    [
        ({"llama.attention.causal": False}, "non-causal", None),
        ({"llama.pooling_type": 0}, "", None),
        ({"llama.pooling_type": 2**32 - 1}, "", None),
        *(
            ({"llama.pooling_type": i + 1}, "with pooling", pooling)
            for i, pooling in enumerate(("mean", "cls", "last", "rank"))
        ),
    ],
)
def test_model_that_pools_is_for_embeddings_alone(
    synth: SynthFactory, metadata: dict[str, object], reason: str, pooling: str | None
) -> None:
    with closing(open_model(synth("test", metadata=metadata))) as model:
        assert reason in model.why_not_generative
        assert bool(model.why_not_generative) == bool(reason)
        assert (model.can_embed, model.pooling) == (True, pooling)


# --- damaged files, at which llama.cpp would end the process, and what it refuses itself ---


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.type": "adapter"}, "of type 'adapter'"),
        ({"tokenizer.ggml.model": "none", "llama.vocab_size": None}, "refuses"),
        ({"general.architecture": "gemma-embedding"}, "refuses"),
        ({"general.architecture": "unheard-of"}, "refuses"),
        ({"llama.block_count": 0}, "block_count is 0"),
        ({"llama.block_count": 513}, "block_count is 513"),
        ({"llama.nextn_predict_layers": 3}, "nextn_predict_layers"),
        ({"llama.expert_count": 8}, "0 of 8 experts"),
        ({"llama.expert_used_count": 2}, "2 of 0 experts"),
        ({"llama.expert_used_count": [0, 2]}, "2 of 0 experts"),
        ({"llama.expert_count": 5000, "llama.expert_used_count": 2}, "2 of 5000 experts"),
        ({"llama.expert_group_count": 2}, "0 of 2 expert groups"),
        ({"llama.rope.scaling.type": "other"}, "'other'"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1"),
        ({"general.alignment": 2}, "alignment is 2"),
        ({"tokenizer.ggml.token_type": [6] * 1024}, "cannot stand for a byte"),
        ({"tokenizer.ggml.tokens": ["x"] * 1024}, "1023 of its tokens occur twice"),
        ({"tokenizer.ggml.tokens": ["x\0a", "x\0b"] + ["y"] * 1022}, "occur twice"),
        (
            {
                "tokenizer.ggml.tokens": [f"t{i}" for i in range(1024)],
                "tokenizer.ggml.token_type": [1] * 1024,
            },
            "no token for some bytes",
        ),
        (
            {
                "tokenizer.ggml.model": "rwkv",
                "tokenizer.ggml.tokens": ["\\n\\n", *(f"t{i}" for i in range(1023))],
                "tokenizer.ggml.token_type": [1] * 1024,
            },
            "begin with the byte 0x0a, which is no token itself",
        ),
    ],
)
def test_metadata_that_llama_asserts_or_refuses_is_refused(
    synth: SynthFactory, metadata: dict[str, object], reason: str
) -> None:
    assert reason in _refusal(synth("test", metadata=metadata))


FUZZ = """
import random, sys, pathlib
from cbatch.backend.load.open_model import open_model
from cbatch.errors import ModelLoadError
from tests.backend.damage import damaged
base, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
data, rng, path = base.read_bytes(), random.Random(seed), base.with_name(f"damaged-{seed}.gguf")
n_header = data.rindex(b".weight") + 40
n_refused = 0
for i in range(250):
    path.write_bytes(damaged(data, n_header, rng, is_cut=i % 3 == 0))
    try:
        model = open_model(path)
        model.vocab.tokenize("H\\u00e9\\0llo <|im_end|>" + "".join(map(chr, range(400))))
        [model.vocab.piece(token) for token in range(model.vocab.n_vocab)]
        model.close()
    except ModelLoadError:
        n_refused += 1
print(n_refused)
"""


def test_damaged_files_never_end_the_process(synth: SynthFactory) -> None:
    base = synth("test", n_layer=1, n_embd=32, n_head=1, n_ff=32, n_vocab=400)
    command = [sys.executable, "-c", FUZZ, str(base), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) > 80
