"""Chat templates: the model's, the caller's, and templates that misbehave."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend.llama import chat_template
from cbatch.backend.llama.chat_template import NAMED_TEMPLATES, ChatTemplate, parse_override
from cbatch.backend.llama.sandbox import NoAnswerError
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError, RequestFailedError
from cbatch.support.moments import TakesLongError, brief
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from cbatch.backend import Message

pytestmark = pytest.mark.real  # a template runs in a process of its own

USER: Message = {"role": "user", "content": "Hi"}
TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
CHATML = NAMED_TEMPLATES["chatml"]
ECHO = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [{"role": "system", "content": "Be brief."}, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        *(
            (
                [USER, {"role": "assistant", "content": content}],
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce ",
            )
            for content in ("Once ", [{"type": "text", "text": "Once "}])
        ),
        (
            [USER, {"role": "assistant", "content": "Yes"}, USER],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["generation", "open", "open part", "earlier one closed"],
)
def test_chatml_leaves_open_what_goes_on(messages: list[Message], text: str) -> None:
    assert ChatTemplate(CHATML).render(messages) == text


_DATES = "{{ date_string }}|{{ datetime }}|{{ strftime_now('%Y-%m-%d %H:%M') }}"


def test_template_knows_the_date_of_each_rendering() -> None:
    times = [datetime(2026, 2, 3, 12, 30), datetime(2026, 2, 4, 12, 30)]  # local, as people read it
    clock = iter([moment.timestamp() for moment in times])
    template = ChatTemplate(_DATES, clock=lambda: next(clock))
    assert template.render([USER]) == "03 Feb 2026|Feb 03 2026|2026-02-03 12:30"
    assert template.render([USER]) == "04 Feb 2026|Feb 04 2026|2026-02-04 12:30"


def test_llama_3_is_told_today_or_the_date_of_the_request() -> None:
    source = (TEMPLATES / "meta-llama-Llama-3.2-3B-Instruct.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, clock=lambda: datetime(2026, 2, 3, 12).timestamp())
    assert "Today Date: 03 Feb 2026\n" in template.render([USER])
    given = template.render([USER], {"date_string": "26 Jul 2024"})
    assert "Today Date: 26 Jul 2024\n" in given


def test_firefunction_gets_functions_as_json_text() -> None:
    source = (TEMPLATES / "fireworks-ai-llama-3-firefunction-v2.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, clock=lambda: datetime(2026, 2, 3, 12).timestamp())
    assert "JSON spec:\n\nToday is Feb 03 2026." in template.render([USER])
    function = {"name": "look", "description": "Looks at <it>.", "parameters": {"type": "object"}}
    shown = template.render([USER], {"tools": [{"type": "function", "function": function}]})
    spec = shown.partition("JSON spec:\n")[2].partition("\nToday is")[0]
    assert json.loads(spec) == [function]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "str"),
        (None, r"chat_template='chatml'.*plain string"),
        ("{% for m in %}", r"does not compile.*chat_template='chatml'"),
        # what would leave its sandbox
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for m in messages %}{{ m.update(role='x') }}{% endfor %}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ raise_exception.__globals__.keys() }}", "refuses"),
        ("{% for i in range(10000000) %}x{% endfor %}", "refuses"),
    ],
)
def test_template_that_fails_or_misbehaves_fails_the_request_in_words(
    source: str | None, words: str
) -> None:
    message = dict(USER)
    with pytest.raises(RequestFailedError, match=words):
        ChatTemplate(source).render([message])
    assert message == USER


def test_override_is_a_name_or_a_source_that_works() -> None:
    assert parse_override("chatml") == CHATML
    assert parse_override(ECHO) == ECHO
    assert ChatTemplate(ECHO, bos_text="<s>", eos_text="</s>").render([USER]) == "<s>[Hi]</s>"
    for wrong in ("chatlm", "", "{% for m in %}", "{{ unclosed"):
        with pytest.raises(ConfigError, match="chat_template"):
            parse_override(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('%' ~ (9000000000 + messages | length) ~ 'd') % 5 }}",
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{{ 'a' * (10000000000 + messages | length) }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
    ids=["loops", "widths", "doubling", "repeating", "recursion"],
)
def test_template_that_never_ends_costs_its_own_request_alone(source: str) -> None:
    wanted = "{% if messages | length == 2 %}ok{% else %}" + source + "{% endif %}"
    template = ChatTemplate(wanted)
    with pytest.raises(RequestFailedError, match="refuses"):
        template.render([USER])
    assert template.render([USER, USER]) == "ok"


def test_template_of_any_size_runs_in_its_process() -> None:
    template = ChatTemplate("{#" + "é" * 200_000 + "#}" + ECHO)
    assert template.render([USER]) == "[Hi]"
    with pytest.raises(RequestFailedError, match="refuses"):
        ChatTemplate("{#" + "é" * 200_000 + "#}{% for i in range(9999999) %}{% endfor %}").render(
            [USER]
        )


class HeldSandbox:
    """Stands for a process that renders `slow` until it is let go, and any other chat at once."""

    is_possible, problem = True, ""
    go = threading.Event()
    begun = threading.Semaphore(0)

    def __init__(self, job: str, settings: object, limits: object) -> None:
        pass

    def start(self) -> None:
        pass

    def ask(self, question: Any, within_s: float | None = None) -> dict[str, str]:
        content = question["messages"][0]["content"]
        if content == "slow":
            if within_s is not None:
                return {"late": ""}
            self.begun.release()
            assert self.go.wait(PATIENCE_S)
        return {"text": content}

    def close(self) -> None:
        pass


def test_chats_that_take_long_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "Sandbox", HeldSandbox)
    template = ChatTemplate(ECHO)
    slow = {**USER, "content": "slow"}
    with ThreadPoolExecutor() as threads:
        try:
            held = [threads.submit(template.render, [slow]) for _ in range(3)]
            for _ in held:
                assert HeldSandbox.begun.acquire(timeout=PATIENCE_S)
            others = [threads.submit(template.render, [USER]) for _ in range(8)]
            assert [other.result(PATIENCE_S) for other in others] == ["Hi"] * 8
            assert not any(future.done() for future in held)
        finally:
            HeldSandbox.go.set()
        assert [future.result(PATIENCE_S) for future in held] == ["slow"] * 3


def test_brief_chat_waits_for_none_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "Sandbox", HeldSandbox)
    template = ChatTemplate(ECHO)
    slow = {**USER, "content": "slow"}
    HeldSandbox.go.clear()
    with ThreadPoolExecutor() as threads:
        try:
            held = [threads.submit(template.render, [slow]) for _ in range(8)]
            for _ in range(4):
                assert HeldSandbox.begun.acquire(timeout=PATIENCE_S)
            with brief():
                for _ in range(8):
                    assert template.render([USER]) == "Hi"
                    with pytest.raises(TakesLongError):
                        template.render([slow])
            assert not any(future.done() for future in held)
        finally:
            HeldSandbox.go.set()
        assert [future.result(PATIENCE_S) for future in held] == ["slow"] * 8


ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "source", [ENDLESS, "{{ 9 ** (9 ** (8 + messages | length)) }}"], ids=["loop", "C"]
)
def test_brief_chat_is_broken_off_soon_and_costs_no_other(source: str) -> None:
    template = ChatTemplate("{% if messages | length == 1 %}" + source + "{% endif %}" + ECHO)
    with brief():
        for _ in range(3):
            with pytest.raises(TakesLongError):
                template.render([USER])
            assert template.render([USER, USER]) == "[Hi][Hi]"
    template.close()


def test_loops_are_broken_off_in_the_process_that_stays() -> None:
    before, template = set(children()), ChatTemplate(ENDLESS)
    template.start()
    [pid] = set(children()) - before
    with brief():
        for _ in range(3):
            with pytest.raises(TakesLongError):
                template.render([USER])
    assert set(children()) - before == {pid}
    template.close()


class OnlySandbox(HeldSandbox):
    """The first of these gets a process; the system starts no more."""

    n_made = 0
    go = threading.Event()
    begun = threading.Semaphore(0)

    def __init__(self, job: str, settings: object, limits: object) -> None:
        OnlySandbox.n_made += 1
        self.problem = "no more processes" if OnlySandbox.n_made > 1 else ""

    def ask(self, question: Any, within_s: float | None = None) -> dict[str, str]:
        if self.problem:
            raise NoAnswerError(is_lasting=False)
        return super().ask(question, within_s)


def test_chats_wait_for_the_only_process_that_the_system_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "Sandbox", OnlySandbox)
    template = ChatTemplate(ECHO)
    with ThreadPoolExecutor() as threads:
        try:
            held = threads.submit(template.render, [{**USER, "content": "slow"}])
            assert OnlySandbox.begun.acquire(timeout=PATIENCE_S)
            others = [threads.submit(template.render, [USER]) for _ in range(8)]
            while OnlySandbox.n_made < 2 and not any(other.done() for other in others):
                os.sched_yield()
        finally:
            OnlySandbox.go.set()
        assert [other.result(PATIENCE_S) for other in others] == ["Hi"] * 8
        assert held.result(PATIENCE_S) == "slow"


def test_chat_fails_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with monkeypatch.context() as patch:
        patch.setattr("cbatch.backend.llama.sandbox.subprocess.Popen", refuse)
        with pytest.raises(RequestFailedError, match="no process for the template") as failed:
            template.render([USER])
        assert type(failed.value) is RequestFailedError  # not the prompt's fault
        with pytest.raises(RequestFailedError, match="no process for the template"):
            _ = template.tool_refusal
    assert not template.tool_refusal


TYPED = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %};{% endfor %}"
)
"""As templates of models that see have it: a content that is a string shows nothing."""


def test_template_that_reads_parts_gets_parts_one_of_both_strings() -> None:
    template = ChatTemplate(TYPED)
    said = {"role": "assistant", "content": "Well, "}
    assert template.render([USER]) == "user:Hi;"
    chat = [{"role": "system", "content": "Be."}, USER, said]
    assert template.render(chat) == "system:Be.;user:Hi;Well, "
    template.close()
    both = "{% for m in messages %}{% if m.content is string %}s{{ m.content }}{% else %}type{% endif %}{% endfor %}"
    template = ChatTemplate(both)
    assert template.render([USER]) == "sHi"
    template.close()


def children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_process_of_the_first_chat_is_started_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before, template = set(children()), ChatTemplate(ECHO)
    template.start()
    template.start()
    assert len(set(children()) - before) == 1
    monkeypatch.setattr("cbatch.backend.llama.sandbox.subprocess.Popen", refuse)
    assert template.render([USER]) == "[Hi]"
    with pytest.raises(ModelLoadError, match=r"chat template: .*unavailable"):
        ChatTemplate(CHATML).start()
    ChatTemplate(None).start()  # such a model has no chats
    template.close()


def test_killed_process_costs_no_chat() -> None:
    template = ChatTemplate(ECHO)
    before = set(children())
    for _ in range(3):
        assert template.render([USER]) == "[Hi]"
        for pid in set(children()) - before:
            os.kill(pid, signal.SIGKILL)
    assert template.render([USER]) == "[Hi]"
    template.close()


def test_chat_that_takes_long_ends_once_the_engine_closes() -> None:
    many = "{% for i in range(99999) %}"
    template = ChatTemplate(many * 3 + "{% endfor %}" * 3)
    before = set(children())
    with ThreadPoolExecutor() as threads:
        held = threads.submit(template.render, [USER])
        while not set(children()) - before:
            os.sched_yield()
        template.stop()
        with pytest.raises(EngineClosedError):
            held.result(PATIENCE_S)
    with pytest.raises(EngineClosedError):
        template.render([USER])
    template.close()


def test_fork_that_ends_leaves_the_process_to_its_parent() -> None:
    template = ChatTemplate(ECHO)
    assert template.render([USER]) == "[Hi]"
    pid = os.fork()
    if not pid:
        template.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert template.render([USER]) == "[Hi]"


@pytest.mark.parametrize(
    ("role", "content", "words"),
    [
        *(("user", content, "JSON|Unicode") for content in (b"bytes", {1, 2}, "half \ud83d")),
        ("assistant", None, "must be text"),
    ],
)
def test_message_that_cannot_be_is_refused(role: str, content: object, words: str) -> None:
    with pytest.raises(RequestFailedError, match=words):
        ChatTemplate(ECHO).render([USER, {"role": role, "content": content}])
