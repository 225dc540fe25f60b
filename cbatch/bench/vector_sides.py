"""The sides of a comparison of embeddings or rerank: processes that it starts, and servers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cbatch.bench.openai_client import OpenAIClient, ServerProblemError
from cbatch.bench.server_process import cpu_s_of
from cbatch.bench.sides import HttpSide, ProcessSide, SideError
from cbatch.bench.vector_process import all_answered
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.bench.text_work import TextCall
    from cbatch.bench.vector_process import Rows

VECTOR_KINDS = ("engine", "serve", "llama")
"""Sides that embed; `llama` is `Llama.embed`, which does not rerank."""


def check_vector_kinds(names: Sequence[str]) -> None:
    """Raise a `ConfigError` for a side that does not embed."""
    for name in names:
        if name not in VECTOR_KINDS:
            known = ", ".join(VECTOR_KINDS)
            raise ConfigError(f"side {name!r} has no embeddings; known are {known}")


@dataclass(frozen=True, slots=True)
class VectorRound:
    """The time of a round: by the clock, and of all cores where the processes are known."""

    seconds: float
    cpu_s: float | None


class VectorSide(Protocol):
    """What answers the calls of a round."""

    name: str

    def start(self) -> None:
        """Get ready; where it is ready, do nothing. Raises `SideError`."""

    def close(self) -> None:
        """End; `start` starts it anew."""

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Answer all calls, so many at once. Raises `SideError`."""

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives. Raises `SideError`."""

    @property
    def memory_mib(self) -> float | None:
        """The memory that its processes have of their own; None where nobody can know."""


class OwnVectorSide(ProcessSide):
    """A side of `cbatch.bench.side_process`: an engine, or `Llama.embed`."""

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Send the calls, and return their time."""
        self.start()
        found = self.do({"calls": [*map(asdict, calls)], "n_clients": n_clients})
        return VectorRound(float(found["seconds"]), float(found["cpu_s"]))

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives."""
        self.start()
        found: Rows = self.do({"call": asdict(call)})["rows"]
        return found


class HttpVectorSide(HttpSide):
    """A server that has `/v1/embeddings` or `/v1/rerank`."""

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Send the calls, and return their time."""
        self.start()
        before = [cpu_s_of(pid) for pid in self.pids()]
        seconds = asyncio.run(all_answered(calls, n_clients, self._rows))
        cpu_s = sum(cpu_s_of(pid) for pid in self.pids()) - sum(before) if before else None
        return VectorRound(seconds, cpu_s)

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives."""
        self.start()
        return asyncio.run(self._rows(call))

    async def _rows(self, call: TextCall) -> Rows:
        try:
            return await _asked(self.client, call)
        except (ServerProblemError, OSError, EOFError, ValueError) as error:
            raise SideError(f"{self.name}: {error}") from None


async def _asked(client: OpenAIClient, call: TextCall) -> Rows:
    """Have a server answer a call."""
    body: dict[str, Any] = {"model": client.model}
    if call.query is None:
        found = await client.post("/embeddings", {**body, "input": call.texts})
        read = partial(_listed, found, "data", "embedding")
    else:
        asked = {"query": call.query, "documents": call.texts}
        found = await client.post("/rerank", {**body, **asked})
        read = partial(_listed, found, "results", "relevance_score")
    try:
        rows: Rows = read(len(call.texts))
    except (LookupError, TypeError, ValueError):
        raise ServerProblemError(
            f"{client.address} did not answer each of {len(call.texts)} texts"
        ) from None
    return rows


def _listed(found: Mapping[str, Any], items: str, field: str, n: int) -> Rows:
    by_index = {item["index"]: item[field] for item in found[items]}
    rows = [by_index[i] for i in range(n)]
    return [[*map(float, row)] if isinstance(row, list) else [float(row)] for row in rows]
