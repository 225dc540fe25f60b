"""Many streaming clients of a server: `python -m cbatch.bench.experiments.http_load MODEL`.

The same requests come from a few clients, each of which sends its next one when it has its answer, and from many at
once. The server is a process of its own, `cbatch serve`, as are its workers; the clients are tasks of this one.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from cbatch.bench.experiments.rounds import compare, parser
from cbatch.bench.harness import emit
from cbatch.bench.server_process import served

CHAT = "/v1/chat/completions"

N_BYTES_A_READ = 2**16

_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_CODE = re.compile(rb'"code":\s*"(\w+)"')


# ---- a client ----


@dataclass(frozen=True)
class Heard:
    """What a client has got."""

    status: int | None
    """None where the connection ended without an answer."""
    data: bytes
    """All of it, header and framing included."""

    @property
    def is_whole(self) -> bool:
        """Whether it is an answer to its end."""
        return self.data.endswith((b"0\r\n\r\n", b"}")) and self.error is None

    @property
    def error(self) -> str | None:
        """The code of the error that it tells."""
        if b'"error":' not in self.data:
            return None
        found = _CODE.search(self.data, self.data.rindex(b'"error":'))
        return found[1].decode() if found else "error"


def request(path: str, body: Any, *headers: str) -> bytes:
    """Return the bytes of a request after whose answer the connection is closed."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "connection: close",
        f"content-length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def ask(port: int, sent: bytes) -> Heard:
    """Send bytes, and read until the server closes the connection."""
    data = bytearray()
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            while part := await reader.read(N_BYTES_A_READ):
                data += part
        finally:
            writer.close()
    return heard(bytes(data))


def heard(data: bytes) -> Heard:
    """Return what an answer's bytes say."""
    found = _STATUS.match(data)
    return Heard(int(found[1]) if found else None, data)


async def get(port: int, path: str) -> str:
    """Return the body of an answer."""
    sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    return (await ask(port, sent)).data.partition(b"\r\n\r\n")[2].decode()


# ---- the measurement ----


def stream_of(i: int, n_tokens: int) -> bytes:
    """Return a streaming request for so many tokens; no two have the same words."""
    said = [{"role": "user", "content": f"Tell me of number {i}."}]
    options = {"max_tokens": n_tokens, "ignore_eos": True, "temperature": 0.8, "seed": i}
    return request(CHAT, {"messages": said, "stream": True, **options})


async def _answered(port: int, requests: Sequence[bytes], n_clients: int, n_tokens: int) -> float:
    """Have clients send all requests; return generated tokens a second."""
    waiting = [*reversed(requests)]

    async def client() -> None:
        while waiting:
            got = await ask(port, waiting.pop())
            if not got.is_whole:
                raise SystemExit(f"a stream has broken: {got.data[-300:]!r}")

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(n_clients)))
    return len(requests) * n_tokens / (time.perf_counter() - start)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    asked = parser(__doc__, model="the one that ships inside", n_rounds=5)
    asked.add_argument("--parallel", type=int, default=16, help="slots of the server")
    asked.add_argument("--few", type=int, default=16, help="clients that take turns")
    asked.add_argument("--many", type=int, default=200, help="clients at once")
    asked.add_argument("--tokens", type=int, default=64, help="tokens of each of --many answers")
    a = asked.parse_args(words)
    requests = [stream_of(i, a.tokens) for i in range(a.many)]
    with served(a.model, "--parallel", str(a.parallel)) as server:

        def rate(n_clients: int) -> float:
            return asyncio.run(_answered(server.port, requests, n_clients, a.tokens))

        found = compare(a.rounds, many_tps=partial(rate, a.many), few_tps=partial(rate, a.few))
    emit(few=a.few, many=a.many, parallel=a.parallel, **found)


if __name__ == "__main__":
    main()
