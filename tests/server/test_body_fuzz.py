"""Bodies of any values in the declared fields: an answer or a refusal that names a field, and nobody else notices."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.options import RunOptions
from cbatch.server.request_fields import HARMLESS, IGNORED, READ_BY_ALL, REFUSED, RENAMED
from tests.profiles import examples
from tests.server.clients import CHAT, COMPLETIONS, USER, fake_app

if TYPE_CHECKING:
    from starlette.applications import Starlette

OPTIONS = {f.name for f in fields(RunOptions)} - {"cache_key", "save_cache", "cache_required"}
NAMES = sorted(
    {*OPTIONS, *IGNORED, *HARMLESS, *REFUSED, *RENAMED, *READ_BY_ALL, "messages", "prompt"}
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 4)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "json_object", "text", "function", "user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "role", "content", "json", "text", "1"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=5)


async def _ask(app: Starlette, asked: list[tuple[str, Any]]) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return [await client.post(path, json=body) for path, body in asked]


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies, is_chat=st.booleans(), keeps_prompt=st.booleans())
def test_any_body_is_answered_or_refused_by_name(
    body: dict[str, Any], is_chat: bool, keeps_prompt: bool
) -> None:
    path = CHAT if is_chat else COMPLETIONS
    prompt: dict[str, Any] = {"messages": USER} if is_chat else {"prompt": "Hi"}
    asked = {"max_tokens": 2, **prompt, **body} | (prompt if keeps_prompt else {})
    good = {"max_tokens": 2, "seed": 1, "prompt": "ab"}
    with fake_app(4, 64) as app:
        before, answer, after = anyio.run(
            _ask, app, [(COMPLETIONS, good), (path, asked), (COMPLETIONS, good)]
        )
        engine = app.state.desk.engine
        assert engine.stats().n_running == engine.stats().n_waiting == 0
    assert before.json()["choices"] == after.json()["choices"]
    assert answer.status_code in (200, 400, 504), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"].partition("[")[0] in {*asked, "messages", "prompt"}, error
