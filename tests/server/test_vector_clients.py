"""Clients of others, unchanged, against small models for embeddings and rerank over a socket."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest

from cbatch import load
from cbatch.server import create_app
from tests.oracle.embeddings import PlainEmbedder
from tests.server.clients import running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import SynthFactory
    from tests.server.clients import Running

pytestmark = pytest.mark.real

TEXTS = ["the red house by the river", "why", "Count from one to ten. " * 9, "blue"]
EMBEDDERS = ("bert", "qwen3-embedding")
RERANKERS = ("bert-rerank", "qwen3-rerank")


def served(path: Path, folder: Path) -> Iterator[Running]:
    with load(path, n_threads=1) as engine:
        app = create_app(engine, files_dir=folder)
        with running(app) as found:
            yield found
        app.state.desk.close()


@pytest.fixture(scope="module", params=EMBEDDERS)
def embedder(
    request: pytest.FixtureRequest, synth: SynthFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Path]]:
    path = synth(request.param, type="f32")
    for found in served(path, tmp_path_factory.mktemp("kept")):
        yield found, path


@pytest.fixture(scope="module", params=RERANKERS)
def reranker(
    request: pytest.FixtureRequest, synth: SynthFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Path]]:
    path = synth(request.param, type="f32")
    for found in served(path, tmp_path_factory.mktemp("kept")):
        yield found, path


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def batch_of(client: openai.OpenAI, *bodies: dict[str, Any]) -> Any:
    """A batch of embeddings when it has ended."""
    url = "/v1/embeddings"
    line = {"method": "POST", "url": url}
    lines = [{**line, "custom_id": f"r{i}", "body": body} for i, body in enumerate(bodies)]
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    return client.batches.retrieve(batch.id)


def expected(path: Path) -> Any:
    with PlainEmbedder(path) as model:
        rows = [model.embed(model.tokenize(text)) for text in TEXTS]
    return np.stack([row / np.linalg.norm(row) for row in rows])


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openai_gets_llama_cpps_embeddings(embedder: tuple[Running, Path], form: Any) -> None:
    server, path = embedder
    more = {} if form is None else {"encoding_format": form}
    with client_of(server) as client:
        answer = client.embeddings.create(model="m", input=TEXTS, **more)
    said: list[Any] = [item.embedding for item in answer.data]
    if form == "base64":  # which the client leaves as it is
        said = [np.frombuffer(base64.b64decode(text), "<f4") for text in said]
    found = np.array(said)
    assert found.shape == (len(TEXTS), 64)
    assert np.min(np.sum(found * expected(path), axis=1)) >= 0.9999
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_openai_gets_fewer_dimensions_of_length_one(embedder: tuple[Running, Path]) -> None:
    server, path = embedder
    with client_of(server) as client:
        answer = client.embeddings.create(model="m", input=TEXTS[0], dimensions=16)
    found, whole = np.array(answer.data[0].embedding), expected(path)[0][:16]
    assert float(found @ whole / np.linalg.norm(whole)) >= 0.9999
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1, 99_999_999]]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "a", "pooling": "none"}, "pooling"),
    ],
)
def test_wrong_input_is_named_alone_and_in_a_batch(
    embedder: tuple[Running, Path], body: dict[str, Any], param: str
) -> None:
    server, _ = embedder
    alone = httpx.post(f"{server.url}/v1/embeddings", json=body)
    assert alone.status_code == 400
    assert alone.json()["error"]["param"] == param
    with client_of(server) as client:
        done = batch_of(client, body, {"input": "a"})
        (wrong,) = client.files.content(done.error_file_id).text.splitlines()
    assert json.loads(wrong)["response"]["body"]["error"]["param"] == param
    assert done.request_counts.completed == 1


def test_openai_gets_the_same_for_token_ids(embedder: tuple[Running, Path]) -> None:
    server, path = embedder
    with PlainEmbedder(path) as model:
        tokens = model.tokenize(TEXTS[0])
    with client_of(server) as client:
        answer = client.embeddings.create(model="m", input=[tokens])
    assert float(np.array(answer.data[0].embedding) @ expected(path)[0]) >= 0.9999


def test_openai_runs_a_batch_of_embeddings(embedder: tuple[Running, Path]) -> None:
    server, path = embedder
    with client_of(server) as client:
        done = batch_of(client, *({"model": "m", "input": text} for text in TEXTS))
        answers = client.files.content(done.output_file_id).text.splitlines()
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers)}
    rows = np.array([found[f"r{i}"]["data"][0]["embedding"] for i in range(len(TEXTS))])
    assert np.min(np.sum(rows * expected(path), axis=1)) >= 0.9999


def test_chat_of_a_model_that_only_embeds_is_refused(synth: SynthFactory, tmp_path: Path) -> None:
    for server in served(synth("bert"), tmp_path):
        with client_of(server) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "Hi"}]
                )
            (model,) = client.models.list().data
        assert caught.value.status_code == 501
        assert model.model_extra is not None
        assert model.model_extra["capabilities"] == ["embedding"]
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_langchain_embeds_documents(embedder: tuple[Running, Path]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    server, path = embedder
    client = langchain.OpenAIEmbeddings(
        model="m",
        base_url=f"{server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # else it sends tokens of OpenAI's own vocabulary
    )
    found = np.array(client.embed_documents(TEXTS))
    assert np.min(np.sum(found * expected(path), axis=1)) >= 0.9999


def test_documents_have_llama_cpps_scores(reranker: tuple[Running, Path]) -> None:
    server, path = reranker
    with PlainEmbedder(path) as model:
        raw = [model.score("what is red?", text) for text in TEXTS]
    body = {"query": "what is red?", "documents": TEXTS}
    reply = httpx.post(f"{server.url}/v1/rerank", json={**body, "return_documents": True})
    results = reply.json()["results"]
    assert [r["index"] for r in results] == sorted(range(len(TEXTS)), key=lambda i: -raw[i])
    assert all(r["document"]["text"] == TEXTS[r["index"]] for r in results)
    if all(0 <= score <= 1 for score in raw):  # the share of yes
        assert [r["relevance_score"] for r in results] == pytest.approx(
            sorted(raw, reverse=True), abs=1e-2
        )
    else:
        logistic = [1 / (1 + np.exp(-score)) for score in sorted(raw, reverse=True)]
        assert [r["relevance_score"] for r in results] == pytest.approx(logistic, abs=1e-2)
    raw_reply = httpx.post(
        f"{server.url}/rerank", json={"query": body["query"], "texts": TEXTS, "raw_scores": True}
    ).json()
    assert [r["index"] for r in raw_reply] == [r["index"] for r in results]
