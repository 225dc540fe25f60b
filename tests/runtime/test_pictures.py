"""Pictures in the batch, on a fake backend: company, small memory, retained cells, and drafts change no answer."""

from __future__ import annotations

import base64
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import Engine
from cbatch.backend.fake import FakeBackend, FakeVocab
from cbatch.backend.fake.fake_tokens import FakePicture
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, PromptTooLongError
from cbatch.messages import BatchPrompt
from cbatch.support.picture_tokens import (
    FIRST_PICTURE,
    PictureTokens,
    ids_of,
    place_of,
    without_pictures,
)
from tests.profiles import examples
from tests.runtime.backends import PATIENCE_S

MEMORIES = (
    None,
    KvCapabilities("partitioned", 5 * 400, can_copy=True),
    KvCapabilities("unified", 900, can_save=True, can_copy=True, saved_bytes_per_cell=64),
    KvCapabilities("recurrent", 5, can_trim=False, can_save=True, saved_bytes=4096),
)
SAME = {"seed": 1, "max_tokens": 12}


def chat(draw: random.Random) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for _ in range(draw.randrange(1, 4)):
        if draw.random() < 0.6:
            parts.append(
                {"type": "image", "image": bytes([draw.randrange(3)]) * draw.randrange(1, 40)}
            )
        parts.append({"type": "text", "text": "ab" * draw.randrange(1, 20)})
    return [{"role": "user", "content": parts}]


def engine_of(n_slots: int, *, memory: KvCapabilities | None = None, **schedule: Any) -> Engine:
    backend = FakeBackend(n_slots, 400, memory=memory)
    backend.vocab.picture_refusal = ""
    return Engine(backend, schedule=ScheduleOptions(**schedule))


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_slots=st.integers(1, 5),
    n_budget=st.sampled_from([None, 4, 32]),
    memory=st.sampled_from(MEMORIES),
)
def test_pictures_in_company_have_the_answers_they_have_alone(
    seed: int, n_slots: int, n_budget: int | None, memory: KvCapabilities | None
) -> None:
    draw = random.Random(seed)
    asked = [chat(draw) for _ in range(8)]
    with engine_of(1) as engine:
        alone = [engine.run([each], options=SAME).results()[0] for each in asked]
    with engine_of(n_slots, memory=memory, prefill_budget=n_budget) as engine:
        together = engine.run(asked, options=SAME).results()
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.usage.prompt_tokens for r in together] == [r.usage.prompt_tokens for r in alone]


def test_ids_of_pictures_are_no_tokens_and_tell_their_place() -> None:
    ids = ids_of(3, 5)
    assert ids[0] >= FIRST_PICTURE
    assert [place_of(i) for i in ids] == [(3, row) for row in range(5)]
    assert not {*ids} & {*ids_of(4, 5)}
    tokens = PictureTokens([1, *ids, 2], [FakePicture()])
    assert tokens.n_rows == 5
    assert without_pictures(tokens) == [1, 2]
    plain = [1, 2]
    assert without_pictures(plain) is plain


class SlowEyes(FakeVocab):
    """Encodes pictures only once it is let go; knows that of `KNOWN`."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab)
        self.picture_refusal = ""
        self.is_held, self.go = threading.Event(), threading.Event()

    def picture_tokens(self, *asked: Any) -> PictureTokens:
        found = super().picture_tokens(*asked)
        is_known = KNOWN in str(asked[0])
        return PictureTokens(found, [FakePicture(is_encoded=is_known)])

    def encode(self, tokens: PictureTokens) -> None:
        if not tokens.is_encoded:
            self.is_held.set()
            assert self.go.wait(PATIENCE_S)


KNOWN = base64.b64encode(b"known").decode()


def shown(data: bytes) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": data}, {"type": "text", "text": "Hm?"}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("other", "fits"),
    [("a", True), ("a" * 40_000, False), (shown(b"known"), True), (shown(b"x" * 500), False)],
)
def test_picture_that_is_encoded_holds_up_no_other_request(other: Any, *, fits: bool) -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = SlowEyes(backend.vocab.n_vocab)
    with Engine(backend) as engine:
        seen = engine.run([shown(b"new")], options=SAME)
        try:
            assert vocab.is_held.wait(PATIENCE_S)
            [result] = engine.run([other], options=SAME).results(return_errors=True)
        finally:
            vocab.go.set()
        assert isinstance(result.error, PromptTooLongError) is not fits
        assert (result.error is None) is fits
        assert seen.results()[0].error is None


def test_cancelled_request_is_not_encoded_when_its_turn_comes() -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = SlowEyes(backend.vocab.n_vocab)
    with Engine(backend) as engine:
        first = engine.run([shown(b"new")], options=SAME)
        assert vocab.is_held.wait(PATIENCE_S)
        vocab.is_held.clear()
        left = engine.run([BatchPrompt(shown(b"newer"), id="left")], options=SAME)
        assert engine.cancel("left")
        assert left.results(return_errors=True)[0].finish_reason == "cancelled"
        vocab.go.set()
        assert first.results()[0].error is None
        assert not vocab.is_held.is_set()


def test_tokens_are_counted_without_encoding() -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = SlowEyes(backend.vocab.n_vocab)
    with Engine(backend) as engine:
        assert engine.count_tokens(shown(b"new")) == len("user:Hm?") + 3


def test_pictures_are_shown_as_marks_in_text_and_are_not_scored() -> None:
    asked = chat(random.Random(1))
    with engine_of(1) as engine:
        text = engine.render(asked)
        assert "<picture>" in text
        assert "base64" not in text
        with pytest.raises(ConfigError, match="pictures or sound cannot be scored"):
            engine.score_texts([asked])
        with pytest.raises(ConfigError, match="pictures or sound cannot be scored"):
            engine.score([(asked, "yes")])
