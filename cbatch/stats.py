"""Counts and times of the engine's work since it was loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from cbatch.errors import ConfigError

Split = Literal["whole", "proportional"]


@dataclass(eq=False, slots=True)
class Percentiles:
    """Counts of times by their size, to about 2 %; memory is constant, however many times are counted."""

    n: int = 0
    n_by_bucket: dict[int, int] = field(default_factory=dict)
    """How many times were 2^(i/16) … 2^((i + 1)/16) seconds, by i."""

    def __repr__(self) -> str:
        percents = [f"p{p} {self.at(p):.3g} s" for p in (50, 90, 99) if self.n]
        return f"<Percentiles of {self.n:,} times{': ' * bool(self.n)}{', '.join(percents)}>"

    def add(self, seconds: float, n: int = 1) -> None:
        """Count `n` occurrences of one time."""
        bucket = math.floor(math.log2(max(seconds, _SHORTEST_S)) * _N_PER_OCTAVE)
        self.n_by_bucket[bucket] = self.n_by_bucket.get(bucket, 0) + n
        self.n += n

    def at(self, percent: float) -> float | None:
        """Return the time that `percent` of all times do not exceed, in seconds; None if nothing was counted.

        Raises:
            ConfigError: `percent` is not 0 … 100.
        """
        if not isinstance(percent, int | float) or not 0 <= percent <= 100:
            raise ConfigError(f"a percentile must be 0 … 100, not {percent!r}")
        n_below, n_wanted = 0, self.n * percent / 100
        for bucket, n in sorted(self.n_by_bucket.items()):
            n_below += n
            if n_below >= n_wanted:
                return float(2 ** ((bucket + 0.5) / _N_PER_OCTAVE))
        return None

    def buckets(self) -> list[tuple[float, float, int]]:
        """Return (from, to, n) of every bucket with a count, in seconds, the shortest first."""
        return [(_edge(i), _edge(i + 1), n) for i, n in sorted(self.n_by_bucket.items())]

    def counts(self) -> list[tuple[int, int]]:
        """Return (bucket, n) of every bucket with a count; see `of`."""
        return sorted(self.n_by_bucket.items())

    @classmethod
    def of(cls, counts: Iterable[Sequence[int]]) -> Percentiles:
        """Return an object with these (bucket, n), as `counts` returns them; those of several objects are summed."""
        made = cls()
        for bucket, n in counts:
            made.n_by_bucket[bucket] = made.n_by_bucket.get(bucket, 0) + n
            made.n += n
        return made

    def copy(self) -> Percentiles:
        """Return the same counts in an object of their own."""
        return Percentiles(self.n, dict(self.n_by_bucket))


def _edge(bucket: int) -> float:
    return float(2 ** (bucket / _N_PER_OCTAVE))


def _check_split(split: str) -> None:
    if split not in ("whole", "proportional"):
        raise ConfigError(f"split must be whole or proportional, not {split!r}")


_N_PER_OCTAVE = 16
_SHORTEST_S = 1e-7


@dataclass(eq=False, slots=True)
class EngineStats:
    """Work done since the engine was loaded or `reset_stats`; `Engine.stats()` returns a snapshot.

    A *decode token* is a token of the output that is computed in a row of its own; every other computed token is a
    *prompt token*, including output that is computed again in chunks after a preemption. Seconds of steps are those of
    decoding and sampling; `plan_s`, `run_s` and `apply_s` are measured in the thread that owns the backend.
    """

    n_submitted: int = 0
    n_steps: int = 0
    n_runs: int = 0
    n_active_steps: int = 0
    """Sequences in each step, summed."""
    n_active_tokens: int = 0
    """Sequences in each step times its tokens, summed."""
    n_active_max: int = 0
    n_prompt_tokens: int = 0
    """Computed tokens of prompts alone, without output that was computed again."""
    n_cached_tokens: int = 0
    """Prompt tokens of ended requests that were reused from a cache."""
    n_output_tokens: int = 0
    n_recomputed_tokens: int = 0
    """Tokens that were computed again after their cells were lost."""
    n_pad_rows: int = 0
    """Pad rows: computed for no sequence, with `exact` or if they make a step faster; they count as no tokens."""
    n_draft_tokens: int = 0
    """Tokens that were drafted and computed: see `speculate` of `ScheduleOptions`."""
    n_accepted_tokens: int = 0
    """Draft tokens that were sampled too, and so are part of an answer."""
    n_job_draft_tokens: int = 0
    """Draft tokens that came from other answers of the same call."""
    n_job_accepted_tokens: int = 0
    n_model_draft_tokens: int = 0
    """Draft tokens that came from the draft model."""
    n_model_accepted_tokens: int = 0
    n_texts: int = 0
    """Texts that were embedded or scored; each of equal texts counts."""
    n_text_tokens: int = 0
    """Tokens of these texts; equal texts count once."""
    embed_s: float = 0.0
    """Seconds of computing these texts."""
    n_preempted: int = 0
    """Preemptions of ended requests, because a shared pool had no free cell."""
    n_waiting: int = 0
    n_running: int = 0
    n_paused: int = 0
    """Paused sequences that still have a slot."""
    n_held: int = 0
    """Sequences without a slot and outside the queue: paused, or waiting for something other than a slot."""
    n_cells: int = 0
    """Cells in use now, including those of retained prefixes."""
    n_pool: int = 0
    """Cells that all slots together can hold."""
    n_checkpoints: int = 0
    n_checkpoint_bytes: int = 0
    """Bytes of host memory that checkpoints take now."""
    n_threads: int = 0
    """Threads of the last step: fewer than all if that is faster."""
    cost_rows_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a step that only decodes, by its number of rows: the median of the last such steps."""
    cost_prompt_s: float = 0.0
    """Seconds that a step takes longer if it has prompt tokens, however many."""
    cost_token_s: float = 0.0
    """Seconds for each prompt token, besides `cost_prompt_s`."""
    cost_cell_s: float = 0.0
    """Seconds for each prompt token and each cell before it, besides `cost_token_s`."""
    cost_budget_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of one new request that a step takes beside decoding rows, by the number of rows, if all output is
    streamed."""
    n_finished: dict[str, int] = field(default_factory=dict)
    decode_s: float = 0.0
    sample_s: float = 0.0
    plan_s: float = 0.0
    run_s: float = 0.0
    apply_s: float = 0.0
    n_step_tokens: int = 0
    n_step_decode_tokens: int = 0
    """Decode tokens of all steps."""
    decode_share_s: float = 0.0
    """Decode tokens' part of the time of all steps, each of which is split by its tokens."""
    prefill_share_s: float = 0.0
    n_pure_tokens: int = 0
    """Prompt tokens of the steps without a decode token."""
    pure_prefill_s: float = 0.0
    any_decode_s: float = 0.0
    """Time of the steps with a decode token."""
    queue_s: Percentiles = field(default_factory=Percentiles)
    """Times from submission to admission, of ended requests."""
    ttft_s: Percentiles = field(default_factory=Percentiles)
    """Times from submission to the first token, of ended requests that have one."""
    itl_s: Percentiles = field(default_factory=Percentiles)
    """Gaps between the tokens of one sequence; the steps of one run count with their mean time."""

    def __repr__(self) -> str:
        ended = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.n_finished.items()))
        wait = self.ttft_s.at(50)
        return (
            f"<EngineStats: {self.n_submitted:,} requests (ended: {ended or 'none'}; {self.n_running} running, "
            f"{self.n_waiting} waiting), in {self.n_prompt_tokens:,} tokens + {self.n_cached_tokens:,} cached, "
            f"out {self.n_output_tokens:,} tokens, {self.generation_tps():,.4g}/s, {self.avg_concurrent_seq():.3g} "
            f"sequences a step{'' if wait is None else f', first token p50 {wait:.3g} s'}>"
        )

    def generation_tps(self, *, split: Split = "whole") -> float:
        """Return decode tokens per second of decoding; 0 if nothing was decoded.

        Args:
            split: how the time of a step with prompt and decode tokens is counted. "whole": as decoding, and its prompt
                tokens are left out; "proportional": each kind has its share.
        """
        _check_split(split)
        seconds = self.any_decode_s if split == "whole" else self.decode_share_s
        return self.n_step_decode_tokens / seconds if seconds else 0.0

    def prompt_tps(self, *, split: Split = "whole") -> float:
        """Return prompt tokens per second of prefill; 0 if there was none.

        Args:
            split: "whole": of steps without a decode token; "proportional": of all steps, with their share of the time.
        """
        _check_split(split)
        if split == "whole":
            return self.n_pure_tokens / self.pure_prefill_s if self.pure_prefill_s else 0.0
        n_tokens = self.n_step_tokens - self.n_step_decode_tokens
        return n_tokens / self.prefill_share_s if self.prefill_share_s else 0.0

    def avg_concurrent_seq(self, *, by: Literal["step", "token"] = "step") -> float:
        """Return how many sequences a step had: the mean over all steps, or over all tokens; 0 before any step."""
        if by not in ("step", "token"):
            raise ConfigError(f"by must be step or token, not {by!r}")
        if by == "step":
            return self.n_active_steps / self.n_steps if self.n_steps else 0.0
        return self.n_active_tokens / self.n_step_tokens if self.n_step_tokens else 0.0

    def count_step(
        self, n_rows: int, n_decode: int, n_prompt: int, seconds: float, n_steps: int = 1
    ) -> None:
        """Count `n_steps` like steps of `n_rows` sequences and `n_decode` + `n_prompt` tokens, `seconds` in all."""
        n_tokens = n_decode + n_prompt
        self.n_steps += n_steps
        self.n_active_steps += n_rows * n_steps
        self.n_active_tokens += n_rows * n_tokens * n_steps
        self.n_active_max = max(self.n_active_max, n_rows)
        self.n_step_tokens += n_tokens * n_steps
        self.n_step_decode_tokens += n_decode * n_steps
        decode_share_s = seconds * n_decode / n_tokens
        self.decode_share_s += decode_share_s
        self.prefill_share_s += seconds - decode_share_s
        if n_decode:
            self.any_decode_s += seconds
        else:
            self.n_pure_tokens += n_prompt * n_steps
            self.pure_prefill_s += seconds

    def count_drafts(
        self, n_drafts: tuple[int, int, int], n_accepted: tuple[int, int, int]
    ) -> None:
        """Count draft tokens of a run, and the accepted ones: repeated by a sequence, from its job, from a model."""
        _, n_job, n_model = n_drafts
        self.n_draft_tokens += sum(n_drafts)
        self.n_job_draft_tokens += n_job
        self.n_model_draft_tokens += n_model
        _, n_job, n_model = n_accepted
        self.n_accepted_tokens += sum(n_accepted)
        self.n_job_accepted_tokens += n_job
        self.n_model_accepted_tokens += n_model

    def count_tokens(
        self, n_rows_by_gap: Mapping[tuple[float | None, int], int], now: float, later_s: float
    ) -> None:
        """Count the tokens that a run sampled, and the gaps between them.

        Args:
            n_rows_by_gap: the number of rows, by the time of their last token before the run and their new tokens.
            now: when the run ended; its first step ended `later_s` before that.
        """
        for (last_s, n), n_rows in n_rows_by_gap.items():
            self.n_output_tokens += n * n_rows
            if last_s is None:
                last_s, n = now - later_s, n - 1
            if n > 0:
                self.itl_s.add((now - last_s) / n, n * n_rows)

    def count_end(
        self,
        reason: str,
        queue_s: float | None,
        ttft_s: float | None,
        *,
        n_preempted: int = 0,
        n_cached: int = 0,
    ) -> None:
        """Count a request that ended; a time is None where the request never came so far."""
        self.n_finished[reason] = self.n_finished.get(reason, 0) + 1
        self.n_preempted += n_preempted
        self.n_cached_tokens += n_cached
        if queue_s is not None:
            self.queue_s.add(queue_s)
        if ttft_s is not None:
            self.ttft_s.add(ttft_s)

    def clear(self) -> None:
        """Set every figure back to its beginning."""
        fresh = EngineStats()
        for f in fields(self):
            setattr(self, f.name, getattr(fresh, f.name))

    def add(self, other: EngineStats) -> None:
        """Add the figures of another engine that works at the same time."""
        for f in fields(self):
            own, more = getattr(self, f.name), getattr(other, f.name)
            if f.name.startswith("cost_"):
                own = _slower(own, more)
            elif isinstance(own, Percentiles):
                own = Percentiles.of([*own.counts(), *more.counts()])
            elif isinstance(own, dict):
                own = {key: own.get(key, 0) + more.get(key, 0) for key in {**own, **more}}
            else:
                own += more
            setattr(self, f.name, own)

    def copy(self) -> EngineStats:
        """Return the same figures in an object of their own."""
        return replace(
            self,
            n_finished=dict(self.n_finished),
            cost_rows_s=dict(self.cost_rows_s),
            cost_budget_tokens=dict(self.cost_budget_tokens),
            queue_s=self.queue_s.copy(),
            ttft_s=self.ttft_s.copy(),
            itl_s=self.itl_s.copy(),
        )


def _slower(own: Any, more: Any) -> Any:
    """Return what steps cost in the slower of two engines: costs of several are not added up."""
    if isinstance(own, dict):
        return {key: max(own.get(key, 0.0), more.get(key, 0.0)) for key in {**own, **more}}
    return max(own, more)
