"""Private parts of others that code reaches for."""

from __future__ import annotations

import ast


def private_parts(tree: ast.Module) -> list[ast.Attribute]:
    """Return every `x._y` of a module where `x` is neither `self` nor `cls`; `os._exit` is public."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os"))
    ]
