"""What a caller may ask of one request: `RunOptions`, merged from the nearest down to the model's own defaults."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from cbatch.checks import (
    MAX_GRAMMAR_LENGTH,
    MAX_INT,
    MAX_KEY_LENGTH,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_keys,
    check_seconds,
    check_text,
    json_object,
    json_text,
    reading,
    settle,
    shown,
    strings_of,
    token_ids,
)
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.plain import flag_of, int_of, number_of, text_of
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

AdapterSet: TypeAlias = "tuple[tuple[str, float], ...]"
"""Names of LoRA adapters with their scales, in order of names; empty for the model alone."""


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


_STRUCTURE = ("json_schema", "response_format", "regex", "grammar")
"""Options that say what an answer must match: one request has one of them."""


class _Copied(NamedTuple):
    """What options say that have two names, or values of two kinds."""

    max_tokens: int | None
    logprobs: bool | int | None
    top_logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one request; `None` means "not said here", and the nearest that says it wins.

    Args:
        max_tokens: most tokens to generate, ≥ 1; not said, or more than the slot's window has room for: to its end,
            with a warning where more was said. 0 with `echo` or `prompt_logprobs`: the prompt alone.
        max_completion_tokens: OpenAI's newer name for `max_tokens`; give one of them.
        strict_max_tokens: refuse a prompt that does not fit the window together with all of `max_tokens`.
        stop: a string, or several, that end the answer; not part of it unless `include_stop`.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop: keep the stop string or token that ended the answer: in its text, and, as the model's own end
            token, in its tokens and their `logprobs`.
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
        parallel_tool_calls: False for one call at most: where a call is required the answer has no second one, where it
            is not the first is kept. Not said: True.
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
    strict_max_tokens: bool | None = None
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
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_format: Literal["auto", "none"] | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    response_format: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    _copied: InitVar[_Copied | None] = None
    """In a copy by `dataclasses.replace`: what the original settled, to tell what is new beside it."""

    def __new__(cls, **options: Any) -> RunOptions:
        """Refuse unknown names with cbatch's own error."""
        for name, value in options.items():
            if name not in _NAMES and not isinstance(value, _Copied):
                raise UnsupportedOptionError(name, sorted(_NAMES))
        return super().__new__(cls)

    def __post_init__(self, _copied: _Copied | None) -> None:
        """Check every value once, where the caller still sees the line that is wrong."""
        if _copied is not None:
            self._let_new_aliases_win(_copied)
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ConfigError(
                    "max_tokens and max_completion_tokens are one option: give one of them"
                )
            self._settle("max_tokens", self.max_completion_tokens)
            self._settle("max_completion_tokens", None)
        self._check_max_tokens()
        for name, check, limits in _CHECKS:
            if getattr(self, name) is not None:
                self._check(name, check, *limits)
        self._check_choices()
        self._check_logprobs()
        self._check_structure()
        self._settle("_copied", _Copied(self.max_tokens, self.logprobs, self.top_logprobs))

    def _let_new_aliases_win(self, old: _Copied) -> None:
        """Drop what comes from the original where a copy says the same by another name."""
        if self.max_completion_tokens is not None and self.max_tokens == old.max_tokens:
            self._settle("max_tokens", None)
        if self.logprobs is not old.logprobs and self.top_logprobs == old.top_logprobs:
            has_alternatives = self.logprobs is True or (self.logprobs is None and not old.logprobs)
            self._settle("top_logprobs", old.top_logprobs if has_alternatives else None)

    def _check_structure(self) -> None:
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
        is_for_prompt = flag_of(self.echo) or self.prompt_logprobs is not None
        try:
            self._check("max_tokens", check_int, 0 if is_for_prompt else 1, MAX_INT)
        except ConfigError as error:
            if int_of(self.max_tokens) != 0:
                raise
            raise ConfigError(
                f"{error}: without echo or prompt_logprobs nothing would come of it; prefill_only computes a prompt "
                "for its cells"
            ) from None

    def _check_choices(self) -> None:
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
        flag = flag_of(self.logprobs)
        if self.logprobs is not None and flag is None:
            self._check("logprobs", check_int, 0, MAX_LOGPROBS)
            if self.top_logprobs is None:
                self._settle("top_logprobs", self.logprobs)
            flag = True  # which equals 1, but means another number of alternatives
        self._settle("logprobs", flag)
        self._check("top_logprobs", check_int, 0, MAX_LOGPROBS)
        if self.top_logprobs and self.logprobs is False:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")

    def _check(self, name: str, check: Callable[..., object], *limits: object) -> None:
        """Replace a value that is said by what a check makes of it."""
        if getattr(self, name) is not None:
            settle(self, check, name, *limits)

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
        if type(value) is RunOptions:
            return value
        with reading("options"):
            if isinstance(value, RunOptions):
                return value
            if isinstance(value, Mapping):
                return cls(**{_name(name): said for name, said in value.items()})
        raise ConfigError(f"options must be RunOptions or a mapping, not {type(value).__name__}")

    def over(self, other: RunOptions) -> RunOptions:
        """Return these options where they say something and `other` where they do not."""
        said = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if not said:
            return other
        kept = _NAMES.difference(_STRUCTURE) if said.keys() & set(_STRUCTURE) else _NAMES
        if self.logprobs is False:  # which leaves nothing to have alternatives of
            kept = kept.difference(("top_logprobs",))
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
    check_keys(
        "response_format", said, ("type", "json_schema") if kind == "json_schema" else ("type",)
    )
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type":"object"}'
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ConfigError('response_format needs {"json_schema": {"schema": {…}}} with this type')
    check_keys("response_format: json_schema", inner, ("name", "description", "schema", "strict"))
    check_bool("response_format: strict", inner.get("strict"))
    return json_text("response_format: schema", inner["schema"])


def _name(given: object) -> str:
    """Return the name of an option.

    Raises:
        UnsupportedOptionError: it is no text, or no name that can be given.
    """
    name = text_of(given)
    if name is None or name not in _NAMES:
        raise UnsupportedOptionError(shown(given) if name is None else name, sorted(_NAMES))
    return name


def _adapters(name: str, value: object) -> Mapping[str, float]:
    """Return names with their scales, in order of names; a name alone has scale 1."""
    alone = text_of(value)
    scales = value if alone is None else {alone: 1.0}
    if not isinstance(scales, Mapping) or None in map(text_of, scales):
        raise ConfigError(
            f"{name} must be a name or a mapping of names to scales, not {shown(value)}"
        )
    found = {str(text_of(key)): scale for key, scale in scales.items()}
    return {key: _scale(key, found[key]) for key in sorted(found)}


def _scale(adapter: str, value: object) -> float:
    check_text("an adapter's name", adapter, MAX_KEY_LENGTH)
    scale = check_float(f"the scale of adapter {adapter!r}", value, -100.0, 100.0)
    if scale is None:
        raise ConfigError(f"adapter {adapter!r} has no scale: give a number")
    return float(scale)


def _breakers(name: str, value: object) -> tuple[str, ...]:
    strings = strings_of(name, value) or ()
    if len(strings) > MAX_BREAKERS:
        raise ConfigError(f"{name} has {len(strings)} strings, the most is {MAX_BREAKERS}")
    for text in strings:
        if len(text.encode()) > MAX_BREAKER_BYTES:
            raise ConfigError(
                f"{name}: {shown(text)} is longer than {MAX_BREAKER_BYTES} bytes: shorten it"
            )
    return strings


def _logit_bias(name: str, value: object) -> dict[int, float]:
    """Return token ids with what is added to their logits; a mapping of JSON has its ids as strings."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of token ids to numbers, not {shown(value)}")
    if len(value) > MAX_BIASES:
        raise ConfigError(f"{name} has {len(value)} tokens, the most is {MAX_BIASES}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = _token(name, key)
        if token in biases:
            raise ConfigError(f"{name} has token {token} twice")
        biases[token] = _bias(f"{name} of token {token} (−inf is a ban)", bias)
    return biases


def _token(name: str, key: object) -> int:
    text = text_of(key) or ""
    token = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else int_of(key)
    if token is None or not 0 <= token < 2**31:
        raise ConfigError(f"{name}: a token is named by its id (0 and above), not {shown(key)}")
    return token


def _bias(name: str, value: object) -> float:
    if number_of(value) == -math.inf:
        return -math.inf
    bias = check_float(name, value, -1e4, 1e4)
    if bias is None:
        raise ConfigError(f"{name} is None: give a number")
    return float(bias)


_SWITCHES = (
    "strict_max_tokens",
    "include_stop",
    "ignore_eos",
    "echo",
    "save_cache",
    "cache_required",
    "prefill_only",
    "parallel_tool_calls",
    "skip_special_tokens",
)
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
    ("top_k", MAX_INT),
    ("repeat_last_n", MAX_LAST_N),
    ("dry_allowed_length", MAX_INT),
    ("dry_penalty_last_n", MAX_LAST_N),
)
_Check: TypeAlias = "tuple[str, Callable[..., object], tuple[object, ...]]"
_CHECKS: tuple[_Check, ...] = (
    ("stop", strings_of, ()),
    ("stop_token_ids", token_ids, ()),
    ("seed", check_int, (0, MAX_SEED)),
    *((name, check_float, (low, high)) for name, low, high in _CHOICE_FLOATS),
    *((name, check_int, (0, most)) for name, most in _CHOICE_INTS),
    ("dry_sequence_breakers", _breakers, ()),
    ("logit_bias", _logit_bias, ()),
    ("priority", check_int, (-MAX_PRIORITY, MAX_PRIORITY)),
    ("timeout_s", check_seconds, ()),
    *((name, check_bool, ()) for name in _SWITCHES),
    ("cache_key", check_text, (MAX_KEY_LENGTH,)),
    ("n_keep", check_int, (-1, MAX_INT)),
    ("n_discard", check_int, (0, MAX_INT)),
    ("adapter", _adapters, ()),
    ("tools", lambda _, value: check_tools(value), ()),
    ("tool_choice", lambda _, value: check_tool_choice(value), ()),
    ("chat_template_kwargs", lambda _, value: check_template_kwargs(value), ()),
    ("reasoning_format", check_choice, ((None, "auto", "none"),)),
    ("n", check_int, (1, MAX_CHOICES)),
    ("best_of", check_int, (1, MAX_CHOICES)),
    ("prompt_logprobs", check_int, (0, MAX_LOGPROBS)),
    *((name, json_object, ()) for name in ("json_schema", "response_format")),
    *((name, check_text, (MAX_GRAMMAR_LENGTH,)) for name in ("regex", "grammar")),
)
"""Every option that needs no other one to be checked, in the order in which a wrong one is told."""
_SAMPLED = tuple(name for name, *_ in (*_CHOICE_FLOATS, *_CHOICE_INTS))
_NAMES = frozenset(f.name for f in fields(RunOptions))
_UNSAID = RunOptions()
