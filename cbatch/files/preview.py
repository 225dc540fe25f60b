"""Before a run over a file: `check_file` looks for errors and counts tokens, `estimate_file` runs a sample."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cbatch.checks import MAX_INT, check_int, check_seconds
from cbatch.engine import checked_tokens, run_options_of
from cbatch.errors import CBatchError, EngineClosedError, PromptTooLongError
from cbatch.files.input.item import ItemError, Seen, in_own_words
from cbatch.files.input.item_stream import ItemStream, ahead_of
from cbatch.files.settings import engine_for, split_settings
from cbatch.files.units import duration
from cbatch.options import RunOptions
from cbatch.runtime.sequences import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.item_stream import Paths
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult

# ---- check ----

N_SHOWN = 10
"""Errors that are kept with their message."""


@dataclass(eq=False, slots=True)
class CheckSummary:
    """The items of a batch file, in numbers.

    Attributes:
        n_items: blank lines not counted.
        n_by_code: items with an error, by code.
        first: the first errors, for people.
        n_tokens: of all prompts.
        n_least: tokens of the shortest prompt.
        n_most: tokens of the longest.
        longest: the place of the longest.
        n_window: tokens of a slot, for prompt and answer.
    """

    n_window: int
    n_items: int = 0
    n_by_code: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    n_tokens: int = 0
    n_least: int = 0
    n_most: int = 0
    longest: str = ""

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

    def refuse(self, item: Item, code: str, message: str) -> None:
        """Count an item with an error."""
        self.n_items += 1
        self.n_by_code[code] += 1
        if len(self.first) < N_SHOWN:
            self.first.append(f"{item.place}: {message} ({code})")

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
        source: see `run_file`, as for the others.
        engine: for tokens and window; None: one is loaded, and closed at the end.
        model: to load.
        options: that an item leaves out.
        settings: those of `FileOptions` and of `cbatch.load`, by name.

    Raises:
        ConfigError: a wrong setting, or the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    asked, load_settings = split_settings(settings)
    defaults = RunOptions.of(options)
    with ExitStack() as stack:
        reading = stack.enter_context(closing(ItemStream(source, asked)))
        runner = stack.enter_context(
            engine_for(engine, model, load_settings, lambda: reading.look_ahead(defaults))
        )
        settled = run_options_of(runner, defaults)
        seen = stack.enter_context(closing(Seen()))
        summary = CheckSummary(runner.n_window)
        for item in reading.items:
            _look(item, runner, settled, seen, summary)
    return summary


def _look(
    item: Item, engine: Engine, options: RunOptions, seen: Seen, summary: CheckSummary
) -> None:
    found = seen.error_of(item) or why_refused(item, engine, options)
    if isinstance(found, int):
        summary.add(item, found)
    else:
        summary.refuse(item, found.code, found.message)


def why_refused(item: Item, engine: Engine, options: RunOptions) -> ItemError | int:
    """Return the error with which the engine would refuse an item, else the number of its prompt's tokens.

    Args:
        item: without an error of its own.
        engine: that would run it.
        options: that the item leaves out, the engine's own included.

    Raises:
        EngineClosedError: the engine was closed.
    """
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


# ---- estimate ----

N_SAMPLE = 128
"""Items of the sample: the mean is exact to about a tenth if the spread of lengths is as large as their mean."""

SAMPLE_S = 20.0
"""Most seconds of the sample."""

_SURE = 1.96
"""Standard deviations on both sides of the mean with 95 % of a normal distribution."""


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
        memory_bytes: the most host memory of the process so far, enough for a run of any length; None where the system
            does not tell.
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
        memory = "" if self.memory_bytes is None else f"{self.memory_bytes / 2**20:,.0f} MiB"
        return [
            f"sample  {self.n_sample:,} of {self.n_items:,} items in {self.sample_s:.1f} s",
            f"time    {low} … {high} for all",
            f"tokens  about {self.prompt_tokens:,} in, {self.output_tokens:,} out",
            *([f"memory  {memory} of the host, as with the sample"] if memory else []),
        ]


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
        source: see `run_file`, as for the others.
        engine: runs the sample; None: one is loaded, and closed at the end.
        model: to load.
        options: that an item leaves out.
        n_sample: items of the sample.
        sample_s: most seconds of the sample.
        settings: those of `FileOptions` and of `cbatch.load`, by name.

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
        prompts, n_items = drawn(reading.items, n_drawn, random.Random(asked.shuffle_seed))
        n_items = min(n_items, asked.limit or n_items)
        is_all = n_items == len(prompts)
        runner = stack.enter_context(
            engine_for(
                engine, model, load_settings, lambda: ahead_of(prompts, defaults, is_all=is_all)
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
    for item in items:
        if item.prompt is None:
            continue
        n += 1
        if len(kept) < n_sample:
            kept.append(item.prompt)
        elif (i := chance.randrange(n)) < n_sample:
            kept[i] = item.prompt
    return kept, n


def _extrapolated(results: list[BatchResult], n_items: int, elapsed_s: float) -> Estimate:
    """Return the estimate for `n_items` of the results of a sample: time grows with the tokens."""
    whole = [r for r in results if r.finish_reason not in ("timeout", "cancelled")]
    n = len(whole)
    n_prompt = sum(r.usage.prompt_tokens for r in whole)
    n_output = [r.usage.completion_tokens for r in whole]
    mean = sum(n_output) / max(n, 1)
    spread = math.sqrt(sum((k - mean) ** 2 for k in n_output) / max(n - 1, 1))
    share = _SURE * spread / math.sqrt(max(n, 1)) / max(mean, 1e-9)
    # items that were cut off have taken time too
    n_done = sum(r.usage.completion_tokens for r in results) / max(mean, 1e-9)
    seconds = elapsed_s * n_items / max(n_done, 1e-9)
    low, high = seconds * max(0.0, 1 - share), seconds * (1 + share)
    if n == n_items:
        low = high = elapsed_s
    factor = n_items / max(n, 1)
    return Estimate(
        n_items,
        n,
        (low, high),
        round(n_prompt * factor),
        round(mean * n_items),
        elapsed_s,
        _peak_bytes(),
    )


def _peak_bytes() -> int | None:
    """Return the most host memory that this process has had, in bytes; None where the system does not tell."""
    try:
        import resource  # which Windows has not
    except ImportError:
        return None
    n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return n if sys.platform == "darwin" else n * 1024
