"""An upload as multipart/form-data, read as it comes: its file goes to disk, its fields are short.

Source: RFC 7578; OpenAI's API reference, files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cbatch.server.http_errors import HttpProblemError, bad_request

# it warns of broken forms, whose senders get an error; without a log set up, warnings would go to stderr
logging.getLogger("python_multipart").addHandler(logging.NullHandler())

_N_FIELD, _N_FIELDS = 4096, 64
"""Bytes of a field, and fields, at most: those of an upload are short and few."""

FILE = "file"
"""The field that has the file."""


class Upload:
    """The parts of one form.

    Attributes:
        fields: by name, but for the file.
        name: of the file; None while none has come.
    """

    def __init__(self, content_type: bytes, write: Callable[[bytes], object]) -> None:
        """Take the header `content-type`, and what takes the file. Raises a `HttpProblemError` if it is not a form."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            message = "content-type must be multipart/form-data with a boundary"
            raise HttpProblemError(415, message, "unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self._write = write
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._field = ""
        self._data: bytearray | None = None
        """Of a field; None while the file comes."""
        self._has_ended = False
        with _broken_form():
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_to(self._header),
                    "on_header_value": self._add_to(self._value),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )

    def feed(self, data: bytes) -> None:
        """Take more of the body. Raises a `HttpProblemError` where the form is broken, or the error of `write`."""
        with _broken_form():
            self._parser.write(data)

    def finish(self) -> None:
        """Note the end of the body. Raises a `HttpProblemError` where it came too early."""
        if not self._has_ended:
            raise _broken("it ends in the middle")

    def _begin(self) -> None:
        self._header.clear()
        self._value.clear()
        self._disposition, self._data = b"", bytearray()

    def _add_to(self, text: bytearray) -> Callable[[bytes, int, int], None]:
        def add(data: bytes, start: int, end: int) -> None:
            if len(text) + end - start > _N_FIELD:
                raise _broken("a header in it is too long")
            text.extend(data[start:end])

        return add

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _broken("a part has no name")
        self._field = _text(options[b"name"])
        if self._field == FILE:
            if self.name is not None:
                raise bad_request("file is given more than once: upload one file per request", FILE)
            self.name = _text(options.get(b"filename", b"")) or "file"
            self._data = None
        elif len(self.fields) >= _N_FIELDS:
            raise _broken(f"it has more than {_N_FIELDS} fields")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._data is None:
            self._write(data[start:end])
            return
        if len(self._data) + end - start > _N_FIELD:
            raise bad_request(f"{self._field[:100]} is longer than {_N_FIELD} bytes", self._field)
        self._data.extend(data[start:end])

    def _end_part(self) -> None:
        if self._data is not None:
            self.fields[self._field] = _text(bytes(self._data))

    def _end(self) -> None:
        self._has_ended = True


@contextmanager
def _broken_form() -> Iterator[None]:
    """Tell a client of a form that the parser cannot read."""
    try:
        yield
    except FormParserError as error:
        raise _broken(str(error)) from None


def _broken(why: str) -> HttpProblemError:
    return bad_request(f"the form cannot be read: {why}", code="invalid_form")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
