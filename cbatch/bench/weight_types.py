"""The types of weights that a synthetic model may have: names as llama.cpp's, sizes, and who writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
