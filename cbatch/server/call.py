"""A call as a dialect has read it, and how it is answered: whole, or as it comes."""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

import cbatch
from cbatch.engine import (
    Engine,
    checked_tokens,
    run_late,
    run_options_of,
    run_soon,
    tokens_of_each,
)
from cbatch.errors import CBatchError, NoThreadError
from cbatch.messages import BatchPrompt
from cbatch.options import NO_OPTIONS, RunOptions, Sampling
from cbatch.server.answer_events import Ended, Events, Failed, results_of
from cbatch.server.exchange import ClientGoneError, Exchange
from cbatch.server.http_errors import HttpProblemError, bad_request, problem_of, refused
from cbatch.server.prompt_size import check_call
from cbatch.server.request_fields import (
    RequestFields,
    as_list,
    field_errors,
    ignored_header,
    with_param,
)
from cbatch.server.sse import COMMENT, EventStream, StreamEncoder
from cbatch.server.telemetry import add_answers
from cbatch.support.checks import MAX_KEY_LENGTH, shown
from cbatch.support.logs import Log
from cbatch.support.thread_start import is_lack_of_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anyio.abc import TaskGroup

    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse
    from cbatch.runtime.step_record import SlotState
    from cbatch.server.desk import Desk, Visit
    from cbatch.server.server_settings import ServerSettings
    from cbatch.support.model_facts import ModelFacts

_log = Log("cbatch.server")

_OF_CELLS = ("cache_key", "save_cache", "cache_required")
"""Options that use cells on disk."""

EMPTY = BatchPrompt(tokens=[0])
"""Stands for an empty prompt until the model is known.

Source: OpenAI's API reference, completions: without a prompt, the model generates as from the beginning of a document.
"""


def fingerprint_of(engine: Engine) -> str:
    """Return `system_fingerprint`: a digest of what answers depend on besides the request. May wait for the engine.

    It begins with a `b`, as llama-server's number of a build does.
    """
    said = json.dumps([cbatch.__version__, engine.fingerprint], sort_keys=True)
    return f"b{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def _in_space(owner: str, option: str, name: str) -> str:
    """Return a client's name for its cells in the namespace of its owner; HttpProblemError where it is too long."""
    n_most = MAX_KEY_LENGTH - len(owner) - 1
    if len(name) > n_most:
        words = f"{option} must be a string of 1 … {n_most} characters, not {shown(name)}"
        raise bad_request(words, option)
    return f"{owner}/{name}"


class Call(ABC):
    """What a client asks for, in some dialect."""

    prompt_field: ClassVar[str]
    """The field that has the prompt."""

    def __init__(self, asked: RequestFields, prompts: Sequence[BatchPrompt]) -> None:
        self.asked, self.prompts = asked, [*prompts]
        self.n_prompt_tokens = 0
        """Tokens of all prompts, where they were counted."""
        self.fingerprint: str | None = None
        """What the engine is, once `see_defaults` has told it."""
        self._defaults: tuple[RunOptions, Mapping[str, float]] = NO_OPTIONS, {}

    def see_client(self, owner: str, settings: ServerSettings) -> None:
        """Put the call's cells, in memory and on disk, into the namespace of its owner. Before anything runs.

        Raises:
            HttpProblemError: the server saves no cells for clients, or the key is missing or too long.
        """
        options = self.asked.options
        if owner:
            salt = _in_space(owner, "cache_salt", options.cache_salt or "")
            self.asked.options = options = replace(options, cache_salt=salt)
        named = [name for name in _OF_CELLS if getattr(options, name)]
        if not named:
            return
        if not settings.allow_cache_keys:
            raise refused(named[0], "the server was started without --allow-cache-keys")
        if options.cache_key is None:
            raise bad_request(f"{named[0]} needs a cache_key in the same request", named[0])
        key = _in_space(owner or "keyless", "cache_key", options.cache_key)
        self.asked.options = replace(options, cache_key=key)

    def see_facts(self, facts: ModelFacts) -> None:
        """See what the model is, before anything runs: an adapter that is named as the model is taken.

        Raises:
            HttpProblemError: the model cannot answer such a call; an empty prompt needs the BOS token, say.
        """
        asked = self.asked
        if asked.common.model in facts.adapters and asked.options.adapter is None:
            asked.options = replace(asked.options, adapter=asked.common.model)
        if not any(prompt is EMPTY for prompt in self.prompts):
            return
        if facts.bos_id < 0:
            words = "the prompt is empty, but this model has no BOS token to begin with: send a text or tokens"
            raise bad_request(words, self.prompt_field)
        first = BatchPrompt(tokens=[facts.bos_id])
        self.prompts = [first if prompt is EMPTY else prompt for prompt in self.prompts]

    def see_vocabulary(self, engine: Engine, facts: ModelFacts) -> Iterator[None]:
        """Find the tokens of texts that have a bias, which are added to those of tokens. Yields after each question.

        Raises:
            HttpProblemError: the biases are too many or too large.
        """
        asked = self.asked
        biases = dict(asked.options.logit_bias or {})
        texts = (text for text, _ in asked.biased_texts)
        for (_, bias), tokens in zip(
            asked.biased_texts, tokens_of_each(engine, texts), strict=True
        ):
            for token in tokens:
                biases[token] = biases.get(token, 0.0) + bias
            yield
        if asked.biased_texts:
            with field_errors("logit_bias"):
                asked.options = replace(asked.options, logit_bias=biases)

    def see_defaults(
        self, of_engine: RunOptions, of_model: Mapping[str, float], fingerprint: str
    ) -> None:
        """See what holds where the request says nothing, and `fingerprint_of` the engine."""
        self._defaults, self.fingerprint = (of_engine, of_model), fingerprint

    @property
    def asks_vocabulary(self) -> bool:
        """Whether `see_vocabulary` has something to do."""
        return bool(self.asked.biased_texts)

    @property
    def settled(self) -> tuple[RunOptions, Mapping[str, float]]:
        """The call's options joined with the engine's, and the model's values; known once defaults were seen."""
        of_engine, of_model = self._defaults
        return self.asked.options.over(of_engine), of_model

    @property
    def sampling(self) -> Sampling:
        """How answers are sampled, once defaults were seen."""
        options, of_model = self.settled
        return options.sampling(of_model, seed=0)

    @property
    def n_choices(self) -> int:
        """Answers that the client gets for each prompt."""
        return self.asked.options.n or 1

    @property
    def n_sequences(self) -> int:
        """Sequences of the engine for all prompts."""
        return len(self.prompts) * self.asked.options.n_sequences

    def check_size(self, n_most: int) -> None:
        """Raise a `HttpProblemError` where it has more than `n_most` sequences."""
        if self.n_sequences > n_most:
            scores = self.asked.options.choice_probs
            what = "texts are to be scored" if scores else "answers are asked for"
            words = f"{self.n_sequences} {what}; at most {n_most} are allowed"
            raise bad_request(words, self.prompt_field)

    @property
    def tells_progress(self) -> bool:
        """Whether a stream tells how far its prompt is, of which there is one."""
        common = self.asked.common
        return common.return_progress and common.stream and len(self.prompts) == 1

    @property
    def is_counted(self) -> bool:
        """Whether the prompts' tokens are counted before anything runs."""
        return False

    @abstractmethod
    def body(self, results: Sequence[BatchResult], model: str) -> Any:
        """Return the whole answer: an object; in llama-server's format also a list. Long lists are `LazyList`s."""

    @abstractmethod
    def stream(self, model: str) -> StreamEncoder:
        """Return what encodes the answer's events."""


class Answering:
    """One call on its way: checked, queued, answered."""

    def __init__(self, desk: Desk, exchange: Exchange, call: Call) -> None:
        self._desk, self._exchange, self._call = desk, exchange, call
        self._model = call.asked.common.model or desk.model_name
        self._encoder: StreamEncoder | None = None
        """What encodes the stream, once the engine has the prompts."""
        self._stream: EventStream | None = None
        self._is_done = False
        self._headers: dict[str, str] = {}

    async def run(self) -> None:
        """Answer. What stands in the way before an answer has begun is raised.

        Raises:
            HttpProblemError, CBatchError: why there is no answer.
            ClientGoneError: nobody waits for one any more.
        """
        desk, call = self._desk, self._call
        sizes = await desk.sizes()
        call.see_client(self._exchange.owner, desk.settings)
        if not self._exchange.is_small:
            await self._exchange.aside(check_call, call, sizes.n_window)
        call.see_facts(sizes.facts)
        if call.asks_vocabulary:
            await desk.ask_each(self._exchange, call.see_vocabulary(desk.engine, sizes.facts))
        if call.asked.common.model is None and desk.settings.model_required:
            raise bad_request("model is missing", "model")
        self._name_ignored()
        call.check_size(desk.settings.max_choices)
        with desk.visit(call.n_sequences, sizes.n_slots, self._exchange.held) as visit:
            try:
                await self._answer(visit, sizes.n_slots)
            finally:
                self._encoder = None  # its results are large, and a cancelled task keeps `self`

    def _name_ignored(self) -> None:
        """Name fields that are ignored, in the answer's header and in the log."""
        asked, ignored = self._call.asked, self._call.asked.ignored
        if asked.common.return_progress and not self._call.tells_progress:
            ignored.append("return_progress")
        if ignored:
            self._headers |= ignored_header(ignored)
            _log.tell("ignored fields", request_id=self._exchange.id, fields=as_list(ignored, ","))
        self._desk.warn_of_unknown(asked)

    async def _answer(self, visit: Visit, n_slots: int) -> None:
        """Answer while the client waits; whoever ends the visit says why."""
        problem: Exception | None = None
        try:
            with visit.scope:
                await self._exchange.while_client_stays(partial(self._work, visit, n_slots))
        except ClientGoneError:
            raise
        except Exception as error:
            problem = error
        problem = problem or visit.problem
        if problem is not None and not self._is_done:
            visit.response = None  # it is large, and to tell a slow reader takes long
            await self._tell(problem, self._stream)

    async def _work(self, visit: Visit, n_slots: int, tasks: TaskGroup) -> None:
        if self._call.asked.common.stream:
            self._stream = self._opened(tasks)
        response = await self._queue(visit, n_slots)
        if self._stream is None:
            await self._send(response)
        else:
            await self._send_events(tasks, self._stream, response)
        self._is_done = True

    async def _tell(self, error: Exception, stream: EventStream | None) -> None:
        """Raise what a client is told of an error, or send it where a stream has begun and stands between events."""
        call, exchange = self._call, self._exchange
        if is_lack_of_threads(error):
            error = NoThreadError()
        error = with_param(error, call.asked, call.prompt_field)
        is_known = isinstance(error, CBatchError | HttpProblemError)
        problem = problem_of(error, call.prompt_field)
        if stream is None or not stream.has_begun or stream.is_cut:
            raise problem if is_known else error
        words = str(error) if is_known else "".join(traceback.format_exception(error))
        _log.write(logging.WARNING if is_known else logging.ERROR, "%s: %s", exchange.id, words)
        encoder = self._encoder or call.stream(self._model)
        await exchange.put(encoder.error(problem))
        await exchange.finish()

    async def _queue(self, visit: Visit, n_slots: int) -> BatchResponse:
        """Give the prompts to the engine. Where they are to wait or are many, each is checked before any runs."""
        desk, call = self._desk, self._call
        sizes = await desk.sizes()
        call.see_defaults(desk.engine.options, sizes.facts.sampling, sizes.fingerprint)
        is_counted = call.is_counted or len(call.prompts) > 1
        has_queue = not is_counted and desk.has_queue(n_slots)
        counts_queue = has_queue and desk.settings.max_queue_tokens is not None
        response = None if is_counted or counts_queue else self._run_soon()
        if response is None:
            if is_counted or has_queue:
                counts = await desk.ask_each(self._exchange, self._checked_tokens())
                call.n_prompt_tokens = sum(counts)
                desk.count_tokens(visit, call.n_prompt_tokens, n_slots)
            response = await desk.in_thread(self._run)
        visit.response = response
        if visit.held is not None:
            response.weigh(visit.held.add)
        return response

    def _run_soon(self) -> BatchResponse | None:
        """Queue the only prompt, where that takes no time here."""
        if not self._exchange.is_small:
            return None
        asked, (prompt,) = self._call.asked, self._named()
        return run_soon(self._desk.engine, prompt, asked.options, streamed=asked.common.stream)

    def _run(self) -> BatchResponse:
        asked = self._call.asked
        engine, is_streamed = self._desk.engine, asked.common.stream
        return run_late(engine, self._named(), asked.options, streamed=is_streamed)

    async def _send(self, response: BatchResponse) -> None:
        results = await results_of(response)
        self._count(results)
        body = await self._exchange.aside(self._call.body, results, self._model)
        await self._exchange.respond_long(body, self._headers)

    def _count(self, results: Sequence[BatchResult]) -> None:
        self._desk.meters.count_answers(results)
        if (span := self._exchange.record.span) is not None:
            add_answers(span, results, self._model)

    def _named(self) -> list[BatchPrompt]:
        """Return the prompts by ids that begin as the request's own: the log and `/slots` tell them."""
        prompts, id = self._call.prompts, self._exchange.id
        if len(prompts) == 1:
            return [prompts[0].named(id)]
        return [prompt.named(f"{id}.{i}") for i, prompt in enumerate(prompts)]

    def _checked_tokens(self) -> Iterator[int]:
        """Yield the tokens of each prompt; one that cannot run raises its error."""
        engine = self._desk.engine
        settled = run_options_of(engine, self._call.asked.options)
        for prompt in self._call.prompts:
            yield checked_tokens(engine, prompt, settled)

    def _opened(self, tasks: TaskGroup) -> EventStream:
        """Return a stream whose silences are filled from now on, also while prompts are counted."""
        settings = self._desk.settings
        stream = EventStream(self._exchange, self._headers, self._desk.clock)
        tasks.start_soon(
            stream.keep_alive,
            settings.status_after_s,
            settings.keep_alive_s,
            lambda: COMMENT if self._encoder is None else self._encoder.idle(),
        )
        return stream

    async def _send_events(
        self, tasks: TaskGroup, stream: EventStream, response: BatchResponse
    ) -> None:
        events = Events(response, self._call.n_choices)
        progress = anyio.CancelScope()
        try:
            encoder = await self._exchange.aside(self._call.stream, self._model)
            self._encoder = encoder
            if self._call.tells_progress:
                tasks.start_soon(self._tell_progress, progress, stream, encoder)
            while not events.have_ended:
                some = await events.next()
                progress.cancel()
                for event in some:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Ended) and event.whole is not None:
                        self._count([event.whole])
                if events.have_ended:
                    await stream.finish(encoder.last_frames(some))
                else:
                    await stream.send(encoder.frames(some))
        finally:
            events.close()

    async def _tell_progress(
        self, scope: anyio.CancelScope, stream: EventStream, encoder: StreamEncoder
    ) -> None:
        """Tell how far the prompt is, after each silence, until the answer begins and the scope is cancelled."""
        desk, start_s = self._desk, self._desk.clock()
        with scope:
            while True:
                await anyio.sleep(desk.settings.keep_alive_s)
                slots = await desk.slots.ask()
                if told := self._progress_in(slots or (), start_s):
                    with anyio.CancelScope(shield=True):
                        await stream.send(encoder.progress(told))

    def _progress_in(self, slots: Sequence[SlotState], start_s: float) -> dict[str, Any]:
        """Return how far the prompt is; nothing where it waits, or is computed.

        Source: llama.cpp tools/server, `return_progress`.
        """
        for slot in slots:
            is_ours = slot.id is not None and slot.id.partition("[")[0] == self._exchange.id
            if is_ours and slot.n_computed < slot.n_prompt:
                return {
                    "total": slot.n_prompt,
                    "cache": slot.n_cached,
                    "processed": slot.n_computed,
                    "time_ms": round((self._desk.clock() - start_s) * 1e3),
                }
        return {}
