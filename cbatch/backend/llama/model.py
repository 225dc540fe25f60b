"""A loaded model: its metadata, its vocabulary, and the contexts that compute with it; freed once."""

from __future__ import annotations

import ctypes
import math
import re
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.fingerprint import Parts, digest_of_loaded, model_parts, tensor_types
from cbatch.backend.llama.gguf import DamagedError, Header, read_header
from cbatch.backend.llama.vocab import LlamaVocab
from cbatch.errors import EngineClosedError
from cbatch.options import RunOptions
from cbatch.support.checks import readable
from cbatch.support.interrupts import Uses
from cbatch.support.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.embedding import Pooling

# Source: llama-model.cpp, llama_model_meta_key_str; ours are the names of `RunOptions`.
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}


_POOLINGS: Mapping[str, Pooling] = {
    str(llama_cpp.LLAMA_POOLING_TYPE_MEAN): "mean",
    str(llama_cpp.LLAMA_POOLING_TYPE_CLS): "cls",
    str(llama_cpp.LLAMA_POOLING_TYPE_LAST): "last",
    str(llama_cpp.LLAMA_POOLING_TYPE_RANK): "rank",
}
"""As files have them; without one, or with "none", pooling is left open."""

_NON_CAUSAL = frozenset(
    (
        *("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert"),
        *("eurobert", "modern-bert", "gemma-embedding"),
    )
)
"""Architectures without a cache, whatever their files say. Source: src/llama-model.cpp, create_memory."""

_NO_TEXT = frozenset(("wavtokenizer-dec", "eagle3", "dflash", "gemma4-assistant"))
"""Architectures that need something else than tokens. Source: src/llama-context.cpp, ctx_other."""

N_EMBED_DEFAULT = 512
"""Tokens of the longest text where the file does not say what the model was trained for. Our choice."""


def is_causal(metadata: Mapping[str, str]) -> bool:
    """Whether a file is of a model whose tokens see only those before them."""
    arch = metadata.get("general.architecture", "")
    return arch not in _NON_CAUSAL and metadata.get(f"{arch}.attention.causal") != "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which devices hold a model's layers: the values of `EngineOptions`; llama.cpp chooses where one is None."""

    n_gpu_layers: int | None = None
    split_mode: str | None = None
    main_gpu: int | None = None
    tensor_split: Sequence[float] | None = None


class Context(Protocol):
    """A context that computes with a model."""

    def give_up(self) -> None:
        """Free what the context has of the model, after the run in flight. From any thread."""


class LlamaModel:
    """Owns a `llama_model *`, or borrows a `llama_cpp.Llama`'s, which it then never frees."""

    def __init__(
        self,
        pointer: Any,
        name: str,
        *,
        placement: Placement | None = None,
        owner: object = None,
        template: str | None = None,
        has_weights: bool = True,
        parts: Parts | None = None,
    ) -> None:
        """Read the model's metadata and vocabulary.

        Args:
            pointer: `llama_model *` as ctypes gives it.
            name: its path; error messages begin with it.
            owner: the object that frees it; `None` for this object.
            template: Jinja that replaces the model's own chat template.
            parts: its files as they were before they were read; None for as they are now.
        """
        self.parts = model_parts(name) if parts is None else parts
        """Its files; empty where they are gone."""
        self.digest = digest_of_loaded(self.parts) if has_weights else ""
        """Stands for what was loaded; empty if the files are gone or have changed meanwhile."""
        self.placement = placement or Placement()
        self.has_weights = has_weights
        self.kernels = ""
        """Which products of cbatch's own compute it; empty for llama.cpp's. Rounding depends on them."""
        self._pointer: Any = pointer
        self._owner = owner
        self._end = ""
        """Why the model is closed; empty while it is open."""
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        """The contexts that compute with the model."""
        self._amid: dict[int, list[Callable[[], object]]] = {}
        """What is to be done behind the graph amid which a thread is, by the thread."""
        self._uses = Uses()
        """Work in progress on the model outside a context; `close` waits for it."""
        self.name = name
        self.metadata: Mapping[str, str] = read_metadata(pointer)
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(pointer))
        self.n_layers = int(llama_cpp.llama_model_n_layer(pointer))
        """Layers, without the output's."""
        self.n_bytes = int(llama_cpp.llama_model_size(pointer))
        """Bytes of all weights."""
        self.n_params = int(llama_cpp.llama_model_n_params(pointer))
        self.has_states = bool(
            llama_cpp.llama_model_is_recurrent(pointer) or llama_cpp.llama_model_is_hybrid(pointer)
        )
        """Whether the model has recurrent layers, alone or beside attention."""
        self.has_cells = not llama_cpp.llama_model_is_recurrent(pointer)
        """Whether the model has attention, alone or beside recurrent layers."""
        self.is_encoder = bool(llama_cpp.llama_model_has_encoder(pointer))
        """Whether `llama_encode` computes it."""
        self.is_causal = is_causal(self.metadata) and not self.is_encoder
        """Whether a token sees only those before it."""
        self.n_width = int(llama_cpp.llama_model_n_embd(pointer))
        """Numbers of a token's vector between layers."""
        self.n_embedding = int(llama_cpp.llama_model_n_embd_out(pointer))
        """Numbers of a token's vector after the last layer."""
        self.n_classes = int(llama_cpp.llama_model_n_cls_out(pointer))
        """Scores of the classifier, where the model has one."""
        own = self.metadata.get("tokenizer.chat_template")
        self.vocab = LlamaVocab(
            self,
            template=template or own,
            template_name="the given chat_template" if template else "the model's chat template",
        )

    @property
    def has_window(self) -> bool:
        """Whether layers have a sliding window: cells that have left it are not saved."""
        return bool(llama_cpp.llama_model_n_swa(self.pointer))

    @property
    def has_plain_cells(self) -> bool:
        """Whether every layer keeps a cell of each token."""
        return not (self.has_states or self.has_window)

    @property
    def is_borrowed(self) -> bool:
        """Whether a `llama_cpp.Llama` owns it, which may have loaded its file in another way."""
        return self._owner is not None

    @property
    def pointer(self) -> Any:
        """The `llama_model *`, valid until `close`.

        Raises:
            EngineClosedError: the model is closed.
        """
        self.check_open()
        return self._pointer

    def check_open(self) -> None:
        """Refuse to work on a model that is freed.

        Raises:
            EngineClosedError: it is closed, by us or by the `llama_cpp.Llama` that it is borrowed from.
        """
        if self._end:
            raise EngineClosedError(self._end)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model from being freed during the block. From any thread; raises as `check_open`."""
        with self._uses.one(self.check_open):
            yield

    @property
    def architecture(self) -> str:
        """Such as "llama"."""
        return self.metadata.get("general.architecture", "")

    @property
    def pooling(self) -> Pooling | None:
        """How the file says that a text's vector is made; None where it leaves that open."""
        kind = self.metadata.get(f"{self.architecture}.pooling_type", "")
        return _POOLINGS.get(kind)

    @cached_property
    def why_not_generative(self) -> str:
        """Why the model generates no text; empty where it does."""
        arch = self.architecture
        if self.is_encoder or not llama_cpp.llama_model_has_decoder(self.pointer):
            return f"an encoder model ({arch}) cannot generate text here"
        if llama_cpp.llama_model_is_diffusion(self.pointer):
            return f"a diffusion model ({arch}) cannot generate text token by token"
        if not self.is_causal:
            return f"a model with non-causal attention ({arch}) cannot generate text"
        if self.pooling is not None:
            return f"an embedding or reranking model ({arch}, with pooling) cannot generate text"
        return "" if self.vocab.n_vocab else f"a model without vocabulary ({arch}) has no text"

    @property
    def can_embed(self) -> bool:
        """Whether the model gives vectors, or scores of documents."""
        is_both = self.is_encoder and llama_cpp.llama_model_has_decoder(self.pointer)
        is_other = llama_cpp.llama_model_is_diffusion(self.pointer) or self.architecture in _NO_TEXT
        return bool(self.vocab.n_vocab) and not (is_both or is_other) and self._has_readable_vectors

    @cached_property
    def _has_readable_vectors(self) -> bool:
        """Whether a graph's vectors are as wide as llama.cpp reads them; where they are less, it ends the process.

        A dense layer behind the last one makes other widths. Without one, `n_embedding` is the width of what a head for
        draft tokens takes. Source: src/llama-context.cpp, decode; src/models/deepseek4.cpp, n_embd_out_impl.
        """
        if self.n_embedding == self.n_width:
            return True
        return any(name.startswith("dense_") for name in self._tensors)

    @property
    def _tensors(self) -> Sequence[str]:
        return [name for name, _ in tensor_types(self.parts)]

    @property
    def n_embed_max(self) -> int:
        """Tokens of the longest text that it can embed: those that it was trained for."""
        return self.n_ctx_train or N_EMBED_DEFAULT

    @cached_property
    def file_type(self) -> str:
        """The type of most weights, such as "q4_k_m"; counted from the tensors where the file does not name it."""
        found = llama_cpp.llama_model_ftype(self.pointer) & ~llama_cpp.LLAMA_FTYPE_GUESSED
        for name in dir(llama_cpp):
            if name.startswith("LLAMA_FTYPE_") and getattr(llama_cpp, name) == found:
                return re.sub("^LLAMA_FTYPE_(MOSTLY_|ALL_)?", "", name).lower()
        return "unknown"

    def number_of(self, key: str, default: float) -> float:
        """Return a number of the file's metadata. llama.cpp writes it as this process's locale does.

        Raises:
            ValueError: the file has something else there.
        """
        said = self.metadata.get(key)
        return default if said is None else float(said.replace(",", "."))

    @cached_property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Sampling values that the file recommends and `RunOptions` accepts, by their names there."""
        found: dict[str, float] = {}
        for name, key in _SAMPLING_KEYS.items():
            # no number, or one that `RunOptions` refuses
            with suppress(ValueError, OverflowError):
                value = self.number_of(key, math.nan)
                if name in ("top_k", "repeat_last_n"):
                    value = int(value)
                RunOptions.of({name: value})
                found[name] = value
        return found

    @cached_property
    def integers(self) -> Mapping[str, tuple[int, ...]]:
        """The file's arrays of integers, which llama.cpp has no function for."""
        return self.read_header().integers

    @cached_property
    def has_learned_positions(self) -> bool:
        """Whether the model knows no other positions than those in a tensor of its file. Source: src/llama-arch.cpp."""
        return "position_embd.weight" in self._tensors

    @cached_property
    def n_window_short(self) -> int | None:
        """Tokens of the longest window with the short ones of two sets of rope factors; None where there is one set.

        Source: src/llama-model.cpp, get_rope_factors, and load_hparams, n_ctx_orig_yarn.
        """
        said = self.metadata.get(f"{self.architecture}.rope.scaling.original_context_length", "")
        names = self._tensors
        is_known, has_two = bool(names), any(name.startswith("rope_factors_") for name in names)
        if is_known and not has_two:
            return None
        return int(said) if said.isdigit() else self.n_ctx_train if has_two else None

    def read_header(self) -> Header:
        """Return what the file says of itself; an empty header where the file cannot be read."""
        with suppress(DamagedError):
            return read_header(Path(self.name), "") or Header(0)
        return Header(0)

    @contextmanager
    def amid_graphs(self) -> Iterator[None]:
        """Note that the calling thread computes graphs in the block, and may do other work amid them."""
        me = threading.get_ident()
        self._amid.setdefault(me, [])
        try:
            yield
        finally:
            for work in self._amid.pop(me):
                work()

    def put_off(self, work: Callable[[], object]) -> bool:
        """Have `work` done behind the graph amid which the calling thread is; False, and nothing, where it is not."""
        later = self._amid.get(threading.get_ident())
        if later is not None:
            later.append(work)
        return later is not None

    def give_up(self) -> None:
        """Close a borrowed model before its owner frees it; contexts end the run in flight first."""
        self._end = (
            f"{self.name}: the llama_cpp.Llama that owns this model was closed under its engine: "
            "close the engine first"
        )
        for context in list(self.contexts):
            context.give_up()
        self.close()

    def close(self) -> None:
        """Free the model, unless it is borrowed. Twice is harmless; no context may be using it."""
        with self._uses.changed:
            self._end = self._end or f"{self.name} is closed"
            self._uses.changed.wait_for(lambda: not self._uses.n)
            pointer, self._pointer = self._pointer, None
            self.vocab.close()
            if pointer is not None and self._owner is None:
                llama_cpp.llama_model_free(pointer)
            self._owner = None


def facts_of(
    model: LlamaModel, *, adapters: Sequence[str] = (), company: str = "together: not tried"
) -> ModelFacts:
    """Return what a model is, for those who ask."""
    can_generate, vocab = not model.why_not_generative, model.vocab
    pooling = model.pooling or ("last" if model.is_causal else "mean")
    can_embed = model.can_embed
    return ModelFacts(
        n_vocab=vocab.n_vocab,
        n_ctx_train=model.n_ctx_train,
        n_params=model.n_params,
        n_bytes=model.n_bytes,
        path=readable(model.name),
        chat_template=vocab.template,
        bos_token=vocab.bos_text,
        eos_token=vocab.eos_text,
        bos_id=vocab.bos_id,
        eos_id=vocab.eos_id,
        end_ids=vocab.end_tokens,
        adds_bos=vocab.adds_bos,
        fim=dict(vocab.fim),
        adapters=tuple(adapters),
        sampling=dict(model.sampling_defaults),
        can_generate=can_generate,
        can_see=not vocab.picture_refusal,
        can_hear=not vocab.sound_refusal,
        audio_rate=vocab.audio_rate,
        can_embed=can_embed and pooling != "rank",
        can_rerank=(can_embed and pooling == "rank") or (can_generate and vocab.has_pieces),
        # Source: llama.cpp's src/llama-graph.cpp, build_pooling
        has_probabilities=model.architecture in ("qwen3", "qwen3vl"),
        n_embedding=model.n_embedding if can_embed else 0,
        pooling=pooling if can_embed else "",
        is_causal=model.is_causal,
        n_embed_max=model.n_embed_max if can_embed else 0,
        company=company,
    )


def read_metadata(pointer: Any) -> dict[str, str]:
    """Return the GGUF's key-value pairs as text; arrays are not among them."""
    return {
        _read_text(llama_cpp.llama_model_meta_key_by_index, pointer, i): _read_text(
            llama_cpp.llama_model_meta_val_str_by_index, pointer, i
        )
        for i in range(llama_cpp.llama_model_meta_count(pointer))
    }


def _read_text(read: Callable[..., int], *args: Any) -> str:
    """Call a llama.cpp function that fills a buffer and returns the length it needs."""
    n_room = 256
    while True:
        buffer = ctypes.create_string_buffer(n_room)
        n = read(*args, buffer, n_room)
        if n < n_room:
            return buffer.raw[: max(n, 0)].decode(errors="replace")
        n_room = n + 1
