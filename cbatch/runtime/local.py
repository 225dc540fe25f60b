"""An engine's backend and owner thread in this process."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from cbatch.chat.chat_format import ChatFormat
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.books import KvLedger
from cbatch.core.queue import head_start_s
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.errors import CBatchError, ConfigError, GrammarError, UnsupportedTaskError
from cbatch.media import shown_messages
from cbatch.runtime.ids import RequestId, check_own, own_id
from cbatch.runtime.in_flight import InFlight, Route
from cbatch.runtime.kept_rows import KeptRows
from cbatch.runtime.loop import Loop
from cbatch.runtime.mailbox import Parcel, refused
from cbatch.runtime.prompts import PromptLanes, PromptTokenizer, tokenize, without_delay
from cbatch.runtime.sequences import UNNAMED, SequenceMaker, check_in_vocab, extended
from cbatch.runtime.step_record import SlotState, StepRecord, slot_states
from cbatch.runtime.validation import (
    check_adapters,
    check_extension,
    check_priority,
    origin_of,
)
from cbatch.runtime.waking import is_in_event_loop
from cbatch.runtime.wants import SequenceWants, to_compile
from cbatch.stats import EngineStats
from cbatch.support.interrupts import note

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from pathlib import Path

    from cbatch.backend import Backend
    from cbatch.cache.store import CacheStore, NoStore
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.request import Request
    from cbatch.embedding import TextSettings
    from cbatch.engine_options import ScheduleOptions
    from cbatch.messages import BatchPrompt
    from cbatch.options import DryBreakers, Grammar, RunOptions
    from cbatch.response import BatchResult
    from cbatch.runtime.interface import OnAdmit, OnEnd, Submission, Target
    from cbatch.support.model_facts import ModelFacts

_N_AHEAD = 16
"""Fewest prompts that are tokenized ahead, so that a free slot does not wait for tokens."""

_N_CHECKED = 64
"""Structures for which the outcome of compiling is kept."""


class LocalRuntime:
    """A `Runtime` of one backend; see there. The owner thread starts at once."""

    def __init__(
        self,
        backend: Backend,
        schedule: ScheduleOptions,
        *,
        exactness: Callable[[], str] | None = None,
        is_threaded: bool = True,
        cache_dir: Path | None = None,
        cache_mib: int = 10_240,
        cache_media: bool = False,
    ) -> None:
        """Take over `backend`, which `close` frees; the other arguments are those of `Engine` and `EngineOptions`."""
        from cbatch.cache.store import open_store  # numpy is slow to import
        from cbatch.runtime.text_room import Texts

        self.backend, self.is_threaded = backend, is_threaded
        self._schedule, self._exactness = schedule, exactness
        self._unknown_model = f"unknown ({secrets.token_hex(8)})"  # differs from every other one
        self._stats = EngineStats()
        store = open_store(cache_dir, cache_mib * 2**20)
        chats, n_trained = ChatFormat(backend.vocab), backend.model_facts.n_ctx_train
        fit = partial(tokenize, backend.vocab, n_window=backend.n_window, n_trained=n_trained)
        kept_rows = KeptRows(store, backend.vocab) if cache_media else None
        self._prompts = PromptTokenizer(fit, backend.n_window, chats, backend.vocab, kept_rows)
        self._lanes = PromptLanes(
            self._prompts, max(_N_AHEAD, backend.n_slots), is_threaded=is_threaded
        )
        self.loop = loop = self._made_loop(store)
        self._can_generate = backend.model_facts.can_generate
        self.texts = Texts(
            backend,
            loop.routes,
            self._stats,
            is_threaded=is_threaded,
            do_beside=loop.do_beside if is_threaded and self._can_generate else None,
        )
        loop.end_texts, loop.is_inside_texts = self.texts.close, self._is_in_texts
        self.orders = InFlight(loop, self.batcher, time.perf_counter, self.texts)
        self.sequences = SequenceMaker(backend, schedule, chats)
        self._submitting = threading.RLock()  # a handler of a signal may submit, too
        self._wrong_with = lru_cache(_N_CHECKED)(self._compile)
        if is_threaded:
            loop.start()

    def _made_loop(self, store: CacheStore | NoStore) -> Loop:
        backend, schedule, lanes = self.backend, self._schedule, self._lanes
        ledger = KvLedger(backend.n_slots, backend.n_window, backend.memory)
        wants = SequenceWants(lanes.order, n_ahead=lanes.n_ahead, takes_long=lanes.takes_long)
        self.batcher = MultiRequestBatcher(ledger, wants, schedule, backend.cuts)
        self._scheduler = ContinuousBatchScheduler(
            self.batcher,
            backend.n_batch,
            self._stats,
            schedule,
            cuts=backend.cuts,
            memory=backend.memory,
            has_adapters=bool(backend.adapters),
        )
        return Loop(
            backend,
            self._scheduler,
            self._stats,
            time.perf_counter,
            store,
            lanes,
            wants,
            is_threaded=self.is_threaded,
        )

    # ---- questions ----

    @property
    def n_slots(self) -> int:
        """Requests that run at once."""
        return self.backend.n_slots

    @property
    def n_window(self) -> int:
        """Tokens, prompt and answer, that one slot holds."""
        return self.backend.n_window

    @property
    def is_apart(self) -> bool:
        """Whether other processes compute: they do not."""
        return False

    @property
    def has_limit(self) -> bool:
        """Whether queueing may wait for room in the queue."""
        return self._schedule.max_queue is not None

    @property
    def ids(self) -> Container[str]:
        """The ids in flight."""
        return self.orders.routes

    def listen(self, on_end: OnEnd | None, on_admit: OnAdmit | None = None) -> None:
        """Have a listener told of the end and of admissions; see `Runtime`."""
        self.loop.on_end = on_end
        self.loop.on_admit = self.texts.on_admit = on_admit

    def _is_in_texts(self) -> bool:
        return self.texts.is_current_thread

    def check_open(self) -> None:
        """Raise an `EngineClosedError` where the engine is closed, has failed, or belongs to the parent process."""
        self.loop.check_open()

    def check_options(self, options: RunOptions) -> None:
        """Raise a `ConfigError` for options of a run that name an adapter which is not loaded."""
        check_adapters(options, self.backend)

    def n_tokens_of(self, prompt: BatchPrompt, options: RunOptions) -> int:
        """Return how many tokens a prompt has; computes nothing."""
        return len(self.tokens_of(prompt, options))

    def tokens_of(self, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
        """Return a prompt's tokens; computes nothing."""
        work = partial(tokenize, self.backend.vocab, prompt, options)
        return without_delay(work, prompt, options)

    def token_lists_of(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [self.backend.vocab.tokenize(text) for text in texts]

    def text_of(self, prompt: BatchPrompt, options: RunOptions) -> str:
        """Return a chat as the model sees it, or a raw prompt as it is."""
        if prompt.messages is not None:
            shown, variables = shown_messages(prompt.messages), options.template_variables
            work = partial(self.backend.vocab.render_text, shown, variables)
            return without_delay(work, prompt, options)
        if prompt.prompt is not None:
            return prompt.prompt
        return b"".join(self.pieces_of(prompt.tokens or ())).decode("utf-8", "replace")

    def pieces_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of tokens, control tokens written out."""
        vocab = self.backend.vocab
        check_in_vocab(tokens, vocab)
        return [vocab.shown_piece(token) for token in tokens]

    def model_facts(self) -> ModelFacts:
        """Return what the model is."""
        found = self.backend.model_facts
        return replace(found, limits_thinking=ChatFormat(self.backend.vocab).limits_thinking)

    def checked(self, prompt: BatchPrompt, options: RunOptions) -> int:
        """Return how many tokens a prompt has. Raises the errors with which it would end before it runs."""
        self._check_generates()
        driver, *_ = self.sequences.of_prompt(prompt, UNNAMED, options, 0.0, math.inf)
        without_delay(partial(self._prompts.tokenize, driver), prompt, driver.request.options)
        if driver.error is not None:
            raise driver.error
        for want in to_compile(driver):
            if (wrong := self._wrong_with(want)) is not None:
                raise GrammarError(*wrong)
        return driver.n_given

    def _compile(self, want: Grammar | DryBreakers) -> tuple[str, str] | None:
        """Compile a structure; return None, or the option and the compiler's words where that fails."""
        found = self.loop.compiled(want)
        return (found.kind, found.reason) if isinstance(found, GrammarError) else None

    def exactness(self) -> str:
        """Return the text of `Engine.exactness`."""
        ask = self._exactness
        return ask() if ask else "not guaranteed: this backend has no probe"

    def fingerprint(self) -> dict[str, str]:
        """Return what answers depend on besides prompt and options. See `Engine.fingerprint`."""
        backend = self.backend
        names = sorted(backend.adapters)
        try:
            said = dict(backend.fingerprint(()))
            digests = [backend.fingerprint(((name, 1.0),)).get("adapters", "") for name in names]
        except OSError:  # the file is not known, or changed while it was loaded
            said, digests = {"model": self._unknown_model}, ["unknown"] * len(names)
        template = hashlib.sha256(backend.vocab.template.encode()).hexdigest()
        return {
            "model": said.get("model") or json.dumps(said, sort_keys=True),
            "adapters": ", ".join(map("{}: {}".format, names, digests)),
            "chat template": template[:16],
            **backend.answer_settings,
        }

    # ---- requests ----

    def add(self, submission: Submission) -> None:
        """Check requests and queue them. See `Runtime`."""
        if submission.texts is not None:
            self._enter_texts(submission, submission.texts)()
            return
        with self.orders.undone_if_it_raises() as routes:
            self._queue(submission, routes, *self._enter(submission, routes))

    def enter(self, submission: Submission) -> Callable[[], None]:
        """Check requests and make them known; return what queues them, and is to be called. Else as `add`."""
        if submission.texts is not None:
            return self._enter_texts(submission, submission.texts)
        with self.orders.undone_if_it_raises() as routes:
            return partial(self._queue, submission, routes, *self._enter(submission, routes))

    def _enter(
        self, asked: Submission, routes: dict[str, Route]
    ) -> tuple[list[SequenceDriver], list[Parcel]]:
        """Return the sequences of requests, which are known by their routes now, and what is told of refused ones."""
        self._check_generates()
        now = time.perf_counter() - asked.age_s
        made = [self._of_prompt(asked, i, now) for i in range(len(asked.prompts))]
        items = {i: item for i, item in enumerate(made) if isinstance(item, list)}
        drivers = [driver for item in items.values() for driver in item]
        n_limit = self._schedule.max_queue
        is_rejected = self._schedule.when_full == "reject" and not (asked.is_fed or asked.is_paused)
        if is_rejected and n_limit is not None:
            self.orders.check_room(len(drivers), n_limit)  # before a thread tokenizes the prompts
        ids, places = [asked.ids[i] for i in items], [asked.places[i] for i in items]
        note(self._submitting)
        with self._submitting:
            self.orders.add(routes, asked.target, ids, [*items.values()], places)
        refusals = [
            refused(asked.ids[i], asked.places[i], error)
            for i, error in enumerate(made)
            if isinstance(error, ConfigError)
        ]
        if asked.is_checked:
            for driver in drivers:
                driver.is_early = True
        self._lanes.order_first(drivers, self.batcher.n_waiting)
        return drivers, refusals

    def start_chats(self) -> None:
        """Start what renders chats, before the first one. Raises a `ModelLoadError` where the system refuses it."""
        if self._can_generate:
            self.backend.vocab.start_chats()

    def _check_generates(self) -> None:
        """Raise an `UnsupportedTaskError` where the model generates no text."""
        if not self._can_generate:
            raise UnsupportedTaskError("generate", "it only embeds texts or reranks documents")

    def _enter_texts(self, asked: Submission, settings: TextSettings) -> Callable[[], None]:
        """Check texts to embed and make them known; return what queues them."""
        self.check_open()
        self.texts.check(settings)
        check_priority(asked.options, self._schedule)
        now = time.perf_counter() - asked.age_s
        options = asked.options
        ends_s = min(
            asked.ends_s, now + (math.inf if options.timeout_s is None else options.timeout_s)
        )
        routes: dict[str, Route] = {
            id: Route(asked.target, place, id)
            for id, place in zip(asked.ids, asked.places, strict=True)
        }
        texts = [
            self.texts.text(
                routes[id],
                prompt,
                settings,
                head_start_s=head_start_s(options, self._schedule),
                submitted_s=now,
                deadline_s=ends_s,
            )
            for id, prompt in zip(asked.ids, asked.prompts, strict=True)
        ]
        note(self._submitting)
        with self._submitting:
            self.orders.add_texts(routes)

        def queue() -> None:
            try:
                self.texts.put(texts)
            except CBatchError:  # nothing was queued
                self.orders.drop(routes)
                raise

        return queue

    def _of_prompt(
        self, asked: Submission, i: int, now: float
    ) -> list[SequenceDriver] | ConfigError:
        """Return the sequences of one prompt, or the error that it alone ends with."""
        prompt, id, name = asked.prompts[i], asked.ids[i], asked.names[i]
        try:
            return self.sequences.of_prompt(
                prompt, id, asked.options, now, asked.ends_s, name=name, job=asked.job
            )
        except ConfigError as error:
            if asked.is_group and self.sequences.is_own_fault(prompt, asked.options):
                return error
            raise

    def _queue(
        self,
        asked: Submission,
        routes: dict[str, Route],
        drivers: Sequence[SequenceDriver],
        refusals: Sequence[Parcel],
    ) -> None:
        with self.orders.undone_if_it_raises(routes):
            if asked.is_paused:
                self.orders.submit_paused(drivers)
            else:
                self._submit(drivers, is_fed=asked.is_fed, may_wait=asked.may_wait)
        for parcel in refusals:
            asked.target.deliver(*parcel)

    def request_of(self, prompt: BatchPrompt, id: str, options: RunOptions) -> Request:
        """Return what a prompt asks for, as `enter` makes it, for the `Origin` of a result from elsewhere."""
        return self.sequences.request(prompt, id, options, 0.0, math.inf)

    def extend(
        self, result: BatchResult, n_tokens: int, target: Target, *, is_paused: bool = False
    ) -> RequestId:
        """Queue a request that continues a result; return its id. See `Runtime`."""
        origin = origin_of(result, self.sequences.owner)
        n_tokens = check_extension(result, n_tokens)
        now, id = time.perf_counter(), own_id(origin.request.id)
        with self.orders.undone_if_it_raises() as routes:
            note(self._submitting)
            with self._submitting:
                check_own((id,), self.ids)
                request = extended(origin, id, result, n_tokens, now)
                driver = self.sequences.of_request(request, now)
                self.orders.add(routes, target, [id], [[driver]])
            if is_paused:
                self.orders.submit_paused([driver])
            else:
                self._submit([driver], is_fed=False, may_wait=not is_in_event_loop())
        return id

    def _submit(self, drivers: Sequence[SequenceDriver], *, is_fed: bool, may_wait: bool) -> None:
        """Submit sequences whose routes are set; may wait for room in the queue, so not under a lock."""
        n_limit = self._schedule.max_queue
        if n_limit is None:
            self.orders.submit(drivers)
        elif is_fed:
            self.orders.submit_as_room_comes(drivers, n_limit)
        elif self._schedule.when_full == "reject":
            self.orders.submit_within(drivers, n_limit)
        elif not may_wait:
            self.orders.submit_late(drivers, n_limit)
        else:
            self.orders.submit_as_room_comes(drivers, n_limit)

    def cancel_all(self) -> int:
        """End every request in flight; return how many there were."""
        return self.orders.cancel(list(self.orders.routes))

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done by the owner thread at `when_s` of its clock."""
        self.loop.call_at(when_s, action)

    # ---- the owner ----

    def slots(self) -> list[SlotState]:
        """Return what each slot holds now."""
        return self.loop.look(lambda: slot_states(self.batcher.residents()))

    def stats(self) -> EngineStats:
        """Return a snapshot of the work done."""
        return self.loop.look(self._snapshot)

    def _snapshot(self) -> EngineStats:
        seen, stats = self.batcher.occupancy(), self._stats.copy()
        stats.n_waiting, stats.n_held = seen.n_waiting, seen.n_held
        stats.n_running, stats.n_paused = seen.n_running, seen.n_paused
        stats.n_cells, stats.n_pool = seen.n_cells, seen.n_pool
        stats.n_checkpoints = seen.n_checkpoints
        stats.n_checkpoint_bytes = seen.n_checkpoint_bytes
        costs = self._scheduler.costs
        stats.cost_rows_s = {str(n): s for n, s in costs.widths_s.items()}
        if costs.prompt is not None:
            stats.cost_prompt_s, stats.cost_token_s, stats.cost_cell_s = costs.prompt
        stats.cost_budget_tokens = {
            str(n): k for n, k in self._scheduler.budget.beside_rows().items()
        }
        return stats

    def reset_stats(self) -> None:
        """Set the statistics to zero."""
        self.loop.look(self._stats.clear)

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps, in the owner thread. None ends that."""
        self.loop.look(partial(setattr, self.loop, "recorder", into))

    def pump(self) -> bool:
        """Do one step in the caller's thread, where there is no other."""
        has_worked = self.texts.pump(may_wait=False)
        return self.loop.pump() or has_worked or self.texts.pump(may_wait=True)

    @property
    def outage(self) -> None:
        """None: an open engine in this process always computes."""

    def close(self, within_s: float | None = None) -> None:
        """End every request and free the model. A running step is always waited for."""
        self.loop.close()
