"""How long a run over a file would take: a sample of its items is run, and no record is written."""

from __future__ import annotations

import math
import random
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cbatch.checks import MAX_INT, check_int, check_seconds
from cbatch.files.engines import engine_for
from cbatch.files.input.item_stream import Reading, ahead_of
from cbatch.files.settings import split_settings
from cbatch.files.units import duration
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.item_stream import Paths
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult

N_SAMPLE = 128
"""Items that are drawn: enough for a mean to about a tenth where answers differ as much as they are long."""

SAMPLE_S = 20.0
"""Seconds that the sample runs at most."""

_SURE = 1.96
"""Standard deviations to both sides that hold 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run would take, by a sample.

    Args:
        n_items: of the input that can be run.
        n_sample: items of the sample that ended in its time.
        seconds: of the whole run, from … to with 95 % as far as the sample tells.
        prompt_tokens: of the whole run.
        output_tokens: of the whole run.
        sample_s: seconds that the sample took.
        memory_bytes: the most host memory that the process has had with it; a run needs no more, however long it is.
            None where the system does not tell.
    """

    n_items: int
    n_sample: int
    seconds: tuple[float, float]
    prompt_tokens: int
    output_tokens: int
    sample_s: float
    memory_bytes: int | None = None

    def lines(self) -> list[str]:
        """Return it in words."""
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
    """Run a random sample of batch files for some seconds, and say what all of it would take.

    The whole input is read, in constant memory; nothing is written. The sample ends with slots that run empty, as a
    run does, so that a long one takes rather less than is said.

    Args:
        source: see `run_file`, as the others are.
        engine: runs the sample; None: one is loaded, and closed at the end.
        model: what to load.
        options: where an item says nothing.
        n_sample: items to draw.
        sample_s: seconds that they may take.
        settings: those of `FileOptions` and of `cbatch.load`, by name.

    Raises:
        ConfigError: a setting is wrong, or the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    n_drawn = check_int("n_sample", n_sample, 1, MAX_INT) or N_SAMPLE
    most_s = check_seconds("sample_s", sample_s)
    asked, load_settings = split_settings(settings)
    defaults = RunOptions.of(options)
    with ExitStack() as stack:
        reading = stack.enter_context(closing(Reading(source, asked)))
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
    """Return `n_sample` prompts, each as likely as any other, and how many there are. Source: Vitter's algorithm R."""
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
    """Return what `n_items` would take where these took `elapsed_s`: time goes with the tokens."""
    whole = [r for r in results if r.finish_reason not in ("timeout", "cancelled")]
    n = len(whole)
    n_prompt = sum(r.usage.prompt_tokens for r in whole)
    n_output = [r.usage.completion_tokens for r in whole]
    mean = sum(n_output) / max(n, 1)
    spread = math.sqrt(sum((k - mean) ** 2 for k in n_output) / max(n - 1, 1))
    share = _SURE * spread / math.sqrt(max(n, 1)) / max(mean, 1e-9)
    # those that were cut off have had their part of the time
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
