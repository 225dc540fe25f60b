"""What a server lets others see of its work: `/metrics` and `/slots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from cbatch.server.exposition import CONTENT_TYPE
from cbatch.server.http_errors import unwell

if TYPE_CHECKING:
    from cbatch.runtime.step_record import SlotState
    from cbatch.server.desk import Desk
    from cbatch.server.exchange import Exchange


async def metrics(desk: Desk, exchange: Exchange) -> None:
    """Tell all metrics, as Prometheus reads them."""
    await desk.pulse.ask()
    headers = {"process-start-time-unix": str(desk.created)}
    await exchange.respond(200, desk.exposition.text(), headers, media_type=CONTENT_TYPE)


async def slots(desk: Desk, exchange: Exchange) -> None:
    """Tell what each slot does, by llama-server's names; never a text. The header `age` tells how old that is."""
    found = await desk.slots.ask()
    if (words := desk.slots.problem) is not None:
        raise unwell(words)
    if found is None:
        raise unwell("the engine is in a long step: try again")
    if _needs_one(exchange) and not any(slot.status == "free" for slot in found):
        raise unwell("no slot is free")
    n_window = (await desk.sizes()).n_window
    headers = {"age": f"{desk.slots.age_s:.0f}"}
    await exchange.respond_json([_as_json(slot, n_window) for slot in found], headers=headers)


def _needs_one(exchange: Exchange) -> bool:
    """Return whether the client wants an error where no slot is free."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"))
    return asked.get("fail_on_no_slot", ["0"])[-1] not in ("0", "false")


def _as_json(slot: SlotState, n_window: int) -> dict[str, Any]:
    is_processing = slot.status == "running"
    return {
        "id": slot.slot,
        "id_task": slot.id,
        "n_ctx": n_window,
        "is_processing": is_processing,
        "status": slot.status,
        "n_cells": slot.n_cells,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": max(0, min(slot.n_computed, slot.n_prompt) - slot.n_cached),
        "n_prompt_tokens_cache": slot.n_cached,
        "next_token": [
            {
                "has_next_token": is_processing,
                "n_remain": -1 if slot.id is None else slot.n_left,
                "n_decoded": slot.n_output,
            }
        ],
    }
