"""The engine under the daemon's lines."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from cbatch.errors import EngineClosedError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.ids import own_id
from cbatch.runtime.interface import Runtime, Submission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.daemon.lines import Row
    from cbatch.response import BatchOutputChunk, BatchResult

    Take = Callable[[Sequence[BatchOutputChunk], Sequence[tuple[int, BatchResult]]], object]


class EngineMachine:
    """A `Machine` of one runtime, and the `Target` of its requests. Orders take effect in the order they are given."""

    is_streamed = wants_tokens = True

    def __init__(self, runtime: Runtime, options: RunOptions, take: Take) -> None:
        """Make one; `options` are those of every request, `take` is called with output in a thread of the runtime."""
        self._runtime, self._options, self._take = runtime, options, take
        self.n_slots, self.n_window = runtime.n_slots, runtime.n_window
        self.n_vocab = runtime.model_facts().n_vocab

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Hand output on."""
        self._take(chunks, results)

    def expect_choices(self, n: int) -> None:
        """Do nothing: each request has one answer."""

    def start(
        self, key: str, tokens: Sequence[int], n_total: int, n_quantum: int | None, slot: int
    ) -> None:
        """Queue a request for a slot; the request pauses after each quantum."""
        own = RunOptions(
            max_tokens=n_total, strict_max_tokens=True, slot=slot, pause_every=n_quantum
        )
        self._runtime.add(
            Submission(
                [BatchPrompt(tokens=tokens)],
                [own_id(key)],
                [""],
                own.over(self._options),
                math.inf,
                self,
            )
        )

    def resume(self, turns: Sequence[tuple[str, int]]) -> None:
        """Let paused requests go on, all before the next step."""
        self._runtime.orders.resume_soon(turns)

    def extend(self, result: BatchResult, n_tokens: int) -> str:
        """Queue a request that continues a result in its slot."""
        return self._runtime.extend(result, n_tokens, self)

    def cancel(self, keys: Sequence[str]) -> None:
        """End requests before the next step."""
        self._runtime.orders.cancel_soon(keys)

    def compare(self, keys: Sequence[str]) -> Sequence[Row]:
        """Compare the next rows of paused requests in one step and alone; waits for it."""
        return self._runtime.orders.compare_rows(keys)

    def settle(self) -> None:
        """Return when all orders are done and no request is left, or the engine has stopped."""
        with suppress(EngineClosedError):
            self._runtime.cancel_all()
