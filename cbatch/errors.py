"""The errors that a caller can meet: one tree under `CBatchError`, each with its numbers as attributes.

`RequestError` concerns one request and the engine goes on; `EngineError` concerns all of them. `BatchError` is in
`cbatch.response`, beside the results that it holds. `PlanError`, `LedgerError` and `SequenceStateError` stand outside
the tree: they are always a bug of cbatch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class CBatchError(Exception):
    """Root of every error that cbatch raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process read the error with its attributes: results hold errors."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[CBatchError], args: tuple[Any, ...], state: dict[str, Any]) -> CBatchError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def names_like(name: str, known: Iterable[str], n: int, cutoff: float) -> list[str]:
    """Return up to `n` known names that are most similar to `name`; none if it is more than twice as long as all."""
    names = [*dict.fromkeys(known)]
    is_long = len(name) > 2 * max(map(len, names), default=0)
    return [] if is_long else get_close_matches(name.lower(), names, n, cutoff)


def near(name: str, known: Iterable[str]) -> str:
    """Return the question whether a similar known name was meant; empty if there is none."""
    found = names_like(name, known, 2, 0.75)
    return f"did you mean {' or '.join(found)}?" if found else ""


def near_or_known(name: str, known: Sequence[str]) -> str:
    """Return what a name of another tool is here, or the names that it is like; if there are none, all known ones."""
    ours, words = ELSEWHERE.get(name, ""), _NO_OPTIONS.get(name)
    if ours in known:
        return f"did you mean {ours}?"
    if words is not None and "max_tokens" in known:
        return words
    return near(name, known) or f"known are {', '.join(known)}"


ELSEWHERE = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "num_ctx": "ctx_per_seq",
    "ctx_size": "ctx_per_seq",
    "n_ctx_size": "ctx_per_seq",
    "context_length": "ctx_per_seq",
    "max_model_len": "ctx_per_seq",
    "max_num_seqs": "parallel",
    "n_parallel": "parallel",
    "num_threads": "n_threads",
    "num_thread": "n_threads",
    "num_gpu": "n_gpu_layers",
    "lora_path": "adapters",
}
"""Option names of other programs, and the names of the same options here."""

_NO_OPTIONS = {
    "stream": "no option is needed: read the chunks of a response as they come",
    "system": 'give a first message {"role": "system", "content": …}',
    "system_prompt": 'give a first message {"role": "system", "content": …}',
    "options": "give each option by its name, such as max_tokens=64",
}
"""Options of other programs that cbatch does not have, and what to do instead."""


def words_of(error: BaseException) -> str:
    """Return an error's text without Python's own words, or its type's name where the text is empty or `str` fails."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    with suppress(Exception):
        if isinstance(error, OSError) and error.strerror:
            name = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            return f"{name}{error.strerror}"
        return str(error) or type(error).__name__
    return type(error).__name__


class ConfigError(CBatchError, ValueError):
    """A value that cannot work, found before anything is queued or loaded."""


class RequestError(CBatchError):
    """One request failed; the engine and every other request go on."""


class PromptTooLongError(RequestError):
    """The prompt does not fit one slot's window; with `strict_max_tokens`, prompt and `max_tokens` together."""

    def __init__(
        self,
        n_prompt: int,
        n_limit: int,
        n_output: int = 1,
        *,
        n_keep: int | None = None,
        is_least: bool = False,
        can_slide: bool = False,
        can_lower: bool = False,
        n_trained: int = 0,
    ) -> None:
        """Keep the tokens of the prompt, of one slot's window, and the requested tokens of output.

        With `is_least`, `n_prompt` is a lower bound: the prompt was not tokenized. `n_keep` are the tokens that may not
        be left out, where others may: with `n_discard`. The message names what would admit the prompt: `n_discard` with
        `can_slide`, a lower `max_tokens` with `can_lower`; and that a larger window would exceed the `n_trained` tokens
        that the model was trained for, 0 where unknown.
        """
        self.n_prompt, self.n_limit, self.n_output = n_prompt, n_limit, n_output
        self.is_least = is_least
        slide = "set n_discard to leave out tokens after its beginning, " if can_slide else ""
        if n_keep is not None:
            slide = f"lower n_keep, which is {n_keep}, "
        lower = "lower max_tokens or leave strict_max_tokens out, " if can_lower else ""
        least = f"{'more than' if is_least else 'at least'} {n_prompt + n_output}"
        is_beyond = 0 < n_trained < n_prompt + n_output
        beyond = f", beyond the {n_trained} tokens that the model was trained for" * is_beyond
        super().__init__(
            f"{self.size}, but one slot's window holds {n_limit}: "
            f"shorten it, {slide}{lower}or raise ctx_per_seq to {least} (or n_ctx){beyond}"
        )

    @property
    def size(self) -> str:
        """The tokens of the prompt in words, and those of the answer where the prompt alone would fit."""
        words = f"the prompt has {'at least ' * self.is_least}{self.n_prompt} tokens"
        if self.n_prompt > self.n_limit:
            return words
        return f"{words} and its answer needs {self.n_output} more"


class TextTooLongError(PromptTooLongError):
    """The text has more tokens than the model can embed; nothing is cut off unless `truncate` asks for it."""

    def __init__(
        self,
        n_prompt: int,
        n_limit: int,
        *,
        reason: str = "",
        is_cut: bool = False,
        is_least: bool = False,
    ) -> None:
        """Keep the tokens of the text and the most that it may have.

        Args:
            n_prompt: tokens of the text, with instruction or query; with `is_least`, it may have more.
            n_limit: the most that it may have.
            reason: why, where that is not the model.
            is_cut: whether leaving out the whole text, as `truncate` asks, does not make room.
        """
        self.n_prompt, self.n_limit, self.n_output, self.is_least = n_prompt, n_limit, 0, is_least
        least = "at least " * is_least
        CBatchError.__init__(
            self,
            f"the text has {least}{n_prompt} tokens, but at most {n_limit} can be embedded{reason}: "
            + (
                "its instruction or query leaves no room for it; shorten those"
                if is_cut
                else "shorten it, or have it cut off (truncate='end' or 'start')"
            ),
        )


class DuplicateIdError(RequestError):
    """The id belongs to another request in flight, or occurs twice in one batch."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(
            f"the id {id!r} is in flight already or occurs twice in this batch: give each request its own id"
        )


class RequestCancelledError(RequestError):
    """The request was cancelled, or its engine closed, before it got a slot or was read from its generator."""


class DeadlineError(RequestError):
    """The deadline of the request or of its run passed before the request got a slot."""

    def __init__(self, waited_s: float) -> None:
        self.waited_s = waited_s
        super().__init__(
            f"the deadline passed after {waited_s:.3g} s in the queue, before the request got a slot: raise timeout_s, "
            "or submit fewer requests at once"
        )


class QueueFullError(RequestError):
    """The queue is at its limit and `when_full` is "reject"; nothing was queued."""

    def __init__(self, n_waiting: int, n_limit: int, n_new: int = 1) -> None:
        """Keep how many requests wait, how many may wait, and how many were submitted."""
        self.n_waiting, self.n_limit, self.n_new = n_waiting, n_limit, n_new
        super().__init__(
            f"no room for {n_new} more: {n_waiting} requests wait already and max_queue is {n_limit}; try again later, "
            "submit fewer at once, raise max_queue, or let run() wait (when_full='wait')"
        )


class CacheError(RequestError):
    """Cells kept on disk could not be used, written or found."""

    def __init__(
        self, key: str, reason: str, *, is_missing: bool = False, where: Path | None = None
    ) -> None:
        """Keep the cache key, the reason, whether no cells are saved under that key, and the folder or file.

        The reason contains no path, because clients of a server may read it.
        """
        self.key, self.reason, self.is_missing = key, reason, is_missing
        self.where = None if where is None else str(where)
        super().__init__(f"cache {key!r}: {reason}" + (f" ({where})" if where else ""))


class UnsupportedOptionError(RequestError, ConfigError):
    """An option that is unknown, or that this model or backend does not have."""

    def __init__(self, option: str, known: Sequence[str] = (), *, reason: str = "") -> None:
        """Keep the option's name; `known` lists the options that exist, `reason` why this one cannot be used."""
        self.option = option
        unknown = f"unknown option {option!r}; {near_or_known(option, sorted(known))}"
        super().__init__(f"{option}: {reason}" if reason else unknown)


class UnsupportedTaskError(ConfigError):
    """The model cannot do what was asked: generate text, embed texts or rerank documents."""

    def __init__(self, task: str, reason: str) -> None:
        """Keep the task, "generate", "embed" or "rerank", and why this model cannot do it."""
        self.task, self.reason = task, reason
        super().__init__(f"this model cannot {task}: {reason}")


class GrammarError(RequestError):
    """A schema, regex or grammar that cannot be compiled, or that exceeded a limit while an answer followed it."""

    def __init__(self, kind: str, reason: str) -> None:
        """Keep the option that gave the grammar, and the compiler's message with the position."""
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


class RequestFailedError(RequestError):
    """The request could not be computed; the cause, if any, is chained."""


def failure_of(what: str, cause: BaseException) -> CBatchError:
    """Return the error of a request whose work raised `cause`; one that is not cbatch's own is chained to `what`."""
    if isinstance(cause, CBatchError):
        return cause
    failure = RequestFailedError(f"{what}: {words_of(cause)}")
    failure.__cause__ = cause
    return failure


class PromptError(RequestFailedError):
    """The prompt cannot be tokenized: it would fail again anywhere."""


class EmbeddingError(RequestFailedError):
    """The model gave no finite vector for a text: NaN, infinity or nothing."""


class BannedTokensError(RequestFailedError):
    """No token is left to sample: the request's `logit_bias` bans every token that could follow."""


class WorkerDiedError(RequestError):
    """The worker process that computed the request has ended; another one takes its place."""

    def __init__(self, cause: str, n_alone: int = 0) -> None:
        """Keep how the worker ended, with its last words, and in how many workers the request was computed alone."""
        self.cause, self.n_alone = cause, n_alone
        super().__init__(f"{self.what}: {cause}")

    @property
    def what(self) -> str:
        """What happened, without the last output of the process."""
        if self.n_alone:
            return f"each of {self.n_alone} workers that computed this request alone died"
        return "the worker that computed the request died"


class NoThreadError(RequestError, RuntimeError):
    """The system has no more threads; the call can be repeated later."""

    def __init__(self) -> None:
        super().__init__(
            "the system has no more threads: try again later, or raise its limit (ulimit -u, pids.max, TasksMax)"
        )


class OutputError(CBatchError):
    """A file of results could not be written; committed records stay, and a later run continues from them."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class EngineError(CBatchError):
    """The engine as a whole cannot go on."""


class InsideStepError(CBatchError, RuntimeError):
    """A call would wait for its own thread: from a callback during a step, a log handler or a finalizer."""

    def __init__(self) -> None:
        super().__init__(
            "this call would wait for its own thread (in a function of record_steps, a log handler, a __del__ or "
            "another callback): make it in another thread, or after the callback has returned"
        )


class IncompatibleLlamaError(EngineError):
    """cbatch, llama-cpp-python and the library of llama.cpp do not fit together."""

    def __init__(self, message: str, reason: str = "", kind: str = "") -> None:
        """Keep why they do not, without the versions and ways out that the message has; empty where it says no more.

        `kind` is the name under which `cbatch doctor` reports it, if it has one of its own.
        """
        self.reason, self.kind = reason or message, kind
        super().__init__(message)


class ModelLoadError(EngineError):
    """The file is missing, damaged, or a model that can neither generate text nor embed it."""


class DecodeError(EngineError):
    """`llama_decode` returned `code`; see docs/use/errors.md for what each code means."""

    def __init__(self, code: int) -> None:
        self.code = code
        meaning = _DECODE_CODES.get(code, "compute failed")
        super().__init__(f"llama_decode returned {code}: {meaning}")


class EngineClosedError(EngineError):
    """The engine was closed, or stopped by an error that is chained."""


class PlanError(RuntimeError):
    """A step plan that llama.cpp would refuse, or by which no sequence makes progress: a bug of cbatch."""


class LedgerError(RuntimeError):
    """The ledger of slots and cells does not balance: a bug of cbatch."""


class SequenceStateError(RuntimeError):
    """A sequence was asked for a transition that its table does not have: a bug of cbatch."""


# Source: include/llama.h, comment at llama_decode.
_DECODE_CODES = {
    1: "no room for the batch",
    2: "aborted",
    -1: "invalid batch",
    -2: "out of memory",
    -3: "compute failed",
}
