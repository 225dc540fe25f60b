"""What the tests themselves keep to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.private_parts import private_parts
from tests.test_imports import FOLDERS, room

TESTS = Path(__file__).parent
HOUSE = {"test_docs.py", "test_imports.py", "test_style.py", "test_release.py"}
"""Tests of all rooms together."""
BESIDE_ROOMS = {"data", "device", "face", "native", "oracle", "zoo"}
"""Folders of tests that are no room of the package: `face` has the tests of the modules at its top."""
N_NAME_MAX = 70
N_PRIVATE_MAX = 37
"""Most accesses of private parts in all tests. This number only shrinks."""
PRIVATE = re.compile(r"(?<!self)(?<!cls)\._[a-zA-Z]")
"""In the text of every file with private parts: to parse all would take long."""


def names_of_tests() -> list[str]:
    """Return the name of every test, as `file::function`, also of those inside classes."""
    pattern = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    return [
        f"{path.relative_to(TESTS)}::{name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    ]


def test_names_of_tests_are_short() -> None:
    names = names_of_tests()
    assert "test_style.py::test_names_of_tests_are_short" in names
    assert not [name for name in names if len(name.partition("::")[2]) > N_NAME_MAX]


def test_tests_stand_in_the_rooms_of_the_package() -> None:
    folders = {path.name for path in TESTS.glob("[a-z]*/")}
    rooms = {room(name) for name in FOLDERS}
    assert {path.name for path in TESTS.glob("test_*.py")} == HOUSE
    assert folders - rooms == BESIDE_ROOMS
    packages = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - packages == {"data", "device"}, (
        "modules of one name in two folders would be one"
    )


def test_few_tests_reach_for_private_parts() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{part.lineno}: {ast.unparse(part)}"
        for path in sorted(TESTS.rglob("*.py"))
        if PRIVATE.search(text := path.read_text(encoding="utf-8"))
        for part in private_parts(ast.parse(text))
    ]
    assert 0 < len(found) <= N_PRIVATE_MAX, "\n".join(found)
