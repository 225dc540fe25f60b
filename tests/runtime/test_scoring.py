"""`Engine.score` and `score_texts`: continuations of contexts, each context computed once."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchPrompt
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.errors import CBatchError, ConfigError, PromptError, PromptTooLongError
from tests.kinds import each_kind, engine_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.engine import Engine
    from cbatch.response import Score

pytestmark = each_kind


@pytest.fixture
def engine() -> Iterator[Engine]:
    memory = KvCapabilities("partitioned", 4 * 64, can_copy=True)
    with engine_on(FakeBackend(4, 64, 16, memory=memory)) as made:
        yield made


def whole(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """The log-probabilities of a prompt's tokens that is scored from its beginning."""
    asked = {"max_tokens": 0, "prompt_logprobs": 1}
    result = engine.run([BatchPrompt(tokens=tokens)], options=asked).results()[0]
    return [token.logprob for token in result.prompt_logprobs or () if token]


def told(score: Score) -> list[float]:
    return [token.logprob for token in score.tokens]


def test_score_is_that_of_the_whole_prompt_behind_its_context(engine: Engine) -> None:
    pairs: list[Any] = [("The sky is", [" blue", " green and red"]), ("Two", " plus two")]
    (blue, green), (two,) = engine.score(pairs).results()
    for context, more, score in (
        ("The sky is", " blue", blue),
        ("The sky is", " green and red", green),
        ("Two", " plus two", two),
    ):
        n = len(engine.tokenize(context))
        tokens = engine.tokenize(context + more)
        assert [t.token_id for t in score.tokens] == tokens[n:]
        assert told(score) == whole(engine, tokens)[n - 1 :]
        assert score.logprob == pytest.approx(math.fsum(told(score)))
        assert score.error is None


def test_greedy_says_whether_each_token_is_the_likeliest(engine: Engine) -> None:
    [[score]] = engine.score([("ab", "cdef")]).results()
    assert score.is_greedy == all(t.top[0].token_id == t.token_id for t in score.tokens)


def test_chat_is_followed_by_the_beginning_of_its_answer(engine: Engine) -> None:
    chat = [{"role": "user", "content": "Say red."}]
    [[red]] = engine.score([(chat, "red")]).results()
    tokens = [*engine.tokenize(chat), *engine.tokenize("red")]
    assert told(red) == whole(engine, tokens)[-len(red.tokens) :]
    assert b"".join(token.data for token in red.tokens) == b"red"


TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize("options", [{"tools": TOOLS}, {"chat_template_kwargs": {"x": 1}}], ids=str)
def test_chat_is_scored_as_its_template_has_it(options: Any) -> None:
    chat = [{"role": "user", "content": "Say red."}]
    with engine_on(FakeBackend(4, 256, 16)) as engine:
        text = engine.render(chat, options=options)
        assert text != engine.render(chat)
        asked = {**options, "tool_choice": "required"} if "tools" in options else options
        [[by_run]] = engine.score([(chat, "red")], options=options).results()
        [[by_own]] = engine.score([(BatchPrompt(chat, options=options), "red")]).results()
        [[by_text]] = engine.score([(text, "red")]).results()
        assert told(by_run) == told(by_own) == told(by_text)
        [by_run] = engine.score_texts([chat], options=asked).results()
        [by_text] = engine.score_texts([engine.render(chat, options=asked)]).results()
        assert told(by_run) == told(by_text)


def test_context_has_options_of_its_own(engine: Engine) -> None:
    asked = {"adapter": "none"}
    pairs: list[Any] = [(BatchPrompt(prompt="a", options=asked), "b"), ("a", "b")]
    [[own], [other]] = engine.score(pairs).results(return_errors=True)
    texts: list[Any] = [BatchPrompt(prompt="ab", options=asked), "ab"]
    [own_text, other_text] = engine.score_texts(texts).results(return_errors=True)
    assert [other.error, other_text.error] == [None, None]
    for score in (own, own_text):
        assert "adapter 'none' is not loaded" in str(score.error)


def test_context_of_many_continuations_is_computed_once(engine: Engine) -> None:
    context = [3 + i % 50 for i in range(50)]
    ends = [[i, i + 1] for i in range(1, 9)]
    engine.score([(BatchPrompt(tokens=context), ends)]).results()
    n_engines = engine.parallel // 4
    # the last token of the context is computed with each, for what it says of the next
    assert engine.stats().n_prompt_tokens <= 50 * n_engines + 8 * 3


def test_failed_item_costs_itself(engine: Engine) -> None:
    pairs: list[Any] = [("a", ["b", "c" * 99]), (BatchPrompt(tokens=[1, 2]), "text"), ("d", "e")]
    (good, long), (mixed,), (last,) = engine.score(pairs).results(return_errors=True)
    assert isinstance(long.error, PromptTooLongError)
    assert isinstance(mixed.error, PromptError)
    assert math.isnan(long.logprob)
    assert not long.is_greedy
    assert good.error is None
    assert last.error is None
    with pytest.raises(CBatchError):
        engine.score(pairs).results()


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "nothing to score"),
        (["text"], "takes pairs"),
        ([("a",)], "takes pairs"),
        ([("a", [])], "continuations must be"),
        ([("a", 3)], "continuations must be"),
        ([("a", ["b", ""])], "must not be empty"),
        ([("a", [[]])], "must not be empty"),
        ([("a", [{"b": 1}])], "list of token ids"),
        ([(3, "b")], "numbers"),
    ],
)
def test_malformed_pair_is_refused_before_anything_is_queued(
    engine: Engine, pairs: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine.score(pairs)
    assert engine.stats().n_prompt_tokens == 0


def test_first_token_has_no_score_without_one_before_it(engine: Engine) -> None:
    with pytest.raises(PromptError, match="no log-probability"):
        engine.score([("", "word")]).results()


def test_text_longer_than_a_window_is_scored_in_windows(engine: Engine) -> None:
    text = "".join(chr(97 + i % 26) for i in range(150))
    tokens = engine.tokenize(text)
    short, long = engine.score_texts([text[:20], text]).results()
    assert told(short) == whole(engine, tokens[:20])
    assert [t.token_id for t in long.tokens] == tokens[1:]
    wanted = [score for i in (0, 63, 126) for score in whole(engine, tokens[i : i + 64])]
    assert told(long) == wanted


def test_scores_are_awaited(engine: Engine) -> None:
    async def scored() -> tuple[list[list[Score]], list[Score]]:
        pairs = engine.score([("a", ["b", "c"])])
        return await pairs, await engine.score_texts(["some text"]).gather()

    [pair], [text] = asyncio.run(scored())
    assert [len(score.tokens) for score in pair] == [1, 1]
    assert text.logprob < 0
    assert "tokens" in repr(text)


def test_tokens_become_text_and_text_tokens(engine: Engine) -> None:
    tokens = engine.tokenize("größer", add_special=False)
    assert engine.detokenize(tokens) == "größer"
    assert engine.detokenize(tokens[:3]) == "gr\N{REPLACEMENT CHARACTER}"
    with pytest.raises(ConfigError, match="add_special"):
        engine.tokenize("a", add_special="no")  # type: ignore[arg-type]
