"""The report of a run over a batch file, and what it is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch.files.report.page import write_report

__all__ = ["write_report"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return `write_report`, from its module: the template engine is imported when it is used."""
        if name in __all__:
            from cbatch.files.report import page

            return getattr(page, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
