"""Imports go one way, and each room sees only what it may."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cbatch

ROOT = Path(cbatch.__file__).parent

ORDER = (
    {
        "errors",
        "plain",
        "logs",
        "checks",
        "interrupts",
        "options",
        "engine_options",
        "messages",
        "response",
        "progress",
        "tools",
    },
    {"chat", "cache"},
    {"core"},
    {"runtime"},
    {"engine"},
    {"files", "server", "daemon", "bench", "models"},
    {"cli"},
)
"""Rooms by layer: a room sees the layers before its own, and those beside it."""

LAYER = {room: i for i, rooms in enumerate(ORDER) for room in rooms}

FACE = {
    "errors",
    "plain",
    "checks",
    "options",
    "engine_options",
    "messages",
    "progress",
    "response",
    "tools",
}

BACKEND_SEES = {
    "errors",
    "checks",
    "interrupts",
    "logs",
    "options",
    "engine_options",
    "messages",
    "core.plan",
}

NOT_IN_CORE = {
    "asyncio", "anyio", "concurrent", "ctypes", "datetime", "io", "llama_cpp", "logging", "multiprocessing", "numpy",
    "os", "pathlib", "queue", "random", "selectors", "signal", "socket", "subprocess", "sys", "threading", "time",
}  # fmt: skip
"""Threads, clocks, chance, I/O: what would make a plan depend on more than its inputs."""


def modules() -> list[str]:
    """Every module of the package, as a dotted name below `cbatch`."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for path in sorted(ROOT.rglob("*.py"))
    ]


def source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> set[str]:
    """Every module that `module` imports anywhere, also inside functions and for types alone, by its full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found.update(_from(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.update(ast.literal_eval(a) for a in node.args if isinstance(a, ast.Constant))
    return found


def _from(node: ast.ImportFrom) -> set[str]:
    """`from cbatch import errors` imports `cbatch.errors`; `from x import y` of another package imports `x`."""
    name = node.module or ""
    if name.partition(".")[0] != "cbatch":
        return {name}
    inner = {f"{name}.{alias.name}" for alias in node.names}
    return {i if _is_module(i) else name for i in inner}


def _is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def room(module: str) -> str:
    return module.partition(".")[0]


def inside(module: str) -> set[str]:
    """The modules of cbatch that `module` imports, as dotted names below `cbatch`."""
    return {
        i.removeprefix("cbatch").lstrip(".")
        for i in imports(module)
        if i.partition(".")[0] == "cbatch"
    }


def outside(module: str) -> set[str]:
    return {i.partition(".")[0] for i in imports(module)}


def test_walk_finds_the_package() -> None:
    assert {"", "errors", "core.scheduler", "backend.fake"} <= set(modules())
    assert "core.plan" in inside("core.scheduler")
    assert "cbatch.errors" in imports("core.scheduler")


@pytest.mark.parametrize("module", modules())
def test_module_sees_only_what_its_room_may(module: str) -> None:
    if not module:
        return  # the front door shows every room
    if room(module) == "backend":
        forbidden = {i for i in inside(module) if i not in BACKEND_SEES and room(i) != "backend"}
    else:
        assert room(module) in LAYER, f"{module} is in no room of the design"
        layer = LAYER[room(module)]
        forbidden = {i for i in inside(module) if LAYER.get(room(i), layer) > layer}
    assert not forbidden


@pytest.mark.parametrize("module", [m for m in modules() if room(m) == "core"])
def test_core_sees_no_backend_thread_clock_or_file(module: str) -> None:
    assert not outside(module) & NOT_IN_CORE
    assert {room(i) for i in inside(module)} <= FACE | {"chat", "core"}


@pytest.mark.parametrize("module", [m for m in modules() if room(m) == "runtime"])
def test_runtime_sees_the_backend_protocol_alone(module: str) -> None:
    assert {i for i in inside(module) if room(i) == "backend"} <= {"backend"}


@pytest.mark.parametrize("module", [m for m in modules() if room(m) == "files"])
def test_files_sees_neither_commands_nor_servers_nor_benchmarks(module: str) -> None:
    assert not {room(i) for i in inside(module)} & {"cli", "server", "daemon", "bench"}


@pytest.mark.parametrize("module", [m for m in modules() if room(m) in FACE])
def test_face_sees_no_room(module: str) -> None:
    assert {room(i) for i in inside(module)} <= FACE | {"logs"}


@pytest.mark.parametrize("module", [m for m in modules() if m != "backend.bindings"])
def test_llama_cpp_is_imported_in_one_module_alone(module: str) -> None:
    assert "llama_cpp" not in outside(module)
