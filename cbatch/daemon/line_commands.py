"""Lines of `cbatch daemon` as commands: text alone, no state and no file. See docs/operate/processes.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cbatch.support.checks import MAX_INT, shown

MAX_ID = 0x3FFFFFFF
"""The largest id of a request. Source: system 002's daemon, which reads ids up to this one."""

MAX_SLOT = 1024
"""The largest number of a slot that is read; which slots there are is known later. Source: as of `MAX_ID`."""

MAX_SNAPSHOT = 63
"""The largest number of a snapshot: our choice; system 002's daemon has eight."""

MAX_LINE = 2**20
"""Bytes of a line: our choice, far above any path."""

GENERATE = "GENERATE"
"""The oldest command, which has no name in a line: answer a prompt without quanta. With RESTORE, its prompt begins with
a snapshot."""


class LineError(Exception):
    """A line that says nothing that can be done."""

    def __init__(self, id: int | None, words: str) -> None:
        self.id = id
        super().__init__(words)


@dataclass(frozen=True, slots=True)
class Line:
    """A command and its values, of which each command has those that it needs.

    Args:
        name: in capitals; that of `CONTINUE` and `GENERATE` for all that mean the same.
        id: of the request.
        path: of the prompt.
        n: tokens, or the most sequences of a shared step.
        n_quantum: tokens of a turn.
        snapshot: its number.
    """

    name: str = ""
    id: int | None = None
    slot: int | None = None
    path: str = ""
    n: int | None = None
    n_quantum: int | None = None
    snapshot: int | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether it gives turns."""
        return self.name.startswith("SCHED_")

    @property
    def is_shared(self) -> bool:
        """Whether it is about steps that several requests share."""
        return self.name.startswith("SCHED_BATCH_")


def read_line(data: bytes) -> Line | None:
    """Return what a line says; None for an empty one.

    Args:
        data: a line with or without its end; of one that is longer than `MAX_LINE`, the beginning may do.

    Raises:
        LineError: no command, or one with wrong values.
    """
    text = data[: MAX_LINE + 1].decode("utf-8", "surrogateescape").strip()
    line, rest = Line(), text
    try:
        while (found := _NAMED.match(rest)) is not None:
            if found[1].upper() == "SLOT":
                line = replace(line, slot=_number("SLOT", found[2], 0, MAX_SLOT, before=line.slot))
            else:
                line = replace(line, id=_number("REQ", found[2], 0, MAX_ID, before=line.id))
            rest = rest[found.end() :]
        _check_text(data, text)
        return None if not rest and line == Line() else _command(line, rest)
    except _WrongError as error:
        raise LineError(line.id, str(error)) from None


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


_NAMED = re.compile(r"(REQUEST|REQ|SLOT)(?:\s*=\s*|\s+|$)(\S*)\s*", re.IGNORECASE | re.ASCII)
"""The id and the slot, which stand before a command, each once and in any order."""


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


def _command(line: Line, text: str) -> Line:
    """Return a line with the command in the text behind its id and slot."""
    if not text:
        raise _WrongError("no command after REQ or SLOT")
    word, rest = (*text.split(None, 1), "")[:2]
    name = word.upper()
    if name in _NOT_HERE:
        raise _WrongError(f"{name} is not offered: {_NOT_HERE[name]}")
    if name not in _READERS:
        return _generate(line, word, text)
    read = _READERS[name](replace(line, name=name), rest)
    if name.startswith(("SCHED_", "LIST_")) and (line.id, line.slot) != (None, None):
        raise _WrongError("REQ and SLOT are only allowed before commands for one request")
    return read


def _start(line: Line, rest: str) -> Line:
    path, total, quantum = _words(rest, 2, "START <prompt_file> <total> <quantum>")
    n, n_quantum = _number("total", total, 1, MAX_INT), _number("quantum", quantum, 1, MAX_INT)
    if not line.id:
        raise _WrongError(f"START needs REQ with an id of 1 … {MAX_ID}")
    return replace(line, path=path, n=n, n_quantum=n_quantum)


def _words(rest: str, n_numbers: int, form: str) -> list[str]:
    """Return a path, which may have blanks, and the `n_numbers` words after it."""
    words = rest.rsplit(maxsplit=n_numbers)
    if len(words) != n_numbers + 1:
        raise _WrongError(f"usage: {form}")
    return words


def _n_tokens(word: str) -> int:
    return _number("the number of tokens", word, 1, MAX_INT)


def _continue(line: Line, rest: str) -> Line:
    return replace(line, name="CONTINUE", n=_n_tokens(rest))


def _cancel(line: Line, rest: str) -> Line:
    if not rest and line.id is None:
        raise _WrongError("CANCEL needs the id of a request")
    id = _number("CANCEL", rest, 0, MAX_ID) if rest else line.id
    if line.id not in (None, id):
        raise _WrongError(f"REQ {line.id} and CANCEL {id} name two requests")
    if line.slot is not None:
        raise _WrongError("CANCEL takes the id of a request, and no SLOT")
    return replace(line, id=id)


def _restore(line: Line, rest: str) -> Line:
    number, more = (*rest.split(None, 1), "", "")[:2]
    path, n = _words(more, 1, "RESTORE <snapshot> <prompt_file> <n>")
    n_tokens, snapshot = _n_tokens(n), _number("the snapshot", number, 0, MAX_SNAPSHOT)
    return replace(line, name=GENERATE, path=path, n=n_tokens, snapshot=snapshot)


def _snapshot(line: Line, rest: str) -> Line:
    number = _number(f"the number of {line.name}", rest, 0, MAX_SNAPSHOT)
    return replace(line, snapshot=number)


def _alone(line: Line, rest: str) -> Line:
    if rest:
        raise _WrongError(f"{line.name} takes no arguments, not {shown(rest)}")
    return line


def _shared(line: Line, rest: str) -> Line:
    return replace(line, n=_number(f"max of {line.name}", rest, 1, MAX_INT) if rest else None)


def _generate(line: Line, word: str, text: str) -> Line:
    """Read `<prompt_file> <n>`, the one command without a name."""
    *path, last = text.rsplit(None, 1)
    if not path or not last.lstrip("+-").isdigit():
        raise _WrongError(f"unknown command {shown(word)}")
    return replace(line, name=GENERATE, path=path[0], n=_n_tokens(last))


_READERS: Mapping[str, Callable[[Line, str], Line]] = {
    "START": _start,  # a request: its prompt is computed, and its first quantum
    "CONTINUE": _continue,
    "CONT": _continue,
    "CANCEL": _cancel,
    "SCHED_STEP": _alone,  # gives the next request one quantum
    "SCHED_DRAIN": _alone,  # gives quanta in turn until no request is active
    "SCHED_BATCH_PEEK": _shared,  # shows what the next shared step would have
    "SCHED_BATCH_PROBE": _shared,  # compares it with steps alone
    "SCHED_BATCH_TARGET_TAIL": _shared,
    "SCHED_BATCH_TARGET_STEP": _shared,
    "SCHED_BATCH_DRAIN": _shared,
    "LIST_TARGET_CACHE_SLOTS": _alone,
    "LIST_REQUESTS": _alone,
    "RESTORE": _restore,
    "SNAPSHOT": _snapshot,  # keeps the tokens that a slot has, under a number
    "FREE_SNAPSHOT": _snapshot,
    "LIST_SLOTS": _alone,  # tells the numbers of all snapshots
}

_NOT_HERE: Mapping[str, str] = {
    "RESTORE_CHAIN": "a prompt can begin with one snapshot only; use RESTORE",
    "SNAPSHOT_THIN": "every snapshot begins at the first token; use SNAPSHOT",
    "PARK": "the weights stay in memory",
    "UNPARK": "the weights stay in memory",
    "COMPRESS": "prompts are computed as they are",
}
"""Older commands, and why there are none here."""
