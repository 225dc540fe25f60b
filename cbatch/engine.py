"""The engine: prompts in, answers out, computed together."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from anyio.lowlevel import checkpoint

from cbatch.backend.named_library import use_library
from cbatch.embedding import TextSettings, as_text
from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import (
    CBatchError,
    ConfigError,
    EngineClosedError,
    ModelLoadError,
    NoThreadError,
    RequestCancelledError,
    UnsupportedTaskError,
    words_of,
)
from cbatch.messages import BatchPrompt, LookAhead, Prompt, as_id, as_prompt, as_prompts, is_source
from cbatch.options import RunOptions
from cbatch.progress import Progress, check_view, choose_view, closing_line
from cbatch.runtime.async_source import AsyncSource
from cbatch.runtime.batch_response import BatchResponse, OneAnswer
from cbatch.runtime.copies import Copies
from cbatch.runtime.delivery import log_results
from cbatch.runtime.ids import RequestId
from cbatch.runtime.interface import Outage
from cbatch.runtime.local import LocalRuntime
from cbatch.runtime.mailbox import N_AHEAD_PER_SLOT, Mailbox
from cbatch.runtime.no_effect import idle_settings
from cbatch.runtime.reranking import Judge, classified, judged
from cbatch.runtime.scoring import Continuations, Scores, Tokenizer, WholeText
from cbatch.runtime.sequences import OptionsMerger
from cbatch.runtime.submit import CANCELLED_EARLY, CLOSED_EARLY, FeedReading, QueriedText, Submitter
from cbatch.runtime.text_responses import EmbedResponse, RerankResponse
from cbatch.runtime.waking import do_to_end, is_in_event_loop
from cbatch.support.checks import (
    MAX_INT,
    check_flag,
    check_int,
    check_path,
    check_seconds,
    check_string,
    reading,
    shown,
    token_ids,
)
from cbatch.support.interrupts import Postponed
from cbatch.support.logs import Log
from cbatch.support.plain import int_of, list_of, text_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.backend import Backend
    from cbatch.embedding import Pooling, Truncate
    from cbatch.messages import Message
    from cbatch.progress import View
    from cbatch.response import BatchResult, Score
    from cbatch.runtime.interface import Runtime
    from cbatch.runtime.row_comparison import RowComparison
    from cbatch.runtime.scoring import Pair
    from cbatch.runtime.step_record import SlotState, StepRecord
    from cbatch.stats import EngineStats
    from cbatch.support.model_facts import ModelFacts


T = TypeVar("T")

_log = Log("cbatch")

IsStopped = Callable[[], bool]
"""Returns whether loading should stop because nobody wants its result any more."""

N_TEXTS_AHEAD = 2048
"""Texts of a generator in hand: enough to fill micro-batches, and for results that a reader has not taken. Our
choice."""

_N_QUESTION = 2**14
"""Characters of texts that are tokenized by one question, about: our choice; it takes some 20 ms."""

_N_SHORT = 64
"""Characters that a shorter text counts as."""

Opener = Callable[[IsStopped], "Runtime"]
"""Loads a model and returns its runtime. Once the load is to stop, errors that it raises are dropped."""


class Engine:
    """Continuous batching over one backend; `cbatch.load` makes one from a model file.

    Every method may be called from any thread. Use it as a context manager, sync or async, or call `close`.

    In the thread that computes, during a step (a function of `record_steps`, a log handler, a `__del__`), commands take
    effect after the step: `cancel`, `pause` and `resume` return what they would do at that moment, `close` returns at
    once, and calls that wait, such as `response.result()`, raise an `InsideStepError`. The same holds in every thread
    for handlers of cbatch's log, whose lock other threads may want. There, and in a `__del__` that runs while cbatch
    holds a lock, questions to a worker raise too; `stats` returns the last snapshot.
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
        self._opener = opener
        self.model_name = model_name
        """What the log and records call the model."""
        self._log = partial(log_results, model_name)
        self._made: tuple[Runtime, Submitter] | None = None
        self._opening = threading.RLock()
        self._is_closing = False
        self._is_entered = False
        """Whether `async with` has begun to load it."""
        self._exactness_found = ""
        self._facts: ModelFacts | None = None
        is_threaded = check_flag("threaded", threaded)
        folder = cache_folder(cache_dir)
        cache_mib = check_int("cache_mib", cache_mib, 1, MAX_INT)
        if backend is not None:
            schedule = schedule or ScheduleOptions()
            self._start(
                LocalRuntime(
                    backend,
                    schedule,
                    is_threaded=is_threaded,
                    cache_dir=folder,
                    cache_mib=cache_mib,
                )
            )

    def __repr__(self) -> str:
        name = f" of {self.model_name!r}" * bool(self.model_name)
        if self._made is None:
            return f"<Engine{name}, {'closed' if self._is_closing else 'not loaded'}>"
        state = "" if (outage := self.outage) is None else f", {outage.cause}"
        return f"<Engine{name}: {self.parallel} slots × {self.n_window:,} tokens{state}>"

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        self._is_entered = True
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

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: threads and native memory stay in their process."""
        raise ConfigError(
            "an Engine cannot be pickled or copied: send cbatch.EngineSpec(model, …) to the other process, and have it "
            "call load() or shared() there"
        )

    def warn_unless_opened(self) -> None:
        """Log a warning if nobody has begun to load the engine: its first use will, in an event loop's thread."""
        if self._made is None and not (self._is_entered or self._is_closing):
            _log.warn(
                "the model is not loaded yet: in an event loop, load() leaves that to `async with`, or to the first "
                "use, which blocks the loop; to load at once, use `await cbatch.load_async(…)`"
            )

    def open(self) -> None:
        """Load the model now; without this call, the first use does. Once it is loaded, no effect.

        Raises:
            ModelLoadError, ConfigError, IncompatibleLlamaError: see `load`.
            EngineClosedError: the engine is closed, even if it was never loaded.
        """
        with Postponed() as signals, self._opening:
            if self._made is not None:
                self._made[0].check_open()
                return
            if self._opener is None:
                raise EngineClosedError("the engine was closed before it was loaded")
            self._load(self._opener, lambda: signals.has_struck or self._is_closing)

    def _load(self, opener: Opener, is_stopped: IsStopped) -> None:
        """Load and start; where the load is to stop, free what was loaded and raise."""
        try:
            runtime = opener(is_stopped)
        except (CBatchError, RuntimeError) as error:
            # after its main thread has ended, Python starts no threads and imports no modules that start some
            if isinstance(error, RuntimeError) and not threading.main_thread().is_alive():
                raise ModelLoadError(
                    "no model can be loaded while the program ends: load it before the main thread ends"
                ) from error
            if not (isinstance(error, CBatchError) and is_stopped()):
                raise
        else:
            if not is_stopped():
                self._start(runtime)
                return
            runtime.close()
        raise EngineClosedError("loading was cancelled")

    def close(self, *, within_s: float | None = None) -> None:
        """End every request and free the model. Running ones end `cancelled`, queued ones with an error.

        A native call cannot be interrupted: a Ctrl-C during it is raised after everything is freed.

        Args:
            within_s: seconds after which worker processes that still run are killed; None means 60.
        """
        with Postponed():
            self._is_closing = True  # a load in another thread stops
            with self._opening:
                self._opener = None
            if self._made is not None:
                runtime, submitter = self._made
                submitter.end(EngineClosedError(CLOSED_EARLY))
                runtime.close(within_s)
                self._finalizer.detach()

    def _start(self, runtime: Runtime) -> None:
        self._finalizer = weakref.finalize(self, runtime.close)
        self._made = runtime, Submitter(runtime)

    @property
    def outage(self) -> Outage | None:
        """Why the engine computes nothing now: no worker runs, or the engine has ended. None if it can compute."""
        if self._made is None:
            return None
        try:
            self._runtime.check_open()
        except EngineClosedError as error:
            return Outage(words_of(error.__cause__ or error), None)
        return self._runtime.outage

    @property
    def _runtime(self) -> Runtime:
        return self._parts[0]

    @property
    def _submitter(self) -> Submitter:
        return self._parts[1]

    @property
    def _parts(self) -> tuple[Runtime, Submitter]:
        if self._made is None:
            self.open()
        return cast("tuple[Runtime, Submitter]", self._made)

    @property
    def parallel(self) -> int:
        """Number of slots: requests that run at once."""
        return self._runtime.n_slots

    @property
    def n_window(self) -> int:
        """Most tokens of prompt and answer together that one slot holds."""
        return self._runtime.n_window

    @property
    def options(self) -> RunOptions:
        """Defaults for options that neither a request nor its run sets."""
        return self._options

    @property
    def exactness(self) -> str:
        """`bitwise` where a request's tokens and logits do not depend on other requests, else `not guaranteed: reason`.

        A probe on the loaded model finds this, so the first access takes a few seconds.
        """
        if not self._exactness_found:
            self._exactness_found = self._runtime.exactness()
        return self._exactness_found

    @property
    def company(self) -> str:
        """How sequences are computed: `together: reason`, or `one at a time: reason`, whatever `parallel` asked for.

        Found when the model is loaded: llama.cpp computes some models wrongly if several sequences share a step.
        """
        return self.model_facts.company

    @property
    def fingerprint(self) -> dict[str, str]:
        """What answers depend on besides prompt and options, by name: model, adapters, chat template, settings.

        Slots, threads, sizes and devices are left out, because they only change the last bits of logits.

        The model and the adapters are those that were loaded, whatever has become of their files since.
        """
        return self._runtime.fingerprint()

    def count_tokens(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> int:
        """Return how many tokens a prompt has, rendered by the chat template if it is a chat. Computes nothing.

        Raises:
            ConfigError: a malformed prompt.
            RequestFailedError: a token that is not in the vocabulary.
        """
        item, settled = self._settled(prompt, options)
        return self._runtime.n_tokens_of(item, settled)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special: bool = True,
        options: RunOptions | Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens that `count_tokens` counts. Raises as it does.

        `add_special=False` leaves out the BOS token that is put before a text, but not one that the text begins with.
        """
        item, settled = self._settled(prompt, options)
        tokens = [*self._runtime.tokens_of(item, settled)]
        if item.prompt is None or check_flag("add_special", add_special):
            return tokens
        return _without_bos(item.prompt, tokens, self.model_facts)

    def render(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> str:
        """Return a chat as text by the chat template, as the model sees it; a text prompt as it is.

        Raises:
            ConfigError: a malformed prompt.
            RequestFailedError: there is no template, or it refuses these messages.
        """
        item, settled = self._settled(prompt, options)
        return self._runtime.text_of(item, settled)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens written out, U+FFFD for what is not text. Raises as `pieces`."""
        return b"".join(self.pieces(tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token, control tokens written out; a character may span several.

        Raises:
            ConfigError: no list of token ids.
            RequestFailedError: a token that is not in the vocabulary.
        """
        return self._runtime.pieces_of(token_ids("tokens", tokens))

    @property
    def model_facts(self) -> ModelFacts:
        """What the model is: sizes, special tokens, chat template, adapters."""
        if self._facts is None:
            self._facts = self._runtime.model_facts()
        return self._facts

    def _settled(
        self, prompt: Prompt, options: RunOptions | Mapping[str, Any] | None
    ) -> tuple[BatchPrompt, RunOptions]:
        """Return a prompt, and its options before those of the call and of the engine."""
        run_options = self._merger.over(RunOptions.of(options), self._options)
        item = as_prompt(prompt)
        return item, RunOptions.of(item.options).over(run_options)

    def run(
        self,
        prompts: Prompt | Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        max_time_s: float | None = None,
        progress: bool | View = False,
        ask_again: bool = False,
        streamed: bool = False,
        dedupe: bool = False,
    ) -> BatchResponse:
        """Queue a batch and return its response at once.

        Args:
            prompts: a list of prompts, each a message list, a string or a `BatchPrompt`; or a single one of these.
                A string is text to complete, without the chat template: ask a chat model by message lists or `chat`.
                A generator, or another iterable without a length, is read one by one in a thread of its own, a few
                prompts a slot ahead of the work and of the reader; a refused prompt fails alone, and an error that the
                generator raises reaches the reader after the prompts before it. An async generator, in an event loop,
                is read alike, by a task of that loop.
            options: for every item of this batch; an item's own options come first.
            max_time_s: seconds for the whole batch; then running requests end `timeout` with their partial text,
                waiting ones end with `DeadlineError`, and no more prompts are read.
            progress: show the batch's progress on stderr: a live line on a terminal, else a line now and then; or a
                `View` that shows it.
            ask_again: if a worker process dies, compute its items again in another one, except items of which a reader
                has a chunk. Those end with a `WorkerDiedError`, and so does an item that kills one worker after the
                other. No effect without worker processes.
            streamed: deliver chunks from the first step on; otherwise, from the moment a reader asks for them.
            dedupe: compute equal prompts with equal options once if the answer is certain to be the same: a single one,
                greedy or with a seed. Each prompt has its own result; a copy ends together with the first of its
                equals and in the same way, and its id cannot be cancelled or paused. From a generator, 1,024 more
                copies are read while the first of equal ones is computed.

        Raises:
            ConfigError: an empty batch, a malformed prompt, a wrong option. Nothing was queued. If only
                one of several prompts has wrong options of its own, that item ends with the error and the others run.
            DuplicateIdError: an id occurs twice or is in flight. Nothing was queued.
            QueueFullError: with `when_full="reject"`, more than `max_queue` requests would wait. Nothing was queued.
            EngineClosedError: the engine is closed.
        """
        self._runtime.check_open()
        run_options = run_options_of(self, options)
        ends_s = time.perf_counter() + check_seconds("max_time_s", max_time_s)
        view, asks_again = check_view(progress), check_flag("ask_again", ask_again)
        is_streamed = check_flag("streamed", streamed)
        before = self.stats() if view else None
        is_deduped = check_flag("dedupe", dedupe)
        if is_source(prompts):
            source = self._source_of(prompts)
            mailbox = self._mailbox(
                0, N_AHEAD_PER_SLOT * self.parallel, asks_again=asks_again, is_streamed=is_streamed
            )
            mailbox.copies = Copies() if is_deduped else None
            self._submitter.feed(source, run_options, ends_s, mailbox)
        else:
            items = as_prompts(cast("Prompt | Iterable[Prompt]", prompts))
            mailbox = self._mailbox(len(items), asks_again=asks_again, is_streamed=is_streamed)
            mailbox.copies = Copies() if is_deduped else None
            self._submitter.queue(items, run_options, ends_s, mailbox)
        return BatchResponse(mailbox, self._show(mailbox, view, before), engine=self)

    def _source_of(self, prompts: object) -> Iterator[Any]:
        """Return an iterator over prompts that are read one by one; an async iterable is read by a task."""
        with reading("prompts"):
            if not isinstance(prompts, AsyncIterable):
                return iter(cast("Iterable[Prompt]", prompts))
        if not is_in_event_loop():
            raise ConfigError(
                "prompts is an async iterable, and no event loop runs here: call run() in a coroutine, or give a list "
                "or a generator for `for`"
            )
        if not self._runtime.is_threaded:
            raise ConfigError(
                "prompts is an async iterable, which needs an engine loaded with threaded=True: load it so, or give "
                "a list or a normal generator"
            )
        return AsyncSource(prompts)

    def chat(self, messages: str | Sequence[Message] | BatchPrompt, **options: Any) -> OneAnswer:
        """Return the answer to a chat: `engine.chat("Say red.", max_tokens=8).text`.

        Waits for the answer and raises its error; in an event loop, await it. Batches: `run`; chunks: `submit`.

        Args:
            messages: a message list, or the text of a user's only message.
            options: `RunOptions` by name.

        Returns:
            The answer, with a `BatchResult`'s fields; awaited, the `BatchResult`.

        Raises:
            ConfigError: a malformed chat, or a wrong option.
            RequestError: the request failed.
            EngineClosedError: the engine is closed.
        """
        text = text_of(messages)
        chat = messages if text is None else [{"role": "user", "content": text}]
        return self._answer(chat, options)

    def generate(self, prompt: str | BatchPrompt, **options: Any) -> OneAnswer:
        """Return the text that follows a prompt, without the chat template; otherwise the same as `chat`."""
        if text_of(prompt) is None and not isinstance(prompt, BatchPrompt):
            raise ConfigError(
                f"generate takes a text, or a BatchPrompt, not {type(prompt).__name__}: call chat() for messages"
            )
        return self._answer(prompt, options)

    def _answer(self, prompt: Any, options: Mapping[str, Any]) -> OneAnswer:
        answer = OneAnswer(self.submit(prompt, options=options))
        if not is_in_event_loop():
            answer.wait()
        return answer

    def submit(
        self, prompt: Prompt, *, options: RunOptions | Mapping[str, Any] | None = None
    ) -> BatchResponse:
        """Queue one prompt: a batch of one, for `response.result()`. Raises as `run` does."""
        return self.run([prompt], options=options)

    def score(
        self,
        pairs: Iterable[Pair],
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        progress: bool | View = False,
    ) -> Scores[list[Score]]:
        """Return how likely the model finds each continuation of a context: `scores.results()`, or `await scores`.

        A context that several pairs or continuations have in common is computed once. Nothing is sampled.
        With `exact=True`, the scores of a pair do not depend on the other pairs, down to the last bit.

        Args:
            pairs: (context, continuations): a text, a message list or a `BatchPrompt`; and a text or a list of token
                ids, or several of them. A context of "" means none. After a chat, a continuation begins its answer.
            options: for every request, such as `adapter`, `priority`, `timeout_s`, and what the chat template takes;
                those of a `BatchPrompt` override them.
            progress: as in `run`.

        Returns:
            For each pair a list with a `Score` for each continuation, in order.

        Raises:
            ConfigError: a malformed pair, or a wrong option. Nothing was queued.
            EngineClosedError: the engine is closed.
        """
        with reading("pairs"):
            items = [Continuations.of(pair) for pair in pairs]
        return self._scores(items, options, progress, list)

    def score_texts(
        self,
        texts: Iterable[Prompt],
        *,
        options: RunOptions | Mapping[str, Any] | None = None,
        progress: bool | View = False,
    ) -> Scores[Score]:
        """Return how likely the model finds whole texts, of any length; otherwise the same as `score`.

        A text longer than a slot's window is scored in windows that overlap by one token only. If the
        model has a token that begins texts (BOS, or else EOS), it is put before the text and not scored.
        The perplexity is `exp(−score.logprob / len(score.tokens))`.
        """
        with reading("texts"):
            items = [WholeText.of(text) for text in texts]
        return self._scores(items, options, progress, itemgetter(0))

    def _scores(
        self,
        items: Sequence[Continuations | WholeText],
        options: RunOptions | Mapping[str, Any] | None,
        progress: bool | View,
        fold: Callable[[list[Score]], T],
    ) -> Scores[T]:
        if not items:
            raise ConfigError("there is nothing to score: give at least one item")
        runtime, facts = self._runtime, self.model_facts
        run_options = run_options_of(self, options)
        tokenizer = Tokenizer(
            lambda prompt: runtime.tokens_of(prompt, run_options),
            lambda prompt: runtime.text_of(prompt, RunOptions.of(prompt.options).over(run_options)),
            runtime.n_window,
            facts.bos_id if facts.bos_id >= 0 else facts.eos_id,
        )

        def run(prompts: Iterable[BatchPrompt]) -> BatchResponse:
            return self.run(prompts, options=options, progress=progress)

        return Scores(items, tokenizer, run, fold)

    # ---- embeddings ----

    @property
    def can_generate(self) -> bool:
        """Whether the model generates text; others only embed or rerank."""
        return self.model_facts.can_generate

    @property
    def can_embed(self) -> bool:
        """Whether `embed` works without the argument `pooling`: with a model for embeddings or for chats."""
        return self.model_facts.can_embed

    @property
    def can_rerank(self) -> bool:
        """Whether `rerank` works: with a reranker, or with a chat model, which is asked about each document."""
        return self.model_facts.can_rerank

    @property
    def judges(self) -> bool:
        """Whether `rerank` asks a chat model about each document, with a request that needs a slot."""
        facts = self.model_facts
        return facts.can_rerank and facts.pooling != "rank"

    @property
    def n_embedding(self) -> int:
        """Length of a text's vector without the argument `dimensions`; 0 if the model has no vectors."""
        return self.model_facts.n_embedding

    def embed(  # noqa: PLR0913  # each is a word of the caller's
        self,
        texts: Iterable[Any] | AsyncIterable[Any],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        instruction: str | None = None,
        truncate: Truncate | None = None,
        ids: Iterable[str] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        is_patient: bool = False,
    ) -> EmbedResponse:
        """Return vectors of texts, as they are computed: `engine.embed(["red", "blue"]).array()`.

        Texts are read one by one, a bounded number ahead; one that is wrong or too long fails alone. Texts with
        equal settings are computed together, equal texts once. Chats of the same engine go on meanwhile.

        Args:
            texts: strings, or lists of token ids; a list, a generator, or in an event loop an async generator.
            pooling: how a text's vector is made of the vectors of its tokens: "mean", "cls" (the first), "last"; "none"
                for a vector of each token, "rank" for the raw scores of a classifier. None: as the model's file says,
                or else "last" for a causal model.
            normalize: make the length of each vector 1.
            dimensions: keep this number of values, then normalise: for models that were trained for that (Matryoshka).
            instruction: text that is put before each text: as "Instruct: …\nQuery: " for causal models, else as it is.
            truncate: leave out the "end" or the "start" of a text that is too long, which else is an error.
            ids: a name for each text, as in `BatchPrompt`.
            priority: −100 … 100, with the policy "priority": a point counts as much as `ageing_s` seconds of waiting.
            timeout_s: seconds from when a text was read; a text that is not computed by then ends with a
                `DeadlineError`.
            is_patient: let texts of other calls go first if they come within ten minutes.

        Raises:
            ConfigError: a wrong argument.
            UnsupportedTaskError: the model cannot do that.
            EngineClosedError: the engine is closed.
        """
        facts = self.model_facts
        prefix = check_string("instruction", instruction) or ""
        if prefix and facts.is_causal:
            prefix = f"Instruct: {prefix}\nQuery: "
        settings = TextSettings.of(
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            prefix=prefix,
            truncate=truncate,
            is_patient=is_patient,
        )
        settings.check(facts)
        response = self._text_batch(texts, settings, ids, priority, timeout_s)
        return EmbedResponse(response, is_by_token=pooling == "none")

    def rerank(  # noqa: PLR0913  # each is a word of the caller's
        self,
        query: str | Sequence[str],
        documents: Iterable[str] | AsyncIterable[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        truncate: Truncate | None = None,
        ids: Iterable[str] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        is_patient: bool = False,
    ) -> RerankResponse:
        """Return how well documents fit a query: `engine.rerank(query, documents).results()`, the best first.

        A reranker scores query and document by its classifier. A model for chats is asked whether the document meets
        the query; the score is the probability of "yes" against "no". It computes the common
        beginning of the documents' prompts once.

        Args:
            query: what is searched for; or a list with one query for each document of a list.
            documents: strings; a list, a generator, or in an event loop an async generator.
            instruction: the criterion for judging, if the model takes one.
            top_n: most results that `results()` returns.
            raw_scores: return logits instead of probabilities.
            truncate: leave out the "end" or the "start" of a document that is too long, which else is an error.
            ids, priority, timeout_s: as in `embed`.
            is_patient: as in `embed`, for a reranker only.

        Raises:
            ConfigError: a wrong argument.
            UnsupportedTaskError: the model cannot do that.
            EngineClosedError: the engine is closed.
        """
        facts, is_raw = self.model_facts, check_flag("raw_scores", raw_scores)
        n_top = None if top_n is None else check_int("top_n", top_n, 1, MAX_INT)
        queries = None if text_of(query) is not None else list_of(query)
        settings = TextSettings.of(
            query=query if queries is None else None,
            instruction=instruction,
            truncate=truncate,
            is_patient=is_patient,
        )
        if queries is None and not settings.query:
            raise ConfigError("the query is empty")
        if not facts.can_rerank:
            raise UnsupportedTaskError("rerank", "it neither has a classifier nor generates text")
        runtime, judges = self._runtime, self.judges
        if judges and is_patient:
            raise ConfigError(
                "is_patient needs a reranker, and this is a chat model that judges documents: leave is_patient out"
            )

        def read(value: Any) -> BatchPrompt:
            own, document = (settings.query, value) if queries is None else value
            if not (found := check_string("query", own)):
                raise ConfigError("the query is empty")
            if judges:
                judge = Judge(runtime, facts, replace(settings, query=found))
                return judge.prompt(as_text(document))
            return QueriedText.of(as_text(document), found)

        texts: Any = documents if queries is None else _paired(queries, documents)
        told = None if judges else settings
        response = self._text_batch(texts, told, ids, priority, timeout_s, read)
        score = judged if judges else partial(classified, facts=facts)
        return RerankResponse(response, partial(score, is_raw=is_raw), n_top)

    def _text_batch(
        self,
        texts: Any,
        settings: TextSettings | None,
        ids: Iterable[str] | None,
        priority: int,
        timeout_s: float | None,
        read: Callable[[Any], BatchPrompt] = as_text,
    ) -> BatchResponse:
        """Queue texts one by one as they are `read`: to embed or score by `settings`, or as prompts."""
        self._runtime.check_open()
        is_one = text_of(texts) is not None or isinstance(texts, BatchPrompt | bytes | bytearray)
        if is_one or isinstance(texts, Mapping) or not isinstance(texts, Iterable | AsyncIterable):
            raise ConfigError(f"give a list of texts, not {shown(texts)}")
        if isinstance(ids, str):
            raise ConfigError(f"ids must be a list of names, not {shown(ids)}")
        with reading("ids"):
            names = repeat(None) if ids is None else iter(ids)

        given = None if int_of(priority) == 0 else priority  # 0, the default, is not said
        options = RunOptions(priority=given, timeout_s=timeout_s)
        source = self._source_of(texts)
        mailbox = self._mailbox(0, N_TEXTS_AHEAD, asks_again=settings is not None)
        run_options = options if settings is not None else run_options_of(self, options)
        what = FeedReading(read, settings, names)
        self._submitter.feed(source, run_options, math.inf, mailbox, what)
        return BatchResponse(mailbox, engine=self)

    def extend(self, result: BatchResult | OneAnswer, n_tokens: int) -> BatchResponse:
        """Continue the answer of a result that ended at `max_tokens`, by `cancel` or by a time limit.

        The prompt is not computed again while its cells are in memory. The new result has the whole answer,
        including the earlier part, as if the first run had had the greater `max_tokens`. Id and options are those of
        the first request; a seeded sequence of random numbers goes on where it was.

        Args:
            result: as `response.result()`, `chat` or `generate` returned it.
            n_tokens: most tokens to add, at least 1.

        Raises:
            ConfigError: the result is another engine's, complete or altered, or `n_tokens` is not a number of tokens.
            DuplicateIdError: the result's id is in flight.
            EngineClosedError: the engine is closed.
        """
        self._runtime.check_open()
        result = result.result if isinstance(result, OneAnswer) else result
        mailbox = self._mailbox(1)
        self._submitter.extend(result, n_tokens, mailbox)
        return BatchResponse(mailbox, engine=self)

    def cancel(self, id: str) -> bool:
        """Cancel one request: it ends with its partial text, or with an error if it never had a slot.

        Args:
            id: an id from a response, chunk or result means only that request, even if a later request has an equal
                id; a string of your own means the request that has this id now. The same holds for `pause` and
                `resume`.

        Returns:
            Whether the request was in flight.
        """
        return bool(self._runtime.orders.cancel([_asked(id)]))

    def pause(self, id: str) -> bool:
        """Pause one request; return False if it is not in flight, or is paused already.

        It keeps its slot and cells until other requests need them. If it is still in the queue, others pass it.
        """
        return self._runtime.orders.pause(_asked(id))

    def resume(self, id: str, n_tokens: int | None = None) -> bool:
        """Let a paused request go on; return False if it is not in flight, or not paused.

        Nothing is computed again while its cells are kept. A request with several choices goes on with all of them.

        Args:
            id: as in `cancel`.
            n_tokens: pause it again after this many more sampled tokens, at least 1; None means as its option
                `pause_every` says.

        Raises:
            ConfigError: `n_tokens` is not a number of tokens.
        """
        if n_tokens is not None:
            n_tokens = check_int("n_tokens", n_tokens, 1, MAX_INT)
        return self._runtime.orders.resume(_asked(id), n_tokens)

    def cancel_all(self) -> int:
        """Cancel every request in flight, queued or running, and read no further prompts; return how many there were.

        A reader of a generator's results gets a `RequestCancelledError` after the prompts that were read.
        """
        self._submitter.end(RequestCancelledError(CANCELLED_EARLY))
        return self._runtime.cancel_all()

    def slots(self) -> list[SlotState]:
        """Return what each slot holds now: its request, the progress of that request, and its cells."""
        return self._runtime.slots()

    def stats(self) -> EngineStats:
        """Return a snapshot of the work done since the model was loaded, or since `reset_stats`."""
        return self._runtime.stats()

    def reset_stats(self) -> None:
        """Set the statistics to zero. Work in flight counts from now on."""
        self._runtime.reset_stats()

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps, in the thread that computes: it must be quick. None ends this.

        If `into` raises, the error is logged and `into` is called no more; requests are not affected. In the program's
        main thread, with `threaded=False`, what is no `Exception`, such as Ctrl-C, is raised by `step`.
        """
        if into is not None and not callable(into):
            raise ConfigError(f"record_steps takes a function or None, not {shown(into)}")
        self._runtime.record_steps(into)

    def compare_rows(self, ids: Iterable[str] | None = None) -> list[RowComparison]:
        """Compute the next token of decoding requests together in one step, then each alone; keep no result.

        Answers are the same as without a comparison. Requests with the same adapters share a step; the comparison takes
        as long as that step and a step of a single row for each of them. Different bits are a finding, not an error:
        without `exact=True`, the number of rows may change the kernels.

        Args:
            ids: ids as `cancel` takes them; None for all requests. A request that is not in flight, waits for a slot
                or still computes its prompt is left out.

        Returns:
            The comparisons in the order of slots, one for each choice of a request.

        Raises:
            UnsupportedOptionError: the model's memory cannot remove a token again, such as recurrent states.
            RequestFailedError: a pool has no free cell for each row, or computing failed; the requests go on.
            EngineClosedError: the engine is closed.
        """
        if isinstance(ids, str):
            raise ConfigError(f"compare_rows takes a list of ids, not {shown(ids)}")
        with reading("ids"):
            asked = None if ids is None else [_asked(id) for id in ids]
        return self._runtime.orders.compare_rows(asked)

    def step(self) -> bool:
        """Do one step in the caller's thread; return False if there is nothing to do.

        Raises:
            ConfigError: the engine has a thread that does the steps.
        """
        if self._runtime.is_threaded:
            raise ConfigError("step() is for an engine loaded with threaded=False")
        self._runtime.check_open()
        return self._pump()

    def _mailbox(
        self,
        n_items: int,
        n_ahead: int | None = None,
        *,
        asks_again: bool = False,
        is_streamed: bool = False,
    ) -> Mailbox:
        # without a thread only a reader goes on with the work: once there is none, the engine is freed
        pump, engine = (None, self) if self._runtime.is_threaded else (_weakly(self._pump), None)
        orders = self._runtime.orders
        mailbox = Mailbox(n_items, orders, pump, n_ahead=n_ahead, log=self._log, engine=engine)
        mailbox.asks_again, mailbox.is_streamed = asks_again, is_streamed
        return mailbox

    def _pump(self) -> bool:
        self._submitter.fill()
        return self._runtime.pump()

    def _show(
        self, mailbox: Mailbox, progress: bool | View, before: EngineStats | None
    ) -> Progress | None:
        if not progress or before is None:
            return None
        view = choose_view(closing_line) if progress is True else progress
        stats = self.stats if self._runtime.is_threaded else _weakly(self.stats)
        try:
            return Progress(view, mailbox.items.counts, stats, before, self.parallel)
        except NoThreadError:
            mailbox.leave()  # nobody gets its response
            raise


def _weakly(method: Callable[[], T]) -> Callable[[], T]:
    """Return what calls a method of an engine, and does not keep the engine alive."""
    held = weakref.WeakMethod(method)

    def call() -> T:
        alive = held()
        if alive is None:
            raise EngineClosedError("the engine no longer exists: keep a reference to it")
        return alive()

    return call


def run_options_of(engine: Engine, options: RunOptions | Mapping[str, Any] | None) -> RunOptions:
    """Return a run's options for items that set none.

    Raises:
        ConfigError: a wrong option, or an adapter that is not loaded.
    """
    settled = engine._merger.over(RunOptions.of(options), engine.options)
    engine._runtime.check_options(settled)
    return settled


def judge_of(engine: Engine, query: str, **settings: Any) -> Judge:
    """Return what makes the prompts by which a model for chats judges documents.

    Args:
        engine: `judges`.
        query: that documents are compared with.
        settings: instruction and truncate of `Engine.rerank`.

    Raises:
        ConfigError: one of them is wrong.
    """
    found = TextSettings.of(query=query, **settings)
    if not found.query:
        raise ConfigError("the query is empty")
    return Judge(engine._runtime, engine.model_facts, found)


def run_soon(
    engine: Engine, prompt: BatchPrompt, options: RunOptions, *, streamed: bool
) -> BatchResponse | None:
    """Queue one prompt without waiting for anything; None where that cannot be. For event loops.

    A prompt that cannot run ends with its error at once, however many wait; options are not refused here either.

    Raises:
        EngineClosedError: the engine is closed.
    """
    runtime = engine._runtime
    settled = engine._merger.over(options, engine.options)
    if not runtime.is_apart or settled.adapter is not None:
        return None
    runtime.check_open()
    mailbox = engine._mailbox(1, is_streamed=streamed)
    engine._submitter.queue([prompt], settled, math.inf, mailbox, is_soon=True)
    return BatchResponse(mailbox, engine=engine)


def _paired(queries: Sequence[Any], documents: object) -> list[tuple[Any, Any]]:
    """Return the pairs of a list of queries and one of documents."""
    listed = list_of(documents)
    if listed is None or len(listed) != len(queries):
        n = "no list" if listed is None else len(listed)
        raise ConfigError(
            f"query has {len(queries)} texts, documents {n}: give a query for each document of a list"
        )
    return [*zip(queries, listed, strict=True)]


def run_late(
    engine: Engine, prompts: Sequence[BatchPrompt], options: RunOptions, *, streamed: bool
) -> BatchResponse:
    """Queue prompts as `Engine.run` does in an event loop: where the queue is full, no thread waits, only they do."""
    engine._runtime.check_open()
    mailbox = engine._mailbox(len(prompts), is_streamed=streamed)
    settled = run_options_of(engine, options)
    engine._submitter.queue(prompts, settled, math.inf, mailbox, may_wait=False)
    return BatchResponse(mailbox, engine=engine)


def _asked(id: object) -> str:
    """Return a caller's id, checked; a handed-out id stays the same object, for it means one request."""
    return id if type(id) is RequestId else as_id(id)


def checked_tokens(engine: Engine, prompt: BatchPrompt, options: RunOptions) -> int:
    """Return how many tokens a prompt has; `options` are those of `run_options_of`. Computes nothing.

    A structure that the answer must match is compiled, as for a run.

    Raises:
        CBatchError: the error with which a run would refuse the prompt.
    """
    return engine._runtime.checked(prompt, options)


def tokens_of_each(engine: Engine, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the tokens of each text as `engine.tokenize(text, add_special=False)` does; many are one question."""
    left = iter(texts)
    while some := _some_of(left):
        for text, tokens in zip(some, engine._runtime.token_lists_of(some), strict=True):
            yield _without_bos(text, tokens, engine.model_facts) if text else []


def _some_of(texts: Iterator[str]) -> list[str]:
    """Take texts for one question."""
    some: list[str] = []
    n_left = _N_QUESTION
    while n_left > 0 and (text := next(texts, None)) is not None:
        some.append(text)
        n_left -= max(len(text), _N_SHORT)
    return some


def _without_bos(text: str, tokens: list[int], facts: ModelFacts) -> list[int]:
    """Return a text's tokens without the BOS token that was put before it."""
    is_added = facts.adds_bos and not text.startswith(facts.bos_token or "\0")
    return tokens[1:] if is_added and tokens[:1] == [facts.bos_id] else tokens


def open_local(
    model: Any,
    options: EngineOptions,
    look_ahead: LookAhead | None,
    is_stopped: IsStopped,
    *,
    is_threaded: bool = True,
    n_sharing: int = 1,
) -> LocalRuntime:
    """Load a model into this process, one of `n_sharing` that share the free memory. Raises as `cbatch.load`."""
    use_library(options.library)
    from cbatch.backend.devices import free_on_devices
    from cbatch.backend.load.checkpoint_budget import settle_checkpoints
    from cbatch.backend.load.loader import load_backend  # llama_cpp is slow to import

    folder = cache_folder(options.cache_dir)
    backend, exactness = load_backend(model, options, look_ahead, is_stopped, n_sharing=n_sharing)
    try:
        for warning in idle_settings(options, backend.memory, has_devices=bool(free_on_devices())):
            _log.warn("%s", warning)
        return LocalRuntime(
            backend,
            settle_checkpoints(backend, options, n_sharing=n_sharing),
            exactness=exactness,
            is_threaded=is_threaded,
            cache_dir=folder,
            cache_mib=options.cache_mib,
            cache_media=options.cache_media,
        )
    except BaseException:  # the system refuses a thread, say
        backend.close()
        raise


def cache_folder(named: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder for cells that a caller names; None for None. Raises a `ConfigError` for a wrong one."""
    if named is None:
        return None
    from cbatch.cache.store import cells_folder  # numpy is slow to import

    with reading("cache_dir"):
        return cells_folder(check_path("cache_dir", named))
