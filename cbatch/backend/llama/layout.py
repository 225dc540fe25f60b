"""The memory that a model's sequences need, from its file: bytes of a token's cells, and of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.engine_options import EngineOptions


@dataclass(frozen=True, slots=True)
class CellFormat:
    """How llama.cpp stores numbers: `n_block` of them in `n_bytes`."""

    id: int
    """Source: ggml/include/ggml.h, enum ggml_type."""
    n_block: int
    n_bytes: int

    def row(self, n_numbers: int) -> int:
        """Return the bytes of `n_numbers` numbers in whole blocks."""
        return -(-n_numbers // self.n_block) * self.n_bytes


# Source: ggml/src/ggml-common.h, the block structures; a test compares them with the library's own answers.
CELL_TYPES: Mapping[str, CellFormat] = {
    "f32": CellFormat(0, 1, 4),
    "f16": CellFormat(1, 1, 2),
    "q4_0": CellFormat(2, 32, 18),
    "q4_1": CellFormat(3, 32, 20),
    "q5_0": CellFormat(6, 32, 22),
    "q5_1": CellFormat(7, 32, 24),
    "q8_0": CellFormat(8, 32, 34),
    "iq4_nl": CellFormat(20, 32, 18),
    "bf16": CellFormat(30, 1, 2),
}

_STATE_BYTES = 4  # a state's numbers are f32. Source: src/llama-model.cpp, create_memory
_GEMMA3N_LAYERS = 20  # with cells; the file does not say. Source: src/models/gemma3n.cpp


@dataclass(frozen=True, slots=True)
class Layout:
    """What each layer of a model stores of a sequence.

    Args:
        heads: key and value heads of each layer that has cells.
        n_key: width of one key head.
        n_value: width of one value head; 0 where keys hold both.
        key_widths: every width of a key head in the model.
        value_widths: every width of a value head.
        n_state: numbers of a sequence's state, all layers together.
        is_about: whether some layers may store more or less than this.
        is_known: whether the file has these numbers.
    """

    heads: tuple[int, ...] = ()
    n_key: int = 0
    n_value: int = 0
    key_widths: frozenset[int] = frozenset()
    value_widths: frozenset[int] = frozenset()
    n_state: int = 0
    is_about: bool = False
    is_known: bool = True

    @property
    def has_one_type(self) -> bool:
        """Whether keys and values are stored as one, and so of one type."""
        return bool(self.heads) and not self.n_value


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that sequences take in a context: `n_cell_bytes` for each token, `n_state_bytes` for each slot."""

    n_cell_bytes: int
    n_state_bytes: int = 0
    is_about: bool = False

    def of(self, n_slots: int, n_cells: int) -> int:
        """Return the bytes of a context of `n_slots` slots and `n_cells` cells in total."""
        return n_slots * self.n_state_bytes + n_cells * self.n_cell_bytes

    def with_other(self, other: Footprint) -> Footprint:
        """Return the bytes of two contexts of the same sequences."""
        return Footprint(
            self.n_cell_bytes + other.n_cell_bytes,
            self.n_state_bytes + other.n_state_bytes,
            self.is_about or other.is_about,
        )


def footprint(layout: Layout, options: EngineOptions) -> Footprint | None:
    """Return what sequences need with the options' types of cells; None where the file does not tell."""
    if not layout.is_known:
        return None
    keys, values = CELL_TYPES[options.cache_type_k], CELL_TYPES[options.cache_type_v]
    n_cell_bytes = sum(
        keys.row(n * layout.n_key) + values.row(n * layout.n_value) for n in layout.heads
    )
    return Footprint(n_cell_bytes, layout.n_state * _STATE_BYTES, layout.is_about)


class _File:
    def __init__(self, model: LlamaModel) -> None:
        self._model, self._own = model, f"{model.architecture}."

    def has(self, word: str) -> bool:
        """Whether a key of the architecture with this word in it is above 0; llama.cpp writes all keys, some as 0."""
        own = self._own
        named = (k for k in self._model.metadata if k.startswith(own) and word in k)
        return any(self.number(key.removeprefix(own)) for key in named)

    def number(self, key: str) -> int:
        text = self._model.metadata.get(self._own + key, "")
        return int(text) if text.isascii() and text.isdigit() else 0

    def numbers(self, key: str, n: int) -> tuple[int, ...]:
        """Return a count for each of `n` layers, from one number or the file's list; empty without either."""
        if self._own + key in self._model.metadata:
            return (self.number(key),) * n
        return self._model.integers.get(self._own + key, ())[:n]


def read_layout(model: LlamaModel) -> Layout:
    """Return what the file of a loaded model says of its layers.

    Source: src/llama-model.cpp, load_hparams and create_memory.
    """
    file, has_states = _File(model), model.has_states
    n_layers = file.number("block_count") - file.number("nextn_predict_layers")
    n_heads = file.numbers("attention.head_count", n_layers)
    heads = file.numbers("attention.head_count_kv", n_layers) or n_heads
    n_state = _state(file) * (heads.count(0) or n_layers) if has_states else 0
    if not any(heads):
        return Layout(n_state=n_state, is_known=n_state > 0)
    if not n_heads[0]:
        return Layout(is_known=False)
    n_width = file.number("embedding_length") // n_heads[0]
    keys, values = (_widths(file, f"attention.{name}_length", n_width) for name in ("key", "value"))
    is_mla = file.has("attention.key_length_mla")
    n_with_cells = n_layers - file.number("attention.shared_kv_layers")  # later layers share cells
    if model.architecture == "gemma3n":
        n_with_cells = _GEMMA3N_LAYERS
    is_varied = len({*heads}) > 1  # values may be padded to the width of the widest layer
    return Layout(
        heads=heads[:n_with_cells],
        n_key=max(keys),
        n_value=0 if is_mla else max(values),
        key_widths=keys,
        value_widths=values,
        n_state=n_state,
        is_about=has_states or is_varied or len(keys) + len(values) > 2 or file.has(".indexer."),
    )


def _widths(file: _File, key: str, default: int) -> frozenset[int]:
    """Return the width of a head, and that of a head in layers with a sliding window."""
    n_width = file.number(key) or default
    return frozenset((n_width, file.number(f"{key}_swa") or n_width))


def _state(file: _File) -> int:
    """Return how many numbers a recurrent layer's state has; 0 for a kind of state that is not known here.

    Source: src/llama-hparams.cpp, n_embd_r and n_embd_s.
    """
    n_inner, n_state = file.number("ssm.inner_size"), file.number("ssm.state_size")
    n_conv = max(0, file.number("ssm.conv_kernel") - 1)
    return n_conv * (n_inner + 2 * file.number("ssm.group_count") * n_state) + n_state * n_inner
