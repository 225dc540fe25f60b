"""Well-known chat templates: tools reach the prompt, and what they write of a call is read as that call."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama.chat_template import NAMED_TEMPLATES, ChatTemplate
from cbatch.backend.llama.sandbox import Limits, NoAnswerError, Sandbox
from cbatch.chat.answers import Answer
from cbatch.chat.formats import answer_format
from cbatch.errors import RequestFailedError
from cbatch.tools import Tools, check_tools
from tests.chat.answer_runs import make_reader, parts_of

if TYPE_CHECKING:
    from cbatch.backend import Message

FOLDER = Path(__file__).parents[2] / "data" / "templates"
LLAMA_3 = """{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls is defined %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{- m.content + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
"""As Llama 3.2's in what matters."""

TOOLS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": TOOLS},
}
ARGUMENTS = {"city": 'Paris "2" é', "days": 3}
pytestmark = pytest.mark.real  # a template runs in a process of its own

USER: Message = {"role": "user", "content": "How is it?"}
ASKS: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
    ],
}
ANSWERS: Message = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "get_weather",
    "content": "sunny",
}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|call|>", "<|observation|>")
WITH_TOOLS = (
    "GLM-4.6",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "fireworks-ai-llama-3-firefunction-v2",
    "meetkai-functionary-medium-v3.1",
    "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "like Llama 3",
)


def source(name: str) -> str:
    if name == "like Llama 3":
        return LLAMA_3
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def template(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), bos_text="<s>", eos_text="</s>", name=f"template {name}")


def read(name: str, text: str, prompt: str = "", tools: Tools | None = None) -> Answer:
    reader = make_reader(answer_format(source(name)), tools)
    return parts_of(reader, [*text.encode()], tail=[*prompt[-16:].encode()])[0]


def checked() -> Tools:
    return check_tools([WEATHER]) or Tools()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_call_as_the_template_writes_it_is_read_as_that_call(name: str) -> None:
    chat, variables = template(name), {"tools": [WEATHER]}
    assert chat.tool_refusal == ""
    prompt = chat.render([USER], variables)
    assert "get_weather" in prompt
    assert "city" in prompt
    after = chat.render([USER, ASKS, ANSWERS], variables)
    n_same = next(i for i, (a, b) in enumerate(zip(prompt + "\0", after, strict=False)) if a != b)
    written = after[n_same:]
    written = written[: min(i for end in ENDS if (i := written.find(end)) >= 0)]
    answer = read(name, written, prompt, checked())
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [("get_weather", ARGUMENTS)]
    assert (answer.text, answer.warnings) == ("", ())
    for shown in (
        after,
        chat.render([USER, {**ASKS, "content": "Let me see."}, ANSWERS], variables),
    ):
        assert "sunny" in shown
        assert "None" not in shown.replace("None.", "")
        assert "'city'" not in shown


@pytest.mark.parametrize("name", ["deepseek-ai-DeepSeek-V3.1", "chatml"])
def test_template_that_would_ignore_tools_is_named(name: str) -> None:
    text = NAMED_TEMPLATES[name] if name in NAMED_TEMPLATES else source(name)
    refusal = ChatTemplate(text, name=f"template {name}").tool_refusal
    assert refusal.startswith(f"template {name} does not show tools")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
        (None, "no chat template"),
    ],
)
def test_template_that_fails_with_tools_says_how(text: str | None, words: str) -> None:
    assert words in ChatTemplate(text).tool_refusal


def test_template_that_drops_earlier_calls_is_refused_and_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    ask = Sandbox.ask

    def counted(self: Sandbox, question: object) -> object:
        asked.append(question)
        return ask(self, question)

    monkeypatch.setattr(Sandbox, "ask", counted)
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", name="this template")
    for _ in range(2):
        with pytest.raises(RequestFailedError, match="this template does not show the tool_calls"):
            chat.render([USER, ASKS, ANSWERS])
    assert len(asked) == 4


def test_template_whose_process_was_killed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Sandbox, question: object) -> object:
        raise NoAnswerError(is_lasting=False)

    chat = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "ask", killed)
        with pytest.raises(RequestFailedError):
            chat.render([USER, ASKS, ANSWERS])
    assert "city" in chat.render([USER, ASKS, ANSWERS])


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ c.arguments | tojson }}", '{"city"'),
        ("{{ c.arguments }}", '{"city"'),
        ("{% if c.arguments is string %}{{ c.arguments }}{% endif %}", '{"city"'),
        ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "city="),
    ],
)
def test_arguments_are_given_as_the_template_wants_them(shown: str, expected: str) -> None:
    text = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        f"{shown}{{% endfor %}}{{{{ m.content }}}}{{% endfor %}}"
    )
    prompt = ChatTemplate(text).render([USER, ASKS, ANSWERS])
    assert expected in prompt
    assert "None" not in prompt


def test_content_is_none_where_the_template_asks_for_that() -> None:
    text = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert "get_weather" in ChatTemplate(text).render([USER, ASKS, ANSWERS])


@pytest.mark.parametrize(
    ("name", "kwargs", "end"),
    [
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("GLM-4.6", {"enable_thinking": False}, "<think></think>"),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": False}, "<think></think>"),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, "<think>"),
    ],
)
def test_variables_open_and_close_thinking(name: str, kwargs: dict[str, Any], end: str) -> None:
    prompt = template(name).render([USER], kwargs)
    assert prompt.endswith(end)
    opened = end == "<think>"
    assert read(name, "a</think>b" if opened else "b", prompt).text == "b"
    assert read(name, "a</think>b" if opened else "b", prompt).reasoning == ("a" if opened else "")


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        *((name, "hm") for name in ("Qwen-Qwen3-0.6B", "GLM-4.6", "deepseek-ai-DeepSeek-V3.1")),
        ("Qwen-Qwen2.5-7B-Instruct", ""),
        ("mistralai-Mistral-Nemo-Instruct-2407", ""),
    ],
)
def test_thinking_is_split_off_where_the_template_has_it(name: str, thought: str) -> None:
    said = "<think>\nhm\n</think>\n\nYes."
    prompt = template(name).render([USER])
    expected = Answer("Yes.", thought) if thought else Answer(said)
    assert read(name, said, prompt if thought else "") == expected


def test_large_program_keeps_the_process_of_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, popen = list[object](), subprocess.Popen

    def counted(*args: Any, **options: Any) -> Any:
        begun.append(args)
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    held = bytearray(2**28 + 2**26)  # as weights in memory: more than such a process keeps
    template = ChatTemplate(LLAMA_3)
    rendered = [template.render([{**USER, "content": f"{n}"}], {}) for n in range(4)]
    template.close()
    assert len({*rendered}) == 4
    assert len(begun) == 1
    assert held


def test_chat_behind_an_interrupted_one_gets_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    template, poll = ChatTemplate("{{ messages[0].content }}"), select.poll

    class Struck:
        """Ctrl-C comes when the answer is there and was not read yet."""

        def __init__(self) -> None:
            self.real = poll()
            self.register, self.unregister = self.real.register, self.real.unregister

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            ready = self.real.poll(timeout_ms)
            if any(event & select.POLLIN for _, event in ready):
                raise KeyboardInterrupt
            return ready

    try:
        assert template.render([{"role": "user", "content": "Say green."}]) == "Say green."
        with monkeypatch.context() as patch:
            patch.setattr("cbatch.backend.llama.sandbox.select.poll", Struck)
            with pytest.raises(KeyboardInterrupt):
                template.render([{"role": "user", "content": "Say red."}])
        assert template.render([{"role": "user", "content": "Say blue."}]) == "Say blue."
    finally:
        template.close()


# ---- limits of the system ----

_ECHO = "def begin(settings):\n    return lambda question: question\n"
_UNDER = """
import resource, sys
from cbatch.backend.llama.sandbox import Limits, NoAnswerError, Sandbox
kind = getattr(resource, sys.argv[2])
resource.setrlimit(kind, (int(sys.argv[3]),) * 2)
sandbox = Sandbox(sys.argv[1], None, Limits(cpu_s=60, wall_s=60.0, n_bytes=2**34))
print(sandbox.ask("Hi"))
sandbox.close()
"""


@pytest.mark.real
@pytest.mark.parametrize(("kind", "limit"), [("RLIMIT_AS", 2**33), ("RLIMIT_CPU", 50)])
def test_sandbox_keeps_to_a_smaller_limit_of_the_system(
    tmp_path: Path, kind: str, limit: int
) -> None:
    (tmp_path / "echo.py").write_text(_ECHO)
    told = subprocess.run(
        [sys.executable, "-c", _UNDER, str(tmp_path / "echo.py"), kind, str(limit)],
        capture_output=True,
        text=True,
    )
    assert (told.stdout, told.stderr) == ("Hi\n", "")


@pytest.mark.real
def test_sandbox_whose_memory_cannot_be_limited_says_so(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(_ECHO)
    limits = Limits(cpu_s=1, wall_s=60.0, n_bytes=2**70)  # more than the system can count
    sandbox = Sandbox(str(tmp_path / "echo.py"), None, limits)
    with pytest.raises(NoAnswerError):
        sandbox.ask("Hi")
    assert "its memory cannot be limited to 1,180,591,620,717,411,303,424 bytes" in sandbox.problem
