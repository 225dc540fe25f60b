"""Anthropic's message batches: how they are asked for and told; they run as all batches do.

Source: Anthropic's API reference, message batches.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from cbatch.server.batch_endpoints import (
    Query,
    batches_of,
    id_in,
    listed,
    new_batch_body,
    page_of,
    tell_batch,
)
from cbatch.server.batch_index import MESSAGES, Kind, StoredBatch
from cbatch.server.batch_store import Page, StoredContent, disk_problems
from cbatch.server.batches import Batches
from cbatch.server.exchange import Exchange, dumps
from cbatch.server.http_errors import HttpProblemError, bad_request, told, too_large
from cbatch.server.request_fields import ignored_header
from cbatch.server.small_endpoints import rfc3339
from cbatch.server.typed_bodies import read_body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.server.desk import Desk
    from cbatch.server.server_settings import SizeLimit

_KIND: Kind = "msgbatch"

# Source of limits and times: Anthropic's API reference.
_WINDOW, _WINDOW_S = "24h", 86_400
_N_LISTED_USUAL, _N_LISTED = 20, 1000

_ID = Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z", description="1 … 64 letters, digits, - or _")

_N_PART = 2**16
"""Bytes of results, about, that are read and sent at once."""

_NEVER_RAN = {"expired": "expired", "cancelled": "canceled"}
"""What requests are called that never ran, by the status of their batch."""

_UNASKED = {"batch_expired": "expired", "batch_cancelled": "canceled"}
"""The same, by the code of their lines."""


class MessageRequest(Struct):
    """One request of a batch."""

    custom_id: Annotated[str, _ID]
    params: dict[str, Any]


class MessageBatchBody(Struct):
    """What a batch is asked to be."""

    requests: Annotated[list[MessageRequest], Meta(min_length=1, max_length=100_000)]


async def create_batch(desk: Desk, exchange: Exchange) -> None:
    """Begin a batch of messages."""
    made = partial(_lines_of, limit=desk.settings.body_limit)
    lines, ignored = await new_batch_body(MessageBatchBody, made, desk, exchange)
    batch = await desk.on_disk(_created, batches_of(desk), lines, exchange.owner)
    await exchange.respond_json(_as_json(batch), headers=ignored_header(ignored))


def _created(batches: Batches, lines: Sequence[bytes], owner: str) -> StoredBatch:
    """Begin a batch of the lines of checked requests."""
    with disk_problems(), batches.store.arriving() as arriving:
        arriving.write(b"".join(lines))
        return batches.create(
            arriving.written(),
            _WINDOW_S,
            _KIND,
            input_file_id="",
            endpoint=MESSAGES,
            completion_window=_WINDOW,
            status="in_progress",  # they were checked
            n_total=len(lines),
            kept_owner=owner,
        )


def _lines_of(body: Mapping[str, Any], limit: SizeLimit) -> list[bytes]:
    """Return requests as the lines of a batch file, each of at most `limit`. Raises a `HttpProblemError`."""
    seen: set[str] = set()
    lines = []
    for i, request in enumerate(read_body(MessageBatchBody, body, has_dots=True).requests):
        if request.custom_id in seen:
            words = f"requests.{i}.custom_id occurs twice: it must be unique"
            raise bad_request(words, "requests")
        seen.add(request.custom_id)
        named = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES}
        line = {**named, "body": request.params}
        lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if len(lines[-1]) > limit.n_bytes:
            raise too_large(f"requests.{i}", limit, "requests")
    return lines


async def list_batches(desk: Desk, exchange: Exchange) -> None:
    """List batches, the newest first."""
    asked = Query(exchange)
    limit = asked.limit(_N_LISTED_USUAL, _N_LISTED)
    after, before = asked.text("after_id"), asked.text("before_id")
    if after is not None and before is not None:
        raise bad_request("give after_id or before_id, not both", "before_id")
    batches = batches_of(desk)
    found, has_more, n_bytes = await desk.on_disk(
        page_of, batches.newest, exchange.owner, Page(limit, after, before), _KIND
    )
    await desk.respond_held(exchange, listed(_as_json, found, has_more=has_more), n_bytes)


async def delete_batch(desk: Desk, exchange: Exchange) -> None:
    """Remove a batch that has ended, with its results."""
    id = id_in(exchange)
    with disk_problems():
        await desk.on_disk(batches_of(desk).delete, id, exchange.owner, _KIND)
    await exchange.respond_json({"id": id, "type": "message_batch_deleted"})


def _as_json(batch: StoredBatch) -> dict[str, Any]:
    """Return a batch as Anthropic's clients read it: nothing is counted as ended before the batch has ended."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.has_ended:
        counts["succeeded"] = batch.n_completed
        if batch.status in _NEVER_RAN:
            counts[_NEVER_RAN[batch.status]] = batch.kept_n_never_ran
        counts["errored"] = batch.n_total - sum(counts.values())
        status = "ended"
    else:
        counts["processing"] = batch.n_total
        status = "canceling" if batch.cancelling_at is not None else "in_progress"
    ended_at = getattr(batch, f"{batch.status}_at") if batch.has_ended else None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "cancel_initiated_at": rfc3339(batch.cancelling_at),
        "ended_at": rfc3339(ended_at),
        "archived_at": None,
        # without the host, which a proxy may have changed
        "results_url": f"/v1/messages/batches/{batch.id}/results" if batch.has_ended else None,
    }


get_batch = partial(tell_batch, Batches.get, _KIND, _as_json)
cancel_batch = partial(tell_batch, Batches.cancel, _KIND, _as_json)


# ---- results ----


async def batch_results(desk: Desk, exchange: Exchange) -> None:
    """Send the results of a batch that has ended, a line for each request."""
    batches = batches_of(desk)
    batch = await desk.on_disk(batches.get, id_in(exchange), exchange.owner, _KIND)
    if not batch.has_ended:
        raise HttpProblemError(404, "the batch has not ended: it has no results yet", None, "id")
    files = await desk.on_disk(_contents, batches, batch)
    await exchange.begin(200, {}, media_type="application/x-jsonl")
    for file in files:
        while part := await desk.on_disk(_results_in, file):
            await exchange.put(part)
    await exchange.finish()


def _contents(batches: Batches, batch: StoredBatch) -> list[StoredContent]:
    """Return the contents of a batch's answers and errors."""
    store = batches.store

    def content_of(id: str) -> StoredContent:
        try:
            return store.content_of(store.file(id, batch.kept_owner))
        except HttpProblemError as problem:
            if problem.status != 404:
                raise
            raise HttpProblemError(404, f"the file {id} was deleted", None, "id") from None

    return [*map(content_of, filter(None, (batch.output_file_id, batch.error_file_id)))]


def _results_in(file: StoredContent) -> bytes:
    """Return the next results of a file; nothing at its end."""
    return b"".join(dumps(_result(json.loads(line))) + b"\n" for line in file.readlines(_N_PART))


def _result(line: Mapping[str, Any]) -> dict[str, Any]:
    response = line["response"]
    result: dict[str, Any]
    if response is None and (kind := _UNASKED.get(line["error"]["code"])):
        result = {"type": kind}
    elif response is None:
        _, error = told(bad_request(line["error"]["message"]), {"path": MESSAGES})
        result = {"type": "errored", "error": error}
    elif response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        result = {"type": "errored", "error": response["body"]}
    return {"custom_id": line["custom_id"], "result": result}
