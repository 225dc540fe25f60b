"""The input of a run: opened, copied where it has to be, looked into before a model is loaded."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from cbatch.files.source import open_source
from cbatch.files.spool import Spool, checked
from cbatch.files.window import MAX_CHARS, length
from cbatch.messages import LookAhead
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from cbatch.files.item import Item
    from cbatch.files.settings import FileOptions
    from cbatch.messages import BatchPrompt

    Paths: TypeAlias = "str | Path | Sequence[str | Path]"

N_LOOKED_AHEAD = 1024
"""Items that are read before a model is loaded, for windows to be made to their measure: as many as `load` looks at."""


class Reading:
    """The items of an input, in the order in which they are to be read, once.

    Attributes:
        source: where they come from.
        items: all of them.
    """

    def __init__(self, paths: Paths, options: FileOptions, without: Collection[str] = ()) -> None:
        """Open the input; where it is to be strict or shuffled, read it whole into a temporary file.

        Args:
            paths: of the input.
            options: say how it is read.
            without: real paths of what no pattern is to find: the files of the run.

        Raises:
            ConfigError: it cannot be read; where it is to be strict, the first item that is wrong.
        """
        self.source = open_source(
            paths,
            format=options.format,
            template=options.template,
            system=options.system,
            without=without,
        )
        self._spool: Spool | None = None
        self._n_read = 0
        try:
            self.items: Iterator[Item] = iter(self._ordered(options))
        except BaseException:
            self.source.close()
            raise

    def _ordered(self, options: FileOptions) -> Iterator[Item]:
        if not options.strict and not options.shuffle:
            return self._counted()
        self._spool = Spool(checked(self.source) if options.strict else self.source)
        if options.shuffle:
            self._spool.shuffle(options.shuffle_seed)
        return iter(self._spool)

    def _counted(self) -> Iterator[Item]:
        for item in self.source:
            self._n_read += 1
            yield item

    @property
    def n_items(self) -> int | None:
        """How many there are, where it was read whole."""
        return None if self._spool is None else len(self._spool)

    @property
    def is_piped(self) -> bool:
        """Whether reading may have to wait for somebody to write."""
        return self._spool is None and "-" in self.source.paths

    def look_ahead(self, defaults: RunOptions, n_most: int = N_LOOKED_AHEAD) -> LookAhead | None:
        """Return what comes first, with the options that hold for it; it stays in `items`."""
        first = self._first(n_most)
        self.items = chain(first, self.items)
        prompts = [item.prompt for item in first if item.prompt is not None]
        return ahead_of(prompts, defaults, is_all=len(first) < n_most)

    def _first(self, n_most: int) -> list[Item]:
        first: list[Item] = []
        n_chars = 0
        for item in islice(self.items, n_most):
            first.append(item)
            n_chars += length(item.prompt, RunOptions()) if item.prompt else 0
            if n_chars > MAX_CHARS:
                break
        return first

    def about(self) -> int | None:
        """Return about how many items there are, by the bytes of those that were read; None where nobody knows."""
        n_bytes, n_read = self.source.n_bytes, self.source.n_bytes_read
        if self.n_items is not None or not n_bytes or not n_read:
            return self.n_items
        return round(self._n_read * n_bytes / n_read)

    def close(self) -> None:
        """Close the input."""
        self.source.close()
        if self._spool is not None:
            self._spool.close()


def ahead_of(
    prompts: Sequence[BatchPrompt], defaults: RunOptions, *, is_all: bool
) -> LookAhead | None:
    """Return prompts with the options that hold for each; None where there is no prompt."""
    pairs = [(prompt, RunOptions.of(prompt.options).over(defaults)) for prompt in prompts]
    return LookAhead(pairs, is_all=is_all) if pairs else None
