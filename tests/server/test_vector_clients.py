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
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import SynthFactory
    from tests.server.clients import Running

pytestmark = pytest.mark.real

TEXTS = ["the red house by the river", "why", "Count from one to ten. " * 9, "blue"]


def served(path: Path, folder: Path) -> Iterator[Running]:
    with load(path, n_threads=1) as engine:
        app = create_app(engine, files_dir=folder)
        with running(app) as found:
            yield found
        app.state.desk.close()


def one_of(names: Sequence[str]) -> Any:
    """A fixture: a server of each of these models, and the model's path."""

    @pytest.fixture(scope="module", params=names)
    def found(
        request: pytest.FixtureRequest,
        synth: SynthFactory,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[tuple[Running, Path]]:
        path = synth(request.param, type="f32")
        for server in served(path, tmp_path_factory.mktemp("kept")):
            yield server, path

    return found


embedder, reranker = one_of(("bert", "qwen3-embedding")), one_of(("bert-rerank", "qwen3-rerank"))


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
    asked: dict[str, Any] = (
        {"model": "m"} if form is None else {"model": "m", "encoding_format": form}
    )
    with client_of(server) as client:
        answer = client.embeddings.create(**asked, input=TEXTS)
        few = client.embeddings.create(model="m", input=TEXTS[0], dimensions=16)
    said: list[Any] = [item.embedding for item in answer.data]
    if form == "base64":  # which the client leaves as it is
        said = [np.frombuffer(base64.b64decode(text), "<f4") for text in said]
    found, whole = np.array(said), expected(path)
    assert found.shape == (len(TEXTS), 64)
    assert np.min(np.sum(found * whole, axis=1)) >= 0.9999
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    cut = whole[0][:16] / np.linalg.norm(whole[0][:16])
    assert float(np.array(few.data[0].embedding) @ cut) >= 0.9999
    assert np.linalg.norm(few.data[0].embedding) == pytest.approx(1, abs=1e-5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": "a", "dimensions": 65}, "dimensions"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [[1, 99_999_999]]}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": "a", "pooling": "none"}, "pooling"),
]


def test_batch_has_llama_cpps_embeddings_and_names_what_is_wrong(
    embedder: tuple[Running, Path],
) -> None:
    server, path = embedder
    for body, param in WRONG:
        alone = httpx.post(f"{server.url}/v1/embeddings", json=body)
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, param)
    with client_of(server) as client:
        good = [{"model": "m", "input": text} for text in TEXTS]
        done = batch_of(client, *good, *(body for body, _ in WRONG))
        answers, wrong = (
            {line["custom_id"]: line["response"]["body"] for line in map(json.loads, file)}
            for id in (done.output_file_id, done.error_file_id)
            for file in [client.files.content(id).text.splitlines()]
        )
    rows = np.array([answers[f"r{i}"]["data"][0]["embedding"] for i in range(len(TEXTS))])
    assert np.min(np.sum(rows * expected(path), axis=1)) >= 0.9999
    params = [wrong[f"r{i}"]["error"]["param"] for i in range(len(TEXTS), len(TEXTS) + len(WRONG))]
    assert params == [param for _, param in WRONG]


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
    best = sorted(range(len(TEXTS)), key=lambda i: -raw[i])
    asked = {"query": "what is red?", "documents": TEXTS, "return_documents": True}
    results = httpx.post(f"{server.url}/v1/rerank", json=asked).json()["results"]
    assert [r["index"] for r in results] == best
    assert all(r["document"]["text"] == TEXTS[r["index"]] for r in results)
    is_share = all(0 <= score <= 1 for score in raw)  # of yes
    told = [raw[i] if is_share else 1 / (1 + np.exp(-raw[i])) for i in best]
    assert [r["relevance_score"] for r in results] == pytest.approx(told, abs=1e-2)
    asked = {"query": "what is red?", "texts": TEXTS, "raw_scores": True}
    assert [r["index"] for r in httpx.post(f"{server.url}/rerank", json=asked).json()] == best
