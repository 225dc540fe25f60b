"""Processes that run a module of this same cbatch."""

from __future__ import annotations

import json
import os
import sys

from cbatch.errors import ConfigError

_CODE = "import sys; sys.path[:] = {path}; from {module} import main; main()"


def command_of(module: str, *words: str) -> list[str]:
    """Return the command that runs a module's `main` with arguments.

    Its modules are those of this process, whatever is in the folder that it starts in.

    Raises:
        ConfigError: the program that runs Python is not known.
    """
    if not sys.executable:
        raise ConfigError("no process can be started: Python does not know its own program")
    path = json.dumps([os.path.abspath(p) for p in sys.path])
    return [sys.executable, "-c", _CODE.format(path=path, module=module), *words]


def environment() -> dict[str, str]:
    """Return this process's environment, but ggml's abort starts no debugger, which takes seconds and holds pipes."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}
