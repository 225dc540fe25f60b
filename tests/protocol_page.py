"""The table of commands of docs/operate/processes.md, from their types: `python -m tests.protocol_page` writes it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, json, structs
from msgspec import inspect as types

from cbatch.worker.protocol_commands import COMMANDS, CROSSINGS, Crossed, ProtocolCommand

PAGE = Path(__file__).parent.parent / "docs/operate/processes.md"
SECTION = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- /table -->)", re.DOTALL)

NAMES = {"WireItem": "prompt", "HeardResult": "result"}
"""What types are called."""


def section() -> str:
    """Return the table of commands."""
    head = ["| op | fields | value of the reply |", "|---|---|---|"]
    rows = [f"| `{op}` | {_fields(kind)} | {_reply(kind)} |" for op, kind in COMMANDS.items()]
    return "\n".join((*head, *rows))


def _fields(kind: type[ProtocolCommand]) -> str:
    own = {f.name: f for f in structs.fields(kind) if f.name != "n"}
    found: Any = types.type_info(kind)
    return "; ".join(_field(own[f.name], f.type) for f in found.fields if f.name in own)


def _field(field: structs.FieldInfo, kind: types.Type) -> str:
    words = [name_of(kind)]
    if field.default not in (NODEFAULT, None):
        words.append(f"default `{json.encode(field.default).decode()}`")
    elif field.default is None:
        words.append("optional")
    extra = kind.extra_json_schema if isinstance(kind, types.Metadata) else None
    more = f": {extra['description']}" if extra else ""
    return f"`{field.name}` ({', '.join(words)}){more}"


def name_of(kind: types.Type) -> str:
    """Return what a type is called."""
    if isinstance(kind, types.Metadata):
        return name_of(kind.type)
    if isinstance(kind, types.UnionType):
        return " or ".join(name_of(t) for t in kind.types if not isinstance(t, types.NoneType))
    if isinstance(kind, types.ListType | types.VarTupleType):
        return f"list of {name_of(kind.item_type)}"
    if isinstance(kind, types.StructType):
        return NAMES[kind.cls.__name__]
    if isinstance(kind, types.DictType):
        is_plain = isinstance(kind.value_type, types.StrType)
        return "texts by name" if is_plain else "options"
    if isinstance(kind, types.DataclassType):
        return f"`{kind.cls.__name__}`"
    plain = {
        types.IntType: "int",
        types.FloatType: "number",
        types.StrType: "text",
        types.BoolType: "bool",
        types.BytesType: "bytes",
        types.NoneType: "null",
    }
    return plain[type(kind)]


def _reply(kind: type[ProtocolCommand]) -> str:
    crossing = CROSSINGS.get(kind) if issubclass(kind, Crossed) else None
    words = inspect.cleandoc(kind.__doc__ or "").removesuffix(".")
    return words if crossing is None else f"{name_of(types.type_info(crossing.result))}: {words}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(SECTION.sub(lambda _: section(), text), encoding="utf-8")
