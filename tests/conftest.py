"""Models for the whole test run, written once; nothing slow is imported before it is needed."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cbatch.core.batcher import MultiRequestBatcher
from tests import kinds, profiles
from tests.guard import GUARD

if TYPE_CHECKING:
    from cbatch.bench.synthetic import Shape
    from cbatch.core.driver import SequenceDriver
    from tests.places import Place

ROOT = Path(__file__).parents[1]
MODELS = {"synth", "test_model", "random_model", "zoo"}
"""Fixtures that give a path of a model: who asks for one is `real`."""

N_CASES = 2
"""Cases of a test with parameters that the profile `fast` runs."""

N_OVER_WORKERS = 3
"""Cases of a test with parameters that run over each kind of engine but that of a thread, which has all."""

SynthFactory = Callable[..., Path]
"""`synth(shape, *, seed=0, metadata=None, **sizes) -> Path`; files are shared, so read only."""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process, and with it the processes that tests start."""
    # as a terminal sends them: a run in the background ignores them, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # what they import is the cbatch that is tested, not the checkout that they are started in
    places = [_package().parent, ROOT]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, places))
    os.environ["PYTHONSAFEPATH"] = "1"  # from Python 3.11 on
    gc.disable()  # until all is imported
    _share_cores()
    GUARD.install()
    _add_what_the_wheel_leaves_out()
    if "LLAMA_CPP_LIB_PATH" in os.environ:
        # llama_cpp alone takes a folder for it, and loads no backends
        import_module("cbatch.backend.bindings")
    if not config.getoption("--hypothesis-profile", None):
        profiles.load("fast" if "not real" in config.option.markexpr else "full")


def _share_cores() -> None:
    """Give each of the processes of pytest-xdist cores of its own: llama.cpp takes all that it sees."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    own = cores[int(worker.removeprefix("gw")) :: n_workers]
    os.sched_setaffinity(0, own or cores)


def _add_what_the_wheel_leaves_out() -> None:
    """Let an installed package have the recipe of its models, and the experiments, from this checkout."""
    import cbatch.bench
    import cbatch.models

    cbatch.models.__path__.append(str(ROOT / "cbatch" / "models"))
    cbatch.bench.__path__.append(str(ROOT / "cbatch" / "bench"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of an engine's face over each kind of engine; those on llama.cpp have an engine of their own."""
    is_real = metafunc.definition.get_closest_marker("real") is not None
    if is_real or MODELS.intersection(metafunc.fixturenames):
        return
    over = kinds.kinds_of(metafunc.definition)
    if over:
        metafunc.parametrize("engine_kind", over, indirect=True)


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep servers that tests start, and what is found out at load, out of the user's own files."""
    for kind in ("STATE", "CACHE"):
        os.environ[f"XDG_{kind}_HOME"] = str(tmp_path_factory.mktemp(kind.lower()))
    if "PYTEST_XDIST_WORKER" in os.environ:  # what one process finds out about a model, all know
        notes = _common(tmp_path_factory, "notes")
        own = Path(os.environ["XDG_CACHE_HOME"]) / "cbatch"
        own.mkdir()
        (own / "notes").symlink_to(notes)


@pytest.fixture(autouse=True)
def engine_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have `engine_on` make engines of the test's kind, of which it has to make one."""
    asked: kinds.Kind = getattr(request, "param", "thread")
    with kinds.chosen(asked) as made:
        yield
    assert asked == "thread" or asked in made, "it makes no engine of its kind"


@pytest.fixture(autouse=True)
def imbalances(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Check the books of every engine of this process after each step; a test that unbalances them clears it."""
    found, take = list[str](), MultiRequestBatcher.take_ended

    def checked(batcher: MultiRequestBatcher) -> list[SequenceDriver]:
        if problem := batcher.imbalance():
            found.append(problem)
        return take(batcher)

    monkeypatch.setattr(MultiRequestBatcher, "take_ended", checked)
    yield found
    assert not found


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark as `real` what asks for a model; keep a few cases of each test in the profile `fast`."""
    for item in items:
        if MODELS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("real")
    items[:] = [item for item in items if _has_meaning(item)]
    yield
    kept = {item for of_one in _cases(items, _kind_of) for item in _over_its_kind(of_one)}
    if profiles.is_fast():
        of_each = _cases([item for item in items if item in kept], lambda _: None)
        kept = {item for of_one in of_each for item in profiles.spread(of_one, N_CASES)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _cases(
    items: Sequence[pytest.Item], part: Callable[[pytest.Item], object]
) -> Iterable[list[pytest.Item]]:
    """Return the cases of each test, those apart for which `part` is different."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        found.setdefault((item.nodeid.partition("[")[0], part(item)), []).append(item)
    return found.values()


def _over_its_kind(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    return cases if _kind_of(cases[0]) == "thread" else profiles.spread(cases, N_OVER_WORKERS)


def _has_meaning(item: pytest.Item) -> bool:
    """Whether a case is one of its kind of engine: those by hand are of none but the thread's."""
    return _kind_of(item) == "thread" or "by hand" not in item.name


def _kind_of(item: pytest.Item) -> kinds.Kind:
    """Return the kind of engine that a case runs over."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    kind: kinds.Kind = parameters.get("engine_kind", "thread")
    return kind


def pytest_collection_finish() -> None:
    """Keep the garbage collector from all that was imported: it takes long to look at."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests that are marked `real` load models and start processes, and no others."""
    with nullcontext() if item.get_closest_marker("real") else GUARD.on():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is promised of processors alone where a device computes, and media on another library."""
    marker = item.get_closest_marker("cpu")
    if marker is not None and _has_device():
        pytest.skip(f"a device computes: {marker.args[0]}")
    if item.get_closest_marker("own_library") is not None and "LLAMA_CPP_LIB_PATH" in os.environ:
        pytest.skip("LLAMA_CPP_LIB_PATH is set: this needs the library inside llama-cpp-python")


@cache
def _has_device() -> bool:
    from cbatch.backend.devices import computes_on_cpu
    from cbatch.engine_options import EngineOptions

    return not computes_on_cpu(EngineOptions())


def _package() -> Path:
    """Return the folder of the cbatch that is tested, without an import of it."""
    spec = find_spec("cbatch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _common(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that the processes of pytest-xdist have in common."""
    folder = factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    folder.mkdir(exist_ok=True)
    return folder


def _written_once(path: Path, write: Callable[[Path], object]) -> Path:
    """Return the path of a file that the first process to ask for it has written."""
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_name(f"part-{path.name}")
            part.unlink(missing_ok=True)
            write(part)
            part.replace(path)
    return path


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory) -> SynthFactory:
    """Return a factory of models: a name in `SHAPES` or a `Shape`, and what to change in it."""
    folder = _common(tmp_path_factory, "models")

    def write(
        shape: str | Shape = "test",
        *,
        seed: int = 0,
        metadata: dict[str, object] | None = None,
        **sizes: object,
    ) -> Path:
        from dataclasses import asdict

        from cbatch.bench.synthetic import SHAPES, Shape, write_model

        base = SHAPES[shape] if isinstance(shape, str) else shape
        changed = Shape(**{**asdict(base), **sizes})
        key = repr((changed, seed, sorted((metadata or {}).items())))
        name = f"{sha256(key.encode()).hexdigest()[:16]}-{changed.type}.gguf"
        return _written_once(
            folder / name, lambda part: write_model(part, changed, seed=seed, metadata=metadata)
        )

    return write


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a factory of models by a name in `tests.zoo`; files are shared, so read only."""
    from tests.zoo import write_arch

    folder = _common(tmp_path_factory, "zoo")
    return lambda name: _written_once(folder / f"{name}.gguf", partial(write_arch, name))


@pytest.fixture(scope="session")
def test_model() -> Path:
    """Return the path of the model that ships inside."""
    from cbatch.backend.load.open_model import shipped_model

    return shipped_model()


@pytest.fixture(scope="session")
def random_model(synth: SynthFactory) -> Path:
    """Return the path of a model of shape `test`, with a BOS and a vocabulary that is known to the test."""
    return synth("test")


@pytest.fixture
def new_objects_only() -> None:
    """Let `gc.get_objects` return only objects made from now on."""
    gc.collect()
    gc.freeze()


def _place(folder: Path, way: str) -> Iterator[Place]:
    from tests.places import place_of

    with place_of(folder / "cells", way) as made:
        yield made


@pytest.fixture(params=["threaded", "by hand", "async"])
def any_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Engines on fake backends over one folder of cells, by each way to ask."""
    yield from _place(tmp_path, request.param)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Engines with a thread."""
    yield from _place(tmp_path, "threaded")


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Place]:
    """Engines without a thread."""
    yield from _place(tmp_path, "by hand")
