"""Tries grammars in a separate process: some make the compiler overflow its stack or run for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_STACK_BYTES = 4 * 2**20
"""Half of a thread's usual stack: a grammar that compiles here compiles in the engine, too."""
_N_STEPS = 30


def begin(settings: dict[str, Any]) -> Callable[[str], str]:
    """Return a function that tells what is wrong with a grammar; `settings` are fields of `LLParserLimits`."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    limits = llguidance.LLParserLimits(**settings)
    threading.stack_size(_STACK_BYTES)

    def find_problem(source: str) -> str:
        with ThreadPoolExecutor(1) as thread:
            walked = thread.submit(_walk, tokenizer, source, limits)
        error = walked.exception()  # a panic of the compiler is not an `Exception`
        return f"it could not be compiled: {error}" if error else walked.result()

    return find_problem


def _walk(tokenizer: Any, source: str, limits: Any) -> str:
    """Compile a grammar and take some steps, each with the lowest allowed byte; return what is wrong."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    for _ in range(_N_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        lowest = (mask & -mask).bit_length() - 1
        if lowest < 0 or matcher.is_stopped() or not matcher.consume_token(lowest):
            break
    return str(matcher.get_error())
