"""The fields of requests, and what becomes of each: an option, nothing, or a refusal.

Source of the names: OpenAI's API reference; llama.cpp tools/server; vLLM's sampling parameters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from cbatch.errors import ConfigError, GrammarError, UnsupportedOptionError, UnsupportedTaskError
from cbatch.option_checks import MAX_BIASES
from cbatch.options import MAX_LAST_N, MAX_SEED, NO_OPTIONS, RunOptions
from cbatch.server.http_errors import bad_request, problem_of, refused, unknown_field
from cbatch.server.typed_bodies import read_body
from cbatch.support.checks import MAX_KEY_LENGTH, check_float, reading, shown
from cbatch.support.plain import int_of
from cbatch.tools import check_tool_choice, read_choice

if TYPE_CHECKING:
    from cbatch.messages import BatchPrompt

Convert = Callable[[Any], Any]

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "prediction", "safety_identifier", "verbosity"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    | {"cache_prompt", "n_cache_reuse", "backend_sampling"}
    | {"timings_per_token", "request_id", "spaces_between_special_tokens"}
)
"""Names that do not change the answer."""

HARMLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), "answers are text only"),
    "suffix": (("",), "write it into the prompt"),
    "add_special_tokens": ((True,), "give token ids as the prompt"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "use_beam_search": ((False,), "use best_of"),
    "length_penalty": ((1,), "there is no beam search"),
    "mirostat": ((0,), "use temperature with min_p"),
    "dynatemp_range": ((0,), "use temperature"),
    "adaptive_target": ((-1,), "use temperature with min_p"),
    "bad_words": (([],), "use logit_bias"),
    "post_sampling_probs": ((False,), "log-probabilities are those before sampling"),
    "min_keep": ((0, 1), "lower top_k, top_p or min_p to keep more tokens"),
    "t_max_predict_ms": ((-1, 0), "use timeout_s"),
    "n_indent": ((0,), "use a grammar"),
    "grammar_lazy": ((False,), "a grammar applies to the whole answer"),
    "lora": (([],), "use adapter"),
}
"""Names that are ignored where their value asks for what is done anyway: these values, and what to do instead."""

_UNSAID_IF_EMPTY = frozenset({"model", "grammar", "regex", "guided_grammar", "guided_regex"})
"""Fields whose empty text means, as null does, that they are not given."""

REFUSED: Mapping[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are text only",
    "web_search_options": "the server has no web search",
    "allowed_token_ids": "use logit_bias or a grammar",
    "truncate_prompt_tokens": "shorten the prompt",
    "chat_template": "the server uses its own",
    "documents": "write them into a message",
    "logits_processor": "it works only in the server's process; use logit_bias or a grammar",
    "pause_every": "the server cannot resume a request",
}
"""Names that would change the answer, with what to do instead."""

RENAMED = {
    "typ_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "include_stop_str_in_output": "include_stop",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "id_slot": "slot",
    "n_cmpl": "n",
    **dict.fromkeys(
        ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"), "thinking_budget"
    ),
}
"""Names of others, and the option that each is."""

_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Keys of vLLM's `structured_outputs`, and the option of each."""

SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}
"""Samplers in the order in which they run, and the options that leave each out."""

_SAMPLER_ORDER = (*SAMPLERS,)
_SAMPLER_LETTERS = dict(zip("edskypmxt", _SAMPLER_ORDER, strict=True))
_SAMPLER_NAMES = {
    **{name.replace("_", sign): name for name in _SAMPLER_ORDER for sign in ("_", "-", "")},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}

MAX_TOKENS = ("max_completion_tokens", "max_tokens", "n_predict")
"""Names of the cap, the first that is given counts."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_LENGTH)]


class _StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class CommonFields(Struct, frozen=True):
    """What every dialect reads, and is not an option."""

    model: Name | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    n_probs: Any = 0
    return_tokens: bool = False
    return_token_ids: bool = False
    return_progress: bool = False
    reasoning_effort: Name | None = None
    structured_outputs: dict[str, Any] | None = None
    samplers: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


READ_BY_ALL = (*CommonFields.__struct_fields__, *MAX_TOKENS)
"""Names that the server itself reads."""

OF_OPENAI = ("stream_options", "n_probs", "return_tokens", "return_token_ids", "return_progress")
"""Those of them for which no other dialect has a place. They do not change the answer."""

OPTION_NAMES = frozenset(f.name for f in fields(RunOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a format reads otherwise than OpenAI's."""

    own: Sequence[str]
    """Names that it reads itself."""
    ignored: frozenset[str] = frozenset()
    """Names that do not change the answer."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Names that would change the answer, with what to do instead."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options where the request says none."""
    is_openai: bool = True
    """Whether it has a place for all of `OF_OPENAI`."""


@dataclass
class RequestFields:
    """The fields of a call, sorted by what becomes of them."""

    dialect: Dialect
    common: CommonFields = field(default_factory=CommonFields)
    biased_texts: list[tuple[str, float]] = field(default_factory=list)
    """Texts whose tokens have a bias, until `see_vocabulary` has found these."""
    options: RunOptions = NO_OPTIONS
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Those of them that no endpoint reads."""
    fields: dict[str, str] = field(default_factory=dict)
    """The field that each option comes from."""

    @property
    def has_tokens(self) -> bool:
        """Whether the ids of tokens are wanted."""
        return self.common.return_tokens or self.common.return_token_ids

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are read."""
        return (*self.dialect.own, *READ_BY_ALL, *OPTION_NAMES)


Options = dict[str, tuple[str, Any]]
"""Options by name: the field that each comes from, and its value."""


def asked_of(
    body: Mapping[str, Any],
    dialect: Dialect,
    options: Options | None = None,
    *,
    variables: tuple[str, Mapping[str, Any]] = ("", {}),
    ignored: Sequence[str] = (),
    is_strict: bool = False,
) -> RequestFields:
    """Return the fields of a body; null means that a field is not said.

    Args:
        options: those that the dialect has read itself.
        variables: those of the chat template that the dialect has read itself, after the name of their field.
        ignored: what the dialect has ignored itself.
        is_strict: refuse unknown names.

    Raises:
        HttpProblemError: a field is wrong, would change the answer and is not there, or means the same as another.
    """
    given = {
        name: value
        for name, value in body.items()
        if value is not None and not (name in _UNSAID_IF_EMPTY and value == "")
    }
    asked, found = RequestFields(dialect), dict(options or {})
    common = _sorted(given, asked, found, is_strict=is_strict)
    asked.ignored += dict.fromkeys(ignored)
    found |= _read_common(asked, common, found)
    _add_variables(found, *variables)
    _read_biases(asked, found)
    for option, value in dialect.defaults.items():
        found.setdefault(option, (option, value))
    if "max_tokens" in found and found["max_tokens"][1] is None:
        del found["max_tokens"]  # no cap was asked for
    _ignore_moot_format(found, asked.ignored)
    asked.fields = {option: name for option, (name, _) in found.items()}
    asked.options = _built(found)
    return asked


def _sorted(
    given: Mapping[str, Any], asked: RequestFields, options: Options, *, is_strict: bool
) -> dict[str, Any]:
    """Add options to those that the dialect has read itself, and ignored names; return what every dialect reads."""
    dialect, of_dialect, common = asked.dialect, {**options}, dict[str, Any]()
    for name, value in given.items():
        if name in dialect.own:
            continue
        option = RENAMED.get(name, name)
        if (why := dialect.refused.get(option)) is not None:
            raise refused(name, why)
        if name in READ_BY_ALL and (dialect.is_openai or name not in OF_OPENAI):
            common[name] = value
        elif option not in OPTION_NAMES or name in REFUSED:
            _ignore(asked, name, value, is_strict=is_strict)
        elif name in of_dialect:
            own, _ = of_dialect[name]
            raise bad_request(f"{own} and {name} mean the same: give only {own}", own)
        else:
            own, _ = of_dialect.get(option, (name, None))
            options[option] = own, _converted(name, option, value)
    return common


def _ignore(asked: RequestFields, name: str, value: Any, *, is_strict: bool) -> None:
    """Ignore and list a field, or refuse one that would change the answer."""
    if name not in asked.dialect.ignored and _is_unknown(name, value, is_strict=is_strict):
        if is_strict:
            raise unknown_field(name, asked.names)
        asked.unknown.append(name)
    asked.ignored.append(name)


def _is_unknown(name: str, value: Any, *, is_strict: bool) -> bool:
    """Whether no endpoint reads a name. Raises a `HttpProblemError` where it would change the answer."""
    if name in OF_OPENAI:
        return is_strict
    if name in REFUSED:
        raise refused(name, REFUSED[name])
    can, instead = HARMLESS.get(name, ((), ""))
    if can and not any(_is_same(value, allowed) for allowed in can):
        raise refused(name, f"it can only be {' or '.join(map(json.dumps, can))}; {instead}")
    return name not in IGNORED and name not in HARMLESS


def _is_same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _ignore_moot_format(options: Options, ignored: list[str]) -> None:
    """Leave out the format of a text where tools must be called: such an answer has no text."""
    _, choice = options.get("tool_choice", ("", None))
    with suppress(ConfigError):  # which is raised where options are built
        if "tools" in options and read_choice(check_tool_choice(choice)).mode == "required":
            name, _ = options.pop("response_format", ("", None))
            ignored += filter(None, [name])


class field_errors:  # noqa: N801  # lower case, as context managers of the standard library
    """Turn a `ConfigError` into the problem of one field."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise bad_request(str(error), self._name) from None


def _read_common(asked: RequestFields, given: Mapping[str, Any], options: Options) -> Options:
    """Read what every dialect reads; return options that come before those that are given by name."""
    said = asked.common = read_body(CommonFields, given)
    found: Options = {}
    if cap := next((name for name in MAX_TOKENS if name in given), ""):
        found["max_tokens"] = cap, _given(given[cap])
    if said.reasoning_effort is not None:
        _add_variables(options, "reasoning_effort", effort_variables(said.reasoning_effort))
    if said.structured_outputs is not None:
        option, value = _structure(said.structured_outputs)
        found[option] = "structured_outputs", value
    if said.samplers is not None:
        found |= _left_out(said.samplers)
    if int_of(said.n_probs) != 0 and "logprobs" not in options:
        found["logprobs"], found["top_logprobs"] = ("n_probs", True), ("n_probs", said.n_probs)
    return found


def _add_variables(options: Options, field: str, variables: Mapping[str, Any]) -> None:
    """Give the chat template variables of a field; those that the body gives itself come first."""
    _, given = options.get("chat_template_kwargs", ("", {}))
    if variables and isinstance(given, Mapping):
        options["chat_template_kwargs"] = field, {**variables, **given}


def effort_variables(effort: str) -> dict[str, Any]:
    """Return the variables of the chat template that an effort of reasoning is."""
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _structure(said: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the option of vLLM's `structured_outputs`, and its value."""
    name = "structured_outputs"
    given = {key: value for key, value in said.items() if value is not None}
    if given.get("json_object") is True and len(given) == 1:
        return "json_schema", {"type": "object"}
    if len(given) != 1 or not given.keys() <= _STRUCTURES.keys():
        raise bad_request(
            f"{name} must have exactly one of {', '.join(_STRUCTURES)}, json_object", name
        )
    ((key, value),) = given.items()
    return _STRUCTURES[key], value


def _left_out(said: Any) -> dict[str, tuple[str, Any]]:
    """Return the options that leave out the samplers which a request does not name, each with the field it is from.

    Source: llama.cpp common/sampling.cpp, common_sampler_types_from_names and common_sampler_type_to_chr.

    Args:
        said: names, or a string of letters.

    Raises:
        HttpProblemError: an unknown sampler, or another order than that in which they run.
    """
    names = (
        [_SAMPLER_LETTERS.get(letter, letter) for letter in said] if isinstance(said, str) else said
    )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        words = "a list of names, or a string of llama-server's letters"
        raise bad_request(f"samplers must be {words}, not {shown(said)}", "samplers")
    unknown = next((name for name in names if name.lower() not in _SAMPLER_NAMES), None)
    if unknown is not None:
        raise refused("samplers", f"{shown(unknown)} is none of {', '.join(_SAMPLER_ORDER)}")
    places = [_SAMPLER_ORDER.index(_SAMPLER_NAMES[name.lower()]) for name in names]
    if any(before >= after for before, after in pairwise(places)):
        raise refused("samplers", f"they run once each, in this order: {', '.join(_SAMPLER_ORDER)}")
    absent = [name for i, name in enumerate(_SAMPLER_ORDER) if i not in places]
    return {option: ("samplers", v) for name in absent for option, v in SAMPLERS[name].items()}


def _read_biases(asked: RequestFields, options: Options) -> None:
    """Read biases: of tokens by their ids, or of the tokens of a text; false bans, and several of a token add up.

    Source: llama.cpp tools/server, `logit_bias`.
    """
    name, value = options.get("logit_bias", ("", None))
    if isinstance(value, Mapping):
        pairs = [(_id_or_text(key), bias) for key, bias in value.items()]
    elif isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value):
        pairs = [(key, bias) for key, bias in value]
    else:
        return
    found: dict[Any, float] = {}
    with field_errors(name), reading(name):
        if len(pairs) > MAX_BIASES:
            raise ConfigError(f"{name} has {len(pairs)} biases; at most {MAX_BIASES} are allowed")
        for key, bias in pairs:
            if not (isinstance(key, str) and key) and int_of(key) is None:
                raise ConfigError(f"{name} must have token ids or texts, not {shown(key)}")
            found[key] = found.get(key, 0.0) + _bias(f"{name} of {shown(key)}", bias)
    asked.biased_texts = [(key, bias) for key, bias in found.items() if isinstance(key, str)]
    ids = {key: bias for key, bias in found.items() if not isinstance(key, str)}
    options["logit_bias"] = name, ids


def _id_or_text(key: Any) -> Any:
    """Return the token id that a key of a JSON object is, if it is one."""
    is_id = isinstance(key, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", key)
    return int(key) if is_id else key


def _bias(name: str, value: Any) -> float:
    return -math.inf if value is False else check_float(name, value, -1e4, 1e4)


def check_continued(asked: RequestFields, prompt: BatchPrompt) -> None:
    """Refuse a wish about a chat's last message that is not what is done: one of the assistant is continued.

    Source: vLLM's chat completions; transformers, `apply_chat_template`.
    """
    continues, opens = asked.common.continue_final_message, asked.common.add_generation_prompt
    if continues and opens:
        words = "continue_final_message and add_generation_prompt cannot both be true"
        raise bad_request(f"{words}: leave out add_generation_prompt", "continue_final_message")
    messages = prompt.messages or ()
    is_continued = bool(messages) and messages[-1]["role"] == "assistant"
    what = "is" if is_continued else "is not"
    why = f"the last message {what} the assistant's, so it {what} continued"
    if continues is not None and continues is not is_continued:
        raise refused("continue_final_message", why)
    if opens is False and not is_continued:
        raise refused(
            "add_generation_prompt", f"{why}: false needs a last message of the assistant"
        )


# ---- values that others write differently ----


def _converted(name: str, option: str, value: Any) -> Any:
    convert = _CONVERTED.get(option)
    if convert is None:
        return value
    with field_errors(name), reading(name):
        return convert(value)


def _top_k(value: Any) -> Any:
    number = int_of(value)
    return 0 if number is not None and number < 0 else value


def _seed(value: Any) -> Any:
    """Return a seed; −1 draws one, and other negative ones count from the end."""
    number = int_of(value)
    if number is None or number >= 0:
        return value
    return None if number == -1 else number % (MAX_SEED + 1)


def _last_n(value: Any) -> Any:
    return MAX_LAST_N if int_of(value) == -1 else value


def _given(value: Any) -> Any:
    """Return a value; None for the −1 by which llama-server means that it is not given."""
    return None if int_of(value) == -1 else value


def _reasoning(value: Any) -> Any:
    return "auto" if value in ("deepseek", "deepseek-legacy") else value


def _format(value: Any) -> Any:
    """Return a response format; llama-server's "json_object" may have a schema."""
    if isinstance(value, Mapping) and value.get("type") == "json_object" and value.get("schema"):
        return {"type": "json_schema", "json_schema": {"schema": value["schema"]}}
    return value


_CONVERTED: Mapping[str, Convert] = {
    "top_k": _top_k,
    "seed": _seed,
    "repeat_last_n": _last_n,
    "dry_penalty_last_n": _last_n,
    "slot": _given,
    "reasoning_format": _reasoning,
    "thinking_budget": _given,
    "response_format": _format,
}


def _built(options: Options) -> RunOptions:
    """Return options from their fields and values; the problem of a wrong one names its field."""
    values = {option: value for option, (_, value) in options.items()}
    try:
        return RunOptions(**values)
    except ConfigError as error:
        names = {option: name for option, (name, _) in options.items()}
        raise bad_request(str(error), _culprit(values, names, error)) from None


def _culprit(values: Mapping[str, Any], names: Mapping[str, str], error: ConfigError) -> str | None:
    """Return the field that is wrong alone; else the first that a message of several names."""
    for option, value in values.items():
        try:
            RunOptions(**{option: value})
        except ConfigError as alone:  # noqa: PERF203
            if str(alone) == str(error):
                return names[option]
    return param_in(str(error), names)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists ignored fields, in ASCII and not too long; none where there are none."""
    text = as_list(names, ", ").encode("ascii", "backslashreplace").decode()
    value = "".join(c if " " <= c <= "~" else "?" for c in text)[:_N_LISTED]
    return {"x-ignored-fields": value} if names else {}


def as_list(names: Sequence[str], mark: str) -> str:
    """Return different names with a mark between them, cut where they are long: clients choose them."""
    first = dict.fromkeys(name[:_N_LISTED] for name in islice(names, _N_LISTED))
    return mark.join(first)[:_N_LISTED]


_N_LISTED = 1024
"""Most characters of a list of ignored fields. Our choice."""


def param_in(message: str, names: Mapping[str, str]) -> str | None:
    """Return the field of the first option that a message names."""
    words = re.findall(r"\w+", message)
    return next((names[word] for word in words if word in names), None)


_GIVEN_BY = {
    "json_schema": ("json_schema", "response_format"),
    "lark": ("grammar",),
    "gbnf": ("grammar",),
    "tool_choice": ("tool_choice", "tools"),
}
"""The options that give a grammar of a kind, where they are not called as the kind."""


def with_param(error: Exception, asked: RequestFields, prompt_field: str) -> Exception:
    """Return a refusal of the engine as a problem that names the field; another error as it is."""
    if not isinstance(error, ConfigError | GrammarError) or isinstance(error, UnsupportedTaskError):
        return error
    if isinstance(error, GrammarError | UnsupportedOptionError):
        option = error.kind if isinstance(error, GrammarError) else error.option
        fields = (asked.fields.get(name) for name in _GIVEN_BY.get(option, (option,)))
        return replace(problem_of(error), param=next(filter(None, fields), option))
    message = re.sub(r"^(prompts\[\d+\]|request '[^']*'): ", "", str(error))
    return bad_request(message, param_in(message, asked.fields) or prompt_field)
