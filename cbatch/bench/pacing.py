"""When requests are sent: by clients that wait for their answers, or at random times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cbatch.bench.measured import Chains, MeasuredAnswer, WorkRequest

Now: TypeAlias = Callable[[], float]
"""Seconds since the round began."""

Ask: TypeAlias = Callable[["WorkRequest", float, Now], Awaitable["MeasuredAnswer"]]
"""Sends a request that was due at a time, and returns its answer."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A closed loop of `n_clients`, each of which sends its next request when it has its answer; or arrivals.

    Args:
        arrivals_s: when each chain begins in an open loop, whatever else is answered.
    """

    n_clients: int = 1
    arrivals_s: tuple[float, ...] | None = None

    @classmethod
    def poisson(cls, rate: float, n: int, seed: int) -> Pace:
        """Return an open loop of `n` random arrivals, `rate` a second, the first at once."""
        chance = random.Random(seed)
        times = [*accumulate(chance.expovariate(rate) for _ in range(n))]
        return cls(arrivals_s=tuple(at_s - times[0] for at_s in times))


async def drive(chains: Chains, pace: Pace, ask: Ask) -> tuple[list[MeasuredAnswer], float]:
    """Send all requests at their pace; return their answers, and the seconds until the last one."""
    start = time.perf_counter()
    answers: list[MeasuredAnswer] = []

    def now() -> float:
        return time.perf_counter() - start

    async def follow(chain: list[WorkRequest], due_s: float | None) -> None:
        for request in chain:
            answers.append(await ask(request, now() if due_s is None else due_s, now))
            due_s = None

    if pace.arrivals_s is None:
        waiting = deque(chains)

        async def client() -> None:
            while waiting:
                await follow(waiting.popleft(), None)

        await asyncio.gather(*(client() for _ in range(pace.n_clients)))
    else:

        async def arrive(chain: list[WorkRequest], at_s: float) -> None:
            await asyncio.sleep(max(0.0, at_s - now()))
            await follow(chain, at_s)

        await asyncio.gather(*map(arrive, chains, pace.arrivals_s))
    return answers, now()
