"""The options of one request: `RunOptions`, and the values that they become once they are merged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.option_checks import (
    check_adapters,
    check_dry_breakers,
    check_format,
    check_logit_bias,
    check_processor,
    check_schema,
    check_stop_tokens,
    check_stops,
    check_texts,
    schema_of,
)
from cbatch.support.checks import (
    MAX_GRAMMAR_LENGTH,
    MAX_INT,
    MAX_KEY_LENGTH,
    check_choice,
    check_fields,
    check_flag,
    check_float,
    check_int,
    check_names,
    check_seconds,
    check_text,
    checked,
    given_only,
    name_of,
    reading,
)
from cbatch.support.plain import flag_of, int_of
from cbatch.support.schemas import SchemaClass  # noqa: TC001  # the type hints of options are read
from cbatch.tools import (
    TemplateKwargs,
    Tool,
    ToolChoice,
    ToolFunction,
    Tools,
    check_template_kwargs,
    check_tool_choice,
    check_tools,
    demanded,
    offered,
    read_choice,
    template_choice,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SEED = 2**64 - 1

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~\n\r\t-]")
"""Characters that mean something in a regular expression, or cannot be in its line."""

_GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)
"""How a rule of a GBNF grammar begins. Blanks before it end at the line, or many blank lines would take long."""

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

MAX_LAST_N = 2**20
"""Most tokens that penalties and DRY look back over. Source: native/include/cbatch.h, CBATCH_LAST_N_MAX."""

DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""Source: llama.cpp common/common.h, common_params_sampling."""

MAX_PRIORITY = 100
MAX_CHOICES = 128
"""Source: the OpenAI API's limit of `n`."""

MAX_LOGPROBS = 20
"""Source: the OpenAI API's limit of `top_logprobs`."""


AdapterSet: TypeAlias = "tuple[tuple[str, float], ...]"
"""Names of LoRA adapters with their scales, in order of names; empty for the model alone."""


class LogitsProcessor(Protocol):
    """A function of your own that changes logits, such as llama-cpp-python's `LogitsProcessorList`."""

    def __call__(
        self, token_ids: NDArray[np.int32], logits: NDArray[np.float32], /
    ) -> NDArray[np.floating[Any]] | None:
        """Change the logits of the next token, in the thread that computes: all requests wait meanwhile.

        Args:
            token_ids: (n_tokens,) int32, read-only: the prompt and the answer so far, including tokens removed from the
                window.
            logits: (n_vocab,) float32: a copy of the model's logits, before grammar, bias, penalties and all samplers.
                May be changed in place; −∞ bans a token.

        Returns:
            None, or the logits to use instead: (n_vocab,) floats without NaN and +∞.

        Raises:
            BaseException: ends only this request, with a `RequestFailedError` whose cause it is. In the program's main
                thread, with `threaded=False`, one that is no `Exception`, such as Ctrl-C, is raised by `Engine.step`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's next token is chosen, with every value known.

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
    dry_breakers: bytes = field(default=b"", repr=False)
    """Token sequences that end a repetition: `Vocab.dry_breakers` of `dry_sequence_breakers`; opaque."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), ascending tokens."""

    @property
    def has_dry(self) -> bool:
        """Whether DRY changes anything."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, as text; equal texts are compiled once."""

    kind: Literal["json_schema", "regex", "lark", "gbnf", "tool_choice", "thinking_budget"]
    text: str


@dataclass(frozen=True, slots=True)
class DryBreakers:
    """DRY's strings; finding their token sequences takes a pass over the whole vocabulary."""

    strings: tuple[str, ...]


STRUCTURE = ("json_schema", "response_format", "regex", "choice", "grammar")
"""Options for what an answer must match; a request has one of them at most."""


def _literal(text: str) -> str:
    """Return a regular expression that matches this text alone."""
    return _META.sub(lambda found: _ESCAPES.get(found[0], f"\\{found[0]}"), text)


def check_runs_through(options: RunOptions) -> RunOptions:
    """Return options for a run over files. Refuse pauses, as nobody resumes, and functions, as records hold none."""
    if options.logits_processor is not None:
        why = (
            "works only in this process, with engine.run: a run over files cannot record a function"
        )
        raise UnsupportedOptionError("logits_processor", reason=why)
    if options.pause_every is not None:
        raise ConfigError(
            f"pause_every={options.pause_every} needs a program that calls engine.resume: leave it out"
        )
    return options


def check_one_answer(options: RunOptions | Mapping[str, Any], defaults: RunOptions) -> None:
    """Refuse several answers where a stream has room for one. Raises a `ConfigError`."""
    n = RunOptions.of(options).over(defaults).n or 1
    if n > 1:
        raise ConfigError(
            f"n={n} answers cannot be streamed as one text: leave n out, or ask without a stream"
        )


class _Copied(NamedTuple):
    """The checked values of options that have two names, or values of two kinds."""

    max_tokens: int | None
    logprobs: bool | int | None
    top_logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one request. An option that is `None` is taken from the run, then the engine, then the model.

    Args:
        max_tokens: most tokens to generate, ≥ 1, or 0 with `echo` or `prompt_logprobs` for the prompt alone. A number
            above the room in the slot's window means all of that room, with a warning. Default: all of that room.
        max_completion_tokens: OpenAI's newer name for `max_tokens`; give one of them.
        strict_max_tokens: refuse a prompt that does not fit the window together with all of `max_tokens`.
        stop: a string or several that end the answer, at most 256 of 4,096 bytes together; left out of the text unless
            `include_stop` is set.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop: keep the stop string or stop token in the text, and the model's end token in the tokens and their
            `logprobs`.
        ignore_eos: go on past the model's end-of-generation tokens.
        temperature: ≥ 0; 0 is greedy. Default: the model's `general.sampling.temp`, else 0.8.
        top_k: keep the k most probable tokens; 0 keeps all. Default: the model's, else 40.
        top_p: keep the smallest set with this probability, 0 … 1. Default: the model's, else 0.95.
        min_p: drop tokens below this share of the most probable one, 0 … 1. Default: the model's, else 0.05.
        typical_p: keep the tokens whose surprise is nearest to the expected one, with this total probability, 0 … 1.
            Default: 1, which keeps all.
        top_n_sigma: drop tokens whose logit is more than this many standard deviations below the largest, −1 … 1,000;
            0 and below keep all. Default: keep all.
        xtc_probability: how often XTC drops the most probable tokens except the least probable of them, 0 … 1.
            Default: the model's, else 0.
        xtc_threshold: the probability from which XTC drops tokens, 0 … 1; above 0.5 it drops none. Default: the
            model's, else 0.1.
        repeat_penalty: divide positive logits of earlier tokens by this and multiply negative ones, 0.01 … 100.
            Default: the model's, else 1.
        repeat_last_n: tokens that the three penalties look back over, the prompt's included, 0 … 2²⁰. Default: the
            model's, else 64.
        presence_penalty: take this off the logit of every earlier token, −100 … 100. Default: 0.
        frequency_penalty: take this off the logit of a token for each earlier occurrence, −100 … 100. Default: 0.
        dry_multiplier: DRY: take `dry_multiplier · dry_base ^ (length − dry_allowed_length)` off the logit of a token
            that would continue a repetition of `length` tokens, 0 … 100. Default: 0.
        dry_base: DRY: 0 … 100; below 1 turns DRY off. Default: 1.75.
        dry_allowed_length: DRY: shorter repetitions are free, ≥ 0. Default: 2.
        dry_penalty_last_n: DRY: tokens to look back over, the prompt's included, 0 … 2²⁰. Default: 64.
        dry_sequence_breakers: DRY: strings that end a repetition, at most 64 of at most 40 bytes. Default: newline,
            colon, quotation mark, asterisk.
        logit_bias: token ids, also written as strings, to what is added to their logits: −10,000 … 10,000, or −∞ to
            ban a token; at most 4,096.
        logits_processor: a function of (token ids, logits) that changes the model's logits before everything else, see
            `LogitsProcessor`. Slow: it is called for each token while all requests wait. Only in this process: not with
            replicas, over HTTP or in files.
        seed: 0 … 2⁶⁴ − 1; 0 is a seed like any other. Default: drawn, and reported in the result.
        n: answers to this prompt, 1 … 128, in `result.choices`; the prompt is computed once. Default: 1.
        best_of: answers to compute, of which the `n` with the highest mean log-probability are kept, n … 128.
            Default: n.
        logprobs: report the log-probability of each token in `result.logprobs`, from the model's logits before any
            option; a number also sets `top_logprobs`.
        top_logprobs: with `logprobs`, also report this number of the likeliest tokens at each position, 0 … 20.
        prompt_logprobs: report the log-probability of each prompt token in `result.prompt_logprobs`, with this number
            of the likeliest at its position, 0 … 20; the prompt is then computed 64 tokens a step.
        prompt_logprobs_start: place of the first prompt token that `prompt_logprobs` reports, ≥ 0; those before it are
            None, and are computed once for all prompts that begin alike. Default: the first.
        echo: put the prompt before the answer in text and tokens, and in `logprobs` if requested; not for chats.
        priority: −100 … 100; the highest runs first in an engine with `policy="priority"`. Default: 0.
        slot: the slot to run in, 0 … `parallel` − 1; the request waits until that one is free. Default: any.
        pause_every: pause the request whenever it has sampled this many tokens since it was started or resumed, ≥ 1;
            `engine.resume(id)` lets it go on. Default: never.
        timeout_s: seconds from submission, queue time included; then the request ends `timeout` with its partial text.
        cache_salt: share cells in memory only with prompts of the same salt. Default: with those without one.
        cache_key: start from the cells kept on disk under this name, as far as their tokens begin the prompt. Any
            number of requests without `save_cache` may read one key at a time.
        save_cache: at the end, keep the cells of prompt and answer on disk under `cache_key`.
        cache_required: fail if nothing usable is kept under `cache_key`. Default: compute the prompt, with a warning.
        prefill_only: compute the prompt and sample nothing; its cells stay in memory, and on disk if saved.
        n_discard: when the window is full, by an answer or by the prompt already, remove this number of tokens after
            the first `n_keep` and go on; only where the model's memory can shift. Default: 0, which ends the answer
            `window`.
        n_keep: tokens that are never removed; −1 for the whole prompt. Default: a chat's first message, else 1.
        adapter: the LoRA adapter to answer with, by the name it was loaded under, or a mapping of names to scales.
        tools: at most 1,024 functions that the model may call, as in OpenAI's API, or Python functions; its calls are
            in the result.
        tool_choice: "none", "auto", "required" (also "any"), one function by name, or OpenAI's "allowed_tools", which
            offers the listed ones alone. Default: auto.
        parallel_tool_calls: False for at most one call: an answer that must call has no second call, any other keeps
            its first. Default: True.
        chat_template_kwargs: variables for the chat template, such as `enable_thinking`; they are joined, by name, with
            those of the run and of `load`, which an empty mapping leaves out.
        reasoning_format: "auto" splits the reasoning off the text where the template marks it; "none" leaves it there.
            Default: auto.
        thinking_budget: most tokens of a chat's thinking, behind which its closing mark is written for the model; where
            the template's marks of thinking are tokens. Default: no limit but `max_tokens`.
        skip_special_tokens: leave control tokens out of the text. Default: True.
        json_schema: a schema that the JSON answer matches: a mapping, a pydantic class, or JSON text; kept as text.
        response_format: OpenAI's form of it: `{"type": "json_schema", "json_schema": {"schema": …}}`, the type
            "json_object" for any JSON object, or "text" for no constraint; with `"strict": True` beside the schema,
            objects have no keys but those listed. Or a pydantic class. Kept as JSON text.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate.
        choice: texts of which the answer is one, such as the labels of a class, at most 1,000; give `max_tokens` room
            for the longest.
        choice_probs: choose among the texts of `choice` by scoring each of them, instead of sampling. The answer is the
            likeliest; `result.choice_probs` has the probability of each, 1 in all. Not for prompts of tokens.
        grammar: a grammar that the answer matches, in llguidance's Lark, or in llama.cpp's GBNF, recognised by `::=`.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
        UnsupportedOptionError: a name that is not listed above.

    Source of the names: the OpenAI API and llama.cpp; of the defaults: llama.cpp `common/common.h`.
    """

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    strict_max_tokens: bool | None = checked(check_flag)
    stop: str | Sequence[str] | None = checked(check_stops)
    stop_token_ids: Sequence[int] | None = checked(check_stop_tokens)
    include_stop: bool | None = checked(check_flag)
    ignore_eos: bool | None = checked(check_flag)
    temperature: float | None = checked(check_float, 0.0, 1e4)
    top_k: int | None = checked(check_int, 0, MAX_INT)
    top_p: float | None = checked(check_float, 0.0, 1.0)
    min_p: float | None = checked(check_float, 0.0, 1.0)
    typical_p: float | None = checked(check_float, 0.0, 1.0)
    top_n_sigma: float | None = checked(check_float, -1.0, 1e3)
    xtc_probability: float | None = checked(check_float, 0.0, 1.0)
    xtc_threshold: float | None = checked(check_float, 0.0, 1.0)
    repeat_penalty: float | None = checked(check_float, 0.01, 100.0)
    repeat_last_n: int | None = checked(check_int, 0, MAX_LAST_N)
    presence_penalty: float | None = checked(check_float, -100.0, 100.0)
    frequency_penalty: float | None = checked(check_float, -100.0, 100.0)
    dry_multiplier: float | None = checked(check_float, 0.0, 100.0)
    dry_base: float | None = checked(check_float, 0.0, 100.0)
    dry_allowed_length: int | None = checked(check_int, 0, MAX_INT)
    dry_penalty_last_n: int | None = checked(check_int, 0, MAX_LAST_N)
    dry_sequence_breakers: Sequence[str] | None = checked(check_dry_breakers)
    logit_bias: Mapping[int, float] | None = checked(check_logit_bias)
    logits_processor: LogitsProcessor | None = checked(check_processor)
    seed: int | None = checked(check_int, 0, MAX_SEED)
    n: int | None = checked(check_int, 1, MAX_CHOICES)
    best_of: int | None = checked(check_int, 1, MAX_CHOICES)
    logprobs: bool | int | None = None
    top_logprobs: int | None = checked(check_int, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = checked(check_int, 0, MAX_LOGPROBS)
    prompt_logprobs_start: int | None = checked(check_int, 0, MAX_INT)
    echo: bool | None = checked(check_flag)
    priority: int | None = checked(check_int, -MAX_PRIORITY, MAX_PRIORITY)
    slot: int | None = checked(check_int, 0, MAX_INT)
    pause_every: int | None = checked(check_int, 1, MAX_INT)
    timeout_s: float | None = checked(check_seconds)
    cache_salt: str | None = checked(check_text, MAX_KEY_LENGTH)
    cache_key: str | None = checked(check_text, MAX_KEY_LENGTH)
    save_cache: bool | None = checked(check_flag)
    cache_required: bool | None = checked(check_flag)
    prefill_only: bool | None = checked(check_flag)
    n_keep: int | None = checked(check_int, -1, MAX_INT)
    n_discard: int | None = checked(check_int, 0, MAX_INT)
    adapter: str | Mapping[str, float] | None = checked(check_adapters)
    tools: Sequence[Tool | ToolFunction] | None = checked(lambda _, value: check_tools(value))
    tool_choice: ToolChoice | None = checked(lambda _, value: check_tool_choice(value))
    parallel_tool_calls: bool | None = checked(check_flag)
    chat_template_kwargs: Mapping[str, Any] | None = checked(
        lambda _, value: check_template_kwargs(value)
    )
    reasoning_format: Literal["auto", "none"] | None = checked(check_choice, "auto", "none")
    thinking_budget: int | None = checked(check_int, 0, MAX_INT)
    skip_special_tokens: bool | None = checked(check_flag)
    json_schema: str | Mapping[str, Any] | SchemaClass | None = checked(check_schema)
    response_format: str | Mapping[str, Any] | SchemaClass | None = checked(check_format)
    regex: str | None = checked(check_text, MAX_GRAMMAR_LENGTH)
    choice: Sequence[str] | None = checked(check_texts)
    choice_probs: bool | None = checked(check_flag)
    grammar: str | None = checked(check_text, MAX_GRAMMAR_LENGTH)
    _stop_sets: ClassVar[tuple[Sequence[int], frozenset[int], frozenset[int]] | None] = None
    _sorted: ClassVar[tuple[Sequence[int], tuple[tuple[int, float], ...]] | None] = None
    _copied: InitVar[_Copied | None] = None
    """In a copy by `dataclasses.replace`: the original's checked values, to find what the copy changes."""

    __repr__ = given_only

    def __new__(cls, **options: Any) -> RunOptions:
        """Refuse unknown names with cbatch's own error."""
        check_names(_NAMES, (n for n, value in options.items() if not isinstance(value, _Copied)))
        return super().__new__(cls)

    def __post_init__(self, _copied: _Copied | None) -> None:
        """Check every value once, where the caller still sees which line is wrong."""
        if _copied is not None:
            self._let_new_aliases_win(_copied)
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ConfigError(
                    "max_tokens and max_completion_tokens are the same option: give one of them"
                )
            self._settle("max_tokens", self.max_completion_tokens)
            self._settle("max_completion_tokens", None)
        check_fields(self)
        self._check_max_tokens()
        self._check_choices()
        self._check_logprobs()
        self._check_structure()
        self._settle("_copied", _Copied(self.max_tokens, self.logprobs, self.top_logprobs))

    def _let_new_aliases_win(self, old: _Copied) -> None:
        """Drop the original's value where a copy gives the same option by its other name."""
        if self.max_completion_tokens is not None and self.max_tokens == old.max_tokens:
            self._settle("max_tokens", None)
        if self.logprobs is not old.logprobs and self.top_logprobs == old.top_logprobs:
            has_alternatives = self.logprobs is True or (self.logprobs is None and not old.logprobs)
            self._settle("top_logprobs", old.top_logprobs if has_alternatives else None)

    def _check_structure(self) -> None:
        given = [name for name in STRUCTURE if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both constrain the answer: give one of them")
        if self.response_format is not None:
            schema_of(str(self.response_format))
        if read_choice(self.tool_choice).mode == "required" and self.structure is not None:
            raise ConfigError(
                f"{given[0]} and tool_choice={self.tool_choice!r} both constrain the answer: give one of them"
            )

    def _check_max_tokens(self) -> None:
        if self.max_tokens is None:
            return
        n_least = 0 if self.echo or self.prompt_logprobs is not None else 1
        try:
            self._settle("max_tokens", check_int("max_tokens", self.max_tokens, n_least, MAX_INT))
        except ConfigError as error:
            if int_of(self.max_tokens) != 0:
                raise
            raise ConfigError(
                f"{error}: 0 needs echo or prompt_logprobs; to compute a prompt for the cache alone, use prefill_only"
            ) from None

    def _check_choices(self) -> None:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ConfigError(
                f"best_of={self.best_of} is less than n={self.n}: raise best_of, or lower n"
            )
        if self.n_choices == 1:
            return
        asked = {
            "prefill_only": self.prefill_only,
            "save_cache": self.save_cache,
            f"slot={self.slot}": self.slot is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ConfigError(
                    f"{name} allows one answer, not {self.n_choices}: leave out n and best_of"
                )

    def _check_logprobs(self) -> None:
        flag = flag_of(self.logprobs)
        if self.logprobs is not None and flag is None:
            n_top = check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
            if self.top_logprobs is None:
                self._settle("top_logprobs", n_top)
            flag = True
        self._settle("logprobs", flag)
        if self.top_logprobs and self.logprobs is False:
            raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: RunOptions | Mapping[str, Any] | None) -> RunOptions:
        """Return `value` itself, options built from a mapping, or empty options for None.

        Raises:
            ConfigError: neither options nor a mapping, or a value in it is wrong.
        """
        if value is None:
            return NO_OPTIONS
        if type(value) is RunOptions:
            return value
        with reading("options"):
            if isinstance(value, RunOptions):
                return value
            if isinstance(value, Mapping):
                return cls(**{name_of(name): option for name, option in value.items()})
        raise ConfigError(f"options must be RunOptions or a mapping, not {type(value).__name__}")

    def over(self, other: RunOptions) -> RunOptions:
        """Return these options, and those of `other` where these are None; `chat_template_kwargs` are merged."""
        given = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if not given:
            return other
        if all(getattr(other, name) is None for name in _NAMES):
            return self
        kept = _NAMES
        if given.keys() & set(STRUCTURE):
            kept = kept.difference(STRUCTURE, () if "choice" in given else ("choice_probs",))
        if self.logprobs is False:
            kept = kept.difference(("top_logprobs",))
        if self.chat_template_kwargs and other.chat_template_kwargs:
            joined = {**other.chat_template_kwargs, **self.chat_template_kwargs}
            given["chat_template_kwargs"] = TemplateKwargs(joined)
        return RunOptions(**{name: getattr(other, name) for name in kept} | given)

    @property
    def n_choices(self) -> int:
        """Answers to compute."""
        return self.best_of or self.n or 1

    @property
    def n_sequences(self) -> int:
        """Sequences of the engine for one prompt: answers to compute, or with `choice_probs` texts to score."""
        return len(self.choice or "?") if self.choice_probs else self.n_choices

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives to report for each token; None where no log-probability is requested.

        Raises:
            ConfigError: alternatives are requested, but no log-probabilities.
        """
        if not self.logprobs:
            if self.top_logprobs:
                raise ConfigError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
            return 0 if self.n_choices > (self.n or 1) else None
        return self.top_logprobs or 0

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Alternatives to report for each prompt token; None where no log-probability of them is requested."""
        n_top = self.n_logprobs if self.echo and self.logprobs else None
        return max((n for n in (self.prompt_logprobs, n_top) if n is not None), default=None)

    @property
    def structure(self) -> Grammar | None:
        """What the answer must match, by whichever option."""
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None and not self.choice_probs:
            return Grammar("regex", "|".join(map(_literal, self.choice)))
        if self.grammar is not None:
            is_gbnf = _GBNF_RULE.search(self.grammar)
            return Grammar("gbnf" if is_gbnf else "lark", self.grammar)
        schema = self.json_schema
        if self.response_format is not None:
            schema = schema_of(str(self.response_format))
        return None if schema is None else Grammar("json_schema", str(schema))

    def dry_breakers(self, sampling: Sampling) -> DryBreakers | None:
        """Return the strings that end a repetition; None where `sampling`, which is complete, has no DRY."""
        strings = self.dry_sequence_breakers
        known = DRY_SEQUENCE_BREAKERS if strings is None else tuple(strings)
        return DryBreakers(known) if sampling.has_dry and known else None

    @property
    def adapters(self) -> AdapterSet:
        """The adapters to answer with; an adapter of scale 0 changes nothing and is left out."""
        scales = self.adapter if isinstance(self.adapter, Mapping) else {}
        return tuple((name, scale) for name, scale in scales.items() if scale)

    @property
    def offered_tools(self) -> Tools:
        """The tools that the model may call.

        Raises:
            ConfigError: `tool_choice` does not fit `tools`.
        """
        return offered(check_tools(self.tools), self.tool_choice)

    @property
    def demanded_tools(self) -> Tools:
        """The tools of which the answer must call one; empty where it need not call any.

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
                variables["tool_choice"] = template_choice(self.tool_choice)
        return variables

    def stop_sets(self, own: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return `stop_token_ids` as a set, and with the model's `own` end tokens; the same ones each time."""
        made = self._stop_sets
        if made is None or made[0] != own:
            asked = frozenset(self.stop_token_ids or ())
            made = own, asked, asked.union(own)
            object.__setattr__(self, "_stop_sets", made)
        return made[1:]

    def sampling(
        self,
        defaults: Mapping[str, float],
        seed: int,
        banned: Sequence[int] = (),
    ) -> Sampling:
        """Return the sampling values: these, then the model's `defaults`, then llama.cpp's; without `dry_breakers`.

        Args:
            defaults: the model's own values, by the names of `Sampling`.
            seed: the request's seed, or the one drawn for it.
            banned: tokens that are never sampled, whatever `logit_bias` has for them.
        """
        given = {name: v for name in _SAMPLED if (v := getattr(self, name)) is not None}
        known: dict[str, Any] = {**defaults, **given, "seed": seed}
        return Sampling(**known | {"logit_bias": self._biases(banned)})

    def _biases(self, banned: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Return all biases in order; the same tuple each time, for requests with the same options share it."""
        made = self._sorted
        if made is None or made[0] != banned:
            biases = {**(self.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}
            made = banned, tuple(sorted(biases.items()))
            object.__setattr__(self, "_sorted", made)
        return made[1]


_SAMPLED = tuple(f.name for f in fields(Sampling) if f.name in RunOptions.__annotations__)
"""Options that are values of `Sampling` as they are."""
_NAMES = frozenset(f.name for f in fields(RunOptions))
values_of = attrgetter(*(f.name for f in fields(RunOptions)))
"""Returns the values of options, in the order of their fields."""
NO_OPTIONS = RunOptions()
"""Options of which none is set."""
