"""The vocabulary: the same from the same text, and llama.cpp reads every text back from its tokens."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_vocabulary import CONTROL_TOKENS, TURN_END, TURN_START
from cbatch.models.recipe.export import write_vocabulary
from cbatch.models.recipe.pieces import learn_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Vocab

pytestmark = pytest.mark.real

TEXTS = [
    "user\nSay red.",
    "assistant\nred",
    "user\nSort: red, blue, green",
    "assistant\nblue, green, red",
] * 20
N_VOCAB = 420


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    write_vocabulary(path, learn_pieces(TEXTS, N_VOCAB))
    with closing(open_model(path)) as model:
        yield model.vocab


def cut(vocab: Vocab, text: str) -> list[str]:
    return [vocab.piece(token).decode() for token in vocab.tokenize(text)]


@pytest.mark.parametrize("n_vocab", [356, 400, 1000])
def test_learn_pieces_gives_as_many_as_asked_all_different(n_vocab: int) -> None:
    pieces = learn_pieces(TEXTS, n_vocab)
    assert len(pieces) == len(set(pieces)) == n_vocab
    assert pieces[: len(CONTROL_TOKENS)] == list(CONTROL_TOKENS)
    assert pieces == learn_pieces(iter(TEXTS), n_vocab)


def test_joined_pieces_come_after_their_parts() -> None:
    pieces = learn_pieces(TEXTS, N_VOCAB)[5 + 256 :]
    for i, piece in enumerate(pieces):
        if len(piece) > 1 and not piece.startswith("<unused"):
            assert any(
                piece[:n] in pieces[:i] and piece[n:] in pieces[:i] for n in range(1, len(piece))
            )


def test_known_words_are_one_token_with_their_space(vocab: Vocab) -> None:
    assert cut(vocab, "Say red.") == ["Say", " red", "."]
    assert cut(vocab, "red, blue") == ["red", ", ", "blue"]
    assert cut(vocab, "1234") == ["1", "2", "3", "4"]


def test_unknown_word_is_cut_alike_everywhere(vocab: Vocab) -> None:
    alone = cut(vocab, "bledu")
    assert cut(vocab, "Say bledu") == ["Say", " ", *alone]
    assert cut(vocab, "Sort: bledu, red") == ["Sort", ": ", *alone, ", ", "red"]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_from_its_tokens(vocab: Vocab, text: str) -> None:
    text = text.replace("▁", " ")  # SentencePiece's sign for a space
    if not any(control in text for control in CONTROL_TOKENS):
        assert b"".join(map(vocab.piece, vocab.tokenize(text))) == text.encode()


def test_every_byte_has_a_token(vocab: Vocab) -> None:
    assert [vocab.piece(len(CONTROL_TOKENS) + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


def test_turns_are_marked_by_single_tokens(vocab: Vocab) -> None:
    tokens = vocab.render([{"role": "user", "content": "Say red."}])
    assert tokens[0] == TURN_START
    assert tokens.count(TURN_START) == 2
    assert tokens.count(TURN_END) == 1
    assert TURN_END in vocab.end_tokens
