"""The engine: prompts in, answers out, computed together."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anyio.lowlevel import checkpoint

from cbatch.checks import (
    MAX_INT,
    check_flag,
    check_int,
    check_path,
    check_seconds,
    readable,
    reading,
    shown,
)
from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.kv import KvLedger
from cbatch.core.prompts import PromptPreparer
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.core.stats import EngineStats
from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import CBatchError, ConfigError, EngineClosedError, RequestCancelledError
from cbatch.interrupts import Postponed
from cbatch.messages import BatchPrompt, LookAhead, Prompt, as_id, as_prompt, as_prompts, is_source
from cbatch.options import RunOptions
from cbatch.progress import Progress, check_view, choose_view, closing_line
from cbatch.runtime.batch_response import BatchResponse
from cbatch.runtime.delivery import log_results
from cbatch.runtime.ids import RequestId
from cbatch.runtime.in_flight import InFlight
from cbatch.runtime.loop import Loop
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT, Mailbox
from cbatch.runtime.sequences import OptionsMerger, tokenize
from cbatch.runtime.submit import CANCELLED_EARLY, CLOSED_EARLY, Submitter
from cbatch.runtime.validation import check_adapters
from cbatch.runtime.waking import do_to_end, is_in_event_loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.backend import Backend
    from cbatch.progress import View
    from cbatch.response import BatchResult
    from cbatch.runtime.step_record import StepRecord


Exactness = Callable[[], str]
"""Returns the text of `Engine.exactness`; may compute for some seconds."""

IsStopped = Callable[[], bool]
"""Tells whether a load is to stop, for its result is not wanted any more."""

Opener = Callable[[IsStopped], "tuple[Backend, Exactness]"]
"""Loads a backend; returns it and its exactness. Once the load is to stop, errors that it raises are dropped."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of an engine whose model is loaded."""

    backend: Backend
    batcher: MultiRequestBatcher
    loop: Loop
    in_flight: InFlight
    submitter: Submitter
    stats: EngineStats
    exactness: Exactness | None


class Engine:
    """Continuous batching over one backend; `cbatch.load` makes one from a model file.

    Every method may be called from any thread. Use it as a context manager, sync or async, or call `close`.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        schedule: ScheduleOptions | None = None,
        threaded: bool = True,
        opener: Opener | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_mib: int = 10_240,
        model_name: str = "",
    ) -> None:
        """Take over `backend`, or the one that `opener` returns when it is first needed; `close` frees it.

        Args:
            backend: computes the steps; nothing else may use it from now on.
            options: defaults for every request of this engine.
            schedule: which requests run when.
            threaded: compute in a thread of its own; without, work is done by `step` and by waiting readers.
            opener: loads a backend.
            cache_dir: folder of cells kept on disk; None for the user's own.
            cache_mib: most that is kept there; beyond that, the least recently used cells are removed.
            model_name: the model's name in the log.

        Raises:
            ConfigError: an option is wrong.
        """
        if not isinstance(schedule, ScheduleOptions | None):
            raise ConfigError(f"schedule must be ScheduleOptions, not {shown(schedule)}")
        self._options, self._merger = RunOptions.of(options), OptionsMerger()
        self._schedule = schedule or ScheduleOptions()
        self._threaded = check_flag("threaded", threaded)
        self._opener = opener
        self._log = partial(log_results, model_name)
        self._cache_dir = None if cache_dir is None else _folder(cache_dir)
        self._cache_mib = check_int("cache_mib", cache_mib, 1, MAX_INT)
        self._made: _Parts | None = None
        self._opening = threading.RLock()
        self._is_closing = False
        self._exactness_found = ""
        if backend is not None:
            self._start(backend, None)

    def __repr__(self) -> str:
        if self._made is None:
            return "<Engine, not loaded>"
        return f"<Engine of {self.parallel} slots × {self.n_window} tokens>"

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        await checkpoint()  # a task that is cancelled already loads nothing
        try:
            await do_to_end(self.open, self._stop_loading)
        except Exception:
            raise
        except BaseException:  # cancelled: the block is not entered, so it would not close
            await do_to_end(self.close)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await do_to_end(self.close)

    def _stop_loading(self) -> None:
        self._is_closing = True

    def open(self) -> None:
        """Load the model now; without this call, the first use does. Once it is loaded, no effect.

        Raises:
            ModelLoadError, ConfigError, IncompatibleLlamaError: see `load`.
            EngineClosedError: the engine is closed, also where it never was loaded.
        """
        with Postponed() as signals, self._opening:
            if self._made is not None:
                self._made.loop.check_open()
                return
            if self._opener is None:
                raise EngineClosedError("the engine was closed before it was loaded")
            self._load(self._opener, lambda: signals.has_struck or self._is_closing)

    def _load(self, opener: Opener, is_stopped: IsStopped) -> None:
        """Load and start; where the load is to stop, free the backend and raise."""
        try:
            backend, exactness = opener(is_stopped)
        except CBatchError:
            if not is_stopped():
                raise
        else:
            if not is_stopped():
                self._start(backend, exactness)
                return
            backend.close()
        raise EngineClosedError("loading was broken off")

    def close(self) -> None:
        """End every request and free the model. Running ones end `cancelled`, queued ones with an error.

        A native call cannot be broken off: Ctrl-C meanwhile is raised when all is freed.
        """
        with Postponed():
            self._is_closing = True  # a load in another thread stops
            with self._opening:
                self._opener = None
            if self._made is not None:
                self._made.submitter.end(EngineClosedError(CLOSED_EARLY))
                self._made.loop.close()
                self._finalizer.detach()

    def _start(self, backend: Backend, exactness: Exactness | None) -> None:
        from cbatch.cache.store import open_store  # numpy is slow to import

        stats, schedule, memory = EngineStats(), self._schedule, backend.memory
        ledger = KvLedger(backend.n_slots, backend.n_window, memory)
        prompts = PromptPreparer(partial(tokenize, backend.vocab), backend.n_window)
        batcher = MultiRequestBatcher(ledger, prompts, schedule, backend.chunk_alignment)
        scheduler = ContinuousBatchScheduler(
            batcher,
            backend.n_batch,
            stats,
            schedule,
            chunk_alignment=backend.chunk_alignment,
            memory=memory,
            has_adapters=bool(backend.adapters),
        )
        store = open_store(self._cache_dir, self._cache_mib * 2**20)
        clock = time.perf_counter
        loop = Loop(backend, batcher, scheduler, stats, clock, store, is_threaded=self._threaded)
        in_flight = InFlight(loop, batcher, time.perf_counter)
        submitter = Submitter(
            backend, prompts, loop, in_flight, schedule, is_threaded=self._threaded
        )
        self._finalizer = weakref.finalize(self, loop.close)
        self._made = _Parts(backend, batcher, loop, in_flight, submitter, stats, exactness)
        if self._threaded:
            loop.start()

    @property
    def _parts(self) -> _Parts:
        if self._made is None:
            self.open()
        return cast("_Parts", self._made)

    @property
    def parallel(self) -> int:
        """Number of slots: requests that run at once."""
        return self._parts.backend.n_slots

    @property
    def n_window(self) -> int:
        """Tokens, prompt and answer, that one slot holds."""
        return self._parts.backend.n_window

    @property
    def options(self) -> RunOptions:
        """Defaults for options that neither a request nor its run sets."""
        return self._options

    @property
    def exactness(self) -> str:
        """`bitwise` where a request's tokens and logits do not depend on other requests, else `not guaranteed: reason`.

        Found by a probe on the loaded model: asking the first time takes a few seconds.
        """
        if not self._exactness_found:
            ask, reason = self._parts.exactness, "not guaranteed: this backend has no probe"
            self._exactness_found = ask() if ask else reason
        return self._exactness_found

    @property
    def fingerprint(self) -> dict[str, str]:
        """What answers depend on besides prompt and options, by name: model, adapters, chat template, settings.

        Slots, threads, sizes and devices are left out: they change the last bits of logits only.

        Reads some 32 MiB of the model's file, the first time.
        """
        backend = self._parts.backend
        try:
            said = dict(backend.fingerprint(tuple((name, 1.0) for name in backend.adapters)))
        except OSError:  # shared by an object that does not know its file, or changed since
            said = {"model": "unknown", "adapters": ", ".join(backend.adapters)}
        template = hashlib.sha256(backend.vocab.template.encode()).hexdigest()
        return {
            "model": said.get("model") or json.dumps(said, sort_keys=True),
            "adapters": said.get("adapters", ""),
            "chat template": template[:16],
            **backend.answer_settings,
        }

    def count_tokens(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> int:
        """Return how many tokens a prompt has, rendered by the chat template where it is a chat. Computes nothing.

        Raises:
            ConfigError: a malformed prompt.
            RequestFailedError: a token that is not in the vocabulary.
        """
        run_options = self._merger.over(RunOptions.of(options), self._options)
        return self._parts.submitter.sequences.count_tokens(as_prompt(prompt), run_options)

    def run(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        max_time_s: float | None = None,
        progress: bool | View = False,
    ) -> BatchResponse:
        """Queue a batch and return its response at once.

        Args:
            prompts: a list of prompts, each a message list, a string or a `BatchPrompt`; or a single one of these.
                A generator, or another iterable without a length, is read one by one in a thread of its own, a few
                prompts a slot ahead of the work and of the reader; a refused prompt fails alone, and an error that the
                generator raises reaches the reader behind the prompts before it.
            options: for every item of this batch; an item's own options come first.
            max_time_s: seconds for the whole batch; then running requests end `timeout` with their partial text,
                waiting ones end with `DeadlineError`, and no more prompts are read.
            progress: show the batch's progress on stderr: a live line on a terminal, else a line now and then; or a
                `View` that shows it.

        Raises:
            ConfigError: an empty batch, a malformed prompt, a wrong option. Nothing was queued.
            DuplicateIdError: an id occurs twice or is in flight. Nothing was queued.
            QueueFullError: with `max_queue` and `when_full="reject"`, more would wait. Nothing was queued.
            EngineClosedError: the engine is closed.
        """
        self._parts.loop.check_open()
        run_options = run_options_of(self, options)
        ends_s = time.perf_counter() + check_seconds("max_time_s", max_time_s)
        view = check_view(progress)
        before = self.stats() if view else None
        if is_source(prompts):
            with reading("prompts"):
                source = iter(cast("Iterable[Prompt]", prompts))
            mailbox = self._mailbox(0, n_ahead=N_AHEAD_PER_SLOT * self.parallel)
            self._parts.submitter.feed(source, run_options, ends_s, mailbox)
        else:
            items = as_prompts(prompts)
            mailbox = self._mailbox(len(items))
            self._parts.submitter.queue(items, run_options, ends_s, mailbox)
        return BatchResponse(mailbox, self._show(mailbox, view, before))

    def submit(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> BatchResponse:
        """Queue one prompt: a batch of one, for `response.result()`. Raises as `run` does."""
        return self.run([prompt], options=options)

    def extend(self, result: BatchResult, n_tokens: int) -> BatchResponse:
        """Continue the answer of a result that ended by its cap, by `cancel` or by a time limit.

        The prompt is not computed again while its cells are in memory. The new result has the whole answer, the
        earlier part first: the same as one run with the greater `max_tokens`. Id and options are those of the first
        request; a seeded sequence of random numbers goes on where it was.

        Args:
            result: as `response.result()` returned it.
            n_tokens: most tokens to add, at least 1.

        Raises:
            ConfigError: the result is another engine's, complete or altered, or `n_tokens` is not a number of tokens.
            DuplicateIdError: the result's id is in flight.
            EngineClosedError: the engine is closed.
        """
        self._parts.loop.check_open()
        mailbox = self._mailbox(1)
        self._parts.submitter.extend(result, n_tokens, mailbox)
        return BatchResponse(mailbox)

    def cancel(self, id: str) -> bool:
        """Cancel one request: it ends with its partial text, or with an error where it never ran.

        Args:
            id: an id from a response, chunk or result means its own request only, even if another request has an
                equal id by now; text of your own means the request that has this id now. The same in `pause` and
                `resume`.

        Returns:
            Whether the request was in flight.
        """
        return bool(self._parts.in_flight.cancel([_asked(id)]))

    def pause(self, id: str) -> bool:
        """Stop one request where it is; return False where it is not in flight, or paused already.

        It keeps its slot and cells until other requests need them. Where it waits for room in the queue, others pass.
        """
        return self._parts.in_flight.pause(_asked(id))

    def resume(self, id: str) -> bool:
        """Let a paused request go on; return False where it is not in flight, or not paused.

        Nothing is computed again while its cells are kept.
        """
        return self._parts.in_flight.resume(_asked(id))

    def cancel_all(self) -> int:
        """Cancel every request in flight, queued or running, and read no further prompts; return how many there were.

        A reader of a generator's results gets a `RequestCancelledError` behind the prompts that were read.
        """
        self._parts.submitter.end(RequestCancelledError(CANCELLED_EARLY))
        return self._parts.in_flight.cancel(list(self._parts.loop.routes))

    def stats(self) -> EngineStats:
        """Return a snapshot of the work done since the model was loaded, or since `reset_stats`."""
        return self._parts.loop.call(self._snapshot)

    def reset_stats(self) -> None:
        """Set the statistics to zero. Work in flight counts from now on."""
        self._parts.loop.call(self._parts.stats.clear)

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps, in the thread that computes: it must be quick. None ends that.

        If `into` raises, the error is logged and `into` is called no more; requests are not affected.
        """
        if into is not None and not callable(into):
            raise ConfigError(f"record_steps takes a function or None, not {shown(into)}")
        self._parts.loop.call(partial(setattr, self._parts.loop, "recorder", into))

    def step(self) -> bool:
        """Do one step in the caller's thread; False where there is nothing to do.

        Raises:
            ConfigError: the engine has a thread that does the steps.
        """
        if self._threaded:
            raise ConfigError("step() is for an engine loaded with threaded=False")
        self._parts.loop.check_open()
        return self._pump()

    def _mailbox(self, n_items: int, n_ahead: int | None = None) -> Mailbox:
        in_flight, pump = self._parts.in_flight, None if self._threaded else self._pump
        return Mailbox(n_items, in_flight, pump, n_ahead=n_ahead, log=self._log, engine=self)

    def _pump(self) -> bool:
        self._parts.submitter.fill()
        return self._parts.loop.pump()

    def _show(
        self, mailbox: Mailbox, progress: bool | View, before: EngineStats | None
    ) -> Progress | None:
        if not progress or before is None:
            return None
        view = choose_view(closing_line) if progress is True else progress
        return Progress(view, mailbox.items.counts, self.stats, before, self.parallel)

    def _snapshot(self) -> EngineStats:
        seen, stats = self._parts.batcher.occupancy(), self._parts.stats.copy()
        stats.n_waiting, stats.n_held = seen.n_waiting, seen.n_held
        stats.n_running, stats.n_paused = seen.n_running, seen.n_paused
        return stats


def run_options_of(engine: Engine, options: RunOptions | Mapping[str, Any] | None) -> RunOptions:
    """Return a run's options for items that set none.

    Raises:
        ConfigError: a wrong option, or an adapter that is not loaded.
    """
    settled = engine._merger.over(RunOptions.of(options), engine.options)
    check_adapters(settled, engine._parts.backend)
    return settled


def _asked(id: object) -> str:
    """Return a caller's id, checked; a handed-out id stays the same object, for it means one request."""
    return id if type(id) is RequestId else as_id(id)


def checked_tokens(engine: Engine, prompt: BatchPrompt, options: RunOptions) -> int:
    """Return how many tokens a prompt has; `options` are those of `run_options_of`. Computes nothing.

    A structure that the answer must match is compiled, as for a run.

    Raises:
        CBatchError: the error with which a run would refuse the prompt.
    """
    return engine._parts.submitter.checked(prompt, options)


def _folder(named: str | os.PathLike[str]) -> Path:
    from cbatch.cache.store import cells_folder  # numpy is slow to import

    with reading("cache_dir"):
        return cells_folder(check_path("cache_dir", named))


def load(
    model: str | os.PathLike[str] | Any = None,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    threaded: bool = True,
    look_ahead: LookAhead | None = None,
    **settings: Any,
) -> Engine:
    """Load a GGUF model and return an engine that runs `parallel` requests at once.

    Loads here and now, but not in an event loop: there `async with` loads in a worker thread.

    Args:
        model: path of a GGUF file (of a split model, the first part), or a `llama_cpp.Llama` to share the model of;
            without one, the small model that ships inside.
        options: defaults for every request.
        threaded: compute in a thread of its own; without, work is done by `Engine.step` and by waiting readers.
        look_ahead: prompts that will come, with their options; windows are sized for them.
        settings: fields of `cbatch.engine_options.EngineOptions` by name, which explains them: sizes (`parallel`,
            `n_ctx`, `ctx_per_seq`, `memory_mib`), memory (`kv`, `cache_type_k`, …), computing (`exact`, `n_batch`,
            `n_threads`, …), devices (`n_gpu_layers`, …), the cache (`cache_dir`, …) and scheduling (`policy`, …).

    Raises:
        ConfigError: a wrong setting, or `exact=True` where it cannot hold; the message says why.
        ModelLoadError: no such file, damaged, or not a model that generates text.
        IncompatibleLlamaError: the installed llama-cpp-python does not fit.
    """
    engine_options = EngineOptions.of(settings)
    opener = partial(_open_backend, model, engine_options, look_ahead)
    engine = Engine(
        options=options,
        schedule=engine_options,
        threaded=threaded,
        opener=opener,
        cache_dir=engine_options.cache_dir,
        cache_mib=engine_options.cache_mib,
        model_name=model_name(model),
    )
    if not is_in_event_loop():
        try:
            engine.open()
        except BaseException:  # Ctrl-C may have struck when it was loaded already
            engine.close()
            raise
    return engine


def model_name(model: Any) -> str:
    """Return what logs and records call a model: its file's name without the ending; "cbatch" for the shipped one."""
    with reading("model"):
        path = getattr(model, "model_path", model)
        is_path = isinstance(path, str | os.PathLike)
        return readable(Path(os.fsdecode(path)).stem) if is_path else "cbatch"


def _open_backend(
    model: Any, options: EngineOptions, look_ahead: LookAhead | None, is_stopped: IsStopped
) -> tuple[Backend, Exactness]:
    from cbatch.backend.load.loader import load_backend  # llama_cpp is slow to import

    return load_backend(model, options, look_ahead, is_stopped)
