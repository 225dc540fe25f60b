"""`/files` and `/batches`. Source: OpenAI's API reference, files and batches."""

from __future__ import annotations

import re
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct

from cbatch.server.batch_index import BATCH, Kind, StoredBatch, StoredFile
from cbatch.server.batch_questions import ENDPOINTS
from cbatch.server.batch_store import Page, disk_problems
from cbatch.server.batches import Batches
from cbatch.server.http_errors import (
    HttpProblemError,
    bad_request,
    draining,
    files_not_open,
    refused,
    too_large,
    unknown_field,
)
from cbatch.server.multipart_upload import FILE, Upload
from cbatch.server.request_fields import ignored_header
from cbatch.server.small_endpoints import body_of
from cbatch.server.typed_bodies import read_body, unknown_in
from cbatch.support.checks import shown
from cbatch.support.lazy_json import LazyList

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.server.desk import Desk
    from cbatch.server.exchange import Exchange

T = TypeVar("T")
Row = TypeVar("Row", StoredBatch, StoredFile)

_N_FORM = 2**16
"""Bytes of an upload beside its file."""

_N_PART = 2**16
"""Bytes of a file that are sent at once."""

_N_FILES, _N_BATCHES = 10_000, 100
"""Most files and batches of a list. Source: OpenAI's API reference."""
_N_BATCHES_USUAL = 20

_N_ROW = 1000
"""Bytes in memory of a row of the index, about, beside its texts."""

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW_S = 30 * 86_400
"""Longest window: our choice."""


def batches_of(desk: Desk) -> Batches:
    """Return the server's batches. Raises a `HttpProblemError` where it keeps none, or none yet."""
    if desk.lacks_files:
        raise files_not_open()
    if desk.batches is None:
        message = "this server keeps no files and runs no batches: start it with a files_dir"
        raise HttpProblemError(404, message, "files_not_kept")
    return desk.batches


def id_in(exchange: Exchange) -> str:
    """Return the id in the path."""
    id: str = exchange.scope["path_params"]["id"]
    return id


# ---- files ----


# Source of the limits: OpenAI's API reference, `expires_after` and `metadata`.
class Expiry(Struct):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class UploadForm(Struct):
    """What an upload says besides its file and its purpose."""

    expires_after: Expiry


async def create_file(desk: Desk, exchange: Exchange) -> None:
    """Take a file."""
    store, settings = batches_of(desk).store, desk.settings
    if desk.is_draining:
        raise draining()
    limit = settings.file_limit
    of_form = limit._replace(n_bytes=limit.n_bytes + _N_FORM)
    parts = exchange.parts(of_form, settings.body_timeout_s)
    with disk_problems():
        async with desk.opened(store.arriving) as arriving, aclosing(parts):
            upload = Upload(exchange.headers.get(b"content-type", b""), arriving.write)
            async for part in parts:
                await desk.on_disk(upload.feed, part)
            upload.finish()
            if upload.name is None:
                raise bad_request("file is missing", FILE)
            if arriving.n_bytes > limit.n_bytes:
                raise too_large("the file", limit, FILE)
            if not arriving.n_bytes:
                raise bad_request("the file is empty", FILE, "empty_file")
            seconds = _check_form(upload.fields)
            file = await desk.on_disk(
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
    form = read_body(UploadForm, {"expires_after": {"anchor": anchor, "seconds": number}})
    return form.expires_after.seconds


async def list_files(desk: Desk, exchange: Exchange) -> None:
    """List files."""
    asked = Query(exchange)
    order, purpose = asked.choice("order", ("asc", "desc")), asked.text("purpose")
    found, has_more, n_bytes = await desk.on_disk(
        page_of,
        batches_of(desk).store.files,
        exchange.owner,
        asked.text("after"),
        asked.limit(_N_FILES, _N_FILES),
        is_newest_first=order != "asc",
        purpose=purpose,
    )
    told = listed(StoredFile.as_json, found, has_more=has_more)
    await desk.respond_held(exchange, {"object": "list", **told}, n_bytes)


async def get_file(desk: Desk, exchange: Exchange) -> None:
    """Tell what a file is."""
    file = await desk.on_disk(batches_of(desk).store.file, id_in(exchange), exchange.owner)
    await exchange.respond_json(file.as_json())


async def delete_file(desk: Desk, exchange: Exchange) -> None:
    """Remove a file; a batch over it goes on."""
    id = id_in(exchange)
    with disk_problems():
        await desk.on_disk(batches_of(desk).store.delete_file, id, exchange.owner)
    await exchange.respond_json({"id": id, "object": "file", "deleted": True})


async def file_content(desk: Desk, exchange: Exchange) -> None:
    """Send what a file holds."""
    store = batches_of(desk).store
    file = await desk.on_disk(store.file, id_in(exchange), exchange.owner)
    content = await desk.on_disk(store.content_of, file)
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
    }
    await exchange.begin(200, headers, media_type="application/octet-stream")
    while part := await desk.on_disk(content.read, _N_PART):
        await exchange.put(part)
    await exchange.finish()


# ---- batches ----


_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class BatchBody(Struct):
    """What a batch is asked to be."""

    input_file_id: str
    endpoint: Any = None
    completion_window: Any = None
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


async def new_batch_body(
    kind: type[Struct], made: Callable[[Mapping[str, Any]], T], desk: Desk, exchange: Exchange
) -> tuple[T, list[str]]:
    """Return what `made` makes of a body that asks for a batch, and its names that are ignored.

    Raises:
        HttpProblemError: there is no such body, no batch can begin, or the error of `made`.
    """
    batches_of(desk)
    if desk.is_draining:
        raise draining()

    def read(body: dict[str, Any]) -> tuple[T, list[str]]:
        ignored = unknown_in(body, kind)
        if ignored and desk.settings.strict_fields:
            raise unknown_field(ignored[0], kind.__struct_fields__)
        return made(body), ignored

    return await body_of(desk, exchange, read)


async def create_batch(desk: Desk, exchange: Exchange) -> None:
    """Begin a batch."""
    made = partial(read_body, BatchBody)
    said, ignored = await new_batch_body(BatchBody, made, desk, exchange)
    batches = batches_of(desk)
    endpoint, window_s = _endpoint(said.endpoint), _window(said.completion_window)
    file = await desk.on_disk(batches.store.file, said.input_file_id, exchange.owner)
    if file.purpose != BATCH:
        message = f"the purpose of {file.id} is {file.purpose}: it must be {BATCH}"
        raise bad_request(message, "input_file_id")
    life = said.output_expires_after
    with disk_problems():
        batch = await desk.on_disk(
            batches.create,
            batches.store.path_of(file),
            window_s,
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window=said.completion_window,
            metadata=said.metadata,
            kept_seconds=None if life is None else life.seconds,
            kept_owner=exchange.owner,
        )
    await exchange.respond_json(batch.as_json(), headers=ignored_header(ignored))


def page_of(
    read: Callable[..., tuple[Sequence[Row], bool]], *given: Any, **named: Any
) -> tuple[Sequence[Row], bool, int]:
    """Return rows of the index as `read` does, and about their bytes in memory, which count until a client has them."""
    found, has_more = read(*given, **named)
    return found, has_more, _N_ROW * len(found) + 2 * len(msgspec.json.encode(found))


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


async def list_batches(desk: Desk, exchange: Exchange) -> None:
    """List batches, the newest first."""
    asked = Query(exchange)
    limit = asked.limit(_N_BATCHES_USUAL, _N_BATCHES)
    found, has_more, n_bytes = await desk.on_disk(
        page_of, batches_of(desk).newest, exchange.owner, Page(limit, asked.text("after"))
    )
    told = listed(StoredBatch.as_json, found, has_more=has_more)
    await desk.respond_held(exchange, {"object": "list", **told}, n_bytes)


async def tell_batch(
    do: Callable[..., StoredBatch],
    kind: Kind,
    form: Callable[[StoredBatch], dict[str, Any]],
    desk: Desk,
    exchange: Exchange,
) -> None:
    """Do something with a batch of a kind, and tell it in its form."""
    with disk_problems():
        batch = await desk.on_disk(do, batches_of(desk), id_in(exchange), exchange.owner, kind)
    await exchange.respond_json(form(batch))


get_batch = partial(tell_batch, Batches.get, "batch", StoredBatch.as_json)
cancel_batch = partial(tell_batch, Batches.cancel, "batch", StoredBatch.as_json)


class Query:
    """The fields behind the question mark."""

    def __init__(self, exchange: Exchange) -> None:
        self._given = exchange.query

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


def listed(form: Callable[[Any], Any], found: Sequence[Any], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list in a form, made as it is sent, and what tells of the others."""
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    ends = {"first_id": first, "last_id": last}
    return {"data": LazyList(form, found), **ends, "has_more": has_more}
