"""Pictures in the batch, on a fake backend: company, small memory, retained cells, and drafts change no answer."""

from __future__ import annotations

import base64
import itertools
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch import Engine
from cbatch.backend.fake import FakeBackend, FakeVocab, Faults
from cbatch.backend.fake.fake_backend import Bits
from cbatch.backend.fake.fake_tokens import FakePicture
from cbatch.core.plan import KvCapabilities, Slot, StepPlan
from cbatch.core.span import ANYWHERE, PromptCuts, Span
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import ConfigError, PromptTooLongError
from cbatch.messages import BatchPrompt
from cbatch.support import moments
from cbatch.support.moments import TakesLongError, is_brief
from cbatch.support.picture_tokens import (
    FIRST_PICTURE,
    PictureTokens,
    edges_of,
    ids_of,
    n_rows_at,
    place_of,
    without_pictures,
)
from tests.profiles import examples
from tests.runtime.backends import PATIENCE_S, in_thread, parts_of

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


def engine_of(
    n_slots: int,
    *,
    memory: KvCapabilities | None = None,
    is_whole: bool = False,
    n_batch: int = 64,
    faults: Faults | None = None,
    threaded: bool = True,
    cuts: PromptCuts = ANYWHERE,
    **schedule: Any,
) -> Engine:
    memory = memory or KvCapabilities("partitioned", n_slots * 400)
    memory = replace(memory, has_whole_pictures=is_whole)
    backend = FakeBackend(n_slots, 400, n_batch, memory=memory, faults=faults or Faults())
    backend.cuts = cuts
    if cuts:  # rows of one token are padded to one number; chunks of other lengths have other bits
        n_most = 31 if cuts.is_every else cuts.least - cuts.ends_in_row
        backend.bits = Bits(lambda n_rows: min(n_rows, n_most), lambda n_rows: 1)
    backend.vocab.picture_refusal = ""
    return Engine(backend, schedule=ScheduleOptions(**schedule), threaded=threaded)


def failing(draw: random.Random) -> Faults:
    """One step fails."""
    steps, i_failing, code = itertools.count(), draw.randrange(20), draw.choice((1, 2, -3))
    return Faults(code=lambda _: code if next(steps) == i_failing else 0)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_slots=st.integers(1, 5),
    n_budget=st.sampled_from([None, 4, 32]),
    n_chunk=st.sampled_from([None, 8]),
    n_batch=st.sampled_from([8, 64]),
    memory=st.sampled_from(MEMORIES),
    is_whole=st.booleans(),
    fails=st.booleans(),
)
def test_pictures_in_company_have_the_answers_they_have_alone(
    seed: int,
    n_slots: int,
    n_budget: int | None,
    n_chunk: int | None,
    n_batch: int,
    memory: KvCapabilities | None,
    is_whole: bool,
    fails: bool,
) -> None:
    draw = random.Random(seed)
    asked = [chat(draw) for _ in range(8)]
    with engine_of(1, is_whole=is_whole) as engine:
        alone = [engine.run([each], options=SAME).results()[0] for each in asked]
    given: dict[str, Any] = {"memory": memory, "is_whole": is_whole, "n_batch": n_batch}
    given |= {"prefill_budget": n_budget, "prefill_chunk": n_chunk}
    with engine_of(n_slots, faults=failing(draw) if fails else None, **given) as engine:
        together = engine.run(asked, options=SAME).results()
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.usage.prompt_tokens for r in together] == [r.usage.prompt_tokens for r in alone]


CUTS = (PromptCuts.every(16), PromptCuts(16, 48, least=7), PromptCuts(16, 64, 9, ends_in_row=True))


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_slots=st.integers(1, 5),
    n_budget=st.sampled_from([None, 4, 32]),
    memory=st.sampled_from([m for m in MEMORIES if m is None or m.kind != "unified"]),
    cuts=st.sampled_from(CUTS),
    is_whole=st.booleans(),
    fails=st.booleans(),
)
def test_pictures_in_company_have_the_bits_they_have_alone(
    seed: int,
    n_slots: int,
    n_budget: int | None,
    memory: KvCapabilities | None,
    cuts: PromptCuts,
    is_whole: bool,
    fails: bool,
) -> None:
    draw = random.Random(seed)
    asked = [chat(draw) for _ in range(8)]
    given: dict[str, Any] = {"is_whole": is_whole, "cuts": cuts}
    with engine_of(1, share_prefixes=False, **given) as engine:
        alone = [engine.run([each], options=SAME).results()[0] for each in asked]
    given |= {"memory": memory, "prefill_budget": n_budget}
    with engine_of(n_slots, faults=failing(draw) if fails else None, **given) as engine:
        together = engine.run(asked, options=SAME).results()
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("is_whole", [False, True])
def test_prompt_is_cut_where_its_pictures_begin_and_end(cuts: PromptCuts, is_whole: bool) -> None:
    cuts, edges = replace(cuts, has_whole_pictures=is_whole), (20, 59, 59, 60)
    found, start = [], 0
    while start < 71:
        n = cuts.n_chunk(start, 71, 64, edges)
        assert all(cuts.n_chunk(start, 71, room, edges) == 0 for room in range(1, min(n, 7)))
        found.append((start, n))
        start += n
    pictures = [(20, 39)] if is_whole else [(20, 16), (36, 16), (52, 7)]
    texts = [(0, 16), (16, 4)] if cuts.is_every else [(0, 20)]
    last = [(60, 4), (64, 7)]
    assert found == [*texts, *pictures, (59, 1), *last]
    first = 16 if cuts.is_every else 0
    assert [cuts.n_whole(n, 71, edges) for n in (19, 20, 58, 59, 60)] == [first] * 3 + [59, 60]
    assert cuts.n_whole(70, 71, edges) == 64 if cuts.least < 8 else 60
    assert [cuts.n_whole(n, 71, (32, 40)) for n in (31, 32, 39)] == [16, 32, 32]


def parts_of_steps(backend: FakeBackend) -> list[list[tuple[int, int]]]:
    """Of each step, the tokens of its chunks and the rows among them."""
    return [
        [(len(c.inputs), sum(t >= FIRST_PICTURE for t in c.inputs)) for c in plan.spans]
        for plan in backend.plans
        if plan.spans
    ]


@pytest.mark.parametrize(("is_whole", "rows"), [(False, [3, 8, 8, 8, 8, 4]), (True, [39])])
def test_picture_above_the_budget_is_cut_or_computed_as_a_whole(
    is_whole: bool, rows: list[int]
) -> None:
    picture = {"type": "image", "image": bytes(39)}
    asked = [{"role": "user", "content": [picture, {"type": "text", "text": "ab" * 40}]}]
    with engine_of(2, is_whole=is_whole, n_batch=32, prefill_chunk=8) as engine:
        engine.run([asked], options=SAME).results()
        steps = parts_of_steps(parts_of(engine).backend)
    assert [n for [(_, n)] in steps if n] == rows
    assert max(n for [(n, n_rows)] in steps if not n_rows) == 8


def test_picture_larger_than_a_batch_is_alone_in_its_step() -> None:
    picture = {"type": "image", "image": bytes(39)}
    seen = {"role": "user", "content": [picture, {"type": "text", "text": "Hm?"}]}
    asked: list[Any] = ["abc" * 20, [seen], "def"]
    with engine_of(3, is_whole=True, n_batch=16, threaded=False) as engine:  # all begin at once
        results = engine.run(asked, options=SAME).results()
        steps = parts_of_steps(parts_of(engine).backend)
    assert [r.error for r in results] == [None] * 3
    assert [step for step in steps if any(n_rows for _, n_rows in step)] == [[(39, 39)]]
    assert any(len(step) > 1 for step in steps)


def test_rows_that_decode_wait_for_one_large_picture_at_a_time() -> None:
    picture = {"type": "image", "image": bytes(39)}
    seen = [{"role": "user", "content": [picture] * 4}]
    with engine_of(2, is_whole=True, n_batch=16, threaded=False) as engine:
        chat = engine.submit("abc", options={**SAME, "max_tokens": 380})
        engine.step()
        engine.submit(seen, options=SAME).results()
        chat.results()
        steps = parts_of_steps(parts_of(engine).backend)
    pictures = [any(n_rows for _, n_rows in step) for step in steps]
    assert sum(pictures) == 4
    assert not any(a and b for a, b in itertools.pairwise(pictures))


def test_beginning_that_ends_in_a_picture_is_shared_up_to_the_picture() -> None:
    tokens = [1, 2, *ids_of(3, 4), *ids_of(3, 4), 5]
    edges = edges_of(tokens)
    assert edges == (2, 6, 6, 10)
    shared = [ANYWHERE.n_whole(n, 11, edges) for n in range(11)]
    assert shared == [0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10]
    assert [n_rows_at(edges, i) for i in (0, 2, 3, 6, 10, 11)] == [0, 4, 3, 4, 0, 0]


def test_fake_row_depends_on_all_rows_computed_with_it() -> None:
    memory = KvCapabilities("partitioned", 64, has_whole_pictures=True)
    whole, cut = (FakeBackend(1, 64, memory=memory) for _ in range(2))
    ids = [*ids_of(3, 6)]
    whole.run(StepPlan((Span(Slot(0), 0, ids, has_output=False),)))
    for start in (0, 4):
        cut.run(StepPlan((Span(Slot(0), start, ids[start : start + 4], has_output=False),)))
    assert len(whole.cells[0]) == len(cut.cells[0]) == 6
    assert not {*whole.cells[0]} & {*cut.cells[0]}


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
    """Encodes pictures only once it is let go; knows that of `KNOWN`, and decodes that of `HUGE` slowly."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab)
        self.picture_refusal = ""
        self.is_held, self.go = threading.Event(), threading.Event()

    def picture_tokens(self, *asked: Any) -> PictureTokens:
        found = super().picture_tokens(*asked)
        said = str(asked[0])
        return PictureTokens(found, [FakePicture(KNOWN in said, is_slow=HUGE in said)])

    def encode(self, tokens: PictureTokens) -> None:
        if not tokens.is_encoded:
            self.is_held.set()
            assert self.go.wait(PATIENCE_S)


class OneSlowEye(SlowEyes):
    """Encodes those pictures at once that are decoded fast."""

    def encode(self, tokens: PictureTokens) -> None:
        if tokens.is_slow:
            super().encode(tokens)


KNOWN, HUGE = (base64.b64encode(data).decode() for data in (b"known", b"huge!!"))


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


def test_picture_that_is_decoded_slowly_holds_up_no_other_picture() -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = OneSlowEye(backend.vocab.n_vocab)
    with Engine(backend) as engine:
        slow = [engine.run([shown(b"huge!!")], options=SAME) for _ in range(2)]
        try:
            assert vocab.is_held.wait(PATIENCE_S)
            [result] = engine.run([shown(b"new")], options=SAME).results()
        finally:
            vocab.go.set()
        assert result.error is None
        assert [each.results()[0].error for each in slow] == [None] * 2


class SlowChats(SlowEyes):
    """Renders chats that say so only once their template is let go."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab)
        self.is_rendering, self.is_let_go = threading.Event(), threading.Event()

    def render_text(self, messages: Any, *more: Any) -> str:
        if SLOW in str(messages):
            if is_brief():
                raise TakesLongError
            self.is_rendering.set()
            assert self.is_let_go.wait(PATIENCE_S)
        return super().render_text(messages, *more)


SLOW = "slow template"


@pytest.mark.parametrize("data", [b"new", b"huge!!"], ids=["encoded", "decoded"])
def test_chat_whose_template_takes_long_waits_for_no_picture(data: bytes) -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = SlowChats(backend.vocab.n_vocab)
    vocab.is_let_go.set()
    with Engine(backend) as engine:
        seen = engine.run([shown(data)], options=SAME)
        try:
            assert vocab.is_held.wait(PATIENCE_S)
            slow = engine.run([[{"role": "user", "content": SLOW}]], options=SAME)
            [result] = slow.results(timeout=PATIENCE_S)
        finally:
            vocab.go.set()
        assert result.error is None
        assert seen.results()[0].error is None


@pytest.mark.parametrize("text", ["", "a" * 40_000], ids=["picture", "long"])
def test_slow_template_of_any_chat_holds_up_neither_picture_nor_long_text(text: str) -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = SlowChats(backend.vocab.n_vocab)
    content: list[dict[str, Any]] = [{"type": "text", "text": SLOW + text}]
    if not text:
        content.insert(0, {"type": "image", "image": b"known"})
    with Engine(backend) as engine:
        slow = engine.run([[{"role": "user", "content": content}]] * 2, options=SAME)
        try:
            assert vocab.is_rendering.wait(PATIENCE_S)
            others: list[Any] = [shown(b"known"), "a" * 40_000]
            asked = engine.run(others, options=SAME)
            seen, long = asked.results(return_errors=True, timeout=PATIENCE_S)
        finally:
            vocab.is_let_go.set()
        assert seen.error is None
        assert isinstance(long.error, PromptTooLongError)
        results = slow.results(return_errors=True)
        assert all((result.error is None) is not bool(text) for result in results)


class SlowEars(SlowEyes):
    """Counts the rows of long sounds only once it is let go."""

    def picture_tokens(self, *asked: Any) -> PictureTokens:
        if "input_audio" in str(asked[0]):
            self.is_held.set()
            assert self.go.wait(PATIENCE_S)
        return super().picture_tokens(*asked)


# as FLAC has it: 48,000 Hz, two channels, 2^23 samples of each
HOURS = b"fLaC" + bytes(14) + (48_000 << 44 | 1 << 41 | 15 << 36 | 2**23).to_bytes(8, "big")


@pytest.mark.parametrize(("audio", "n_long"), [(bytes(100), 100), (HOURS, 2**21)])
def test_long_sound_that_is_counted_holds_up_neither_text_nor_picture(
    audio: bytes, n_long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.runtime.prompts._N_LONG_SOUND", n_long)
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = SlowEars(backend.vocab.n_vocab)
    vocab.sound_refusal = ""
    content = [{"type": "audio", "audio": audio}, {"type": "text", "text": "Hm?"}]
    with Engine(backend) as engine:
        heard = engine.run([[{"role": "user", "content": content}]], options=SAME)
        try:
            assert vocab.is_held.wait(PATIENCE_S)
            others: list[Any] = [shown(b"known"), "a" * 40_000]
            picture, text = engine.run(others, options=SAME).results(return_errors=True)
        finally:
            vocab.go.set()
        assert picture.error is None
        assert isinstance(text.error, PromptTooLongError)
        assert heard.results()[0].error is None


class ManyPieces(SlowEyes):
    """Counts or encodes long sounds in pieces: those whose text says so without end, before it is let go."""

    def __init__(self, n_vocab: int, *, are_counted: bool = False) -> None:
        super().__init__(n_vocab)
        self.sound_refusal, self.are_counted = "", are_counted
        self.begun: list[str] = []

    def picture_tokens(self, *asked: Any) -> PictureTokens:
        text = str(asked[0][0]["content"][-1]["text"])
        if self.are_counted:
            self._do(text)
        tokens = FakeVocab.picture_tokens(self, *asked)
        return PictureTokens(tokens, [FakePicture(is_encoded=False, is_slow=True, key=text)])

    def encode(self, tokens: PictureTokens) -> None:
        if not self.are_counted:
            self._do(tokens.pictures[0].key)

    def _do(self, text: str) -> None:
        self.begun.append(text)
        moments.pause()
        while text == "endless" and not self.go.wait(0.001):
            self.is_held.set()
            moments.pause()


def heard(text: str, audio: bytes = HOURS) -> list[dict[str, Any]]:
    parts = [{"type": "audio", "audio": audio}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("are_counted", [True, False], ids=["counted", "encoded"])
def test_sound_that_nobody_waits_for_is_broken_off_between_pieces(*, are_counted: bool) -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = ManyPieces(backend.vocab.n_vocab, are_counted=are_counted)
    engine = Engine(backend)
    left = engine.run([heard("endless")], options=SAME)
    assert vocab.is_held.wait(PATIENCE_S)
    assert engine.cancel(left.ids[0])
    [result] = engine.run([heard("next")], options=SAME).results(timeout=PATIENCE_S)
    assert result.error is None
    vocab.is_held.clear()
    engine.run([heard("endless")], options=SAME)
    assert vocab.is_held.wait(PATIENCE_S)
    in_thread(engine.close)()
    assert vocab.begun == ["endless", "next", "endless"]


@pytest.mark.parametrize("are_counted", [True, False], ids=["counted", "encoded"])
def test_sound_at_most_half_as_long_goes_first_between_pieces(*, are_counted: bool) -> None:
    backend = FakeBackend(2, 400)
    backend.vocab = vocab = ManyPieces(backend.vocab.n_vocab, are_counted=are_counted)
    with Engine(backend) as engine:
        long = engine.run([heard("endless"), heard("as long")], options=SAME)
        try:
            assert vocab.is_held.wait(PATIENCE_S)
            for text in ("a", "b"):
                asked = heard(text, HOURS[:-4] + (2**22).to_bytes(4, "big"))
                [result] = engine.run([asked], options=SAME).results(timeout=PATIENCE_S)
                assert result.error is None
            assert vocab.begun == ["endless", "a", "b"]
        finally:
            vocab.go.set()
        assert [r.error for r in long.results()] == [None] * 2


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
