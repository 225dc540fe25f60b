"""What an engine says of prompts, tokens and its model, here and through a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cbatch import BatchPrompt, ConfigError, Engine, PromptError
from cbatch.backend.fake import FakeBackend
from tests.worker.links import engine_over

if TYPE_CHECKING:
    from cbatch.runtime.step_record import StepRecord

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=["here", "worker"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return (
        Engine(FakeBackend(2, 32)) if request.param == "here" else engine_over(FakeBackend(2, 32))
    )


def test_tokens_pieces_and_text_of_a_prompt(engine: Engine) -> None:
    with engine:
        assert engine.tokenize("ab") == [97, 98]
        assert engine.tokenize(CHAT) == list(b"user:Hi")
        assert engine.render(CHAT) == "user:Hi"
        assert engine.render(BatchPrompt(tokens=[104, 105])) == "hi"
        assert engine.pieces([104, 255, 256]) == [b"h", b"\xff", b"<end>"]


def test_tokens_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with engine:
        with pytest.raises(PromptError, match="not in the vocabulary"):
            engine.pieces([320])
        with pytest.raises(ConfigError, match="tokens must be"):
            engine.pieces([-1])


def test_model_facts_cross_the_border_whole(engine: Engine) -> None:
    with engine:
        facts = engine.model_facts
        assert (facts.n_vocab, facts.n_ctx_train, facts.adapters) == (320, 32, ())


def test_slots_tell_their_requests_and_cells(engine: Engine) -> None:
    with engine:
        assert [(s.slot, s.status, s.n_cells) for s in engine.slots()] == [
            (0, "free", 0),
            (1, "free", 0),
        ]
        engine.run(["abc"], options={"max_tokens": 4, "ignore_eos": True}).results()
        assert sorted(slot.n_cells for slot in engine.slots()) == [0, 6]
        assert {slot.id for slot in engine.slots()} == {None}


def test_stats_cross_the_border_whole(engine: Engine) -> None:
    with engine:
        engine.run(["a", "b", "c"], options={"max_tokens": 4, "ignore_eos": True}).results()
        stats = engine.stats()
        assert (stats.n_submitted, stats.n_output_tokens) == (3, 12)
        assert (stats.n_finished, stats.queue_s.n) == ({"length": 3}, 3)
        assert stats.itl_s.n > 0
        engine.reset_stats()
        assert engine.stats().n_submitted == 0


def test_records_of_steps_cross_the_border(engine: Engine) -> None:
    found: list[StepRecord] = []
    with engine:
        engine.record_steps(found.append)
        engine.run(["abc"], options={"max_tokens": 4, "ignore_eos": True}).results()
        engine.record_steps(None)
        assert sum(row.n_sampled for record in found for row in record.rows) == 4
        assert {row.id for record in found for row in record.rows} == {"0"}
