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
    sums = {f"s{i}": f"What is {i}+{i}?" for i in range(1, 5)}
    asked: dict[str, dict[str, Any]] = {
        id: {"model": "m", "messages": [{"role": "user", "content": text}]}
        for id, text in sums.items()
    }
    path = tmp_path / "in.jsonl"
    path.write_bytes(requests("/v1/chat/completions", **asked, bad={"model": "m"}))
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.retrieve(file.id) == file
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"name": "sums"},
    )
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    assert batch.metadata == {"name": "sums"}
    answers = {
        each["custom_id"]: each["response"]["body"]
        for each in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    }
    assert answers.keys() == sums.keys()
    for id, body in asked.items():
        alone = client.chat.completions.create(**body)
        assert answers[id]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    (wrong,) = client.files.content(batch.error_file_id).iter_lines()
    told = json.loads(wrong)
    assert (told["custom_id"], told["response"]["status_code"]) == ("bad", 400)
    assert told["response"]["body"]["error"]["param"] == "messages"
    assert {each.id for each in client.files.list()} >= {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_lists_have_pages(client: Any) -> None:
    data = requests("/v1/completions", a={"prompt": "Once", "max_tokens": 1})
    files = [client.files.create(file=data, purpose="batch").id for _ in range(3)]
    ids = [
        client.batches.create(
            input_file_id=file, endpoint="/v1/completions", completion_window="24h"
        ).id
        for file in files
    ]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    assert [file.id for file in client.files.list(limit=1, purpose="batch")][:3] == files[::-1]
    for id in ids:
        assert ended(client, id).status == "completed"


def test_wrong_lines_have_their_numbers_and_cancel_its_own_error(client: Any) -> None:
    data = requests("/v1/responses", a={"input": "Hi"}) + b"{\n"
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    batch = ended(client, batch.id)
    assert batch.status == "failed"
    (error,) = batch.errors.data
    assert (error.line, error.code) == (2, "invalid_json_line")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="assistants")


def test_cancelled_batch_is_cancelled(client: Any) -> None:
    asked = {f"r{i}": {"prompt": "Once", "max_tokens": 200, "ignore_eos": True} for i in range(200)}
    file = client.files.create(file=requests("/v1/completions", **asked), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
