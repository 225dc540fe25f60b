"""llama.cpp's quantiser, in a process of its own: it cannot be stopped, and ends the process on what it asserts.

`quantising` starts this module as a program, which reads one file and writes another.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cbatch.backend.llama.gguf import read_header
from cbatch.errors import ConfigError
from cbatch.support.processes import command_of, environment

_BUFFER_BYTES = 2**28
"""Of rows that the quantiser keeps in memory at once; llama.cpp's own default is 8 GiB."""

_N_WORDS = 3  # lines of llama.cpp's log
_N_TAIL = 2000  # bytes of what it says, such as the traceback of an error


class Quantising:
    """A run of the quantiser."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.process, self._log = process, log

    def is_done(self, timeout_s: float) -> bool:
        """Wait for so long at most; return whether the run has ended."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def find_problem(self) -> str:
        """Return why the run failed, empty if it did not. Call it once the run has ended."""
        code = self.process.returncode
        if code == 0:
            return ""
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - _N_TAIL, 0))
        words = " ".join(self._log.read().decode("utf-8", "replace").split())
        return words or f"it ended with exit code {code}"


@contextmanager
def quantising(
    source: Path, target: Path, file_type: int, *, has_importance: bool = False
) -> Iterator[Quantising]:
    """Lend a run of the quantiser, which is killed at the end of the block if it has not ended.

    Args:
        source: a model of float weights.
        target: where the other goes; the file is replaced.
        file_type: one of llama.h's `llama_ftype`.
        has_importance: take every column of a matrix for equally important, where the type needs to know.

    Raises:
        ConfigError: the program that runs Python is not known, or cannot be started.
    """
    task = json.dumps([os.fspath(source), os.fspath(target), file_type, has_importance])
    with tempfile.TemporaryFile() as log:
        process = _start(task, log)
        try:
            yield Quantising(process, log)
        finally:
            process.kill()
            process.communicate()


def _start(task: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command_of("cbatch.backend.llama.quantiser", task),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment(),
            start_new_session=True,  # Ctrl-C in a terminal is for this process alone
        )
    except OSError as error:
        raise ConfigError(f"llama.cpp's quantiser cannot be started: {error}") from error


# ---- the process itself ----


def main() -> None:
    """Quantise as the arguments say; exit with 1 where llama.cpp refuses, or once nobody waits any more."""
    from cbatch.backend.bindings import llama_cpp
    from cbatch.backend.host_limits import available_cores
    from cbatch.backend.llama.log import llama_log

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    llama_log().install()
    source, target, file_type, has_importance = json.loads(sys.argv[1])
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.max_buf_size = file_type, _BUFFER_BYTES
    params.nthread = available_cores()
    if has_importance:
        kept = list(_importance(llama_cpp, Path(source)))
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))(*kept)
    llama_cpp.llama_backend_init()
    code = llama_cpp.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    if code:
        # the cause comes first, then that quantising failed
        os.write(2, " | ".join(llama_log().drain()[-_N_WORDS:]).encode())
    os._exit(1 if code else 0)  # the thread that reads stdin need not end


def _importance(llama_cpp: Any, path: Path) -> Iterator[Any]:
    """Yield an entry for each matrix: one number for each column, for each expert."""
    header = read_header(path, "")
    for name, tensor in header.tensors.items() if header else ():
        n_columns, n_rows, n_stacked, _ = tensor.sizes
        if n_rows > 1:
            n = n_columns * n_stacked
            ones = (ctypes.c_float * n)(*[1] * n)
            yield llama_cpp.llama_model_imatrix_data(name.encode(), ones, n)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
