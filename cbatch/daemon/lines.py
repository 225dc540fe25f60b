"""The requests, slots and turns behind the lines of `cbatch daemon`; see docs/operate/processes.md."""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from cbatch.daemon.line_commands import GENERATE, Line, LineError, read_line
from cbatch.daemon.slot_table import SlotRequest, SlotTable
from cbatch.errors import CBatchError, EngineClosedError, PromptError, words_of
from cbatch.support.checks import readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.row_comparison import RowComparison

MORE = -4
"""A frame's value after a quantum: the request lives."""

END = -1
"""A frame's value at the end of a request."""

_TOKEN_BYTES = 4
"""Bytes of a token in a file of a prompt: a little-endian int32."""

N_WAITING_MAX = 10_000
"""Commands that may wait for their turn: our choice, so that a client that never stops fills no memory."""


class Machine(Protocol):
    """What computes the requests, known by keys. Only `compare` waits."""

    n_slots: int
    """Requests that run at once."""
    n_window: int
    """Tokens, prompt and answer, that one slot holds."""
    n_vocab: int
    """Token ids are below."""

    def start(
        self, key: str, tokens: Sequence[int], n_total: int, n_quantum: int | None, slot: int
    ) -> None:
        """Begin a request in a slot that is free; the request pauses after a quantum, unless that is None."""

    def resume(self, turns: Sequence[tuple[str, int]]) -> None:
        """Let paused requests go on together, each until it has sampled so many tokens more."""

    def extend(self, result: BatchResult, n_tokens: int) -> str:
        """Begin a request that continues a result in the same slot; return its key."""

    def cancel(self, keys: Sequence[str]) -> None:
        """End requests."""

    def compare(self, keys: Sequence[str]) -> Sequence[RowComparison]:
        """Compute the next rows of paused requests in one step and alone; commit nothing."""


class Output(Protocol):
    """Where frames and text go; nothing here waits for a reader."""

    def tokens(self, id: int, tokens: Sequence[int]) -> None:
        """Write a frame for each token."""

    def mark(self, id: int, value: int) -> None:
        """Write a frame that is not a token."""

    def say(self, text: str, id: int = 0) -> None:
        """Write a line of text."""


class Lines:
    """Does what lines say, and tells what came of it. Every method from one thread; none waits.

    A scheduling command waits for the turns that run; every other command acts at once. So lines are read between
    turns, and a drain goes on whatever they say.
    """

    def __init__(self, machine: Machine, output: Output, *, is_tagged: bool) -> None:
        self._machine, self._out, self._is_tagged = machine, output, is_tagged
        self._slots = SlotTable(machine.n_slots)
        self._scheduled: deque[Line] = deque()
        self._prompts: deque[Line] = deque()
        """Prompts that are answered one after the other, and what is said of snapshots between."""
        self._is_ending = False
        self._n_lines = 0

    @property
    def is_done(self) -> bool:
        """Whether no line will come and nothing is left to do."""
        return self._is_ending and not (self._scheduled or self._prompts or self._slots.active)

    # ---- what comes in ----

    def take_line(self, data: bytes) -> None:
        """Do what a line says; a wrong one is answered and changes nothing."""
        self._n_lines += 1
        try:
            line = read_line(data)
            if line is not None:
                self._try(line)
        except LineError as error:
            self._refuse(error.id, str(error))
        self._advance()

    def take_output(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Take new tokens of requests, and results of requests that ended."""
        requests = {request.key: request for request in self._slots.active}
        over: list[SlotRequest] = []
        for chunk in chunks:
            request = requests.get(chunk.id)
            if request is not None:
                self._take_tokens(request, chunk.token_ids)
                if chunk.finish_reason is None and not request.n_due:
                    over.append(request)
        for _, result in results:
            request = requests.get(result.id)
            if request is not None:
                self._take_end(request, result)
        self._advance(over)

    def end_input(self) -> None:
        """Take no more lines: what is active is drained."""
        self._is_ending = True
        self._scheduled.append(Line("SCHED_DRAIN"))
        self._advance()

    def leave(self) -> None:
        """End all requests, for nobody reads any more."""
        self._is_ending = True
        self._scheduled.clear()
        self._prompts.clear()
        self._cancel(self._slots.active)

    def fail(self, error: EngineClosedError) -> None:
        """End all requests, for the engine has stopped."""
        self._out.say(f"error: {words_of(error)}")
        for request in self._slots.active:
            self._end(request, "failed")
        self._scheduled.clear()
        self._prompts.clear()
        self._is_ending = True

    # ---- commands ----

    def _try(self, line: Line) -> None:
        try:
            self._do(line)
        except CBatchError as error:  # of the machine
            raise LineError(line.id, words_of(error)) from error

    def _do(self, line: Line) -> None:
        if line.is_shared and not self._is_tagged:
            raise LineError(None, "shared steps need --stream-tagged")
        if line.is_scheduled:
            self._put(self._scheduled, line)
        elif line.name == "START":
            self._start(line, line.id or 0)
        elif line.name == "CONTINUE":
            self._continue(line.id or 0, line.slot, line.n or 0)
        elif line.name == "CANCEL":
            self._cancel_id(line.id or 0)
        elif line.name == "LIST_TARGET_CACHE_SLOTS":
            self._out.say(f"{line.name} {self._slots.slots_said()}")
        elif line.name == "LIST_REQUESTS":
            self._out.say(f"{line.name} {self._slots.requests_said()}".rstrip())
        else:
            self._put(self._prompts, line)

    def _put(self, waiting: deque[Line], line: Line) -> None:
        if len(waiting) == N_WAITING_MAX:
            raise LineError(None, f"{N_WAITING_MAX:,} commands wait already: send this one later")
        waiting.append(line)

    def _start(self, line: Line, id: int) -> None:
        if self._slots.find(id) is not None:
            raise LineError(id, f"request {id} is active already")
        slot = self._slots.first_free() if line.slot is None else line.slot
        if slot is None:
            raise LineError(id, f"all {len(self._slots)} slots are in use")
        self._check_free(id, slot)
        self._begin(id, slot, self._prompt(id, line.path), line.n or 0, line.n_quantum)

    def _prompt(self, id: int, path: str, what: str = "") -> Sequence[int]:
        try:
            return _read_prompt(path, self._machine.n_vocab, self._machine.n_window)
        except PromptError as error:
            raise LineError(id, f"{what}{error}") from None

    def _begin(
        self, id: int, slot: int, tokens: Sequence[int], n_total: int, quantum: int | None
    ) -> None:
        """Enter a request into a free slot. Raises a LineError where it does not fit."""
        self._check_window(id, len(tokens), n_total)
        key = f"{id}.{slot}.{self._slots.epochs[slot]}"
        self._machine.start(key, tokens, n_total, quantum, slot)
        request = SlotRequest(
            id, slot, self._slots.epochs[slot], key, len(tokens), n_total, quantum
        )
        request.n_due = min(quantum or n_total, n_total)
        request.tokens.extend(tokens)
        self._slots.enter(request)
        what = f"{len(tokens)} + {n_total} tokens, in turns of {quantum or n_total}"
        self._out.say(f"started in slot {slot}: {what}", id)

    def _check_free(self, id: int, slot: int) -> None:
        self._check_slot(id, slot)
        owner = self._slots.owners[slot]
        if owner is not None:
            raise LineError(id, f"slot {slot} has request {owner.id}, which is active")
        if not self._is_tagged and self._slots.active:
            raise LineError(id, "only one request can run at a time without --stream-tagged")

    def _check_slot(self, id: int, slot: int) -> None:
        if slot >= len(self._slots):
            raise LineError(id, f"slot {slot} is out of range: there are {len(self._slots)} slots")

    def _check_window(self, id: int, n_before: int, n_more: int) -> None:
        n_window = self._machine.n_window
        if n_before + n_more > n_window:
            raise LineError(
                id, f"{n_before} + {n_more} tokens are more than a slot holds: {n_window}"
            )

    def _continue(self, id: int, slot: int | None, n_tokens: int) -> None:
        request = self._slots.find(id)
        kept = self._slots.kept.get(id)
        known = request or (kept and kept[0])
        if known is None:
            raise LineError(id, f"request {id} is not active and cannot be continued")
        if slot not in (None, known.slot):
            raise LineError(id, f"request {id} is in slot {known.slot}, not in {slot}")
        if request is None and kept is not None:
            self._take_up(*kept, n_tokens)
        elif request is not None:
            self._grant(request, n_tokens)

    def _grant(self, request: SlotRequest, n_tokens: int) -> None:
        """Give a request a turn, now or after the one that runs."""
        if sum(request.later) + request.n_due + request.n_more >= request.n_left:
            what = f"request {request.id} has turns already for all of its {request.n_left} tokens"
            raise LineError(request.id, what)
        if request.n_due:
            request.later.append(n_tokens)
        else:
            self._run([request], n_tokens)

    def _take_up(self, old: SlotRequest, result: BatchResult, n_tokens: int) -> None:
        """Begin a request again that has ended by its number of tokens."""
        self._check_free(old.id, old.slot)
        self._check_window(old.id, old.position, n_tokens)
        key = self._machine.extend(result, n_tokens)
        n_due = min(n_tokens, old.quantum or n_tokens)
        self._slots.enter(
            replace(
                old,
                key=key,
                epoch=self._slots.epochs[old.slot],
                n_total=old.n_emitted + n_tokens,
                n_skip=old.n_emitted,
                n_due=n_due,
                n_more=n_tokens - n_due,
                n_owed=0,
                later=deque(),
            )
        )
        self._out.say(f"continued in slot {old.slot}: {n_tokens} tokens", old.id)

    def _cancel_id(self, id: int) -> None:
        """End a request, and prompts with its id that wait; late or for nobody it has no effect."""
        request = self._slots.find(id)
        others = [p for p in self._prompts if p.name != GENERATE or (p.id or 0) != id]
        n_waiting = len(self._prompts) - len(others)
        self._prompts = deque(others)
        self._slots.kept.pop(id, None)
        for _ in range(n_waiting):
            self._out.say("cancelled while it waited", id)
            self._out.mark(id, END)
        if request is not None:
            self._cancel([request])
        elif not n_waiting:
            self._out.say("cancelled already, or never active", id)

    def _cancel(self, requests: Sequence[SlotRequest]) -> None:
        if requests:
            with suppress(EngineClosedError):
                self._machine.cancel([request.key for request in requests])
        for request in requests:
            self._end(request, "cancelled")

    def _refuse(self, id: int | None, words: str) -> None:
        """Tell what is wrong with a line, with a frame that ends it: after the turn of the request that it names."""
        self._out.say(f"error in line {self._n_lines}: {words}", id or 0)
        active = self._slots.active
        request = self._slots.find(id or 0) if self._is_tagged else next(iter(active), None)
        if request is None:
            self._out.mark(id or 0, END)
        elif request.n_due:
            request.n_owed += 1
        else:
            self._out.mark(request.id, MORE)

    def _mark(self, request: SlotRequest, value: int) -> None:
        """Write the frame after a turn, and those of lines that were refused meanwhile."""
        # a stream has one end, but where no id tells streams apart each line has its own
        is_stream = value == END and self._is_tagged and request.id
        n_owed, request.n_owed = request.n_owed, 0
        for _ in range(1 if is_stream else 1 + n_owed):
            self._out.mark(request.id, value)

    # ---- turns ----

    def _advance(self, over: Sequence[SlotRequest] = ()) -> None:
        """Begin what may begin now, where the turns of some requests are over."""
        try:
            for request in over:
                self._end_turn(request)
            self._answer_prompts()
            while self._scheduled and self._may_go(self._scheduled[0]):
                if self._go(self._scheduled[0]):
                    self._scheduled.popleft()
        except EngineClosedError as error:
            self.fail(error)

    def _answer_prompts(self) -> None:
        """Begin the next of the prompts that are answered one after the other."""
        while self._prompts and all(request.quantum for request in self._slots.active):
            line = self._prompts.popleft()
            do = self._generate if line.name == GENERATE else self._keep_snapshots
            try:
                do(line, line.id or 0, line.slot or 0)
            except LineError as error:
                self._refuse(line.id or 0, str(error))

    def _generate(self, line: Line, id: int, slot: int) -> None:
        """Begin a request without quanta."""
        if self._slots.find(id) is not None:
            raise LineError(id, f"request {id} is active already")
        self._check_free(id, slot)
        number = line.snapshot
        before = None if number is None else self._slots.snapshots.get(number)
        if number is not None and before is None:
            raise LineError(id, f"there is no snapshot {number}")
        what = "neither a command nor a prompt: " if number is None else ""
        tokens = self._prompt(id, line.path, what)
        if before is not None and tuple(before) != tuple(tokens[: len(before)]):
            raise LineError(id, f"the prompt does not begin with the tokens of snapshot {number}")
        self._begin(id, slot, tokens, line.n or 0, None)

    def _keep_snapshots(self, line: Line, id: int, slot: int) -> None:
        """Do a command of snapshots. Their texts are those of system 002's daemon, which its clients look for."""
        number = line.snapshot
        if number is None:
            numbers = ",".join(map(str, sorted(self._slots.snapshots)))
            self._out.say(f"[snap] slots={numbers}", id)
        elif line.name == "FREE_SNAPSHOT":
            self._slots.snapshots.pop(number, None)
            self._out.say(f"[snap] freed slot={number}", id)
        else:
            self._check_slot(id, slot)
            n_tokens = self._slots.snapshot(slot, number)
            if n_tokens is None:
                raise LineError(id, f"no request has run in slot {slot} yet")
            self._out.say(f"[snap] inline slot={number} cur_pos={n_tokens}", id)

    def _may_go(self, line: Line) -> bool:
        """Whether no turn runs that a scheduling command waits for.

        A long prompt holds up nobody: it is waited for only where too few others can take a turn.
        """
        running = [request for request in self._slots.active if request.quantum and request.n_due]
        n_wanted = 2 if line.is_shared else 1
        has_enough = len(self._slots.in_turn()) >= n_wanted
        return not running or (has_enough and all(request.is_in_prompt for request in running))

    def _go(self, line: Line) -> bool:
        """Do a scheduling command, or one round of it; return whether all of it is done."""
        requests = self._slots.in_turn()
        if line.is_shared:
            return self._share(line, requests[: line.n])
        # the last drain came with the end of the input: nobody has asked for it
        is_asked_for = not self._is_ending or len(self._scheduled) > 1
        if not requests and is_asked_for:
            self._out.say(f"{line.name}: idle")
        if not requests:
            return True
        if line.name == "SCHED_DRAIN":
            self._run(requests)
            return False
        self._run(requests[:1])
        self._slots.pass_on(requests[0])
        return True

    def _share(self, line: Line, requests: list[SlotRequest]) -> bool:
        """Do a command of steps that requests share, or one round of it; return whether all of it is done."""
        kind, is_drain = line.name.removeprefix("SCHED_BATCH_"), line.name == "SCHED_BATCH_DRAIN"
        if kind == "TARGET_TAIL":
            requests = [request for request in self._slots.in_turn() if request.n_left == 1]
            requests = requests[: line.n]
        said = " ".join(f"{r.id}:{r.slot}:{r.position}" for r in requests)
        self._out.say(f"{line.name} rows={len(requests)} {said}".rstrip())
        if kind == "PROBE" and len(requests) > 1:
            self._compare(requests)
        if kind in ("PEEK", "PROBE") or not requests:
            return True
        if not is_drain:
            self._run(requests, 1)
        elif len(requests) > 1:
            self._run(requests, min(min(r.quantum or 1, r.n_left) for r in requests))
        else:
            return True
        self._slots.pass_on(requests[-1])
        return not is_drain

    def _compare(self, requests: Sequence[SlotRequest]) -> None:
        try:
            rows = self._machine.compare([request.key for request in requests])
        except EngineClosedError:
            raise
        except CBatchError as error:
            self._refuse(None, words_of(error))
            return
        ids = {request.key: request.id for request in requests}
        wrong = [row for row in rows if not row.is_same_token]
        said = " ".join(f"{ids[row.id]}:{row.shared_token}:{row.single_token}" for row in wrong)
        self._out.say(
            f"SCHED_BATCH_PROBE compared={len(rows)} differences={len(wrong)} {said}".rstrip()
        )

    def _run(self, requests: Sequence[SlotRequest], n_tokens: int | None = None) -> None:
        """Give paused requests a turn together: of `n_tokens`, or each its quantum."""
        for request in requests:
            request.n_due = min(n_tokens or request.quantum or request.n_left, request.n_left)
        self._machine.resume([(request.key, request.n_due) for request in requests])

    # ---- output ----

    def _take_tokens(self, request: SlotRequest, tokens: Sequence[int]) -> None:
        if request.n_skip:
            tokens, request.n_skip = tokens[request.n_skip :], max(0, request.n_skip - len(tokens))
        if tokens:
            self._out.tokens(request.id, tokens)
            request.tokens.extend(tokens)
            request.n_emitted += len(tokens)
            request.n_due = max(0, request.n_due - len(tokens))
            request.is_in_prompt = False

    def _end_turn(self, request: SlotRequest) -> None:
        """Go on with a long turn, or tell that it is over."""
        if request.n_more:
            n_more, request.n_more = request.n_more, 0
            self._run([request], n_more)
            return
        self._mark(request, MORE)
        if request.later:
            self._run([request], request.later.popleft())

    def _take_end(self, request: SlotRequest, result: BatchResult) -> None:
        if result.error is not None:
            self._end(request, f"failed: {words_of(result.error)}")
            return
        self._end(request, f"{result.finish_reason}, {request.n_emitted} tokens")
        if result.finish_reason == "length":
            self._slots.kept[request.id] = request, result

    def _end(self, request: SlotRequest, words: str) -> None:
        """Take a request out of its slot; whatever comes of it later finds nobody."""
        self._slots.leave(request)
        request.n_due = request.n_more = 0
        self._out.say(f"ended: {words}", request.id)
        self._mark(request, END)


def _read_prompt(path: str, n_vocab: int, n_most: int) -> tuple[int, ...]:
    """Return the tokens of a file; at most `n_most`. A pipe or device is refused, for reading one may never end.

    Raises:
        PromptError: no such file, nothing to read as tokens, or a token outside of the vocabulary.
    """
    try:
        tokens = array("i", _content(path, n_most * _TOKEN_BYTES))
        if sys.byteorder == "big":
            tokens.byteswap()
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= n_vocab:
            wrong = low if low < 0 else high
            raise ValueError(f"token {wrong} is not in the vocabulary of {n_vocab:,}")
        return tuple(tokens)
    except OSError as error:
        raise PromptError(f"{readable(path)}: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"{readable(path)}: {error}") from None


def _content(path: str, n_most: int) -> bytes:
    """Return the bytes of a regular file that holds whole tokens. Raises a ValueError for another."""
    # opening a named pipe would wait for its writer otherwise
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file of token ids")
        with os.fdopen(file, "rb", closefd=False) as opened:
            data = opened.read(n_most + 1)
    finally:
        os.close(file)
    if not data:
        raise ValueError("the file is empty")
    if len(data) > n_most:
        n_tokens = max(status.st_size, len(data)) // _TOKEN_BYTES
        raise ValueError(
            f"{n_tokens:,} tokens, but a slot holds at most {n_most // _TOKEN_BYTES:,}"
        )
    if len(data) % _TOKEN_BYTES:
        raise ValueError(f"{len(data):,} bytes are not whole tokens of {_TOKEN_BYTES} bytes")
    return data
