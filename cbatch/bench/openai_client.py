"""A client of OpenAI's completions on a socket, so that little of what is measured is its own."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cbatch.bench.measured import Arrivals, MeasuredAnswer, WorkRequest, per_token
from cbatch.errors import CBatchError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from cbatch.bench.pacing import Now
    from cbatch.bench.text_work import TextCall
    from cbatch.bench.vector_process import Rows

MOST_BOS = 2
"""Tokens by which two counts of one prompt may differ: marks that a server adds or leaves out. Our choice."""

NOT_COUNTED = -1
"""Tokens of an answer whose usage was not told, or is that of another vocabulary, until its text is counted."""

_N_QUOTED = 200
"""Characters of a server's words that an error quotes."""

_N_LINE = 2**20
"""Bytes of the longest line of a header or a stream."""


class ServerProblemError(CBatchError):
    """A server is not there, or does not answer as a server of completions does."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server of OpenAI's API is."""

    host: str
    port: int
    path: str
    """Of the API, as a rule `/v1`."""
    is_secure: bool = False

    @classmethod
    def of(cls, url: str) -> Address:
        """Return the address that a URL names; `/v1` is its path where it has none.

        Raises:
            ConfigError: it is not an HTTP URL.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url}: is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url}: is not a server's URL: give one such as http://HOST:PORT/v1")
        is_secure = parts.scheme == "https"
        return cls(
            parts.hostname,
            port or (443 if is_secure else 80),
            parts.path.rstrip("/") or "/v1",
            is_secure,
        )

    def __str__(self) -> str:
        return f"http{'s' if self.is_secure else ''}://{self.host}:{self.port}{self.path}"


@dataclass(slots=True)
class HttpReply:
    """The beginning of an answer, and its body as it comes."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, without its framing."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while n := await self._n_chunk():
                yield await self.reader.readexactly(n)
                await self.reader.readline()
            return
        n_left = int(self.headers.get("content-length", -1))
        while n_left and (part := await self.reader.read(2**16)):
            n_left -= len(part)
            yield part

    async def _n_chunk(self) -> int:
        """Return the size of the next chunk. Raises `EOFError` where there is none."""
        line = await self.reader.readline()
        if not line:
            raise EOFError("the answer was cut off")
        return int(line.split(b";")[0], 16)

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts()])

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of each server-sent event."""
        rest = b""
        async for part in self.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode("utf-8", "replace")
        if rest.startswith(b"data:"):
            yield rest[5:].strip().decode("utf-8", "replace")


@dataclass(slots=True)
class OpenAIClient:
    """Asks one server.

    Args:
        tokenize: gives the tokens of an answer's text, by the vocabulary that is measured with.
        model: the name to ask for; None: the first that the server lists.
        key: for the header `authorization`.
        timeout_s: seconds that a request may take.
        schema_field: the field in which the server takes a JSON schema: OpenAI's `response_format`, or
            llama-server's `json_schema`.
    """

    address: Address
    tokenize: Callable[[str], Sequence[int]]
    model: str | None = None
    key: str | None = None
    timeout_s: float = 600.0
    schema_field: str = "response_format"
    has_extras: bool = True
    """Whether the server takes options that OpenAI's API does not have, such as `ignore_eos`."""

    async def find_model(self) -> list[str]:
        """Return the models that the server lists, and ask for the first from now on if none was named.

        Raises:
            ServerProblemError: it is not there, or has not the model that was named.
        """
        status, data = await self._call("GET", "/models", None)
        listed: list[str] = []
        if status == 200:
            try:
                listed = [str(item["id"]) for item in json.loads(data)["data"]]
            except (ValueError, LookupError, TypeError):
                raise ServerProblemError(
                    f"{self.address}/models did not return a list of models: {_quoted(data)}"
                ) from None
        if self.model is None:
            self.model = listed[0] if listed else "any"
        elif listed and self.model not in listed:
            raise ServerProblemError(
                f"{self.address} has no model {self.model!r}; it has {', '.join(listed[:8])}"
            )
        return listed

    async def is_healthy(self) -> bool:
        """Whether the server's `/health` says so. Raises a `ServerProblemError` where it is not there."""
        status, _ = await self._call("GET", "/health", None)
        return bool(status == 200)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the server answers to a JSON object.

        Raises:
            ServerProblemError: it refuses, answers with no object, or not in time.
        """
        call = self._call("POST", path, body)
        try:
            status, data = await asyncio.wait_for(call, self.timeout_s)
        except asyncio.TimeoutError:
            raise ServerProblemError(f"no answer in {self.timeout_s:g} s") from None
        if status != 200:
            raise self._refused(status, data)
        return self._parsed(data.decode("utf-8", "replace"))

    async def rows(self, call: TextCall) -> Rows:
        """Return what the server answers to a call for embeddings, or for scores.

        Raises:
            ServerProblemError: as `post`; or a text has no answer.
        """
        body: dict[str, Any] = {"model": self.model, "input": call.texts}
        path, items, field = "/embeddings", "data", "embedding"
        if call.query is not None:
            body = {"model": self.model, "query": call.query, "documents": call.texts}
            path, items, field = "/rerank", "results", "relevance_score"
        found = await self.post(path, body)
        try:
            by_index = {item["index"]: item[field] for item in found[items]}
            rows = [by_index[i] for i in range(len(call.texts))]
            return [[*map(float, r)] if isinstance(r, list) else [float(r)] for r in rows]
        except (LookupError, TypeError, ValueError):
            raise ServerProblemError(
                f"{self.address} did not answer with a result for each of {len(call.texts)} texts"
            ) from None

    async def try_out(self, request: WorkRequest, now: Now) -> MeasuredAnswer:
        """Ask once, and without the extras from then on if the server refuses them."""
        answer = await self.ask(request, now(), now)
        if answer.error and self.has_extras and " 4" in answer.error:
            self.has_extras = False
            again = await self.ask(request, now(), now)
            if again.error:
                self.has_extras = True
                return answer
            return again
        return answer

    async def ask(
        self, request: WorkRequest, sent_s: float, now: Now, *, is_streamed: bool = True
    ) -> MeasuredAnswer:
        """Ask for one completion; what goes wrong is the answer's error."""
        seen = _HeardAnswer(Arrivals(sent_s))
        error = ""
        try:
            ask = self._stream if is_streamed else self._plain
            await asyncio.wait_for(ask(request, seen, now), self.timeout_s)
        except ServerProblemError as problem:
            error = str(problem)
        except asyncio.TimeoutError:
            error = f"the answer did not end within {self.timeout_s:g} s"
        except (OSError, EOFError, ValueError) as problem:
            error = f"{self.address}: the connection broke: {problem or type(problem).__name__}"
        is_told = seen.pieces or seen.usage[1] or seen.finish  # an empty answer has an end
        if not error and is_streamed and not is_told:
            error = f"{self.address} streamed nothing"
        return self._answer(request, seen, now(), error)

    def _answer(
        self, request: WorkRequest, seen: _HeardAnswer, end_s: float, error: str
    ) -> MeasuredAnswer:
        n_prompt, n_output = seen.usage
        if n_output is None or n_prompt is None or abs(n_prompt - request.n_prompt) > MOST_BOS:
            n_output = NOT_COUNTED
        return seen.arrivals.answer(
            request.id,
            end_s,
            n_output,
            n_prompt=n_prompt,
            finish=seen.finish,
            text="".join(seen.pieces),
            error=error,
        )

    def counted(self, answer: MeasuredAnswer) -> MeasuredAnswer:
        """Return an answer with the tokens that are counted in its text: after the round, for it takes time.

        An event may have several tokens; all are taken to have equally many.
        """
        tokens = self.tokenize(answer.text)
        n_output = len(tokens) if answer.n_output == NOT_COUNTED else answer.n_output
        is_told = 2 * len(tokens) >= n_output  # control tokens have no text
        n_each = max(1, round(n_output / (len(answer.gaps_s) + 1)))
        return replace(
            answer,
            n_output=n_output,
            n_distinct=len(set(tokens)) if is_told else n_output,
            gaps_s=tuple(gap for whole in answer.gaps_s for gap in per_token(whole, n_each)),
        )

    def body(self, request: WorkRequest, *, is_streamed: bool) -> dict[str, Any]:
        """Return the body of a request."""
        options = dict(request.options)
        schema = options.pop("json_schema", None)
        plain = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop")
        kept = options if self.has_extras else {k: v for k, v in options.items() if k in plain}
        body: dict[str, Any] = {"model": self.model, "prompt": request.prompt}
        body |= {"max_tokens": request.n_output}
        body |= kept | ({"ignore_eos": True} if self.has_extras else {})
        if schema is not None and self.schema_field == "response_format":
            named = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif schema is not None:
            body[self.schema_field] = schema
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def _stream(self, request: WorkRequest, seen: _HeardAnswer, now: Now) -> None:
        reply, writer = await self._send(
            "POST", "/completions", self.body(request, is_streamed=True)
        )
        try:
            if reply.status != 200:
                raise self._refused(reply.status, await reply.body())
            async for data in reply.events():
                if data != "[DONE]":
                    seen.take(self._parsed(data), now())
        finally:
            writer.close()

    async def _plain(self, request: WorkRequest, seen: _HeardAnswer, now: Now) -> None:
        status, data = await self._call(
            "POST", "/completions", self.body(request, is_streamed=False)
        )
        if status != 200:
            raise self._refused(status, data)
        seen.take(self._parsed(data.decode("utf-8", "replace")), now())
        seen.arrivals = Arrivals(seen.arrivals.sent_s)  # the first token came at an unknown time

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ServerProblemError(f"{self.address} sent no JSON object: {_quoted(text)}")
        if data.get("error"):
            raise ServerProblemError(f"{self.address} sent an error: {_quoted(text)}")
        return data

    def _refused(self, status: int, data: bytes) -> ServerProblemError:
        return ServerProblemError(f"{self.address} answered {status}: {_quoted(data)}")

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        reply, writer = await self._send(method, path, body)
        try:
            return reply.status, await reply.body()
        finally:
            writer.close()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[HttpReply, asyncio.StreamWriter]:
        address = self.address
        secure = ssl.create_default_context() if address.is_secure else None
        try:
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=secure, limit=_N_LINE
            )
        except OSError as error:
            raise ServerProblemError(
                f"{address}: cannot connect: {error.strerror or error}"
            ) from None
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {address.path}{path} HTTP/1.1",
            f"host: {address.host}:{address.port}",
            "content-type: application/json",
            "connection: close",
            f"content-length: {len(data)}",
            *([f"authorization: Bearer {self.key}"] if self.key else []),
        ]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            return await self._reply(reader), writer
        except BaseException:
            writer.close()
            raise

    async def _reply(self, reader: asyncio.StreamReader) -> HttpReply:
        first = (await reader.readline()).split(maxsplit=2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
            words = _quoted(b" ".join(first)) if first else "nothing"
            raise ServerProblemError(f"{self.address} did not answer in HTTP: {words}")
        headers: dict[str, str] = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return HttpReply(int(first[1]), headers, reader)


@dataclass(slots=True)
class _HeardAnswer:
    arrivals: Arrivals
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int | None, int | None] = (None, None)
    """Tokens of prompt and answer, as the server counts them."""

    def take(self, data: Mapping[str, Any], now_s: float) -> None:
        for choice in data.get("choices") or ():
            if choice.get("text"):
                self.pieces.append(choice["text"])
                self.arrivals.note(now_s)
            self.finish = choice.get("finish_reason") or self.finish
        usage = data.get("usage")
        if isinstance(usage, dict):
            self.usage = usage.get("prompt_tokens"), usage.get("completion_tokens")


def _quoted(words: str | bytes) -> str:
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    text = " ".join(text.split())
    return text if len(text) <= _N_QUOTED else f"{text[:_N_QUOTED]}…"
