"""A server beside llama-server, cold: `python -m cbatch.bench.http_peers MODEL REQUESTS.jsonl … --llama-server PATH`.

Each round starts both anew, with equal slots and cells, and sends both the same requests from the same number of
clients, to `/v1/completions`, streamed and not. The files are those of `cbatch.bench.workload`. The client is a task on
a socket, so that little of what is measured is its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.bench.harness import emit, median, parser, percentile, ratios, take_turns
from cbatch.bench.http_load import N_BYTES_A_READ, get, heard, request, served
from cbatch.worker.placement import my_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

PATIENCE_S = 120.0
"""Seconds in which a server must be up. Our choice."""

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


@contextmanager
def llama_server(program: str, model: str, n_slots: int, n_window: int) -> Iterator[int]:
    """Run llama-server for the block, with a window of its own for each slot; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    n_threads = str(len(my_cores()))
    command = [program, "-m", model, "-np", str(n_slots), "-c", str(n_slots * n_window), "-no-kvu"]
    command += ["-t", n_threads, "-tb", n_threads, "--port", str(port), "--no-webui"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await_health(port, process)
            yield port
        finally:
            process.terminate()


def _await_health(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError):  # it does not listen yet
            if '"ok"' in asyncio.run(get(port, "/health")):
                return
        time.sleep(0.05)
    raise SystemExit(f"llama-server did not start: {process.args!r}")


@contextmanager
def cbatch_server(model: str, n_slots: int, n_window: int, *more: str) -> Iterator[int]:
    """Run `cbatch serve` for the block; gives its port."""
    sizes = ("--parallel", str(n_slots), "--ctx-per-seq", str(n_window))
    with served(model, *sizes, *more) as server:
        yield server.port


@dataclass(slots=True)
class Clients:
    """What clients have got from a server."""

    n_tokens: int = 0
    seconds: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)

    async def send(self, port: int, waiting: list[bytes]) -> None:
        """Send requests until none is left, each when the answer of the one before is there."""
        while waiting:
            sent, data, first_s = waiting.pop(), bytearray(), 0.0
            start = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            while part := await reader.read(N_BYTES_A_READ):
                data += part
                if not first_s and b"data: " in part:
                    first_s = time.perf_counter() - start
            writer.close()
            got = heard(bytes(data))
            if got.status != 200 or got.error or not _USAGE.search(got.data):
                raise SystemExit(f"a server answered {got.data[-500:]!r}")
            self.n_tokens += int(_USAGE.findall(got.data)[-1])
            self.ttft_ms.append(1e3 * first_s)

    @property
    def tps(self) -> float:
        """Generated tokens a second."""
        return self.n_tokens / self.seconds


def body_of(line: dict[str, Any], *, is_streamed: bool) -> dict[str, Any]:
    """Return the body of a request that stands in a file."""
    body = {"model": "any", "min_p": 0.0, "ignore_eos": True, **line, "stream": is_streamed}
    del body["id"]
    return body | ({"stream_options": {"include_usage": True}} if is_streamed else {})


def measure(
    start: Callable[[], AbstractContextManager[int]], requests: Sequence[bytes], n_clients: int
) -> Clients:
    """Start a server, have clients send it all requests, and end it."""
    clients = Clients()

    async def send_all(port: int) -> None:
        waiting = [*reversed(requests)]
        await asyncio.gather(*(clients.send(port, waiting) for _ in range(n_clients)))

    with start() as port:
        began = time.perf_counter()
        asyncio.run(send_all(port))
        clients.seconds = time.perf_counter() - began
    return clients


def compare(rounds: Sequence[tuple[Clients, Clients]], *, is_streamed: bool) -> dict[str, Any]:
    """Return medians of ours and theirs, and the rounds' own ratios.

    Raises:
        SystemExit: one of the two has generated more tokens than the other.
    """
    counts = {clients.n_tokens for both in rounds for clients in both}
    if len(counts) > 1:
        raise SystemExit(f"the servers generated different numbers of tokens: {sorted(counts)}")
    found: dict[str, Any] = {"tokens": counts.pop()}
    for i, name in enumerate(("cbatch", "llama_server")):
        found[name] = {"tps": median((both[i].tps for both in rounds), 1)}
        if is_streamed:
            for share in (0.5, 0.99):
                times = (percentile(both[i].ttft_ms, share) for both in rounds)
                found[name][f"ttft_p{share * 100:.0f}_ms"] = median(times, 1)
    return found | ratios((ours.tps, theirs.tps) for ours, theirs in rounds)


def main() -> None:
    """Print one JSON line for each file, streamed and not."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("requests", type=Path, nargs="+", help="JSONL files")
    asked.add_argument("--llama-server", required=True, metavar="PATH", help="the program")
    asked.add_argument("--clients", type=int, default=32, help="clients at once")
    asked.add_argument("--parallel", type=int, default=16, help="slots of each server")
    asked.add_argument("--ctx-per-seq", type=int, default=2048, help="tokens of each slot")
    asked.add_argument("--replicas", default="auto", help="worker processes of cbatch")
    a = asked.parse_args()
    ways = (
        partial(cbatch_server, a.model, a.parallel, a.ctx_per_seq, "--replicas", a.replicas),
        partial(llama_server, a.llama_server, a.model, a.parallel, a.ctx_per_seq),
    )
    for path in a.requests:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        for is_streamed in (True, False):
            bodies = [
                request("/v1/completions", body_of(line, is_streamed=is_streamed)) for line in lines
            ]
            turns = (partial(measure, way, bodies, a.clients) for way in ways)
            found = take_turns(a.rounds, *turns, n_warm_up=0)  # each server is cold
            rounds = [(ours, theirs) for ours, theirs in found]
            emit(
                requests=path.stem,
                streamed=is_streamed,
                **compare(rounds, is_streamed=is_streamed),
            )


if __name__ == "__main__":
    main()
