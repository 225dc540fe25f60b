"""Run a file of requests once, cold, and print rates: `python -m cbatch.bench.workload MODEL REQUESTS.jsonl`.

A line is `{"id", "prompt", "max_tokens", "temperature", "seed"}` with `top_k` and `top_p` if wanted: what a driver of
another server can send as it stands, so that both run the same requests. Generation ignores the model's end tokens.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.bench.harness import emit, parser, percentile
from cbatch.loading import load
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.engine import Engine


def read(path: Path) -> list[BatchPrompt]:
    """Return the requests of a file."""
    return [_request(json.loads(line)) for line in path.read_text().splitlines() if line]


def _request(line: dict[str, Any]) -> BatchPrompt:
    options = {k: v for k, v in line.items() if k not in ("id", "prompt")}
    return BatchPrompt(prompt=line["prompt"], id=line["id"], options={"min_p": 0.0, **options})


def measure(engine: Engine, requests: Sequence[BatchPrompt]) -> dict[str, float]:
    """Run the requests together; return token counts, seconds, tokens per second and times to the first token."""
    engine.submit("a", options={"max_tokens": 4}).result()
    start = time.perf_counter()
    results = engine.run(requests, options={"ignore_eos": True}).results()
    seconds = time.perf_counter() - start
    n_output = sum(r.usage.completion_tokens for r in results)
    ttft_ms = [1e3 * (r.timings.ttft_s or 0.0) for r in results]
    return {
        "requests": len(results),
        "prompt_tokens": sum(r.usage.prompt_tokens for r in results),
        "gen_tokens": n_output,
        "seconds": round(seconds, 3),
        "gen_tps": round(n_output / seconds, 1),
        "ttft_p50_ms": round(percentile(ttft_ms, 0.5), 1),
        "ttft_p99_ms": round(percentile(ttft_ms, 0.99), 1),
    }


def main() -> None:
    """Print one JSON line."""
    asked = parser(__doc__)
    asked.add_argument("requests", type=Path, help="a JSONL file")
    asked.add_argument("--parallel", type=int, default=16)
    asked.add_argument("--ctx-per-seq", type=int, default=2048)
    asked.add_argument("--n-batch", type=int, default=2048)
    asked.add_argument("--kv", default="auto")
    asked.add_argument("--exact", action="store_true")
    asked.add_argument("--no-share", action="store_true", help="compute every prompt as if alone")
    a = asked.parse_args()
    settings = {"ctx_per_seq": a.ctx_per_seq, "n_batch": a.n_batch, "exact": a.exact, "kv": a.kv}
    settings["share_prefixes"] = not a.no_share
    requests = read(a.requests)
    ahead = LookAhead([(r, RunOptions.of(r.options)) for r in requests], is_all=True)
    with load(a.model, parallel=a.parallel, look_ahead=ahead, **settings) as engine:
        emit(**measure(engine, requests))


if __name__ == "__main__":
    main()
