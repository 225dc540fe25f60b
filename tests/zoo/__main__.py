"""Write every model of the zoo into a folder: `python -m tests.zoo FOLDER`."""

import sys
from pathlib import Path

from tests.zoo import REFUSED, ZOO, write_arch

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name in (*ZOO, *REFUSED):
    write_arch(name, folder / f"{name}.gguf")
