"""Refuse to load a model where the test is not marked `real`.

Python imports this module as it starts: in the tests by their conftest, and in each process that they start, for the
conftest puts this folder on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "CBATCH_TESTS_LOAD_NO_MODEL"
"""Set while a test runs that is not marked `real`."""

LOADERS = (
    "llama_model_load_from_file",
    "llama_model_load_from_file_ptr",
    "llama_model_load_from_splits",
    "llama_load_model_from_file",
)


class ModelGuard:
    """Finds llama-cpp-python's bindings and wraps what loads a model."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the bindings, with the guard behind their execution; None of all else."""
        if name != "llama_cpp.llama_cpp":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_guard(module: ModuleType) -> None:
            execute(module)
            for loader in LOADERS:
                if hasattr(module, loader):
                    setattr(module, loader, guarded(loader, getattr(module, loader)))

        spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]
        return spec


def guarded(name: str, load: Any) -> Any:
    """Return the function, which fails in a test that may not load a model."""

    def load_if_real(*args: Any) -> Any:
        if os.environ.get(VARIABLE):
            refuse(name)
        return load(*args)

    return load_if_real


def refuse(name: str) -> NoReturn:
    """Fail the test, also where it expects an error of cbatch."""
    raise AssertionError(f"{name}: a test that loads a model is marked `real`")


sys.meta_path.insert(0, ModelGuard())
