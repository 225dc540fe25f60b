"""How much host memory checkpoints may take, where the options do not say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cbatch.backend.host_limits import host_free
from cbatch.engine_options import DEFAULT_CHECKPOINT_MIB, EngineOptions
from cbatch.support.logs import Log

if TYPE_CHECKING:
    from cbatch.backend.llama.embed_only import EmbedOnlyBackend
    from cbatch.backend.llama.llama_backend import LlamaBackend
    from cbatch.backend.llama.model import LlamaModel

_log = Log("cbatch.load")

_MOST_MIB = 4096
_SHARE = 8
"""Of what is free once the model is loaded. More is rarely of use, and others want memory too. Our choice."""


def settle_checkpoints(
    backend: LlamaBackend | EmbedOnlyBackend, options: EngineOptions, *, n_sharing: int = 1
) -> EngineOptions:
    """Return the options with `checkpoint_mib` decided: a share of what is free now, of which `n_sharing` have parts.

    Where memory cannot be trimmed and the options leave no room for checkpoints, the log says what that costs.
    """
    if options.checkpoint_mib is None:
        return replace(options, checkpoint_mib=most_mib(host_free(backend.model.name), n_sharing))
    if not options.checkpoint_mib and options.share_prefixes and not backend.memory.can_trim:
        _log.warn(
            "checkpoint_mib=0: this model's memory cannot be cut, so a common prefix is computed again for each "
            "prompt, and a chat's history in each turn"
        )
    return options


def described_mib(model: LlamaModel, options: EngineOptions, *, n_unloaded: int) -> int | None:
    """Return the MiB that checkpoints of a model would get besides `n_unloaded` bytes of weights; None for no need."""
    if model.has_plain_cells:
        return None
    if options.checkpoint_mib is not None:
        return options.checkpoint_mib
    n_free = host_free(model.name)
    return most_mib(None if n_free is None else max(0, n_free - n_unloaded))


def most_mib(n_free: int | None, n_sharing: int = 1) -> int:
    """Return the MiB for checkpoints where `n_free` bytes are free for `n_sharing` processes."""
    if n_free is None:
        return DEFAULT_CHECKPOINT_MIB
    return max(1, min(_MOST_MIB, n_free // _SHARE // n_sharing // 2**20))
