"""Good clients beside bad ones while worker processes are killed, for as long as a test may last."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from cbatch.bench.experiments.http_faults import FaultTally, chat, holding, holding_again, storm
from cbatch.bench.experiments.http_load import CHAT, ask, heard, request
from cbatch.bench.server_process import Server, served

N_GOOD = 90
KILLS = (20, 40, 60)
"""Answers of good clients behind which a worker is killed."""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("n_replicas", [1, 2])
def test_storm_with_deaths_leaves_nothing_and_tells_everybody(n_replicas: int) -> None:
    with served(None, "--parallel", "4", "--replicas", str(n_replicas)) as server:
        tally, kills = FaultTally(), [*KILLS]

        def goes_on() -> bool:
            if kills and tally.n_good >= kills[0] and (workers := server.workers):
                os.kill(workers[0], signal.SIGKILL)
                del kills[0]
            return tally.n_good < N_GOOD

        async def main() -> None:
            await ask(server.port, request(CHAT, chat(0, 2)))
            before = await holding(server)
            await storm(server.port, tally, 8, 24, goes_on, random.Random(1))
            n_more = 2 * n_replicas  # a worker may have started its second process for templates
            after = await holding_again(server, before, n_more)
            assert (after.n_in_flight, after.n_busy_slots, after.n_waiting) == (0, 0, 0)
            assert after.n_files <= before.n_files + n_more
            last = await ask(server.port, request(CHAT, chat(1, 4)))
            assert last.status == 200

        asyncio.run(main())
    assert not kills
    assert tally.good.keys() <= {"answered", "worker_died"}, tally.good
    assert tally.good["answered"] > N_GOOD // 2
    assert {name.partition(": ")[2] for name in tally.bad} == {"refused"}, tally.bad


@pytest.mark.real
def test_death_of_a_worker_is_one_error_for_each_stream_and_then_service() -> None:
    async def main(server: Server) -> list[bytes]:
        opened = []
        for i in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request(CHAT, chat(i, 1500, stream=i > 0)))
            opened.append((reader, writer, await reader.read(1000) if i else b""))
        os.kill(server.workers[0], signal.SIGKILL)
        found = [begun + await reader.read() for reader, _, begun in opened]
        for _, writer, _ in opened:
            writer.close()
        answer = await ask(server.port, request(CHAT, chat(9, 4)))
        assert answer.status == 200
        assert answer.is_whole
        return found

    with served(None, "--parallel", "4") as server:
        whole, *streams = asyncio.run(main(server))
    assert heard(whole).status == 500
    assert heard(whole).error == "worker_died"
    for data in streams:
        assert heard(data).status == 200
        assert heard(data).error == "worker_died"
        assert data.count(b'"error":') == 1
        assert b"[DONE]" not in data
        assert data.endswith(b"0\r\n\r\n")
