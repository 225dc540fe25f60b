"""Prompts become tokens in threads of their own: nobody waits for another's, and each request ends once."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, get_args

import pytest

from cbatch.backend.fake import END_TOKEN, FakeBackend, FakeVocab
from cbatch.engine import Engine, checked_tokens, run_soon
from cbatch.engine_options import Policy, ScheduleOptions
from cbatch.errors import PromptTooLongError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.local import LocalRuntime
from cbatch.runtime.work_thread import WorkThread
from cbatch.support.moments import TakesLongError, is_brief
from tests.chat.test_tool_calls import THINK_END, Speaker
from tests.runtime.backends import PATIENCE_S, in_thread
from tests.worker.links import workers_over

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbatch.core.plan import StepPlan, StepResult

LONG = "x" * 40_000
CHAT = BatchPrompt([{"role": "user", "content": "Hi"}])
SHORT: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}


class SlowVocab(FakeVocab):
    """Tokenizes texts of `x` only once it is let go."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__(n_vocab)
        self.is_held, self.go = threading.Event(), threading.Event()
        self.n_slow = 0

    def tokenize(self, text: str) -> list[int]:
        if text.startswith("x"):
            self.n_slow += 1
            self.is_held.set()
            assert self.go.wait(PATIENCE_S)
            return [*text[:8].encode()]
        return super().tokenize(text)


def slow_engine(**schedule: Any) -> tuple[Engine, SlowVocab]:
    """An engine of two slots whose vocabulary is slow, before it is let go."""
    backend = FakeBackend(2, 64, 16)
    vocab = SlowVocab(backend.vocab.n_vocab)
    backend.vocab = vocab
    return Engine(backend, schedule=ScheduleOptions(**schedule)), vocab


@pytest.mark.parametrize("policy", get_args(Policy))
def test_long_prompt_holds_up_no_other_request(policy: Any) -> None:
    engine, vocab = slow_engine(policy=policy)
    with engine:
        long = engine.run([LONG] * 60, options=SHORT)
        assert vocab.is_held.wait(PATIENCE_S)
        short = engine.run(["a", "b", "c"], options=SHORT).results()
        assert [len(r.token_ids) for r in short] == [3, 3, 3]
        vocab.go.set()
        assert [len(r.token_ids) for r in long.results()] == [3] * 60


def test_any_number_of_long_calls_of_a_server_holds_up_no_other() -> None:
    backend = FakeBackend(2, 64, 16)
    backend.vocab = vocab = SlowVocab(backend.vocab.n_vocab)
    runtime = partial(LocalRuntime, backend, ScheduleOptions())
    with Engine(opener=lambda _: workers_over(runtime)) as engine:
        options = RunOptions.of(SHORT)
        long = [
            run_soon(engine, BatchPrompt(prompt=LONG), options, streamed=False) for _ in range(60)
        ]
        assert vocab.is_held.wait(PATIENCE_S)
        short = run_soon(engine, BatchPrompt(prompt="a"), options, streamed=False)
        assert short is not None
        assert [len(r.token_ids) for r in short.results()] == [3]
        vocab.go.set()
        assert all(len(r.token_ids) == 3 for some in long if some for r in some.results())


@pytest.mark.parametrize(
    "end",
    [
        lambda engine, id: engine.cancel(id),
        lambda engine, id: engine.pause(id) and engine.cancel(id),
    ],
    ids=["cancel", "pause and cancel"],
)
@pytest.mark.parametrize("prompt", [LONG, "x"], ids=["long", "short"])
def test_request_ends_while_its_prompt_is_made_tokens(
    prompt: str, end: Callable[[Engine, str], object]
) -> None:
    engine, vocab = slow_engine()
    with engine:
        waiting = engine.run([prompt], options=SHORT)
        assert vocab.is_held.wait(PATIENCE_S)
        assert end(engine, waiting.ids[0])
        [result] = waiting.results(return_errors=True)
        assert result.finish_reason == "cancelled"
        vocab.go.set()
        assert len(engine.run(["a"], options=SHORT).results()) == 1


def test_chat_whose_template_is_slow_holds_up_no_submission() -> None:
    backend = Speaker([65] * 8)
    render, is_held, go = backend.vocab.render_text, threading.Event(), threading.Event()

    def render_text(*given: Any) -> str:
        is_held.set()
        assert go.wait(PATIENCE_S)
        return render(*given)

    backend.vocab.render_text = render_text  # type: ignore[method-assign,assignment]
    chat = [{"role": "user", "content": "Hi" * 40_000}]
    with Engine(backend) as engine:
        bound = {**SHORT, "thinking_budget": 2}
        wait = in_thread(lambda: engine.run([BatchPrompt(chat)] * 40, options=bound))
        assert is_held.wait(PATIENCE_S)
        chats = wait()
        assert len(engine.run(["a"], options=SHORT).result().token_ids) == 3
        go.set()
        assert all(
            isinstance(r.error, PromptTooLongError) for r in chats.results(return_errors=True)
        )


def hold_slow_chats(backend: Speaker, go: threading.Event) -> threading.Semaphore:
    """Have the template take long for chats that say "slow"; return what is released when one has begun."""
    render, begun = backend.vocab.render_text, threading.Semaphore(0)

    def render_text(messages: Any, *more: Any) -> str:
        if messages[0]["content"] == "slow":
            if is_brief():
                raise TakesLongError
            begun.release()
            assert go.wait(PATIENCE_S)
        return render(messages, *more)

    backend.vocab.render_text = render_text  # type: ignore[method-assign,assignment]
    return begun


@pytest.mark.parametrize("options", [{}, {"thinking_budget": 2}], ids=["", "open"])
def test_chats_whose_template_takes_long_hold_up_no_other_chat(options: dict[str, Any]) -> None:
    backend, go = Speaker([65] * 8), threading.Event()
    hold_slow_chats(backend, go)
    with Engine(backend) as engine:
        slow = engine.run([BatchPrompt([{"role": "user", "content": "slow"}])] * 12, options=SHORT)
        other = engine.run([CHAT] * 3, options={**SHORT, **options})
        assert [len(r.token_ids) for r in other.results()] == [3] * 3
        assert slow.n_open == 12
        go.set()
        assert [len(r.token_ids) for r in slow.results()] == [3] * 12


def checked(engine: Engine, prompt: BatchPrompt) -> int:
    """Ask as a server does before a request waits."""
    return checked_tokens(engine, prompt, RunOptions())


@pytest.mark.parametrize("ask", [Engine.render, Engine.tokenize, Engine.count_tokens, checked])
def test_questions_about_chats_are_brief_first(ask: Callable[[Engine, BatchPrompt], Any]) -> None:
    """So those whose template takes long hold up no other: see tests/backend/llama/test_chat.py."""
    backend, go = Speaker([65] * 8), threading.Event()
    begun, asked = hold_slow_chats(backend, go), list[bool]()
    render = backend.vocab.render_text

    def render_text(*given: Any) -> str:
        asked.append(is_brief())
        return render(*given)

    backend.vocab.render_text = render_text  # type: ignore[method-assign,assignment]
    with Engine(backend) as engine:
        slow = in_thread(lambda: ask(engine, BatchPrompt([{"role": "user", "content": "slow"}])))
        assert begun.acquire(timeout=PATIENCE_S)
        assert asked == [True, False]
        assert ask(engine, CHAT)
        assert asked == [True, False, True]
        with suppress(PromptTooLongError):
            ask(engine, BatchPrompt([{"role": "user", "content": LONG}]))
        assert not any(asked[3:])
        go.set()
        assert slow()


@pytest.mark.parametrize("is_threaded", [True, False])
@pytest.mark.parametrize(("end", "n_thought"), [("<think>", 3), ("", 0), ("<think></think>", 0)])
def test_thinking_that_begins_in_the_prompt_is_limited(
    end: str, n_thought: int, *, is_threaded: bool
) -> None:
    backend = Speaker([*b"abcdefgh", END_TOKEN])
    render, shown = backend.vocab.render_text, list[str]()

    def render_text(*given: Any) -> str:
        shown.append(render(*given) + end)
        return shown[-1]

    backend.vocab.render_text = render_text  # type: ignore[method-assign,assignment]
    with Engine(backend, threaded=is_threaded) as engine:
        result = engine.run([CHAT], options={"thinking_budget": 3}).result()
    assert (THINK_END in result.token_ids) == bool(n_thought)
    assert len(shown) == 1


def test_places_before_the_queue_are_for_prompts_that_can_run() -> None:
    engine, vocab = slow_engine()
    with engine:
        paused = engine.run([LONG] * 30, options=SHORT)
        assert vocab.is_held.wait(PATIENCE_S)
        assert all(engine.pause(id) for id in paused.ids)
        vocab.go.set()
        assert len(engine.run([LONG], options=SHORT).result().token_ids) == 3
        assert all(engine.cancel(id) for id in paused.ids)


def test_deadline_passes_while_a_prompt_is_made_tokens() -> None:
    engine, vocab = slow_engine()
    with engine:
        [result] = engine.run([LONG], options={**SHORT, "timeout_s": 0.05}).results(
            return_errors=True
        )
        assert result.finish_reason == "timeout"
        vocab.go.set()


def test_paused_request_goes_on_once_its_prompt_is_tokens() -> None:
    engine, vocab = slow_engine()
    with engine:
        response = engine.run([LONG], options=SHORT)
        assert vocab.is_held.wait(PATIENCE_S)
        assert engine.pause(response.ids[0])
        vocab.go.set()
        assert len(engine.run(["a"], options=SHORT).results()) == 1
        assert engine.resume(response.ids[0])
        assert [len(r.token_ids) for r in response.results()] == [3]


def test_close_ends_requests_whose_prompts_are_no_tokens_yet() -> None:
    engine, vocab = slow_engine()
    response = engine.run([LONG, LONG, "x"], options=SHORT)
    assert vocab.is_held.wait(PATIENCE_S)
    threading.Timer(0.05, vocab.go.set).start()
    engine.close()
    reasons = [r.finish_reason for r in response.results(return_errors=True)]
    assert reasons == ["cancelled"] * 3
    assert vocab.n_slow <= 2  # a prompt that waited in its lane was not begun


class TurnsBackend(FakeBackend):
    """Holds each run before its only step until it is given a turn: by the next interrupt, once that is wanted."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.turns, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.is_interrupt_wanted = False

    def run(self, plan: StepPlan) -> StepResult:
        if plan.spans:
            self.begun.release()
            assert self.turns.acquire(timeout=PATIENCE_S)
        super().interrupt()
        return super().run(plan)

    def interrupt(self) -> None:
        super().interrupt()
        if self.is_interrupt_wanted:
            self.is_interrupt_wanted = False
            self.turns.release()


@pytest.mark.parametrize(
    "prompt",
    [
        BatchPrompt(prompt="a" * 100),
        BatchPrompt(tokens=[1] * 100),
        BatchPrompt([{"role": "user", "content": "a" * 100}]),
        BatchPrompt([{"role": "user", "content": LONG}]),
    ],
    ids=["text", "tokens", "chat", "long chat"],
)
@pytest.mark.parametrize("is_soon", [True, False])
def test_refused_prompt_is_told_before_the_next_run(prompt: BatchPrompt, *, is_soon: bool) -> None:
    backend = TurnsBackend(1, 64, 16)
    runtime = partial(LocalRuntime, backend, ScheduleOptions())
    with Engine(opener=lambda _: workers_over(runtime)) as engine:
        running = engine.run(["a", "b"], options=SHORT)
        assert backend.begun.acquire(timeout=PATIENCE_S)
        backend.is_interrupt_wanted = True
        options = RunOptions.of(SHORT)
        if is_soon:
            refused = run_soon(engine, prompt, options, streamed=False)
        else:
            refused = engine.run([prompt], options=options)
        assert refused is not None
        [result] = refused.results(return_errors=True)
        assert isinstance(result.error, PromptTooLongError)
        assert backend.begun.acquire(timeout=PATIENCE_S)
        assert not backend.turns.acquire(blocking=False)
        backend.turns.release(100)
        assert [len(r.token_ids) for r in running.results()] == [3, 3]


def test_prompt_of_too_many_bytes_is_refused_before_it_is_tokenized() -> None:
    engine, vocab = slow_engine()
    vocab.n_tokens_least = len  # type: ignore[method-assign,assignment]
    with engine:
        [result] = engine.run([LONG], options=SHORT).results(return_errors=True)
    assert isinstance(result.error, PromptTooLongError)
    assert (result.error.n_prompt, result.error.n_limit) == (len(LONG), 64)
    assert "at least 40000 tokens" in str(result.error)
    assert vocab.n_slow == 0


def test_prompt_becomes_tokens_though_time_passes_in_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two lines, other threads may have the interpreter for longer than prompts are gathered."""
    hours = count(step=3600.0)
    monkeypatch.setattr("cbatch.runtime.prompts.monotonic", lambda: next(hours))
    with Engine(FakeBackend(2, 64, 16)) as engine:
        results = engine.run(["a", "b", "c"], options=SHORT).results(timeout=PATIENCE_S)
        assert [len(r.token_ids) for r in results] == [3, 3, 3]


def test_prompt_becomes_tokens_behind_one_of_an_interrupted_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    do = WorkThread.do

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(WorkThread, "do", do)
        raise KeyboardInterrupt

    monkeypatch.setattr("cbatch.runtime.prompts._GATHER_S", 0.0)
    monkeypatch.setattr(WorkThread, "do", interrupted)
    with Engine(FakeBackend(2, 64, 16)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.run(["a"], options=SHORT)
        [result] = engine.run(["b"], options=SHORT).results(timeout=PATIENCE_S)
        assert len(result.token_ids) == 3
