"""What was found of one model, as a row of a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cbatch.engine_options import BITWISE

_HEADINGS = (
    *("model", "loads", "alone equals company", "shares", "checkpoints", "exact"),
    *("tokens/s", "KiB a slot"),
)
_TOGETHER = "together"


@dataclass(frozen=True, slots=True)
class Finding:
    """One model, as far as it could be tried."""

    model: str
    """The file's name."""
    architecture: str = ""
    file_type: str = ""
    refusal: str = ""
    """Why it does not load; empty where it does."""
    end: str = ""
    """How its process ended, where it ended before it was done."""
    company: str = ""
    """See `Engine.company`."""
    difference: str = ""
    """Where an answer in company was not the one computed alone, token by token; empty where all were."""
    n_compared: int = 0
    """Tokens of answers that were compared."""
    shared: float = 0.0
    """Of the prompt tokens that another prompt had already: the share that was not computed again."""
    resumed: float = 0.0
    """Of a beginning that two earlier prompts had: the share that a later one did not compute again."""
    is_cut_anywhere: bool = False
    """Whether its memory can be cut anywhere, so that a beginning needs no checkpoint."""
    exactness: str = ""
    """`bitwise` where `exact=True` holds, else why it does not."""
    tokens_per_s: float = 0.0
    """Output of all slots together."""
    n_slot_bytes: int | None = None
    """Memory of one slot; None where it is not known."""

    @property
    def is_wrong(self) -> bool:
        """Whether the process ended, or an answer was wrong."""
        return bool(self.end or self.difference)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "is_wrong": self.is_wrong}

    def as_row(self) -> tuple[str, ...]:
        """Return it as the cells of a table, in the order of its headings."""
        if self.end:
            return (self.model, f"no: {self.end}", *[""] * 6)
        if self.refusal:
            return (self.model, f"no: {self.refusal}", *[""] * 6)
        is_exact = self.exactness.startswith(BITWISE)
        n_bytes = self.n_slot_bytes
        return (
            self.model,
            "yes",
            self._of_company(),
            f"{self.shared:.0%}",
            "not needed" if self.is_cut_anywhere else f"{self.resumed:.0%}",
            "yes" if is_exact else "no",
            f"{self.tokens_per_s:,.0f}",
            "?" if n_bytes is None else f"{n_bytes / 1024:,.0f}",
        )

    def _of_company(self) -> str:
        if self.difference:
            return f"no: {self.difference}"
        return "yes" if self.company.startswith(_TOGETHER) else "yes, one at a time"


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, with columns of one width."""
    rows = [_HEADINGS, *(finding.as_row() for finding in findings)]
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for i, row in enumerate(cells):
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(padded)} |"
        if i == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"
