"""A machine without an engine for the daemon's lines, and an output that remembers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch.daemon.lines import END, MORE, Lines
from cbatch.errors import EngineClosedError, RequestFailedError
from cbatch.response import BatchOutputChunk, BatchResult, Timings, Usage
from cbatch.runtime.row_comparison import RowComparison

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cbatch.response import FinishReason

N_VOCAB = 1000


@dataclass
class Run:
    """A request in the machine."""

    prompt: tuple[int, ...]
    n_total: int
    slot: int
    quantum: int | None
    n_prefill: int
    """Steps until its first token may come."""
    output: list[int] = field(default_factory=list)
    n_turn: int | None = None
    """Tokens until it pauses; None for one that does not."""
    n_said: int = 0


class PlainMachine:
    """Computes a token a step for each request that is not paused; the test says when a step is done."""

    def __init__(self, n_slots: int = 4, n_window: int = 64, n_vocab: int = N_VOCAB) -> None:
        self.n_slots, self.n_window, self.n_vocab = n_slots, n_window, n_vocab
        self.runs: dict[str, Run] = {}
        self.ended: dict[str, Run] = {}
        self.turns: list[list[tuple[str, int]]] = []
        """What was resumed together."""
        self.end_at: dict[int, int] = {}
        """Output positions at which a request ends by itself, by the first token of its prompt."""
        self.n_prefilled = 0
        self.different: dict[str, int] = {}
        self.is_closed = False

    def start(
        self, key: str, tokens: Sequence[int], n_total: int, n_quantum: int | None, slot: int
    ) -> None:
        self._check()
        assert key not in self.runs
        assert slot not in [run.slot for run in self.runs.values()]
        run = Run(tuple(tokens), n_total, slot, n_quantum, len(tokens) // 16, n_turn=n_quantum)
        self.runs[key] = run
        self.n_prefilled += len(tokens)

    def resume(self, turns: Sequence[tuple[str, int]]) -> None:
        self._check()
        for key, n_tokens in turns:
            assert self.runs[key].n_turn == 0, "it is not paused"
            assert 0 < n_tokens <= self.runs[key].n_total - len(self.runs[key].output)
            self.runs[key].n_turn = n_tokens
        self.turns.append([*turns])

    def extend(self, result: BatchResult, n_tokens: int) -> str:
        self._check()
        run = self.ended.pop(result.id)
        run.n_total += n_tokens
        run.n_turn, run.n_said, run.n_prefill = run.quantum, 0, 0
        self.runs[result.id] = run
        return result.id

    def cancel(self, keys: Sequence[str]) -> None:
        self._check()
        for key in keys:
            del self.runs[key]

    def compare(self, keys: Sequence[str]) -> Sequence[RowComparison]:
        self._check()
        for key in keys:
            assert self.runs[key].n_turn == 0
        n = len(keys)
        return [RowComparison(k, 0, 0, n, 7, 0.0, self.different.get(k, 7), 0.0) for k in keys]

    def _check(self) -> None:
        if self.is_closed:
            raise EngineClosedError("the engine is closed")

    # ---- for tests ----

    def step(self, lines: Lines) -> bool:
        """Compute one token for each request that is not paused; False where there is none."""
        chunks: list[BatchOutputChunk] = []
        results: list[tuple[int, BatchResult]] = []
        live = {key: run for key, run in self.runs.items() if run.n_turn != 0}
        for key, run in live.items():
            if run.n_prefill:
                run.n_prefill -= 1
                continue
            reason = self._sample(run)
            tokens = tuple(run.output[run.n_said :])
            run.n_said = len(run.output)
            chunks.append(BatchOutputChunk(key, "", tokens, 0, reason))
            if reason is not None:
                self.ended[key] = self.runs.pop(key)
                results.append((0, result(key, tuple(run.output), reason)))
        lines.take_output(chunks, results)
        return bool(live)

    def _sample(self, run: Run) -> FinishReason | None:
        if len(run.output) == self.end_at.get(run.prompt[0]):
            return "stop"
        run.output.append(token_at(run.prompt, len(run.output)))
        if run.n_turn is not None:
            run.n_turn -= 1
        return "length" if len(run.output) == run.n_total else None

    def work(self, lines: Lines) -> None:
        """Do steps until every request is paused or has ended."""
        while self.step(lines):
            pass

    def break_request(self, lines: Lines, key: str) -> None:
        """Let a request fail."""
        del self.runs[key]
        failed = result(key, (), "error", RequestFailedError("the row is broken"))
        lines.take_output([BatchOutputChunk(key, "", (), 0, "error")], [(0, failed)])


def result(
    key: str,
    tokens: tuple[int, ...],
    reason: FinishReason,
    error: RequestFailedError | None = None,
) -> BatchResult:
    """Return a result as a runtime gives it."""
    times = Timings(0.0, None, 0.0, None, None)
    return BatchResult(key, "", tokens, reason, error, Usage(1, len(tokens)), times, 0)


def token_at(prompt: Sequence[int], i: int) -> int:
    """Return the token that the machine samples at a place of the output."""
    return (sum(prompt) * 31 + 17 * i) % N_VOCAB


def stream(prompt: Sequence[int], n: int) -> list[int]:
    """Return the first tokens of a prompt's output."""
    return [token_at(prompt, i) for i in range(n)]


class Remembered:
    """An output that keeps frames and text."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int]] = []
        self.texts: list[tuple[int, str]] = []

    def tokens(self, id: int, tokens: Sequence[int]) -> None:
        assert tokens
        self.frames += [(id, token) for token in tokens]

    def mark(self, id: int, value: int) -> None:
        assert value in (MORE, END)
        self.frames.append((id, value))

    def say(self, text: str, id: int = 0) -> None:
        self.texts.append((id, text))

    def of(self, id: int) -> list[int]:
        """Return the values of an id's frames."""
        return [value for i, value in self.frames if i == id]

    def tokens_of(self, id: int) -> list[int]:
        return [value for value in self.of(id) if value >= 0]

    def said(self, words: str) -> list[str]:
        """Return the lines of text that have these words."""
        return [text for _, text in self.texts if words in text]


class Daemon:
    """The lines over a plain machine, with prompt files."""

    def __init__(
        self, folder: Path, *, n_slots: int = 4, n_window: int = 64, is_tagged: bool = True
    ) -> None:
        self.folder = folder
        self.machine, self.out = PlainMachine(n_slots, n_window), Remembered()
        self.lines = Lines(self.machine, self.out, is_tagged=is_tagged)

    def prompt(self, *tokens: int, name: str | None = None) -> Path:
        """Write a prompt file; its name is that of its first token."""
        path = self.folder / (name or f"p{tokens[0]}.bin")
        path.write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
        return path

    def say(self, *texts: str) -> None:
        """Send lines; engine steps are done behind each, until all is paused."""
        for text in texts:
            self.send(text)
            self.machine.work(self.lines)

    def send(self, text: str) -> None:
        """Send one line; the engine does nothing meanwhile."""
        self.lines.take_line(text.encode())

    def start(
        self, id: int, total: int, quantum: int, *, n_prompt: int = 3, more: str = ""
    ) -> None:
        """Send a START whose prompt begins with the id."""
        path = self.prompt(id, *range(1, n_prompt))
        self.send(f"REQ {id} {more} START {path} {total} {quantum}")

    def expected(self, id: int, n: int, *, n_prompt: int = 3) -> list[int]:
        return stream([id, *range(1, n_prompt)], n)
