"""Requests as JSON lines, those of cbatch and those of OpenAI's batch files.

Source: OpenAI's API reference, batch: the request input object.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cbatch.chat.vector_calls import CALLS, VectorCall, VectorPrompt
from cbatch.errors import ConfigError, near
from cbatch.files.input.item import WRONG, InputLineError, Item, unlabelled, what_is_wrong
from cbatch.files.input.text_files import InputFile, LongLine, not_utf8, numbered
from cbatch.files.units import cut
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions, check_runs_through
from cbatch.support.checks import is_text_too_deep, json_reader, why_unread

KEYS = ("id", "messages", "prompt", "tokens", "options")  # keys of a cbatch request
_N_SHOWN = 60  # characters of a line in an error
_HALF = re.compile("[\ud800-\udfff]")

_N_KEPT = 64
_MAX_KEY_LENGTH = 2**16
_decode = json_reader(json.JSONDecoder())


def load(line: bytes | LongLine) -> dict[str, Any]:
    """Return the object of a line; LineError or RecursionError where `loaded` has or raises an error."""
    value, wrong = loaded(line)
    if wrong is not None:
        raise wrong
    return value


def loaded(
    line: bytes | LongLine,
) -> tuple[dict[str, Any], InputLineError | RecursionError | None]:
    """Return the object of a line, and an error of its values, with which its keys can still be read.

    LineError where it is not an object; RecursionError where it is nested so deeply that it cannot be decoded.
    """
    if isinstance(line, LongLine):
        raise line.error
    wrong: InputLineError | None = None
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        text, wrong = line.decode(errors="surrogateescape"), not_utf8(error)
    try:
        value = _decode(text)
    except ValueError as error:
        message = f"{why_unread(error, text)}: {shown(text)}"
        raise (wrong or InputLineError("invalid_json_line", message)) from None
    if not isinstance(value, dict):
        raise wrong or InputLineError("invalid_json_line", f"not a JSON object: {shown(text)}")
    if is_text_too_deep(text):
        return value, RecursionError()
    may_have_half = wrong is None and (b"\\ud" in line or b"\\uD" in line)
    if may_have_half and not is_text(json.dumps(value, ensure_ascii=False)):
        message = "a string in it holds half of a surrogate pair, which is not text"
        wrong = InputLineError("invalid_json_line", message)
    return value, wrong


def is_text(value: object) -> bool:
    """Whether a value is a string without halves of surrogate pairs, which UTF-8 cannot encode."""
    return isinstance(value, str) and _HALF.search(value) is None


def mended(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with each half of a surrogate pair replaced."""
    text: dict[str, Any] = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return text


def decoded(text: str) -> Any:
    """Return the value of JSON text; ValueError where it is not JSON, RecursionError where it is nested too deeply."""
    value = _decode(text)
    if is_text_too_deep(text):
        raise RecursionError
    return value


def without_nulls(value: Any) -> Any:
    """Return an object without its nulls; another value as it is."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def shown(text: str) -> str:
    """Return the beginning of a line, for errors."""
    return cut(text.strip(), _N_SHOWN)


class RequestReader(ABC):
    """Reads requests, one a line; one reader for all files of a run."""

    columns = None  # items are not rows

    def __init__(self) -> None:
        self._known: dict[str, RunOptions] = {}

    def items(self, file: InputFile, n_before: int) -> Iterator[Item]:
        """Yield a file's items; the first has the number `n_before` + 1."""
        for number, (place, line) in enumerate(numbered(file, file.lines()), n_before + 1):
            yield self._item(number, place, line)

    @abstractmethod
    def _item(self, number: int, place: str, line: bytes | LongLine) -> Item:
        """Return the item of a line, with an error where it gives no prompt."""

    def _options_of(self, said: Mapping[str, Any]) -> RunOptions:
        """Return the options of a request; equal options are checked once and are one object."""
        key = repr(said)  # tells 1 from True and 1.0, which are equal
        options = self._known.get(key)
        if options is None:
            options = check_runs_through(RunOptions.of(said))
            if len(self._known) >= _N_KEPT:
                self._known.clear()
            if len(key) <= _MAX_KEY_LENGTH:
                self._known[key] = options
        return options


def _check_keys(request: Collection[str], known: Sequence[str], hint: str = "") -> None:
    for key in request:
        if key not in known:
            if "options" in known and key in RunOptions.__dataclass_fields__:
                others = f'put it in "options": {{"options": {{"{key}": …}}}}'
                raise InputLineError("invalid_request", f"unknown key {key!r}; {others}", key)
            others = near(key, known) or f"known: {', '.join(known)}"
            message = f"unknown key {key!r}; {others}{hint}"
            raise InputLineError("invalid_request", message, key)


class CbatchReader(RequestReader):
    """Reads cbatch requests: `id`, one of `messages`, `prompt` and `tokens`, and `options`."""

    def __init__(self, *, as_chats: bool = False) -> None:
        """Read nothing yet; with `as_chats` a `prompt` is the message of a chat."""
        super().__init__()
        self._as_chats = as_chats

    def _item(self, number: int, place: str, line: bytes | LongLine) -> Item:
        id, is_labelled = unlabelled(number), False
        try:
            request, wrong = loaded(line)
            given = request.pop("id", None)
            if given is not None and (wrong is None or is_text(given)):
                if not isinstance(given, str) or not given:
                    message = f"an id must be a non-empty string, not {given!r}"
                    raise InputLineError("invalid_request", message, "id")
                id, is_labelled = given, True
            if wrong is not None:
                raise wrong
            return Item(number, place, id, self._prompt(request), is_labelled=is_labelled)
        except WRONG as error:
            found = what_is_wrong(error, ("messages", "prompt", "tokens"))
            return Item(number, place, id, None, found, is_labelled=is_labelled)

    def _prompt(self, request: dict[str, Any]) -> BatchPrompt:
        _check_keys(request, KEYS, " (for objects of your own give a template)")
        options = request.pop("options", None)
        if options is not None and not isinstance(options, dict):
            raise InputLineError("invalid_request", "options must be an object", "options")
        prompt = request.get("prompt")
        if self._as_chats and isinstance(prompt, str) and prompt and len(request) == 1:
            request = {"messages": [{"role": "user", "content": prompt}]}
        return BatchPrompt(**request, options=self._options_of(options or {}))


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "stream_options", "prediction"}
    | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Names in a body that do not change the answer."""

_HARMLESS = {"stream": (False,), "modalities": (["text"],), "suffix": ("",)}
"""Names in a body that are ignored where their value asks for the default."""

_KEYS = ("custom_id", "method", "url", "body")


class RequestEcho(NamedTuple):
    """The parts of a request that its answer repeats: the url, and the body's model or ""."""

    url: str
    model: str


class OpenAIReader(RequestReader):
    """Reads OpenAI's batch requests."""

    urls: Sequence[str] = (CHAT, COMPLETIONS, *CALLS)
    """What a line's `url` may be."""

    def __init__(self, url: str | None = None) -> None:
        """Read nothing yet; `url` is that of every line, None for any that is served; ConfigError for another."""
        if url is not None and url not in self.urls:
            raise ConfigError(f"url={url!r} is not supported; supported are {', '.join(self.urls)}")
        super().__init__()
        self._url = url
        self._has_vectors: bool | None = None
        """Whether lines ask for embeddings or scores; None before the first."""
        self._model: str | None = None

    def _item(self, number: int, place: str, line: bytes | LongLine) -> Item:
        id, is_labelled, call = unlabelled(number), False, None
        names: tuple[str, ...] = ()
        try:
            request, wrong = loaded(line)
            if wrong is None or is_text(request.get("custom_id")):
                id, is_labelled = _custom_id(request), True
            if wrong is not None:
                raise wrong
            call, body = self._call(request)
            names = tuple(body)
            if isinstance(line, bytes) and b"null" in line:
                told = {"prompt": None} if call.url == COMPLETIONS and "prompt" in body else {}
                body = {**told, **_without_nulls(body)}  # a prompt of null is an empty text
            prompt = self._prompt(call, body)
            return Item(number, place, id, prompt, None, call, is_labelled)
        except WRONG as error:
            return Item(number, place, id, None, what_is_wrong(error, names), call, is_labelled)

    def _call(self, request: dict[str, Any]) -> tuple[RequestEcho, dict[str, Any]]:
        _check_keys(request, _KEYS)
        method, url, body = request.get("method"), request.get("url"), request.get("body")
        if method != "POST":
            raise InputLineError("invalid_method", f"method must be POST, not {method!r}", "method")
        self._check_url(url)
        if not isinstance(body, dict):
            raise InputLineError("invalid_request", f"body must be an object, not {body!r}", "body")
        return RequestEcho(str(url), self._model_of(body)), body

    def _check_url(self, url: object) -> None:
        if url not in self.urls:
            message = f"url {url!r} is not supported; supported are {', '.join(self.urls)}"
            raise InputLineError("invalid_url", message, "url")
        if self._url is not None and url != self._url:
            message = f"url {url!r} differs from that of the batch: {self._url}"
            raise InputLineError("url_mismatch", message, "url")
        has_vectors = url in CALLS
        if self._has_vectors not in (None, has_vectors):
            message = f"url {url!r}: put lines for answers and lines for embeddings or scores into separate files"
            raise InputLineError("url_mismatch", message, "url")
        self._has_vectors = has_vectors

    def _model_of(self, body: dict[str, Any]) -> str:
        model = body.pop("model", None)
        if model is None or model == "":
            return ""
        if not isinstance(model, str):
            raise InputLineError(
                "invalid_request", f"model must be a string, not {model!r}", "model"
            )
        if self._model is None:
            self._model = model
        if model != self._model:
            message = f"model {model!r} differs from that of the lines before: {self._model!r}"
            raise InputLineError("model_mismatch", message, "model")
        return model

    def _prompt(self, call: RequestEcho, body: dict[str, Any]) -> BatchPrompt:
        """Return the prompt of a body, which has neither nulls nor the model's name. Raises one of `WRONG`."""
        if call.url in CALLS:
            return _vector_prompt(CALLS[call.url], body)
        asked = "messages" if call.url == CHAT else "prompt"
        content = body.pop(asked, None)
        if content is None:
            raise InputLineError(
                "invalid_request", f"{asked} is missing: {call.url} needs it", asked
            )
        options = self._options_of(
            {name: value for name, value in body.items() if not _is_ignored(name, value)}
        )
        if asked == "messages":
            return BatchPrompt(messages=content, options=options)
        content = _only_prompt(content)
        if isinstance(content, list):
            return BatchPrompt(tokens=content, options=options)
        return BatchPrompt(prompt=content, options=options)


def _vector_prompt(kind: type[VectorCall], body: dict[str, Any]) -> BatchPrompt:
    given = {name: value for name, value in body.items() if name not in (*IGNORED, *kind.ignored)}
    _check_keys(given, kind.fields)
    return VectorPrompt.of(kind.of(given))


def _custom_id(request: dict[str, Any]) -> str:
    id = request.get("custom_id")
    if id is None:
        raise InputLineError("missing_custom_id", "custom_id is missing", "custom_id")
    if not isinstance(id, str) or not id:
        message = f"custom_id must be a non-empty string, not {id!r}"
        raise InputLineError("invalid_custom_id", message, "custom_id")
    return id


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without nulls, in its messages too: some clients write every name they know."""
    given = {name: value for name, value in body.items() if value is not None}
    if isinstance(given.get("messages"), list):
        given["messages"] = [without_nulls(message) for message in given["messages"]]
    return given


def _is_ignored(name: str, value: object) -> bool:
    if name in IGNORED:
        return True
    if name not in _HARMLESS:
        return False
    if value not in _HARMLESS[name]:
        can = " or ".join(map(repr, _HARMLESS[name]))
        raise InputLineError(
            "invalid_request", f"{name} must be {can} in a batch file, not {value!r}", name
        )
    return True


def _only_prompt(prompt: object) -> Any:
    """Return the prompt of a completion; of a list of one prompt, that prompt."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise InputLineError(
            "invalid_request",
            f"prompt is a list of {len(prompt)} prompts: give each a line of its own",
            "prompt",
        )
    return prompt[0]
