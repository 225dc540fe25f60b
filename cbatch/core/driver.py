"""One request from submission to end: statuses, tokens, finish reason; see docs/understand/lifecycle.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cbatch.chat.reply import ReplyText
from cbatch.core.plan import BROKEN_ROW, EMPTY_ROW, FREE, NO_DRAFTS, Binding, OwnProcessor, Slot
from cbatch.core.request import RequestClock
from cbatch.core.span import Span
from cbatch.errors import (
    BannedTokensError,
    DeadlineError,
    GrammarError,
    RequestCancelledError,
    RequestFailedError,
    SequenceStateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.chat.answers import AnswerReader
    from cbatch.core.plan import DraftCounts, GrammarStep, TokenLogprobs
    from cbatch.core.request import Request
    from cbatch.core.span import PromptCuts, PromptScores
    from cbatch.errors import CBatchError
    from cbatch.options import DryBreakers, Grammar, Sampling
    from cbatch.response import FinishReason


class Status(Enum):
    """Where a sequence is in its life; prefill and decode are derived from its counters."""

    WAITING = "waiting"
    """Without a slot: in the queue, or held outside it."""
    RUNNING = "running"
    PAUSED = "paused"
    """Computes nothing until resumed. It keeps its slot and cells until another sequence needs them."""
    STORING = "storing"
    """Ended and without a slot; its cells are being written to disk."""
    FINISHED = "finished"


class Event(Enum):
    """What can happen to a sequence."""

    ADMIT = "admit"
    LOSE_SLOT = "lose slot"
    PAUSE = "pause"
    RESUME = "resume"
    """Resumed with the slot that it kept."""
    REQUEUE = "requeue"
    """Resumed without a slot."""
    STORE = "store"
    FINISH = "finish"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.WAITING, Event.ADMIT): Status.RUNNING,
    (Status.WAITING, Event.PAUSE): Status.PAUSED,
    (Status.WAITING, Event.FINISH): Status.FINISHED,
    (Status.RUNNING, Event.LOSE_SLOT): Status.WAITING,
    (Status.RUNNING, Event.PAUSE): Status.PAUSED,
    (Status.RUNNING, Event.STORE): Status.STORING,
    (Status.RUNNING, Event.FINISH): Status.FINISHED,
    (Status.PAUSED, Event.RESUME): Status.RUNNING,
    (Status.PAUSED, Event.REQUEUE): Status.WAITING,
    (Status.PAUSED, Event.STORE): Status.STORING,
    (Status.PAUSED, Event.FINISH): Status.FINISHED,
    (Status.STORING, Event.FINISH): Status.FINISHED,
}
"""All changes of status. Any other pair raises an error and changes nothing."""


class Wait(Enum):
    """What a sequence outside the queue waits for; others pass it meanwhile."""

    PROMPT = "prompt"
    """The tokens of its prompt, if the prompt is long or decides the grammar or the place in the queue."""
    COMPILE = "compile"
    """Its grammar, or what DRY needs of the vocabulary."""
    LEADER = "leader"
    """Another sequence that computes the same prefix."""
    CACHE = "cache"
    """Its cells, which are read from disk."""
    END = "end"
    """Its end: it is cancelled or late with many others, and some of them end at a time."""

    __hash__ = (
        object.__hash__
    )  # every step hashes waits, and `Enum.__hash__` is a slow method in Python


@dataclass(eq=False, slots=True)
class MovingWindow:
    """How a full window moves: once all its cells are in use, `n_discard` tokens after the first `n_keep` are removed.

    Later cells were computed with the removed tokens and cannot be computed again without them. If one is lost, all
    removed tokens come back, and the window moves again at the same places, so lost cells never change an answer.
    """

    n_keep: int
    n_discard: int
    prompt: tuple[int, ...] = ()
    """The whole prompt, including removed tokens."""
    n_left_out: int = 0
    """Tokens of a prompt larger than the window that are never computed."""


@dataclass(eq=False, slots=True)
class SequenceDriver:
    """The state of one request: its tokens, how many have cells, what it waits for, why it ended.

    # [0, n_prompt) prompt   [n_prompt, n_tokens) output
    # [0, n_computed) have cells   [n_computed, n_tokens) pending

    Tokens that left a moving window are gone from `tokens` and its counters; `output` keeps all of the output.
    """

    request: Request
    clock: RequestClock
    reply: ReplyText
    status: Status = Status.WAITING
    waits_for: Wait | None = None
    leader: tuple[SequenceDriver, int] | None = None
    """The sequence that computes the prefix it waits for, and the number of cells of that prefix."""
    number: int = 0
    """Its place in the order of submission, used once. An older sequence has a lower number."""
    slot: Slot | None = None
    tokens: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each token sampled for this request, if it asks for log-probabilities."""
    n_prompt: int = 0
    n_computed: int = 0
    n_reached: int = 0
    """Most tokens that had cells at one time; computing one of them again counts as recomputed."""
    n_reused: int = 0
    """Tokens that had cells already when the sequence first got a slot."""
    n_cap: int = 0
    n_due: int = 0
    """Number of output tokens at which the sequence pauses, or ends because of its cap."""
    pause_every: int | None = None
    """Tokens to sample before the next pause, from the request or `resume`; None for no pause."""
    held: GrammarStep | None = None
    """Grammar-forced tokens, appended on resume."""
    drafted: DraftCounts = NO_DRAFTS
    """Draft tokens that were computed for it."""
    n_window: int = 0
    n_before_turn: int = 0
    """Number of output tokens when the sequence got its slot."""
    n_prompts_before: int | None = None
    """Prompt tokens that the engine had computed when the sequence first got a slot."""
    n_preempted: int = 0
    """How often the sequence lost its slot because the pool was full."""
    kept_rank: tuple[float, int] | None = None
    """Its place in the queue while it is paused there."""
    n_overtaken: int = 0
    """Sequences that were admitted while this one waited for cells at the head of the queue."""
    scores: PromptScores | None = None
    window: MovingWindow | None = None
    is_early: bool = False
    """Whether its prompt is tokenized on submission, regardless of the queue's length."""
    takes_long: bool | None = None
    """Whether its prompt takes long to tokenize; None if not estimated yet."""
    pictures: Sequence[object] = ()
    """Objects that keep the rows of its prompt's pictures and sounds in memory."""
    picture_edges: Sequence[int] = ()
    """Where pictures and sounds begin and end among the tokens, in pairs."""
    n_image_tokens: int = 0
    """How many of its prompt's tokens are rows of pictures."""
    n_audio_tokens: int = 0
    """How many of its prompt's tokens are rows of sounds."""
    is_done_with_disk: bool = False
    """Whether its file of cells must not be read (again)."""
    compiled: dict[Grammar | DryBreakers, Any] = field(default_factory=dict)
    """The compiled grammar and DRY breakers of the request."""
    saved_key: int | None = None
    """The key of its cells in host memory while it has no slot."""
    marks: tuple[int, ...] = ()
    """Positions, ascending, at which a chunk ends and a checkpoint is taken."""
    warnings: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: CBatchError | None = None
    """The error it ends with. Before the end: why its prompt cannot be computed, or its required file not be used."""

    @classmethod
    def of(
        cls,
        request: Request,
        piece: Callable[[int], bytes],
        now: float,
        reader: AnswerReader | None = None,
    ) -> SequenceDriver:
        """Return a waiting sequence for `request`, submitted `now`; `piece` gives the bytes of a token."""
        options, stops = request.options, tuple(request.options.stop or ())
        include_stop = bool(options.include_stop)
        reply = ReplyText.of(piece, stops, request.stop_tokens, reader, include_stop=include_stop)
        return cls(request, RequestClock(now), reply, pause_every=options.pause_every)

    # ---- counters ----

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and output, computed or pending."""
        return len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens without a cell. One is a decode step; more are a prompt, or tokens whose cells were lost."""
        return len(self.tokens) - self.n_computed

    @property
    def n_output(self) -> int:
        """Tokens sampled so far."""
        return len(self.output)

    @property
    def n_cached(self) -> int:
        """Prompt tokens that had cells already when the sequence first got a slot."""
        return min(self.n_reused, self.n_given)

    @property
    def is_capped(self) -> bool:
        """Whether the request's own cap ends the output, and not the window."""
        return self.n_cap == self.request.options.max_tokens

    @property
    def n_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.n_cap - len(self.output)

    @property
    def n_room(self) -> int:
        """Tokens that may still be sampled before the sequence pauses or its window moves."""
        n_due, n_free = self.n_due - len(self.output), self.n_window + 1 - len(self.tokens)
        return n_due if n_due < n_free else n_free  # faster than min(), for each row of each step

    @property
    def n_turn(self) -> int:
        """Tokens sampled since the sequence got its slot."""
        return len(self.output) - self.n_before_turn

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.scores is not None and not self.scores.is_complete

    @property
    def is_decoding(self) -> bool:
        """Whether the only pending token is one of the output."""
        return (
            bool(self.output) and self.n_pending == 1 and (self.window is None or not self.is_full)
        )

    @property
    def n_reusable(self) -> int:
        """Most tokens whose cells the sequence can reuse; a token whose logits are needed must be computed."""
        if self.scores is not None and not self.scores.is_complete:
            return self.scores.n_scored
        return len(self.tokens) - 1

    @property
    def n_lasting(self) -> int:
        """Leading tokens whose cells other sequences may reuse: those before the first shift of a moving window."""
        window = self.window
        n_lasting = window.n_keep if window and self.n_removed else len(self.tokens)
        return min(self.n_computed, n_lasting)

    @property
    def given(self) -> tuple[int, ...]:
        """The prompt's tokens, including those that left the window."""
        return self.window.prompt if self.window else tuple(self.tokens[: self.n_prompt])

    @property
    def n_given(self) -> int:
        """The number of tokens in `given`."""
        return len(self.window.prompt) if self.window else self.n_prompt

    @property
    def n_removed(self) -> int:
        """Computed tokens that have left the window; 0 if it has not moved since its first cell."""
        window = self.window
        if window is None:
            return 0
        return len(window.prompt) + len(self.output) - window.n_left_out - len(self.tokens)

    @property
    def n_shifts(self) -> int:
        """How often the window was full before the last token of the output."""
        if self.window is None:
            return 0
        n_over = self.n_given + max(0, len(self.output) - 1) - self.n_window
        return max(0, -(-n_over // self.window.n_discard))

    @property
    def is_full(self) -> bool:
        """Whether the window must move before the sequence can go on."""
        return self.window is not None and self.n_computed == self.n_window < len(self.tokens)

    @property
    def chosen_slot(self) -> Slot | None:
        """The slot that the request asks for; None for any."""
        slot = self.request.options.slot
        return None if slot is None else Slot(slot)

    @property
    def has_run(self) -> bool:
        """Whether the sequence ever had a slot."""
        return self.clock.admitted_s is not None

    def own_cuts(self, cuts: PromptCuts) -> PromptCuts:
        """Return where this prompt is cut; a scored prompt is cut at more places."""
        return cuts.when_scored if self.request.options.n_prompt_logprobs is not None else cuts

    def n_whole(self, cuts: PromptCuts, n: int) -> int:
        """Return how many of its first `n` cells the sequence can keep and continue from."""
        if n >= self.n_prompt:
            return n
        return self.own_cuts(cuts).n_whole(n, self.n_prompt, self.picture_edges)

    # ---- before its turn ----

    @property
    def is_tokenized(self) -> bool:
        """Whether its prompt was tokenized or refused."""
        return bool(self.tokens) or self.error is not None

    def set_grammar(self, grammar: Grammar | None) -> None:
        """Set the grammar, once the prompt's text has decided it."""
        self.request = replace(self.request, grammar=grammar, is_grammar_open=False)

    def begin(self, tokens: Sequence[int], n_window: int, n_cap: int) -> None:
        """Set the prompt's tokens, the most cells of its slot, and the most tokens of output."""
        self.tokens = [*tokens, *self.request.output]
        self.output = list(self.request.output)
        self.n_prompt, self.n_window, self.n_cap = len(tokens), n_window, n_cap
        self.go_on_for(self.pause_every)
        self.reply.begin(tokens)

    @property
    def has_prefix(self) -> bool:
        """Whether the leader that it waits for has computed the common prefix, or no longer runs."""
        if self.leader is None:
            return True
        leader, n_cells = self.leader
        return leader.status is not Status.RUNNING or leader.n_computed >= n_cells

    # ---- slots ----

    def undergo(self, event: Event) -> None:
        """Change the status as the table of transitions says.

        Raises:
            SequenceStateError: the status allows no such event; nothing has changed.
        """
        status = TRANSITIONS.get((self.status, event))
        if status is None:
            raise SequenceStateError(
                f"event {event.value} is not allowed: {self.request.id!r} is {self.status.value}"
            )
        self.status = status

    def go_on_for(self, n_tokens: int | None) -> None:
        """Make the sequence pause after `n_tokens` more sampled tokens; None for never."""
        n_left = self.n_left
        self.pause_every = n_tokens
        self.n_due = len(self.output) + (n_left if n_tokens is None else min(n_tokens, n_left))

    def admit(self, slot: Slot, now: float) -> None:
        """Enter `slot`, for the first time or again."""
        self.undergo(Event.ADMIT)
        self.slot, self.waits_for = slot, None
        self.n_before_turn = len(self.output)
        if self.clock.admitted_s is None:
            self.clock.admitted_s = now

    def enter(self, n_prompts: int) -> None:
        """Record how many prompt tokens the engine had computed when the sequence first got a slot."""
        if self.n_prompts_before is None:
            self.n_prompts_before = n_prompts

    def binding(
        self,
        slot: Slot,
        *,
        has_drafts: bool = False,
        shares_drafts: bool = False,
        has_model_drafts: bool = False,
    ) -> Binding:
        """Return the backend's settings for this sequence in `slot`.

        Args:
            has_drafts: allow draft tokens that followed an earlier occurrence of the sequence's newest tokens.
            shares_drafts: with `has_drafts`, look for such occurrences in other answers of the job, too.
            has_model_drafts: allow draft tokens of a draft model.
        """
        request = self.request
        output_origin = len(self.tokens) - len(
            self.output
        )  # lower by the tokens that left the window
        constraint = self.compiled.get(request.grammar) if request.grammar else None
        # held tokens are appended without sampling, before the next token is sampled
        held = self.held.forced if self.held else ()
        process = request.options.logits_processor
        may_draft = constraint is None and process is None
        return Binding(
            slot,
            output_origin,
            self._sampling,
            request.stop_tokens,
            (*self.given, *self.output, *held),
            request.n_logprobs,
            request.n_prompt_logprobs or 0,
            constraint=constraint,
            output=() if constraint is None else (*self.output, *held),
            processor=None if process is None else OwnProcessor(process, self.given, self.output),
            has_drafts=has_drafts and may_draft,
            has_model_drafts=has_model_drafts and may_draft,
            draft_group=request.job if has_drafts and shares_drafts else 0,
        )

    @property
    def _sampling(self) -> Sampling:
        sampling, breakers = self.request.sampling, self.request.dry_breakers
        if breakers is None or breakers not in self.compiled:
            return sampling
        return replace(sampling, dry_breakers=self.compiled[breakers])

    # ---- cells ----

    def reuse(self, n_cells: int) -> None:
        """Count the first `n_cells` tokens as computed: their cells are in the slot."""
        if not self.n_reached:
            self.n_reused = n_cells
        self.n_computed = n_cells
        self.n_reached = max(self.n_reached, n_cells)

    def keep(self, n_cells: int) -> int:
        """Count only the first `n_cells` tokens as computed, or none if the window must move again; return how many."""
        window = self.window
        if window and self.n_removed and n_cells < self.n_window - window.n_discard:
            n_cells = 0
            self._bring_back(window, self.n_removed)
        self.n_computed = n_cells
        return n_cells

    def unshift(self) -> None:
        """Undo the last move of the window; the cells that it was to remove still exist."""
        if self.window is not None:
            self._bring_back(self.window, self.window.n_discard)
            self.n_computed += self.window.n_discard

    def _bring_back(self, window: MovingWindow, n: int) -> None:
        """Put the last `n` removed tokens back into the window."""
        n_gone = window.n_left_out + self.n_removed - n
        text = (*self.given, *self.output)
        self.tokens = [*text[: window.n_keep], *text[window.n_keep + n_gone :]]
        self.n_prompt = max(window.n_keep, self.n_given - n_gone)
        self.n_reached += n

    def shift(self) -> tuple[int, int]:
        """Move the full window: return how many tokens stay before the removed ones, and how many are removed."""
        if self.window is None or not self.is_full:
            raise SequenceStateError(f"{self.request.id!r} has no full moving window (n_discard)")
        n_keep, n = self.window.n_keep, self.window.n_discard
        del self.tokens[n_keep : n_keep + n]
        self.n_prompt = max(n_keep, self.n_prompt - n)
        self.n_computed -= n
        self.n_reached -= n
        return n_keep, n

    # ---- a step ----

    def span(self, slot: Slot, start: int, n_inputs: int) -> Span:
        """Return the span of `n_inputs` tokens from `start`."""
        end, tokens = start + n_inputs, self.tokens
        inputs = (tokens[start],) if n_inputs == 1 else tokens[start:end]
        has_output = end == len(tokens) and self.n_cap > 0 and self.held is None
        if self.scores is None:
            return Span(slot, start, inputs, has_output)
        n_targets = self.scores.n_targets(start, n_inputs)
        return Span(slot, start, inputs, has_output, tokens[start + 1 : start + 1 + n_targets])

    def accept(
        self,
        n_inputs: int,
        sampled: list[int],
        now: float,
        guidance: GrammarStep = FREE,
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        later_s: float = 0.0,
    ) -> None:
        """Take the results of a run: `n_inputs` planned tokens have cells now, and `sampled` were sampled after them.

        Ends the sequence if it has reached a stop or a limit. If a stop token or the grammar's end coincides with the
        cap, the finish reason is "stop".

        Args:
            now: when the run ended; its first step ended `later_s` before that.
            guidance: the grammar's state after the sampled token.
            logprobs: of the sampled tokens, if the request asks for them; no token is forced then.
        """
        n_sampled = len(sampled)
        self.n_computed += n_inputs + n_sampled - 1 if n_sampled else n_inputs
        if self.n_computed > self.n_reached:
            self.n_reached = self.n_computed
        if not n_sampled:
            if not self.n_pending:
                self._go_on_unsampled(now)
            return
        is_broken = sampled[-1] < 0
        good = sampled[:-1] if is_broken else sampled
        if good:
            if logprobs:
                self.logprobs.extend(logprobs[: len(good)])
            clock = self.clock
            if clock.first_token_s is None:
                clock.first_token_s = now - later_s
            is_last = guidance.is_complete and not guidance.forced
            n_late = is_broken + self._append(good, now, is_last=is_last)
            # the last token of the output came `n_late` steps before the end of the run
            clock.last_token_s = now - later_s * n_late / max(1, n_sampled - 1) if n_late else now
        if guidance is not FREE or is_broken:
            self._follow(guidance, now, sampled[-1] if is_broken else None)

    def take_scores(self, span: Span, scores: Sequence[TokenLogprobs], now: float) -> bool:
        """Take the scores of a span's targets; if one is NaN or missing, end the sequence and return False."""
        if len(scores) != len(span.targets):
            words = f"internal error: got {len(scores)} scores for {len(span.targets)} tokens"
            self.finish("error", now, RequestFailedError(words))
            return False
        if self.scores is None or self.scores.take(span.start, scores):
            return True
        self._fail_row(now, BROKEN_ROW)
        return False

    def _go_on_unsampled(self, now: float) -> None:
        """Continue without sampling: append the held tokens, or end the sequence."""
        held, self.held = self.held, None
        if held is not None:
            self._follow(held, now)
        else:
            self.clock.computed_s = now
            self.finish("length", now)

    def _append(self, tokens: list[int], now: float, *, is_last: bool) -> int:
        """Append tokens to the output, and end or pause the sequence if it is due.

        Returns how many of the tokens were removed again.
        """
        output, text, n_dropped = self.output, self.reply.text, 0
        self.tokens += tokens
        output += tokens
        if text.has_stops:
            n_dropped = self._cut_behind_stop()
        if is_last or output[-1] in self.request.stop_tokens or text.stop is not None:
            self.finish("stop", now)
        elif len(output) >= self.n_cap:
            self.finish("length" if self.is_capped else "window", now)
        elif len(output) >= self.n_due:
            self.undergo(Event.PAUSE)
        return n_dropped

    def _cut_behind_stop(self) -> int:
        """Look for a stop string in the new tokens; remove the tokens after it and return their number."""
        text = self.reply.text
        self.reply.feed(self.output)
        n_past = 0 if text.stop is None else len(self.output) - text.n_fed
        if n_past:
            del self.output[-n_past:], self.tokens[-n_past:]
        return n_past

    def _follow(self, guidance: GrammarStep, now: float, stands_for: int | None = None) -> None:
        """Append the grammar's forced tokens; fail if the grammar has a problem, or if the row gave no token.

        `stands_for` is then the negative value that came in place of the token. If the sequence pauses, the remaining
        tokens are held, so pauses do not change an answer.
        """
        if self.finish_reason is None:
            if guidance.problem:
                self._fail_grammar(guidance.problem, now)
            elif stands_for is not None:
                self._fail_row(now, stands_for)
        n_forced = len(guidance.forced)
        for i, token in enumerate(guidance.forced, 1):
            # the window is full: the other forced tokens are sampled under the grammar after the shift
            if self.finish_reason is not None or len(self.tokens) > self.n_window:
                break
            if self.status is Status.PAUSED:
                self.held = replace(guidance, forced=guidance.forced[i - 1 :])
                break
            self._append([token], now, is_last=guidance.is_complete and i == n_forced)
            self.clock.last_token_s = now

    # ---- the end ----

    def _fail_row(self, now: float, stands_for: int) -> None:
        """End a sequence whose row gave no token; `stands_for` is the negative value that came in its place."""
        bias = self.request.options.logit_bias or {}
        if stands_for != EMPTY_ROW:
            reason = "the model's logits are NaN or infinite"
        elif self.request.grammar is not None:
            reason = f"every token that the grammar allows is ruled out by {self._bans}"
            self._fail_grammar(reason, now)
            return
        elif -math.inf in bias.values() and self.request.options.logits_processor is None:
            reason = "logit_bias bans every token that could follow: ban fewer tokens"
            self.finish("error", now, BannedTokensError(reason))
            return
        else:
            reason = f"every token is ruled out by {self._bans}"
        self.finish("error", now, RequestFailedError(reason))

    @property
    def _bans(self) -> str:
        """What can ban tokens in this request, for error messages."""
        own = "" if self.request.options.logits_processor is None else "logits_processor, "
        return f"{own}logit_bias, the model file's suppressed tokens or logits of −∞"

    def _fail_grammar(self, reason: str, now: float) -> None:
        """End a sequence whose grammar cannot be followed any further."""
        grammar = self.request.grammar
        self.finish("error", now, GrammarError(grammar.kind if grammar else "", reason))

    def cancel(self, now: float) -> None:
        """Cancel the sequence: it keeps its text, or ends with an error if it never ran."""
        never_ran = RequestCancelledError("cancelled before it got a slot")
        self.finish("cancelled", now, None if self.has_run else never_ran)

    def expire(self, now: float) -> None:
        """End the sequence at its deadline: it keeps its text, or ends with an error if it never ran."""
        never_ran = DeadlineError(now - self.clock.submitted_s)
        self.finish("timeout", now, None if self.has_run else never_ran)

    def finish(self, reason: FinishReason, now: float, error: CBatchError | None = None) -> None:
        """End with `reason` and release held-back text; a sequence that saves its cells to disk is `STORING` first."""
        can_store = self.slot is not None and error is None
        self.undergo(Event.STORE if can_store and self.request.options.save_cache else Event.FINISH)
        self.waits_for = self.leader = None
        self.finish_reason, self.error = reason, error
        self.clock.finished_s = now
        if self.reply.end(self.output, is_cut=self._is_cut(reason)) and reason == "stop":
            self.finish_reason = "tool_calls"

    def _is_cut(self, reason: FinishReason) -> bool:
        """Whether a limit, a cancel or the request's stop token ended the output, and not the model."""
        if reason != "stop":
            return True
        return bool(self.output) and self.output[-1] in self.request.asked_stops


BY_AGE = attrgetter("number")
"""The key by which sequences are sorted, the oldest first."""
