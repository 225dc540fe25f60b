"""Makes each process register the RPC servers in `RPC_SERVERS`, as if it had been loaded with them: for `../run`."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_DEVICES = "cbatch.backend.devices"


class _WithServers:
    """Finds the module that knows devices, and registers the servers once it is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _DEVICES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        make = loader.exec_module

        def make_with_servers(module: Any) -> None:
            make(module)
            module.add_servers(os.environ["RPC_SERVERS"].split(","))

        loader.exec_module = make_with_servers
        return spec


sys.meta_path.insert(0, _WithServers())
