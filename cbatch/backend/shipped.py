"""The model that ships inside the package, checked before it is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cbatch.errors import ModelLoadError

FOLDER = Path(__file__).parents[1] / "models"
CHAT = "chat.gguf"

_WAY_OUT = (
    "install cbatch again (pip install --force-reinstall cbatch), or give a model of your own"
)


def shipped_model(folder: Path = FOLDER) -> Path:
    """Return the path of the chat model that ships inside.

    Raises:
        ModelLoadError: it is missing, or is not what was packed.
    """
    path = folder / CHAT
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        expected = json.loads((folder / "digests.json").read_text(encoding="utf-8"))[CHAT]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelLoadError(
            f"the model that ships inside is missing: {error}: {_WAY_OUT}"
        ) from error
    if digest != expected:
        raise ModelLoadError(f"the model that ships inside is damaged ({path}): {_WAY_OUT}")
    return path
