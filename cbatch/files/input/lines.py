"""JSON lines: cbatch's own requests and results, and what all formats of JSON lines have in common."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch.checks import MAX_DEPTH, is_too_deep, why_unread
from cbatch.files.input.item import WRONG, Item, ItemError, LineError, unlabelled, what_is_wrong
from cbatch.files.input.known import Known, digest_in
from cbatch.files.units import cut
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cbatch.errors import CBatchError
    from cbatch.response import BatchResult, TokenLogprob

KEYS = ("id", "messages", "prompt", "tokens", "options")
"""What a line of cbatch's may have."""

_LEAST_LOGPROB = -9999.0
"""Source: OpenAI's API reference, chat completions, `logprobs`."""

_USAGE = tuple(f.name for f in fields(Usage))
_TIMINGS = tuple(f.name for f in fields(Timings))

_N_SHOWN = 60
"""Characters of a line in an error."""

_HALF = re.compile("[\ud800-\udfff]")

_N_KEPT = 64
_MAX_KEY_LENGTH = 2**16
_decode = json.JSONDecoder().decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


# ---- reading ----


class Loaded(NamedTuple):
    """The object of a line, and why it cannot be asked though its names can be read; None: nothing is wrong."""

    value: dict[str, Any]
    wrong: LineError | RecursionError | None


def load(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        LineError: no UTF-8, no JSON, no object, or text that cannot be written again.
        RecursionError: see `decoded`.
    """
    value, wrong = loaded(line)
    if wrong is not None:
        raise wrong
    return value


def loaded(line: bytes) -> Loaded:
    """Return the object of a line, also where a value in it is no text or is nested too deeply.

    Raises:
        LineError: no JSON, or no object.
        RecursionError: nobody can follow it.
    """
    wrong: LineError | None = None
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        text, wrong = line.decode(errors="surrogateescape"), not_utf8(error)
    try:
        value = _decode(text)
    except ValueError as error:
        message = f"{why_unread(error, text)}: {shown(text)}"
        raise (wrong or LineError("invalid_json_line", message)) from None
    if not isinstance(value, dict):
        raise wrong or LineError("invalid_json_line", f"not a JSON object: {shown(text)}")
    if _is_too_deep(text, value):
        return Loaded(value, RecursionError())
    if wrong is None and (b"\\ud" in line or b"\\uD" in line):
        wrong = _half_of_a_pair(value)
    return Loaded(value, wrong)


def is_text(value: object) -> bool:
    """Whether a value is a string without halves of surrogate pairs, which UTF-8 has no bytes for."""
    return isinstance(value, str) and _HALF.search(value) is None


def mended(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with a replacement character for each half of a surrogate pair in it."""
    text: dict[str, Any] = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return text


def decoded(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: no JSON.
        RecursionError: it is nested more deeply than whoever walks it later could follow.
    """
    value = _decode(text)
    if _is_too_deep(text, value):
        raise RecursionError
    return value


def _is_too_deep(text: str, value: object) -> bool:
    return text.count("[") + text.count("{") > MAX_DEPTH and is_too_deep(value)


def not_utf8(error: UnicodeDecodeError, n_before: int = 0) -> LineError:
    """Return what bytes that are no text come to; `n_before` bytes of the item stand before them."""
    return LineError("invalid_utf8", f"not UTF-8: {error.reason} at byte {n_before + error.start}")


def _half_of_a_pair(value: object) -> LineError | None:
    if is_text(json.dumps(value, ensure_ascii=False)):
        return None
    message = "a string in it holds half of a surrogate pair, which is no text"
    return LineError("invalid_json_line", message)


def without_nulls(value: Any) -> Any:
    """Return an object without what is null in it; what is no object, as it is."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def shown(text: str) -> str:
    """Return the beginning of a line, for errors."""
    return cut(text.strip(), _N_SHOWN)


class OptionsOf:
    """Builds the options of requests; those that are alike are checked once and are one object."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: dict[str, RunOptions] = {}

    def __call__(self, said: Mapping[str, Any]) -> RunOptions:
        """Return `said` as options.

        Raises:
            ConfigError: see `RunOptions`.
        """
        key = repr(said)  # tells 1 from True and 1.0, which are equal
        options = self._known.get(key)
        if options is None:
            options = RunOptions.of(said)
            if len(key) <= _MAX_KEY_LENGTH:
                self._keep(key, options)
        return options

    def _keep(self, key: str, options: RunOptions) -> None:
        if len(self._known) >= _N_KEPT:
            self._known.clear()
        self._known[key] = options


class LineParser:
    """Reads cbatch's lines: `id`, one of `messages`, `prompt` and `tokens`, and `options`."""

    columns = None

    def __init__(self) -> None:
        """Make one for all lines of a run."""
        self._options_of = OptionsOf()

    def parse(self, number: int, place: str, line: bytes) -> Item:
        """Return the item of a line; what is wrong with it is the item's error."""
        id = unlabelled(number)
        is_labelled = False
        try:
            request, wrong = loaded(line)
            given = request.pop("id", None)
            if given is not None and (wrong is None or is_text(given)):
                id, is_labelled = _label(given), True
            if wrong is not None:
                raise wrong
            return Item(number, place, id, self._prompt(request), is_labelled=is_labelled)
        except WRONG as error:
            found = what_is_wrong(error, ("messages", "prompt", "tokens"))
            return Item(number, place, id, None, found, is_labelled=is_labelled)

    def _prompt(self, request: dict[str, Any]) -> BatchPrompt:
        for key in request:
            if key not in KEYS:
                raise LineError(
                    "invalid_request",
                    f"unknown key {key!r}; there is: {', '.join(KEYS)} (for objects of your own give a template)",
                    key,
                )
        options = request.pop("options", None)
        if options is not None and not isinstance(options, dict):
            raise LineError("invalid_request", "options must be an object of names", "options")
        return BatchPrompt(**request, options=self._options_of(options or {}))


def _label(given: object) -> str:
    if not isinstance(given, str) or not given:
        raise LineError("invalid_request", f"an id must be a non-empty string, not {given!r}", "id")
    return given


# ---- writing ----


def dump(value: object) -> bytes:
    """Return a value as a line of JSON; what JSON has no type for as text, what is no number as null."""
    try:
        text = _encode(value)
    except ValueError:
        text = _encode(_finite(value))
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        return f"{json.dumps(json.loads(text))}\n".encode()


def _finite(value: object) -> object:
    """Return a value with null where it holds NaN or an infinity, which tables may have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _error_as_json(error: CBatchError) -> dict[str, object]:
    """Return what became of a failed item."""
    return {"type": type(error).__name__, "message": str(error)}


class LineEncoder:
    """Writes cbatch's lines of results."""

    def header(self) -> bytes:
        """Return what stands before the first record: nothing."""
        return b""

    def result(
        self, item: Item, result: BatchResult, *, digest: bytes, created: int, model: str
    ) -> bytes:
        """Return a result as a line."""
        return dump({**result_as_json(result), "id": item.id, "digest": digest.hex()})

    def error(self, item: Item, error: ItemError) -> bytes:
        """Return the line of an item that could not be asked."""
        said = {"type": "ConfigError", "message": f"{item.place}: {error.message}"}
        more = {"code": error.code, **({"param": error.param} if error.param else {})}
        return dump({"id": item.id, "text": "", "finish_reason": "error", "error": said | more})

    def known(self, record: Mapping[str, object]) -> Known | None:
        """Return what a record tells of itself; None: it is the error of an item that was never asked.

        Raises:
            LineError: it is none of cbatch's.
        """
        id, error = record.get("id"), record.get("error")
        digest = digest_in(record.get("digest"))
        if not isinstance(id, str) or not (digest or (error and "digest" not in record)):
            raise LineError("no_record", "is no answer of cbatch")
        return Known(id, digest, error is not None) if digest else None


def result_as_json(result: BatchResult) -> dict[str, object]:
    """Return a result as one of cbatch's lines has it."""
    return {
        "id": result.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": result.error and _error_as_json(result.error),
        "usage": {name: getattr(result.usage, name) for name in _USAGE},
        "timings": {name: getattr(result.timings, name) for name in _TIMINGS},
        "seed": result.seed,
        **_more(result),
    }


def _more(result: BatchResult) -> dict[str, object]:
    """Return what a result has besides text, where it has it."""
    more = {
        "stop_reason": result.stop_reason,
        "reasoning": result.reasoning,
        "tool_calls": [call.as_dict() for call in result.tool_calls],
        "logprobs": tokens_as_json(result.logprobs or ()),
        "prompt_logprobs": tokens_as_json(result.prompt_logprobs or ()),
        "choices": [_choice(choice) for choice in result.choices],
        "warnings": result.warnings,
    }
    return {name: value for name, value in more.items() if value or value == 0}  # a token's id


def _choice(choice: BatchResult) -> dict[str, object]:
    return {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "error": choice.error and _error_as_json(choice.error),
        "seed": choice.seed,
        **_more(choice),
    }


def tokens_as_json(tokens: Iterable[TokenLogprob | None]) -> list[dict[str, object] | None]:
    """Return log-probabilities as one of cbatch's lines has them; null where there is none."""
    return [None if token is None else _token(token) for token in tokens]


def _token(token: TokenLogprob) -> dict[str, object]:
    said = {"token_id": token.token_id, "text": token_text(token), "logprob": logprob_of(token)}
    return {**said, "top": tokens_as_json(token.top)} if token.top else said


def token_text(token: TokenLogprob) -> str:
    """Return a token's text, or its bytes where they are no whole characters, as OpenAI's API writes them."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def logprob_of(token: TokenLogprob) -> float | None:
    """Return a token's log-probability as JSON can hold it, as OpenAI's API does.

    A probability of 0 is -9999; a token that is echoed and has none before it has null.
    """
    return None if math.isnan(token.logprob) else max(token.logprob, _LEAST_LOGPROB)
