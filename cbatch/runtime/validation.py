"""What an engine refuses before it takes a request in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbatch.checks import MAX_INT, shown
from cbatch.core.plan import N_TARGETS_MAX
from cbatch.core.request import Origin
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.plain import int_of, is_a
from cbatch.response import BatchResult, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Backend, Vocab
    from cbatch.core.plan import KvCapabilities
    from cbatch.engine_options import ScheduleOptions
    from cbatch.messages import BatchPrompt
    from cbatch.options import RunOptions

EXTENSIBLE = ("length", "cancelled", "timeout")
"""How a result may have ended that there is something to go on from."""


def check_fits(options: RunOptions, backend: Backend, schedule: ScheduleOptions) -> None:
    """Refuse options that this engine cannot do.

    Raises:
        ConfigError: one that its model, its memory or its schedule does not have.
    """
    _check_tokens(options, backend.vocab.n_vocab)
    if options.priority is not None and schedule.policy != "priority":
        raise ConfigError(
            f"priority={options.priority} has no effect with policy={schedule.policy!r}: "
            "load the engine with policy='priority'"
        )
    _check_key(options, backend.memory)
    _check_scoring(options, backend)
    _check_window(options, backend)
    check_adapters(options, backend)


def check_adapters(options: RunOptions, backend: Backend) -> None:
    """Refuse adapters that are not loaded.

    Raises:
        ConfigError: it names those that are.
    """
    for name in options.adapter or ():  # also those of scale 0
        if name not in backend.adapters:
            known = ", ".join(backend.adapters) or "none"
            raise ConfigError(f"adapter {name!r} is not loaded; loaded are: {known}")


def _check_tokens(options: RunOptions, n_vocab: int) -> None:
    for name in ("stop_token_ids", "logit_bias"):
        highest = max(getattr(options, name) or (0,))
        if highest >= n_vocab:
            raise ConfigError(f"{name} has {highest}, which is not in the vocabulary of {n_vocab}")


def _check_key(options: RunOptions, memory: KvCapabilities) -> None:
    if (options.save_cache or options.cache_required) and options.cache_key is None:
        raise ConfigError("save_cache and cache_required need a cache_key: a name for the cells")
    if options.cache_key is None:
        return
    if not memory.can_save:
        raise ConfigError(
            f"cache_key={options.cache_key!r}: this model's memory cannot be copied out"
        )
    if not memory.can_check:
        raise ConfigError(
            f"cache_key={options.cache_key!r}: this version does not know the layout of this model's memory, and could "
            "not check what it reads"
        )


def _check_window(options: RunOptions, backend: Backend) -> None:
    if options.n_keep is not None and options.n_discard is None:
        raise ConfigError(f"n_keep={options.n_keep} has no effect without n_discard")
    if not options.n_discard or (backend.memory.can_shift and not backend.chunk_alignment):
        return
    refused = f"n_discard={options.n_discard} cannot be had with "
    if backend.memory.can_shift:
        raise ConfigError(f"{refused}exact=True: what is moved is not what would be computed")
    raise ConfigError(f"{refused}this model's memory, which cannot move")


def _check_scoring(options: RunOptions, backend: Backend) -> None:
    """Refuse cells from disk for a prompt that is scored, and such cells for others where they would be other bits.

    Raises:
        ConfigError: `cache_required`, or `save_cache` with `exact=True`.
    """
    if options.n_prompt_logprobs is None:
        return
    if options.cache_required:
        raise ConfigError(
            "cache_required cannot be had with prompt_logprobs or echoed logprobs, for which all of the prompt is "
            "computed: leave it out"
        )
    if options.save_cache and backend.chunk_alignment > N_TARGETS_MAX:
        raise ConfigError(
            f"save_cache with prompt_logprobs or echoed logprobs and exact=True needs n_ubatch={N_TARGETS_MAX} or "
            f"less, not {backend.chunk_alignment}: save the cells by a request of its own"
        )


def check_chat(prompt: BatchPrompt, options: RunOptions, vocab: Vocab) -> None:
    """Refuse options for a chat where there is none, or where its template would ignore them.

    Raises:
        ConfigError: `tools` or `chat_template_kwargs` for a prompt without messages, `echo` for one with them; a choice
            of no tools.
        UnsupportedOptionError: a template without tools.
    """
    if options.echo and prompt.messages is not None:
        raise ConfigError(
            "echo is for raw prompts and tokens, and this is a chat, whose prompt is what the template makes of it: "
            "leave echo out; prompt_logprobs tells of each token of the prompt"
        )
    tools = options.offered_tools
    for name in ("tools", "chat_template_kwargs"):
        if getattr(options, name) and prompt.messages is None:
            raise ConfigError(
                f"{name} is for the chat template, and this prompt has no messages: give messages, "
                f"or {name}={'[]' if name == 'tools' else '{}'} with the prompt"
            )
    if tools and vocab.tool_refusal:
        raise UnsupportedOptionError("tools", reason=vocab.tool_refusal)


def origin_of(result: BatchResult, owner: str) -> Origin:
    """Return where a result comes from that an engine is asked to extend; `owner` is that engine's mark.

    Raises:
        ConfigError: it is not of this engine, no one answer, or not as the engine returned it.
    """
    if not is_a(result, BatchResult):
        raise ConfigError(f"extend takes a BatchResult, not {type(result).__name__}")
    if isinstance(result.choices, tuple) and result.choices:
        raise ConfigError(
            f"result {result.id!r} has {len(result.choices)} choices: extend one of them"
        )
    origin = result.origin
    if not isinstance(origin, Origin) or origin.request.owner != owner:
        raise ConfigError(f"result {result.id!r} is not of this engine: it cannot be extended")
    for name in _altered(result, origin):
        raise ConfigError(
            f"result {result.id!r} has another {name} than the engine gave it: extend a result as it was returned"
        )
    return origin


def _altered(result: BatchResult, origin: Origin) -> Iterator[str]:
    """Yield the fields that a request would go on from and that are not as they were."""
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
    """Whether these are log-probabilities of so many tokens; none are where none was asked for."""
    if found is None:
        return not is_asked
    if not isinstance(found, tuple) or len(found) != n_tokens:
        return False
    return all(
        t is None or (isinstance(t, TokenLogprob) and isinstance(t.top, tuple)) for t in found
    )


def check_extension(result: BatchResult, n_tokens: int) -> int:
    """Return the number of tokens to go on for; refuse to go on from what has ended by itself.

    Raises:
        ConfigError: `n_tokens` is no number of tokens, or the result has an end.
    """
    n_more = int_of(n_tokens)
    if n_more is None or not 1 <= n_more <= MAX_INT:
        raise ConfigError(f"extend takes a number of tokens, 1 … {MAX_INT}, not {shown(n_tokens)}")
    if result.error is not None:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r} with an error, which leaves nothing to go on "
            f"from: {result.error}"
        )
    if result.finish_reason not in EXTENSIBLE:
        raise ConfigError(
            f"result {result.id!r} ended by {result.finish_reason!r}: only "
            f"{', '.join(EXTENSIBLE)} leave something to go on from"
        )
    if result.usage.context_shifts:
        raise ConfigError(
            f"result {result.id!r} had tokens taken out of its window: what it was computed from is gone"
        )
    return n_more
