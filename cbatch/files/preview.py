"""Before a run over a file: `check_file` looks for errors and counts tokens, `estimate_file` runs a sample."""

from __future__ import annotations

import math
import random
import resource
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import fmean, stdev
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cbatch.chat.vector_calls import VectorPrompt
from cbatch.engine import Engine, checked_tokens, run_options_of
from cbatch.errors import CBatchError, ConfigError, EngineClosedError, PromptTooLongError
from cbatch.files.input.item import Item, ItemError, Seen, in_own_words
from cbatch.files.input.item_stream import ItemStream, ahead_of
from cbatch.files.settings import engine_for, split_settings
from cbatch.files.units import duration
from cbatch.options import RunOptions
from cbatch.runtime.sequences import UNNAMED
from cbatch.support.checks import MAX_INT, check_int, check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.files.input.item_stream import Paths
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult
    from cbatch.stats import EngineStats

N_SHOWN = 10  # errors that are kept with their message


@dataclass(eq=False, slots=True)
class CheckSummary:
    """The items of a batch file, in numbers; blank lines do not count."""

    n_window: int
    """Tokens of a slot, for prompt and answer."""
    n_items: int = 0
    n_by_code: Counter[str] = field(default_factory=Counter)
    """Items with an error, by code."""
    first: list[str] = field(default_factory=list)
    """The first errors, for people."""
    n_tokens: int = 0
    """Of all prompts."""
    n_least: int = 0
    """Tokens of the shortest prompt."""
    n_most: int = 0
    longest: str = ""
    """The place of the longest prompt."""

    @property
    def n_errors(self) -> int:
        """Items with an error."""
        return sum(self.n_by_code.values())

    @property
    def n_good(self) -> int:
        """Items that can be run."""
        return self.n_items - self.n_errors

    def add(self, item: Item, n_tokens: int) -> None:
        """Count a good item."""
        self.n_items += 1
        self.n_tokens += n_tokens
        self.n_least = n_tokens if self.n_good == 1 else min(self.n_least, n_tokens)
        if n_tokens > self.n_most:
            self.n_most, self.longest = n_tokens, item.place

    def refuse(self, item: Item, error: ItemError) -> None:
        """Count an item with an error."""
        self.n_items += 1
        self.n_by_code[error.code] += 1
        if len(self.first) < N_SHOWN:
            self.first.append(f"{item.place}: {error.message} ({error.code})")

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        codes = ", ".join(f"{n:,} {code}" for code, n in self.n_by_code.most_common())
        return [
            *self.first,
            f"items   {self.n_items:,}, {self.n_errors:,} wrong{': ' if codes else ''}{codes}",
            *self._sizes(),
        ]

    def _sizes(self) -> list[str]:
        """Return the lines about prompts; none where no prompt was counted."""
        if not self.n_good:
            return []
        mean = self.n_tokens / self.n_good
        return [
            f"tokens  {self.n_tokens:,} in all; {self.n_least:,} … {self.n_most:,} a prompt, {mean:,.1f} on average",
            f"longest {self.longest}; a slot holds {self.n_window:,}",
        ]


def check_file(
    source: Paths,
    *,
    engine: Engine | None = None,
    model: Any = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    **settings: Any,
) -> CheckSummary:
    """Check batch files in constant memory: the errors of items, and the tokens of prompts.

    Args:
        source, options, settings: see `run_file`.
        engine: for tokens and window; None: the model is loaded, and closed at the end.
        model: to load.

    Raises:
        ConfigError: a wrong setting, or the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    asked, load_settings = split_settings(settings)
    defaults = RunOptions.of(options)
    with ExitStack() as stack:
        reading = stack.enter_context(closing(ItemStream(source, asked)))
        runner = stack.enter_context(
            engine_for(
                engine,
                model,
                load_settings,
                lambda: reading.look_ahead(defaults),
                asked=asked,
                options=defaults,
            )
        )
        settled = run_options_of(runner, defaults)
        seen = stack.enter_context(closing(Seen()))
        summary = CheckSummary(runner.n_window)
        for item in reading:
            found = seen.error_of(item) or why_refused(item, runner, settled)
            if isinstance(found, int):
                summary.add(item, found)
            else:
                summary.refuse(item, found)
    return summary


def why_refused(item: Item, engine: Engine, options: RunOptions) -> ItemError | int:
    """Return the error with which the engine would refuse a good item, else the number of its prompt's tokens."""
    assert item.prompt is not None  # for there is no error
    try:
        if isinstance(item.prompt, VectorPrompt) and item.prompt.call is not None:
            return sum(
                len(engine.tokenize(t) if isinstance(t, str) else t) for t in item.prompt.call.texts
            )
        return checked_tokens(engine, item.prompt, options)
    except EngineClosedError:  # no error of the item
        raise
    except PromptTooLongError as long:
        return ItemError("prompt_too_long", f"{long.size}, but a slot holds {long.n_limit:,}")
    except CBatchError as refusal:
        return ItemError("refused", str(in_own_words(refusal, UNNAMED)))


N_SAMPLE = 128
"""Items of the sample: the mean is exact to about a tenth if the spread of lengths is as large as their mean."""

SAMPLE_S = 20.0  # most seconds of the sample
_SURE = 1.96  # standard deviations on both sides of the mean with 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time, tokens and memory of a run, estimated by a sample.

    Where fewer than two answers ended in time, the estimate is of the tokens that were computed: the run takes the
    shorter time if answers end at their length so far, the longer one if they all reach `max_tokens` or the end of
    their window.

    Args:
        n_items: of the input that can be run.
        n_sample: items of the sample that ended in time.
        seconds: of the whole run, from and to, with 95 % probability; None: nothing was computed. The second is None
            where there is no upper bound: no answer began, or an answer may be of any length.
        prompt_tokens: of the whole run; None where no prompt was counted in time.
        output_tokens: of the whole run; None where too few answers ended.
        sample_s: seconds that the sample took.
        memory_bytes: the most host memory of the process so far, enough for a run of any length; None: nothing ran.
        max_output_tokens: the most output tokens of the whole run, where `output_tokens` is None and there is a most.
        computed: prompt tokens and output tokens that the sample computed.
    """

    n_items: int
    n_sample: int
    seconds: tuple[float, float | None] | None
    prompt_tokens: int | None
    output_tokens: int | None
    sample_s: float
    memory_bytes: int | None = None
    max_output_tokens: int | None = None
    computed: tuple[int, int] = (0, 0)

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        lines = [
            f"sample  {self.n_sample:,} of {self.n_items:,} items in {self.sample_s:.1f} s",
            f"time    {self._time()}",
            f"tokens  {self._input()} in, {self._output()}",
        ]
        if self.output_tokens is None:
            n_ended = "no answer" if not self.n_sample else "only one answer"
            n_prompt, n_output = self.computed
            so_far = f"{n_prompt:,} prompt tokens and {n_output:,} output tokens were computed"
            lines[0] = f"sample  {n_ended} ended within {self.sample_s:.1f} s; {so_far}"
            lines.insert(0, f"items   {self.n_items:,}")
        if self.memory_bytes is not None:
            n_mib = self.memory_bytes / 2**20
            lines.append(f"memory  {n_mib:,.0f} MiB of the host, as in the sample")
        return lines

    def _time(self) -> str:
        if self.seconds is None:
            return "unknown: nothing was computed"
        low, high = (duration(seconds) for seconds in self.seconds)
        if self.seconds[1] is None:
            return f"more than {low} for all"
        if self.output_tokens is None:
            return f"{low} … {high} for all: the longer time if every answer reaches its max_tokens"
        return f"{low} for all" if low == high else f"{low} … {high} for all"

    def _input(self) -> str:
        return (
            "an unknown number" if self.prompt_tokens is None else f"about {self.prompt_tokens:,}"
        )

    def _output(self) -> str:
        if self.output_tokens is not None:
            return f"{self.output_tokens:,} out"
        if self.max_output_tokens is None:
            return "an unknown number out"
        return f"at most {self.max_output_tokens:,} out"


def estimate_file(
    source: Paths,
    *,
    engine: Engine | None = None,
    model: Any = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    n_sample: int = N_SAMPLE,
    sample_s: float = SAMPLE_S,
    **settings: Any,
) -> Estimate:
    """Run a random sample of batch files for some seconds, and estimate the time of the whole run.

    The whole input is read, in constant memory; nothing is written. At the end of the sample slots run empty, as at the
    end of a run, so a long run takes rather less than the estimate.

    Args:
        source, options, settings: see `run_file`.
        engine: runs the sample; None: the model is loaded, and closed at the end.
        model: to load.
        n_sample: items of the sample.
        sample_s: most seconds of the sample.

    Raises:
        ConfigError: a wrong setting, or the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    n_drawn = check_int("n_sample", n_sample, 1, MAX_INT)
    most_s = check_seconds("sample_s", sample_s)
    asked, load_settings = split_settings(settings)
    defaults = RunOptions.of(options)
    with ExitStack() as stack:
        reading = stack.enter_context(closing(ItemStream(source, asked)))
        prompts, n_items = drawn(reading, n_drawn, random.Random(asked.shuffle_seed))
        if any(isinstance(prompt, VectorPrompt) for prompt in prompts):
            raise ConfigError("only answers in text are estimated: run embeddings and scores")
        n_items = min(n_items, asked.limit or n_items)
        is_all = n_items == len(prompts)
        runner = stack.enter_context(
            engine_for(
                engine,
                model,
                load_settings,
                lambda: ahead_of(prompts, defaults, is_all=is_all),
                asked=asked,
                options=defaults,
            )
        )
        if not prompts:
            return Estimate(n_items, 0, (0.0, 0.0), 0, 0, 0.0)
        settled = run_options_of(runner, defaults)
        n_before, start_s = runner.stats().n_prompt_tokens, perf_counter()
        response = runner.run(prompts, options=defaults, max_time_s=most_s)
        results = response.results(return_errors=True)
        elapsed_s, stats = perf_counter() - start_s, runner.stats()
        caps = [
            _cap(RunOptions.of(prompt.options).over(settled), result, runner.n_window)
            for prompt, result in zip(prompts, results, strict=True)
        ]
        sample = Sample(results, caps, stats.n_prompt_tokens - n_before, elapsed_s)
        return extrapolated(sample, n_items, stats)


def drawn(
    items: Iterable[Item], n_sample: int, chance: random.Random
) -> tuple[list[BatchPrompt], int]:
    """Return `n_sample` prompts, drawn evenly, and the number of all prompts. Source: Vitter's algorithm R."""
    kept: list[BatchPrompt] = []
    n = 0
    for n, prompt in enumerate((item.prompt for item in items if item.prompt is not None), 1):
        if n <= n_sample:
            kept.append(prompt)
        elif (i := chance.randrange(n)) < n_sample:
            kept[i] = prompt
    return kept, n


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of the items of a sample: their results, and for each the most output tokens that it may have.

    `n_computed` are the prompt tokens that were computed, without those from a cache.
    """

    results: list[BatchResult]
    caps: list[int | None]
    n_computed: int
    elapsed_s: float


def _cap(options: RunOptions, result: BatchResult, n_window: int) -> int | None:
    """Return the most output tokens of an item with these options; None where its window moves without a limit."""
    cap, n_room = options.max_tokens, max(n_window - result.usage.prompt_tokens, 0)
    if options.prefill_only:
        return 0
    if options.n_discard:
        return None if cap is None else cap * options.n_sequences
    return (n_room if cap is None else min(cap, n_room)) * options.n_sequences


def extrapolated(sample: Sample, n_items: int, stats: EngineStats) -> Estimate:
    """Return the estimate for `n_items`: time grows with the tokens."""
    results, elapsed_s = sample.results, sample.elapsed_s
    whole = [r for r in results if r.finish_reason not in ("timeout", "cancelled")]
    if len(whole) < min(2, len(results)):
        return _by_tokens(sample, n_items, stats)
    n = len(whole)
    n_prompt = sum(r.usage.prompt_tokens for r in whole)
    n_output = [r.usage.completion_tokens for r in whole]
    mean = fmean(n_output)
    spread = stdev(n_output) if n > 1 else 0.0
    share = _SURE * spread / math.sqrt(n) / max(mean, 1e-9)
    # items that were cut off have taken time too
    n_done = sum(r.usage.completion_tokens for r in results) / mean if mean else n
    seconds = elapsed_s * n_items / n_done
    low, high = seconds * max(0.0, 1 - share), seconds * (1 + share)
    if n == n_items:
        low = high = elapsed_s
    return Estimate(
        n_items,
        n,
        (low, high),
        round(n_prompt * n_items / n),
        round(mean * n_items),
        elapsed_s,
        _host_bytes(),
    )


def _by_tokens(sample: Sample, n_items: int, stats: EngineStats) -> Estimate:
    """Return the estimate of a sample that was cut off before answers ended: by what its tokens cost."""
    results, n_computed = sample.results, sample.n_computed
    per_item = n_items / len(results)
    counted = [
        n for r in results if (n := r.usage.prompt_tokens)
    ]  # the others were not tokenized in time
    n_prompt = fmean(counted) * n_items if counted else 0.0
    begun = [r for r in results if r.usage.completion_tokens]
    n_output = sum(r.usage.completion_tokens for r in begun)
    n_most = None if None in sample.caps else sum(n or 0 for n in sample.caps) * per_item
    seconds: tuple[float, float | None] | None = None
    if n_computed or n_output:
        prompt_s, output_s = _token_costs(stats)
        n_begun = sum(r.usage.prompt_tokens for r in begun)
        n_cached = sum(r.usage.cached_tokens for r in begun)
        n_fresh = n_prompt * (1 - n_cached / n_begun if n_begun else 1)
        n_least = n_output / max(len(begun), 1) * n_items
        rate = sample.elapsed_s / (n_computed * prompt_s + n_output * output_s)
        low = rate * (n_fresh * prompt_s + n_least * output_s)
        has_most = n_output and n_most is not None
        high = rate * (n_fresh * prompt_s + max(n_most or 0, n_least) * output_s)
        seconds = (low, high if has_most else None)
    return Estimate(
        n_items,
        len([r for r in results if r.finish_reason not in ("timeout", "cancelled")]),
        seconds,
        round(n_prompt) if counted else None,
        None,
        sample.elapsed_s,
        _host_bytes(),
        None if n_most is None else round(n_most),
        (n_computed, n_output),
    )


def _token_costs(stats: EngineStats) -> tuple[float, float]:
    """Return the seconds of a prompt token and of an output token, in full steps; only their ratio counts here."""
    prompt_tps = stats.prompt_tps() or stats.prompt_tps(split="proportional")
    if stats.cost_rows_s:
        n_rows = max(stats.cost_rows_s, key=int)
        output_s = stats.cost_rows_s[n_rows] / int(n_rows)
    else:
        output_s = 1 / (stats.generation_tps() or prompt_tps or 1.0)
    return 1 / prompt_tps if prompt_tps else output_s, output_s


def _host_bytes() -> int:
    """Return the most host memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
