"""Values between processes: msgpack between cbatch's own, JSON for programs. Their types say what is right."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache, partial
from itertools import chain, islice
from operator import is_not
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from cbatch import errors
from cbatch.errors import (
    CBatchError,
    ConfigError,
    RequestFailedError,
    UnsupportedOptionError,
    words_of,
)
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import BatchOutputChunk, BatchResult, TokenLogprob
from cbatch.runtime.output import Origin
from cbatch.runtime.step_record import StepRecord
from cbatch.support.checks import MAX_TIME_S, shown
from cbatch.support.model_facts import ModelFacts
from cbatch.support.typed import known

VERSION = 2
"""Of the protocol; both sides say theirs first."""

Frames: TypeAlias = Literal["lines", "msgpack"]
"""Lines of JSON; or msgpack with four bytes before it, its length in little-endian. The first line is always JSON."""

T = TypeVar("T")

_WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""


# ---- errors ----


class ToldError(Struct, omit_defaults=True):
    """An error of another process: its type's name, text and numbers, and its cause."""

    type: str
    message: str
    values: dict[str, Any] = {}
    cause: ToldError | None = None

    @classmethod
    def of(cls, error: BaseException) -> ToldError:
        """Return what is told of an error."""
        values = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        cause = None if error.__cause__ is None else cls.of(error.__cause__)
        return cls(type(error).__name__, words_of(error), values, cause)

    def made(self) -> CBatchError:
        """Return the error; of a type that is not cbatch's a `RequestFailedError`."""
        kind = _error_types().get(self.type)
        text = self.message if kind else f"{self.type}: {self.message}"
        kind = kind or RequestFailedError
        error = kind.__new__(kind, text)
        error.args = (text,)
        error.__dict__.update(self.values)
        error.__cause__ = self._made_cause()
        return error

    def _made_as_cause(self) -> BaseException:
        """Return the error; one of Python's own errors is of its type."""
        kind = vars(builtins).get(self.type)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return self.made()
        try:
            found = kind(self.message)
        except TypeError:  # an error that takes more than a text, as that of a decoder
            return self.made()
        found.__cause__ = self._made_cause()
        return found

    def _made_cause(self) -> BaseException | None:
        return None if self.cause is None else self.cause._made_as_cause()


@lru_cache(maxsize=1)
def _error_types() -> dict[str, type[CBatchError]]:
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, CBatchError)}


# ---- bytes ----


def _told(value: object) -> object:
    """Return what is told of a value that msgspec does not know."""
    if isinstance(value, BaseException):
        return ToldError.of(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _refused(value: object) -> object:
    if isinstance(value, str):  # an id, of a class of its own
        return str(value)
    raise ConfigError(f"a worker process takes only plain values, not {shown(value)}")


def _heard(kind: type, value: object) -> object:
    """Return a value of a type that msgspec does not know."""
    if kind is CBatchError:
        return msgspec.convert(value, known(ToldError)).made()
    return value  # of the origin of a result, which may be anything


_ENCODERS: Mapping[Frames, Callable[[object], bytes]] = {
    "lines": msgspec.json.Encoder(enc_hook=_told).encode,
    "msgpack": msgspec.msgpack.Encoder(enc_hook=_told).encode,
}
_STRICT = {
    "lines": msgspec.json.Encoder(enc_hook=_refused).encode,
    "msgpack": msgspec.msgpack.Encoder(enc_hook=_refused).encode,
}


def encode(value: object, frames: Frames = "msgpack") -> bytes:
    """Return what a worker says: whatever it is, something readable is said. In JSON, NaN and infinity are null."""
    try:
        return _ENCODERS[frames](value)
    except (UnicodeEncodeError, OverflowError):
        plain = msgspec.to_builtins(value, enc_hook=_told, str_keys=True)
        return _ENCODERS[frames](_cleaned(plain))


@contextmanager
def _plain_alone() -> Iterator[None]:
    """Turn the errors of encoding into a ConfigError."""
    try:
        yield
    except CBatchError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"a worker process takes only plain values: {error}") from None


def encode_call(value: object, frames: Frames = "msgpack") -> bytes:
    """Return what a client says.

    Raises:
        ConfigError: it has a value that cannot be sent as it is.
    """
    with _plain_alone():
        return _STRICT[frames](value)


def as_text(value: Struct) -> str:
    """Return the JSON of a value with text or numbers that msgspec cannot encode. Raises as `encode_call`."""
    with _plain_alone():
        return json.dumps(msgspec.to_builtins(value, enc_hook=_refused))


def of_text(kind: type[T], text: str) -> T:
    """Return what `as_text` gave. Raises a ConfigError where it is something else."""
    try:
        return msgspec.convert(json.loads(text), known(kind))
    except (*_WRONG, ValueError) as error:
        raise ConfigError(f"text: {words_of(error)}") from None


def _cleaned(value: object) -> object:
    """Return plain values without half surrogate pairs, and with numbers that are too large as text."""
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_cleaned, value)]
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@lru_cache(maxsize=256)
def reader(kind: Any, frames: Frames = "msgpack") -> Callable[[bytes | Raw], Any]:
    """Return a function that reads values of a type.

    It raises a ConfigError where the bytes are something else.
    """
    module = msgspec.json if frames == "lines" else msgspec.msgpack
    read = module.Decoder(known(kind), dec_hook=_heard).decode

    def checked(data: bytes | Raw) -> Any:
        try:
            return read(data)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        except _WRONG as error:
            what = "a line of JSON" if frames == "lines" else "msgpack"
            raise ConfigError(f"not {what}: {error}") from None

    return checked


def decode(data: bytes | Raw, kind: type[T], frames: Frames = "msgpack") -> T:
    """Return a value of a type. Raises a ConfigError where the bytes are something else."""
    found: T = reader(cast("Any", kind), frames)(data)
    return found


# ---- to the worker ----


class WireItem(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt with its id and options."""

    id: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    options: dict[str, Any] | None = None
    name: str = ""
    """What errors call it; "" for its id."""
    text: str | None = None
    """JSON of the four before the name, where they have what a message cannot: half a surrogate pair, an integer of
    more than 64 bits."""

    @classmethod
    def of(cls, prompt: BatchPrompt, id: str = "", name: str = "") -> WireItem:
        """Return a prompt as it is sent. Raises as `told_options`."""
        return cls(
            id=id or None,
            messages=prompt.messages,  # type: ignore[arg-type]
            prompt=prompt.prompt,
            tokens=prompt.tokens,  # type: ignore[arg-type]
            options=told_options(RunOptions.of(prompt.options)) or None,
            name=name,
        )

    def made(self) -> BatchPrompt:
        """Return the prompt. Raises a ConfigError where it is malformed."""
        if self.text is not None:
            said = of_text(WireItem, self.text)
            return replace(said.made(), id=self.id)
        own = None if self.options is None else heard_options(self.options)
        return BatchPrompt(self.messages, self.prompt, self.tokens, self.id, own)


_OPTIONS = tuple(f.name for f in fields(RunOptions))


def told_options(options: RunOptions) -> dict[str, Any]:
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
        given["logit_bias"] = {t: "-inf" if n == -math.inf else n for t, n in bias.items()}
    return given


def heard_options(said: Mapping[str, Any]) -> RunOptions:
    """Return options by name. Raises a ConfigError where one is unknown or wrong."""
    bias = said.get("logit_bias")
    if isinstance(bias, dict):
        numbers = {token: -math.inf if n == "-inf" else n for token, n in bias.items()}
        said = {**said, "logit_bias": numbers}
    return RunOptions.of(said)


# ---- from the worker ----


class LogLine(Struct, array_like=True):
    """A line of the log."""

    logger: str
    level: int
    text: str
    values: dict[str, Any]


class WireAnswer(Struct, array_like=True):
    """What a command gave: a value, or an error."""

    n: int | str
    value: Raw
    error: CBatchError | None = None


class ResultPart(Struct, array_like=True):
    """Log-probabilities of a result that comes later without them; those of one place come in order."""

    id: str
    places: list[int]
    """The choices that have them; THE_RESULT is the result itself."""
    of_prompt: bool
    tokens: list[TokenLogprob | None]


THE_RESULT = -1
"""The place of a result among its choices."""


class Frame(Struct):
    """What a worker says at once; a reader takes the kinds in this order."""

    admitted: list[str] = []
    chunks: list[BatchOutputChunk] = []
    parts: list[ResultPart] = []
    results: list[BatchResult] = []
    steps: list[StepRecord] = []
    logs: list[LogLine] = []
    errors: list[CBatchError] = []
    replies: list[WireAnswer] = []
    died: list[CBatchError] = []


class Ready(Struct, omit_defaults=True, kw_only=True):
    """A worker's first frame."""

    cbatch: int
    version: str = ""
    pid: int = 0
    parallel: int = 0
    n_window: int = 0
    has_limit: bool = False
    facts: ModelFacts | None = None
    """What the model is, for cbatch's own clients: so that these need not ask, which would wait in an event loop."""
    weights: str = ""
    """A digest of the files of the model, its adapters and its projector, as they were loaded."""
    error: CBatchError | None = None


def told_result(
    result: BatchResult, scores: Callable[[_Scores | None], Any] = lambda found: found
) -> BatchResult:
    """Return a result as it is told: of its origin the number of its sequence; `scores` tells its log-probabilities."""
    number = result.origin.number if isinstance(result.origin, Origin) else None
    choices = tuple(told_result(choice, scores) for choice in result.choices)
    found, of_prompt = scores(result.logprobs), scores(result.prompt_logprobs)
    return replace(
        result, origin=number, choices=choices, logprobs=found, prompt_logprobs=of_prompt
    )


def encode_frame(frame: Mapping[str, Sequence[Any]], frames: Frames) -> bytes:
    """Return a frame as it is written; no other thread waits long for it, however long results are."""
    scores = partial(encoded_scores, frames=frames)
    results = frame.get("results", ())
    told = [told_result(result, scores) for result in results]
    try:
        return _ENCODERS[frames]({**frame, "results": told} if told else frame)
    except (UnicodeEncodeError, OverflowError):  # what is encoded cannot be cleaned
        told = [told_result(result) for result in results]
        return encode({**frame, "results": told} if told else frame, frames)


N_PART = 2**12
"""Log-probabilities of a part, alternatives counted: it takes a few milliseconds to write or to read. Our choice."""

_Scores: TypeAlias = "Sequence[TokenLogprob | None]"


def n_first_part(found: _Scores, start: int = 0) -> int:
    """Return how many of the tokens from `start` make a part: all, or about N_PART log-probabilities."""
    n = 0
    for i in range(start, len(found)):
        token = found[i]
        n += 1 + len(token.top) if token else 1
        if n >= N_PART:
            return i + 1 - start
    return len(found) - start


def _parts_of(found: _Scores) -> Iterator[_Scores]:
    """Yield log-probabilities in parts; see `n_first_part`."""
    start = 0
    while start < len(found):
        end = start + n_first_part(found, start)
        yield found[start:end]
        start = end


def encoded_scores(found: _Scores | None, frames: Frames) -> object:
    """Return log-probabilities as they are told; many are encoded in pieces, between which other threads run."""
    if found is None or n_first_part(found) == len(found):
        return found
    pieces: list[bytes] = []
    for part in _parts_of(found):
        piece = _ENCODERS[frames](part)
        pieces.append(piece[1:-1] if frames == "lines" else piece[1 if len(part) < 16 else 3 :])
    if frames == "lines":
        return Raw(b"[" + b",".join(pieces) + b"]")
    return Raw(b"\xdd" + len(found).to_bytes(4, "big") + b"".join(pieces))


def parted(result: BatchResult) -> tuple[list[ResultPart], BatchResult]:
    """Return a result's log-probabilities in parts, and the result without.

    Those that it has twice are told once, as is what all choices begin with, such as an echo.
    """
    at = {THE_RESULT: result, **dict(enumerate(result.choices))}
    parts: list[ResultPart] = []
    for of_prompt in (False, True):
        lists = {i: _scores_of(one, of_prompt=of_prompt) for i, one in at.items()}
        n_same = _n_same([*filter(None, lists.values())])
        places: dict[int, list[int]] = {}
        for i, found in lists.items():
            if found:
                places.setdefault(id(found), []).append(i)
        told = [(same, lists[same[0]][n_same:]) for same in places.values()]
        if n_same:
            told.insert(0, ([i for same, _ in told for i in same], lists[told[0][0][0]][:n_same]))
        for same, found in told:
            some = _parts_of(found)
            parts += [ResultPart(result.id, same, of_prompt, [*tokens]) for tokens in some]
    choices = tuple(map(_bare, result.choices))
    return parts, replace(_bare(result), choices=choices)


def _n_same(lists: Sequence[_Scores]) -> int:
    """Return how many of the first objects of several lists are the same in all of them."""
    n = min(map(len, lists), default=0)
    for found in {id(found): found for found in lists}.values():
        differ = map(is_not, islice(found, n), lists[0])
        n = next((i for i, differs in enumerate(differ) if differs), n)
    return n


def _scores_of(result: BatchResult, *, of_prompt: bool) -> _Scores:
    return (result.prompt_logprobs if of_prompt else result.logprobs) or ()


def _bare(result: BatchResult) -> BatchResult:
    """Return a result whose log-probabilities are left out: empty where they were asked for."""
    logprobs, of_prompt = (
        None if s is None else () for s in (result.logprobs, result.prompt_logprobs)
    )
    return replace(result, logprobs=logprobs, prompt_logprobs=of_prompt)


def joined(result: BatchResult, parts: Sequence[ResultPart]) -> BatchResult:
    """Return a result with its parts. Raises a ConfigError where one belongs to a choice that is not there."""
    numbers: dict[tuple[bool, int], list[int]] = {}
    for n, part in enumerate(parts):
        for i in part.places:
            numbers.setdefault((part.of_prompt, i), []).append(n)
    found: dict[int, dict[str, Any]] = {}
    made: dict[tuple[int, ...], tuple[Any, ...]] = {}
    for (of_prompt, i), own_parts in numbers.items():
        key = tuple(own_parts)
        if key not in made:
            made[key] = tuple(chain.from_iterable(parts[n].tokens for n in key))
        found.setdefault(i, {})["prompt_logprobs" if of_prompt else "logprobs"] = made[key]
    own = found.pop(THE_RESULT, {})
    if any(not 0 <= i < len(result.choices) for i in found):
        raise ConfigError(
            f"got parts of choices {[*found]}, but there are {len(result.choices)} choices"
        )
    choices = tuple(
        replace(c, **found[i]) if i in found else c for i, c in enumerate(result.choices)
    )
    return replace(result, choices=choices, **own)


def heard_result(
    said: BatchResult, id: str, origin_of: Callable[[BatchResult, int], object]
) -> BatchResult:
    """Return a result that was told, under the id that the reader knows.

    `origin_of` gives the origin of a result, from itself and its sequence's number.
    """
    choices = tuple(heard_result(choice, id, origin_of) for choice in said.choices)
    number, found = said.origin, replace(said, id=id, choices=choices, origin=None)
    if number is None:
        return found
    if type(number) is not int:
        raise ConfigError(f"the origin of a result must be a number, not {shown(number)}")
    return replace(found, origin=origin_of(found, number))
