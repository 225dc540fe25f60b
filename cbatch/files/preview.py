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

from cbatch.engine import checked_tokens, run_options_of
from cbatch.errors import CBatchError, EngineClosedError, PromptTooLongError
from cbatch.files.input.item import ItemError, Seen, in_own_words
from cbatch.files.input.item_stream import ItemStream, ahead_of
from cbatch.files.settings import engine_for, split_settings
from cbatch.files.units import duration
from cbatch.options import RunOptions
from cbatch.runtime.sequences import UNNAMED
from cbatch.support.checks import MAX_INT, check_int, check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.item_stream import Paths
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult

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
        mean = self.n_tokens / max(self.n_good, 1)
        codes = ", ".join(f"{n:,} {code}" for code, n in self.n_by_code.most_common())
        return [
            *self.first,
            f"items   {self.n_items:,}, {self.n_errors:,} wrong{': ' if codes else ''}{codes}",
            f"tokens  {self.n_tokens:,} in all; a prompt {self.n_least:,} … {self.n_most:,}, {mean:,.1f} on average",
            f"longest {self.longest or 'none'}; a slot holds {self.n_window:,}",
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
        return checked_tokens(engine, item.prompt, options)
    except EngineClosedError:  # no error of the item
        raise
    except PromptTooLongError as long:
        more = f" and may have {long.n_output:,} more" if long.n_output > 1 else ""
        words = f"the prompt has {long.n_prompt:,} tokens{more}, and a slot holds {long.n_limit:,}"
        return ItemError("prompt_too_long", words)
    except CBatchError as refusal:
        return ItemError("refused", str(in_own_words(refusal, UNNAMED)))


N_SAMPLE = 128
"""Items of the sample: the mean is exact to about a tenth if the spread of lengths is as large as their mean."""

SAMPLE_S = 20.0  # most seconds of the sample
_SURE = 1.96  # standard deviations on both sides of the mean with 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time, tokens and memory of a run, estimated by a sample.

    Args:
        n_items: of the input that can be run.
        n_sample: items of the sample that ended in time.
        seconds: of the whole run, from and to, with 95 % probability.
        prompt_tokens: of the whole run.
        output_tokens: of the whole run.
        sample_s: seconds that the sample took.
        memory_bytes: the most host memory of the process so far, enough for a run of any length; None: nothing ran.
    """

    n_items: int
    n_sample: int
    seconds: tuple[float, float]
    prompt_tokens: int
    output_tokens: int
    sample_s: float
    memory_bytes: int | None = None

    def lines(self) -> list[str]:
        """Return it as lines for people."""
        low, high = (duration(seconds) for seconds in self.seconds)
        lines = [
            f"sample  {self.n_sample:,} of {self.n_items:,} items in {self.sample_s:.1f} s",
            f"time    {low} … {high} for all",
            f"tokens  about {self.prompt_tokens:,} in, {self.output_tokens:,} out",
        ]
        if self.memory_bytes is not None:
            n_mib = self.memory_bytes / 2**20
            lines.append(f"memory  {n_mib:,.0f} MiB of the host, as with the sample")
        return lines


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
        start_s = perf_counter()
        response = runner.run(prompts, options=defaults, max_time_s=most_s)
        results = response.results(return_errors=True)
        return _extrapolated(results, n_items, perf_counter() - start_s)


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


def _extrapolated(results: list[BatchResult], n_items: int, elapsed_s: float) -> Estimate:
    """Return the estimate for `n_items` of the results of a sample: time grows with the tokens."""
    whole = [r for r in results if r.finish_reason not in ("timeout", "cancelled")]
    n = len(whole)
    n_prompt = sum(r.usage.prompt_tokens for r in whole)
    n_output = [r.usage.completion_tokens for r in whole]
    mean = fmean(n_output) if n else 0.0
    spread = stdev(n_output) if n > 1 else 0.0
    share = _SURE * spread / math.sqrt(max(n, 1)) / max(mean, 1e-9)
    # items that were cut off have taken time too
    n_done = sum(r.usage.completion_tokens for r in results) / max(mean, 1e-9)
    seconds = elapsed_s * n_items / max(n_done, 1e-9)
    low, high = seconds * max(0.0, 1 - share), seconds * (1 + share)
    if n == n_items:
        low = high = elapsed_s
    n_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Estimate(
        n_items,
        n,
        (low, high),
        round(n_prompt * n_items / max(n, 1)),
        round(mean * n_items),
        elapsed_s,
        n_kib * 1024,
    )
