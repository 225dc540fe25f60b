"""Checks of options that need no model, before one is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.backend.llama.grammar import check_grammar
from cbatch.errors import ConfigError, GrammarError

if TYPE_CHECKING:
    from cbatch.options import Grammar


def check_structure(structure: Grammar) -> None:
    """Compile what all answers must match.

    Raises:
        ConfigError: it cannot be compiled.
    """
    try:
        check_grammar(structure)
    except GrammarError as error:
        option = "grammar" if error.kind in ("lark", "gbnf") else error.kind
        raise ConfigError(f"{option}: {error.reason}") from error
