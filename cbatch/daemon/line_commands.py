"""Lines of `cbatch daemon` as commands: text alone, no state and no file. See docs/operate/processes.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cbatch.support.checks import MAX_INT, shown

MAX_ID = 0x3FFFFFFF
"""The largest id of a request. Source: system 002's daemon, which reads ids up to this one."""

MAX_SLOT = 1024
"""The largest number of a slot that is read; which slots there are is known later. Source: as of `MAX_ID`."""

MAX_LINE = 2**20
"""Bytes of a line: our choice, far above any path."""


class LineError(Exception):
    """A line that says nothing that can be done."""

    def __init__(self, id: int | None, words: str) -> None:
        self.id = id
        super().__init__(words)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a request: its prompt is computed, and its first quantum."""

    path: str
    n_total: int
    n_quantum: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on with a request for up to `n_tokens` tokens."""

    n_tokens: int


@dataclass(frozen=True, slots=True)
class LineCancel:
    """End a request."""

    id: int


MAX_SNAPSHOT = 63
"""The largest number of a snapshot: our choice; system 002's daemon has eight."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer a prompt without quanta: the oldest command; with RESTORE, a prompt that begins with a snapshot."""

    path: str
    n_tokens: int
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the tokens that a slot has, under a number."""

    number: int


@dataclass(frozen=True, slots=True)
class FreeSnapshot:
    """Forget a snapshot."""

    number: int


@dataclass(frozen=True, slots=True)
class ListSnapshots:
    """Tell the numbers of all snapshots."""


@dataclass(frozen=True, slots=True)
class Step:
    """Give the next request one quantum."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Give quanta in turn until no request is active."""


BatchKind: TypeAlias = Literal["peek", "probe", "tail", "step", "drain"]


@dataclass(frozen=True, slots=True)
class LineBatch:
    """Show, compare or do steps that up to `n_most` requests share; None for as many as there are slots."""

    kind: BatchKind
    n_most: int | None


@dataclass(frozen=True, slots=True)
class ListSlots:
    """Tell what each slot holds."""


@dataclass(frozen=True, slots=True)
class ListRequests:
    """Tell what each active request has done."""


Scheduled: TypeAlias = Step | Drain | LineBatch
"""Commands for all requests together."""

Oldest: TypeAlias = Generate | Snapshot | FreeSnapshot | ListSnapshots
"""Commands that are done one after the other."""

Command: TypeAlias = Start | Continue | LineCancel | Oldest | Scheduled | ListSlots | ListRequests


@dataclass(frozen=True, slots=True)
class Line:
    """A command with what stood before it."""

    id: int | None
    slot: int | None
    command: Command


def read_line(data: bytes) -> Line | None:
    """Return what a line says; None for an empty one.

    Args:
        data: a line with or without its end; of one that is longer than `MAX_LINE`, the beginning may do.

    Raises:
        LineError: no command, or one with wrong values.
    """
    text = data[: MAX_LINE + 1].decode("utf-8", "surrogateescape").strip()
    prefix = _Prefix()
    rest = prefix.take_from(text)
    try:
        _check_text(data, text)
        if not rest and prefix.is_empty:
            return None
        command = _command(rest, prefix)
        prefix.check_suits(command)
    except _WrongError as error:
        raise LineError(prefix.id, str(error)) from None
    return Line(prefix.id, prefix.slot, command)


def _check_text(data: bytes, text: str) -> None:
    if len(data.rstrip(b"\r\n")) > MAX_LINE:
        raise _WrongError(f"the line has more than {MAX_LINE:,} bytes")
    if "\0" in text:
        raise _WrongError("the line has a NUL byte")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise _WrongError(f"the line is not UTF-8 at byte {error.start + 1}") from None


class _WrongError(Exception):
    """What is wrong with a line, whatever id it gives."""


# ---- before the command ----

_NAMED = re.compile(r"(REQUEST|REQ|SLOT)(?:\s*=\s*|\s+|$)(\S*)\s*", re.IGNORECASE | re.ASCII)


class _Prefix:
    """The id and the slot that stand before a command, each once and in any order."""

    def __init__(self) -> None:
        self.id: int | None = None
        self.slot: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.id is None and self.slot is None

    def take_from(self, text: str) -> str:
        """Read the prefix of a line; return what stands after it.

        Raises:
            LineError: a wrong id or slot, or a second one.
        """
        while (found := _NAMED.match(text)) is not None:
            try:
                if found[1].upper() == "SLOT":
                    self.slot = _number("SLOT", found[2], 0, MAX_SLOT, before=self.slot)
                else:
                    self.id = _number("REQ", found[2], 0, MAX_ID, before=self.id)
            except _WrongError as error:
                raise LineError(self.id, str(error)) from None
            text = text[found.end() :]
        return text

    def check_suits(self, command: Command) -> None:
        """Refuse an id or a slot that the command would ignore."""
        is_of_all = isinstance(command, Scheduled | ListSlots | ListRequests | ListSnapshots)
        if is_of_all and not self.is_empty:
            raise _WrongError("REQ and SLOT are only allowed before commands for one request")
        if isinstance(command, LineCancel) and self.slot is not None:
            raise _WrongError("CANCEL takes the id of a request, and no SLOT")
        if isinstance(command, Start) and not self.id:
            raise _WrongError(f"START needs REQ with an id of 1 … {MAX_ID}")


def _number(name: str, word: str, low: int, high: int, *, before: int | None = None) -> int:
    """Return the number that a word is; `before` is what was said under this name earlier in the line."""
    if before is not None:
        raise _WrongError(f"{name} is given twice")
    if not word:
        raise _WrongError(f"{name} needs a number, {low} … {high}")
    # Python reads other digits than 0 … 9 as well, and refuses very long numbers
    if re.fullmatch(r"[+-]?[0-9]+", word) is None:
        raise _WrongError(f"{name} must be a whole number, {low} … {high}, not {shown(word)}")
    if len(word) > 20 or not low <= int(word) <= high:
        raise _WrongError(f"{name} must be {low} … {high}, not {shown(word)}")
    return int(word)


# ---- the command ----


def _command(text: str, prefix: _Prefix) -> Command:
    if not text:
        raise _WrongError("no command after REQ or SLOT")
    word, rest = (*text.split(None, 1), "")[:2]
    name = word.upper()
    if name in _NOT_HERE:
        raise _WrongError(f"{name} is not offered: {_NOT_HERE[name]}")
    if name == "CANCEL":
        return _cancel(rest, prefix)
    if name in _READERS:
        return _READERS[name](name, rest)
    return _generate(word, text)


def _start(name: str, rest: str) -> Start:
    path, total, quantum = _path_and_numbers(rest, 2, f"{name} <prompt_file> <total> <quantum>")
    return Start(
        path,
        _number("total", total, 1, MAX_INT),
        _number("quantum", quantum, 1, MAX_INT),
    )


def _path_and_numbers(rest: str, n_numbers: int, form: str) -> list[str]:
    """Return a path, which may have blanks, and the `n_numbers` words after it."""
    words = rest.rsplit(maxsplit=n_numbers)
    if len(words) != n_numbers + 1:
        raise _WrongError(f"usage: {form}")
    return words


def _continue(name: str, rest: str) -> Continue:
    return Continue(_number("the number of tokens", rest, 1, MAX_INT))


def _cancel(rest: str, prefix: _Prefix) -> LineCancel:
    if not rest and prefix.id is None:
        raise _WrongError("CANCEL needs the id of a request")
    id = prefix.id if not rest else _number("CANCEL", rest, 0, MAX_ID)
    if prefix.id is not None and id != prefix.id:
        raise _WrongError(f"REQ {prefix.id} and CANCEL {id} name two requests")
    return LineCancel(id or 0)


def _restore(name: str, rest: str) -> Generate:
    number, more = (*rest.split(None, 1), "", "")[:2]
    path, n = _path_and_numbers(more, 1, f"{name} <snapshot> <prompt_file> <n>")
    n_tokens = _number("the number of tokens", n, 1, MAX_INT)
    return Generate(path, n_tokens, _number("the snapshot", number, 0, MAX_SNAPSHOT))


def _numbered(command: Callable[[int], Command]) -> Callable[[str, str], Command]:
    def read(name: str, rest: str) -> Command:
        return command(_number(f"the number of {name}", rest, 0, MAX_SNAPSHOT))

    return read


def _alone(command: Command) -> Callable[[str, str], Command]:
    def read(name: str, rest: str) -> Command:
        if rest:
            raise _WrongError(f"{name} takes no arguments, not {shown(rest)}")
        return command

    return read


def _batch(kind: BatchKind) -> Callable[[str, str], Command]:
    def read(name: str, rest: str) -> Command:
        return LineBatch(kind, _number(f"max of {name}", rest, 1, MAX_INT) if rest else None)

    return read


def _generate(word: str, text: str) -> Generate:
    """Read `<prompt_file> <n>`, the one command without a name."""
    *path, last = text.rsplit(None, 1)
    if not path or not last.lstrip("+-").isdigit():
        raise _WrongError(f"unknown command {shown(word)}")
    return Generate(path[0], _number("the number of tokens", last, 1, MAX_INT))


_READERS: Mapping[str, Callable[[str, str], Command]] = {
    "START": _start,
    "CONTINUE": _continue,
    "CONT": _continue,
    "SCHED_STEP": _alone(Step()),
    "SCHED_DRAIN": _alone(Drain()),
    "SCHED_BATCH_PEEK": _batch("peek"),
    "SCHED_BATCH_PROBE": _batch("probe"),
    "SCHED_BATCH_TARGET_TAIL": _batch("tail"),
    "SCHED_BATCH_TARGET_STEP": _batch("step"),
    "SCHED_BATCH_DRAIN": _batch("drain"),
    "LIST_TARGET_CACHE_SLOTS": _alone(ListSlots()),
    "LIST_REQUESTS": _alone(ListRequests()),
    "RESTORE": _restore,
    "SNAPSHOT": _numbered(Snapshot),
    "FREE_SNAPSHOT": _numbered(FreeSnapshot),
    "LIST_SLOTS": _alone(ListSnapshots()),
}

_NOT_HERE: Mapping[str, str] = {
    "RESTORE_CHAIN": "a prompt takes over the cells of one beginning; use RESTORE",
    "SNAPSHOT_THIN": "a snapshot begins at the first token; use SNAPSHOT",
    "PARK": "the weights stay in memory",
    "UNPARK": "the weights stay in memory",
    "COMPRESS": "prompts are computed as they are",
}
"""Older commands, and why there are none here."""
