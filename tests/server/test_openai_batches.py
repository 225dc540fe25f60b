"""The package `openai`, unchanged: files and batches on the shipped model, over a socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from cbatch.server.batch_index import ENDED
from tests.server.clients import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.server.clients import Running

pytestmark = pytest.mark.real


@pytest.fixture
def client(keeping_server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{keeping_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def requests(url: str, **bodies: dict[str, Any]) -> bytes:
    said = [{"custom_id": id, "method": "POST", "url": url, "body": b} for id, b in bodies.items()]
    return b"".join(json.dumps(each).encode() + b"\n" for each in said)


def ended(client: Any, id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(id).status in ENDED)
    return client.batches.retrieve(id)


def test_batch_is_answered(client: Any, tmp_path: Path) -> None:
    sums = {f"s{i}": [{"role": "user", "content": f"What is {i}+{i}?"}] for i in range(1, 5)}
    asked = {id: {"model": "m", "messages": chat} for id, chat in sums.items()}
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests("/v1/chat/completions", **asked, bad={"model": "m"}))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.retrieve(file.id) == file
    of_chats = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    more = {**of_chats, "metadata": {"name": "sums"}}
    batch = client.batches.create(input_file_id=file.id, **more)
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"name": "sums"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    read = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    answers = {each["custom_id"]: each["response"]["body"] for each in read}
    assert answers.keys() == sums.keys()
    for id, body in asked.items():
        alone = client.chat.completions.create(**body)
        assert answers[id]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    (wrong,) = client.files.content(batch.error_file_id).iter_lines()
    told = json.loads(wrong)
    assert (told["custom_id"], told["response"]["status_code"]) == ("bad", 400)
    assert told["response"]["body"]["error"]["param"] == "messages"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert {each.id for each in client.files.list()} >= {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_lists_have_pages(client: Any) -> None:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    data = requests("/v1/completions", a={"prompt": "Once", "max_tokens": 1})
    files = [client.files.create(file=data, purpose="batch").id for _ in range(3)]
    ids = [client.batches.create(input_file_id=file, **asked).id for file in files]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    assert [file.id for file in client.files.list(limit=1, purpose="batch")][:3] == files[::-1]
    for id in ids:
        assert ended(client, id).status == "completed"
