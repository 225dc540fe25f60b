"""`/files` and `/batches`. Source: OpenAI's API reference, files and batches."""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from cbatch.server.batch_index import BATCH
from cbatch.server.batch_questions import ENDPOINTS
from cbatch.server.batch_store import Page, disk_problems
from cbatch.server.http_errors import (
    HttpProblemError,
    bad_request,
    draining,
    refused,
    too_large,
    unknown_field,
)
from cbatch.server.multipart_upload import FILE, Upload
from cbatch.server.request_fields import ignored_header
from cbatch.server.small_endpoints import body_of
from cbatch.support.checks import shown
from cbatch.support.plain import int_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.server.batches import Batches
    from cbatch.server.desk import Desk
    from cbatch.server.exchange import Exchange

_N_FORM = 2**16
"""Bytes of an upload beside its file."""

_N_PART = 2**18
"""Bytes of a file that are sent at once."""

_N_FILES, _N_BATCHES = 10_000, 100
"""Most files and batches of a list. Source: OpenAI's API reference."""
_N_BATCHES_USUAL = 20

_LIFE_S = 3600, 2_592_000
"""Seconds after which files may expire. Source: OpenAI's API reference, `expires_after`."""

_N_PAIRS, _N_KEY, _N_VALUE = 16, 64, 512
"""Limits of `metadata`. Source: OpenAI's API reference."""

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW_S = 30 * 86_400
"""Longest window: our choice."""


def batches_of(desk: Desk) -> Batches:
    """Return the server's batches. Raises a `HttpProblemError` where it keeps none."""
    if desk.batches is None:
        message = "this server keeps no files and runs no batches: start it with a files_dir"
        raise HttpProblemError(404, message, "files_not_kept")
    return desk.batches


def id_in(exchange: Exchange) -> str:
    """Return the id in the path."""
    id: str = exchange.scope["path_params"]["id"]
    return id


# ---- files ----


async def create_file(desk: Desk, exchange: Exchange) -> None:
    """Take a file."""
    store, settings = batches_of(desk).store, desk.settings
    if desk.is_draining:
        raise draining()
    limit = settings.file_limit
    of_form = limit._replace(n_bytes=limit.n_bytes + _N_FORM)
    with disk_problems(), store.arriving() as arriving:
        upload = Upload(exchange.headers.get(b"content-type", b""), arriving)
        async with aclosing(exchange.parts(of_form, settings.body_timeout_s)) as parts:
            async for part in parts:
                await desk.in_thread(upload.feed, part)
        upload.finish()
        if upload.name is None:
            raise bad_request("file is missing", FILE)
        if arriving.n_bytes > limit.n_bytes:
            raise too_large("the file", limit, FILE)
        if not arriving.n_bytes:
            raise bad_request("the file is empty", FILE, "empty_file")
        seconds = _check_form(upload.fields)
        file = await desk.in_thread(
            arriving.keep, upload.name[:255], BATCH, seconds, exchange.owner
        )
    await exchange.respond_json(file.as_json())


def _check_form(fields: Mapping[str, str]) -> int | None:
    """Return the seconds after which a file expires."""
    if (purpose := fields.get("purpose")) != BATCH:
        said = "is missing: it" if purpose is None else f"{shown(purpose)} is not served: it"
        raise bad_request(f"purpose {said} must be {BATCH!r}", "purpose")
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds and re.fullmatch("[0-9]{1,9}", seconds) else seconds
    return _life("expires_after", {"anchor": anchor, "seconds": number})


def _life(name: str, said: Any) -> int | None:
    """Return the seconds of an expiry."""
    if said is None:
        return None
    seconds = int_of(said.get("seconds")) if isinstance(said, dict) else None
    low, high = _LIFE_S
    if seconds is None or said.get("anchor") != "created_at" or not low <= seconds <= high:
        words = f"an anchor of 'created_at' and {low} … {high} seconds"
        raise bad_request(f"{name} must have {words}, not {shown(said)}", name)
    return seconds


async def list_files(desk: Desk, exchange: Exchange) -> None:
    """List files."""
    asked = Query(exchange)
    order, purpose = asked.choice("order", ("asc", "desc")), asked.text("purpose")
    found, has_more = await desk.in_thread(
        batches_of(desk).store.files,
        exchange.owner,
        asked.text("after"),
        asked.limit(_N_FILES, _N_FILES),
        is_newest_first=order != "asc",
        purpose=purpose,
    )
    await exchange.respond_json(_listed([file.as_json() for file in found], has_more=has_more))


async def get_file(desk: Desk, exchange: Exchange) -> None:
    """Tell what a file is."""
    file = await desk.in_thread(batches_of(desk).store.file, id_in(exchange), exchange.owner)
    await exchange.respond_json(file.as_json())


async def delete_file(desk: Desk, exchange: Exchange) -> None:
    """Remove a file; a batch over it goes on."""
    id = id_in(exchange)
    with disk_problems():
        await desk.in_thread(batches_of(desk).store.delete_file, id, exchange.owner)
    await exchange.respond_json({"id": id, "object": "file", "deleted": True})


async def file_content(desk: Desk, exchange: Exchange) -> None:
    """Send what a file holds."""
    store = batches_of(desk).store
    file = await desk.in_thread(store.file, id_in(exchange), exchange.owner)
    with await desk.in_thread(store.opened, file) as content:
        headers = {
            "content-length": str(file.bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        }
        await exchange.begin(200, headers, media_type="application/octet-stream")
        while part := await desk.in_thread(content.read, _N_PART):
            await exchange.put(part)
        await exchange.finish()


# ---- batches ----

_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


async def create_batch(desk: Desk, exchange: Exchange) -> None:
    """Begin a batch."""
    batches = batches_of(desk)
    if desk.is_draining:
        raise draining()
    said = await body_of(desk, exchange)
    body = {name: value for name, value in said.items() if value is not None}
    ignored = [name for name in body if name not in _FIELDS]
    if ignored and desk.settings.strict_fields:
        raise unknown_field(ignored[0], _FIELDS)
    endpoint = _endpoint(body.get("endpoint"))
    window_s = _window(body.get("completion_window"))
    metadata = _metadata(body.get("metadata"))
    seconds = _life("output_expires_after", body.get("output_expires_after"))
    id = body.get("input_file_id")
    if not isinstance(id, str):
        raise bad_request(f"input_file_id must be a file's id, not {shown(id)}", "input_file_id")
    file = await desk.in_thread(batches.store.file, id, exchange.owner)
    if file.purpose != BATCH:
        message = f"the purpose of {file.id} is {file.purpose}: it must be {BATCH}"
        raise bad_request(message, "input_file_id")
    with disk_problems():
        batch = await desk.in_thread(
            batches.create,
            file,
            window_s,
            endpoint=endpoint,
            completion_window=body["completion_window"],
            metadata=metadata,
            kept_seconds=seconds,
            kept_owner=exchange.owner,
        )
    await exchange.respond_json(batch.as_json(), headers=ignored_header(ignored))


def _endpoint(said: Any) -> str:
    if not isinstance(said, str) or said not in ENDPOINTS:
        served = ", ".join(ENDPOINTS)
        if isinstance(said, str):
            raise refused(f"endpoint {shown(said)}", f"batches support {served}")
        raise bad_request(f"endpoint must be one of {served}, not {shown(said)}", "endpoint")
    return said


def _window(said: Any) -> int:
    """Return the seconds of a completion window."""
    match = _WINDOW.fullmatch(said) if isinstance(said, str) else None
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _WINDOW_S:
        words = "a time such as '24h', with s, m, h or d, and at most 30 days"
        raise bad_request(
            f"completion_window must be {words}, not {shown(said)}", "completion_window"
        )
    return seconds


def _metadata(said: Any) -> dict[str, str] | None:
    if said is None:
        return None
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise bad_request(f"metadata must be an object of strings, not {shown(said)}", "metadata")
    if len(said) > _N_PAIRS:
        raise bad_request(
            f"metadata has {len(said)} pairs; at most {_N_PAIRS} are allowed", "metadata"
        )
    for key, value in said.items():
        if len(key) > _N_KEY or len(value) > _N_VALUE:
            words = f"keys have at most {_N_KEY} characters, values {_N_VALUE}"
            raise bad_request(f"metadata: {words}: {shown(key)} has more", "metadata")
    return said


async def list_batches(desk: Desk, exchange: Exchange) -> None:
    """List batches, the newest first."""
    asked = Query(exchange)
    limit = asked.limit(_N_BATCHES_USUAL, _N_BATCHES)
    found, has_more = await desk.in_thread(
        batches_of(desk).newest, exchange.owner, Page(limit, asked.text("after"))
    )
    told = [batch.as_json() for batch in found]
    await exchange.respond_json(_listed(told, has_more=has_more))


async def get_batch(desk: Desk, exchange: Exchange) -> None:
    """Tell how far a batch is."""
    batch = await desk.in_thread(batches_of(desk).get, id_in(exchange), exchange.owner)
    await exchange.respond_json(batch.as_json())


async def cancel_batch(desk: Desk, exchange: Exchange) -> None:
    """Begin no more lines of a batch."""
    with disk_problems():
        batch = await desk.in_thread(batches_of(desk).cancel, id_in(exchange), exchange.owner)
    await exchange.respond_json(batch.as_json())


class Query:
    """The fields behind the question mark."""

    def __init__(self, exchange: Exchange) -> None:
        """Read them."""
        self._given = parse_qs(exchange.scope["query_string"].decode("latin-1"))

    def text(self, name: str) -> str | None:
        """Return a field; None where it is not said."""
        return self._given[name][-1] if name in self._given else None

    def limit(self, usual: int, most: int) -> int:
        """Return how many are wanted."""
        said = self.text("limit")
        if said is None:
            return usual
        number = int(said) if re.fullmatch("[0-9]{1,9}", said) else 0
        if not 1 <= number <= most:
            raise bad_request(f"limit must be 1 … {most}, not {shown(said)}", "limit")
        return number

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """Return a field that has one of these values."""
        said = self.text(name)
        if said is not None and said not in known:
            raise bad_request(f"{name} must be {' or '.join(known)}, not {shown(said)}", name)
        return said


def _listed(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ids = [each["id"] for each in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
