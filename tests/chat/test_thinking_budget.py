"""Grammars that limit thinking, followed token by token: any answer is taken, and a long thinking is closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cbatch.chat.chat_format import ChatFormat
from cbatch.chat.formats import answer_format
from cbatch.chat.tool_grammar import budget_grammar, call_grammar
from cbatch.errors import UnsupportedOptionError
from cbatch.messages import BatchPrompt
from cbatch.options import Grammar, RunOptions
from tests.chat.test_tool_calls import CONTROLS, TEMPLATE, Speaker
from tests.chat.test_tool_grammar import CALL, HERMES, MARKS, WEATHERS

OPEN, CLOSE = MARKS["<think>"], MARKS["</think>"]
TOKENIZER = LLTokenizer("byte")
N = 3


def matcher_of(grammar: Grammar) -> LLMatcher:
    found = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def limit(thinking: str, n_tokens: int = N) -> LLMatcher:
    marks = ("<think>", "</think>")
    grammar = budget_grammar(marks, n_tokens, thinking=thinking, named_token=MARKS.get)  # type: ignore[arg-type]
    assert grammar.kind == "thinking_budget"
    return matcher_of(grammar)


def said(matcher: LLMatcher, wanted: list[int]) -> list[int]:
    """What comes of an answer: tokens that must follow come in the place of what is wanted there."""
    output: list[int] = []
    while len(output) < len(wanted):
        forced = matcher.compute_ff_tokens()
        output += forced or [wanted[len(output)]]
        assert matcher.consume_tokens(forced or output[-1:]), matcher.get_error()
    return output


def expected(wanted: list[int], *, is_open: bool, n_tokens: int = N) -> list[int]:
    """What must come: the token that would be one too many is the closing mark."""
    output, n_thought, is_over = list[int](), 0 if is_open else None, False
    for token in wanted:
        if n_thought is None and not is_over:
            is_over = token != OPEN and len(output) == 2
            n_thought = 0 if token == OPEN else None
            output.append(token)
        elif is_over or n_thought is None:
            output.append(token)
        else:
            is_over = token == CLOSE or n_thought == n_tokens
            output.append(CLOSE if is_over else token)
            n_thought += 1
    return output


tokens = st.lists(
    st.sampled_from([OPEN, CLOSE, *b"abc\n"])
    | st.integers(1, TOKENIZER.vocab_size - 1).filter(lambda token: token != TOKENIZER.eos_token),
    max_size=20,
)


@given(wanted=tokens, is_open=st.booleans(), n_tokens=st.integers(0, 5))
def test_thinking_of_any_answer_is_closed_where_it_is_too_long(
    wanted: list[int], is_open: bool, n_tokens: int
) -> None:
    found = said(limit("must end" if is_open else "may", n_tokens), wanted)
    assert found[: len(wanted)] == expected(wanted, is_open=is_open, n_tokens=n_tokens)


def test_answer_may_end_without_thinking_and_behind_it() -> None:
    for taken in ([], [97], [97, 98, 99, 100], [OPEN, 97, CLOSE], [OPEN, CLOSE, 97]):
        matcher = limit("may")
        assert matcher.consume_tokens(taken)
        assert matcher.is_accepting()


@pytest.mark.parametrize("n_tokens", [0, 2, 30_000])
def test_demanded_call_has_limited_thinking_before_it(n_tokens: int) -> None:
    grammar = call_grammar(
        answer_format(HERMES),
        WEATHERS,
        thinking="must end",
        is_one=True,
        named_token=MARKS.get,
        n_thought=n_tokens,
    )
    matcher = matcher_of(grammar)
    thought = [97] * n_tokens
    assert said(matcher, thought) == thought
    assert matcher.compute_ff_tokens()[0] == CLOSE
    call = CALL.replace("<tool_call>", chr(3)).replace("</tool_call>", chr(4)).encode()
    assert matcher.consume_tokens([CLOSE, *call])
    assert matcher.is_accepting()


def test_marks_that_are_no_tokens_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="</think>") as caught:
        budget_grammar(("<think>", "</think>"), 9, thinking="may", named_token=lambda mark: None)
    assert caught.value.option == "thinking_budget"


def format_of(template: str = TEMPLATE, controls: dict[int, bytes] = CONTROLS) -> ChatFormat:
    vocab = Speaker([], template).vocab
    vocab.controls = controls
    return ChatFormat(vocab)


def test_grammar_is_made_where_there_may_be_thinking() -> None:
    chat = BatchPrompt([{"role": "user", "content": "Hi"}])
    limited, free = RunOptions(thinking_budget=5), RunOptions()
    format = format_of()
    assert format.limits_thinking
    assert format.grammar(chat, free) is None
    assert format.grammar(BatchPrompt(prompt="Hi"), limited) is None
    made = format.grammar(chat, limited)
    assert made is not None
    assert "{0,5}" in made.text
    assert format.grammar(chat, limited) is made
    assert "{0,6}" in str(format.grammar(chat, RunOptions(thinking_budget=6)))
    without = format_of("<tool_call>")
    assert not without.is_grammar_open(chat, limited)
    assert without.limits_thinking
    assert without.grammar(chat, limited) is None


def test_end_of_the_prompts_text_decides_the_grammar() -> None:
    format, limited = format_of(), RunOptions(thinking_budget=5)
    asked = {"role": "user", "content": "Hi"}
    chat = BatchPrompt([asked])
    assert format.is_grammar_open(chat, limited)
    assert not format.is_grammar_open(chat, RunOptions())
    assert not format.is_grammar_open(BatchPrompt(prompt="Hi"), limited)
    assert format.grammar(chat, limited, "Hi<think></think>\n") is None
    begun = format.grammar(chat, limited, "Hi<think>\n")
    assert begun is not format.grammar(chat, limited, "Hi")
    opened = BatchPrompt([asked, {"role": "assistant", "content": "<think>"}])
    assert not format.is_grammar_open(opened, limited)
    assert format.grammar(opened, limited) is begun


@pytest.mark.parametrize(
    ("template", "controls", "words"),
    [(TEMPLATE, {}, "are not one token"), ("<|channel|><|message|>", CONTROLS, "gpt-oss")],
)
def test_thinking_that_cannot_be_limited_is_refused(
    template: str, controls: dict[int, bytes], words: str
) -> None:
    format = format_of(template, controls)
    assert not format.limits_thinking
    chat = BatchPrompt([{"role": "user", "content": "Hi"}])
    assert format.grammar(chat, RunOptions()) is None
    with pytest.raises(UnsupportedOptionError, match=words):
        format.grammar(chat, RunOptions(thinking_budget=5))
