"""The client of other people's servers: what it reads, and what it names."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.measured import WorkRequest
from cbatch.bench.openai_client import Address, OpenAIClient, ServerProblemError
from cbatch.bench.sides import HttpSide, SideError, there_already
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cbatch.bench.measured import MeasuredAnswer

REQUEST = WorkRequest("a", "one two", 3, 4, {"temperature": 0.5, "top_k": 40, "seed": 1})
USAGE = {"prompt_tokens": 3, "completion_tokens": 4}


def tokenize(text: str) -> list[int]:
    """Return a token for each letter."""
    return [*map(ord, text)]


def event(text: str = "", **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": more.pop("finish", None)}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


DONE = b"data: [DONE]\n\n"
STREAM = event("x") + event("y") + event("", finish="length") + event(usage=USAGE) + DONE


def reply(body: bytes, status: int = 200, *, n_chunk: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status} Any\r\ncontent-type: any\r\n"
    if n_chunk is None:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    parts = [body[i : i + n_chunk] for i in range(0, len(body), n_chunk)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks


class Server:
    """Answers with bytes as they are, by what is asked, and keeps the bodies that it got."""

    def __init__(self, completions: bytes | Callable[[dict[str, Any]], bytes]) -> None:
        self.completions = completions
        self.models = reply(json.dumps({"data": [{"id": "its-model"}]}).encode())
        self.bodies: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        n = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(n)
        if "/models" in head:
            writer.write(self.models)
        else:
            asked = json.loads(body)
            self.bodies.append(asked)
            given = self.completions
            writer.write(given(asked) if callable(given) else given)
        writer.close()

    def ask(self, use: Callable[[OpenAIClient], Awaitable[Any]], **more: Any) -> Any:
        """Run the server while a client of it does something."""

        async def run() -> Any:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                address = Address.of(f"http://127.0.0.1:{port}")
                return await use(OpenAIClient(address, tokenize, **more))

        return asyncio.run(run())


def one(completions: bytes, *, is_streamed: bool = True, **more: Any) -> MeasuredAnswer:
    async def use(client: OpenAIClient) -> MeasuredAnswer:
        answer = await client.ask(REQUEST, 0.0, iter(range(100)).__next__, is_streamed=is_streamed)
        return client.counted(answer)

    answer: MeasuredAnswer = Server(completions).ask(use, **more)
    return answer


@pytest.mark.parametrize("n_chunk", [None, 1, 7, 1000])
def test_stream_is_read_whatever_its_framing(n_chunk: int | None) -> None:
    answer = one(reply(STREAM, n_chunk=n_chunk))
    assert answer.error == ""
    assert (answer.n_prompt, answer.n_output, answer.finish) == (3, 4, "length")
    assert (answer.text, answer.n_distinct) == ("xy", 2)
    assert answer.first_s == 0
    assert len(answer.gaps_s) == 2  # two tokens of the second event


def counts(n_prompt: int, n_output: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": n_prompt, "completion_tokens": n_output}}


@pytest.mark.parametrize(
    ("events", "n_prompt", "n_output", "n_distinct"),
    [
        (event("abcabcabcabc", finish="length", **counts(3, 12)), 3, 12, 3),
        (event("aaaaaaaaaaaa", finish="length", **counts(3, 12)), 3, 12, 1),
        (event("a", finish="length", **counts(3, 12)), 3, 12, 12),
        (event("abc") + event("de", finish="length"), None, 5, 5),  # by the model's tokenizer
        (event("abc", finish="length", **counts(30, 99)), 30, 3, 3),  # of another vocabulary
        (event("", finish="length"), None, 0, 0),
    ],
)
def test_tokens_are_counted_by_usage_or_by_text(
    events: bytes, n_prompt: int | None, n_output: int, n_distinct: int
) -> None:
    answer = one(reply(events + DONE))
    assert (answer.error, answer.finish) == ("", "length")
    assert (answer.n_prompt, answer.n_output) == (n_prompt, n_output)
    assert answer.n_distinct == n_distinct


def test_answer_that_is_not_streamed_has_no_first_token() -> None:
    whole = {"choices": [{"text": "xy", "finish_reason": "length"}], "usage": USAGE}
    answer = one(reply(json.dumps(whole).encode()), is_streamed=False)
    assert (answer.error, answer.n_output, answer.first_s, answer.gaps_s) == ("", 4, None, ())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (reply(b'{"error": "no room"}', 500), "answered 500: .*no room"),
        (reply(b"gone", 404), "answered 404: gone"),
        (reply(DONE), "streamed nothing"),
        (reply(b""), "streamed nothing"),
        (reply(event(usage={"prompt_tokens": 3, "completion_tokens": 0})), "streamed nothing"),
        (
            reply(b'data: {"error": {"message": "out of memory"}}\n\n'),
            "sent an error: .*out of memory",
        ),
        (reply(b"data: hello\n\n"), "sent no JSON object: hello"),
        (b"220 mail ready\r\n", "did not answer in HTTP: 220 mail ready"),
        (b"", "did not answer in HTTP: nothing"),
        (reply(STREAM, n_chunk=9)[:-30], "the connection broke"),
    ],
)
def test_broken_server_is_named(given: bytes, words: str) -> None:
    answer = one(given)
    assert re.search(words, answer.error), answer.error
    assert "127.0.0.1" in answer.error


def test_answer_that_never_ends_is_given_up() -> None:
    async def use(client: OpenAIClient) -> MeasuredAnswer:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client.address = Address.of(f"http://127.0.0.1:{port}")
            return await client.ask(REQUEST, 0.0, lambda: 0.0)

    answer = Server(b"").ask(use, timeout_s=0.05)
    assert answer.error == "the answer did not end within 0.05 s"


def test_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = OpenAIClient(Address.of(f"127.0.0.1:{port}"), tokenize)
    with pytest.raises(ServerProblemError, match=f"http://127.0.0.1:{port}/v1: cannot connect"):
        asyncio.run(client.find_model())


def test_first_model_is_asked_for_and_another_must_be_listed() -> None:
    server = Server(reply(STREAM))

    async def use(client: OpenAIClient) -> None:
        await client.find_model()
        await client.ask(REQUEST, 0.0, lambda: 0.0)

    server.ask(use)
    assert server.bodies[0]["model"] == "its-model"
    with pytest.raises(ServerProblemError, match="has no model 'mine'; it has its-model"):
        server.ask(use, model="mine")


def test_server_without_a_list_of_models_is_asked_all_the_same() -> None:
    server = Server(reply(STREAM))
    server.models = reply(b"no", 404)
    assert server.ask(lambda client: client.find_model()) == []
    server.models = reply(b"<html>")
    with pytest.raises(ServerProblemError, match="did not return a list of models"):
        server.ask(lambda client: client.find_model())


def test_extras_are_left_out_for_a_server_that_refuses_them() -> None:
    def strict(body: dict[str, Any]) -> bytes:
        return reply(b"unknown field ignore_eos", 400) if "ignore_eos" in body else reply(STREAM)

    server = Server(strict)

    async def use(client: OpenAIClient) -> tuple[str, bool]:
        answer = await client.try_out(REQUEST, lambda: 0.0)
        return answer.error, client.has_extras

    assert server.ask(use) == ("", False)
    assert server.bodies[1].keys() == {
        *("model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options")
    }


@pytest.mark.parametrize("name", ["response_format", "json_schema"])
def test_schema_is_in_the_field_that_the_server_reads(name: str) -> None:
    client = OpenAIClient(Address.of("http://a"), tokenize, schema_field=name)
    asked = WorkRequest("a", "b", 1, 1, {"json_schema": {"type": "array"}})
    body = client.body(asked, is_streamed=False)
    assert {"type": "array"} in (body[name], body[name].get("json_schema", {}).get("schema"))
    assert len({"response_format", "json_schema"} & body.keys()) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a:8000/v1/", "http://a:8000/v1"),
        ("a:8000", "http://a:8000/v1"),
        ("https://a/api/v1", "https://a:443/api/v1"),
        *((wrong, None) for wrong in ("ftp://a", "http://", "http://a:port", "")),
    ],
)
def test_address_of_a_url(url: str, shown: str | None) -> None:
    with nullcontext() if shown else pytest.raises(ConfigError, match="URL"):
        assert str(Address.of(url)) == shown


def side(server: Server, expected: list[str], n_prompt: int = 3) -> list[str]:
    """Check a server as a comparison does, by probes whose answers are expected to be these."""

    async def run() -> list[str]:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            made = HttpSide(
                "theirs", lambda: there_already(url), lambda at: OpenAIClient(at, tokenize)
            )
            probes = [WorkRequest(str(i), "a", n_prompt, 4) for i in range(len(expected))]
            return await asyncio.to_thread(made.check, probes, expected)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "expected", "n_prompt", "words"),
    [
        (
            reply(STREAM),
            ["ab", "cd"],
            3,
            "answers all 2 test prompts differently: it has another model",
        ),
        (reply(STREAM), ["xy"], 9, "counts 3 tokens in a prompt that has 9: it has another model"),
        (reply(b"", 500), ["xy"], 3, r"theirs: .* answered 500"),
    ],
    ids=["model", "vocabulary", "refuses"],
)
def test_server_of_another_model_is_not_measured(
    answer: bytes, expected: list[str], n_prompt: int, words: str
) -> None:
    with pytest.raises(SideError, match=words):
        side(Server(answer), expected, n_prompt)


def test_server_that_answers_as_the_model_does_may_be_measured() -> None:
    assert side(Server(reply(STREAM)), ["xyz", "no"]) == []
    notes = side(Server(reply(event("xy", finish="stop") + DONE)), ["xy"])
    assert notes == ["it reports no usage, so tokens are counted in its text"]
