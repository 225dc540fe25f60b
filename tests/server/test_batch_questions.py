"""What is read of the lines of a batch's files, which may be long."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.files.served_batch import _is_ours
from cbatch.server.batch_questions import n_never_ran_in, usage_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHAT = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
RESPONSE = {
    "input_tokens": 3,
    "output_tokens": 4,
    "input_tokens_details": {"cached_tokens": 2},
    "output_tokens_details": {"reasoning_tokens": 1},
}
LONG = [{"token": "a", "top_logprobs": [{"token": "b", "logprob": -1.5}] * 20}] * 2000


def line(body: Any, **more: Any) -> bytes:
    said = {"custom_id": "a", "response": body and {"status_code": 200, "body": body}, **more}
    return json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize("usage", [CHAT, RESPONSE])
def test_usage_is_that_of_all_answers(tmp_path: Path, usage: dict[str, Any]) -> None:
    path = tmp_path / "answers"
    scores = line([{"index": 0, "score": 0.5}])
    path.write_bytes(line({"usage": usage}) + line({"choices": LONG, "usage": usage}) + scores)
    assert usage_of(path) == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 8,
        "total_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 2},
    }


def test_lines_of_requests_that_never_ran_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    path.write_bytes(line(None) + line({"error": "x"}) + line(None, error={"code": "expired"}))
    assert n_never_ran_in(path) == 2


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        (line({"choices": []}), True),
        (line(None)[:-1], False),
        (line(None)[:-9], False),
        (b'{"id": 1}\n', False),
        (b"[1]\n", False),
        (b"\xff\n", False),
    ],
)
def test_line_of_ours_is_known(text: bytes, is_ours: bool) -> None:
    assert _is_ours(text) is is_ours


@pytest.mark.parametrize("read", [usage_of, n_never_ran_in, lambda p: _is_ours(p.read_bytes())])
def test_nothing_is_made_of_what_a_long_line_has_besides(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(line({"choices": LONG, "usage": CHAT}))
    tracemalloc.start()
    try:
        read(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * path.stat().st_size
