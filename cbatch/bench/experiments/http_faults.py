"""Clients and workers that fail: `python -m cbatch.bench.experiments.http_faults [MODEL]`.

First clients vanish at random moments: before the header, in it, in the body, while they wait, in their answers. Then
good clients ask beside bad ones while worker processes are killed. What is left of it all is printed: slots, files,
memory, and what each good client has heard.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cbatch.bench.experiments.http_load import CHAT, Heard, ask, get, request
from cbatch.bench.experiments.rounds import median, parser
from cbatch.bench.harness import emit
from cbatch.bench.server_process import Server, n_open_files, rss_mib, served

_GOES_AT_ONCE = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which a closed socket is reset."""

_PATIENCE_S = 60.0
"""Seconds in which what vanished clients had must be free. Our choice."""

MOMENTS = ("connected", "header", "body", "asked", "answer")
"""When a client vanishes."""


# ---- clients that vanish ----


def chat(i: int, n_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a chat whose answer has so many tokens."""
    said = [{"role": "user", "content": f"Tell me of number {i}. " * (1 + i % 7)}]
    options = {"max_tokens": n_tokens, "ignore_eos": True, "seed": i}
    return {"messages": said, **options, **more}


async def vanish(port: int, chance: random.Random, i: int, n_tokens: int) -> str:
    """Begin a request and vanish, by a reset or not; return at which moment."""
    body = chat(i, n_tokens, stream=chance.random() < 0.5, n=chance.choice((1, 1, 1, 2)))
    sent, moment = request(CHAT, body), chance.choice(MOMENTS)
    n_header = sent.index(b"\r\n\r\n")
    n_sent = {
        "connected": 0,
        "header": chance.randrange(n_header),
        "body": chance.randrange(n_header + 4, len(sent)),
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(sent[: n_sent.get(moment)])
        await writer.drain()
        if moment == "answer":
            await reader.read(chance.randrange(1, 2000))
        else:
            await asyncio.sleep(chance.random() ** 3)
        if chance.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _GOES_AT_ONCE)
    writer.close()
    return moment


async def vanish_all(port: int, seed: int, n: int, n_at_once: int, n_tokens: int) -> Counter[str]:
    """Have `n` clients vanish, some at once; return how many did at each moment."""
    chance, limit = random.Random(seed), asyncio.Semaphore(n_at_once)

    async def one(i: int) -> str:
        async with limit:
            return await vanish(port, chance, i, n_tokens)

    return Counter(await asyncio.gather(*map(one, range(n))))


@dataclass(frozen=True)
class Holding:
    """What a server has in its hands."""

    n_in_flight: int
    n_busy_slots: int
    n_waiting: int
    n_files: int
    """Of the server and its workers."""


async def holding(server: Server) -> Holding:
    """Look at a server from outside."""
    metrics = await get(server.port, "/metrics")
    in_flight = await get(server.port, "/health")
    found = re.search(r'"in_flight":(\d+)', in_flight)
    return Holding(
        int(found[1]) if found else -1,
        int(figure(metrics, "cbatch:requests_running")),
        int(figure(metrics, "cbatch:requests_waiting")),
        sum(map(n_open_files, [server.pid, *server.workers])),
    )


def figure(metrics: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, rows))


async def holding_again(server: Server, before: Holding, n_more_files: int = 0) -> Holding:
    """Return what a server has when it has no more than before, but for some files, or after a while."""
    ends_s = time.perf_counter() + _PATIENCE_S
    while True:
        now = await holding(server)
        is_free = not (now.n_in_flight or now.n_busy_slots or now.n_waiting)
        if (
            is_free and now.n_files <= before.n_files + n_more_files
        ) or time.perf_counter() > ends_s:
            return now
        await asyncio.sleep(0.1)


# ---- good clients beside bad ones, and workers that are killed ----

BAD: tuple[tuple[str, bytes, int], ...] = (
    ("broken JSON", request(CHAT, b'{"messages": ['), 400),
    ("wrong field", request(CHAT, {"messages": [], "temperature": "hot"}), 400),
    ("no path", request("/v1/nothing", {}), 404),
    ("no HTTP", b"nonsense\r\n\r\n", 400),
    ("large header", request(CHAT, {}, f"x-large: {'x' * 2**17}"), 431),
    ("too long", request(CHAT, {"messages": [{"role": "user", "content": "long " * 9999}]}), 400),
)
"""Requests that are refused, each with its status."""


@dataclass
class FaultTally:
    """What became of all requests."""

    good: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    n_kills: int = 0
    rss: list[tuple[float, float]] = field(default_factory=list)
    """MiB of the server, and of its workers, now and then."""

    @property
    def n_good(self) -> int:
        """Requests of good clients that have ended."""
        return sum(self.good.values())


def outcome(got: Heard) -> str:
    """Return what a good client's request came to: `lost` where nobody told it anything."""
    if got.error is not None:
        return got.error
    return "answered" if got.status == 200 and got.is_whole else "lost"


async def storm(
    port: int,
    tally: FaultTally,
    n_clients: int,
    n_tokens: int,
    goes_on: Callable[[], bool],
    chance: random.Random,
) -> None:
    """Have clients ask until it does not go on, a third of them bad ones and one slow."""

    async def good() -> None:
        while goes_on():
            body = chat(chance.randrange(10**6), n_tokens, stream=chance.random() < 0.5)
            tally.good[outcome(await ask(port, request(CHAT, body)))] += 1

    async def bad() -> None:
        while goes_on():
            if chance.random() < 0.5:
                await vanish(port, chance, chance.randrange(10**6), n_tokens)
                continue
            name, sent, status = chance.choice(BAD)
            got = await ask(port, sent)
            tally.bad[f"{name}: {'refused' if got.status == status else got.status}"] += 1
            await asyncio.sleep(chance.random() / 10)

    async def slow() -> None:
        while goes_on():
            await read_slowly(port, chat(chance.randrange(10**6), n_tokens, stream=True))

    await asyncio.gather(
        *(good() for _ in range(n_clients)), *(bad() for _ in range(n_clients // 2)), slow()
    )


async def read_slowly(port: int, body: dict[str, Any]) -> None:
    """Ask, and read some bytes now and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(ConnectionError):
        writer.write(request(CHAT, body))
        while await reader.read(1000):  # noqa: ASYNC110  # it reads slowly, and waits for nothing
            await asyncio.sleep(0.05)
    writer.close()


async def kill_workers(server: Server, tally: FaultTally, every_s: float) -> None:
    """Kill a worker every so many seconds, and note memory meanwhile. Until cancelled."""
    next_s = time.perf_counter() + every_s
    while True:
        await asyncio.sleep(min(5.0, every_s / 4))
        workers = server.workers
        with suppress(OSError):  # it was just killed
            tally.rss.append((rss_mib(server.pid), sum(map(rss_mib, workers))))
        if time.perf_counter() >= next_s and workers:
            next_s += every_s
            os.kill(workers[tally.n_kills % len(workers)], signal.SIGKILL)
            tally.n_kills += 1


# ---- the measurement ----


async def measure_leavers(server: Server, a: Any) -> None:
    """Print one JSON line for clients that vanish."""
    await ask(server.port, request(CHAT, chat(0, 2)))
    before = await holding(server)
    moments = await vanish_all(server.port, a.seed, a.clients, a.at_once, a.tokens)
    after = await holding_again(server, before)
    emit(what="vanished", moments=dict(moments), before=vars(before), after=vars(after))


async def measure_storm(server: Server, a: Any) -> None:
    """Print one JSON line for good and bad clients while workers are killed."""
    before, tally = await holding(server), FaultTally()
    ends_s = time.perf_counter() + a.minutes * 60
    killing = asyncio.create_task(kill_workers(server, tally, a.kill_every_s))
    chance = random.Random(a.seed)
    await storm(server.port, tally, a.good, a.tokens, lambda: time.perf_counter() < ends_s, chance)
    killing.cancel()
    after = await holding_again(server, before)
    half = len(tally.rss) // 2
    halves = [part for part in (tally.rss[:half], tally.rss[half:]) if part]
    emit(
        what="storm",
        good=dict(tally.good),
        bad=dict(tally.bad),
        kills=tally.n_kills,
        server_mib=[median((own for own, _ in part), 1) for part in halves],
        workers_mib=[median((theirs for _, theirs in part), 1) for part in halves],
        before=vars(before),
        after=vars(after),
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print two JSON lines."""
    asked = parser(__doc__, model="the one that ships inside")
    asked.add_argument("--parallel", type=int, default=8, help="slots of the server")
    asked.add_argument("--replicas", type=int, default=1, help="worker processes")
    asked.add_argument("--clients", type=int, default=1000, help="clients that vanish")
    asked.add_argument("--at-once", type=int, default=100, help="of these, so many at once")
    asked.add_argument("--minutes", type=float, default=1.0, help="of good and bad traffic")
    asked.add_argument("--good", type=int, default=16, help="good clients in it")
    asked.add_argument("--kill-every-s", type=float, default=10.0, help="seconds between kills")
    asked.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    asked.add_argument("--seed", type=int, default=1, help="of all chance")
    a = asked.parse_args(words)
    own = ("--parallel", str(a.parallel), "--replicas", str(a.replicas))
    with served(a.model, *own) as server:
        asyncio.run(measure_leavers(server, a))
        asyncio.run(measure_storm(server, a))


if __name__ == "__main__":
    main()
