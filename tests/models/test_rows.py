"""Rows: the very tokens of the engine, of which every answer is learned and nothing else."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_vocabulary import TURN_END
from cbatch.models.recipe.export import write_vocabulary
from cbatch.models.recipe.pieces import learn_pieces
from cbatch.models.recipe.rows import IGNORED, RowMaker, batches
from cbatch.models.recipe.tasks import Example, training_chats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Vocab

pytestmark = pytest.mark.real

TWO_TURNS = Example(
    "again",
    (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Say red."},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "red"},
    ),
)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    write_vocabulary(path, learn_pieces(["assistant\nSay red."] * 9, 400))
    with closing(open_model(path)) as model:
        yield model.vocab


def learned(vocab: Vocab, targets: list[int]) -> str:
    """Show the learned tokens as text, the end of a turn as a bar."""
    kept = [t for t in targets if t != IGNORED]
    return "".join("|" if t == TURN_END else vocab.piece(t).decode() for t in kept)


def test_row_is_the_engines_prompt_then_the_answer_then_its_end(vocab: Vocab) -> None:
    row = RowMaker(vocab).row([TWO_TURNS])
    prompt = vocab.render(TWO_TURNS.prompt)
    assert row.tokens == [*prompt, *vocab.tokenize(TWO_TURNS.answer), TURN_END]


def test_row_learns_every_answer_with_its_end_and_nothing_else(vocab: Vocab) -> None:
    row = RowMaker(vocab).row([TWO_TURNS])
    assert learned(vocab, row.targets) == "red|red|"
    assert all(
        target in (IGNORED, after)
        for target, after in zip(row.targets, row.tokens[1:], strict=False)
    )


def test_row_of_several_chats_is_one_chat(vocab: Vocab) -> None:
    maker = RowMaker(vocab)
    row = maker.row([TWO_TURNS, TWO_TURNS])
    assert learned(vocab, row.targets) == "red|red|red|red|"


def test_batches_hold_no_more_than_asked_and_come_again_with_the_same_seed(vocab: Vocab) -> None:
    def first(n: int) -> list[list[list[int]]]:
        made = batches(training_chats(1), RowMaker(vocab), 4096, seed=1, n_pool=256)
        return [[row.tokens for row in batch] for batch in islice(made, n)]

    found = first(6)
    assert found == first(6)
    assert all(max(map(len, rows)) * len(rows) <= 4096 for rows in found)
