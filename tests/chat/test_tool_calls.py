"""Tools, thinking and special tokens from `run` to the result, on a backend that says what a test wants."""

from __future__ import annotations

import io
import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch import BatchPrompt, ConfigError, Engine, GrammarError, UnsupportedOptionError
from cbatch.backend.fake import END_TOKEN, FakeBackend, FakeGrammars
from cbatch.cli.demo import write_result
from tests import call_runs
from tests.face.test_tools import NAMED, TIME, USER, WEATHER
from tests.kinds import Reason, each_kind, engine_on, thread_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.core.plan import Binding
    from cbatch.options import Grammar
    from cbatch.runtime.batch_response import BatchResponse

pytestmark = each_kind

THINK, THINK_END, CALL, CALL_END = 300, 301, 302, 303
CONTROLS = {
    END_TOKEN: b"<end>",
    THINK: b"<think>",
    THINK_END: b"</think>",
    CALL: b"<tool_call>",
    CALL_END: b"</tool_call>",
}
TEMPLATE = "{% if enable_thinking %}<think></think>{% endif %}<tool_call>"
BODY = b'{"name": "get_time", "arguments": {"zone": "CET"}}'
SAID = [THINK, *"I häve to ".encode(), THINK_END, *b" Wait. ", CALL, *BODY, CALL_END, END_TOKEN]
PLAIN = 'I häve to  Wait. {"name": "get_time", "arguments": {"zone": "CET"}}'


class Speaker(FakeBackend):
    """Answers every prompt with the same tokens."""

    def __init__(self, said: list[int], template: str = TEMPLATE, **sizes: int) -> None:
        super().__init__(**{"n_slots": 2, "n_window": 512, **sizes})  # type: ignore[arg-type]
        self.said = said
        self.vocab.template = template
        self.vocab.controls = CONTROLS

    def next_token(self, state: int, history: Sequence[int], binding: Binding, n_cells: int) -> int:
        self.interrupt()  # one step a run
        i = n_cells - binding.output_origin
        return self.said[i] if i < len(self.said) else END_TOKEN


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(engine_on(Speaker(SAID))) as engine:
        yield engine


def ask(engine: Engine, **options: Any) -> BatchResponse:
    return engine.run([[USER]], options=options)


def streamed(response: BatchResponse) -> tuple[str, str | None]:
    chunks = list(response)
    return "".join(c.text for c in chunks), chunks[-1].finish_reason


def test_call_is_in_the_result_and_out_of_its_text(engine: Engine) -> None:
    result = ask(engine, tools=[TIME]).result()
    assert (result.text, result.reasoning) == ("Wait.", "I häve to")
    assert result.finish_reason == "tool_calls"
    [call] = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_time", {"zone": "CET"})
    assert call.as_dict() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "get_time", "arguments": call.arguments},
    }
    assert result.token_ids == tuple(SAID[:-1])
    assert engine.stats().n_finished == {"tool_calls": 1}


def test_tools_and_variables_reach_the_prompt(engine: Engine) -> None:
    plain = ask(engine).result().usage.prompt_tokens
    with_tools = ask(engine, tools=[TIME], chat_template_kwargs={"enable_thinking": True}).result()
    variables = {"enable_thinking": True, "tools": [TIME]}
    assert with_tools.usage.prompt_tokens == plain + len(json.dumps(variables)) + 1


def test_tools_reach_the_prompt_in_a_batch_as_alone(engine: Engine) -> None:
    prompts = [
        BatchPrompt([USER], options={"tools": tools}) for tools in ([TIME], [], [WEATHER, TIME])
    ]
    together = [r.usage.prompt_tokens for r in engine.run(prompts).results()]
    assert together == [engine.run(p).result().usage.prompt_tokens for p in prompts]
    assert len(set(together)) == 3


def test_written_line_has_the_calls_and_what_was_thought(engine: Engine) -> None:
    file = io.BytesIO()
    write_result(file, ask(engine, tools=[TIME]).result())
    write_result(file, ask(engine, reasoning_format="none").result())
    taken_apart, whole = map(json.loads, file.getvalue().splitlines())
    assert taken_apart["reasoning"] == "I häve to"
    assert taken_apart["tool_calls"][0]["function"]["name"] == "get_time"
    assert not {"reasoning", "tool_calls"} & whole.keys()


def test_call_goes_back_as_a_message(engine: Engine) -> None:
    [call] = ask(engine, tools=[TIME]).result().tool_calls
    asks: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call.as_dict()]}
    answers = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    assert engine.run([[USER, asks, answers]], options={"tools": [TIME]}).result().tool_calls


def test_ids_of_calls_differ_between_requests(engine: Engine) -> None:
    results = engine.run([[USER]] * 5, options={"tools": [TIME]}).results()
    assert len({r.tool_calls[0].id for r in results}) == 5


def test_chunks_are_the_text_as_it_comes(engine: Engine) -> None:
    text, reason = streamed(ask(engine, tools=[TIME]))
    assert (text, reason) == (PLAIN, "tool_calls")


@pytest.mark.parametrize("cap", [*range(1, len(SAID) + 1, 3), len(SAID)])
@pytest.mark.parametrize(
    "options",
    [
        {"tools": [TIME]},
        {},
        {"reasoning_format": "none", "tools": [TIME]},
        {"tools": [TIME], "stop": ["Wait", "get_"], "include_stop": True},
        {"tools": [TIME], "n": 2},
        {"tools": [TIME], "best_of": 2},
        {"tools": [TIME], "skip_special_tokens": False},
    ],
)
def test_parts_of_chunks_joined_are_those_of_the_result(
    engine: Engine, options: dict[str, Any], cap: int
) -> None:
    response = ask(engine, max_tokens=cap, **options)
    chunks = list(response)
    result = response.result()
    for i, choice in enumerate(result.choices or (result,)):
        own = [chunk for chunk in chunks if chunk.index == i]
        assert "".join(chunk.content for chunk in own) == choice.text
        assert "".join(chunk.reasoning for chunk in own) == choice.reasoning


@thread_only(Reason.AT_ONCE)
def test_parts_come_before_the_end(engine: Engine) -> None:
    chunks = list(ask(engine, tools=[TIME]))
    assert [c.reasoning for c in chunks if c.reasoning][:6] == ["I", " h", "ä", "v", "e", " t"]
    assert [c.content for c in chunks if c.content] == ["W", "a", "i", "t", "."]
    assert chunks[-1].content == chunks[-1].reasoning == ""


@thread_only(Reason.AT_ONCE)
def test_extended_answer_begins_with_the_parts_it_had(engine: Engine) -> None:
    cut = ask(engine, tools=[TIME], max_tokens=len(SAID) - 60).result()
    response = engine.extend(cut, 80)
    first, *others = list(response)
    assert (first.reasoning, first.content) == (cut.reasoning, cut.text)
    result = response.result()
    assert first.content + "".join(chunk.content for chunk in others) == result.text
    assert not any(chunk.reasoning for chunk in others)


def test_chunks_of_the_best_answer_are_whole_too(engine: Engine) -> None:
    text, reason = streamed(ask(engine, tools=[TIME], best_of=2))
    assert (text, reason) == (PLAIN, "tool_calls")


@pytest.mark.parametrize("tools", [None, [], [TIME]])
def test_without_tools_a_call_is_text(engine: Engine, tools: Any) -> None:
    result = ask(engine, tools=tools, tool_choice="none" if tools else None).result()
    assert (result.text, result.reasoning) == (
        'Wait. {"name": "get_time", "arguments": {"zone": "CET"}}',
        "I häve to",
    )
    assert (result.tool_calls, result.finish_reason) == ((), "stop")


def test_where_nothing_is_taken_apart_chunks_are_the_text(engine: Engine) -> None:
    response = ask(engine, reasoning_format="none")
    text, reason = streamed(response)
    result = response.result()
    assert (text, reason) == (result.text, result.finish_reason) == (PLAIN, "stop")
    assert result.reasoning == ""


@pytest.mark.parametrize("prompt", ["raw", BatchPrompt(tokens=[1, 2])])
def test_what_is_no_chat_is_not_taken_apart(engine: Engine, prompt: Any) -> None:
    result = engine.run([prompt]).result()
    assert (result.text, result.reasoning) == (PLAIN, "")


def test_special_tokens_are_shown_on_demand(engine: Engine) -> None:
    shown = b"".join(CONTROLS.get(t) or bytes([t]) for t in SAID[:-1]).decode()
    response = ask(engine, skip_special_tokens=False, reasoning_format="none")
    text, _ = streamed(response)
    assert text == response.result().text == shown
    ended = ask(
        engine, skip_special_tokens=False, reasoning_format="none", include_stop=True
    ).result()
    assert ended.text == f"{shown}<end>"
    assert ask(engine, skip_special_tokens=False, tools=[TIME]).result().text == "Wait."


def test_shown_special_token_is_found_as_a_stop_string(engine: Engine) -> None:
    result = ask(
        engine, skip_special_tokens=False, reasoning_format="none", stop="</think>"
    ).result()
    assert result.text == "<think>I häve to "
    hidden = ask(engine, reasoning_format="none", stop="</think>").result()
    assert hidden.text == PLAIN


def test_stop_string_before_a_call_ends_the_answer(engine: Engine) -> None:
    result = ask(engine, tools=[TIME], stop="Wait").result()
    assert (result.text, result.finish_reason, result.tool_calls) == ("", "stop", ())
    assert result.reasoning == "I häve to"


@pytest.mark.parametrize("n_tokens", range(1, len(SAID) + 1))
def test_answer_cut_anywhere_is_read_as_far_as_it_goes(engine: Engine, n_tokens: int) -> None:
    result = ask(engine, tools=[TIME], max_tokens=n_tokens).result()
    is_whole = n_tokens >= SAID.index(CALL_END)
    assert bool(result.tool_calls) == is_whole
    assert result.finish_reason == ("length" if n_tokens < len(SAID) else "tool_calls")
    assert not any("taken apart" in warning for warning in result.warnings)
    is_within = SAID.index(CALL) < n_tokens < SAID.index(CALL_END)
    assert (
        any("in the middle of a tool call" in warning for warning in result.warnings) == is_within
    )
    assert "Wait.".startswith(result.text.strip())
    chunks = list(ask(engine, tools=[TIME], max_tokens=n_tokens))
    assert "".join(chunk.content for chunk in chunks) == result.text
    if n_tokens <= SAID.index(THINK_END):
        assert result.text == ""


@pytest.mark.parametrize("cut", [{"stop": "argum"}, {"stop_token_ids": [ord("g")]}])
def test_call_that_a_stop_of_the_request_cuts_off_is_left_out(cut: dict[str, Any]) -> None:
    said = [*b"Wait. ", CALL, *BODY, CALL_END, END_TOKEN]
    with closing(engine_on(Speaker(said))) as engine:
        result = ask(engine, tools=[TIME], **cut).result()
        content = "".join(chunk.content for chunk in ask(engine, tools=[TIME], **cut))
    assert (result.text, result.tool_calls, result.finish_reason) == ("Wait.", (), "stop")
    assert content == "Wait."
    assert "in the middle of a tool call" in result.warnings[0]


def test_malformed_call_is_text_and_a_warning_but_no_error() -> None:
    said = [CALL, *b'{"name": "get_time", "argum', CALL_END, END_TOKEN]
    with closing(engine_on(Speaker(said))) as engine:
        result = ask(engine, tools=[TIME]).result()
    assert (result.text, result.error) == ('{"name": "get_time", "argum', None)
    assert "malformed tool call" in result.warnings[0]
    assert result.finish_reason == "stop"


def test_extended_answer_is_read_as_a_whole(engine: Engine) -> None:
    cut = ask(engine, tools=[TIME], max_tokens=len(SAID) - 20).result()
    assert cut.tool_calls == ()
    whole = engine.extend(cut, 40).result()
    assert [call.name for call in whole.tool_calls] == ["get_time"]
    assert whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
@pytest.mark.parametrize("prompt", ["raw", BatchPrompt(tokens=[1, 2])])
def test_prompt_without_messages_refuses_what_is_for_the_template(
    engine: Engine, name: str, prompt: Any
) -> None:
    value: Any = [TIME] if name == "tools" else {"enable_thinking": False}
    with pytest.raises(ConfigError, match=f"{name} is for the chat template"):
        engine.run([prompt], options={name: value})
    empty: Any = [] if name == "tools" else {}
    [result] = engine.run(
        [BatchPrompt(prompt="raw", options={name: empty})], options={name: value}
    ).results()
    assert result.text == PLAIN


def test_template_that_ignores_tools_is_refused(engine: Engine) -> None:
    speaker = Speaker(SAID)
    speaker.vocab.tool_refusal = "the template of this test does not show tools"
    with closing(engine_on(speaker)) as engine:
        with pytest.raises(UnsupportedOptionError, match="tools: the template of this test"):
            ask(engine, tools=[TIME])
        assert ask(engine, tools=[TIME], tool_choice="none").result().text


# ---- calls that are demanded ----


class Notes(FakeGrammars):
    """Notes what is to be compiled, and constrains nothing."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []

    def compile(self, grammar: Grammar) -> Any:
        self.asked.append(grammar)
        return object()


def noting(said: list[int] = SAID, template: str = TEMPLATE) -> tuple[Engine, Notes]:
    speaker, notes = Speaker(said, template), Notes()
    speaker.grammars = notes
    return engine_on(speaker), notes


@pytest.mark.parametrize(("choice", "n_tools"), [("required", 2), (NAMED, 1)])
def test_demanded_call_binds_the_answer_and_all_tools_are_told(choice: Any, n_tools: int) -> None:
    engine, notes = noting()
    with closing(engine):
        free = ask(engine, tools=[TIME, WEATHER]).result()
        result = ask(engine, tools=[TIME, WEATHER], tool_choice=choice).result()
    [grammar] = notes.asked
    assert grammar.kind == "tool_choice"
    assert f"<[{CALL}]>" in grammar.text
    assert grammar.text.count("%json") == n_tools
    assert result.finish_reason == "tool_calls"
    told = json.dumps({"tools": [TIME, WEATHER], "tool_choice": choice})
    plain = json.dumps({"tools": [TIME, WEATHER]})
    assert result.usage.prompt_tokens - free.usage.prompt_tokens == len(told) - len(plain)


def test_batch_that_asks_alike_compiles_once() -> None:
    engine, notes = noting()
    with closing(engine):
        chats = [[{"role": "user", "content": str(i)}] for i in range(20)]
        results = engine.run(chats, options={"tools": [TIME], "tool_choice": "required"}).results()
    assert len(notes.asked) == 1
    assert {r.finish_reason for r in results} == {"tool_calls"}


TWICE = [*SAID[:-1], *SAID[SAID.index(CALL) :]]


@pytest.mark.parametrize(("is_parallel", "n_calls"), [(None, 2), (True, 2), (False, 1)])
def test_answer_that_is_free_has_one_call_where_no_more_are_wanted(
    is_parallel: bool | None, n_calls: int
) -> None:
    options = {"tools": [TIME], "parallel_tool_calls": is_parallel}
    with closing(engine_on(Speaker(TWICE))) as engine:
        result = engine.run([[USER]], options=options).result()
    assert (len(result.tool_calls), len(result.warnings)) == (n_calls, 2 - n_calls)
    assert (result.text, result.finish_reason) == ("Wait.", "tool_calls")


@pytest.mark.parametrize(("is_parallel", "n"), [(None, 16), (True, 16), (False, 1)])
def test_answer_that_must_call_has_no_room_for_a_second_call(
    is_parallel: bool | None, n: int
) -> None:
    engine, notes = noting()
    with closing(engine):
        ask(engine, tools=[TIME], tool_choice="required", parallel_tool_calls=is_parallel).result()
    [grammar] = notes.asked
    assert ("call){0,15}" in grammar.text) == (n == 16)


def test_switch_for_several_calls_does_no_harm_without_tools() -> None:
    with closing(engine_on(Speaker(SAID))) as engine:
        result = engine.run(["raw"], options={"parallel_tool_calls": False}).result()
    assert result.text == PLAIN


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_call_that_is_not_demanded_binds_nothing(choice: str) -> None:
    engine, notes = noting()
    with closing(engine):
        ask(engine, tools=[TIME], tool_choice=choice).result()
    assert notes.asked == []


@pytest.mark.parametrize(
    ("messages", "may_think"),
    [
        ([USER], True),
        ([USER, {"role": "assistant", "content": "<think>So"}], True),
        ([USER, {"role": "assistant", "content": "So "}], False),
        ([{"role": "user", "content": "Hi <think></think>"}], False),
    ],
)
def test_answer_may_think_where_the_prompt_leaves_it_room(
    messages: Any, *, may_think: bool
) -> None:
    engine, notes = noting()
    with closing(engine):
        engine.run([messages], options={"tools": [TIME], "tool_choice": "required"}).results()
    assert (f"<[{THINK_END}]>" in notes.asked[0].text) == may_think


def test_demanded_call_is_refused_where_answers_come_in_channels() -> None:
    engine, _ = noting(template="<|channel|> <|message|>")
    with closing(engine), pytest.raises(UnsupportedOptionError, match="gpt-oss"):
        ask(engine, tools=[TIME], tool_choice="required")


def test_demanded_call_without_its_tools_is_refused_before_queueing(
    engine: Engine,
) -> None:
    with pytest.raises(ConfigError, match=r"prompts\[0\]: tool_choice='required' needs tools"):
        ask(engine, tool_choice="required")
    with pytest.raises(ConfigError, match="'get_time', which is not among the tools: get_weather"):
        ask(engine, tools=[WEATHER], tool_choice=NAMED)
    text = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(ConfigError, match=r"prompts\[0\]: .*type object"):
        ask(engine, tools=[text], tool_choice="required")
    with pytest.raises(ConfigError, match="tools is for the chat template"):
        engine.run(["raw"], options={"tools": [TIME], "tool_choice": "required"})


def test_tools_too_long_for_a_grammar_are_refused_where_a_call_is_demanded(engine: Engine) -> None:
    long = {"type": "function", "function": {"name": "f", "description": "x" * 2**20}}
    with pytest.raises(
        ConfigError, match=r"tools have 1,048,\d+ characters; at most 1,048,576 are allowed"
    ):
        ask(engine, tools=[long], tool_choice="required")


def test_format_of_a_run_and_a_demanded_call_of_its_item_are_refused(engine: Engine) -> None:
    item = BatchPrompt([USER], options={"tools": [TIME], "tool_choice": "required"})
    with pytest.raises(ConfigError, match="regex and tool_choice='required'"):
        engine.run([item], options={"regex": "a"})


def test_calls_are_looked_for_behind_thinking_that_stays_in_the_text(engine: Engine) -> None:
    said = [THINK, *b"so", THINK_END, *BODY, END_TOKEN]
    with closing(engine_on(Speaker(said, "<think></think>"))) as engine:
        result = ask(engine, tools=[TIME], reasoning_format="none").result()
    assert (result.text, result.reasoning) == ("so", "")
    assert [call.name for call in result.tool_calls] == ["get_time"]


def test_variable_that_the_template_does_not_use_is_a_warning(engine: Engine) -> None:
    kwargs = {"enable_thinking": True, "enable_thinkin": True}
    [warning] = ask(engine, chat_template_kwargs=kwargs).result().warnings
    assert "'enable_thinkin'" in warning


@thread_only(Reason.BY_HAND)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_character_that_a_cancel_cuts_comes_out_as_broken(is_streamed: bool) -> None:
    said = [*"ab😀".encode()[:-1], *b"x" * 500]
    with closing(engine_on(Speaker(said), threaded=False)) as engine:
        response = engine.run(["1"], options={"stop": ["b\ufffdx", "never"], "max_tokens": 400})
        chunks = iter(response) if is_streamed else None
        shown = next(chunks).text if chunks else ""
        while engine.stats().n_output_tokens < 5:
            engine.step()
        engine.cancel("0")
        shown += "".join(c.text for c in chunks or ())
        [result] = response.results()
    assert (result.text, result.finish_reason) == ("ab\ufffd", "cancelled")
    assert shown == (result.text if is_streamed else "")


@pytest.mark.parametrize("include_stop", [False, True])
def test_emoji_over_tokens_with_a_stop_string_of_them(include_stop: bool) -> None:
    said = [*"🙂🙃🙂🙂 end".encode(), END_TOKEN]
    options = {"stop": ["🙂🙂"], "include_stop": include_stop}
    with closing(engine_on(Speaker(said))) as engine:
        response = engine.run(["x"], options=options)
        chunks = list(response)
        result = response.result()
    assert (
        result.text == "".join(c.text for c in chunks) == ("🙂🙃🙂🙂" if include_stop else "🙂🙃")
    )
    assert all("\ufffd" not in c.text for c in chunks)
    assert result.finish_reason == "stop"


@pytest.mark.real
def test_template_without_tools_refuses_them_by_name() -> None:
    with cbatch.load(parallel=1, chat_template="chatml") as engine:
        with pytest.raises(UnsupportedOptionError, match="does not show tools"):
            engine.run([[USER]], options={"tools": [WEATHER]})
        assert engine.run([[USER]], options={"max_tokens": 3}).result().error is None


@pytest.mark.real
def test_shipped_model_with_a_template_for_tools_is_told_of_them() -> None:
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[-1].content }}"
    with cbatch.load(parallel=1, chat_template=template) as engine:
        options: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
        plain = engine.run([[USER]], options=options).result()
        told = engine.run([[USER]], options={**options, "tools": [WEATHER]}).result()
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens + 20


@pytest.mark.real
@pytest.mark.parametrize(
    ("form", "n"), [("hermes", 90), ("function tags", 30), ("mistral", 30), ("bare", 30)]
)
def test_shipped_model_calls_what_it_must_at_a_high_temperature(form: str, n: int) -> None:
    template = call_runs.template(form)
    with cbatch.load(parallel=8, ctx_per_seq=512, chat_template=template) as engine:
        found = call_runs.run(engine, n, call_runs.TOOLS[:3])
    assert found.n_right > n // 2
    assert found.n_calls >= found.n_right


@pytest.mark.real
def test_schema_that_cannot_be_compiled_fails_its_item_alone() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    chat = BatchPrompt([USER], options={"tools": tools, "tool_choice": "required"})
    options = {"max_tokens": 3}
    template = call_runs.template("hermes")
    with cbatch.load(parallel=2, ctx_per_seq=256, chat_template=template) as engine:
        failed, free = engine.run([chat, BatchPrompt([USER])], options=options).results(
            return_errors=True
        )
    assert isinstance(failed.error, GrammarError)
    assert str(failed.error).startswith("tool_choice: ")
    assert free.error is None


@pytest.mark.real
def test_shipped_model_makes_one_call_where_no_more_are_wanted() -> None:
    options = {"temperature": 1.5, "max_tokens": 300, "parallel_tool_calls": False}
    with cbatch.load(
        parallel=8, ctx_per_seq=512, chat_template=call_runs.template("hermes")
    ) as engine:
        results = engine.run(call_runs.prompts(16, call_runs.TOOLS[:3]), options=options).results()
    called = [len(r.tool_calls) for r in results if r.finish_reason == "tool_calls"]
    assert called
    assert set(called) == {1}
    assert not any(r.warnings for r in results)


# ---- a budget of thinking ----

LONG_THOUGHT = [THINK, *b"abcdefgh", THINK_END, *b"ok", END_TOKEN]


@pytest.mark.parametrize(
    ("n_tokens", "reasoning", "text"),
    [(0, "", "bcdefghok"), (3, "abc", "efghok"), (8, "abcdefgh", "ok"), (9, "abcdefgh", "ok")],
)
def test_thinking_that_reaches_its_budget_is_closed(
    n_tokens: int, reasoning: str, text: str
) -> None:
    """The model goes on behind the mark as behind any token: where it would have said the next letter."""
    with closing(engine_on(Speaker(LONG_THOUGHT))) as engine:
        result = ask(engine, thinking_budget=n_tokens).result()
        response = ask(engine, thinking_budget=n_tokens)
        chunks = list(response)
        scored = ask(engine, thinking_budget=n_tokens, logprobs=True).result()
    assert (result.reasoning, result.text) == (reasoning, text)
    # without text there was no thinking
    assert result.usage.reasoning_tokens == (min(n_tokens, 8) + 2 if reasoning else 0)
    assert "".join(chunk.reasoning for chunk in chunks) == reasoning
    assert "".join(chunk.content for chunk in chunks) == text
    assert scored.token_ids == result.token_ids
    assert scored.logprobs is not None
    assert len(scored.logprobs) == len(scored.token_ids)


def test_answer_without_thinking_has_no_budget() -> None:
    with closing(engine_on(Speaker([*b"well", THINK, *b"abcdefgh", END_TOKEN]))) as engine:
        free, limited = (
            ask(engine, thinking_budget=n, skip_special_tokens=False).result() for n in (None, 1)
        )
    assert limited.token_ids == free.token_ids


def test_model_says_whether_its_thinking_can_be_limited() -> None:
    for controls, is_limited in ((CONTROLS, True), ({}, False)):
        backend = Speaker(LONG_THOUGHT)
        backend.vocab.controls = controls
        with closing(engine_on(backend)) as engine:
            assert engine.model_facts.limits_thinking is is_limited
