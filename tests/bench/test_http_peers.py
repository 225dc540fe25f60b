"""A server beside another: what is compared, and a short run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.bench.http_load import request
from cbatch.bench.http_peers import Clients, body_of, cbatch_server, compare, measure

if TYPE_CHECKING:
    from pathlib import Path

LINE: dict[str, Any] = {"id": "a", "prompt": "red", "max_tokens": 5, "temperature": 0, "seed": 1}


def test_rates_and_first_tokens_of_rounds_are_compared() -> None:
    ours = [Clients(100, seconds, [1.0, 3.0]) for seconds in (1.0, 2.0, 4.0)]
    theirs = [Clients(100, 2.0, [2.0, 2.0]) for _ in ours]
    found = compare([*zip(ours, theirs, strict=True)], is_streamed=True)
    assert found["cbatch"] == {"tps": 50.0, "ttft_p50_ms": 1.0, "ttft_p99_ms": 3.0}
    assert found["llama_server"]["tps"] == 50.0
    assert (found["ratio"], found["ratio_min"], found["ratio_max"]) == (1.0, 0.5, 2.0)


def test_servers_with_different_numbers_of_tokens_are_not_compared() -> None:
    with pytest.raises(SystemExit, match=r"\[3, 4\]"):
        compare([(Clients(3, 1.0), Clients(4, 1.0))], is_streamed=False)


@pytest.mark.real
@pytest.mark.parametrize("is_streamed", [True, False])
def test_requests_of_a_file_are_sent_to_a_server_of_its_own(
    test_model: Path, *, is_streamed: bool
) -> None:
    start = partial(cbatch_server, str(test_model), 2, 64)
    sent = [request("/v1/completions", body_of(LINE, is_streamed=is_streamed))] * 3
    found = measure(start, sent, n_clients=2)
    assert (found.n_tokens, len(found.ttft_ms)) == (15, 3)
    assert (min(found.ttft_ms) > 0) == is_streamed
