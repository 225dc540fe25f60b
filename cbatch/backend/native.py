"""The native library: found, checked against llama-cpp-python, and used to run steps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.resources
import os
import sys
import threading
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp

from cbatch.core.plan import Binding, Chunk, StepPlan, StepResult
from cbatch.errors import EngineClosedError, IncompatibleLlamaError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cbatch.options import Sampling

ABI_VERSION = 2
"""Surface number that this file is written for: CBATCH_ABI_VERSION in native/include/cbatch.h."""

ISA_BEST = -1
"""The best instruction set that build and machine have; 0, 1, 2 are the base, AVX2, AVX-512."""

# Source: native/include/cbatch.h, return codes.
_MEANINGS = {
    1: "the table of addresses is not the one this library wants",
    2: "a size below 1, or an instruction set that this machine has not",
    3: "out of memory",
    4: "a slot out of range, not ascending or twice",
    5: "a sampling value out of its range",
    6: "no chunk, a chunk without tokens, or a start out of range",
    7: "a token id outside the vocabulary",
    8: "more tokens than n_batch",
    9: "n_steps below 1, or several steps while a chunk has no output",
    10: "an output in a slot that was never bound",
}

_FILE_NAME = {"darwin": "libcbatch.dylib", "win32": "libcbatch.dll"}.get(
    sys.platform, "libcbatch.so"
)
_REINSTALL = "reinstall it with: pip install --force-reinstall --no-deps --no-cache-dir cbatch"
_BATCH_FIELDS = ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits")


class _Api(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("decode", ctypes.c_void_p),
        ("get_logits_ith", ctypes.c_void_p),
        ("gomp_parallel", ctypes.c_void_p),
    ]


class _Sizes(ctypes.Structure):
    _fields_ = [
        ("n_slots", ctypes.c_int32),
        ("n_batch", ctypes.c_int32),
        ("n_vocab", ctypes.c_int32),
        ("n_threads", ctypes.c_int32),
        ("isa", ctypes.c_int32),
    ]


class _Sampling(ctypes.Structure):
    _fields_ = [
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int32),
        ("i_choice", ctypes.c_int32),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("n_steps", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("decode_ns", ctypes.c_int64),
        ("sample_ns", ctypes.c_int64),
        ("first_ns", ctypes.c_int64),
    ]


_int, _pointer = ctypes.c_int32, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cbatch_batch_layout": (None, [_pointer]),
    "cbatch_isa_best": (_int, []),
    "cbatch_stepper_init": (_int, [_pointer, _pointer, _pointer, _pointer]),
    "cbatch_stepper_free": (None, [_pointer]),
    "cbatch_stepper_bind": (_int, [_pointer, _int, _int, _pointer, _pointer, _int]),
    "cbatch_stepper_run": (
        _int,
        [_pointer, _pointer, _int, _pointer, _int, ctypes.c_int64, _pointer, _pointer],
    ),
    "cbatch_stepper_interrupt": (None, [_pointer]),
    "cbatch_sample_row": (_int, [_pointer, _int, _pointer, _int, _int]),
    "cbatch_weights": (_int, [_pointer, _int, ctypes.c_double, _int, _pointer]),
    "cbatch_philox": (None, [_pointer, _pointer, _pointer]),
    "cbatch_log_init": (_pointer, [_int]),
    "cbatch_log_free": (None, [_pointer]),
    "cbatch_log_set_debug": (None, [_pointer, _int]),
    "cbatch_log_callback": (None, [_int, ctypes.c_char_p, _pointer]),
    "cbatch_log_drain": (_int, [_pointer, _pointer, _int, _pointer]),
}


# ---- finding and checking the library ----


def _path() -> str:
    given = os.environ.get("CBATCH_LIBRARY")
    if given:
        return given
    return str(importlib.resources.files("cbatch") / _FILE_NAME)


@functools.cache
def library() -> Any:
    """Return the loaded library, its functions typed. `CBATCH_LIBRARY` names another file to load.

    Raises:
        IncompatibleLlamaError: the file is missing, does not load, or is of another cbatch.
    """
    path = _path()
    try:
        lib = ctypes.CDLL(path)
        version = lib.cbatch_abi_version()
    except (OSError, AttributeError) as error:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} is missing or does not load ({error}); {_REINSTALL}"
        ) from error
    if version != ABI_VERSION:
        raise IncompatibleLlamaError(
            f"cbatch's native library {path} has surface {version}, "
            f"cbatch {_version('cbatch')} wants {ABI_VERSION}; {_REINSTALL}"
        )
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


def handshake() -> None:
    """Check that the native library and llama-cpp-python agree on everything they share.

    Raises:
        IncompatibleLlamaError: they do not; the message names both sides and both versions.
    """
    ours, theirs = _native_layout(), _llama_layout()
    if ours != theirs:
        raise _mismatch(f"llama_batch is {ours} for cbatch but {theirs} for llama-cpp-python")
    for name, (restype, argtypes) in _llama_signatures().items():
        _check_function(name, restype, argtypes)


def _native_layout() -> dict[str, int]:
    out = (ctypes.c_int32 * 8)()
    library().cbatch_batch_layout(out)
    return dict(zip(("size", *_BATCH_FIELDS), out, strict=True))


def _llama_layout() -> dict[str, int]:
    batch = llama_cpp.llama_batch
    offsets = {name: getattr(batch, name).offset for name, *_ in batch._fields_}
    return {"size": ctypes.sizeof(batch), **offsets}


def _llama_signatures() -> dict[str, tuple[Any, list[Any]]]:
    return {
        "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, llama_cpp.llama_batch]),
        "llama_get_logits_ith": (
            ctypes.POINTER(ctypes.c_float),
            [ctypes.c_void_p, ctypes.c_int32],
        ),
        "llama_log_set": (None, [llama_cpp.llama_log_callback, ctypes.c_void_p]),
    }


def _check_function(name: str, restype: Any, argtypes: list[Any]) -> None:
    function = getattr(llama_cpp, name, None)
    if function is None:
        raise _mismatch(f"llama-cpp-python has no {name}")
    found = (function.restype, list(function.argtypes or []))
    if found != (restype, argtypes):
        raise _mismatch(f"{name} is {(restype, argtypes)} for cbatch but {found} there")


def _mismatch(what: str) -> IncompatibleLlamaError:
    return IncompatibleLlamaError(
        f"{what} (cbatch {_version('cbatch')}, llama-cpp-python {_version('llama-cpp-python')}); "
        "install versions that fit: docs/compatibility.md"
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


# ---- llama.cpp's addresses ----


@dataclass(frozen=True, slots=True)
class LlamaApi:
    """The llama.cpp functions that a stepper calls, as ctypes functions; tests give their own."""

    decode: Any
    get_logits_ith: Any
    gomp_parallel: int | None = None
    """Address of `GOMP_parallel` in the OpenMP runtime that ggml computes with, if it does."""

    @classmethod
    def of_llama_cpp(cls) -> LlamaApi:
        """Return the functions of the installed llama-cpp-python."""
        return cls(llama_cpp.llama_decode, llama_cpp.llama_get_logits_ith, _gomp_parallel())

    def table(self) -> _Api:
        """Return the addresses as the native library takes them; valid while `self` lives."""
        return _Api(
            size=ctypes.sizeof(_Api),
            abi=ABI_VERSION,
            decode=ctypes.cast(self.decode, ctypes.c_void_p),
            get_logits_ith=ctypes.cast(self.get_logits_ith, ctypes.c_void_p),
            gomp_parallel=self.gomp_parallel,
        )


def _gomp_parallel() -> int | None:
    """Return the address of ggml's own `GOMP_parallel`: another runtime has other threads."""
    for lib in _ggml_handles():
        function = getattr(lib, "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _ggml_handles() -> Iterator[Any]:
    """Yield handles among whose dependencies ggml's OpenMP is.

    libllama is one, unless ggml loads its CPU backends by itself; then the backend is.
    """
    yield llama_cpp.llama_cpp._lib
    for path in _loaded_files("libggml-cpu"):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def _loaded_files(prefix: str) -> list[str]:
    """Return the mapped files whose name begins with `prefix`; none where there is no /proc."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    except OSError:
        return []
    return [p for p in dict.fromkeys(paths) if os.path.basename(p).startswith(prefix)]


# ---- steps ----


class NativeStepper:
    """Runs steps of one llama context in native code, the interpreter lock released.

    One thread only, but for `interrupt`.
    """

    def __init__(
        self,
        ctx: Any,
        *,
        n_slots: int,
        n_batch: int,
        n_vocab: int,
        n_threads: int,
        slice_s: float = 0.02,
        api: LlamaApi | None = None,
        isa: int = ISA_BEST,
    ) -> None:
        """Allocate everything that a step needs.

        Args:
            ctx: address of the `llama_context`; must outlive the stepper.
            n_slots: slots, llama.cpp's sequence ids `0 … n_slots − 1`.
            n_batch: most tokens in one step.
            n_vocab: floats in one row of logits.
            n_threads: size of the team that samples; give the one that decoding uses.
            slice_s: a run ends after the first step that passes this many seconds; 0 = no limit.
            api: functions to call instead of llama-cpp-python's.
            isa: instruction set of the sampling code; all give the same tokens.

        Raises:
            IncompatibleLlamaError: the library is missing or does not fit.
            PlanError: a size is out of range.
        """
        self._lib = library()
        self._api = api or LlamaApi.of_llama_cpp()  # kept: it owns what the addresses point to
        self._budget_us = int(slice_s * 1e6)
        self._lock = threading.Lock()  # `interrupt` against `close`
        self._report = _Report()
        self._report_at = ctypes.addressof(self._report)
        self._grow_out(0)
        sizes = _Sizes(n_slots, n_batch, n_vocab, n_threads, isa)
        self._handle = self._init(ctx, sizes)

    def _init(self, ctx: Any, sizes: _Sizes) -> int | None:
        table, handle = self._api.table(), ctypes.c_void_p()
        code = self._lib.cbatch_stepper_init(
            ctypes.byref(table), ctx, ctypes.byref(sizes), ctypes.byref(handle)
        )
        if code != 0:
            given = {name: getattr(sizes, name) for name, *_ in _Sizes._fields_}
            raise PlanError(f"{_MEANINGS[code]}: {given}")
        return handle.value

    def _grow_out(self, n: int) -> None:
        self._out = (ctypes.c_int32 * n)()
        self._out_at = ctypes.addressof(self._out)

    def bind(self, binding: Binding) -> None:
        """Say how `binding.slot` is sampled from now on. Copies everything.

        Raises:
            PlanError: the slot or a sampling value is out of range.
        """
        try:
            sampling = _as_native(binding.sampling)
            stop = array("i", binding.stop_tokens)
        except (TypeError, OverflowError) as error:
            raise PlanError(f"{error}: {binding!r}") from error
        code = self._lib.cbatch_stepper_bind(
            self._open(),
            binding.slot,
            binding.n_prompt,
            ctypes.byref(sampling),
            stop.buffer_info()[0],
            len(stop),
        )
        if code != 0:
            raise PlanError(f"{_MEANINGS[code]}: {binding!r}")

    def run(self, chunks: Sequence[Chunk], n_steps: int = 1) -> StepResult:
        """Do up to `n_steps` steps, feeding each sampled token to the next.

        `StepPlan` says when a run ends early. Mutates the cells of the chunks' slots. A failing
        `llama_decode` is no exception here: it is the result's `code`.

        Raises:
            PlanError: the chunks break a rule of `StepPlan`; nothing was done.
            EngineClosedError: the stepper is closed.
        """
        n_chunks = len(chunks)
        if n_chunks * n_steps > len(self._out):
            self._grow_out(n_chunks * n_steps)
        try:
            heads, tokens = _flatten(chunks)
        except (TypeError, OverflowError) as error:
            raise PlanError(f"{error}: {StepPlan(tuple(chunks), n_steps)!r}") from error
        code = self._lib.cbatch_stepper_run(
            self._open(),
            heads.buffer_info()[0],
            n_chunks,
            tokens.buffer_info()[0],
            n_steps,
            self._budget_us,
            self._out_at,
            self._report_at,
        )
        if code != 0:
            raise PlanError(f"{_MEANINGS[code]}: {StepPlan(tuple(chunks), n_steps)!r}")
        return self._result(chunks)

    def _result(self, chunks: Sequence[Chunk]) -> StepResult:
        report, out, n = self._report, self._out, len(chunks)
        n_steps = report.n_steps
        if n_steps == 1:  # the usual case, twice as fast as by slices
            tokens = [[out[i]] if c.has_output else [] for i, c in enumerate(chunks)]
        else:
            end = n * n_steps
            tokens = [out[i:end:n] if c.has_output else [] for i, c in enumerate(chunks)]
        return StepResult(
            tokens,
            n_steps,
            report.code,
            decode_s=report.decode_ns * 1e-9,
            sample_s=report.sample_ns * 1e-9,
            first_s=report.first_ns * 1e-9,
        )

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next, to end after its current step. Any thread."""
        with self._lock:
            if self._handle is not None:
                self._lib.cbatch_stepper_interrupt(self._handle)

    def close(self) -> None:
        """Free everything; twice is harmless. Not while a run is in flight."""
        with self._lock:
            handle, self._handle = self._handle, None
        self._lib.cbatch_stepper_free(handle)

    def _open(self) -> int:
        if self._handle is None:
            raise EngineClosedError("the stepper is closed")
        return self._handle


def _flatten(chunks: Sequence[Chunk]) -> tuple[array[int], array[int]]:
    """Return the chunks as `cbatch_chunk`s (n_chunks × 4 int32) and all their tokens (int32)."""
    heads: list[int] = []
    tokens: list[int] = []
    for c in chunks:
        heads += (c.slot, c.start, len(c.tokens), c.has_output)
        tokens += c.tokens
    return array("i", heads), array("i", tokens)


def _as_native(s: Sampling) -> _Sampling:
    return _Sampling(s.temperature, s.top_p, s.min_p, s.seed, s.top_k, s.i_choice)


def sample_row(logits: Any, sampling: Sampling, i_output: int, isa: int = ISA_BEST) -> int:
    """Return the token that a stepper would sample from one row, or `BROKEN_ROW`. For tests.

    Args:
        logits: (n_vocab,) float32 numpy array, contiguous, read only.
        sampling: how to choose.
        i_output: which output of its sequence the token is, from 0.
        isa: instruction set of the code to use.

    Raises:
        PlanError: a sampling value is out of range, or this machine has not that instruction set.
    """
    native = _as_native(sampling)
    token: int = library().cbatch_sample_row(
        logits.ctypes.data, len(logits), ctypes.byref(native), i_output, isa
    )
    if token < -1:
        raise PlanError(f"cannot sample {len(logits)} logits by {sampling!r} with code {isa}")
    return token
