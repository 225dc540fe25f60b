"""The fields of a dialect with names of its own, sorted by what becomes of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cbatch.server.http_errors import bad_request, refused, unknown_field
from cbatch.server.request_fields import OF_OPENAI, OPTION_NAMES, READ_BY_ALL, RENAMED, asked_under
from cbatch.support.checks import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cbatch.server.request_fields import RequestFields


class DialectFields:
    """What a body asks for: options with the fields that they come from, and what is ignored."""

    OWN: ClassVar[Collection[str]]
    """Names that the dialect reads itself."""
    IGNORED: ClassVar[Collection[str]]
    """Names that do not change the answer."""
    REFUSED: ClassVar[Mapping[str, str]]
    """Names that would change the answer, with what to do instead."""

    def __init__(self, body: Mapping[str, Any], *, is_strict: bool) -> None:
        """Sort the fields of a body; null means that a field is not said. Raises a `HttpProblemError`."""
        self.given = {name: value for name, value in body.items() if value is not None}
        self.options: dict[str, tuple[str, Any]] = {}
        self.ignored: list[str] = []
        self.rest: dict[str, Any] = {}
        """Fields that have the names of options."""
        self._is_strict = is_strict
        for name, value in self.given.items():
            self.sort(name, value)

    def sort(self, name: str, value: Any) -> None:
        """Sort one field. Raises a `HttpProblemError` where it is refused."""
        if name in self.OWN:
            return
        if (why := self.REFUSED.get(RENAMED.get(name, name))) is not None:
            raise refused(name, why)
        if name in self.IGNORED:
            self.ignored.append(name)
        elif name not in OF_OPENAI:
            self.rest[name] = value
        elif self._is_strict:
            raise unknown_field(name, (*self.OWN, *READ_BY_ALL, *OPTION_NAMES))
        else:
            self.ignored.append(name)

    @property
    def asked(self) -> RequestFields:
        """The fields of the call. Raises a `HttpProblemError`."""
        ignored = [*dict.fromkeys(self.ignored)]
        strict, own = self._is_strict, self.OWN
        return asked_under(self.rest, self.options, ignored, own=own, is_strict=strict)

    def add_template_variables(self, field: str, variables: Mapping[str, Any]) -> None:
        """Give the chat template variables of a field; those that the body gives itself come first."""
        name = "chat_template_kwargs"
        self.options[name] = field, {**variables, **mapping(name, self.rest.pop(name, {}), name)}


def mapping(place: str, value: Any, field: str) -> dict[str, Any]:
    """Return an object as it is. Raises a `HttpProblemError` that names its place and the field."""
    if not isinstance(value, dict):
        raise bad_request(f"{place} must be an object, not {shown(value)}", field)
    return value
