"""The values that cross the border of a process, as JSON: prompts and options one way, output the other."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, cast, get_args

from cbatch import errors
from cbatch.checks import (
    MAX_INT,
    MAX_TIME_S,
    check_choice,
    check_int,
    refuse_constant,
    shown,
    token_ids,
)
from cbatch.errors import CBatchError, ConfigError, RequestFailedError, UnsupportedOptionError
from cbatch.messages import BatchPrompt
from cbatch.model_facts import ModelFacts
from cbatch.options import MAX_SEED, RunOptions
from cbatch.response import (
    BatchOutputChunk,
    BatchResult,
    FinishReason,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from cbatch.runtime.output import Origin
from cbatch.runtime.row_comparison import RowComparison
from cbatch.runtime.step_record import SlotState, StepRecord, StepRow
from cbatch.stats import EngineStats, Percentiles
from cbatch.worker.shapes import (
    as_count,
    as_fields,
    as_list,
    as_object,
    as_reason,
    as_text,
    as_texts,
    as_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cbatch.request import Request

VERSION = 1
"""Of the protocol; both sides say theirs in their first line."""

MAX_NUMBER = 2**53
"""Whole numbers that programs in any language have. Source: RFC 8259, section 6."""


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def dumps(value: object) -> bytes:
    """Return a value as one line of JSON in ASCII, without its end.

    Raises:
        ConfigError: a value that JSON does not have, as NaN.
    """
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a worker process takes values of JSON alone: {error}") from None


def loads(line: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the object that a line or a frame holds. Of a name that occurs twice the last value counts.

    Raises:
        ConfigError: no JSON, or another value than an object.
    """
    try:
        value = _DECODER.decode(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise ConfigError(f"not a line of JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"a line is a JSON object, not {shown(value)}")
    return value


def plain_json(value: object) -> object:
    """Return a value with null for each number that JSON does not have, and text for what else it does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain_json, value)]
    return value if isinstance(value, int | str | None) else str(value)


# ---- to the worker ----


def prompt_as_json(prompt: BatchPrompt, id: str, name: str = "") -> dict[str, Any]:
    """Return a prompt's fields that are set, with its id; `name` is what errors call it."""
    given = {
        "id": id,
        "messages": prompt.messages,
        "prompt": prompt.prompt,
        "tokens": prompt.tokens,
        "options": options_as_json(RunOptions.of(prompt.options)),
        "name": name,
    }
    return {key: value for key, value in given.items() if value}


def prompt_of_json(said: object) -> BatchPrompt:
    """Return the prompt of an item. Raises a ConfigError where it is malformed."""
    if not isinstance(said, Mapping):
        raise ConfigError(f"an item is a JSON object with a prompt's fields, not {shown(said)}")
    known = ("messages", "prompt", "tokens", "id")
    for key in said:
        if key not in (*known, "options", "name"):
            raise ConfigError(f"an item has {shown(key)}; it may have {', '.join(known)}, options")
    given = {key: said[key] for key in known if key in said}
    return BatchPrompt(**given, options=options_of_json(said.get("options")))


def options_as_json(options: RunOptions) -> dict[str, Any]:
    """Return the options that are set; a bias of −∞ as the text "-inf", no limit of time as the longest one.

    Raises:
        UnsupportedOptionError: an option that cannot be sent to another process.
    """
    if options.logits_processor is not None:
        why = "works only in this process, but this engine computes in another: load the model without replicas"
        raise UnsupportedOptionError("logits_processor", reason=why)
    given = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    if given.get("timeout_s") == math.inf:
        given["timeout_s"] = MAX_TIME_S
    if bias := given.get("logit_bias"):
        given["logit_bias"] = {
            token: "-inf" if value == -math.inf else value for token, value in bias.items()
        }
    return given


def options_of_json(said: object) -> RunOptions:
    """Return options by name. Raises a ConfigError where one is unknown or wrong."""
    if isinstance(said, Mapping) and isinstance(bias := said.get("logit_bias"), Mapping):
        numbers = {token: -math.inf if n == "-inf" else n for token, n in bias.items()}
        said = {**said, "logit_bias": numbers}
    if not isinstance(said, Mapping | None):
        raise ConfigError(f"options are a JSON object, not {shown(said)}")
    return RunOptions.of(said)


_OPTIONS = tuple(f.name for f in fields(RunOptions))


# ---- from the worker ----


def chunk_as_json(chunk: BatchOutputChunk) -> tuple[Any, ...]:
    """Return a chunk's values, its id first; its parts, log-probabilities and error as far as there are any."""
    values = chunk.id, chunk.text, chunk.token_ids, chunk.index, chunk.finish_reason
    if chunk.logprobs is not None or chunk.error is not None:
        scores = logprobs_as_json(chunk.logprobs)
        values = (*values, chunk.content, chunk.reasoning, scores)  # type: ignore[assignment]
        return values if chunk.error is None else (*values, error_as_json(chunk.error))
    is_plain = chunk.content == chunk.text and not chunk.reasoning
    return values if is_plain else (*values, chunk.content, chunk.reasoning)


def chunk_of_json(said: Sequence[Any], id: str) -> BatchOutputChunk:
    """Return the chunk that `chunk_as_json` gave, under the id that the reader knows."""
    _, text, tokens, index, reason, *parts = said
    reason = None if reason is None else as_reason(reason)
    content, thought = as_texts(parts[:2]) or (text, "")
    scores, error, *_ = [*parts[2:], None, None]
    tokens, index, logprobs = as_tokens(tokens), as_count(index), logprobs_of_json(scores)
    return BatchOutputChunk(
        id, as_text(text), tokens, index, reason, content, thought, logprobs, error_of_json(error)
    )


def result_as_json(result: BatchResult) -> dict[str, Any]:
    """Return a result, and of its origin the number of its sequence."""
    said = {
        "id": result.id,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "error": error_as_json(result.error),
        "usage": _by_name(result.usage),
        "timings": _by_name(result.timings),
        "seed": result.seed,
        "warnings": result.warnings,
        "tool_calls": [asdict(call) for call in result.tool_calls],
        "reasoning": result.reasoning,
        "logprobs": logprobs_as_json(result.logprobs),
        "prompt_logprobs": logprobs_as_json(result.prompt_logprobs),
        "stop_reason": result.stop_reason,
        "choices": [result_as_json(choice) for choice in result.choices],
        "choice_probs": result.choice_probs,
        "number": result.origin.number if isinstance(result.origin, Origin) else None,
    }
    # an empty list of log-probabilities says that they were asked for
    return {
        name: value
        for name, value in said.items()
        if value is not None and (value not in ("", [], ()) or name.endswith("logprobs"))
    }


def _by_name(values: Usage | Timings) -> dict[str, Any]:
    # `asdict` copies each value, which takes longer than to write it
    return {name: getattr(values, name) for name in values.__slots__}


def result_of_json(
    said: Mapping[str, Any], id: str, origin_of: Callable[[BatchResult, int], object]
) -> BatchResult:
    """Return the result that `result_as_json` gave, under the id that the reader knows.

    `origin_of` gives the origin of a result, from itself and its sequence's number.
    """
    stop_reason, number = said.get("stop_reason"), said.get("number")
    result = BatchResult(
        id=id,
        text=as_text(said.get("text", "")),
        token_ids=as_tokens(said.get("token_ids", [])),
        finish_reason=as_reason(said["finish_reason"]),
        error=error_of_json(said.get("error")),
        usage=as_fields(Usage, said["usage"]),
        timings=as_fields(Timings, said["timings"]),
        seed=as_count(said["seed"]),
        warnings=as_texts(said.get("warnings", [])),
        tool_calls=tuple(as_fields(ToolCall, c) for c in as_list(said.get("tool_calls", []))),
        reasoning=as_text(said.get("reasoning", "")),
        logprobs=logprobs_of_json(said.get("logprobs")),
        prompt_logprobs=logprobs_of_json(said.get("prompt_logprobs")),
        stop_reason=stop_reason if type(stop_reason) in (int, NoneType) else as_text(stop_reason),
        choices=tuple(result_of_json(c, id, origin_of) for c in as_list(said.get("choices", []))),
        choice_probs=_probs_of_json(said.get("choice_probs")),
    )
    return result if number is None else replace(result, origin=origin_of(result, as_count(number)))


def _probs_of_json(said: object) -> dict[str, float] | None:
    if said is None:
        return None
    return {text: float(value) for text, value in as_object(said).items()}


def logprobs_as_json(tokens: Sequence[TokenLogprob | None] | None) -> list[Any] | None:
    """Return log-probabilities of tokens; see `_token`."""
    return None if tokens is None else [t and _token(t) for t in tokens]


def _token(token: TokenLogprob) -> list[Any]:
    """Return a token's id, its bytes as Latin-1 text, its log-probability, and the likeliest tokens.

    A log-probability of NaN is null, one of −∞ the text "-inf".
    """
    logprob: float | str | None = token.logprob
    if not math.isfinite(token.logprob):
        logprob = None if math.isnan(token.logprob) else "-inf"
    return [token.token_id, token.data.decode("latin-1"), logprob, [*map(_token, token.top)]]


def logprobs_of_json(said: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the log-probabilities that `logprobs_as_json` gave."""
    if said is None:
        return None
    return tuple(None if token is None else _logprob(token) for token in as_list(said))


def _logprob(said: Sequence[Any]) -> TokenLogprob:
    token_id, text, logprob, top = said
    number = math.nan if logprob is None else float(logprob)
    data = as_text(text).encode("latin-1")
    return TokenLogprob(as_count(token_id), data, number, tuple(map(_logprob, top)))


@lru_cache(maxsize=1)
def _error_types() -> dict[str, type[CBatchError]]:
    """Return cbatch's errors by name."""
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, CBatchError)}


def error_as_json(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error's type, text and numbers, and its cause; None for none."""
    if error is None:
        return None
    said: dict[str, Any] = {"type": type(error).__name__, "message": errors.words_of(error)}
    values = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    if values:
        said["values"] = {name: _plain(value) for name, value in values.items()}
    if error.__cause__ is not None:
        said["cause"] = error_as_json(error.__cause__)
    return said


def error_of_json(said: Mapping[str, Any] | None) -> CBatchError | None:
    """Return the error that `error_as_json` gave; of a type that is not cbatch's a `RequestFailedError`."""
    if said is None:
        return None
    name, text = as_text(as_object(said)["type"]), as_text(said["message"])
    kind = _error_types().get(name)
    text = text if kind else f"{name}: {text}"
    kind = kind or RequestFailedError
    error = kind.__new__(kind, text)
    error.args = (text,)
    error.__dict__.update(as_object(said.get("values", {})))
    error.__cause__ = _cause_of_json(said.get("cause"))
    return error


def _cause_of_json(said: Mapping[str, Any] | None) -> BaseException | None:
    """Return a cause: as `error_of_json`, but one of Python's own errors is of its type."""
    kind = None if said is None else vars(builtins).get(said["type"])
    if said is None or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return error_of_json(said)
    try:
        found = kind(said["message"])
    except TypeError:  # an error that takes more than a text, as that of a decoder
        return error_of_json(said)
    found.__cause__ = _cause_of_json(said.get("cause"))
    return found


def _plain(value: object) -> object:
    """Return a value as JSON has it; another is shown as text."""
    return plain_json(value) if isinstance(value, int | float | str | None) else str(value)


# ---- figures ----


def stats_as_json(stats: EngineStats) -> dict[str, Any]:
    """Return statistics by name; percentiles by bucket."""
    values = {f.name: getattr(stats, f.name) for f in fields(stats)}
    return {
        name: value.counts() if isinstance(value, Percentiles) else value
        for name, value in values.items()
    }


def stats_of_json(said: Mapping[str, Any]) -> EngineStats:
    """Return the statistics that `stats_as_json` gave."""
    kinds = {f.name: f.default_factory for f in fields(EngineStats)}
    plain = {name: value for name, value in said.items() if kinds[name] is not Percentiles}
    given: dict[str, Any] = {
        name: Percentiles.of([as_tokens(pair) for pair in as_list(value)])
        for name, value in said.items()
        if name not in plain
    }
    as_tokens([*as_object(said.get("n_finished", {})).values()])
    return replace(as_fields(EngineStats, plain), **given)


def step_as_json(record: StepRecord) -> dict[str, Any]:
    """Return the record of a run."""
    said = {f.name: getattr(record, f.name) for f in fields(record)}
    return {**said, "rows": [_values(row) for row in record.rows]}


def step_of_json(said: Mapping[str, Any], first_slot: int = 0) -> StepRecord:
    """Return the record that `step_as_json` gave; `first_slot` is added to its slots."""
    names = [f.name for f in fields(StepRow)]
    rows = [as_fields(StepRow, dict(zip(names, row, strict=True))) for row in said["rows"]]
    moved = tuple(replace(row, slot=row.slot + first_slot) for row in rows)
    return replace(as_fields(StepRecord, said), rows=moved)


def _values(row: StepRow) -> Iterable[object]:
    return [getattr(row, f.name) for f in fields(row)]


def comparison_as_json(found: RowComparison) -> list[Any]:
    """Return a comparison's values; log-probabilities as text, which has all bits of them, and NaN."""
    return [
        found.id,
        found.slot,
        found.position,
        found.n_rows,
        found.shared_token,
        found.shared_logprob.hex(),
        found.single_token,
        found.single_logprob.hex(),
    ]


def comparisons_of_json(said: object) -> list[RowComparison]:
    """Return the comparisons that `comparison_as_json` gave."""
    return [*map(_comparison, as_list(said))]


def _comparison(said: Sequence[Any]) -> RowComparison:
    id, slot, position, n_rows, shared, shared_logprob, single, single_logprob = said
    slot, position, n_rows, shared, single = as_tokens([slot, position, n_rows, shared, single])
    return RowComparison(
        as_text(id),
        slot,
        position,
        n_rows,
        shared,
        float.fromhex(shared_logprob),
        single,
        float.fromhex(single_logprob),
    )


def slots_of_json(said: object) -> list[SlotState]:
    """Return the states of slots."""
    return [as_fields(SlotState, slot) for slot in as_list(said)]


def pieces_of_json(said: object) -> list[bytes]:
    """Return the bytes of tokens, which come as Latin-1 text."""
    return [piece.encode("latin-1") for piece in as_texts(said)]


def words_of_json(said: object) -> dict[str, str]:
    """Return texts by name."""
    return dict(zip(as_object(said), as_texts([*as_object(said).values()]), strict=True))


def facts_of_json(said: Mapping[str, Any]) -> ModelFacts:
    """Return what a model is."""
    facts = as_fields(ModelFacts, said)
    RunOptions.of(facts.sampling)  # checked
    fim = {name: as_count(token) for name, token in facts.fim.items()}
    return replace(facts, adapters=as_texts([*facts.adapters]), fim=fim)


def extension_as_json(result: BatchResult, origin: Origin) -> dict[str, Any]:
    """Return what a worker needs to go on from a result; see `extension_of_json`."""
    request = origin.request
    found = {
        "seed": request.sampling.seed,
        "number": origin.number,
        "token_ids": origin.token_ids,
        "finish_reason": origin.finish_reason,
        "usage": asdict(origin.usage),
        "logprobs": logprobs_as_json(result.logprobs),
        "prompt_logprobs": logprobs_as_json(result.prompt_logprobs),
    }
    return {
        "item": prompt_as_json(request.prompt, request.id),
        "options": options_as_json(request.options),
        "result": found,
    }


def extension_of_json(
    item: object,
    options: RunOptions,
    said: object,
    request_of: Callable[[BatchPrompt, str, RunOptions], Request],
) -> BatchResult:
    """Return the result to go on from, as far as going on needs it; `said` is the result as it came.

    Raises:
        ConfigError: something is missing, or malformed.
    """
    prompt = prompt_of_json(item)
    if prompt.id is None:
        raise ConfigError("the item of extend must have the id of its result")
    merged = RunOptions.of(prompt.options).over(options)
    try:
        found = _extended(said)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CBatchError):
            raise
        what = f"{type(error).__name__}: {errors.words_of(error)}"
        raise ConfigError(f"extend needs a result as it came: {what}") from None
    merged = replace(
        merged, seed=found.seed, n=None, best_of=None
    )  # the result is one of the choices
    request = request_of(replace(prompt, options=None), prompt.id, merged)
    number = said.get("number") if isinstance(said, Mapping) else None
    origin = Origin(
        request,
        -1 if number is None else check_int("number", number, -1, MAX_NUMBER),
        found.token_ids,
        found.finish_reason,
        found.usage,
    )
    return replace(found, id=request.id, origin=origin)


def _extended(said: Any) -> BatchResult:
    """Return the fields of a result that going on needs."""
    given = {name: check_int(name, n, 0, MAX_INT) for name, n in said["usage"].items()}
    return BatchResult(
        id="",
        text="",
        token_ids=token_ids("token_ids", said.get("token_ids", [])),
        finish_reason=cast(
            "FinishReason",
            check_choice("finish_reason", said["finish_reason"], *get_args(FinishReason)),
        ),
        error=error_of_json(said.get("error")),
        usage=Usage(**given),
        timings=Timings(0.0, None, 0.0, None, None),
        seed=check_int("seed", said["seed"], 0, MAX_SEED),
        logprobs=logprobs_of_json(said.get("logprobs")),
        prompt_logprobs=logprobs_of_json(said.get("prompt_logprobs")),
    )
