"""Keep a test that is not marked `real` from what is real: it loads no model and starts no process."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOADERS = (
    "llama_model_load_from_file",
    "llama_model_load_from_file_ptr",
    "llama_model_load_from_splits",
    "llama_load_model_from_file",
)
PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events. Source: the manual of Python, "Audit events table"."""


@dataclass(eq=False, slots=True)
class Guard:
    """Refuses what is real while it is on; finds llama-cpp-python's bindings, and wraps what loads a model."""

    is_on: bool = False

    def install(self) -> None:
        """Watch this process, before llama-cpp-python is imported."""
        assert "llama_cpp" not in sys.modules, "nothing slow is imported before it is needed"
        sys.meta_path.insert(0, self)
        sys.addaudithook(self._watch)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Refuse what is real in the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the bindings, which are wrapped when they have been executed; None of all else."""
        if name != "llama_cpp.llama_cpp":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for loader in LOADERS:
                if hasattr(module, loader):
                    setattr(module, loader, self._wrapped(getattr(module, loader)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrapped(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_if_real(*args: Any) -> Any:
            self._refuse("loads a model")
            return load(*args)

        return load_if_real

    def _watch(self, event: str, args: tuple[object, ...]) -> None:
        if event in PROCESSES:
            self._refuse("starts a process")

    def _refuse(self, what: str) -> None:
        if self.is_on:
            raise AssertionError(
                f"a test that {what} is marked `real`: docs/understand/contributing.md"
            )


GUARD = Guard()
