"""Requests as their client keeps them until they end: enough to ask again when a worker dies."""

from __future__ import annotations

import math
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from msgspec import Raw, structs

from cbatch.core.request import Request
from cbatch.errors import CBatchError, ConfigError, RequestCancelledError
from cbatch.options import RunOptions
from cbatch.response import (
    BatchOutputChunk,
    BatchResult,
    FinishReason,
    Timings,
    TokenLogprob,
    Usage,
)
from cbatch.runtime.interface import Submission
from cbatch.runtime.output import Origin
from cbatch.worker.protocol_commands import Extend, HeardResult, RunCommand
from cbatch.worker.wire import (
    ResultPart,
    WireItem,
    as_text,
    encode_call,
    heard_result,
    joined,
    told_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.runtime.ids import RequestId
    from cbatch.runtime.interface import Target
    from cbatch.runtime.mailbox import Parcel
    from cbatch.worker.connection import Connection, Reply

N_ALONE_MAX = 3
"""Deaths of workers that a request is computed alone in; then it is at fault. Our choice."""

N_TOGETHER_MAX = 2
"""Deaths of workers among whose requests one is; then it is computed alone. Our choice."""


N_MESSAGE_BYTES = 2**20
"""Bytes of the prompts of a message: beyond that, another command would wait for long behind it. Our choice."""


@dataclass(frozen=True, slots=True)
class SentOrigin(Origin):
    """Where a worker's result comes from; `number` has a meaning to that worker alone."""

    worker: str
    """The key of its `Connection`; "" where it is not known."""


@dataclass(eq=False, slots=True)
class Asked:
    """One request in flight."""

    id: RequestId
    prompt: BatchPrompt
    call: Submission
    """What it has in common with others of its call, without prompts; the prompt's own options come before those."""
    place: int
    name: str
    _: KW_ONLY
    submitted_s: float
    item: Raw = field(default_factory=Raw)
    """The prompt as a worker takes it; of a request that continues a result, nothing."""
    given: Raw = field(default_factory=Raw)
    """The options as a worker takes them."""
    slot: int | None = None
    """The slot to run in, among those of all workers."""
    n_ends: int = 1
    """How often its reader is to be told of an end: once for each choice."""
    n_sequences: int = 1
    """About how many sequences a worker makes for it."""
    extended: BatchResult | None = None
    """The result that it continues, by `n_more` tokens."""
    n_more: int = 0
    worker: Connection | None = None
    """Who has it; None while it waits for a worker."""
    first_slot: int = 0
    """The number of its worker's first slot among those of all workers."""
    has_begun: bool = False
    """Whether it is computed, as far as its worker has said."""
    n_deaths: int = 0
    n_deaths_alone: int = 0
    is_paused: bool = False
    n_resumed: int | None = None
    """Tokens after which it pauses, where it was resumed for so many."""
    is_unwanted: bool = False
    """Whether it is not to be asked again."""
    is_unwanted_waiting: bool = False
    """Whether it is not to begin any more."""
    is_awaited: bool = False
    """Whether its caller waits for what the worker says to it, and raises an error itself."""
    reply: Reply | None = None
    """What the worker says to it."""
    taker: Connection | None = None
    """Who has asked its worker to give it back."""
    is_cut_off: bool = False
    """Whether it was cancelled when its worker gave it back, or died."""
    heard: list[BatchOutputChunk] = field(default_factory=list)
    """What its reader has got."""
    echo: tuple[TokenLogprob, ...] = ()
    """The log-probabilities that the first choice begins with, as far as others needed them."""
    ended: set[int] = field(default_factory=set)
    """The choices of which it has got the last chunk."""
    request: Request | None = None
    """What results come from, once there is one: made once, for its options may be large."""
    parts: list[ResultPart] = field(default_factory=list)
    """What has come of a result that comes later."""

    @classmethod
    def of(cls, submission: Submission, given: Raw) -> Iterator[Asked]:
        """Yield the requests of a submission whose options are `given` as they are sent.

        Raises:
            ConfigError: a prompt has a value that cannot be sent.
        """
        now, s = time.perf_counter() - submission.age_s, submission
        call = replace(s, prompts=(), ids=(), names=(), places=(), is_part=s.is_group)
        for prompt, id, name, place in zip(s.prompts, s.ids, s.names, s.places, strict=True):
            own = RunOptions.of(prompt.options)
            n = own.n if own.n is not None else s.options.n
            yield cls(
                id,
                prompt,
                call,
                place,
                name,
                submitted_s=now,
                item=_encoded(prompt, id, name),
                given=given,
                slot=own.slot if own.slot is not None else s.options.slot,
                n_ends=n or 1,
                n_sequences=max(n or 1, own.n_sequences, s.options.n_sequences),
                is_paused=s.is_paused,
            )

    @classmethod
    def to_extend(cls, result: BatchResult, id: RequestId, n_more: int, target: Target) -> Asked:
        """Return the request that continues a result, which has an origin."""
        origin = result.origin
        assert isinstance(origin, Origin)
        request, now = origin.request, time.perf_counter()
        call = Submission((), (), (), request.options, math.inf, target, ())
        more = cls(id, request.prompt, call, 0, "", submitted_s=now)
        more.extended, more.n_more, more.slot = result, n_more, request.options.slot
        return more

    # ---- to a worker ----

    @property
    def its_item(self) -> Raw:
        """The prompt as its worker takes it, with that worker's own number of the slot."""
        there = self._prompt_there
        return self.item if there is self.prompt else _encoded(there, self.id, self.name)

    @property
    def _prompt_there(self) -> BatchPrompt:
        if self.slot is None or not self.first_slot:
            return self.prompt
        own = RunOptions(slot=self.slot - self.first_slot).over(RunOptions.of(self.prompt.options))
        return replace(self.prompt, options=own)

    @property
    def has_own_slot(self) -> bool:
        """Whether its prompt's own options ask for the slot."""
        return RunOptions.of(self.prompt.options).slot is not None

    def message(self, now: float) -> RunCommand | Extend:
        """Return the command that submits it; but for an extension, prompts and options are to be added."""
        call, is_paused = self.call, self.is_paused or self.n_resumed is not None
        if self.extended is not None:
            return self._extension(self.extended, is_paused=is_paused)
        return RunCommand(
            items=[],
            stream=call.target.is_streamed,
            by_token=call.target.wants_tokens,
            paused=is_paused,
            fed=call.is_fed,
            may_wait=call.may_wait,
            checked=call.is_checked,
            part=call.is_part,
            job=call.job,
            texts=call.texts,
            seconds=None if call.ends_s == math.inf else max(0.0, call.ends_s - now),
            age_s=round(now - self.submitted_s, 3),
        )

    def _extension(self, result: BatchResult, *, is_paused: bool) -> Extend:
        origin = self._origin()
        request = origin.request
        return Extend(
            prompt=WireItem.of(request.prompt, request.id),
            options=told_options(request.options),
            result=HeardResult(
                origin.finish_reason,
                origin.usage,
                request.sampling.seed,
                token_ids=origin.token_ids,  # type: ignore[arg-type]
                logprobs=result.logprobs,  # type: ignore[arg-type]
                prompt_logprobs=result.prompt_logprobs,  # type: ignore[arg-type]
                origin=origin.number,
            ),
            n_tokens=self.n_more,
            stream=self.call.target.is_streamed,
            by_token=self.call.target.wants_tokens,
            paused=is_paused,
        )

    def _origin(self) -> Origin:
        """Return what it continues from, without a number that its worker does not know."""
        assert self.extended is not None
        origin = self.extended.origin
        assert isinstance(origin, Origin)
        origin = replace(origin, request=replace(origin.request, prompt=self._prompt_there))
        is_known = self.worker and getattr(origin, "worker", "") == self.worker.key
        return origin if is_known else replace(origin, number=-1)

    @property
    def deadline_s(self) -> float:
        """When the request's time is over, by `time.perf_counter`."""
        own = RunOptions.of(self.prompt.options).timeout_s
        seconds = self.call.options.timeout_s if own is None else own
        return min(self.call.ends_s, math.inf if seconds is None else self.submitted_s + seconds)

    @property
    def n_choices(self) -> int:
        """Answers that are kept."""
        own = RunOptions.of(self.prompt.options).n
        return (self.call.options.n if own is None else own) or 1

    @property
    def is_refused(self) -> bool:
        """Whether its worker has said that it does not take it."""
        return self.reply is not None and self.reply.error is not None

    @property
    def must_be_alone(self) -> bool:
        """Whether no other request may be in its worker: workers have died with it."""
        return self.n_deaths >= N_TOGETHER_MAX

    def leave_worker(self) -> None:
        """Be without a worker, as if it had not been sent."""
        self.is_unwanted_waiting = self.is_unwanted_waiting and not self.has_begun
        self.worker, self.reply, self.has_begun, self.parts = None, None, False, []

    def pause(self) -> bool:
        """Note that it is to be paused; return whether it was not."""
        was_paused, self.is_paused, self.n_resumed = self.is_paused, True, None
        return not was_paused

    def resume(self, n_tokens: int | None) -> bool:
        """Note that it is to go on, for `n_tokens` where given; return whether it was paused."""
        was_paused, self.is_paused = self.is_paused, False
        if was_paused or self.n_resumed is not None:
            self.n_resumed = n_tokens
        return was_paused

    def give_up(self, *, is_for_waiting: bool) -> None:
        """Note that its caller has cancelled it, or does not want it to begin any more."""
        if is_for_waiting:
            self.is_unwanted_waiting = True
        else:
            self.is_unwanted = True

    @property
    def can_move(self) -> bool:
        """Whether another worker is as good: it waits for a slot, and neither for one slot nor where its cells are."""
        is_bound = self.slot is not None or self.extended is not None
        return not (self.has_begun or self.is_paused or is_bound)

    @property
    def is_given_up(self) -> bool:
        """Whether its caller has cancelled it: no other worker is to get it."""
        return self.is_unwanted or (self.is_unwanted_waiting and not self.has_begun)

    @property
    def is_poison(self) -> bool:
        """Whether one worker after the other has died of it alone."""
        return self.n_deaths_alone >= N_ALONE_MAX

    def goes_on(self, *, is_suspect: bool) -> bool:
        """Note that its worker died; return whether it is asked again: it had not begun, or its batch wants that.

        Args:
            is_suspect: whether it may be at fault, though it had not begun: no other request had begun either.
        """
        if not (self.has_begun or is_suspect):
            return True
        self.n_deaths_alone += self.must_be_alone
        self.n_deaths += 1
        can_repeat = not self.has_begun or (self.call.asks_again and not self.heard)
        return can_repeat and not self.is_poison

    def absolve(self) -> None:
        """Forget the deaths of workers in which it was not alone: another request has been found at fault."""
        if not self.n_deaths_alone:
            self.n_deaths = 0

    # ---- from a worker ----

    def origin_of(self, result: BatchResult, number: int, owner: str) -> SentOrigin:
        """Return where a result comes from: this request, or one of its choices, which share all but their seeds."""
        worker = "" if self.worker is None else self.worker.key
        request = self.request or self._request(result.seed, owner)
        self.request = request
        if result.seed != request.sampling.seed:
            request = replace(request, sampling=replace(request.sampling, seed=result.seed))
        return SentOrigin(
            request, number, result.token_ids, result.finish_reason, result.usage, worker
        )

    def _request(self, seed: int, owner: str) -> Request:
        """Return what each of its results continues."""
        options = RunOptions.of(self.prompt.options).over(self.call.options)
        if options.n is not None or options.best_of is not None:
            options = replace(options, n=None, best_of=None)
        return Request(
            self.id,
            self.prompt,
            options,
            options.sampling({}, seed),
            n_logprobs=options.n_logprobs,
            n_prompt_logprobs=options.n_prompt_logprobs,
            owner=owner,
        )

    def read_chunk(self, said: BatchOutputChunk) -> BatchOutputChunk:
        """Return a chunk that its worker sends, with the request's id. Raises a ConfigError where it cannot be one."""
        if said.index and not 0 <= said.index < self.n_choices:
            raise ConfigError(
                f"got a chunk of choice {said.index}, but there are {self.n_choices} choices"
            )
        object.__setattr__(said, "id", self.id)  # nobody else has it yet, and a copy takes long
        return said

    def hear(self, chunk: BatchOutputChunk) -> list[BatchOutputChunk]:
        """Keep a chunk that its worker has sent, and return it; nothing of one that comes after its choice's end.

        A further choice gets the log-probabilities of its echo here: the worker told those of the first one.
        """
        if chunk.index in self.ended:
            return []
        if chunk.index and chunk.logprobs is not None:
            n_echoed = len(chunk.token_ids) - len(chunk.logprobs)
            if n_echoed > 0:
                object.__setattr__(chunk, "logprobs", (*self._echo(n_echoed), *chunk.logprobs))
        if chunk.finish_reason is not None:
            self.ended.add(chunk.index)
        self.has_begun = True
        self.heard.append(chunk)
        return [chunk]

    def _echo(self, n: int) -> Sequence[TokenLogprob]:
        """Return the first `n` log-probabilities of the first choice."""
        if len(self.echo) < n:
            scores = (chunk.logprobs or () for chunk in self.heard if not chunk.index)
            self.echo = tuple(islice(chain.from_iterable(scores), n))
        return self.echo[:n]

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Tell its reader of its end."""
        self.count_ends(len(chunks))
        self.call.target.deliver(chunks, results)

    def count_ends(self, n_more: int = 0) -> None:
        """Have its reader expect the ends that have come, and `n_more`: a request may fail with one for all choices."""
        n = len(self.ended) + n_more
        if n != self.n_ends:
            self.call.target.expect_choices(1 + n - self.n_ends)
            self.n_ends = n

    def read_result(self, said: BatchResult, owner: str) -> BatchResult:
        """Return the result that its worker sends. Raises a ConfigError where it can be none of this request."""
        said, self.parts = joined(said, self.parts), []
        result = heard_result(said, self.id, partial(self.origin_of, owner=owner))
        if len(result.choices) > self.n_choices:
            raise ConfigError(
                f"got {len(result.choices)} choices, but {self.n_choices} were asked for"
            )
        return result

    def shared(self, result: BatchResult) -> BatchResult:
        """Return its result with the log-probabilities of chunks that its reader has got, not with equal ones."""
        scores: dict[int, list[TokenLogprob]] = {}
        for chunk in self.heard:
            if chunk.logprobs:
                scores.setdefault(chunk.index, []).extend(chunk.logprobs)
        if not scores:
            return result
        choices = tuple(_with(c, scores.get(i, ())) for i, c in enumerate(result.choices))
        own = (s for c, s in zip(result.choices, choices, strict=True) if _has_same(c, result))
        first = next(own, None)
        found = _with(result, scores.get(0, ())) if not choices else result
        logprobs = found.logprobs if first is None else first.logprobs
        return replace(found, choices=choices, logprobs=logprobs)

    def last_chunks(self, result: BatchResult) -> list[BatchOutputChunk]:
        """Return the only chunk of each answer of which none has come, for nobody read it; and ends that lack."""
        answers, heard = result.choices or (result,), {chunk.index for chunk in self.heard}
        left = {i: answer for i, answer in enumerate(answers) if i not in self.ended}
        reason = result.finish_reason
        return [
            BatchOutputChunk(self.id, "", (), i, reason, error=result.error)
            if i in heard
            else answer.as_chunk(i)
            for i, answer in left.items()
        ]

    # ---- without a worker ----

    def cancelled(self) -> Parcel:
        """Return what is delivered of a request that is cancelled here, for there is no worker to do it."""
        return self.cut_off(None if self.has_begun else RequestCancelledError(_TOO_EARLY))

    def cut_off(self, error: CBatchError | None) -> Parcel:
        """Return what is delivered of a request that its worker cannot end: what its reader has, and the error.

        Without an error, or with that of a cancelled request, it is cancelled.
        """
        is_cancelled = error is None or isinstance(error, RequestCancelledError)
        reason: FinishReason = "cancelled" if is_cancelled else "error"
        n = self.n_choices
        heard: dict[int, list[BatchOutputChunk]] = {}
        for chunk in self.heard:
            heard.setdefault(chunk.index, []).append(chunk)
        choices = [self._choice(heard.get(i, []), reason, error) for i in range(n)]
        left = [i for i in range(n) if i not in self.ended]
        whole = choices[left[0] if left else 0]
        if n > 1:
            n_tokens = sum(choice.usage.completion_tokens for choice in choices)
            whole = replace(whole, usage=Usage(0, n_tokens), choices=tuple(choices))
        chunks = [
            BatchOutputChunk(self.id, "", (), i, reason, error=choices[i].error) for i in left
        ]
        return chunks, [(self.place, whole)]

    def _choice(
        self, heard: Sequence[BatchOutputChunk], reason: FinishReason, error: CBatchError | None
    ) -> BatchResult:
        """Return what the reader has of one choice, by its chunks."""
        tokens = tuple(token for chunk in heard for token in chunk.token_ids)
        end = heard[-1].finish_reason if heard else None
        scores = [chunk.logprobs for chunk in heard if chunk.logprobs is not None]
        return BatchResult(
            self.id,
            "".join(chunk.content for chunk in heard),
            tokens,
            end or reason,
            None if end else error,
            Usage(0, len(tokens)),
            Timings(0.0, None, time.perf_counter() - self.submitted_s, None, None),
            seed=0,
            reasoning="".join(chunk.reasoning for chunk in heard),
            logprobs=tuple(token for found in scores for token in found) if scores else None,
        )


def _with(result: BatchResult, scores: Sequence[TokenLogprob]) -> BatchResult:
    """Return a result with these log-probabilities, where they are all of its own."""
    is_all = result.logprobs is not None and len(result.logprobs) == len(scores)
    return replace(result, logprobs=tuple(scores)) if is_all else result


def _has_same(choice: BatchResult, result: BatchResult) -> bool:
    return choice.logprobs is not None and choice.logprobs is result.logprobs


_TOO_EARLY = "cancelled before it got a slot"


def in_messages(
    some: Sequence[Asked], now: float
) -> Iterator[tuple[list[Asked], RunCommand | Extend]]:
    """Yield requests that can be sent in one message, with that message; one has about a MiB at most."""
    group: list[Asked] = []
    message: RunCommand | Extend | None = None
    n_bytes = 0
    for asked in some:
        own, n_own = asked.message(now), len(bytes(asked.item))
        is_alike = group and not asked.extended and own == message and asked.given is group[0].given
        if message and not (is_alike and n_bytes + n_own <= N_MESSAGE_BYTES):
            yield group, _filled(message, group)
            group, n_bytes = [], 0
        group.append(asked)
        message, n_bytes = own, n_bytes + n_own
    if message:
        yield group, _filled(message, group)


def _filled(message: RunCommand | Extend, group: Sequence[Asked]) -> RunCommand | Extend:
    """Return a message with the prompts and options of a group."""
    if isinstance(message, RunCommand):
        items: Any = [asked.its_item for asked in group]
        options: Any = group[0].given
        return structs.replace(message, items=items, options=options)
    return message


def _encoded(prompt: BatchPrompt, id: str, name: str) -> Raw:
    """Return a prompt as a worker takes it. Raises a ConfigError with its name."""
    try:
        item = WireItem.of(prompt, id, name)
        try:
            return Raw(encode_call(item))
        except ConfigError:
            text = as_text(structs.replace(item, id=None, name=""))
            return Raw(encode_call(WireItem(id=item.id, name=name, text=text)))
    except ConfigError as error:
        raise ConfigError(f"{name or f'request {id!r}'}: {error}") from None
