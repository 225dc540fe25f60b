"""The shapes of synthetic models: their sizes, types of weights, what fits together, and those that have a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeAlias, get_args

from cbatch.errors import ConfigError

# Source: llama-hparams.h, LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS; more end the process that loads them.
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024
_MAX_SIZE = 2**31 - 1  # llama.cpp counts in 32 bits
_QUANTISER_BLOCK = 32  # llama.cpp's quantiser leaves matrices of other rows in f16

Architecture: TypeAlias = Literal[
    "llama",
    "mamba",
    "qwen3",
    "qwen2vl",
    "gemma3",
    "bert",
    "nomic-bert",
    "jina-bert-v2",
    "gemma-embedding",
]
Pooling: TypeAlias = Literal["", "none", "mean", "cls", "last", "rank"]
BERTS = ("bert", "nomic-bert", "jina-bert-v2")
_RANKERS = ("bert", "qwen3")


@dataclass(frozen=True, slots=True)
class WeightType:
    """One type of model files."""

    file_type: int
    """Source: llama.h, enum llama_ftype."""
    tensor_type: str
    """Of most matrices. Source: llama-quant.cpp, llama_ftype_get_default_type."""
    n_block: int = 256
    """Numbers of a row that are quantised together. Source: ggml-common.h."""
    n_bits: float = 0.0
    """For one weight of that tensor type. Source: ggml-common.h, the sizes of blocks."""
    is_direct: bool = False
    """Whether it is written as it is made, each matrix in this type; other files are quantised by llama.cpp, which
    mixes types."""
    needs_importance: bool = False
    """Whether llama.cpp refuses it without an importance matrix. Source: llama-quant.cpp, tensor_requires_imatrix."""


def _direct(file_type: int, tensor_type: str, n_block: int, n_bits: float) -> WeightType:
    return WeightType(file_type, tensor_type, n_block, n_bits, is_direct=True)


def _important(file_type: int, tensor_type: str, n_bits: float) -> WeightType:
    return WeightType(file_type, tensor_type, n_bits=n_bits, needs_importance=True)


WEIGHT_TYPES: Mapping[str, WeightType] = {
    "f32": _direct(0, "F32", 1, 32),
    "f16": _direct(1, "F16", 1, 16),
    "bf16": _direct(32, "BF16", 1, 16),
    "q8_0": _direct(7, "Q8_0", 32, 8.5),
    "q4_0": _direct(2, "Q4_0", 32, 4.5),
    "q4_1": _direct(3, "Q4_1", 32, 5),
    "q5_0": _direct(8, "Q5_0", 32, 5.5),
    "q5_1": _direct(9, "Q5_1", 32, 6),
    "q2_k": WeightType(10, "Q2_K", n_bits=2.625),
    "q2_k_s": _important(21, "Q2_K", 2.625),
    "q3_k_s": WeightType(11, "Q3_K", n_bits=3.4375),
    "q3_k_m": WeightType(12, "Q3_K", n_bits=3.4375),
    "q3_k_l": WeightType(13, "Q3_K", n_bits=3.4375),
    "q4_k_s": WeightType(14, "Q4_K", n_bits=4.5),
    "q4_k_m": WeightType(15, "Q4_K", n_bits=4.5),
    "q5_k_s": WeightType(16, "Q5_K", n_bits=5.5),
    "q5_k_m": WeightType(17, "Q5_K", n_bits=5.5),
    "q6_k": WeightType(18, "Q6_K", n_bits=6.5625),
    "iq1_s": _important(24, "IQ1_S", 1.5625),
    "iq1_m": _important(31, "IQ1_M", 1.75),
    "iq2_xxs": _important(19, "IQ2_XXS", 2.0625),
    "iq2_xs": _important(20, "IQ2_XS", 2.3125),
    "iq2_s": _important(28, "IQ2_XS", 2.3125),
    "iq2_m": _important(29, "IQ2_S", 2.5625),
    "iq3_xxs": _important(23, "IQ3_XXS", 3.0625),
    "iq3_xs": _important(22, "IQ3_S", 3.4375),
    "iq3_s": WeightType(26, "IQ3_S", n_bits=3.4375),
    "iq3_m": WeightType(27, "IQ3_S", n_bits=3.4375),
    "iq4_nl": WeightType(25, "IQ4_NL", 32, 4.5),
    "iq4_xs": WeightType(30, "IQ4_XS", n_bits=4.25),
    "tq1_0": WeightType(36, "TQ1_0", n_bits=1.6875),
    "tq2_0": WeightType(37, "TQ2_0", n_bits=2.0625),
    "mxfp4_moe": WeightType(38, "MXFP4", 32, 4.25),
}
"""By their names, which are llama.cpp's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes; a head is `n_embd / n_head` wide. A mamba has no heads: they count 1 and 1.

    Args:
        n_layer: layers, ≥ 1.
        n_embd: width; a multiple of `n_head`, and of what the weights' type takes together.
        n_head: attention heads; a multiple of `n_kv_head`.
        n_kv_head: key and value heads.
        n_ff: width of the feed-forward layer, or of each expert, in a mamba of its own one: then `2 * n_embd`; a
            multiple of what the weights' type takes together.
        type: of the weight matrices, a name in `WEIGHT_TYPES`.
        n_ctx_train: positions the file says it was trained for.
        tied: whether the output uses the embedding's weights.
        architecture: llama; mamba, which has a state of one size where llama has cells; qwen3; one without causal
            attention, for embeddings; or qwen2vl and gemma3, for projectors of pictures of their kinds.
        pooling: how a text's embedding is made of its tokens'; empty where the file leaves it open. With "rank" the
            model has a classifier: of one output in a bert, of yes and no in a qwen3.
        n_expert: feed-forward layers of which a token uses some; 0 for a single one that all use.
        n_expert_used: experts of a token.
        n_window: positions that a layer with a sliding window sees; 0 for layers that all see everything.
        full_every: with a window, every Nth layer sees the whole context.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    n_ff: int
    n_vocab: int
    type: str
    n_ctx_train: int = 32768
    tied: bool = False
    architecture: Architecture = "llama"
    pooling: Pooling = ""
    n_expert: int = 0
    n_expert_used: int = 0
    n_window: int = 0
    full_every: int = 2

    def __post_init__(self) -> None:
        if self.type not in WEIGHT_TYPES:
            raise ConfigError(
                f"unknown weight type {self.type!r}; known are {', '.join(WEIGHT_TYPES)}"
            )
        for value, known in ((self.architecture, Architecture), (self.pooling, Pooling)):
            if value not in get_args(known):
                names = ", ".join(filter(None, get_args(known)))
                kind = "architecture" if known is Architecture else "pooling"
                raise ConfigError(f"unknown {kind} {value!r}; known are {names}")
        checks = (self._sizes, self._attention, self._experts, self._mamba, self._embeddings)
        for rules in (*checks, self._rows):
            for wrong, rule in rules():
                if wrong:
                    raise ConfigError(f"{self}: {rule}")

    def _sizes(self) -> Iterator[tuple[bool, str]]:
        sizes = [self.n_layer, self.n_head, self.n_kv_head, self.n_ctx_train]
        sizes += [self.n_embd, self.n_ff, self.n_vocab, self.full_every]
        yield min(sizes) < 1, "sizes must be at least 1"
        yield (
            min(self.n_expert, self.n_expert_used, self.n_window) < 0,
            "n_expert, n_expert_used and n_window must be at least 0",
        )
        yield max(*sizes, self.n_window) > _MAX_SIZE, f"sizes must be at most {_MAX_SIZE}"
        yield self.n_layer > _MAX_LAYERS, f"llama.cpp takes at most {_MAX_LAYERS} layers"

    def _attention(self) -> Iterator[tuple[bool, str]]:
        yield (
            bool(self.n_embd % (2 * self.n_head)),
            "n_embd / n_head, the width of a head, must be an even number",
        )
        yield bool(self.n_head % self.n_kv_head), "n_head must be a multiple of n_kv_head"
        yield (
            bool(self.n_window) and not 1 < self.full_every <= self.n_layer,
            "with a window, full_every must be 2 … n_layer, because llama.cpp needs layers of both kinds",
        )

    def _experts(self) -> Iterator[tuple[bool, str]]:
        n, n_used = self.n_expert, self.n_expert_used
        yield n > _MAX_EXPERTS, f"llama.cpp takes at most {_MAX_EXPERTS} experts"
        yield n == 1, "n_expert must be 0 or at least 2"
        yield n == 0 and n_used > 0, "n_expert_used needs n_expert"
        yield n > 0 and not 1 <= n_used <= n, "n_expert_used must be 1 … n_expert"

    def _mamba(self) -> Iterator[tuple[bool, str]]:
        if self.architecture == "mamba":
            yield self.n_head != 1, "a mamba model has no heads: n_head must be 1"
            yield self.n_ff != 2 * self.n_embd, "a mamba model needs n_ff = 2 × n_embd"
            yield self.n_expert > 0, "a mamba model has no experts: leave n_expert out"

    def _embeddings(self) -> Iterator[tuple[bool, str]]:
        name = self.architecture
        has_window = name in ("llama", "gemma-embedding", "gemma3")
        yield (
            name not in ("llama", "mamba") and self.n_expert > 0,
            f"{name} models are made without experts: leave n_expert out",
        )
        yield (
            not has_window and self.n_window > 0,
            f"{name} models have no sliding window: leave n_window out",
        )
        is_gemma = name in ("gemma-embedding", "gemma3")
        yield is_gemma and not self.n_window, f"{name} models need a sliding window: give n_window"
        yield (
            name == "mamba" and bool(self.pooling),
            "mamba models have no pooling: leave pooling out",
        )
        yield (
            self.pooling == "rank" and name not in _RANKERS,
            f"pooling rank needs the architecture {' or '.join(_RANKERS)}",
        )

    def _rows(self) -> Iterator[tuple[bool, str]]:
        """What the quantisers refuse: rows that are not a multiple of what is quantised together.

        llama.cpp gives a matrix of such rows another type, and a file is not of its type where that befalls all.
        """
        kind, widths = self.weight_type, {"n_embd": self.n_embd, "n_ff": self.n_ff}
        n_each = kind.n_block if kind.is_direct else _QUANTISER_BLOCK
        for name, width in widths.items():
            yield bool(width % n_each), f"{self.type} needs {name} to be a multiple of {n_each}"
        yield (
            all(width % kind.n_block for width in widths.values()),
            f"{self.type} needs n_embd or n_ff to be a multiple of {kind.n_block}",
        )
        yield (
            self.type == "mxfp4_moe" and not self.n_expert,
            f"{self.type} needs experts: give n_expert",
        )

    @property
    def weight_type(self) -> WeightType:
        """What is known of `type`."""
        return WEIGHT_TYPES[self.type]

    @property
    def gguf_architecture(self) -> str:
        """The name by which llama.cpp knows how to compute it: Granite's is llama's, with windows."""
        return (
            "granite_swa" if self.architecture == "llama" and self.n_window else self.architecture
        )

    @property
    def is_encoder(self) -> bool:
        """Whether every token sees the whole text: such a model generates nothing."""
        return self.architecture in (*BERTS, "gemma-embedding")

    @property
    def n_head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def n_state(self) -> int:
        """Numbers that a mamba remembers for each of its channels. Source: the Mamba paper's d_state."""
        return 16

    @property
    def n_rank(self) -> int:
        """Width of a mamba's time steps before they are spread over the channels. Source: the Mamba paper's dt_rank."""
        return -(-self.n_embd // 16)

    @property
    def substituted_rows(self) -> list[int]:
        """Widths of rows to which llama.cpp's quantiser gives another type than `type`, in its files too."""
        return [n for n in sorted({self.n_embd, self.n_ff}) if n % self.weight_type.n_block]

    def has_window(self, i_layer: int) -> bool:
        """Whether a layer sees the last `n_window` positions alone."""
        return bool(self.n_window) and (i_layer + 1) % self.full_every != 0


SHAPES: Mapping[str, Shape] = {
    "test": Shape(2, 64, 2, 1, 128, 1024, "q8_0"),
    "exact": Shape(6, 384, 6, 2, 1024, 4096, "q8_0"),
    "tiny": Shape(4, 256, 4, 2, 768, 32_000, "q8_0"),
    "small": Shape(12, 768, 12, 4, 2048, 151_936, "q8_0"),
    "0.5b": Shape(24, 896, 14, 2, 4864, 151_936, "q8_0", tied=True),
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256, "q8_0", 131_072, tied=True),
    "3b": Shape(28, 3072, 24, 8, 8192, 128_256, "q8_0", 131_072, tied=True),
    "8b": Shape(32, 4096, 32, 8, 14_336, 128_256, "q8_0", 131_072),
    "mamba": Shape(2, 64, 1, 1, 128, 1024, "q8_0", architecture="mamba"),
    "bert": Shape(2, 64, 2, 2, 128, 1024, "q8_0", 512, architecture="bert", pooling="mean"),
    "bert-cls": Shape(2, 64, 2, 2, 128, 1024, "q8_0", 512, architecture="bert", pooling="cls"),
    "bert-rerank": Shape(2, 64, 2, 2, 128, 1024, "q8_0", 512, architecture="bert", pooling="rank"),
    "nomic-bert": Shape(
        2, 64, 2, 2, 128, 1024, "q8_0", 2048, architecture="nomic-bert", pooling="mean"
    ),
    "jina-bert-v2": Shape(
        2, 64, 2, 2, 128, 1024, "q8_0", 8192, architecture="jina-bert-v2", pooling="mean"
    ),
    "gemma-embedding": Shape(
        2, 64, 2, 1, 128, 1024, "q8_0", 2048,
        architecture="gemma-embedding", pooling="mean", n_window=64,
    ),
    "qwen3-embedding": Shape(
        2, 64, 2, 1, 128, 1024, "q8_0", tied=True, architecture="qwen3", pooling="last"
    ),
    "qwen3-rerank": Shape(
        2, 64, 2, 1, 128, 1024, "q8_0", tied=True, architecture="qwen3", pooling="rank"
    ),
    "qwen2-vl": Shape(2, 64, 2, 1, 128, 1024, "q8_0", architecture="qwen2vl"),
    "gemma3": Shape(2, 64, 2, 1, 128, 1024, "q8_0", architecture="gemma3", n_window=64),
    "minilm": Shape(6, 384, 12, 12, 1536, 30_522, "q8_0", 512, architecture="bert", pooling="mean"),
    "qwen3-0.6b-embedding": Shape(
        28, 1024, 16, 8, 3072, 151_669, "q8_0", tied=True, architecture="qwen3", pooling="last"
    ),
}  # fmt: skip
"""`test`, `mamba` and the tiny ones for embeddings and pictures run in milliseconds, `exact` shows rounding
differences, the others are for speed.

Source: the `config.json` of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, all-MiniLM-L6-v2 and
Qwen3-Embedding-0.6B, whose heads are wider, 128.
"""


def gguf_package(what: str) -> ModuleType:
    """Return the package that writes models; a `ConfigError` says that `what` needs it."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{what} needs the gguf package: pip install gguf") from error
    return gguf  # type: ignore[no-any-return]
