"""Tries a grammar in a process of its own: some make the compiler overflow its stack, or never end.

`try_grammar` starts this very file as a script, which imports nothing of cbatch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

_CPU_S = 3
_WALL_S = 30.0
_N_BYTES = 2 * 2**30
_STACK_BYTES = 4 * 2**20
"""Half of what a thread has as a rule: what gets through here has room to spare there."""
_N_STEPS = 30


def try_grammar(source: str, limits: dict[str, Any]) -> str:
    """Return what is wrong with a grammar, empty where it compiles and some steps under it can be done.

    Args:
        source: as llguidance reads it.
        limits: those of `LLParserLimits`.
    """
    said = json.dumps({"source": source, "limits": limits})
    paths = os.pathsep.join(p for p in sys.path if p)
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=said.encode(),
            capture_output=True,
            timeout=_WALL_S,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _too_large("time")
    except OSError as error:
        return f"it is so large that it must be tried first, and that cannot be done here: {error}"
    if done.returncode:
        return _too_large("time, memory or depth")
    return done.stdout.decode(errors="replace")


def _too_large(what: str) -> str:
    return f"it takes more {what} to compile than a grammar may have"


def _limit() -> None:
    try:
        import resource
    except ImportError:  # not there on Windows: the time by the clock holds all the same
        return
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_N_BYTES, _N_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _walk(source: str, limits: dict[str, Any]) -> str:
    """Compile and take some steps, always by the lowest byte that may follow; return what is wrong."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")
    parser_limits = llguidance.LLParserLimits(**limits)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=parser_limits)
    for _ in range(_N_STEPS):
        mask = matcher.compute_bitmask()
        token = next((i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1), None)
        if token is None or matcher.is_stopped() or not matcher.consume_token(token):
            break
    return str(matcher.get_error())


def main() -> None:
    """Read a grammar from stdin and write what is wrong with it to stdout."""
    said = json.load(sys.stdin)
    _limit()
    found: list[str] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(_walk(said["source"], said["limits"])))
    thread.start()
    thread.join()
    sys.stdout.buffer.write(found[0].encode())


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not meant for `import`
    main()
