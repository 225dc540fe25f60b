"""Models by the names that they have at Hugging Face: `hf:OWNER/REPO/FILE.gguf`."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, words_of

_PREFIX = "hf:"


def is_hub_name(model: str) -> bool:
    """Whether this names a model at Hugging Face, and no path."""
    return model.startswith(_PREFIX)


def local_model(model: Any) -> Any:
    """Return the path of a model that is named `hf:OWNER/REPO/FILE.gguf`, all others as they are.

    `huggingface_hub` downloads the file, or finds it among those that it has downloaded before; FILE may have folders.

    Raises:
        ConfigError: it is not installed, the name is incomplete, or the file cannot be had.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else ""
    if not isinstance(name, str) or not is_hub_name(name):
        return model
    owner, repo, file = (*name.removeprefix(_PREFIX).split("/", 2), "", "")[:3]
    if not (owner and repo and file):
        raise ConfigError(f"{name}: is incomplete: give hf:OWNER/REPO/FILE.gguf")
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"{name}: needs a package that is not installed: pip install huggingface_hub, or give a file's path"
        ) from None
    try:
        return hub.hf_hub_download(repo_id=f"{owner}/{repo}", filename=file)
    except Exception as error:  # whatever its HTTP client raises
        raise ConfigError(f"{name}: cannot be downloaded: {words_of(error)}") from error


def parts_of_model(path: Path) -> list[Path]:
    """Return the files of a split model, or the one. Source: llama.cpp, llama_split_path: NAME-00001-of-00003.gguf."""
    match = re.fullmatch(r"(.*-)00001(-of-(\d{5})\.gguf)", path.name)
    if match is None:
        return [path]
    before, behind, n = match.groups()
    parts = [path.with_name(f"{before}{i:05}{behind}") for i in range(1, int(n) + 1)]
    return [part for part in parts if part.exists()]
