"""The package `anthropic`, unchanged: message batches on the shipped model, over a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from tests.server.clients import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.clients import Running

pytestmark = pytest.mark.real

SUM = {"model": "m", "max_tokens": 24, "messages": [{"role": "user", "content": "What is 2+3?"}]}


@pytest.fixture
def client(keeping_server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=keeping_server.url, api_key="none", max_retries=0) as found:
        yield found


def ended(client: Any, id: str) -> Any:
    retrieve = client.messages.batches.retrieve
    wait_until(lambda: retrieve(id).processing_status == "ended")
    return retrieve(id)


def test_batch_is_answered(client: Any) -> None:
    asked: dict[str, dict[str, Any]] = {
        f"s{i}": {**SUM, "messages": [{"role": "user", "content": f"What is {i}+{i}?"}]}
        for i in range(1, 5)
    }
    requests = [{"custom_id": id, "params": params} for id, params in asked.items()]
    requests.append({"custom_id": "bad", "params": {**SUM, "temperature": -1}})
    batch = client.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.processing == 5
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve("msgbatch_none")
    batch = ended(client, batch.id)
    assert batch.ended_at >= batch.created_at
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 4, 1)
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert results.keys() == {*asked, "bad"}
    for id, params in asked.items():
        alone = client.messages.create(**params)
        assert isinstance(results[id].message, anthropic.types.Message)
        assert results[id].message.content == alone.content
        assert results[id].message.stop_reason == alone.stop_reason
    wrong = results["bad"]
    assert (wrong.type, wrong.error.error.type) == ("errored", "invalid_request_error")
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_lists_have_pages(client: Any) -> None:
    batches = client.messages.batches
    requests = [{"custom_id": "a", "params": SUM}]
    ids = [batches.create(requests=requests).id for _ in range(3)][::-1]
    for id in ids:
        ended(client, id)
    assert [batch.id for batch in batches.list(limit=1)][:3] == ids
    assert [batch.id for batch in batches.list(limit=1, before_id=ids[2])][:2] == ids[1::-1]
    assert [batch.id for batch in client.beta.messages.batches.list(limit=2)][:3] == ids


def test_wrong_requests_have_their_own_error(client: Any) -> None:
    request = {"custom_id": "a", "params": SUM}
    with pytest.raises(anthropic.BadRequestError, match=r"requests\.1\.custom_id"):
        client.messages.batches.create(requests=[request, request])
