"""What a caller may ask of one request: `RunOptions`, merged from the nearest down to the model's own defaults."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import (
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypeGuard,
    get_args,
)

from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.tools import (
    Tool,
    ToolChoice,
    Tools,
    check_template_kwargs,
    check_tool_choice,
    check_tools,
    demanded,
    offered,
)

MAX_SEED = 2**64 - 1
MAX_PARALLEL = 256
"""llama.cpp's LLAMA_MAX_SEQ. Source: src/llama-cparams.h."""

DEFAULT_PARALLEL = 16
"""Slots where the machine has room for them. Source: measured; on CPUs 8 or 16 rows decode far faster a token."""

CellType: TypeAlias = Literal[
    "f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
"""What keys or values are stored as. Source: llama.cpp common/arg.cpp, kv_cache_types."""

MAX_RPC_SERVERS = 16
"""Source: ggml/include/ggml-rpc.h, GGML_RPC_MAX_SERVERS."""


MAX_LAST_N = 2**20
"""Most tokens that penalties and DRY look back over. Source: native/include/cbatch.h, CBATCH_LAST_N_MAX."""

MAX_BIASES = 4096
"""Tokens that one request may give a bias: OpenAI takes 300, and a step must stay far below a pass over the row."""

MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones. Source: src/llama-sampler.cpp, llama_sampler_init_dry, MAX_CHAR_LEN."""

DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""Source: llama.cpp common/common.h, common_params_sampling."""

MAX_PRIORITY = 100
MAX_CHOICES = 128
"""Source: the OpenAI API's limit of `n`."""

MAX_LOGPROBS = 20
"""Source: the OpenAI API's limit of `top_logprobs`."""

MAX_KEY_LENGTH = 1024
"""Characters of a cache key: a name, not a prompt."""

MAX_GRAMMAR_LENGTH = 2**20
"""Characters of a schema, regex or grammar: our choice; what compiles is far shorter."""

AdapterSet: TypeAlias = "tuple[tuple[str, float], ...]"
"""Names of LoRA adapters with their scales, in order of names; empty for the model alone."""

MAX_TIME_S = 1e9
"""Some thirty years: for ever, and yet a number that clocks can add."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence's next token is chosen, every value settled.

    In llama.cpp's order: `logit_bias`, penalties, DRY, `top_n_sigma` (≤ 0 = all), `top_k` (0 = all), `typical_p`
    (1 = all), `top_p` (1 = all), `min_p` (0 = all), XTC, then `temperature` (0 = greedy, whatever the filters say). The
    draw is a function of (`seed`, `i_choice`, output position) alone. Source: llama.cpp common/common.h and
    common/sampling.cpp.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    i_choice: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """The sequences of tokens past which DRY does not look: `Vocab.breakers` of `dry_sequence_breakers`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), ascending tokens."""

    @property
    def has_dry(self) -> bool:
        """Whether DRY changes anything."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, as text: equal texts are compiled once."""

    kind: Literal["json_schema", "regex", "lark", "gbnf", "tool_choice"]
    text: str


@dataclass(frozen=True, slots=True)
class Breakers:
    """DRY's strings, whose sequences of tokens take a look at the whole vocabulary to find."""

    strings: tuple[str, ...]


_REFUSED = {
    "parallel_tool_calls": "how many calls an answer has is for the model and its template to say; "
    "for exactly one, name a function in tool_choice"
}
"""Options of OpenAI's that are known and not to be had, with the reason."""

_STRUCTURE = ("json_schema", "response_format", "regex", "grammar")
"""Options that say what an answer must match: one request has one of them."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one request; `None` means "not said here", and the nearest that says it wins.

    Args:
        max_tokens: most tokens to generate, ≥ 1; not said: to the end of the slot's window. 0 with `echo` or
            `prompt_logprobs`: the prompt alone.
        max_completion_tokens: OpenAI's newer name for `max_tokens`; give one of them.
        stop: a string, or several, that end the answer; not part of it unless `include_stop`.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop: keep the stop string that ended the answer in its text.
        ignore_eos: go on past the model's end-of-generation tokens.
        temperature: ≥ 0; 0 is greedy. Not said: the model's `general.sampling.temp`, else 0.8.
        top_k: keep the k most probable tokens, 0 keeps all. Not said: the model's, else 40.
        top_p: keep the smallest set with this probability, 0 … 1. Not said: the model's, else 0.95.
        min_p: drop tokens below this share of the most probable one, 0 … 1. Not said: the model's, else 0.05.
        typical_p: keep the tokens whose surprise is nearest to the expected one, with this probability in all, 0 … 1;
            not said: 1, which keeps all.
        top_n_sigma: drop tokens whose logit is more than so many standard deviations below the largest, −1 … 1,000;
            not said, or not above 0: keep all.
        xtc_probability: how often to drop the most probable tokens but for the least probable of them, 0 … 1.
            Not said: the model's, else 0.
        xtc_threshold: the probability from which XTC drops tokens, 0 … 1; above 0.5 it drops none. Not said: the
            model's, else 0.1.
        repeat_penalty: divide the logits of tokens that were there by this, or multiply where they are below 0,
            0.01 … 100. Not said: the model's, else 1.
        repeat_last_n: tokens that the three penalties look back over, the prompt included, 0 … 2²⁰. Not said: the
            model's, else 64.
        presence_penalty: take this off the logit of every token that was there, −100 … 100; not said: 0.
        frequency_penalty: take this off the logit of a token as often as it was there, −100 … 100; not said: 0.
        dry_multiplier: DRY: take `dry_multiplier · dry_base ^ (length − dry_allowed_length)` off the logit of a token
            that would go on with a repetition of `length` tokens, 0 … 100; not said: 0.
        dry_base: DRY: 0 … 100, below 1 turns it off; not said: 1.75.
        dry_allowed_length: DRY: repetitions that are shorter are free, ≥ 0; not said: 2.
        dry_penalty_last_n: DRY: tokens to look back over, the prompt included, 0 … 2²⁰; not said: 64.
        dry_sequence_breakers: DRY: strings that no repetition goes past, 64 at most, of 40 bytes at most.
            Not said: newline, colon, quotation mark, asterisk.
        logit_bias: a mapping of token ids, also written as strings, to what is added to their logits,
            −10,000 … 10,000, or −∞ for a ban; 4,096 at most.
        seed: 0 … 2⁶⁴ − 1; 0 is a seed like any other. Not said: one is drawn and reported in the result.
        n: answers to this prompt, 1 … 128, in `result.choices`; they share the prompt's computation. Not said: 1.
        best_of: compute so many and keep the `n` with the highest mean log-probability, n … 128. Not said: n.
        logprobs: report the log-probability of each token in `result.logprobs`, by the model's logits before any
            option; a number is short for as many `top_logprobs`.
        top_logprobs: with `logprobs`, report so many of the likeliest tokens at each place too, 0 … 20.
        prompt_logprobs: report the log-probability of each token of the prompt in `result.prompt_logprobs`, with so
            many of the likeliest at its place, 0 … 20; the prompt is computed 64 tokens a step then.
        echo: have the prompt before the answer, in text and tokens, and in `logprobs` where these are asked for; not
            for chats.
        priority: −100 … 100, the higher the sooner, for an engine with `policy="priority"`. Not said: 0.
        timeout_s: seconds from submission on, queue time included; then it ends `timeout` with its partial text.
        cache_key: begin with the cells that are kept on disk under this name, as far as the prompt begins with their
            tokens; without `save_cache` any number of requests may read one key.
        save_cache: keep the cells of prompt and answer on disk under `cache_key` when it ends.
        cache_required: fail where nothing to begin with is kept under `cache_key`; not said: compute it, and warn.
        prefill_only: compute the prompt and sample nothing; for the cells, which stay in memory and, saved, on disk.
        n_discard: where the window is full, take so many tokens out of it, those behind the first `n_keep`, and go on;
            0 and not said: end `window`. Only where the model's memory can shift.
        n_keep: tokens that are never taken out, −1 for the whole prompt. Not said: a chat's first message, else 1.
        adapter: LoRA adapter to answer with, by the name it was loaded by, or a mapping of names to scales.
        tools: functions that the model may call, as OpenAI's API has them; its calls are in the result.
        tool_choice: "none", "auto", "required" or one function by name. Not said: auto.
        chat_template_kwargs: variables for the chat template, such as `enable_thinking`.
        reasoning_format: "auto" splits what was thought off the text where the template marks it, "none" leaves it.
            Not said: auto.
        skip_special_tokens: leave control tokens out of the text; not said: True.
        json_schema: the answer is JSON that this schema allows: a mapping, or JSON text, as which it is kept.
        response_format: OpenAI's way to say so: `{"type": "json_schema", "json_schema": {"schema": …}}`, or the type
            "json_object" for any JSON object, or "text" for no constraint. Kept as JSON text.
        regex: the whole answer matches this regular expression, in the syntax of Rust's regex crate.
        grammar: the answer is what this grammar makes, in llguidance's Lark, or in llama.cpp's GBNF: known by `::=`.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
        UnsupportedOptionError: a name that is not listed above.

    Source of the names: the OpenAI API and llama.cpp; of the defaults: llama.cpp `common/common.h`.
    """

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    priority: int | None = None
    timeout_s: float | None = None
    cache_key: str | None = None
    save_cache: bool | None = None
    cache_required: bool | None = None
    prefill_only: bool | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    adapter: str | Mapping[str, float] | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_format: Literal["auto", "none"] | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    response_format: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __new__(cls, **options: Any) -> RunOptions:
        """Refuse unknown names with cbatch's own error."""
        for name in options:
            if name in _REFUSED:
                raise UnsupportedOptionError(name, reason=_REFUSED[name])
            if name not in _NAMES:
                raise UnsupportedOptionError(name, sorted(_NAMES))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every value once, where the caller still sees the line that is wrong."""
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ConfigError(
                    "max_tokens and max_completion_tokens are one option: give one of them"
                )
            self._settle("max_tokens", self.max_completion_tokens)
            self._settle("max_completion_tokens", None)
        self._settle("stop", _strings("stop", self.stop))
        self._settle("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_max_tokens()
        _check_int("seed", self.seed, 0, MAX_SEED)
        self._check_choice()
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_float("timeout_s", self.timeout_s, 0.0, MAX_TIME_S)
        for name in ("include_stop", "ignore_eos", "save_cache", "cache_required", "prefill_only"):
            _check_bool(name, getattr(self, name))
        _check_text("cache_key", self.cache_key, MAX_KEY_LENGTH)
        _check_int("n_keep", self.n_keep, -1, 2**31 - 1)
        _check_int("n_discard", self.n_discard, 0, 2**31 - 1)
        self._settle("adapter", _adapters(self.adapter))
        self._settle("tools", check_tools(self.tools))
        self._settle("tool_choice", check_tool_choice(self.tool_choice))
        kwargs = check_template_kwargs(self.chat_template_kwargs)
        self._settle("chat_template_kwargs", kwargs)
        _check_choice("reasoning_format", self.reasoning_format, (None, "auto", "none"))
        _check_bool("skip_special_tokens", self.skip_special_tokens)
        self._check_choices()
        self._check_logprobs()
        self._check_structure()

    def _check_choice(self) -> None:
        for name, low, high in _CHOICE_FLOATS:
            _check_float(name, getattr(self, name), low, high)
        for name, most in _CHOICE_INTS:
            _check_int(name, getattr(self, name), 0, most)
        self._settle("dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        self._settle("logit_bias", _logit_bias(self.logit_bias))

    def _check_structure(self) -> None:
        for name in ("json_schema", "response_format"):
            self._settle(name, _json_object(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name), MAX_GRAMMAR_LENGTH)
        said = [name for name in _STRUCTURE if getattr(self, name) is not None]
        if len(said) > 1:
            raise ConfigError(
                f"{' and '.join(said)} each say what the answer must match: give one of them"
            )
        if self.response_format is not None:
            _schema_of(str(self.response_format))
        if self.tool_choice not in (None, "none", "auto") and self.structure is not None:
            raise ConfigError(
                f"{said[0]} and tool_choice={self.tool_choice!r} each say what the answer must match: give one of them"
            )

    def _check_max_tokens(self) -> None:
        is_for_prompt = self.echo or self.prompt_logprobs is not None
        try:
            _check_int("max_tokens", self.max_tokens, 0 if is_for_prompt else 1, 2**31 - 1)
        except ConfigError as error:
            if self.max_tokens != 0:
                raise
            raise ConfigError(
                f"{error}: without echo or prompt_logprobs nothing would come of it; prefill_only computes a prompt "
                "for its cells"
            ) from None

    def _check_choices(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("best_of", self.best_of, 1, MAX_CHOICES)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ConfigError(
                f"best_of={self.best_of} is less than n={self.n}: of fewer none can be kept"
            )
        for name in ("prefill_only", "save_cache"):
            if self.n_choices > 1 and getattr(self, name):
                raise ConfigError(
                    f"{name} is for one answer, not for {self.n_choices} (n, best_of)"
                )

    def _check_logprobs(self) -> None:
        if self.logprobs is not None and not isinstance(self.logprobs, bool):
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
            if self.top_logprobs is None:
                self._settle("top_logprobs", self.logprobs)
            self._settle(
                "logprobs", True
            )  # which equals 1, but means another number of alternatives
        _check_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_bool("echo", self.echo)
        if self.top_logprobs and self.logprobs is False:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: RunOptions | Mapping[str, Any] | None) -> RunOptions:
        """Return `value` as options: as it is, built from a mapping, or empty for None.

        Raises:
            ConfigError: neither options nor a mapping, or a value in it is wrong.
        """
        if value is None:
            return _UNSAID
        if isinstance(value, RunOptions):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        raise ConfigError(f"options must be RunOptions or a mapping, not {type(value).__name__}")

    def over(self, other: RunOptions) -> RunOptions:
        """Return these options where they say something and `other` where they do not."""
        said = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if not said:
            return other
        kept = _NAMES.difference(_STRUCTURE) if said.keys() & set(_STRUCTURE) else _NAMES
        return RunOptions(**{name: getattr(other, name) for name in kept} | said)

    @property
    def n_choices(self) -> int:
        """Answers to compute."""
        return self.best_of or self.n or 1

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.logprobs)

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives to report for each token; None where no log-probability is wanted.

        Raises:
            ConfigError: alternatives are asked for, but no log-probabilities.
        """
        if not self.has_logprobs:
            if self.top_logprobs:
                raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
            return 0 if self.n_choices > (self.n or 1) else None
        return self.top_logprobs or 0

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Alternatives to report for each token of the prompt; None where none is wanted of it."""
        n_top = self.n_logprobs if self.echo and self.has_logprobs else None
        if n_top is None or self.prompt_logprobs is None:
            return self.prompt_logprobs if n_top is None else n_top
        return max(n_top, self.prompt_logprobs)

    @property
    def structure(self) -> Grammar | None:
        """What the answer must match, whichever option said so."""
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            is_gbnf = re.search(r"^\s*[\w-]+\s*::=", self.grammar, re.MULTILINE)
            return Grammar("gbnf" if is_gbnf else "lark", self.grammar)
        schema = self.json_schema
        if self.response_format is not None:
            schema = _schema_of(str(self.response_format))
        return None if schema is None else Grammar("json_schema", str(schema))

    def breakers(self, sampling: Sampling) -> Breakers | None:
        """Return the strings past which DRY does not look, where `sampling`, which is settled, has DRY."""
        strings = self.dry_sequence_breakers
        known = DRY_SEQUENCE_BREAKERS if strings is None else tuple(strings)
        return Breakers(known) if sampling.has_dry and known else None

    @property
    def adapters(self) -> AdapterSet:
        """The adapters to answer with; one of scale 0 changes nothing and is left out."""
        scales = self.adapter if isinstance(self.adapter, Mapping) else {}
        return tuple((name, scale) for name, scale in scales.items() if scale)

    @property
    def offered_tools(self) -> Tools:
        """The tools that the model is told of.

        Raises:
            ConfigError: `tool_choice` does not fit `tools`.
        """
        return offered(check_tools(self.tools), self.tool_choice)

    @property
    def demanded_tools(self) -> Tools:
        """The tools of which the answer must call one; none where the model may leave it.

        Raises:
            ConfigError: `tool_choice` does not fit `tools`.
        """
        return demanded(self.offered_tools, self.tool_choice)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        variables = dict(self.chat_template_kwargs or {})
        if tools := self.offered_tools:
            variables["tools"] = list(tools)
            if self.demanded_tools:
                variables["tool_choice"] = self.tool_choice
        return variables

    def sampling(
        self,
        defaults: Mapping[str, float],
        seed: int,
        banned: Sequence[int] = (),
    ) -> Sampling:
        """Return the settled sampling values: these, then the model's `defaults`, then llama.cpp's.

        All but `dry_breakers`, which the vocabulary gives for `self.breakers`.

        Args:
            defaults: what the model says, by the names of `Sampling`.
            seed: the seed, settled.
            banned: tokens that are never sampled, whatever `logit_bias` says of them.
        """
        said = {name: v for name in _SAMPLED if (v := getattr(self, name)) is not None}
        known: dict[str, Any] = {**defaults, **said}
        bias = tuple(
            sorted({**(self.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}.items())
        )
        return Sampling(seed=seed, logit_bias=bias, **known)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Who runs when, and how much of a prompt goes into one step.

    Args:
        policy: who of those that wait comes next: "fcfs", the first to come; "priority", the highest `priority`,
            with ageing; "shortest", the fewest prompt tokens; "round_robin", turns of `quantum` tokens.
        quantum: tokens of a turn in "round_robin"; not said: 64.
        ageing_s: seconds of waiting that count as much as one point of priority; not said: 10.
        admission: in unified memory, "optimistic" goes by the output that is to be expected, and takes back the cells
            of some where the pool is full; "reserve" admits whom it holds in the worst case. Not said: optimistic.
        max_queue: most requests that wait for a slot; not said: any number.
        when_full: at `max_queue`, "wait" in `run` until there is room, or "reject" with `QueueFullError`.
        prefill_budget: most prompt tokens in a step that also decodes. Not said: what keeps such a step within twice
            the measured time of one that only decodes, where somebody reads the output as it comes.
        prefill_chunk: most prompt tokens of one sequence in a step; not said: as many as the step holds.
        itl_ms: aim of milliseconds a step, from which the budget for prompts follows, instead of `prefill_budget`.
        swap_mib: host memory for the cells of sequences that lost their slot; what does not fit is computed again.
        share_prefixes: compute a beginning that prompts have in common once, and take it over from each other.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
    """

    policy: Literal["fcfs", "priority", "shortest", "round_robin"] = "fcfs"
    quantum: int | None = None
    ageing_s: float | None = None
    admission: Literal["reserve", "optimistic"] | None = None
    max_queue: int | None = None
    when_full: Literal["wait", "reject"] | None = None
    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    itl_ms: float | None = None
    swap_mib: int = 1024
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        """Check every value and every pair that can contradict."""
        for f in fields(self):
            if f.default is not None and getattr(self, f.name) is None:
                raise ConfigError(f"{f.name} must not be None")
        _check_choice("policy", self.policy, ("fcfs", "priority", "shortest", "round_robin"))
        for name in ("quantum", "prefill_budget", "prefill_chunk"):
            _check_int(name, getattr(self, name), 1, 2**31 - 1)
        _check_int("max_queue", self.max_queue, 0, 2**31 - 1)
        _check_int("swap_mib", self.swap_mib, 0, 2**31 - 1)
        _check_float("ageing_s", self.ageing_s, 1e-3, MAX_TIME_S)
        _check_float("itl_ms", self.itl_ms, 1e-3, 1e9)
        _check_bool("share_prefixes", self.share_prefixes)
        _check_choice("admission", self.admission, (None, "reserve", "optimistic"))
        _check_choice("when_full", self.when_full, (None, "wait", "reject"))
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.quantum is not None and self.policy != "round_robin":
            raise ConfigError(
                f"quantum={self.quantum} needs policy='round_robin', not {self.policy!r}"
            )
        if self.ageing_s is not None and self.policy != "priority":
            raise ConfigError(
                f"ageing_s={self.ageing_s} needs policy='priority', not {self.policy!r}"
            )
        if self.when_full is not None and self.max_queue is None:
            raise ConfigError(
                f"when_full={self.when_full!r} needs max_queue: a queue without limit is never full"
            )
        if self.itl_ms is not None and self.prefill_budget is not None:
            raise ConfigError(
                f"give itl_ms={self.itl_ms} (the budget follows) or prefill_budget={self.prefill_budget}, not both"
            )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ScheduleOptions):
    """How a model is loaded and how its context is made; see `cbatch.load` for what each one means.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
    """

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineOptions:
        """Return the options of these names.

        Raises:
            UnsupportedOptionError: a name that there is not.
        """
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnsupportedOptionError(name, known)
        return cls(**settings)

    parallel: int | None = None
    n_ctx: int | None = None
    ctx_per_seq: int | None = None
    memory_mib: int | None = None
    kv: Literal["auto", "partitioned", "unified"] = "auto"
    cache_type_k: CellType = "f16"
    cache_type_v: CellType = "f16"
    exact: bool = False
    flash_attn: Literal["auto", "on", "off"] = "auto"
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    offload_kqv: bool = True
    split_mode: Literal["none", "layer", "row", "tensor"] | None = None
    main_gpu: int | None = None
    tensor_split: Sequence[float] | None = None
    rpc_servers: Sequence[str] | None = None
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    chat_template: str | None = None
    adapters: Mapping[str, str | os.PathLike[str]] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_mib: int = 10_240

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        ScheduleOptions.__post_init__(self)
        _check_int("parallel", self.parallel, 1, MAX_PARALLEL)
        for name in ("n_ctx", "ctx_per_seq", "n_threads", "memory_mib", "cache_mib"):
            _check_int(name, getattr(self, name), 1, 2**31 - 1)
        _check_int("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        _check_int("n_batch", self.n_batch, 1, 2**20)
        _check_int("n_ubatch", self.n_ubatch, 1, 2**20)
        _check_choice("kv", self.kv, ("auto", "partitioned", "unified"))
        _check_choice("flash_attn", self.flash_attn, ("auto", "on", "off"))
        for name in ("cache_type_k", "cache_type_v"):
            _check_choice(name, getattr(self, name), get_args(CellType))
        for name in ("exact", "use_mmap", "use_mlock", "offload_kqv"):
            _check_bool(name, getattr(self, name))
        if not isinstance(self.chat_template, str | None):
            raise ConfigError(f"chat_template must be a string, not {self.chat_template!r}")
        self._check_places()
        self._check_rope()
        self._check_sizes()
        self._check_flash_attn()
        self._check_exact()
        self._check_schedule()

    @property
    def n_slots(self) -> int:
        """Slots as they are said, or as many as there are where the machine has room for them."""
        return self.parallel or DEFAULT_PARALLEL

    @property
    def has_quantised_values(self) -> bool:
        """Whether values are stored in blocks, which llama.cpp reads with flash attention alone."""
        return is_quantised(self.cache_type_v)

    def _check_places(self) -> None:
        _check_choice("split_mode", self.split_mode, (None, "none", "layer", "row", "tensor"))
        _check_int("main_gpu", self.main_gpu, 0, 2**31 - 1)
        for name, settle in (
            ("tensor_split", _shares),
            ("rpc_servers", _servers),
            ("adapters", _files),
        ):
            object.__setattr__(self, name, settle(name, getattr(self, name)))
        if self.cache_dir is not None:
            _check_path("cache_dir", self.cache_dir)
        if self.tensor_split is not None and self.split_mode == "none":
            raise ConfigError(
                f"tensor_split={list(self.tensor_split)} is for several devices, "
                "split_mode='none' takes one: leave one of them out"
            )

    def _check_rope(self) -> None:
        _check_choice(
            "rope_scaling", self.rope_scaling, (None, "none", "linear", "yarn", "longrope")
        )
        _check_float("rope_freq_base", self.rope_freq_base, 1.0, 1e12)
        _check_float("rope_freq_scale", self.rope_freq_scale, 1e-6, 1e6)
        _check_int("yarn_orig_ctx", self.yarn_orig_ctx, 1, 2**31 - 1)
        yarn = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
        for name in yarn:
            _check_float(name, getattr(self, name), 0.0, 1e6)
        if self.rope_scaling == "none" and self.rope_freq_scale is not None:
            raise ConfigError(
                f"rope_freq_scale={self.rope_freq_scale} has no effect with rope_scaling='none': "
                "use 'linear' or 'yarn', or leave it out"
            )
        for name in (*yarn, "yarn_orig_ctx"):
            if getattr(self, name) is not None and self.rope_scaling not in (None, "yarn"):
                raise ConfigError(
                    f"{name}={getattr(self, name)} needs rope_scaling='yarn', not {self.rope_scaling!r}"
                )

    def _check_sizes(self) -> None:
        if self.n_ctx is not None and self.ctx_per_seq is not None and self.kv != "unified":
            raise ConfigError(
                "give n_ctx (cells in total) or ctx_per_seq (one slot's window), not both; "
                "with kv='unified' both have a meaning: the pool, and most of it for one request"
            )
        if self.n_ctx is not None and (self.ctx_per_seq or 0) > self.n_ctx:
            raise ConfigError(
                f"ctx_per_seq={self.ctx_per_seq} is more than the pool has: n_ctx={self.n_ctx}"
            )
        if self.n_batch < self.n_slots:
            raise ConfigError(
                f"n_batch={self.n_batch} is less than parallel={self.n_slots}: a step holds every row"
            )
        if self.n_ctx is not None and self.n_ctx < 2 * self.n_slots:
            raise ConfigError(
                f"n_ctx={self.n_ctx} leaves {self.n_ctx // self.n_slots} cells for each of "
                f"{self.n_slots} slots: raise it, or use fewer slots (parallel)"
            )

    def _check_flash_attn(self) -> None:
        if self.flash_attn == "off" and self.has_quantised_values:
            raise ConfigError(
                f"cache_type_v={self.cache_type_v!r} needs flash attention: "
                "leave flash_attn='off' out, or use 'f16', 'bf16' or 'f32'"
            )
        if self.split_mode != "tensor":
            return
        if self.flash_attn == "off":
            raise ConfigError(
                "split_mode='tensor' needs flash attention: leave flash_attn='off' out"
            )
        if self.exact and not self.has_quantised_values:
            raise ConfigError(
                "split_mode='tensor' needs flash attention, which exact=True turns off: "
                "use cache_type_k='q8_0' and cache_type_v='q8_0', or another split_mode"
            )

    def _check_exact(self) -> None:
        if self.exact and self.kv == "unified":
            raise ConfigError(
                "exact=True cannot hold with kv='unified': the place of a cell changes the rounding; "
                "use kv='partitioned'"
            )
        if self.exact and self.flash_attn == "on" and not self.has_quantised_values:
            raise ConfigError(
                "exact=True cannot hold with flash_attn='on': its kernel depends on the shape of a step; "
                "leave it out, or use cache_type_k='q8_0' and cache_type_v='q8_0'"
            )
        if self.exact and self.adapters:
            raise ConfigError(
                f"exact=True cannot hold with adapters ({', '.join(self.adapters)}): their f16 or f32 weights "
                "take other kernels in narrow steps; merge one into the model, or leave exact out"
            )
        if self.exact and self.admission == "optimistic":
            raise ConfigError(
                "exact=True cannot hold with admission='optimistic', which computes some output again: use 'reserve'"
            )

    def _check_schedule(self) -> None:
        for name in ("prefill_chunk", "prefill_budget"):
            value = getattr(self, name)
            if value is not None and value > self.n_batch:
                raise ConfigError(
                    f"{name}={value} is more than a step holds: n_batch={self.n_batch}"
                )
        if self.admission == "optimistic" and self.kv != "unified":
            raise ConfigError(
                f"admission='optimistic' needs kv='unified', not {self.kv!r}: a slot has its own cells otherwise"
            )
        if self.exact and self.prefill_chunk is not None:
            raise ConfigError(
                f"exact=True cuts all prompts alike: prefill_chunk={self.prefill_chunk} cannot be had with it"
            )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if not _is_int(value):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low} … {high}, not {value!r}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if not (_is_int(value) or (isinstance(value, float) and math.isfinite(value))):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low:g} … {high:g}, not {value!r}")


def check_seconds(name: str, value: float | None) -> float:
    """Return a span of seconds; endless where None.

    Raises:
        ConfigError: not a number, or below 0.
    """
    _check_float(name, value, 0.0, MAX_TIME_S)
    return math.inf if value is None else value


def _check_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def _check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    if value not in choices:
        known = ", ".join(c for c in choices if c is not None)
        raise ConfigError(f"{name} must be one of {known}, not {value!r}")


def _strings(name: str, value: object) -> tuple[str, ...] | None:
    """Return the non-empty strings of `value`; an empty stop string would match everywhere and is left out."""
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise ConfigError(f"{name} must be a string or a list of strings, not {value!r}")
    try:
        "".join(items).encode()
    except UnicodeEncodeError:  # json.loads gives such strings; no text of a model can hold one
        raise ConfigError(f"{name} holds half of a surrogate pair: {value!r}") from None
    return tuple(s for s in items if s)


def _check_text(name: str, value: object, n_most: int) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= n_most:
        shown = repr(value)[:80]
        raise ConfigError(f"{name} must be a string of 1 … {n_most} characters, not {shown}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} holds half of a surrogate pair: {value[:80]!r}") from None


def _json_object(name: str, value: object) -> str | None:
    """Return a JSON object as text, in one way of writing: order of keys kept, no superfluous space."""
    if value is None:
        return None
    if isinstance(value, str):
        return _json_object_of_text(name, value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping or JSON text, not {type(value).__name__}")
    return _json_text(name, value)


@lru_cache(maxsize=64)  # a batch's options are merged anew for each of its items
def _json_object_of_text(name: str, text: str) -> str:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, not {type(value).__name__}")
    return _json_text(name, value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be written as JSON: {error}") from None
    _check_text(name, text, MAX_GRAMMAR_LENGTH)
    return text


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")


@lru_cache(maxsize=64)
def _schema_of(response_format: str) -> str | None:
    """Return the schema that a response format asks for; None for text.

    Source: OpenAI's API reference, chat completions, `response_format`.
    """
    said = json.loads(response_format)
    kind, inner = said.get("type"), said.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise ConfigError(
            f"response_format: type must be text, json_object or json_schema, not {kind!r}"
        )
    _check_keys(
        "response_format", said, ("type", "json_schema") if kind == "json_schema" else ("type",)
    )
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ConfigError('response_format needs {"json_schema": {"schema": {…}}} with this type')
    _check_keys("response_format: json_schema", inner, ("name", "description", "schema", "strict"))
    _check_bool("response_format: strict", inner.get("strict"))
    return _json_text("response_format: schema", inner["schema"])


def _check_keys(name: str, said: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in said:
        if key not in known:
            raise ConfigError(f"{name} has {key!r}, known are {', '.join(known)}")


def _adapters(value: object) -> Mapping[str, float] | None:
    """Return names with their scales, in order of names; a name alone has scale 1."""
    if value is None:
        return None
    scales = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(scales, Mapping) or not all(isinstance(name, str) for name in scales):
        raise ConfigError(f"adapter must be a name or a mapping of names to scales, not {value!r}")
    for name in sorted(scales):
        _check_text("an adapter's name", name, MAX_KEY_LENGTH)
        if scales[name] is None:
            raise ConfigError(f"adapter {name!r} has no scale: give a number")
        _check_float(f"the scale of adapter {name!r}", scales[name], -100.0, 100.0)
    return {name: float(scales[name]) for name in sorted(scales)}


def _breakers(value: object) -> tuple[str, ...] | None:
    strings = _strings("dry_sequence_breakers", value)
    if strings is None:
        return None
    if len(strings) > MAX_BREAKERS:
        raise ConfigError(
            f"dry_sequence_breakers has {len(strings)} strings, the most is {MAX_BREAKERS}"
        )
    for text in strings:
        if len(text.encode()) > MAX_BREAKER_BYTES:
            raise ConfigError(
                f"dry_sequence_breakers: {text!r} is longer than {MAX_BREAKER_BYTES} bytes: shorten it"
            )
    return strings


def _logit_bias(value: object) -> dict[int, float] | None:
    """Return token ids with what is added to their logits; a mapping of JSON has its ids as strings."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias must be a mapping of token ids to numbers, not {value!r}")
    if len(value) > MAX_BIASES:
        raise ConfigError(f"logit_bias has {len(value)} tokens, the most is {MAX_BIASES}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not _is_int(token) or not 0 <= token < 2**31:
            raise ConfigError(f"logit_bias: a token is named by its id (0 and above), not {key!r}")
        if token in biases:
            raise ConfigError(f"logit_bias has token {token} twice")
        if bias is None:
            raise ConfigError(f"logit_bias: token {token} has None: give a number")
        if bias != -math.inf:
            _check_float(f"logit_bias of token {token} (−inf is a ban)", bias, -1e4, 1e4)
        biases[token] = float(bias)
    return biases


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(_is_int(t) and t >= 0 for t in value)
    ):
        raise ConfigError(f"{name} must be a list of token ids (0 and above), not {value!r}")
    return tuple(value)


def is_quantised(cell_type: str) -> bool:
    """Return whether a type of cells stores blocks of numbers rather than each by itself."""
    return cell_type not in ("f16", "f32", "bf16")


def _shares(name: str, value: object) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"{name} must be a list of shares, one a device, not {value!r}")
    for share in value:
        if share is None:
            raise ConfigError(f"{name} holds None: give a device that takes no part a share of 0")
        _check_float(f"a share in {name}", share, 0.0, 1e6)
    if not any(value):
        raise ConfigError(f"{name} has no share above 0: leave it out to split by free memory")
    return tuple(float(share) for share in value)


def _servers(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"{name} must be a list of 'host:port', not {value!r}")
    if len(value) > MAX_RPC_SERVERS:
        raise ConfigError(f"{name} has {len(value)} servers, the most is {MAX_RPC_SERVERS}")
    for server in value:
        host, _, port = server.partition(":") if isinstance(server, str) else ("", "", "")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ConfigError(
                f"{name}: a server is 'host:port' with a port of 1 … 65535, not {server!r}"
            )
    return tuple(value)


def _files(name: str, value: object) -> dict[str, str | os.PathLike[str]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of names to files, not {value!r}")
    for key, path in value.items():
        if key is None:
            raise ConfigError(f"{name} has the name None: give a string")
        _check_text(f"a name in {name}", key, MAX_KEY_LENGTH)
        _check_path(f"the file of {name} {key!r}", path)
    return dict(value)


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name} must be a path, not {value!r}")


_CHOICE_FLOATS = (
    ("temperature", 0.0, 1e4),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("top_n_sigma", -1.0, 1e3),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("repeat_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 0.0, 100.0),
)
_CHOICE_INTS = (
    ("top_k", 2**31 - 1),
    ("repeat_last_n", MAX_LAST_N),
    ("dry_allowed_length", 2**31 - 1),
    ("dry_penalty_last_n", MAX_LAST_N),
)
_SAMPLED = tuple(name for name, *_ in (*_CHOICE_FLOATS, *_CHOICE_INTS))
_NAMES = frozenset(f.name for f in fields(RunOptions))
_UNSAID = RunOptions()
