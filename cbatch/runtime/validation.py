"""Checks that precede queueing: of options, of chats, and of results to extend."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from cbatch.core.span import N_TARGETS_MAX
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.response import BatchResult, TokenLogprob
from cbatch.runtime.output import Origin
from cbatch.support.checks import MAX_INT, shown
from cbatch.support.plain import int_of, is_a

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Backend, Vocab
    from cbatch.core.plan import KvCapabilities
    from cbatch.engine_options import ScheduleOptions
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions

EXTENSIBLE = ("length", "cancelled", "timeout")
"""Finish reasons after which an answer can be continued."""


def check_fits(options: RunOptions, backend: Backend, schedule: ScheduleOptions) -> None:
    """Refuse options that an engine's model, memory or schedule does not support."""
    _check_tokens(options, backend.vocab.n_vocab)
    check_priority(options, schedule)
    check_slot(options.slot, backend.n_slots)
    _check_key(options, backend.memory)
    _check_scoring(options, backend)
    _check_window(options, backend)
    check_adapters(options, backend)


def check_priority(options: RunOptions, schedule: ScheduleOptions) -> None:
    """Refuse a priority that has no effect."""
    if options.priority is not None and schedule.policy != "priority":
        raise ConfigError(
            f"priority={options.priority} has no effect with policy={schedule.policy!r}: "
            "load the engine with policy='priority'"
        )


def check_slot(slot: int | None, n_slots: int) -> None:
    """Refuse a slot that is not there."""
    if slot is not None and slot >= n_slots:
        raise ConfigError(
            f"slot={slot} is not a slot of this engine, which has 0 … {n_slots - 1}: "
            "load it with a higher parallel, or leave slot out"
        )


def check_adapters(options: RunOptions, backend: Backend) -> None:
    """Refuse adapters that are not loaded."""
    for name in options.adapter or ():  # also those of scale 0
        if name not in backend.adapters:
            known = ", ".join(backend.adapters) or "none"
            raise ConfigError(f"adapter {name!r} is not loaded; loaded are: {known}")


def _check_tokens(options: RunOptions, n_vocab: int) -> None:
    for name in ("stop_token_ids", "logit_bias"):
        highest = max(getattr(options, name) or (0,))
        if highest >= n_vocab:
            message = f"{name} has {shown(highest)}, which is not in the vocabulary of {n_vocab}"
            raise ConfigError(message)


def _check_key(options: RunOptions, memory: KvCapabilities) -> None:
    if (options.save_cache or options.cache_required) and options.cache_key is None:
        raise ConfigError("save_cache and cache_required need a cache_key: a name for the cells")
    if options.cache_key is None:
        return
    if not memory.can_save:
        raise ConfigError(
            f"cache_key={options.cache_key!r} cannot be used: llama.cpp cannot save this model's memory"
        )
    if not memory.can_check:
        raise ConfigError(
            f"cache_key={options.cache_key!r} cannot be used: this version of cbatch does not know the layout of this "
            "model's memory and could not check saved cells"
        )


def _check_window(options: RunOptions, backend: Backend) -> None:
    if (options.n_keep or 0) > 0 and options.n_discard is None:
        raise ConfigError(f"n_keep={options.n_keep} has no effect without n_discard")
    if not options.n_discard or (backend.memory.can_shift and not backend.cuts):
        return
    refused = f"n_discard={options.n_discard} cannot be used with "
    if backend.memory.can_shift:
        raise ConfigError(
            f"{refused}exact=True: moved cells are not bit-identical to computed ones"
        )
    raise ConfigError(f"{refused}this model: its cells cannot be moved")


def _check_scoring(options: RunOptions, backend: Backend) -> None:
    """Refuse some uses of the cache: a scored prompt needs every token computed, and may differ in bits from others."""
    if options.n_prompt_logprobs is None:
        return
    if options.cache_required:
        raise ConfigError(
            "cache_required cannot be used with prompt_logprobs or echoed logprobs, which need the whole prompt to be "
            "computed: leave cache_required out"
        )
    if options.save_cache and backend.cuts.multiple > N_TARGETS_MAX:
        raise ConfigError(
            f"save_cache with prompt_logprobs or echoed logprobs and exact=True needs n_ubatch={N_TARGETS_MAX} or "
            f"less, not {backend.cuts.multiple}: save the cells with a separate request"
        )


def check_chat(prompt: BatchPrompt, options: RunOptions, vocab: Vocab) -> None:
    """Refuse options that are for chats alone, or for prompts that are not chats, or that the template cannot do."""
    if options.echo and prompt.messages is not None:
        raise ConfigError(
            "echo is for prompts of text or tokens, but this prompt has messages: leave echo out; prompt_logprobs "
            "gives the log-probability of each prompt token"
        )
    if prompt.has_media:
        _check_media(prompt, options, vocab)
    tools = options.offered_tools
    for name in ("tools", "chat_template_kwargs"):
        if getattr(options, name) and prompt.messages is None:
            raise ConfigError(
                f"{name} is for the chat template, but this prompt has no messages: give messages, "
                f"or {name}={'[]' if name == 'tools' else '{}'} with the prompt"
            )
    if tools and vocab.tool_refusal:
        raise UnsupportedOptionError("tools", reason=vocab.tool_refusal)


def _check_media(prompt: BatchPrompt, options: RunOptions, vocab: Vocab) -> None:
    """Refuse pictures and sounds that the model cannot take, and options that look at each token of a prompt."""
    if prompt.has_pictures and vocab.picture_refusal:
        raise ConfigError(vocab.picture_refusal)
    if prompt.has_sounds and vocab.sound_refusal:
        raise ConfigError(vocab.sound_refusal)
    asked = {
        "choice_probs": options.choice_probs,
        "prompt_logprobs": options.prompt_logprobs is not None,
        "cache_key": options.cache_key is not None,
        "n_discard": bool(options.n_discard),
        "logits_processor": options.logits_processor is not None,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ConfigError(f"{name} cannot be used with pictures or sound yet: leave it out")


def check_labels(prompt: BatchPrompt, options: RunOptions) -> None:
    """Refuse options that do not go with the probabilities of labels, for which nothing is sampled."""
    if not options.choice_probs:
        return
    if options.choice is None:
        raise ConfigError("choice_probs needs choice, the list of possible answers")
    for text, longer in pairwise(sorted(options.choice)):
        if longer.startswith(text):
            raise ConfigError(
                f"choice_probs: {text!r} is the beginning of {longer!r}, and so never less likely: give texts that do "
                "not begin with each other"
            )
    if prompt.tokens is not None:
        raise ConfigError("choice_probs is for chats and texts, but this prompt is tokens")
    asked = {
        "n": options.n_choices > 1,
        "echo": options.echo,
        "prompt_logprobs": options.prompt_logprobs is not None,
        "prefill_only": options.prefill_only,
        "save_cache": options.save_cache,
        "pause_every": options.pause_every is not None,
        "slot": options.slot is not None,
        "logits_processor": options.logits_processor is not None,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ConfigError(f"{name} cannot be used with choice_probs: leave one of them out")


def origin_of(result: BatchResult, owner: str) -> Origin:
    """Return the origin of a result; refuse one of another engine than `owner`, with several choices, or altered."""
    if not is_a(result, BatchResult):
        raise ConfigError(f"extend takes a BatchResult, not {type(result).__name__}")
    if isinstance(result.choices, tuple) and result.choices:
        raise ConfigError(
            f"result {result.id!r} has {len(result.choices)} choices: extend one of them"
        )
    origin = result.origin
    if not isinstance(origin, Origin) or origin.request.owner != owner:
        raise ConfigError(f"result {result.id!r} is not from this engine: it cannot be extended")
    for name in _altered(result, origin):
        raise ConfigError(
            f"{name} of result {result.id!r} was changed: extend a result as the engine returned it"
        )
    return origin


def _altered(result: BatchResult, origin: Origin) -> Iterator[str]:
    """Yield the names of fields that a continuation needs and that were changed."""
    for name in ("token_ids", "finish_reason", "usage"):
        found, given = getattr(result, name), getattr(origin, name)
        if type(found) is not type(given) or found != given:
            yield name
    n_prompt = origin.usage.prompt_tokens
    asked = origin.request.n_logprobs is not None
    if not _are_logprobs(result.logprobs, len(origin.token_ids), is_asked=asked):
        yield "logprobs"
    if result.prompt_logprobs and not _are_logprobs(result.prompt_logprobs, n_prompt):
        yield "prompt_logprobs"


def _are_logprobs(found: object, n_tokens: int, *, is_asked: bool = True) -> bool:
    """Whether `found` are log-probabilities of `n_tokens` tokens, or None where they were not asked for."""
    if found is None:
        return not is_asked
    if not isinstance(found, tuple) or len(found) != n_tokens:
        return False
    return all(
        t is None or (isinstance(t, TokenLogprob) and isinstance(t.top, tuple)) for t in found
    )


def check_extension(result: BatchResult, n_tokens: int) -> int:
    """Return the number of tokens to add to a result; refuse an answer that is complete or cannot be continued."""
    n_more, n_most = int_of(n_tokens), MAX_INT - result.usage.completion_tokens
    if n_more is None or not 1 <= n_more <= n_most:
        raise ConfigError(
            f"extend takes a number of tokens to add, 1 … {n_most}, not {shown(n_tokens)}"
        )
    if result.error is not None:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r} with an error and cannot be extended: "
            f"{result.error}"
        )
    if result.finish_reason not in EXTENSIBLE:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r}: only results that ended by "
            f"{', '.join(EXTENSIBLE)} can be extended"
        )
    return n_more
