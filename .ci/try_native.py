"""Whether the native library of the installed cbatch loads, and is of this cbatch; without llama.cpp."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path

import cbatch

package = Path(cbatch.__file__).parent
[file] = [path for path in package.glob("libcbatch.*") if path.suffix in (".so", ".dylib")]
source = (package / "backend" / "llama" / "library.py").read_text(encoding="utf-8")
wanted = next(
    ast.literal_eval(node.value)
    for node in ast.parse(source).body
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ABI_VERSION"
)
found = ctypes.CDLL(str(file)).cbatch_abi_version()
if found != wanted:
    raise SystemExit(
        f"{file} has interface version {found}, cbatch {cbatch.__version__} needs {wanted}"
    )
