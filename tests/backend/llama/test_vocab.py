"""Text to tokens and back on a real vocabulary."""

from __future__ import annotations

import _thread
import ctypes
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import llama_cpp
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cbatch.backend.llama import vocab as vocab_module
from cbatch.backend.llama.breakers import find_breakers
from cbatch.backend.llama.log import llama_log
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_vocabulary import (
    BOS,
    CONTROL_TOKENS,
    EOS,
    TURN_END,
    TURN_START,
    vocabulary,
)
from cbatch.errors import EngineClosedError, RequestFailedError
from tests.backend.llama.vocabularies import (
    KINDS,
    MARKS,
    OF_USERS,
    RWKV,
    write_model_of,
    write_plain_model_of,
)
from tests.bench.test_synthetic_tokenizer import BPE, WPM
from tests.breakers import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cbatch.backend import Vocab
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.vocab import LlamaVocab
    from tests.conftest import SynthFactory


@pytest.fixture(scope="module")
def model(random_model: Path) -> Iterator[LlamaModel]:
    opened = open_model(random_model)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def vocab(model: LlamaModel) -> LlamaVocab:
    return model.vocab


def _text(vocab: Vocab, tokens: list[int]) -> bytes:
    return b"".join(vocab.piece(token) for token in tokens)


def test_vocab_names_its_special_tokens(vocab: LlamaVocab) -> None:
    assert (vocab.n_vocab, vocab.bos_text, vocab.eos_text) == (1024, "<s>", "</s>")
    assert vocab.end_tokens == (EOS, TURN_END)


# SentencePiece's own space sign comes back as a space.
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_any_text_comes_back(vocab: LlamaVocab, text: str) -> None:
    assume(not any(special in text for special in CONTROL_TOKENS))
    tokens = vocab.tokenize("|" + text)  # the bar keeps a text from beginning with <s> or a space
    assert tokens[0] == BOS
    assert _text(vocab, tokens).decode() == " |" + text


def test_lone_surrogate_fails_the_request(vocab: LlamaVocab) -> None:
    with pytest.raises(RequestFailedError, match="Unicode"):
        vocab.tokenize("a\ud800b")


@pytest.mark.real
def test_text_without_a_token_fails_the_request(tmp_path: Path) -> None:
    model = open_model(write_plain_model_of(tmp_path / "model.gguf", RWKV))
    assert model.vocab.tokenize("abc")
    for text in ("é", "abc é", "é" * 10_000):
        with pytest.raises(RequestFailedError, match="no tokens for"):
            model.vocab.tokenize(text)
    assert model.vocab.named_token("<é>") is None
    model.close()


def test_bos_is_once_where_the_model_wants_one(vocab: LlamaVocab, synth: SynthFactory) -> None:
    for text in ("a\0b", "\0", "", "\ufffe", "\u2581"):
        assert vocab.tokenize(text)[0] == BOS
    assert _text(vocab, vocab.tokenize("a\0b")) == b" a\0b"
    assert vocab.tokenize("<s>Hi") == vocab.tokenize("Hi")
    assert vocab.tokenize("<s>Hi").count(BOS) == 1
    assert vocab.tokenize("<|im_start|>user")[:2] == [BOS, TURN_START]
    model = open_model(synth("test", metadata={"tokenizer.ggml.add_bos_token": False}))
    assert BOS not in model.vocab.tokenize("Hi")
    assert model.vocab.tokenize("<s>Hi").count(BOS) == 1
    model.close()


def test_text_that_needs_more_room_than_guessed_is_tokenized_whole(vocab: LlamaVocab) -> None:
    # Each special token is followed by a space that the text does not have.
    text = "<s>" + "<|im_end|>a" * 2000
    tokens = vocab.tokenize(text)
    assert tokens.count(TURN_END) == 2000
    assert len(vocab.tokenize("é" * 20_000)) == 40_000 + 2


def test_breakers_are_the_tokens_that_hold_a_string_or_begin_it(vocab: LlamaVocab) -> None:
    packed = vocab.dry_breakers(["\n"])
    found = unpack(packed)
    assert (5 + 0x0A,) in found
    assert all(b"\n" in vocab.piece(token) for token, *_ in found)
    long = unpack(vocab.dry_breakers(["ab"]))
    assert any(head == 5 + ord("a") and tail for head, *tail in long)
    assert vocab.dry_breakers([]) == vocab.dry_breakers([""]) == b""
    assert vocab.dry_breakers(["\n"]) is packed


WORDS = st.binary(max_size=4).map(lambda data: bytes(97 + b % 3 for b in data))


@given(words=st.lists(WORDS, max_size=20), strings=st.lists(WORDS.map(bytes.decode), max_size=6))
def test_breakers_are_those_of_the_definition(words: list[bytes], strings: list[str]) -> None:
    expected = set()
    for text in map(str.encode, strings):
        for token, word in enumerate(words):
            ends = [i for i in range(1, len(text)) if word.endswith(text[:i])]
            if text and text in word:
                expected.add((token,))
            else:
                expected |= {(token, *text[i:]) for i in ends}
    assert unpack(find_breakers(strings, words, list)) == expected


def test_breakers_that_begin_alike_take_room_once_for_all_tokens() -> None:
    chance = random.Random(1)
    strings = ["e" + "".join(chance.choices("abcd", k=39)) for _ in range(64)]
    words = [f"{i}e".encode() for i in range(3000)]
    found = find_breakers(strings, words, list)
    assert len(unpack(found)) == 64 * len(words)
    assert len(found) < 4 * (2 * len(words) + 64 * 21 + 9)


def test_kept_breakers_are_few_where_they_are_large(
    vocab: LlamaVocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vocab.dry_breakers(["x"])
    monkeypatch.setattr(vocab_module, "_BREAKER_BYTES_KEPT", len(found) + 1)
    assert vocab.dry_breakers(["x"]) is found
    vocab.dry_breakers(["y"])
    assert vocab.dry_breakers(["x"]) is not found


def test_control_tokens_are_written_out_on_demand(vocab: LlamaVocab) -> None:
    assert {BOS, EOS, TURN_START, TURN_END} <= vocab.control_tokens
    assert vocab.shown_piece(TURN_START) == b"<|im_start|>"
    assert vocab.shown_piece(5 + 0xC3) == b"\xc3"
    plain = set(range(vocab.n_vocab)) - vocab.control_tokens
    assert all(vocab.shown_piece(token) == vocab.piece(token) for token in plain)
    assert not any(vocab.piece(token) for token in vocab.control_tokens)


def test_mark_is_a_token_where_one_stands_for_it_alone_and_is_no_text(vocab: LlamaVocab) -> None:
    assert vocab.named_token("<|im_start|>") == TURN_START
    assert vocab.named_token("<|im_start|>\n") is None
    assert vocab.named_token("<tool_call>") is None
    assert vocab.named_token("a") is None
    assert vocab.named_token("") is None


def test_tokens_for_filling_in_and_to_suppress_are_those_of_the_file(
    vocab: LlamaVocab, synth: SynthFactory
) -> None:
    assert (vocab.fim, vocab.suppressed_tokens) == ({}, ())
    pieces = vocabulary(1024)
    pieces[-1] = "x" * 300  # longer than the buffer
    said: dict[str, object] = {
        f"tokenizer.ggml.fim_{name}_token_id": 300 + i for i, name in enumerate(("pre", "mid"))
    }
    said |= {"tokenizer.ggml.suppress_tokens": [300, 7, 300], "tokenizer.ggml.tokens": pieces}
    model = open_model(synth("test", metadata=said))
    assert model.vocab.fim == {"pre": 300, "mid": 301}
    assert model.vocab.suppressed_tokens == (7, 300)
    assert model.vocab.piece(1023) == b"x" * 300
    model.close()


def test_template_gets_tools_and_variables(synth: SynthFactory) -> None:
    template = "{{ bos_token }}{{ (tools or []) | tojson }}{{ style }}{{ messages[0]['content'] }}"
    model = open_model(synth("test", metadata={"tokenizer.chat_template": template}))
    chat, tools = [{"role": "user", "content": "Hi"}], [{"type": "function"}]
    tokens = model.vocab.render(chat, {"tools": tools, "style": "brief"})
    assert tokens == model.vocab.tokenize('[{"type": "function"}]briefHi')
    assert tokens.count(BOS) == 1
    model.close()


@pytest.mark.parametrize("token", [-1, 1024, 2**31])
def test_piece_of_no_token_is_a_value_error(vocab: LlamaVocab, token: int) -> None:
    with pytest.raises(ValueError, match="1023"):
        vocab.piece(token)


def test_render_uses_the_models_template(vocab: LlamaVocab) -> None:
    tokens = vocab.render([{"role": "user", "content": "Say red."}])
    assert tokens[:2] == [BOS, TURN_START]
    assert tokens.count(TURN_START) == 2
    assert _text(vocab, tokens).endswith(b"assistant\n")
    assert "<|im_start|>" in vocab.template
    assert "does not show tools" in vocab.tool_refusal
    assert ".gguf" not in vocab.tool_refusal  # which clients of a server see


def test_many_threads_agree(vocab: LlamaVocab) -> None:
    text = "the quick brown fox " * 50
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: _text(vocab, vocab.tokenize(text)), range(64)))
    assert set(results) == {b" " + text.encode()}


def test_closed_vocab_raises_instead_of_crashing(random_model: Path) -> None:
    model = open_model(random_model)
    model.close()
    with pytest.raises(EngineClosedError):
        model.vocab.tokenize("Hi")
    with pytest.raises(EngineClosedError):
        model.vocab.piece(300)


def _in_one_call(vocab: LlamaVocab, text: str, *, is_raw: bool = False) -> list[int]:
    data = text.encode()
    add_special = not (is_raw or (vocab.bos_text and text.startswith(vocab.bos_text)))
    n_room = 2 * len(data) + 2
    tokens, special = (ctypes.c_int32 * n_room)(), (add_special, not is_raw)
    n = llama_cpp.llama_tokenize(vocab.pointer, data, len(data), tokens, n_room, *special)
    assert n >= 0
    return tokens[:n]


@pytest.mark.parametrize("seed", range(3))
def test_long_text_has_the_tokens_of_one_call(vocab: LlamaVocab, seed: int) -> None:
    dice = random.Random(seed)
    words = [*CONTROL_TOKENS, *CONTROL_TOKENS, "a", " word", "\n", "  ", "<", "|>", "é", "<|im_"]
    text = "".join(dice.choices(words, k=12_000))
    assert vocab.tokenize(text) == _in_one_call(vocab, text)
    assert vocab.n_tokens_least(text) <= len(vocab.tokenize(text))


N_MARKS = 60_000  # one call would take half a minute


def test_marks_by_the_ten_thousands_are_tokenized_in_parts(vocab: LlamaVocab) -> None:
    assert vocab.tokenize("<|im_end|>" * N_MARKS)[1:] == [TURN_END] * N_MARKS


@pytest.mark.real
def test_documents_with_marks_by_the_ten_thousands_are_tokenized_in_parts(
    synth: SynthFactory,
) -> None:
    template = {"tokenizer.chat_template.rerank": "{query}: {document}"}
    with closing(open_model(synth("test", metadata=template))) as model:
        tokens = model.vocab.tokenize_pair("a", "<|im_end|>" * N_MARKS, None)
    assert tokens.count(TURN_END) == N_MARKS


@pytest.mark.real
def test_runs_of_white_space_by_the_ten_thousands_are_tokenized_in_parts(tmp_path: Path) -> None:
    path = write_model_of(tmp_path / "model.gguf", *KINDS["spm, runs"])
    with closing(open_model(path)) as model:
        run = model.vocab.tokenize("\n" * 5)[-1]
        tokens = model.vocab.tokenize("a\n\n\n\n\n" * N_MARKS)
        assert tokens.count(run) == N_MARKS
        assert model.vocab.tokenize("\n" * 5 * N_MARKS)[1:] == [run] * N_MARKS


@pytest.mark.real
@pytest.mark.parametrize("name", ["spm, right of most", "spm, left of [MASK]"])
@pytest.mark.parametrize("text", ["😀", "\f", "a 漢\f", "\f <s>"])
def test_unknown_characters_are_tokenized_in_parts(
    tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, tokenize = list[int](), llama_cpp.llama_tokenize

    def counted(*given: Any) -> int:
        asked.append(len(given[1]))
        return int(tokenize(*given))

    with closing(open_model(write_model_of(tmp_path / "model.gguf", *KINDS[name]))) as model:
        whole = _in_one_call(model.vocab, text * 5000)
        monkeypatch.setattr(llama_cpp, "llama_tokenize", counted)
        assert model.vocab.tokenize(text * 5000) == whole
    assert max(asked) < 6000


def test_ctrl_c_amid_a_long_text_waits_for_its_end(
    vocab: LlamaVocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, found = llama_cpp.llama_tokenize, list[int]()

    def struck(*given: Any) -> int:
        _thread.interrupt_main()
        found.append(tokenize(*given))
        return found[0]

    monkeypatch.setattr(llama_cpp, "llama_tokenize", struck)
    with pytest.raises(KeyboardInterrupt):
        vocab.tokenize("ab " * 100_000)
    assert len(found) == 1


@pytest.fixture(scope="module", params=KINDS)
def marked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaVocab]:
    """A vocabulary with marks, which divides texts of a few bytes."""
    path, log = tmp_path_factory.mktemp("marked") / "model.gguf", llama_log()
    log.install()
    opened = open_model(write_model_of(path, *KINDS[request.param]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_module, "_N_PART", 8)
        patch.setattr(vocab_module, "_N_UNKNOWN", 3)
        yield opened.vocab
    opened.close()
    log.remove()


_TOKENS_OF = """
import json, sys
from cbatch.backend.load.open_model import open_model
print(json.dumps(open_model(sys.argv[1]).vocab.tokenize("a a")))
"""


@pytest.mark.real
# as llama.cpp writes it
@pytest.mark.parametrize(("lacking", "is_told"), [("bos", False), ("seperator", True)])
def test_vocabulary_of_words_without_a_special_token_adds_none(
    tmp_path: Path, lacking: str, is_told: bool
) -> None:
    """llama.cpp ends the process where it is asked to add a token that is not there."""
    known = {"bos": 2, "seperator": 3}
    pairs = {key: pair for key, pair in WPM.items() if "seperator" not in key}
    metadata: dict[str, object] = {
        f"tokenizer.ggml.{name}_token_id": token for name, token in known.items() if name != lacking
    }
    if is_told:
        metadata["tokenizer.ggml.add_bos_token"] = False
    path = write_model_of(tmp_path / "model.gguf", pairs, metadata)
    asked = [sys.executable, "-c", _TOKENS_OF, str(path)]
    done = subprocess.run(asked, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [8, 8]


_WORDS = (
    " ",
    "  ",
    "\n",
    "\t",
    "\v",
    "\f",
    "a",
    "ab",
    "hello",
    "<",
    ">",
    "<a",
    "[",
    "é",
    "\u3000",
    "😀",
)


@pytest.mark.real
@given(words=st.lists(st.sampled_from((*MARKS, *_WORDS)), max_size=40))
@example(words=["a" * 8, "<x>\t", "[MASK]"])
def test_divided_text_has_the_tokens_of_one_call_beside_any_white_space(
    marked: LlamaVocab, words: list[str]
) -> None:
    text = "".join(words)
    assert marked.tokenize(text) == _in_one_call(marked, text)


@pytest.mark.real
@pytest.mark.parametrize("mark", MARKS)
def test_marks_that_llama_cpp_takes_for_control_tokens_divide_no_raw_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    path = write_model_of(tmp_path / "model.gguf", *KINDS["spm"], OF_USERS)
    with closing(open_model(path)) as opened:
        monkeypatch.setattr(vocab_module, "_N_PART", 8)
        vocab, text = opened.vocab, f"ab ab ab a{mark}b ab ab ab"
        query, document = (_in_one_call(vocab, one, is_raw=True) for one in (text, "ab"))
        found = vocab.tokenize_pair(text, "ab", None)
    assert found[1 : 1 + len(query)] == query
    assert found[-len(document) :] == document


_ONE_WORD = """
import sys
from cbatch.backend.load.open_model import open_model
vocab = open_model(sys.argv[1]).vocab
print(len(vocab.tokenize("." * 10**6)))
"""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder", "default"])
def test_one_word_of_a_megabyte_ends_no_process(tmp_path: Path, name: str) -> None:
    """These vocabularies split texts by `std::regex`, which takes stack for every character of a word."""
    path = write_model_of(tmp_path / "model.gguf", BPE, {"tokenizer.ggml.pre": name})
    asked = [sys.executable, "-c", _ONE_WORD, str(path)]
    done = subprocess.run(asked, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"1000000\n")
