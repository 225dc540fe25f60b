"""One engine against worker processes: `python -m cbatch.bench.experiments.replicas MODEL REQUESTS.jsonl …`.

All are loaded at once and take turns with the same requests, alone and beside endless loops. The files are those of
`cbatch bench --requests`. `thread` is the engine in this process, `1` one worker process, `2` and more several with
cores, slots and memory divided, `auto` the number that `load` chooses then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cbatch.bench.experiments.rounds import busy_loops, median, parser, ratios, take_turns
from cbatch.bench.harness import emit
from cbatch.bench.model_text import model_text
from cbatch.bench.side_process import options_of
from cbatch.bench.workloads import read_requests
from cbatch.engine import Engine
from cbatch.loading import load
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions

THREAD = "thread"


def read(model: str, path: Path) -> list[BatchPrompt]:
    """Return the requests of a file. Raises a `ConfigError` where it has none."""
    with model_text(model) as text:
        chains = read_requests(path, text.tokenize)
    requests = [request for chain in chains for request in chain]
    return [BatchPrompt(prompt=r.prompt, id=r.id, options=options_of(r)) for r in requests]


def tokens_per_second(
    engine: Engine, requests: Sequence[BatchPrompt], *, is_streamed: bool
) -> float:
    """Run all requests together; return the tokens of their answers per second."""
    start = time.perf_counter()
    response = engine.run(requests)
    n_read = sum(len(chunk.token_ids) for chunk in response) if is_streamed else 0
    n_tokens = sum(r.usage.completion_tokens for r in response.results())
    if is_streamed and n_read != n_tokens:
        raise RuntimeError(f"{n_read} tokens came as chunks, and {n_tokens} in results")
    return n_tokens / (time.perf_counter() - start)


def compare(
    engines: dict[str, Engine],
    requests: Sequence[BatchPrompt],
    n_rounds: int,
    *,
    is_streamed: bool,
) -> dict[str, dict[str, Any]]:
    """Let the engines run the requests in turn; return median rates, and their ratios to the first engine's."""
    names = list(engines)
    ways = [
        partial(tokens_per_second, engine, requests, is_streamed=is_streamed)
        for engine in engines.values()
    ]
    rounds = take_turns(n_rounds, *ways)
    rates = {name: median((found[i] for found in rounds), 1) for i, name in enumerate(names)}
    against = {
        name: ratios((found[i], found[0]) for found in rounds) for i, name in enumerate(names) if i
    }
    return {"tps": rates, f"against {names[0]}": against}


def _replicas(name: str) -> int | Literal["auto"] | None:
    if name == "auto":
        return "auto"
    return None if name == THREAD else int(name)


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each file, way of reading and number of other programs."""
    asked = parser(__doc__, n_rounds=3)
    asked.add_argument("requests", type=Path, nargs="+", help="JSONL files")
    asked.add_argument("--parallel", type=int, default=16, help="slots in all")
    asked.add_argument("--replicas", nargs="+", default=[THREAD, "1", "2"], help="what to compare")
    asked.add_argument("--beside", type=int, nargs="+", default=[0], help="endless loops beside it")
    asked.add_argument("--streamed", action="store_true", help="read by chunks, too")
    a = asked.parse_args(words)
    files = {path.stem: read(a.model, path) for path in a.requests}
    ahead = [(r, RunOptions.of(r.options)) for requests in files.values() for r in requests]
    for n_loops in a.beside:
        with busy_loops(n_loops), ExitStack() as stack:
            engines = {
                name: stack.enter_context(
                    load(
                        a.model,
                        parallel=a.parallel,
                        replicas=_replicas(name),
                        look_ahead=LookAhead(ahead, is_all=True),
                    )
                )
                for name in a.replicas
            }
            for name, requests in files.items():
                for is_streamed in (False, True) if a.streamed else (False,):
                    found = compare(engines, requests, a.rounds, is_streamed=is_streamed)
                    emit(requests=name, streamed=is_streamed, beside=n_loops, **found)


if __name__ == "__main__":
    main()
