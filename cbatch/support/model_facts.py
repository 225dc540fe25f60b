"""What a loaded model is, as servers tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.support.checks import given_only


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model's sizes, texts and adapters; 0, "" and -1 for what it does not have."""

    n_vocab: int
    n_ctx_train: int = 0
    """Tokens that the model was trained for."""
    n_params: int = 0
    n_bytes: int = 0
    """Bytes of all weights."""
    path: str = ""
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    bos_id: int = -1
    """The token that begins a raw prompt, where the model has one."""
    eos_id: int = -1
    end_ids: tuple[int, ...] = ()
    """Every token that ends an answer, such as EOS and the end of a chat's turn."""
    adds_bos: bool = False
    """Whether the token `bos_id` is put before raw prompts."""
    adapters: tuple[str, ...] = ()
    """The names of the LoRA adapters that requests may ask for."""
    fim: dict[str, int] = field(default_factory=dict)
    """The model's fill-in-the-middle tokens by name, as far as it has them: pre, suf, mid, rep, sep."""
    limits_thinking: bool = True
    """Whether `thinking_budget` is served, as it is where chats have no thinking."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling values that the model's file recommends, by the names of `RunOptions`."""
    can_generate: bool = True
    can_see: bool = False
    """Whether chats may have pictures."""
    can_hear: bool = False
    """Whether chats may have sound."""
    audio_rate: int = 0
    """Samples per second that bare samples of a sound must have."""
    can_embed: bool = False
    """Whether the model has an embedding of its own, or is one for chats, whose hidden states are one."""
    can_rerank: bool = False
    """Whether it scores documents: by a classifier, or by what a model for chats says of each."""
    has_probabilities: bool = False
    """Whether the classifier's outputs are probabilities; else they are logits."""
    n_embedding: int = 0
    """Numbers of a vector."""
    pooling: str = ""
    """How a text's vector is made of its tokens' by default: "mean", "cls", "last" or "rank"; "" where none is made."""
    is_causal: bool = True
    """Whether each token sees only those before it."""
    n_embed_max: int = 0
    """Tokens of the longest text that can be embedded."""
    company: str = "together: not tried"
    """How several sequences are computed; see `Engine.company`."""

    __repr__ = given_only
