"""Warnings of options without effect: those of requests, in results, and those of loading, in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cbatch.core.plan import KvCapabilities
    from cbatch.engine_options import EngineOptions
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions, Sampling


class MergedRequest(NamedTuple):
    """A request: its merged options, and the sampling values that they become."""

    prompt: BatchPrompt
    options: RunOptions
    sampling: Sampling


class Loaded(NamedTuple):
    """A model that was loaded with options."""

    options: EngineOptions
    memory: KvCapabilities
    has_devices: bool
    """Whether there is a device other than the CPU that can compute."""


_Without: TypeAlias = "Callable[[MergedRequest], bool]"


def _has_no_dry(asked: MergedRequest) -> bool:
    return not asked.sampling.dry_multiplier


def _has_no_penalty(asked: MergedRequest) -> bool:
    s = asked.sampling
    return s.repeat_penalty == 1 and not s.presence_penalty and not s.frequency_penalty


def _looks_at_nothing(asked: MergedRequest) -> bool:
    return not asked.sampling.repeat_last_n


def _is_no_chat(asked: MergedRequest) -> bool:
    return asked.prompt.messages is None


def _offers_no_tools(asked: MergedRequest) -> bool:
    return not asked.options.offered_tools


def _samples_nothing(asked: MergedRequest) -> bool:
    return bool(asked.options.prefill_only) or asked.options.max_tokens == 0


_NEUTRAL: Mapping[str, float] = {
    "dry_multiplier": 0,
    "dry_penalty_last_n": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "prompt_logprobs_start": 0,
    "repeat_last_n": 0,
    "repeat_penalty": 1,
    "strict_max_tokens": False,
    "xtc_probability": 0,
}
"""Values that ask for nothing, so that nothing is missed."""

_OF_A_REQUEST: tuple[tuple[tuple[str, ...], _Without, str], ...] = (
    (("xtc_threshold",), lambda a: not a.sampling.xtc_probability, "without xtc_probability"),
    (
        ("xtc_probability",),
        lambda a: a.sampling.xtc_threshold > 0.5,
        "with xtc_threshold above 0.5",
    ),
    (
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        _has_no_dry,
        "without dry_multiplier",
    ),
    (("dry_multiplier",), lambda a: a.sampling.dry_base < 1, "with dry_base below 1"),
    (("dry_multiplier",), lambda a: not a.sampling.dry_penalty_last_n, "with dry_penalty_last_n=0"),
    (
        ("repeat_last_n",),
        _has_no_penalty,
        "without repeat_penalty, presence_penalty or frequency_penalty",
    ),
    (
        ("repeat_penalty", "presence_penalty", "frequency_penalty"),
        _looks_at_nothing,
        "with repeat_last_n=0",
    ),
    (("thinking_budget",), _is_no_chat, "without messages: only chats think"),
    (("parallel_tool_calls",), _offers_no_tools, "without tools"),
    (
        ("prompt_logprobs_start",),
        lambda a: a.options.n_prompt_logprobs is None,
        "without prompt_logprobs",
    ),
    (("strict_max_tokens",), lambda a: a.options.max_tokens is None, "without max_tokens"),
    (("logits_processor",), _samples_nothing, "if nothing is sampled"),
    (("strict_max_tokens",), lambda a: bool(a.options.n_discard), "with n_discard"),
)
"""Options that are given, when they have no effect, and how the warning goes on."""

_OF_A_LOAD: tuple[tuple[tuple[str, ...], Callable[[Loaded], bool], str], ...] = (
    (
        ("admission",),
        lambda m: m.memory.kind != "unified",
        "without unified memory (kv='unified'), where each slot has its own cells",
    ),
    (
        ("checkpoint_mib",),
        lambda m: m.memory.can_trim,
        "with this model, which shares prefixes without checkpoints",
    ),
    (("checkpoint_mib",), lambda m: not m.options.share_prefixes, "with share_prefixes=False"),
    (
        ("cache_media",),
        lambda m: m.options.mmproj is None,
        "without mmproj, which encodes pictures and sounds",
    ),
    (
        ("n_gpu_layers", "main_gpu", "split_mode", "tensor_split"),
        lambda m: not m.has_devices,
        "here: there is no GPU, or llama-cpp-python was built without support for it",
    ),
)


def idle_options(prompt: BatchPrompt, options: RunOptions, sampling: Sampling) -> Iterator[str]:
    """Yield a warning for each option of a request that has no effect."""
    asked = MergedRequest(prompt, options, sampling)
    for names, is_idle, why in _OF_A_REQUEST:
        given = [
            name
            for name in names
            if (value := getattr(options, name)) is not None
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        ]
        if given and is_idle(asked):
            yield from (f"{name} has no effect {why}" for name in given)


def idle_settings(
    options: EngineOptions, memory: KvCapabilities, *, has_devices: bool
) -> Iterator[str]:
    """Yield a warning for each option of a load that has no effect on the model that was loaded."""
    loaded = Loaded(options, memory, has_devices)
    for names, is_idle, why in _OF_A_LOAD:
        given = [name for name in names if getattr(options, name) not in (None, 0, -1)]
        if given and is_idle(loaded):
            yield from (f"{name}={getattr(options, name)!r} has no effect {why}" for name in given)
