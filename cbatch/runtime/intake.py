"""Prompts in: from what `Engine.run` was given to sequences in the queue, all at once or one by one."""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from anyio.lowlevel import current_token

from cbatch.checks import check_seconds
from cbatch.core.answer import N_TAIL, AnswerFormat, AnswerReader, Pieces, answer_format
from cbatch.core.chosen import call_grammar, thinking_of
from cbatch.core.driver import SequenceDriver
from cbatch.core.plan import N_TARGETS_MAX
from cbatch.core.request import Origin, Request
from cbatch.errors import (
    CacheError,
    CBatchError,
    ConfigError,
    DuplicateIdError,
    EngineClosedError,
    PromptError,
    QueueFullError,
    RequestFailedError,
    UnsupportedOptionError,
)
from cbatch.messages import BatchPrompt, Prompt, as_prompt, free_id, with_ids
from cbatch.options import MAX_SEED, RunOptions
from cbatch.response import BatchResult
from cbatch.runtime.choices import Choices, member_id
from cbatch.runtime.feed import N_AHEAD_PER_SLOT, Feed
from cbatch.runtime.mailbox import Mailbox, refused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from cbatch.backend import Backend, Message, Vocab
    from cbatch.core.batcher import MultiRequestBatcher
    from cbatch.core.chosen import Thinking
    from cbatch.engine_options import ScheduleOptions
    from cbatch.options import Grammar
    from cbatch.runtime.loop import Loop, Route


Saver: TypeAlias = "tuple[str, weakref.ref[Mailbox], int]"
"""Who saves under a key: its id, and its route."""

_N_DEMANDS = 64
"""Grammars of calls that are kept."""

_N_FORGOTTEN = 64
"""Keys of requests that ended that may be remembered beyond those in flight."""


class MakeMailbox(Protocol):
    """Makes the mailbox of a batch of so many items, or of a fed one."""

    def __call__(self, n_items: int, *, n_ahead: int | None = None) -> Mailbox:
        """Return an empty mailbox; see `Mailbox`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `Engine.run`; `ids` in order of places, of a generator's prompts those that were not given out."""

    number: int
    options: RunOptions
    mailbox: Mailbox
    ids: Collection[str]
    ends_s: float = math.inf


class Intake:
    """Makes sequences of prompts and submits them; every method from any thread."""

    def __init__(
        self,
        backend: Backend,
        batcher: MultiRequestBatcher,
        loop: Loop,
        schedule: ScheduleOptions,
        *,
        is_threaded: bool,
    ) -> None:
        self._backend, self._batcher, self._loop = backend, batcher, loop
        self._schedule, self._is_threaded = schedule, is_threaded
        self._mark = secrets.token_hex(8)
        self._saving: dict[str, Saver] = {}
        self._demands: dict[tuple[str, bool, Thinking], Grammar] = {}
        self._last_settled = (RunOptions(),) * 3
        self._submitting = threading.Lock()
        self._n_runs = count()
        # weak, for a feed lives as long as its thread or its batch; a dict, for its order
        self._feeds: weakref.WeakValueDictionary[int, Feed] = weakref.WeakValueDictionary()

    def _drivers(
        self, item: BatchPrompt, run_options: RunOptions, now: float, ends_s: float
    ) -> list[SequenceDriver]:
        """Return the sequences of a prompt: one for each choice."""
        vocab = self._backend.vocab
        try:
            options = self._settled(RunOptions.of(item.options), run_options)
            check_fits(options, self._backend, self._schedule)
            check_chat(item, options, vocab)
            n_logprobs = options.n_logprobs
            grammar = options.structure or self._demand(item, options)
        except UnsupportedOptionError:
            raise
        except ConfigError as error:
            raise ConfigError(f"request {item.id!r}: {error}") from None
        seed = secrets.randbits(32) if options.seed is None else options.seed
        own = () if options.ignore_eos else vocab.end_tokens
        stop_tokens = tuple(sorted({*own, *(options.stop_token_ids or ())}))
        sampling = options.sampling(self._backend.sampling_defaults, seed, vocab.suppressed_tokens)
        deadline_s = min(ends_s, now + check_seconds("timeout_s", options.timeout_s))
        request = Request(
            str(item.id),
            item,
            options,
            sampling,
            stop_tokens,
            deadline_s,
            options.adapters,
            n_logprobs,
            options.n_prompt_logprobs,
            owner=self._mark,
            grammar=grammar,
            breakers=options.breakers(sampling),
        )
        if options.n_choices == 1:
            return [self._sequence(request, now)]
        return [self._sequence(_choice(request, i), now) for i in range(options.n_choices)]

    def _demand(self, item: BatchPrompt, options: RunOptions) -> Grammar | None:
        """Return what an answer must match that has to call tools; the last few are kept, for all of a batch ask alike.

        Raises:
            UnsupportedOptionError: this chat template's answers cannot be held to calls.
            ConfigError: a tool's arguments are not an object.
        """
        tools = options.demanded_tools
        if not tools:
            return None
        is_one, thinking = isinstance(options.tool_choice, Mapping), self._thinking(item, options)
        key = (json.dumps(tools), is_one, thinking)
        if key not in self._demands:
            if len(self._demands) >= _N_DEMANDS:
                self._demands.clear()
            vocab = self._backend.vocab
            self._demands[key] = call_grammar(
                self._format,
                vocab.template,
                tools,
                thinking=thinking,
                is_one=is_one,
                named=vocab.named_token,
            )
        return self._demands[key]

    def _thinking(self, item: BatchPrompt, options: RunOptions) -> Thinking:
        """Return whether an answer may think, which the prompt's end tells."""
        if self._format.thinking is None or item.messages is None:
            return "none"
        opened, vocab = opened_text(item.messages), self._backend.vocab
        try:
            tail = (
                [] if opened else vocab.render(item.messages, options.template_variables)[-N_TAIL:]
            )
        except RequestFailedError:  # which the request ends with when it is its turn
            return "none"
        shown = b"".join(map(vocab.shown_piece, tail)).decode(errors="replace")
        return thinking_of(self._format, opened, shown)

    def _settled(self, own: RunOptions, run_options: RunOptions) -> RunOptions:
        """Return what holds for an item: the items of a batch mostly say the same one after the other."""
        last_own, last_run, settled = self._last_settled
        if last_run is not run_options or last_own != own:
            settled = own.over(run_options)
            self._last_settled = own, run_options, settled
        return settled

    def _sequence(self, request: Request, now: float) -> SequenceDriver:
        vocab, is_shown = self._backend.vocab, request.options.skip_special_tokens is False
        piece = vocab.shown_piece if is_shown else vocab.piece
        driver = SequenceDriver.of(request, piece, now, self._reader(request, is_shown=is_shown))
        self._warn(driver)
        return self._prepared(driver)

    def _reader(self, request: Request, *, is_shown: bool) -> AnswerReader | None:
        """Return what takes a chat's answer apart; None where it is text and nothing else."""
        messages, options = request.prompt.messages, request.options
        if messages is None:
            return None
        tools, splits = options.offered_tools, options.reasoning_format != "none"
        if not tools and (self._format.is_plain or not splits):
            return None
        opened = opened_text(messages)
        pieces = self._shown_pieces if is_shown else self._pieces
        return AnswerReader(self._format, pieces, tools, splits, opened)

    @cached_property
    def _format(self) -> AnswerFormat:
        return answer_format(self._backend.vocab.template)

    @cached_property
    def _pieces(self) -> Pieces:
        vocab = self._backend.vocab
        return Pieces(vocab.piece, vocab.shown_piece, vocab.control_tokens)

    @cached_property
    def _shown_pieces(self) -> Pieces:
        vocab = self._backend.vocab
        return Pieces(vocab.shown_piece, vocab.shown_piece)

    def _warn(self, driver: SequenceDriver) -> None:
        """Say what will have no effect: a variable that the chat template never names."""
        template = self._backend.vocab.template
        driver.warnings += (
            f"chat_template_kwargs has {name!r}, which the chat template does not use"
            for name in driver.request.options.chat_template_kwargs or ()
            if template and not re.search(rf"\b{name}\b", template)
        )

    def _prepared(self, driver: SequenceDriver) -> SequenceDriver:
        if self._schedule.policy == "shortest":
            self._batcher.prepare(driver)  # here, for the thread that computes must not wait
        return driver

    def queue(
        self,
        prompts: Sequence[BatchPrompt],
        options: RunOptions,
        ends_s: float,
        make_mailbox: MakeMailbox,
    ) -> Run:
        """Submit a batch; nothing is queued where it raises. See `Engine.run`."""
        now = time.perf_counter()
        with self._submitting:
            number = next(self._n_runs)
            prompts = with_ids(prompts, self._loop.routes, number)
            items = [self._drivers(prompt, options, now, ends_s) for prompt in prompts]
            drivers = [driver for item in items for driver in item]
            self._check_keys(drivers)
            ids = [str(prompt.id) for prompt in prompts]
            run = Run(number, options, make_mailbox(len(ids)), ids, ends_s)
            routes = self._route(run.mailbox, ids, items)
        self._submit(drivers, routes, is_fed=False)
        return run

    def extend(self, result: BatchResult, n_tokens: int, make_mailbox: MakeMailbox) -> Run:
        """Submit what goes on from a result. See `Engine.extend`."""
        if not isinstance(result, BatchResult):
            raise ConfigError(f"extend takes a BatchResult, not {type(result).__name__}")
        if result.choices:
            raise ConfigError(
                f"result {result.id!r} has {len(result.choices)} choices: extend one of them"
            )
        origin = result.origin
        if not isinstance(origin, Origin) or origin.request.owner != self._mark:
            raise ConfigError(f"result {result.id!r} is not of this engine: it cannot be extended")
        check_extension(result, n_tokens)
        now, old = time.perf_counter(), origin.request
        n_echoed = result.usage.prompt_tokens if old.options.echo else 0
        n_all = len(result.token_ids[n_echoed:]) + n_tokens
        deadline_s = now + check_seconds("timeout_s", old.options.timeout_s)
        with self._submitting:
            if old.id in self._loop.routes:
                raise DuplicateIdError(old.id)
            request = replace(
                _with_prompt(old, result),
                options=RunOptions(max_tokens=n_all, prefill_only=False).over(old.options),
                deadline_s=deadline_s,
                output=result.token_ids[n_echoed:],
                output_logprobs=(result.logprobs or ())[n_echoed:],
                continues=origin.number,
            )
            driver = self._sequence(request, now)
            self._check_keys([driver])
            run = Run(next(self._n_runs), request.options, make_mailbox(1), [old.id])
            routes = self._route(run.mailbox, [old.id], [[driver]])
        self._submit([driver], routes, is_fed=False)
        return run

    def _check_keys(self, drivers: Sequence[SequenceDriver]) -> None:
        """Refuse a second request that would save under a key which one in flight will save.

        Raises:
            CacheError: it stands twice, or is in flight. Nothing has changed then.
        """
        keys = [d.request.options.cache_key for d in drivers if d.request.options.save_cache]
        if not keys:
            return
        if len(self._saving) > 2 * len(self._loop.routes) + _N_FORGOTTEN:
            self._saving = {k: saver for k, saver in self._saving.items() if self._lives(saver)}
        seen: set[str] = set()
        for key in map(str, keys):
            saver = self._saving.get(key)
            if key in seen or (saver is not None and self._lives(saver)):
                raise CacheError(key, "two requests in flight would save it: one at a time")
            seen.add(key)

    def _lives(self, saver: Saver) -> bool:
        id, mailbox, place = saver
        route = self._loop.routes.get(id)
        return route is not None and route[0] is mailbox() and route[1] == place

    def feed(
        self,
        source: Iterator[Prompt],
        options: RunOptions,
        ends_s: float,
        make_mailbox: MakeMailbox,
    ) -> Run:
        """Submit prompts as they are read from `source`, until it or the batch ends."""
        mailbox = make_mailbox(0, n_ahead=N_AHEAD_PER_SLOT * self._backend.n_slots)
        run = Run(next(self._n_runs), options, mailbox, mailbox.ids.values(), ends_s)
        if ends_s < math.inf:
            self._loop.call_at(ends_s, partial(_end_feed, weakref.ref(mailbox)))
        feed = mailbox.feed = Feed(source, mailbox, partial(self._put, run))
        self._feeds[run.number] = feed
        if self._is_threaded:
            feed.start()
        return run

    def _put(self, run: Run, item: Any) -> None:
        """Queue one prompt that was read; one that is refused ends at once, with its error."""
        place = run.mailbox.expect()
        if place is None:  # everybody left while it was read
            return
        try:
            drivers, routes = self._named(run, item, place)
            self._submit(drivers, routes, is_fed=True)
        except CBatchError as error:
            run.mailbox.deliver(*refused(run.mailbox.ids[place], place, error))
            if isinstance(error, EngineClosedError):
                run.mailbox.end_feed()
        # everybody may have left meanwhile, too early for this one to be cancelled with the others
        if not run.mailbox.is_fed:
            self._loop.cancel_batch_soon(run.mailbox)

    def _named(
        self, run: Run, item: Any, place: int
    ) -> tuple[list[SequenceDriver], dict[str, Route]]:
        """Return the sequences of a prompt that was read, with a free id, and their routes."""
        ids, given = run.mailbox.ids, run.mailbox.given
        with self._submitting:
            taken = ChainMap(given, self._loop.routes)
            ids[place] = free_id(place, run.number, taken)
            try:
                prompt = as_prompt(item)
                prompt = prompt if prompt.id else replace(prompt, id=ids[place])
                [prompt] = with_ids([prompt], taken, run.number)
                ids[place] = str(prompt.id)
                drivers = self._drivers(prompt, run.options, time.perf_counter(), run.ends_s)
                self._check_keys(drivers)
                return drivers, self._route(run.mailbox, [ids[place]], [drivers], place)
            finally:
                given[ids[place]] = None

    def _route(
        self,
        mailbox: Mailbox,
        ids: Sequence[str],
        items: Sequence[Sequence[SequenceDriver]],
        first_place: int = 0,
    ) -> dict[str, Route]:
        """Make ids known, with where their output goes; return what was added."""
        routes: dict[str, Route] = {}
        for place, (id, drivers) in enumerate(zip(ids, items, strict=True), first_place):
            if len(drivers) == 1:
                routes[id] = mailbox, place
                continue
            choices = Choices(mailbox, place, id, drivers[0].request.options)
            mailbox.expect_choices(choices.n_kept)
            routes[id] = choices, -1  # which keeps the id taken until the last choice has ended
            routes.update((d.request.id, (choices, i)) for i, d in enumerate(drivers))
        self._loop.routes.update(routes)
        saving = [d.request for item in items for d in item if d.request.options.save_cache]
        ref = weakref.ref(mailbox)  # through it an engine would keep itself alive
        self._saving.update(
            (str(r.options.cache_key), (r.id, ref, routes[r.id][1])) for r in saving
        )
        return routes

    def _submit(
        self,
        drivers: Sequence[SequenceDriver],
        routes: Mapping[str, Route],
        *,
        is_fed: bool,
    ) -> None:
        """Submit sequences whose routes are set; may wait for room in the queue, so not under a lock."""
        try:
            self._submit_within_limit(drivers, is_fed=is_fed)
        except (QueueFullError, ConfigError):  # nothing came in
            self._loop.unroute(routes)
            raise
        except BaseException:  # closed, or Ctrl-C: what has not come in has no way out
            self._loop.forget(routes)
            raise

    def _submit_within_limit(self, drivers: Sequence[SequenceDriver], *, is_fed: bool) -> None:
        n_limit = self._schedule.max_queue
        if n_limit is None:
            self._loop.submit(drivers)
        elif is_fed:
            self._loop.submit_as_room_comes(drivers, n_limit)
        elif self._schedule.when_full == "reject":
            self._loop.submit_within(drivers, n_limit)
        elif self._is_threaded and is_in_event_loop():
            self._submit_in_event_loop(drivers, n_limit)
        else:
            self._loop.submit_as_room_comes(drivers, n_limit)

    def _submit_in_event_loop(self, drivers: Sequence[SequenceDriver], n_limit: int) -> None:
        try:
            self._loop.submit_within(drivers, n_limit)
        except QueueFullError as error:
            raise ConfigError(
                f"no room for {len(drivers)} more (max_queue={n_limit}), and run() must not wait in an event loop: "
                "call it by anyio.to_thread.run_sync or asyncio.to_thread, or choose when_full='reject'"
            ) from error

    def fill(self) -> None:
        """Read what there is room for, where no thread does."""
        for feed in list(self._feeds.values()):
            feed.fill()

    def end(self) -> None:
        """Read no more prompts one by one; what was read goes on."""
        for feed in list(self._feeds.values()):
            feed.end()


def opened_text(messages: Sequence[Message]) -> str:
    """Return the text of the last message, where it is the assistant's and the answer goes on from it."""
    last = messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def check_fits(options: RunOptions, backend: Backend, schedule: ScheduleOptions) -> None:
    """Refuse options that this engine cannot do.

    Raises:
        ConfigError: one that its model, its memory or its schedule does not have.
    """
    n_vocab, memory = backend.vocab.n_vocab, backend.memory
    highest = max(options.stop_token_ids or (0,))
    if highest >= n_vocab:
        raise ConfigError(
            f"stop_token_ids has {highest}, which is not in the vocabulary of {n_vocab}"
        )
    highest = max(options.logit_bias or (0,))
    if highest >= n_vocab:
        raise ConfigError(f"logit_bias has {highest}, which is not in the vocabulary of {n_vocab}")
    if options.priority is not None and schedule.policy != "priority":
        raise ConfigError(
            f"priority={options.priority} has no effect with policy={schedule.policy!r}: "
            "load the engine with policy='priority'"
        )
    if (options.save_cache or options.cache_required) and options.cache_key is None:
        raise ConfigError("save_cache and cache_required need a cache_key: a name for the cells")
    if options.cache_key is not None and not memory.can_save:
        raise ConfigError(
            f"cache_key={options.cache_key!r}: this model's memory cannot be copied out"
        )
    check_scoring(options, backend)
    if options.n_keep is not None and options.n_discard is None:
        raise ConfigError(f"n_keep={options.n_keep} has no effect without n_discard")
    if options.n_discard and (not memory.can_shift or backend.n_piece):
        why = "exact=True" if memory.can_shift else "this model's memory, which"
        raise ConfigError(
            f"n_discard={options.n_discard} cannot be had with {why}: "
            + ("what is moved is not what would be computed" if memory.can_shift else "cannot move")
        )
    for name, _ in options.adapters:
        if name not in backend.adapters:
            known = ", ".join(backend.adapters) or "none"
            raise ConfigError(f"adapter {name!r} is not loaded; loaded are: {known}")


def check_scoring(options: RunOptions, backend: Backend) -> None:
    """Refuse cells from disk for a prompt that is scored, and such cells for others where they would be other bits.

    Raises:
        ConfigError: `cache_required`, or `save_cache` with `exact=True`.
    """
    if options.n_prompt_logprobs is None:
        return
    if options.cache_required:
        raise ConfigError(
            "cache_required cannot be had with prompt_logprobs or echoed logprobs, for which all of the prompt is "
            "computed: leave it out"
        )
    if options.save_cache and backend.n_piece > N_TARGETS_MAX:
        raise ConfigError(
            f"save_cache with prompt_logprobs or echoed logprobs and exact=True needs n_ubatch={N_TARGETS_MAX} or "
            f"less, not {backend.n_piece}: save the cells by a request of its own"
        )


def check_chat(prompt: BatchPrompt, options: RunOptions, vocab: Vocab) -> None:
    """Refuse options for a chat where there is none, or where its template would ignore them.

    Raises:
        ConfigError: `tools` or `chat_template_kwargs` for a prompt without messages, `echo` for one with them; a choice
            of no tools.
        UnsupportedOptionError: a template without tools.
    """
    if options.echo and prompt.messages is not None:
        raise ConfigError(
            "echo is for raw prompts and tokens, and this is a chat, whose prompt is what the template makes of it: "
            "leave echo out; prompt_logprobs tells of each token of the prompt"
        )
    tools = options.offered_tools
    for name in ("tools", "chat_template_kwargs"):
        if getattr(options, name) and prompt.messages is None:
            raise ConfigError(
                f"{name} is for the chat template, and this prompt has no messages: give messages, "
                f"or {name}={'[]' if name == 'tools' else '{}'} with the prompt"
            )
    if tools and vocab.tool_refusal:
        raise UnsupportedOptionError("tools", reason=vocab.tool_refusal)


def check_extension(result: BatchResult, n_tokens: int) -> None:
    """Refuse to go on from what has ended by itself.

    Raises:
        ConfigError: `n_tokens` is no number of tokens, or the result has an end.
    """
    if isinstance(n_tokens, bool) or not isinstance(n_tokens, int) or n_tokens < 1:
        raise ConfigError(f"extend takes a number of tokens, at least 1, not {n_tokens!r}")
    if result.error is not None:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r} with an error, which leaves nothing to go on "
            f"from: {result.error}"
        )
    if result.finish_reason not in EXTENSIBLE:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r}: only "
            f"{', '.join(EXTENSIBLE)} leave something to go on from"
        )
    if result.usage.context_shifts:
        raise ConfigError(
            f"result {result.id!r} had tokens taken out of its window: what it was computed from is gone"
        )


EXTENSIBLE = ("length", "cancelled", "timeout")
"""How a result may have ended that there is something to go on from."""


def _choice(request: Request, i: int) -> Request:
    """Return a request for one of several choices: each has a seed of its own, the first that of the request."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + i) % (MAX_SEED + 1))
    # the prompt is scored once, and told to all by `Choices`
    n_top = request.n_prompt_logprobs if i == 0 else None
    id = member_id(request.id, i)
    return replace(request, id=id, sampling=sampling, n_prompt_logprobs=n_top)


def _with_prompt(request: Request, result: BatchResult) -> Request:
    """Return a request with what its result says of the prompt, where that is all of it."""
    found = result.prompt_logprobs or ()
    if len(found) != result.usage.prompt_tokens or None in found[1:]:
        return request
    if request.options.prompt_logprobs != request.options.n_prompt_logprobs:  # the echo has more
        found = (None, *(result.logprobs or ())[1 : len(found)])
    return replace(request, n_prompt_logprobs=None, prompt_logprobs=found)


def _end_feed(mailbox: weakref.ref[Mailbox]) -> None:
    alive = mailbox()
    if alive is not None:
        alive.end_feed()


def tokenize(vocab: Vocab, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
    """Return a prompt's tokens.

    Raises:
        RequestFailedError: a token id that is not in the vocabulary, or a template that refuses the messages.
    """
    if prompt.prompt is not None:
        return vocab.tokenize(prompt.prompt)
    if prompt.messages is not None:
        return vocab.render(prompt.messages, options.template_variables)
    tokens = prompt.tokens or ()
    if tokens and max(tokens) >= vocab.n_vocab:
        raise PromptError(f"token {max(tokens)} is not in the vocabulary of {vocab.n_vocab}")
    return tokens


def is_in_event_loop() -> bool:
    """Whether this thread runs one now, of asyncio or trio."""
    try:
        current_token()
    except RuntimeError:
        return False
    return True
