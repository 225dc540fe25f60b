"""One request from submission to its end: its tokens, its place, and why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from cbatch.chat.answers import N_TAIL
from cbatch.chat.text import TextStream
from cbatch.core.plan import (
    BROKEN_ROW,
    EMPTY_ROW,
    FREE,
    N_TARGETS_MAX,
    Binding,
    Chunk,
    GrammarStep,
    Slot,
)
from cbatch.core.request import RequestClock
from cbatch.errors import (
    CacheError,
    CBatchError,
    DeadlineError,
    GrammarError,
    PromptError,
    PromptTooLongError,
    RequestCancelledError,
    RequestFailedError,
    SequenceStateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.chat.answers import Answer, AnswerReader
    from cbatch.core.plan import TokenLogprobs
    from cbatch.core.request import Request
    from cbatch.options import Breakers, Grammar, Sampling
    from cbatch.response import FinishReason

MAX_OUTPUT = 2**31 - 1
"""Stands for an output without end, where the window moves on."""


class Status(Enum):
    """Where a sequence is in its life; prefill and decode are derived from its counters."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Wait(Enum):
    """What a waiting sequence waits for, besides a slot. Only `CELLS` holds up those behind it."""

    COMPILE = "compile"
    """its grammar, or what DRY needs of the vocabulary"""
    LEADER = "leader"
    """another sequence that computes the same prefix"""
    CACHE = "cache"
    """its cells, which are read from disk"""
    RESTORE = "restore"
    """its cells, which stand in host memory or have to be computed again"""
    CELLS = "cells"
    """room in the pool"""


class Event(Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    PREEMPT = "preempt"
    PAUSE = "pause"
    RESUME = "resume"
    REQUEUE = "requeue"
    FINISH = "finish"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.PAUSE): Status.PAUSED,
    (Status.WAITING, Event.FINISH): Status.FINISHED,
    (Status.RUNNING, Event.PREEMPT): Status.WAITING,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.FINISH): Status.FINISHED,
    (Status.PAUSED, Event.RESUME): Status.RUNNING,
    (Status.PAUSED, Event.REQUEUE): Status.WAITING,
    (Status.PAUSED, Event.FINISH): Status.FINISHED,
}
"""Every change of status there is; a pair that is not here raises and changes nothing."""


@dataclass(eq=False, slots=True)
class SequenceDriver:
    """The tokens of one request and how far they have come.

    # [0, n_prompt) given   [n_prompt, n_tokens) sampled
    # [0, n_computed) have cells   [n_computed, n_tokens) pending
    # [0, len(scores)) were computed with a score for the token behind, where the prompt is scored

    Where the window was full and tokens were taken out of it, they are no more in `tokens` and its counters; `output`
    keeps all that was sampled.
    """

    request: Request
    clock: RequestClock
    text: TextStream
    reader: AnswerReader | None = None
    """Takes the answer apart when it has ended, where it is more than text."""
    answer: Answer | None = None
    prompt_tail: Sequence[int] = ()
    """The prompt's last tokens, for the reader."""
    status: Status = Status.WAITING
    waits_for: Wait | None = None
    number: int = 0
    """Its place in the order of submission, never used again: who is older has the lower one."""
    slot: Slot | None = None
    tokens: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    n_prompt: int = 0
    n_given: int = 0
    """Tokens of the prompt, those included that were taken out of the window."""
    n_computed: int = 0
    n_cap: int = 0
    n_window: int = 0
    n_keep: int = 0
    """Tokens that are not taken out of the window."""
    n_shifts: int = 0
    whole_prompt: tuple[int, ...] = ()
    """The prompt as it was given, where tokens were taken out of the window."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that it sampled itself, where they are asked for."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens behind the first, where they are asked for, as far as they are known."""
    warnings: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: CBatchError | None = None
    refusal: CBatchError | None = None
    """Why its prompt cannot be computed, where that was found out before its turn."""
    constraint: object = None
    """Its grammar, compiled."""
    dry_breakers: tuple[tuple[int, ...], ...] | None = None
    saved_key: int | None = None
    """Under which its cells stand in host memory while it has no slot."""
    n_preempted: int = 0
    """How often its slot was taken for want of cells."""
    n_overtaken: int = 0
    """How many were admitted before it while it waited for cells at the head of the queue."""
    has_fetched: bool = False
    """Whether cells on disk were asked for."""
    load_followers: tuple[SequenceDriver, ...] = ()
    """Who waits to copy what it begins with from disk."""
    n_taken: int = 0
    """Tokens whose cells it took over when it first got a slot."""
    n_reached: int = 0
    """The most tokens that ever had cells: what is computed below is computed again."""
    n_before_turn: int = 0
    """Output it had when it got its slot."""
    is_watched: bool = False
    """Whether somebody reads its output as it comes."""
    has_end_token: bool = False
    """Whether the last token is the one that ended the sequence; it is no part of the answer then."""
    n_given_parts: int = 0
    n_given_tokens: int = 0
    has_echoed: bool = False
    """Whether a reader was given the prompt, where it is echoed."""

    @classmethod
    def of(
        cls,
        request: Request,
        piece: Callable[[int], bytes],
        now: float,
        reader: AnswerReader | None = None,
    ) -> SequenceDriver:
        """Return a waiting sequence for `request`, submitted `now`."""
        options = request.options
        stops = tuple(options.stop or ())
        text = TextStream(piece, stops, include_stop=bool(options.include_stop))
        return cls(request, RequestClock(now), text, reader)

    @property
    def n_tokens(self) -> int:
        """Tokens that exist."""
        return len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens that have no cell yet."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """Whether one token of its output is pending, and nothing else."""
        return self.n_pending == 1 and self.n_computed >= self.n_prompt

    @property
    def n_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.output)

    @property
    def n_cached(self) -> int:
        """Prompt tokens whose cells it took over when it first got a slot."""
        return min(self.n_taken, self.n_given)

    @property
    def n_begun(self) -> int:
        """Tokens that it computed for its first sampled one, each once: of the prompt, and of what it goes on from."""
        return self.n_given + len(self.request.output) - self.n_taken

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the caller's stop token, that it ended by."""
        if self.finish_reason not in ("stop", "tool_calls"):
            return None
        if self.has_end_token:
            token = self.output[-1]
            return token if token in (self.request.options.stop_token_ids or ()) else None
        return self.text.stop

    @property
    def is_capped(self) -> bool:
        """Whether its output has a cap that was asked for: else what the window holds is its end."""
        return self.n_cap == self.request.options.max_tokens

    @property
    def n_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.n_cap - len(self.output)

    @property
    def n_room(self) -> int:
        """Tokens that may still be sampled before some are taken out of the window."""
        return min(self.n_left, self.n_window + 1 - len(self.tokens))

    @property
    def n_discard(self) -> int:
        """Tokens to take out of a full window at once; 0 where it ends there."""
        asked = self.request.options.n_discard or 0
        return min(asked, self.n_window - self.n_keep - 1)

    @property
    def is_over_window(self) -> bool:
        """Whether the next token has no place before others are taken out."""
        return len(self.tokens) > self.n_window

    def n_to_boundary(self, chunk_alignment: int) -> int:
        """Return how many pending tokens reach the next boundary: prompts end at multiples of `chunk_alignment`.

        Output that is computed again goes one token at a time, as it was computed first.
        """
        if self.n_computed >= self.n_prompt:
            return 1
        chunk_alignment = self.own_alignment(chunk_alignment)
        boundary = (self.n_computed // chunk_alignment + 1) * chunk_alignment
        return min(self.n_prompt, boundary) - self.n_computed

    def own_alignment(self, chunk_alignment: int) -> int:
        """Return the size of this prompt's pieces, where `chunk_alignment` is the usual one."""
        is_scored = self.request.options.n_prompt_logprobs is not None
        return min(chunk_alignment, N_TARGETS_MAX) if is_scored else chunk_alignment

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.request.n_prompt_logprobs is not None and len(self.scores) < self.n_prompt - 1

    @property
    def n_takeable(self) -> int:
        """The most cells that it can begin with: what is to be sampled or scored from is computed for its logits."""
        return len(self.scores) if self.is_scoring else len(self.tokens) - 1

    @property
    def n_turn(self) -> int:
        """Tokens sampled since it got its slot."""
        return self.n_output - self.n_before_turn

    @property
    def has_run(self) -> bool:
        """Whether it ever had a slot."""
        return self.clock.admitted_s is not None

    @property
    def is_held(self) -> bool:
        """Whether it waits for something that its turn does not bring."""
        return self.waits_for in (Wait.COMPILE, Wait.LEADER, Wait.CACHE)

    @property
    def n_lasting(self) -> int:
        """Tokens whose cells are as any text that begins so would compute them: those before what was moved."""
        return min(self.n_computed, self.n_keep if self.n_shifts else self.n_tokens)

    @property
    def is_prepared(self) -> bool:
        """Whether its prompt is tokens already, or known to be refused."""
        return self.n_given > 0 or self.refusal is not None

    def prepare(self, tokens: Sequence[int], n_window: int) -> None:
        """Take the prompt's tokens.

        Raises:
            RequestFailedError: the prompt has no token.
            PromptTooLongError: the prompt does not fit the window, or not with all of a strict cap. Nothing has
                changed then.
        """
        options = self.request.options
        n_prompt, cap = len(tokens), 0 if options.prefill_only else options.max_tokens
        if not n_prompt:
            raise PromptError("the prompt is empty: it has no token")
        n_least = self._n_least(cap)
        if n_prompt + n_least > n_window:
            raise PromptTooLongError(n_prompt, n_window, n_least)
        self.tokens = [*tokens, *self.request.output]
        self.output = list(self.request.output)
        self.n_prompt = self.n_given = n_prompt
        self.prompt_tail = tokens[-N_TAIL:] if self.reader else ()
        self.n_window = n_window
        endless = MAX_OUTPUT if options.n_discard else n_window - n_prompt
        self.n_cap = endless if cap is None else min(cap, endless)
        if cap is not None and cap > endless:
            self.warnings.append(
                f"max_tokens is {endless}, not {cap}: the prompt has {n_prompt} and the window {n_window}"
            )

    def _n_least(self, cap: int | None) -> int:
        """Return how much output there must be room for: all that may come, or one token more than it goes on from."""
        options, n_next = self.request.options, 1
        if not options.n_discard:
            n_next += len(self.request.output)
            if options.strict_max_tokens and cap is not None:
                return cap
        return n_next if cap is None else min(cap, n_next)

    def keep_in_window(self, n_default: int) -> None:
        """Settle what may be taken out of the window: all but `n_keep` tokens, or `n_default` where nothing is said."""
        options = self.request.options
        if not options.n_discard:
            return
        asked = n_default if options.n_keep is None else options.n_keep
        n_asked = self.n_prompt if asked < 0 else asked
        self.n_keep = min(n_asked, self.n_prompt, self.n_window - 2)
        if self.n_keep < n_asked:
            is_all = self.n_keep == self.n_prompt
            why = f"prompt has {self.n_prompt}" if is_all else f"window has {self.n_window}"
            self.warnings.append(f"n_keep is {self.n_keep}, not {n_asked}: the {why}")
        if self.n_discard < options.n_discard:
            self.warnings.append(
                f"n_discard is {self.n_discard}, not {options.n_discard}: "
                f"the window has {self.n_window} and {self.n_keep} are kept"
            )

    def shift(self) -> tuple[int, int]:
        """Take tokens out of the full window; return how many are kept before them, and how many cells go with them."""
        n_keep, n_discard = self.n_keep, self.n_discard
        n_cells = max(0, min(n_discard, self.n_computed - n_keep))
        if not self.n_shifts:
            self.whole_prompt = tuple(self.tokens[: self.n_prompt])
        del self.tokens[n_keep : n_keep + n_discard]
        self.n_prompt = max(n_keep, self.n_prompt - n_discard)
        self.n_computed -= n_cells
        self.n_reached = max(self.n_computed, self.n_reached - n_discard)
        self.n_shifts += 1
        return n_keep, n_cells

    def admit(self, slot: Slot, now: float) -> None:
        """Enter `slot`: for the first time, or again."""
        self._move(Event.ADMIT)
        self.slot, self.waits_for = slot, None
        self.n_before_turn = self.n_output
        if self.clock.admitted_s is None:
            self.clock.admitted_s = now

    def preempt(self) -> None:
        """Leave the slot and wait for another."""
        self._move(Event.PREEMPT)
        self.slot, self.waits_for = None, Wait.RESTORE

    def pause(self) -> None:
        """Stop where it is: out of the queue, or in its slot with its cells."""
        self._move(Event.PAUSE)

    def resume(self) -> None:
        """Go on in the slot, after a pause."""
        self._move(Event.RESUME)

    def requeue(self) -> None:
        """Wait for a slot, after a pause."""
        self._move(Event.REQUEUE)
        if not self.is_held:
            self.waits_for = Wait.RESTORE if self.has_run else None

    def binding(self, slot: Slot) -> Binding:
        """Return what the backend must know of this sequence in `slot`."""
        request = self.request
        output_origin = len(self.tokens) - len(self.output)  # tokens that left the window lower it
        is_bound = self.constraint is not None
        return Binding(
            slot,
            output_origin,
            self._sampling,
            request.stop_tokens,
            self.history,
            request.n_logprobs,
            request.n_prompt_logprobs or 0,
            constraint=self.constraint,
            output=tuple(self.output) if is_bound else (),
        )

    @property
    def _sampling(self) -> Sampling:
        found = self.request.sampling
        return replace(found, dry_breakers=self.dry_breakers) if self.dry_breakers else found

    @property
    def lacks(self) -> tuple[Grammar | Breakers, ...]:
        """What has to be compiled before it can run, and is not yet."""
        wants = (
            (self.request.grammar, self.constraint),
            (self.request.breakers, self.dry_breakers),
        )
        return tuple(want for want, made in wants if want is not None and made is None)

    def equip(self, want: Grammar | Breakers, made: Any) -> None:
        """Take what was compiled."""
        if want == self.request.grammar:
            self.constraint = made
        else:
            self.dry_breakers = made

    @property
    def history(self) -> tuple[int, ...]:
        """All its tokens, those included that were taken out of the window."""
        return (*self.whole_prompt, *self.output) if self.n_shifts else tuple(self.tokens)

    def chunk(self, slot: Slot, n_tokens: int) -> Chunk:
        """Return the next `n_tokens` pending tokens as a part of a plan; changes nothing."""
        start, end = self.n_computed, self.n_computed + n_tokens
        has_output = end == len(self.tokens) and self.n_cap > 0
        if n_tokens == 1 and (has_output or not self.is_scoring):
            return Chunk(slot, start, (self.tokens[start],), has_output)
        if not self.is_scoring:
            return Chunk(slot, start, self.tokens[start:end], has_output)
        targets = self.tokens[start + 1 : start + 1 + self.n_targets(n_tokens)]
        return Chunk(slot, start, self.tokens[start:end], has_output, targets)

    def n_targets(self, n_tokens: int) -> int:
        """Return how many of the next `n_tokens` pending tokens are followed by one to score."""
        if not self.is_scoring or self.n_computed < len(self.scores):
            return 0
        return min(n_tokens, self.n_prompt - 1 - self.n_computed)

    def n_within(self, n_tokens: int, n_targets: int) -> int:
        """Return how many of the next `n_tokens` pending tokens a step takes that can score `n_targets`.

        What is scored is computed again without that, up to where scoring goes on.
        """
        if self.is_scoring and self.n_computed < len(self.scores):
            return min(n_tokens, len(self.scores) - self.n_computed)
        return n_tokens if self.n_targets(n_tokens) <= n_targets else n_targets

    def take_scores(self, scores: Sequence[TokenLogprobs]) -> bool:
        """Take what a run brought for the prompt; return whether all are numbers."""
        self.scores += scores
        return not any(math.isnan(score.logprob) for score in scores)

    def accept(
        self,
        n_chunk: int,
        sampled: list[int],
        now: float,
        guidance: GrammarStep = FREE,
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        later_s: float = 0.0,
    ) -> None:
        """Take what a run brought: `n_chunk` tokens of the plan got cells, then `sampled` came one a step.

        The run ended `now`, its first step `later_s` before that.
        Where log-probabilities are asked for, `logprobs` are those of the sampled tokens, and no token is forced.
        Ends the sequence where its last token ends it. A stop token, and the end of its grammar, come before the cap
        when they fall together.
        """
        self.n_computed += n_chunk + max(0, len(sampled) - 1)
        self.n_reached = max(self.n_reached, self.n_computed)
        if not sampled:
            if self.n_computed == len(self.tokens):  # nothing is to be sampled
                self.clock.computed_s = now
                self.finish("length", now)
            return
        is_broken = sampled[-1] < 0
        good = sampled[:-1] if is_broken else sampled
        if good:
            if logprobs:
                self.logprobs.extend(logprobs[: len(good)])
            n_before = len(self.output)
            self._append(good, now, is_last=guidance.is_complete and not guidance.forced)
            n_dropped = n_before + len(sampled) - len(self.output)
            if n_dropped or self.clock.first_token_s is None:
                self.clock.take_tokens(len(sampled), n_dropped, now, later_s)
            else:
                self.clock.last_token_s = now
        if guidance.problem and self.finish_reason is None:
            self.fail_grammar(guidance.problem, now)
        elif is_broken and self.finish_reason is None:
            self.fail_row(now, sampled[-1])
        if guidance.forced:
            self._append_forced(guidance, now)

    def _append_forced(self, guidance: GrammarStep, now: float) -> None:
        for n_behind in range(len(guidance.forced), 0, -1):
            # what a full window has no place for is sampled under the grammar when the window has moved
            if self.finish_reason is not None or self.is_over_window:
                break
            token = guidance.forced[-n_behind]
            self._append([token], now, is_last=guidance.is_complete and n_behind == 1)
            self.clock.last_token_s = now

    def _append(self, tokens: list[int], now: float, *, is_last: bool) -> None:
        self.tokens.extend(tokens)
        self.output.extend(tokens)
        self._check_end(now, is_complete=is_last)

    def fail_row(self, now: float, stands_for: int = BROKEN_ROW) -> None:
        """End a sequence that no token was sampled for, by what stands for it."""
        if stands_for != EMPTY_ROW:
            reason = "the model's logits are not numbers"
        elif self.request.grammar is not None:
            bans = "logit_bias, the model's file or its logits rule out all that it allows"
            self.fail_grammar(f"no token is left to go on with: {bans}", now)
            return
        else:
            reason = "no token is left to sample: logit_bias, the model's file or its logits rule out every one"
        self.finish("error", now, RequestFailedError(reason))

    def fail_grammar(self, reason: str, now: float) -> None:
        """End a sequence whose grammar cannot be compiled, or not be followed any further."""
        grammar = self.request.grammar
        self.finish("error", now, GrammarError(grammar.kind if grammar else "", reason))

    def take_over(self, n_cells: int) -> None:
        """Begin with `n_cells` cells that somebody else computed."""
        if not self.n_reached:
            self.n_taken = n_cells
        self.n_computed = n_cells
        self.n_reached = max(self.n_reached, n_cells)

    def proceed_uncached(self, error: CacheError) -> None:
        """Begin without cells from disk: refused where it wants nothing else, else warned, but for who saves first."""
        options = self.request.options
        if options.cache_required:
            self.refusal = error
        elif not (error.is_missing and options.save_cache):
            self.warnings.append(str(error))

    def adopt(self, key: int, n_cells: int) -> None:
        """Wait with `n_cells` cells that were read from disk and stand in host memory under `key`."""
        self.saved_key = key
        self.take_over(n_cells)

    def release_load_followers(self) -> None:
        """Let those ask for the file themselves that were to copy what this one does not load now."""
        for other in self.load_followers:
            other.has_fetched = other.has_fetched and other.has_run
        self.load_followers = ()

    def lose_adopted(self) -> None:
        """Take in that the cells from disk could not be put into a slot: they have to be computed."""
        self.n_computed = self.n_taken = self.n_reached = 0

    def ask_again(self) -> None:
        """Take in that the cells from disk are gone before they were of use: where it has no slot it asks once more."""
        self.lose_adopted()
        self.has_fetched = False
        self.release_load_followers()

    def rewind(self, n_computed: int = 0) -> None:
        """Forget the cells behind the first `n_computed`: their tokens are pending again."""
        self.n_computed = n_computed

    def cancel(self, now: float) -> None:
        """End on demand: with the partial text, or with an error where it never ran."""
        never_ran = RequestCancelledError("cancelled before it got a slot")
        self.finish("cancelled", now, None if self.has_run else never_ran)

    def expire(self, now: float) -> None:
        """End because its time is over: with the partial text, or with an error where it never ran."""
        never_ran = DeadlineError(now - self.clock.submitted_s)
        self.finish("timeout", now, None if self.has_run else never_ran)

    def finish(self, reason: FinishReason, now: float, error: CBatchError | None = None) -> None:
        """End with `reason`; text that was held back comes out."""
        self._move(Event.FINISH)
        self.waits_for = None
        self.finish_reason, self.error = reason, error
        self.clock.finished_s = now
        self.feed_text()
        self.text.flush()
        if self.reader is not None:
            self._read_answer(self.reader)

    def _read_answer(self, reader: AnswerReader) -> None:
        """Take the ended answer apart: once, in proportion to its length."""
        options = self.request.options
        self.answer = reader.read(
            "".join(self.text.parts),
            self.output[: self.text.n_fed],
            self.prompt_tail,
            stops=tuple(options.stop or ()) if self.text.is_stopped else (),
            include_stop=bool(options.include_stop),
        )
        if self.answer.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def feed_text(self) -> None:
        """Bring the text up to the tokens; costs what is new since the last time."""
        start = self.text.n_fed
        end = len(self.output) - (self.has_end_token and not self.request.options.include_stop)
        if start < end and not self.text.is_stopped:
            self.text.feed(self.output[start:end])

    @property
    def given(self) -> tuple[int, ...]:
        """The prompt's tokens, those included that were taken out of the window."""
        return self.whole_prompt or tuple(self.tokens[: self.n_prompt])

    def _check_end(self, now: float, *, is_complete: bool) -> None:
        if self.tokens[-1] in self.request.stop_tokens:
            self.has_end_token = True
        is_stopped = False
        if self.text.has_stops:
            self.feed_text()
            is_stopped = self.text.is_stopped
        if is_stopped:
            n_past = len(self.output) - self.text.n_fed  # sampled past the stop string
            del self.output[len(self.output) - n_past :], self.tokens[len(self.tokens) - n_past :]
            self.has_end_token = self.has_end_token and not n_past
        if is_stopped or self.has_end_token or is_complete:
            self.finish("stop", now)
        elif self.n_left <= 0:
            self.finish("length" if self.is_capped else "window", now)

    def _move(self, event: Event) -> None:
        status = TRANSITIONS.get((self.status, event))
        if status is None:
            raise SequenceStateError(
                f"{self.request.id!r} is {self.status.value}: no {event.value}"
            )
        self.status = status
