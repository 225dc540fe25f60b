"""Output of a batch: chunks while it runs, results when items end, and the error of a batch with failed items."""

from __future__ import annotations

import math
from collections.abc import (
    Mapping,  # what crosses to other processes is read by its annotations
    Sequence,
)
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from msgspec import Struct

from cbatch.errors import CBatchError, words_of
from cbatch.support.checks import shown

FinishReason = Literal["stop", "length", "window", "tool_calls", "cancelled", "timeout", "error"]
"""`stop`: end of generation, a stop string or a stop token; `length`: `max_tokens`; `window`: the slot's window is
full; `tool_calls`: as `stop`, and the answer calls tools."""


@dataclass(frozen=True, slots=True)
class BatchOutputChunk:
    """New output of one item; only the item's last chunk has a `finish_reason`.

    `text` is what the model wrote; `content` and `reasoning` are parts of it: joined over all chunks, they are
    the result's `text` and `reasoning`. Text that may become the markup of a call, and whitespace that the end may
    strip, is in the `content` of a later chunk than in `text`. `logprobs` has one entry for each of `token_ids`, if
    log-probabilities were asked for. The last chunk has the result's `error`. A `cancelled` or `timeout` item with an
    error never ran; one without an error has partial text.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: CBatchError | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        choice = f"[{self.index}]" if self.index else ""
        end = f", {self.finish_reason}" if self.finish_reason else ""
        if self.error is not None:
            end += f", {type(self.error).__name__}: {words_of(self.error)}"
        return f"<BatchOutputChunk {self.id!r}{choice}: {shown(self.text)}{end}>"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: of the prompt, sampled (with the ending token), and prompt tokens from a cache.

    `context_shifts` is how often tokens were taken out of the full window, with `n_discard`. `reasoning_tokens` are
    the sampled tokens of the result's thinking, including its marks. `image_tokens` are the prompt's rows of pictures,
    `audio_tokens` its rows of sounds.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    context_shifts: int = 0
    reasoning_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request in seconds, rates in tokens per second; None if nothing was timed.

    `ttft_s` and `last_token_s` count from submission, queue time included. `prompt_tps` counts each token that was
    computed before the first one was sampled, once; tokens from a cache do not count. `generation_tps` is
    (n − 1) / (last − first token), of the tokens that this request sampled itself.

    The other fields count draft tokens, computed and accepted: all of them (`n_draft_tokens`, `n_accepted_tokens`),
    those from other answers of the call (`n_job_…`), and those of the draft model (`n_model_…`).
    """

    queue_s: float
    ttft_s: float | None
    total_s: float
    prompt_tps: float | None
    generation_tps: float | None
    last_token_s: float | None = None
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0
    n_job_draft_tokens: int = 0
    n_job_accepted_tokens: int = 0
    n_model_draft_tokens: int = 0
    n_model_accepted_tokens: int = 0

    @property
    def prompt_s(self) -> float:
        """Seconds from the slot to the first token, or to the end of a request that has none."""
        first_s = self.total_s if self.ttft_s is None else self.ttft_s
        return max(0.0, first_s - self.queue_s)

    @property
    def output_s(self) -> float:
        """Seconds from the first token to the last; 0 for one token or none."""
        if self.ttft_s is None or self.last_token_s is None:
            return 0.0
        return max(0.0, self.last_token_s - self.ttft_s)


DRAFT_COUNTS = tuple(f.name for f in fields(Timings) if f.name.startswith("n_"))
"""The fields of `Timings` that count draft tokens."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: `arguments` is JSON text of an object, not checked by the tool's schema."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """Return the call in the form of OpenAI's API, for a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class TokenLogprob(Struct, frozen=True, gc=False):  # else a full collection would visit millions
    """One token with its log-probability by the model's own logits; `top` has the likeliest tokens at its place."""

    token_id: int
    data: bytes
    """The token's text as bytes; a character may span several tokens."""
    logprob: float
    """NaN for a token with none before it, such as the first token of an echoed prompt."""
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The token's part of the text; an incomplete character shows as U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One item's outcome: text, or `error` (`finish_reason` "error"; or "cancelled", "timeout" where it never ran)."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: CBatchError | None
    usage: Usage
    timings: Timings
    seed: int
    warnings: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """The thinking before the answer, if the template marks it."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, if log-probabilities were asked for; NaN for the first token of an echoed prompt."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each token of the prompt, if `prompt_logprobs` was set; None for the first token, and for tokens that
    were not computed."""
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the answer; None for the model's own end, and for
    every other finish reason."""
    choices: tuple[BatchResult, ...] = ()
    """All answers, if several were asked for. This result is then the first answer, or a failed one: `error` is None
    only if no answer has an error. `usage` counts the tokens of all answers."""
    choice_probs: Mapping[str, float] | None = field(default=None, hash=False)
    """The probability of each text of `choice`, 1 in total, if `choice_probs` was set."""
    embedding: bytes | None = field(default=None, repr=False)
    """The vector of an embedded text: float32 numbers, the lowest byte first; see `Engine.embed`."""
    i_item: int = field(default=0, compare=False)
    """The place of the item in its batch, from 0, in input order; the choices of an item have the same place."""
    origin: object = field(default=None, repr=False, compare=False)
    """What `Engine.extend` continues from."""

    def __repr__(self) -> str:
        usage = self.usage
        parts = [f"{shown(self.text)}", self.finish_reason]
        if self.error is not None:
            parts.append(f"{type(self.error).__name__}: {words_of(self.error)}")
        counts = {"choice": self.choices, "tool call": self.tool_calls, "warning": self.warnings}
        parts += [f"{len(all)} {name}{'s' * (len(all) > 1)}" for name, all in counts.items() if all]
        parts.append(f"{usage.prompt_tokens} + {usage.completion_tokens} tokens")
        return f"<BatchResult {self.id!r}: {', '.join(parts)}, {self.timings.total_s:.3g} s>"

    def at(self, i_item: int) -> BatchResult:
        """Return the result of the item at a place of its batch."""
        if i_item == self.i_item:
            return self
        choices = tuple(replace(choice, i_item=i_item) for choice in self.choices)
        return replace(self, i_item=i_item, choices=choices)

    def as_chunk(self, index: int = 0) -> BatchOutputChunk:
        """Return the only chunk of an answer that comes in one, as that of a choice."""
        return BatchOutputChunk(
            self.id,
            self.text,
            self.token_ids,
            index,
            self.finish_reason,
            self.text,
            self.reasoning,
            self.logprobs,
            self.error,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a text after its context; see `Engine.score`."""

    tokens: tuple[TokenLogprob, ...] = ()
    """The text's tokens, each with its natural log-probability after all before it; `top` has the likeliest one."""
    error: CBatchError | None = None
    """Why there is no score; `tokens` is empty then."""

    @property
    def logprob(self) -> float:
        """The text's natural log-probability: the sum over its tokens; NaN if it has none."""
        return math.fsum(t.logprob for t in self.tokens) if self.tokens else math.nan

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would give this text: each token is the likeliest at its place."""
        return bool(self.tokens) and all(t.token_id == t.top[0].token_id for t in self.tokens)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Score: {type(self.error).__name__}: {words_of(self.error)}>"
        greedy = ", greedy" * self.is_greedy
        return f"<Score {self.logprob:.6g}: {len(self.tokens)} tokens{greedy}>"


class BatchError(CBatchError):
    """Some items of a batch failed, or its prompts could not be read to the end."""

    def __init__(self, results: Sequence[Any], source_error: BaseException | None = None) -> None:
        """Keep all results in input order; the message names the first failures and what reading the prompts raised."""
        self.results = list(results)
        failed = [r for r in self.results if r.error is not None]
        parts = []
        if source_error is not None:
            what = f"{type(source_error).__name__}: {words_of(source_error)}"
            parts.append(f"reading the prompts failed after {len(self.results)} of them: {what}")
        if failed or not parts:
            first = "; ".join(f"{r.id}: {r.error}" for r in failed[:3])
            more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
            parts.append(f"{len(failed)} of {len(self.results)} items failed: {first}{more}")
        super().__init__("; ".join(parts))
