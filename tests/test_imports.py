"""The walls of the house: imports go one way, and each room sees only what it may."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import cbatch
import cbatch.bench
import cbatch.models
from tests.private_parts import private_parts

ROOT = Path(cbatch.__file__).parent

FACE = {
    "errors", "options", "embedding", "engine_options", "media", "messages", "pictures", "sounds", "tools", "response",
    "option_checks", "progress", "stats",
}  # fmt: skip
"""Values that callers see: these modules see each other, and their helpers."""

LOW = FACE | {"support"}
"""What every room sees."""

PROTOCOL = {"backend:", "backend.protocol"}
"""What all but the engine see of the backend; a colon behind a name leaves out what is below it."""

BELOW_ENGINE = LOW | {"chat", "cache", "runtime"}
BELOW_FILES = BELOW_ENGINE | {"backend", "engine", "worker", "loading"}

SEES: dict[str, set[str]] = {
    "errors": set(),
    "support": {"errors"},
    **dict.fromkeys(sorted(FACE - {"errors"}), LOW),
    "chat": LOW,
    "cache": LOW,
    "core": LOW | {"chat"},
    "backend": LOW | {"chat", "core.plan", "core.span"},
    "runtime": LOW | {"chat", "core", "cache"} | PROTOCOL,
    "engine": BELOW_ENGINE
    | PROTOCOL
    | {"backend.devices", "backend.load", "backend.named_library"},
    "worker": BELOW_ENGINE | PROTOCOL | {"backend.abort", "core.request", "engine"},
    "loading": BELOW_ENGINE | {"backend.load", "backend.named_library", "engine", "worker"},
    "engine_spec": BELOW_ENGINE | {"engine", "loading"},
    "daemon": BELOW_FILES,
    "files": BELOW_FILES,
    "server": BELOW_FILES | {"files.judged_run", "files.served_batch"},
    "bench": BELOW_FILES | {"core"},
    "verify": BELOW_FILES,
    "integrations": BELOW_FILES | {"engine_spec", "files", "server"},
    "bench.experiments": BELOW_FILES | {"core", "bench", "files", "integrations"},
    "models": set(),
    "models.recipe": LOW
    | {"loading", "engine", "backend", "models"}
    | {f"bench.synthetic_{part}" for part in ("shapes", "tokenizer", "vocabulary")},
    "cli": BELOW_FILES | {"daemon", "files", "server", "bench", "verify", "integrations", "models"},
    "__main__": {"cli"},
}
"""What each room sees beside itself: rooms, or modules of them. A room of a room is named where it sees more."""

SAME_NAMES: dict[str, set[str]] = {}
"""Modules of one name that are still to be renamed. This list only shrinks."""

LEFT_OUT = ("models.recipe", "bench.experiments")
"""Rooms that the wheel does not have."""

SAME_CLASSES: dict[str, set[str]] = {
    # their libraries show these names to users
    "Cbatch": {"integrations.llm", "integrations.outlines"},
    "AsyncCbatch": {"integrations.llm", "integrations.outlines"},
}
"""Classes of one name, with a leading underscore or without, that are still to be renamed. This list only shrinks."""

COMMANDS = {
    "ask",
    "bench",
    "cache",
    "daemon",
    "demo",
    "doctor",
    "info",
    "run",
    "serve",
    "sort",
    "status",
    "synth",
    "tune",
    "verify",
}
"""A module of `cli` may be called as its command, though another room has the word."""

NOT_IN_CORE = {
    "asyncio", "anyio", "concurrent", "ctypes", "datetime", "io", "llama_cpp", "logging", "multiprocessing", "numpy",
    "os", "pathlib", "queue", "random", "selectors", "signal", "socket", "subprocess", "sys", "threading", "time",
}  # fmt: skip
"""Threads, clocks, chance, I/O: what would make a plan depend on more than its inputs."""


def folders() -> dict[str, Path]:
    """Each package's folder by its dotted name; what the wheel leaves out may be in the checkout alone."""
    found = {"": ROOT}
    for path in ROOT.rglob("*/"):
        if path.name != "__pycache__":
            found[".".join(path.relative_to(ROOT).parts)] = path
    for package in (cbatch.bench, cbatch.models):
        for path in (path for place in package.__path__ for path in Path(place).glob("[a-z]*/")):
            found.setdefault(".".join([*package.__name__.split(".")[1:], path.name]), path)
    return found


FOLDERS = folders()


def modules() -> dict[str, Path]:
    """Every module's file, by a dotted name below `cbatch`."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.glob("*.py")):
            name = "" if path.stem == "__init__" else path.stem
            found[f"{package}.{name}".strip(".")] = path
    return found


MODULES = modules()


@cache
def imports(module: str) -> set[str]:
    """Every module that `module` imports anywhere, also inside functions and for types alone, by its full name."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found.update(_from(node))
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            found.update(ast.literal_eval(a) for a in node.args if isinstance(a, ast.Constant))
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def _name(called: ast.expr) -> str:
    """`f` of `f(…)` and of `x.f(…)`."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _from(node: ast.ImportFrom) -> set[str]:
    """`from cbatch import errors` imports `cbatch.errors`; `from x import y` of another package imports `x`."""
    name = node.module or ""
    if name.partition(".")[0] != "cbatch":
        return {name}
    inner = {f"{name}.{alias.name}" for alias in node.names}
    return {i if _below(i) in MODULES else name for i in inner}


def _below(name: str) -> str:
    return name.removeprefix("cbatch").lstrip(".")


def room(module: str) -> str:
    """The room that a module is in: the first part of its name, or more where `SEES` names more."""
    return next((r for r in LEFT_OUT if is_in(module, {r})), module.partition(".")[0])


def is_in(module: str, places: set[str]) -> bool:
    """Whether a module is one of `places`, or in one."""
    parts = module.split(".")
    return f"{module}:" in places or any(
        ".".join(parts[:n]) in places for n in range(1, len(parts) + 1)
    )


def inside(module: str) -> set[str]:
    """The modules of cbatch that `module` imports, as dotted names below `cbatch`."""
    return {_below(i) for i in imports(module) if i.partition(".")[0] == "cbatch"}


def outside(module: str) -> set[str]:
    return {i.partition(".")[0] for i in imports(module)}


def beyond_walls(module: str) -> set[str]:
    """What `module` imports of cbatch that its room may not see; the front door is seen by those above the engine."""
    sees = SEES[room(module)] | {room(module)}
    if "engine" in sees:
        sees = sees | {":"}
    return {i for i in inside(module) if not is_in(i, sees)}


def test_walk_finds_the_package() -> None:
    assert {"", "errors", "core.scheduler", "backend.llama.native", "cli.run"} <= MODULES.keys()
    assert "core.plan" in inside("core.scheduler")
    assert "cbatch.errors" in imports("core.scheduler")
    assert "models.recipe.train" in MODULES


def test_every_module_sees_only_what_its_room_may() -> None:
    inner = [m for m in MODULES if m]  # the front door shows every room
    assert not [m for m in inner if room(m) not in SEES], "in no room of the design"
    assert not {(m, i) for m in inner for i in beyond_walls(m)}


def test_nothing_that_ships_imports_what_the_wheel_leaves_out() -> None:
    inner = [m for m in MODULES if room(m) not in LEFT_OUT]
    assert len(inner) < len(MODULES)
    assert not {(m, i) for m in inner for i in inside(m) if room(i) in LEFT_OUT}


def test_sees_of_the_rooms_go_one_way() -> None:
    above: set[str] = set()
    for name in reversed(SEES):
        above.add(name)
        places = {room(place.rstrip(":")) for place in SEES[name]}
        assert not places & above - {name} or name in FACE, f"{name} sees what sees it"


def test_core_has_no_thread_clock_or_file() -> None:
    core = [m for m in MODULES if room(m) == "core"]
    assert not {(m, name) for m in core for name in outside(m) & NOT_IN_CORE}


def test_llama_cpp_is_imported_in_one_module_alone() -> None:
    assert [m for m in MODULES if "llama_cpp" in outside(m)] == ["backend.bindings"]


def test_no_module_imports_a_private_name() -> None:
    imported = [
        (module, alias.name)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    ]
    assert imported
    assert not [(module, name) for module, name in imported if name.startswith("_")]


def test_benches_and_the_recipe_reach_for_no_private_part() -> None:
    modules = [m for m in MODULES if room(m) in ("bench", *LEFT_OUT)]
    assert modules
    found = {m: {ast.unparse(part) for part in private_parts(tree(m))} for m in modules}
    assert not {m: parts for m, parts in found.items() if parts}


def test_name_of_a_module_occurs_once() -> None:
    by_name: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        is_command = room(module) == "cli" and path.stem in COMMANDS
        if not (path.stem.startswith("__") or is_command):
            by_name[path.stem].add(module)
    assert {name: where for name, where in by_name.items() if len(where) > 1} == SAME_NAMES


def test_name_of_a_class_occurs_once() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                by_name[node.name.lstrip("_")].append(module)
    assert len(by_name) > 500
    found = {name: where for name, where in by_name.items() if len(where) > 1}
    assert {name: sorted(where) for name, where in found.items()} == {
        name: sorted(where) for name, where in SAME_CLASSES.items()
    }
