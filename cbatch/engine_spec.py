"""Model and options of an engine as a value for other processes, and the engine that a process shares for it."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import cache
from typing import Any

from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.loading import load
from cbatch.options import RunOptions, values_of
from cbatch.runtime.waking import do_to_end
from cbatch.support.checks import check_path, reading, shown
from cbatch.support.hub import is_hub_name
from cbatch.support.plain import text_of_plain

_OF_LOAD = ("options", "threaded", "replicas", "n_sharing")


class EngineSpec:
    """An engine to be loaded elsewhere: a model and options of `cbatch.load`, checked as far as they can be without it.

    A value: specs of equal content are equal and have the same hash, also after pickling.
    """

    __slots__ = ("_key", "model", "settings")

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        """Keep the model (an absolute path, a name `hf:…`, or None for the shipped model) and options by name.

        Args:
            model: as for `cbatch.load`, but no `llama_cpp.Llama`.
            settings: as for `cbatch.load`, but no `look_ahead`.

        Raises:
            ConfigError: a wrong setting, or a value that other processes cannot have, such as a function.
        """
        self.model = _path(model)
        self.settings: Mapping[str, Any] = _checked(settings)
        """The options of `cbatch.load` that were given."""
        try:
            self._key = json.dumps([self.model, _plain(self.settings)], sort_keys=True)
        except TypeError as error:
            raise ConfigError(
                f"an EngineSpec takes only plain values, which can be sent to other processes: {error}"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineSpec) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        given = [shown(self.model), *(f"{k}={shown(v)}" for k, v in self.settings.items())]
        return f"EngineSpec({', '.join(given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.model, self.settings)

    def changed(self, **settings: Any) -> EngineSpec:
        """Return a copy with these settings added or changed."""
        return EngineSpec(self.model, **{**self.settings, **settings})

    def load(self) -> Engine:
        """Load an engine of the caller's own. Raises as `cbatch.load`."""
        return load(self.model, **self.settings)

    def shared(self) -> SharedEngine:
        """Return a context manager, sync or async, that lends this process's one engine for the spec.

        The first user loads the engine, others wait for that; it is closed when the last user leaves or the process
        ends. An engine that has failed is not lent again: the next user loads a new one.
        """
        return SharedEngine(self)


class SharedEngine:
    """Lends the process's one engine for a spec: `with spec.shared() as engine`. Entering raises as `cbatch.load`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._lent: defaultdict[int, deque[tuple[_Loan, Engine]]] = defaultdict(deque)
        """By process, the oldest first: of two engines, that is one that has ended."""

    def __enter__(self) -> Engine:
        loans = _loans(os.getpid())
        loan = loans.of(self._spec)
        try:
            engine = loan.take(self._spec)
        except BaseException:
            loans.leave(self._spec, loan)
            raise
        self._lent[os.getpid()].append((loan, engine))
        return engine

    def __exit__(self, *error: object) -> None:
        pid = os.getpid()
        if lent := self._lent[pid]:  # else a fork leaves its parent's block
            loan, engine = lent.popleft()
            loan.give_back(engine)
            _loans(pid).leave(self._spec, loan)

    async def __aenter__(self) -> Engine:
        lent: list[Engine] = []
        try:
            await do_to_end(lambda: lent.append(self.__enter__()))
        except BaseException:
            if lent:
                await do_to_end(self.__exit__)
            raise
        return lent[0]

    async def __aexit__(self, *error: object) -> None:
        await do_to_end(self.__exit__)


class _Loans:
    """The shared engines of one process; those that nobody has are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may give an engine back anywhere
        self._loans: dict[EngineSpec, _Loan] = {}

    def of(self, spec: EngineSpec) -> _Loan:
        """Return the loan of a spec, kept until as many have left it."""
        with self._lock:
            loan = self._loans.setdefault(spec, _Loan())
            loan.n_here += 1
            return loan

    def leave(self, spec: EngineSpec, loan: _Loan) -> None:
        with self._lock:
            loan.n_here -= 1
            if not loan.n_here:
                del self._loans[spec]


class _Loan:
    """One engine and its users; an engine that has failed is forgotten, and its users give it back in vain."""

    def __init__(self) -> None:
        # held briefly: a finalizer may give an engine back in any thread, also in one that a load waits for
        self._changed = threading.Condition(threading.RLock())
        self._engine: Engine | None = None
        self._n_users = 0
        self._is_busy = False
        """Whether an engine is loaded or closed now."""
        self.n_here = 0
        """Its users, also of engines that have failed, and those that wait for it; with the lock of `_Loans`."""

    def take(self, spec: EngineSpec) -> Engine:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy)
            # first: else a finalizer that gives the engine back may close it meanwhile
            self._n_users += 1
            engine = self._engine
            if engine is not None and not has_ended(engine):
                return engine
            self._engine, self._n_users, self._is_busy = None, 0, True
        try:
            engine = spec.load()
            engine.open()  # in an event loop, `load` leaves that to others
            self._engine, self._n_users = engine, 1
        finally:
            self._end_work()
        return engine

    def give_back(self, engine: Engine) -> None:
        with self._changed:
            is_lent = engine is self._engine  # else it has failed
            self._n_users -= is_lent
            is_last = is_lent and not self._n_users
            if is_last:
                self._engine, self._is_busy = None, True
        if is_lent and not is_last:
            return
        try:
            engine.close()
        finally:
            if is_last:
                self._end_work()

    def _end_work(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()


@cache
def _loans(pid: int) -> _Loans:
    """Return the shared engines of the process with this id: those of a parent do not compute in a fork."""
    return _Loans()


def has_ended(engine: Engine) -> bool:
    """Whether a loaded engine is closed, or has failed for good: its worker processes are not replaced."""
    outage = engine.outage
    return outage is not None and outage.retry_s is None


def _restored(model: str | None, settings: Mapping[str, Any]) -> EngineSpec:
    return EngineSpec(model, **settings)


def _path(model: object) -> str | None:
    if model is None:
        return None
    with reading("model"):
        if isinstance(model, str | os.PathLike):
            path = check_path("model", model)
            return path if is_hub_name(path) else os.path.abspath(path)
    raise ConfigError(
        f"an EngineSpec needs a model's path, not {type(model).__name__}: that object cannot be sent to another process"
    )


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with checked values, and paths that are the same in any folder."""
    options = EngineOptions.of(settings, _OF_LOAD)
    found = {k: v if k in _OF_LOAD else getattr(options, k) for k, v in settings.items()}
    if "options" in found:
        found["options"] = RunOptions.of(found["options"])
    for name in ("cache_dir", "draft", "mmproj", "library"):
        if found.get(name) is not None and not is_hub_name(os.fspath(found[name])):
            found[name] = os.path.abspath(found[name])
    if found.get("adapters"):
        files = found["adapters"].items()
        found["adapters"] = {name: os.path.abspath(file) for name, file in files}
    return found


def _plain(value: object) -> object:
    """Return settings as JSON has them; TypeError for a value that it cannot have."""
    if isinstance(value, RunOptions):
        if (text := text_of_plain(values_of(value))) is None:
            raise TypeError("its options have a function")
        return text  # the order of keys counts, as in the schemas of tools
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
