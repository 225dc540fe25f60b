"""Vocabularies taken from GGUF files: everything of the tokenizer, of any kind; what is wrong is named."""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

import cbatch
from cbatch.backend.llama.gguf import read_header
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic import SHAPES, Shape, write_model
from cbatch.bench.synthetic_tokenizer import CHATML, TokenizerData, make_tokenizer, take_tokenizer
from cbatch.errors import ConfigError
from tests.backend.damage import damaged
from tests.profiles import examples

if TYPE_CHECKING:
    from pathlib import Path

Pairs = dict[str, tuple[Any, str, str | None]]

BYTES_AS_LETTERS = [
    chr(b if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else 256 + b) for b in range(256)
]
"""One letter for each byte, as GPT-2 has it up to the numbers of those above 255."""


def kind(name: str, tokens: list[str], **more: tuple[Any, str, str | None]) -> Pairs:
    """A vocabulary's metadata by short names."""
    values: Pairs = {"model": (name, "STRING", None), "tokens": (tokens, "ARRAY", "STRING")}
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, **more}.items()}


def types(*kinds: int) -> tuple[Any, str, str | None]:
    return list(kinds), "ARRAY", "INT32"


BPE = kind(
    "gpt2",
    [*BYTES_AS_LETTERS, "he", "ll", "hell", "<|endoftext|>", "<|im_start|>"],
    pre=("gpt-2", "STRING", None),
    token_type=types(*[1] * 259, 3, 4),
    merges=(["h e", "l l", "he ll"], "ARRAY", "STRING"),
    bos_token_id=(259, "UINT32", None),
    eos_token_id=(259, "UINT32", None),
    add_bos_token=(False, "BOOL", None),
)
WPM = kind(
    "bert",
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world", "s", "▁a", "a"],
    token_type=types(3, 2, 3, 3, 3, 1, 1, 1, 1, 1),
    token_type_count=(2, "UINT32", None),
    cls_token_id=(2, "UINT32", None),
    seperator_token_id=(3, "UINT32", None),
    unknown_token_id=(1, "UINT32", None),
    padding_token_id=(0, "UINT32", None),
    mask_token_id=(4, "UINT32", None),
)
UGM = kind(
    "t5",
    ["<pad>", "</s>", "<unk>", "▁", "▁hello", "o", "l", "h", "e"],
    scores=([0.0, 0.0, -2.5, -2.0, -3.0, -4.0, -4.0, -4.0, -4.0], "ARRAY", "FLOAT32"),
    token_type=types(3, 3, 2, 1, 1, 1, 1, 1, 1),
    eos_token_id=(1, "UINT32", None),
    unknown_token_id=(2, "UINT32", None),
    add_space_prefix=(True, "BOOL", None),
    remove_extra_whitespaces=(True, "BOOL", None),
)
KINDS = {"bpe": BPE, "wpm": WPM, "ugm": UGM}


def write_vocabulary(path: Path, values: Pairs, **more: tuple[Any, str, str | None]) -> Path:
    """Write a file of a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, of, item) in {**values, **more}.items():
        item_type = None if item is None else gguf.GGUFValueType[item]
        writer.add_key_value(key, value, gguf.GGUFValueType[of], item_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def told(path: Path) -> dict[str, tuple[int, bytes]]:
    """What a file says of its tokenizer: types and bytes."""
    header = read_header(path, "")
    assert header is not None
    data = path.read_bytes()
    return {
        key: (header.kinds[key], data[start:end])
        for key, (start, end) in header.spans.items()
        if key.startswith("tokenizer.")
    }


def model_with(path: Path, tokenizer: TokenizerData) -> Path:
    shape = Shape(1, 32, 1, 1, 32, tokenizer.n_tokens, "f32")
    return write_model(path, shape, tokenizer=tokenizer)


@pytest.mark.parametrize("name", KINDS)
def test_taken_tokenizer_is_the_same_to_the_byte(tmp_path: Path, name: str) -> None:
    source = write_vocabulary(
        tmp_path / "v.gguf",
        KINDS[name],
        **{
            "tokenizer.chat_template": ("{{ messages }} ☃", "STRING", None),
            "tokenizer.chat_template.tool_use": ("{{ tools }}", "STRING", None),
            "tokenizer.chat_templates": (["tool_use"], "ARRAY", "STRING"),
            "tokenizer.ggml.precompiled_charsmap": ([0, 255, 7], "ARRAY", "UINT8"),
            "tokenizer.odd.i8": (-3, "INT8", None),
            "tokenizer.odd.u64": (2**60, "UINT64", None),
            "tokenizer.odd.f64": (0.1, "FLOAT64", None),
            "tokenizer.odd.flags": ([True, False], "ARRAY", "BOOL"),
            "tokenizer.odd.doubles": ([0.1, -5.0], "ARRAY", "FLOAT64"),
        },
    )
    made = model_with(tmp_path / "m.gguf", take_tokenizer(source))
    assert told(made) == told(source)


@pytest.mark.real
@pytest.mark.parametrize("name", KINDS)
def test_text_has_the_tokens_of_the_taken_vocabulary(tmp_path: Path, name: str) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", KINDS[name])
    path = model_with(tmp_path / "m.gguf", take_tokenizer(source))
    with cbatch.load(path, parallel=1, ctx_per_seq=64, n_threads=1) as engine:
        assert engine.model_facts.chat_template == CHATML
        assert engine.tokenize("hello") == {"bpe": [258, 111], "wpm": [5], "ugm": [4, 1]}[name]


def test_model_gives_its_vocabulary_as_a_vocabulary_alone_does(
    tmp_path: Path, test_model: Path
) -> None:
    tokenizer = take_tokenizer(test_model)
    assert told(model_with(tmp_path / "m.gguf", tokenizer)) == told(test_model)
    ours, theirs = (open_model(path) for path in (tmp_path / "m.gguf", test_model))
    for text in ("Say hello, world!", "ünïcödé ☃", "  two  spaces\n"):
        assert ours.vocab.tokenize(text) == theirs.vocab.tokenize(text)
    ours.close()
    theirs.close()


def test_more_tokens_are_unused_ones(tmp_path: Path) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", UGM)
    tokenizer = take_tokenizer(source, 12)
    values = {key.rpartition(".")[2]: value.value for key, value in tokenizer.values.items()}
    assert tokenizer.n_tokens == 12
    assert values["tokens"][9:] == [b"[PAD0]", b"[PAD1]", b"[PAD2]"]  # type: ignore[index]
    assert values["token_type"][9:] == [5, 5, 5]  # type: ignore[index]
    assert values["scores"][9:] == [-1000, -1000, -1000]  # type: ignore[index]
    assert (tokenizer.loudness[9:] < 0.1).all()


def test_tokens_without_text_and_those_that_end_are_quiet(tmp_path: Path) -> None:
    loud = take_tokenizer(write_vocabulary(tmp_path / "b.gguf", BPE)).loudness
    assert (loud[:259] == 1).all()
    assert (loud[259:] < 0.1).all()
    unmarked = {key: value for key, value in BPE.items() if not key.endswith("token_type")}
    assert (take_tokenizer(write_vocabulary(tmp_path / "c.gguf", unmarked)).loudness == loud).all()
    made = make_tokenizer(400)
    assert set(made.loudness.tolist()) == {0.75, 1.0}


def test_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has 400 tokens, but the shape has 1024"):
        write_model(tmp_path / "a.gguf", SHAPES["test"], tokenizer=make_tokenizer(400))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="n_vocab must be at least"):
        make_tokenizer(300)
    source = write_vocabulary(tmp_path / "v.gguf", UGM)
    with pytest.raises(ConfigError, match=r"n_vocab is 8, but .*v.gguf has 9 tokens"):
        take_tokenizer(source, 8)


# ---- files that are wrong ----


def raw(n_values: int, *values: bytes, n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values) + b"".join(values)


def key(name: str, kind: int, *rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + b"".join(rest)


TOKENS = "tokenizer.ggml.tokens"
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"Hello, world", "is not a GGUF file"),
    "nothing in it": (raw(0), "has no vocabulary"),
    "newer": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many values": (raw(2**62, key("a", 0, b"\1")), "is cut off"),
    "many tokens": (raw(1, key(TOKENS, 9, struct.pack("<IQ", 8, 2**61))), "is cut off"),
    "a long token": (raw(1, key(TOKENS, 9, struct.pack("<IQQ", 8, 1, 2**63))), "is cut off"),
    "an odd type": (raw(1, key(TOKENS, 99)), "unknown type 99"),
    "arrays of arrays": (raw(1, key(TOKENS, 9, struct.pack("<IQ", 9, 2))), "unknown type 9"),
    "many tensors": (raw(0, n_tensors=2**62), "is cut off"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data, words = WRONG[name]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        take_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf: cannot be read: No such file"):
        take_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="is a folder"):
        take_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": None}, "has no vocabulary"),
        ({"tokenizer.ggml.model": ("none", "STRING", None)}, "has no vocabulary"),
        ({TOKENS: None}, "has no vocabulary"),
        ({TOKENS: (["a", "a", *"cdefghi"], "ARRAY", "STRING")}, "occur twice"),
        ({"tokenizer.ggml.scores": ([1.0], "ARRAY", "FLOAT32")}, "scores is not one number"),
        ({"tokenizer.ggml.scores": (1.0, "FLOAT32", None)}, "scores is not one number"),
        ({"tokenizer.ggml.token_type": types(1, 1)}, "token_type is not one number"),
    ],
    ids=str,
)
def test_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    values = {key: value for key, value in {**UGM, **changes}.items() if value is not None}
    path = write_vocabulary(tmp_path / "v.gguf", values)
    with pytest.raises(ConfigError, match=words):
        take_tokenizer(path)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut off", "bytes changed"])
@pytest.mark.parametrize("name", KINDS)
def test_damaged_file_is_refused_or_read(tmp_path: Path, name: str, is_cut: bool) -> None:
    data = write_vocabulary(tmp_path / "v.gguf", KINDS[name]).read_bytes()
    path, refusals = tmp_path / "damaged.gguf", list[str]()
    for seed in range(examples(120)):
        path.write_bytes(damaged(data, len(data), Random(seed), is_cut=is_cut))
        try:
            tokenizer = take_tokenizer(path)
        except ConfigError as error:
            refusals.append(str(error))
        else:
            assert np.isfinite(tokenizer.loudness).all()
            model_with(path.with_name("m.gguf"), tokenizer).unlink()
    assert refusals
    assert all(words.startswith(f"{path}: ") for words in refusals)
