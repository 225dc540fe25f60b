"""llama.cpp's own sampler chain, in its default order: the oracle of our sampling, and its rival."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cbatch.options import Sampling

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class LlamaChain:
    """The samplers that llama.cpp makes of a `Sampling`, each only where it changes something.

    Source: common/sampling.cpp, common_sampler_init, and common/common.h, common_params_sampling.samplers.
    """

    def __init__(
        self, sampling: Sampling, n_vocab: int, *, vocab: Any = None, breakers: Sequence[str] = ()
    ) -> None:
        """Make the chain.

        Args:
            sampling: how to choose; `dry_breakers` is not looked at.
            n_vocab: logits in a row.
            vocab: `llama_vocab *`, where there are breakers.
            breakers: DRY's strings.
        """
        self._n_vocab = n_vocab
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        for sampler in (
            *_edits(sampling, n_vocab, vocab, breakers),
            *(_greedy() if sampling.temperature == 0 else _filters(sampling)),
        ):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens into what penalties and DRY see."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def apply(self, logits: NDArray[np.float32]) -> tuple[int, dict[int, float]]:
        """Return the token that is chosen from a row, and every candidate's probability.

        Args:
            logits: (n_vocab,) float32, read only.
        """
        data = np.zeros(self._n_vocab, _TOKEN_DATA)
        data["id"], data["logit"] = np.arange(self._n_vocab), logits
        pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(pointer, self._n_vocab, -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        start = ctypes.addressof(array.data.contents) - data.ctypes.data
        left = data[start // _TOKEN_DATA.itemsize :][: array.size]
        found = dict(zip(left["id"].tolist(), left["p"].tolist(), strict=True))
        return int(left["id"][array.selected]), found

    def sample(self, ctx: Any, i_token: int) -> int:
        """Return what llama.cpp chooses from a row of a context; it joins what penalties and DRY see."""
        return int(llama_cpp.llama_sampler_sample(self._chain, ctx, i_token))

    def close(self) -> None:
        """Free the samplers; twice is harmless."""
        chain, self._chain = self._chain, None
        if chain is not None:
            llama_cpp.llama_sampler_free(chain)


def _edits(s: Sampling, n_vocab: int, vocab: Any, breakers: Sequence[str]) -> Iterator[Any]:
    if s.logit_bias:
        biases = (llama_cpp.llama_logit_bias * len(s.logit_bias))(*s.logit_bias)
        yield llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), biases)
    if (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (1, 0, 0):
        yield llama_cpp.llama_sampler_init_penalties(
            n_vocab, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.has_dry:
        strings = (ctypes.c_char_p * len(breakers))(*(b.encode() for b in breakers))
        yield llama_cpp.llama_sampler_init_dry(
            vocab,
            s.dry_multiplier,
            s.dry_base,
            s.dry_allowed_length,
            s.dry_penalty_last_n,
            strings,
            len(breakers),
        )


def _greedy() -> Iterator[Any]:
    yield llama_cpp.llama_sampler_init_greedy()


def _filters(s: Sampling) -> Iterator[Any]:
    if s.top_n_sigma > 0:
        yield llama_cpp.llama_sampler_init_top_n_sigma(s.top_n_sigma)
    if s.top_k > 0:
        yield llama_cpp.llama_sampler_init_top_k(s.top_k)
    if s.typical_p < 1:
        yield llama_cpp.llama_sampler_init_typical(s.typical_p, 0)
    if s.top_p < 1:
        yield llama_cpp.llama_sampler_init_top_p(s.top_p, 0)
    if s.min_p > 0:
        yield llama_cpp.llama_sampler_init_min_p(s.min_p, 0)
    if s.xtc_probability > 0:
        yield llama_cpp.llama_sampler_init_xtc(
            s.xtc_probability, s.xtc_threshold, 0, s.seed % 2**32
        )
    yield llama_cpp.llama_sampler_init_temp(s.temperature)
    yield llama_cpp.llama_sampler_init_dist(s.seed % 2**32)
