"""Equal requests of a batch are computed once: the others, its copies, get the same answer."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.options import RunOptions, values_of
from cbatch.runtime.output_size import size_of_result
from cbatch.support.interrupts import HeldBack
from cbatch.support.plain import text_of_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.mailbox import Parcel

N_BYTES_KEPT = 64 * 2**20
"""Memory for answers that later copies may want, about: our choice. The oldest are dropped."""


@dataclass(slots=True)
class _First:
    """A request that is computed, its answer once it has ended, and the copies that wait for it."""

    copies: list[tuple[int, str]] = field(default_factory=list)
    """Places and ids."""
    result: BatchResult | None = None


class Copies:
    """The requests of one batch that others may equal. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held briefly; no signal handler runs meanwhile
        self._by_key: dict[bytes, _First] = {}
        self._keys: dict[str, bytes] = {}
        """Keys of the requests in flight, by id."""
        self._n_bytes = 0

    def join(
        self, prompt: BatchPrompt, run_options: RunOptions, place: int, id: str
    ) -> Parcel | None:
        """Return the answer of an equal request, empty if it is to come; None if this one has to be computed."""
        key = _key_of(prompt, run_options)
        if key is None:
            return None
        with HeldBack(), self._lock:
            first = self._by_key.get(key)
            if first is None:
                self._by_key[key], self._keys[id] = _First(), key
                return None
            if first.result is not None:
                return _copied(first.result, [(place, id)])
            first.copies.append((place, id))
        return [], []

    def of_ended(self, results: Sequence[tuple[int, BatchResult]]) -> Parcel:
        """Return what the copies of requests get that have ended."""
        chunks: list[BatchOutputChunk] = []
        copied: list[tuple[int, BatchResult]] = []
        with HeldBack(), self._lock:
            for _, result in results:
                key = self._keys.pop(result.id, None)
                if key is None:
                    continue
                first = self._by_key[key]
                more_chunks, more = _copied(result, first.copies)
                chunks += more_chunks
                copied += more
                first.copies = []
                if result.error is None and result.finish_reason not in ("cancelled", "timeout"):
                    first.result = replace(result, origin=None)
                    self._n_bytes += size_of_result(result, is_streamed=False)
                else:  # a later one may do better
                    del self._by_key[key]
            self._forget()
        return chunks, copied

    def _forget(self) -> None:
        """Drop the oldest answers that are too many."""
        for key in [*self._by_key] if self._n_bytes > N_BYTES_KEPT else ():
            result = self._by_key[key].result
            if result is not None:
                del self._by_key[key]
                self._n_bytes -= size_of_result(result, is_streamed=False)
            if self._n_bytes <= N_BYTES_KEPT // 2:
                break


def _key_of(prompt: BatchPrompt, run_options: RunOptions) -> bytes | None:
    """Return a digest of what a request's only answer depends on; None where it may not be shared."""
    try:
        own = RunOptions.of(prompt.options)
        options = own.over(run_options)
    except ConfigError:  # it is refused where it is submitted
        return None
    is_drawn = options.temperature != 0 and options.seed is None and not options.choice_probs
    is_own = options.logits_processor is not None or options.save_cache or options.slot is not None
    if is_drawn or is_own or options.n_choices > 1 or options.pause_every is not None:
        return None
    text = text_of_plain((prompt.messages, prompt.prompt, prompt.tokens, values_of(own)))
    return None if text is None else hashlib.blake2b(text.encode(), digest_size=16).digest()


def _copied(result: BatchResult, copies: Sequence[tuple[int, str]]) -> Parcel:
    """Return a result under the ids of its copies, each with one chunk."""
    copied = [(place, replace(result, id=id, origin=None)) for place, id in copies]
    return [copy.as_chunk() for _, copy in copied], copied
