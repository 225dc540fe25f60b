"""How far the prompt of a stream is, told while it is computed. Source: llama.cpp tools/server, `return_progress`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.runtime.step_record import SlotState
    from cbatch.server.desk import Desk
    from cbatch.server.sse import EventStream


@runtime_checkable
class ProgressEncoder(Protocol):
    """An encoder whose dialect has a place for it."""

    def progress(self, told: Mapping[str, Any]) -> bytes:
        """Return the frames of how far the prompt is."""


class PromptProgress:
    """Tells how far one prompt is, again and again until its answer begins."""

    def __init__(self, desk: Desk, id: str, stream: EventStream, encoder: ProgressEncoder) -> None:
        """Tell nothing yet; `id` is that of the request."""
        self._desk, self._id, self._stream, self._encoder = desk, id, stream, encoder
        self._start_s = desk.clock()
        self._is_over = False

    def end(self) -> None:
        """Tell no more: the answer comes."""
        self._is_over = True

    async def tell(self) -> None:
        """Tell after each second, or what else the server calls a silence."""
        desk = self._desk
        while True:
            await anyio.sleep(desk.settings.keep_alive_s)
            slots = await desk.slots.ask() if not self._is_over else None
            if self._is_over:
                return
            if told := self._told(slots or ()):
                await self._stream.send(self._encoder.progress(told))

    def _told(self, slots: Sequence[SlotState]) -> dict[str, Any]:
        """Return how far it is; nothing where it waits, or is computed."""
        for slot in slots:
            is_ours = slot.id is not None and slot.id.partition("[")[0] == self._id
            if is_ours and slot.n_computed < slot.n_prompt:
                return {
                    "total": slot.n_prompt,
                    "cache": slot.n_cached,
                    "processed": slot.n_computed,
                    "time_ms": round((self._desk.clock() - self._start_s) * 1e3),
                }
        return {}
