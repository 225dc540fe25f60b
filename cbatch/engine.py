"""The engine: prompts in, answers out, all sharing the same slots."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from cbatch.core.batcher import MultiRequestBatcher
from cbatch.core.driver import Request, SequenceDriver
from cbatch.core.kv import KvLedger
from cbatch.core.scheduler import ContinuousBatchScheduler
from cbatch.core.stats import EngineStats
from cbatch.errors import CBatchError, ConfigError, EngineClosedError, RequestFailedError
from cbatch.messages import (
    BatchPrompt,
    Prompt,
    as_prompt,
    as_prompts,
    free_id,
    is_source,
    with_ids,
)
from cbatch.options import EngineOptions, RunOptions
from cbatch.response import BatchResponse
from cbatch.runtime.feed import N_AHEAD_PER_SLOT, Feed
from cbatch.runtime.loop import Loop
from cbatch.runtime.mailbox import Mailbox, refused

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from cbatch.backend import Backend, Vocab
    from cbatch.runtime.progress import Progress, View


Exactness = Callable[[], str]
"""Finds out what `Engine.exactness` says."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What an engine has once its model is loaded."""

    backend: Backend
    batcher: MultiRequestBatcher
    loop: Loop
    stats: EngineStats
    exactness: Exactness | None


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of `Engine.run`; `ids` in order of places; `given` are those of prompts read one by one."""

    number: int
    options: RunOptions
    mailbox: Mailbox
    ids: list[str]
    given: dict[str, Any]


class Engine:
    """Continuous batching over one backend; `cbatch.load` makes one from a model file.

    Every method may be called from any thread. Use it as a context manager, sync or async, or call `close`.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        threaded: bool = True,
        opener: Callable[[], tuple[Backend, Exactness]] | None = None,
    ) -> None:
        """Take over `backend`, or what `opener` returns when it is first needed; `close` frees it.

        Args:
            backend: what computes; nobody else may use it from now on.
            options: defaults for every request of this engine.
            threaded: compute in a thread of its own; without, work is done by `step` and by waiting readers.
            opener: loads a backend; returns it and what finds out its exactness.

        Raises:
            ConfigError: an option is wrong.
        """
        self._options = RunOptions.of(options)
        self._threaded = threaded
        self._opener = opener
        self._made: _Parts | None = None
        self._opening = threading.RLock()
        self._exactness_found = ""
        self._submitting = threading.Lock()
        self._n_runs = count()
        # weak, for a feed lives as long as its thread or its batch; a dict, for its order
        self._feeds: weakref.WeakValueDictionary[int, Feed] = weakref.WeakValueDictionary()
        if backend is not None:
            self._start(backend, None)

    def __repr__(self) -> str:
        if self._made is None:
            return "<Engine, not loaded>"
        return f"<Engine of {self.parallel} slots × {self.n_window} tokens>"

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        await anyio.to_thread.run_sync(self.open)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def open(self) -> None:
        """Load the model now; without this call, the first use does. Once it is loaded, no effect.

        Raises:
            ModelLoadError, ConfigError, IncompatibleLlamaError: see `load`.
            EngineClosedError: it was closed before it was loaded.
        """
        with self._opening:
            if self._made is not None:
                return
            if self._opener is None:
                raise EngineClosedError("the engine was closed before it was loaded")
            self._start(*self._opener())

    def close(self) -> None:
        """End every request and free the model. Running ones end `cancelled`, queued ones with an error."""
        with self._opening:
            self._opener = None
        if self._made is not None:
            self._end_feeds()
            self._made.loop.close()
            self._finalizer.detach()  # now, not before: Ctrl-C may have struck first

    def _start(self, backend: Backend, exactness: Exactness | None) -> None:
        stats = EngineStats()
        ledger = KvLedger(backend.n_slots, backend.n_window)
        batcher = MultiRequestBatcher(ledger, partial(_tokenize, backend.vocab))
        scheduler = ContinuousBatchScheduler(
            batcher, backend.n_batch, stats, n_piece=backend.n_piece
        )
        loop = Loop(backend, scheduler, time.perf_counter)
        self._finalizer = weakref.finalize(self, loop.close)
        self._made = _Parts(backend, batcher, loop, stats, exactness)
        if self._threaded:
            loop.start()

    @property
    def _parts(self) -> _Parts:
        if self._made is None:
            self.open()
        return cast("_Parts", self._made)

    @property
    def _loop(self) -> Loop:
        return self._parts.loop

    @property
    def _backend(self) -> Backend:
        return self._parts.backend

    @property
    def parallel(self) -> int:
        """Number of slots: requests that run at once."""
        return self._backend.n_slots

    @property
    def n_window(self) -> int:
        """Tokens, prompt and answer, that one slot holds."""
        return self._backend.n_window

    @property
    def exactness(self) -> str:
        """`bitwise` where a request's tokens and logits do not depend on its company, else `not guaranteed: reason`.

        Found by a probe on the loaded model: asking the first time takes a few seconds.
        """
        if not self._exactness_found:
            ask, reason = self._parts.exactness, "not guaranteed: this backend has no probe"
            self._exactness_found = ask() if ask else reason
        return self._exactness_found

    def run(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        progress: bool | View = False,
    ) -> BatchResponse:
        """Queue a batch and return its response at once.

        Args:
            prompts: a list of prompts, each a message list, a string or a `BatchPrompt`; or a single one of these.
                A generator, or another iterable without a length, is read one by one in a thread of its own, a few
                prompts a slot ahead of the work and of the reader; a prompt in it that is refused fails alone, and
                an error that it raises reaches the reader behind what was read before.
            options: for every item of this batch; an item's own options come first.
            progress: show on stderr how far the batch is: a live line on a terminal, else a line now and then; a
                `View` shows it as it likes.

        Raises:
            ConfigError: an empty batch, a malformed prompt, a wrong option. Nothing was queued.
            DuplicateIdError: an id stands twice or is in flight. Nothing was queued.
            EngineClosedError: the engine is closed.
        """
        self._loop.check_open()
        run_options = RunOptions.of(options).over(self._options)
        before = self.stats() if progress else None
        if is_source(prompts):
            run = self._feed(iter(cast("Iterable[Prompt]", prompts)), run_options)
        else:
            run = self._queue(as_prompts(prompts), run_options)
        return BatchResponse(run.ids, run.mailbox, self._show(run, progress, before))

    def submit(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> BatchResponse:
        """Queue one prompt: a batch of one, for `response.result()`. Raises as `run` does."""
        return self.run([prompt], options=options)

    def cancel(self, id: str) -> bool:
        """Cancel one request: it ends with its partial text, or with an error where it never ran.

        Returns:
            False where no such request is in flight.
        """
        return bool(self._loop.cancel([id]))

    def cancel_all(self) -> int:
        """Cancel every request that is in flight now, queued or running, and read no further prompts of their runs.

        Returns:
            How many were in flight.
        """
        self._end_feeds()
        return self._loop.cancel(list(self._loop.routes))

    def stats(self) -> EngineStats:
        """Return a snapshot of the work done so far."""
        return self._loop.call(self._snapshot)

    def step(self) -> bool:
        """Do one step by hand; False where there is nothing to do.

        Raises:
            ConfigError: the engine has a thread that does this.
        """
        if self._threaded:
            raise ConfigError("step() is for an engine loaded with threaded=False")
        self._loop.check_open()
        return self._pump()

    def _driver(self, item: BatchPrompt, run_options: RunOptions, now: float) -> SequenceDriver:
        options = RunOptions.of(item.options).over(run_options)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        vocab = self._backend.vocab
        highest = max(options.stop_token_ids or (0,))
        if highest >= vocab.n_vocab:
            raise ConfigError(
                f"stop_token_ids has {highest}, which is not in the vocabulary of {vocab.n_vocab}"
            )
        own = () if options.ignore_eos else vocab.end_tokens
        stop_tokens = tuple(sorted({*own, *(options.stop_token_ids or ())}))
        sampling = options.sampling(self._backend.sampling_defaults, seed)
        request = Request(str(item.id), item, options, sampling, stop_tokens)
        return SequenceDriver.of(request, vocab.piece, now)

    def _queue(self, prompts: Sequence[BatchPrompt], options: RunOptions) -> _Run:
        now = time.perf_counter()
        with self._submitting:
            number = next(self._n_runs)
            prompts = with_ids(prompts, self._loop.routes, number)
            drivers = [self._driver(prompt, options, now) for prompt in prompts]
            ids = [d.request.id for d in drivers]
            run = _Run(number, options, self._mailbox(len(ids)), ids, {})
            self._send(run.mailbox, drivers)
        return run

    def _feed(self, source: Iterator[Prompt], options: RunOptions) -> _Run:
        mailbox = self._mailbox(0, n_ahead=N_AHEAD_PER_SLOT * self.parallel)
        run = _Run(next(self._n_runs), options, mailbox, [], {})
        feed = mailbox.feed = Feed(source, mailbox, partial(self._put, run))
        self._feeds[run.number] = feed
        if self._threaded:
            feed.start()
        return run

    def _put(self, run: _Run, item: Any) -> None:
        """Queue one prompt that was read; one that is refused ends at once, with its error."""
        place = run.mailbox.expect()
        if place is None:  # everybody left while it was read
            return
        with self._submitting:
            taken = ChainMap(run.given, self._loop.routes)
            run.ids.append(free_id(place, run.number, taken))
            try:
                prompt = as_prompt(item)
                prompt = prompt if prompt.id else replace(prompt, id=run.ids[place])
                [prompt] = with_ids([prompt], taken, run.number)
                run.ids[place] = str(prompt.id)
                driver = self._driver(prompt, run.options, time.perf_counter())
                self._send(run.mailbox, [driver], place)
            except CBatchError as error:
                run.mailbox.deliver(*refused(run.ids[place], place, error))
                if isinstance(error, EngineClosedError):
                    run.mailbox.end_feed()
            run.given[run.ids[place]] = None
        # everybody may have left meanwhile, too early for this one to be cancelled with the others
        if not run.mailbox.is_fed:
            self._cancel_batch_soon(run.mailbox)

    def _mailbox(self, n_items: int, *, n_ahead: int | None = None) -> Mailbox:
        # through self: a response keeps its engine from being collected
        return Mailbox(
            n_items,
            self._cancel_batch,
            None if self._threaded else self._pump,
            self._cancel_batch_soon,
            n_ahead=n_ahead,
        )

    def _cancel_batch(self, mailbox: Mailbox) -> int:
        return self._loop.cancel_batch(mailbox)

    def _cancel_batch_soon(self, mailbox: Mailbox) -> None:
        self._loop.cancel_batch_soon(mailbox)

    def _send(
        self, mailbox: Mailbox, drivers: Sequence[SequenceDriver], first_place: int = 0
    ) -> None:
        places = enumerate(drivers, first_place)
        self._loop.routes.update((d.request.id, (mailbox, i)) for i, d in places)
        self._loop.submit(drivers)

    def _pump(self) -> bool:
        for feed in list(self._feeds.values()):
            feed.fill()
        return self._loop.pump()

    def _end_feeds(self) -> None:
        for feed in list(self._feeds.values()):
            feed.end()

    def _show(
        self, run: _Run, progress: bool | View, before: EngineStats | None
    ) -> Progress | None:
        if not progress or before is None:
            return None
        from cbatch.runtime.progress import (
            Progress,
            choose_view,
            closing_line,
        )  # rich is slow to import

        view = choose_view(closing_line) if progress is True else progress
        return Progress(view, run.mailbox.counts, self.stats, before, self.parallel)

    def _snapshot(self) -> EngineStats:
        batcher, stats = self._parts.batcher, self._parts.stats
        return replace(
            stats,
            n_waiting=batcher.n_waiting,
            n_running=batcher.ledger.n_lent,
            n_finished=dict(stats.n_finished),
        )


def _tokenize(vocab: Vocab, prompt: BatchPrompt) -> Sequence[int]:
    if prompt.prompt is not None:
        return vocab.tokenize(prompt.prompt)
    if prompt.messages is not None:
        return vocab.render(prompt.messages)
    tokens = prompt.tokens or ()
    if tokens and max(tokens) >= vocab.n_vocab:
        raise RequestFailedError(f"token {max(tokens)} is not in the vocabulary of {vocab.n_vocab}")
    return tokens


def load(
    model: str | os.PathLike[str] | Any = None,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    threaded: bool = True,
    **settings: Any,
) -> Engine:
    """Load a GGUF model and return an engine that runs `parallel` requests at once.

    Loads here and now, but not in an event loop: there `async with` loads in a worker thread.

    Args:
        model: path of a GGUF file (of a split model, the first part), or a `llama_cpp.Llama` to share the model of;
            without one, the small model that ships inside.
        options: defaults for every request.
        threaded: compute in a thread of its own; without, work is done by `Engine.step` and by waiting readers.
        settings: by name, those of `EngineOptions`:
            `parallel` (16): slots, 1 … 256;
            `n_ctx`: cells in total, or `ctx_per_seq`: one slot's window; default: a window of 2,048 or what the model
            was trained for; llama.cpp rounds a slot's window up to a multiple of 256;
            `kv` ("auto"): "partitioned" or "unified" memory; auto is partitioned;
            `exact` (False): promise that tokens do not depend on company: proven by a probe, else refused;
            `flash_attn` ("auto"), `n_batch` (2048, most tokens in a step), `n_ubatch` (512, most in a graph run),
            `n_threads` (the cores this process may use), `n_gpu_layers` (llama.cpp's default: all),
            `use_mmap` (True), `use_mlock` (False),
            `chat_template`: "chatml" or a Jinja template, instead of the model's own.

    Raises:
        ConfigError: a wrong setting, or `exact=True` where it cannot hold; the message says why.
        ModelLoadError: no such file, damaged, or not a model that generates text.
        IncompatibleLlamaError: the installed llama-cpp-python does not fit.
    """
    opener = partial(_open_backend, model, EngineOptions.of(settings))
    engine = Engine(options=options, threaded=threaded, opener=opener)
    if not _is_in_event_loop():
        engine.open()
    return engine


def _open_backend(model: Any, options: EngineOptions) -> tuple[Backend, Exactness]:
    from cbatch.backend.load import load_backend  # llama_cpp is slow to import

    return load_backend(model, options)


def _is_in_event_loop() -> bool:
    try:
        current_token()
    except RuntimeError:
        return False
    return True
