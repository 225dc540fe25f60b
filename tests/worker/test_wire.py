"""Parts of chunks that come from a worker."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from tests.chat.test_tool_calls import SAID, Speaker
from tests.face.test_tools import TIME, USER
from tests.worker.links import engine_over


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
