"""A batch file looked through without running it: what is wrong, how long the prompts are."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cbatch.engine import checked_tokens, run_options_of
from cbatch.errors import CBatchError, EngineClosedError, PromptTooLongError
from cbatch.files.engines import engine_for
from cbatch.files.input.item import ItemError, in_own_words
from cbatch.files.input.item_stream import Reading
from cbatch.files.input.seen import Seen
from cbatch.files.settings import split_settings
from cbatch.options import RunOptions
from cbatch.runtime.sequences import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.input.item_stream import Paths

N_SHOWN = 10
"""Wrong items that are kept with their words."""


@dataclass(eq=False, slots=True)
class CheckSummary:
    """What is in a batch file.

    Attributes:
        n_items: blank lines not counted.
        n_by_code: how many items are wrong, by code.
        first: the first wrong items, in words.
        n_tokens: of all prompts.
        n_least: tokens of the shortest prompt.
        n_most: tokens of the longest.
        longest: where that one is.
        n_window: what one slot holds, prompt and answer.
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
        """Items that are wrong."""
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
        """Count a wrong item."""
        self.n_items += 1
        self.n_by_code[code] += 1
        if len(self.first) < N_SHOWN:
            self.first.append(f"{item.place}: {message} ({code})")

    def lines(self) -> list[str]:
        """Return it in words."""
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
    """Look through batch files in constant memory: what is wrong, and how many tokens the prompts have.

    Args:
        source: see `run_file`, as the others are.
        engine: whose tokens and window count; None: one is loaded, and closed at the end.
        model: what to load.
        options: where an item says nothing.
        settings: those of `FileOptions` and of `cbatch.load`, by name.

    Raises:
        ConfigError: a setting is wrong, or the input cannot be read.
        EngineError: the model cannot be loaded.
    """
    asked, load_settings = split_settings(settings)
    defaults = RunOptions.of(options)
    with ExitStack() as stack:
        reading = stack.enter_context(closing(Reading(source, asked)))
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
    """Return why the engine would refuse an item, which has no error of its own; else its prompt's tokens.

    Args:
        item: as it was read.
        engine: that is to run it.
        options: that hold where it says nothing, the engine's own among them.

    Raises:
        EngineClosedError: nothing can be found out any more.
    """
    assert item.prompt is not None  # for there is no error
    try:
        return checked_tokens(engine, item.prompt, options)
    except EngineClosedError:  # no fault of the item
        raise
    except PromptTooLongError as long:
        more = f" and may have {long.n_output:,} more" if long.n_output > 1 else ""
        words = f"the prompt has {long.n_prompt:,} tokens{more}, and a slot holds {long.n_limit:,}"
        return ItemError("prompt_too_long", words)
    except CBatchError as refusal:
        return ItemError("refused", str(in_own_words(refusal, UNNAMED)))
