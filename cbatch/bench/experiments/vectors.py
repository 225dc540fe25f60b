"""Texts a second of embeddings, or of rerank, in this process and of servers.

Run: python -m cbatch.bench.experiments.vectors MODEL --against http://localhost:8080/v1 --llama

`--against URL` adds servers with `/v1/embeddings` or `/v1/rerank`, `--llama` adds `Llama.embed` of llama-cpp-python.
All sides get the same texts in turns; a line for each side, as JSON, has the rates of its rounds, and how far its
vectors are from those of the first side.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from cbatch.bench.harness import emit, median, parser, take_turns
from cbatch.bench.synthetic_vocabulary import words as english_words
from cbatch.errors import ConfigError
from cbatch.loading import load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from cbatch.engine import Engine

    Floats = Any
    """Rows of numbers: lists, or an array."""

_TIMEOUT_S = 600.0


class VectorSide(Protocol):
    """Something that is measured."""

    name: str

    def embed(self, texts: list[str]) -> Floats:
        """Return the vector of each text."""

    def rerank(self, query: str, documents: list[str]) -> Floats:
        """Return the score of each document, a list of one number each."""


class EngineSide:
    """cbatch in this process."""

    name = "engine"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def embed(self, texts: list[str]) -> Floats:
        """Return the vector of each text."""
        return self._engine.embed(texts).array()

    def rerank(self, query: str, documents: list[str]) -> Floats:
        """Return the score of each document."""
        return [[score] for score in self._engine.rerank(query, documents).scores()]


class LlamaSide:
    """`llama_cpp.Llama` in this process, which makes lists of Python's numbers."""

    name = "Llama.embed"

    def __init__(self, model: str, n_threads: int | None) -> None:
        from cbatch.backend.bindings import llama_cpp  # slow to import

        self._llama = llama_cpp.Llama(
            model, embedding=True, n_ctx=0, n_threads=n_threads, n_threads_batch=n_threads,
            n_gpu_layers=0, verbose=False,
        )  # fmt: skip

    def embed(self, texts: list[str]) -> Floats:
        """Return the vector of each text."""
        return self._llama.embed(texts, normalize=True)

    def rerank(self, query: str, documents: list[str]) -> Floats:
        """Refuse: it has none."""
        raise ConfigError("llama-cpp-python does not rerank: leave --llama out")


class UrlSide:
    """A server, asked by some clients at once with some texts in each call."""

    def __init__(self, url: str, n_clients: int, n_texts: int) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url}: is no URL of a server: give one as http://HOST:PORT/v1")
        self.name, self._host, self._port = url, parts.hostname, parts.port or 80
        self._path, self._n_texts = parts.path.rstrip("/") or "/v1", n_texts
        self._pool = ThreadPoolExecutor(n_clients)

    def embed(self, texts: list[str]) -> Floats:
        """Return the vector of each text."""
        parts = [texts[i : i + self._n_texts] for i in range(0, len(texts), self._n_texts)]
        found = list(self._pool.map(self._embed, parts))
        return [vector for some in found for vector in some]

    def rerank(self, query: str, documents: list[str]) -> Floats:
        """Return the score of each document."""
        body = self._ask("rerank", {"query": query, "documents": documents})
        scores = [[0.0]] * len(documents)
        for result in body["results"]:
            scores[result["index"]] = [result["relevance_score"]]
        return scores

    def _embed(self, texts: list[str]) -> Floats:
        data = self._ask("embeddings", {"input": texts, "model": "any"})["data"]
        return [item["embedding"] for item in sorted(data, key=lambda item: item["index"])]

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", f"{self._path}/{path}", json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise ConfigError(f"{self.name}: status {reply.status}: {data[:200]!r}")
        return json.loads(data)


def made_texts(n: int, sizes: tuple[int, int], seed: int) -> list[str]:
    """Return `n` texts of English words, so many in each."""
    chance, known = random.Random(seed), english_words()
    return [" ".join(chance.choices(known, k=chance.randint(*sizes))) for _ in range(n)]


def cosines(first: Floats, second: Floats) -> float:
    """Return the least cosine of two vectors of one text."""
    import numpy as np

    a, b = (np.asarray(vectors, np.float64) for vectors in (first, second))
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def distance(first: Floats, second: Floats) -> float:
    """Return the greatest difference of two scores of one document."""
    return float(max(abs(a[0] - b[0]) for a, b in zip(first, second, strict=True)))


def measure(asked: argparse.Namespace, sides: Sequence[VectorSide]) -> None:
    """Measure the sides by turns, and print a line for each."""
    sizes = (asked.words[0], asked.words[-1])
    query = made_texts(1, (asked.query, asked.query), asked.seed - 1)[0]

    def way(side: VectorSide) -> Callable[[], tuple[float, Floats]]:
        seeds = count(asked.seed)  # the vectors of the last texts are kept: each round has others

        def run() -> tuple[float, Floats]:
            texts = made_texts(asked.texts, sizes, next(seeds))
            start_s = time.perf_counter()
            found = side.rerank(query, texts) if asked.rerank else side.embed(texts)
            return time.perf_counter() - start_s, found

        return run

    rounds = take_turns(asked.rounds, *map(way, sides))
    for i, side in enumerate(sides):
        seconds = [each[i][0] for each in rounds]
        compare = distance if asked.rerank else cosines
        agrees = compare(rounds[0][0][1], rounds[0][i][1])
        emit(
            side=side.name,
            texts_per_s=[round(asked.texts / s, 1) for s in seconds],
            median=median(asked.texts / s for s in seconds),
            **{"largest_difference" if asked.rerank else "least_cosine": round(agrees, 6)},
        )


def main(words: Sequence[str] | None = None) -> None:
    """Measure what the command line names."""
    made = parser(__doc__, n_rounds=3)
    made.add_argument("--rerank", action="store_true", help="rerank instead of embeddings")
    made.add_argument("--texts", type=int, default=1000, help="texts, or documents, in a round")
    made.add_argument("--words", type=int, nargs="+", default=[4, 300], help="words of a text")
    made.add_argument("--query", type=int, default=200, help="words of the query")
    made.add_argument("--against", action="append", default=[], help="URL of a server")
    made.add_argument("--clients", type=int, default=8, help="calls to a server at once")
    made.add_argument("--per-call", type=int, default=32, help="texts of a call to a server")
    made.add_argument("--llama", action="store_true", help="also Llama.embed")
    made.add_argument("--threads", type=int, help="threads of the sides in this process")
    made.add_argument("--seed", type=int, default=1)
    asked = made.parse_args(words)
    with ExitStack() as stack:
        threads = {"n_threads": asked.threads} if asked.threads else {}
        engine = stack.enter_context(load(asked.model, **threads))
        sides: list[VectorSide] = [EngineSide(engine)]
        sides += [UrlSide(url, asked.clients, asked.per_call) for url in asked.against]
        if asked.llama:
            sides.append(LlamaSide(asked.model, asked.threads))
        measure(asked, sides)


if __name__ == "__main__":
    main()
