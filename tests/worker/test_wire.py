"""Values on their way over the border: what a chunk says there, and that nothing of it is lost."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from cbatch.response import BatchOutputChunk, TokenLogprob
from cbatch.worker.wire import chunk_as_json, chunk_of_json
from tests.test_tool_calls import SAID, Speaker
from tests.test_tools import TIME, USER
from tests.worker.links import engine_over

SCORE = TokenLogprob(1, b"\xff", -0.5, (TokenLogprob(2, b"a", -0.25),))


@pytest.mark.parametrize(
    ("chunk", "n_values"),
    [
        (BatchOutputChunk("a", "so", (1, 2), 0, None, "so"), 5),
        (BatchOutputChunk("a", "", (), 1, "stop"), 5),
        (BatchOutputChunk("a", "so", (1,), 0, None, "", "so"), 7),
        (BatchOutputChunk("a", " <t", (1,), 0, None, ""), 7),
        (BatchOutputChunk("a", "x", (1,), 0, None, " <tx"), 7),
        (BatchOutputChunk("a", "x", (1,), 0, None, "x", "", (SCORE,)), 8),
        (BatchOutputChunk("a", "", (), 0, "stop", "", "", ()), 8),
    ],
)
def test_parts_of_a_chunk_cross_only_where_they_are_not_its_text(
    chunk: BatchOutputChunk, n_values: int
) -> None:
    said = json.loads(json.dumps(chunk_as_json(chunk)))
    assert len(said) == n_values
    assert chunk_of_json(said, "a") == chunk


@pytest.mark.parametrize("options", [{}, {"tools": [TIME]}, {"tools": [TIME], "n": 2}])
def test_parts_of_chunks_from_a_worker_are_those_of_the_result(options: dict[str, Any]) -> None:
    with closing(engine_over(Speaker(SAID))) as engine:
        response = engine.run([[USER]], options=options)
        chunks, result = list(response), response.result()
        unread = engine.run([[USER]], options=options)
        unread_result = unread.result()
        for read, whole in ((chunks, result), (list(unread), unread_result)):
            for i, choice in enumerate(whole.choices or (whole,)):
                own = [chunk for chunk in read if chunk.index == i]
                assert "".join(chunk.content for chunk in own) == choice.text
                assert "".join(chunk.reasoning for chunk in own) == choice.reasoning == "I häve to"
