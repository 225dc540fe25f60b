"""Embeddings of tables and of OpenAI's lines, and the best rows of a table, over made-up vectors."""

from __future__ import annotations

import base64
import csv
import json
import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cbatch
from cbatch.chat.vector_calls import EmbedCall, VectorPrompt
from cbatch.errors import ConfigError, OutputError
from cbatch.files import Stopper, embed_file, rerank_file, run_file, stream_file, vector_work
from cbatch.files.vector_work import VectorRun
from cbatch.messages import BatchPrompt
from tests.vector_engine import N_EMBEDDING, N_LIMIT, VectorEngine, score_of, vector_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import SynthFactory

N_ROWS = 1200
"""More than two groups."""


@pytest.fixture
def engine() -> Iterator[VectorEngine]:
    engine = VectorEngine()
    with engine:
        yield engine


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [("name", "text"), *((f"n{i}", f"row {i}") for i in range(N_ROWS))]
        )
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


EXPECTED = np.stack([vector_of(f"row {i}") for i in range(N_ROWS)])


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
def test_columnar_output_has_lists_of_floats(engine: Any, table: Path, name: str) -> None:
    import pyarrow

    out = table.with_name(name)
    assert embed_file(table, out, engine=engine, column="text").n_done == N_ROWS
    is_parquet = name == "out.parquet"
    found = pyarrow.parquet.read_table(out) if is_parquet else pyarrow.ipc.open_file(out).read_all()
    assert found.column_names == ["name", "text", "embedding", "prompt_tokens", "error"]
    assert found.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), N_EMBEDDING)
    assert (np.array(found["embedding"].to_pylist(), np.float32) == EXPECTED).all()
    assert found["name"].to_pylist()[:2] == ["n0", "n1"]


def test_parquet_in_keeps_its_types(engine: Any, tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = pyarrow.table({"i": pyarrow.array([1, 2, 3], pyarrow.int16()), "text": ["a", "", "c"]})
    pyarrow.parquet.write_table(rows, tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    assert embed_file(tmp_path / "in.parquet", out, engine=engine).n_failed == 1
    found = pyarrow.parquet.read_table(out)
    assert found.schema.field("i").type == pyarrow.int16()
    assert found["embedding"].to_pylist()[1] is None
    assert found["embedding"].to_pylist()[2] == vector_of("c").tolist()
    # older versions of pyarrow read no null among fixed-size lists
    assert pyarrow.types.is_list(found.schema.field("embedding").type)
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    embed_file(tmp_path / "lines.txt", out, engine=engine, force=True)
    whole = pyarrow.parquet.read_table(out)["embedding"]
    assert pyarrow.types.is_fixed_size_list(whole.type)
    assert whole.to_pylist() == [vector_of("one").tolist(), vector_of("two").tolist()]


def test_array_has_a_row_for_each_item_and_nan_without(engine: Any, table: Path) -> None:
    with table.open("a") as file:
        file.write(f"long,{'a' * (N_LIMIT + 1)}\nlast,z\n")
    out = table.with_name("out.npy")
    summary = embed_file(table, out, engine=engine, column="text")
    assert (summary.n_items, summary.n_failed) == (N_ROWS + 2, 1)
    found = np.load(out)
    assert found.dtype == np.float32
    assert (found[:N_ROWS] == EXPECTED).all()
    assert np.isnan(found[N_ROWS]).all()
    assert (found[-1] == vector_of("z")).all()


@pytest.mark.parametrize("name", ["out.npy", "out.parquet", "out.jsonl"])
@pytest.mark.parametrize("ids", ["bc", "xabc", "cxba", "axc", "c"])
def test_item_keeps_its_embedding_where_the_input_was_edited(
    engine: Any, tmp_path: Path, name: str, ids: str
) -> None:
    import pyarrow.parquet

    source, out = tmp_path / "in.jsonl", tmp_path / name
    for some in ("abc", ids):
        source.write_text("".join(f'{{"id": "{id}", "prompt": "of {id}"}}\n' for id in some))
        embed_file(source, out, engine=engine)
    expected = [vector_of(f"of {id}") for id in ids]
    if name == "out.npy":
        assert (np.load(out) == np.stack(expected)).all()
        return
    is_parquet = name == "out.parquet"
    found = pyarrow.parquet.read_table(out).to_pylist() if is_parquet else lines_of(out)
    by_id = {row["id"]: np.float32(row["embedding"]) for row in found}
    assert all((by_id[id] == vector_of(f"of {id}")).all() for id in ids)
    if is_parquet:  # records of lines that were removed come last
        assert [row["id"] for row in found][: len(ids)] == [*ids]


def test_lines_and_csv_have_lists_of_numbers(engine: Any, table: Path) -> None:
    lines, cells = table.with_name("out.jsonl"), table.with_name("out.csv")
    for out in (lines, cells):
        embed_file(table, out, engine=engine, column="text", limit=3)
    by_name = {line["name"]: line["embedding"] for line in lines_of(lines)}
    assert (np.float32(by_name["n1"]) == EXPECTED[1]).all()
    with cells.open() as file:
        rows = {row["name"]: json.loads(row["embedding"]) for row in csv.DictReader(file)}
    assert rows == by_name


def test_texts_go_to_the_engine_in_groups_with_the_settings(engine: Any, table: Path) -> None:
    settings: dict[str, Any] = {
        "dimensions": 4,
        "truncate": "end",
        "instruction": "q: ",
        "pooling": "mean",
    }
    out = table.with_name("out.npy")
    embed_file(table, out, engine=engine, column="text", normalize=False, **settings)
    assert [n for n, _ in engine.asked if n] == [512, 512, N_ROWS - 1024]
    assert all(given == {**settings, "normalize": False} for _, given in engine.asked)
    assert np.load(out).shape == (N_ROWS, 4)


def test_group_of_long_texts_is_small(
    engine: Any, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_work, "N_GROUP_CHARS", 10 * len("row 1"))
    embed_file(table, table.with_name("out.npy"), engine=engine, column="text", limit=10)
    assert [n for n, _ in engine.asked if n] == [10]
    embed_file(table, table.with_name("all.npy"), engine=engine, column="text", limit=25)
    assert max(n for n, _ in engine.asked) == 10


def test_stopped_run_goes_on_where_it_ended(engine: Any, table: Path) -> None:
    out, stop = table.with_name("out.npy"), Stopper(lambda words: None)
    counts = []

    def ended(item: Any, result: Any) -> None:
        counts.append(item.number)
        if len(counts) == 5:
            stop.press()

    with pytest.raises(KeyboardInterrupt):
        embed_file(table, out, engine=engine, column="text", on_result=ended, stop=stop)
    n_first = len(counts)
    assert n_first == 5  # the others of the group are cancelled, not waited for
    assert not out.exists()
    summary = embed_file(table, out, engine=engine, column="text", on_result=ended)
    assert summary.n_before == n_first
    assert sorted(counts) == [*range(1, N_ROWS + 1)]
    assert (np.load(out) == EXPECTED).all()


def test_lines_that_are_refused_are_written_before_the_next_are_read(
    engine: Any, tmp_path: Path
) -> None:
    source, out, n = tmp_path / "in.jsonl", tmp_path / "out.jsonl", 1000
    source.write_text('{"id": "a", "prompt": "a"}\n' + "{bad\n" * n)
    n_written = []

    def note(item: Any, result: Any) -> None:
        n_written.append(out.read_bytes().count(b"\n"))

    assert embed_file(source, out, engine=engine, on_result=note).n_failed == n
    assert all(i - 64 < found <= i + 128 for i, found in enumerate(n_written))


def test_group_that_is_read_while_its_run_is_cancelled_is_not_computed(engine: Any) -> None:
    def prompts() -> Iterator[BatchPrompt]:
        yield BatchPrompt(prompt="a", id="1")
        run.cancel()
        yield BatchPrompt(prompt="b", id="2")

    run = VectorRun(vector_work.VectorEngine(engine), prompts(), None)
    assert [*run.as_completed()] == []
    assert not engine.asked


def test_run_that_is_cancelled_as_calls_begin_begins_no_more(engine: Any) -> None:
    def begun(texts: Any, **settings: Any) -> Any:
        run.cancel()
        return embed(texts, **settings)

    embed, engine.embed = engine.embed, begun
    prompts = (
        VectorPrompt(prompt="-", call=EmbedCall(["a"], {"dimensions": n}), id=f"{n}")
        for n in (2, 3)
    )
    run = VectorRun(vector_work.VectorEngine(engine), prompts, None)
    (result,) = run.as_completed()
    assert (result.id, result.finish_reason) == ("2", "cancelled")
    assert len(engine.asked) == 1


def test_changed_setting_does_not_continue(engine: Any, table: Path) -> None:
    out = table.with_name("out.jsonl")
    embed_file(table, out, engine=engine, column="text", limit=4)
    with pytest.raises(ConfigError, match="embeddings was"):
        embed_file(table, out, engine=engine, column="text", dimensions=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"column": "body"}, r"in\.csv: there is no column 'body'; the columns are: name, text$"),
        ({"column": "text", "template": "{text}"}, "column or template"),
        ({"column": "text", "report": "r.html"}, "report has no effect"),
        ({"column": "text", "is_raw": True}, "is_raw has no effect"),
        ({"column": "text", "pooling": "rank"}, "pooling must be"),
        ({"column": "text", "truncate": "middle"}, "truncate must be"),
        ({"column": "text", "dimensions": 0}, "dimensions must be"),
        ({"column": "text", "output_format": "text"}, "text"),
    ],
)
def test_wrong_setting_is_named(
    engine: Any, table: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        embed_file(table, table.with_name("out.jsonl"), engine=engine, **settings)


def test_npy_is_neither_an_input_nor_for_answers(engine: Any, table: Path) -> None:
    out = table.with_name("out.npy")
    with pytest.raises(ConfigError, match="npy files hold embeddings"):
        run_file(table, out, engine=engine, template="{text}")
    np.save(out, EXPECTED)
    with pytest.raises(ConfigError, match="npy files hold numbers"):
        embed_file(out, table.with_name("other.npy"), engine=engine)


def test_model_without_embeddings_is_refused(table: Path) -> None:
    with VectorEngine(can_embed=False) as engine, pytest.raises(ConfigError, match="cannot embed"):
        embed_file(table, table.with_name("out.npy"), engine=engine, column="text")


# ---- OpenAI's lines ----


def requests(path: Path, *bodies: dict[str, Any], url: str = "/v1/embeddings") -> Path:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_for_embeddings_are_answered(engine: Any, tmp_path: Path) -> None:
    source = requests(
        tmp_path / "in.jsonl",
        {"input": "abc", "model": "m"},
        {"input": ["a", "b"], "model": "m", "encoding_format": "base64", "dimensions": 4},
        {"input": [1, 2], "model": "m", "user": "u"},
        {"input": "", "model": "m"},
        {"input": 5, "model": "m"},
        {"input": "a", "colour": 1, "model": "m"},
        {"input": ["b", "c", "x" * 99], "model": "m"},
    )
    out = tmp_path / "out.jsonl"
    summary = run_file(source, out, engine=engine)
    assert (summary.n_done, summary.n_failed) == (7, 4)
    found = {line["custom_id"]: line for line in lines_of(out)}
    first, second, third = (found[f"r{i}"]["response"]["body"] for i in range(3))
    assert (np.float32(first["data"][0]["embedding"]) == vector_of("abc")).all()
    assert (first["model"], first["usage"]["total_tokens"]) == ("m", 3)
    packed = [base64.b64decode(item["embedding"]) for item in second["data"]]
    assert (np.frombuffer(packed[1], "<f4") == vector_of("b", 4)).all()
    assert (np.float32(third["data"][0]["embedding"]) == vector_of([1, 2])).all()
    errors = [found[f"r{i}"]["response"]["body"]["error"] for i in (3, 4, 5, 6)]
    assert "input must be" in errors[1]["message"]
    assert errors[2]["param"] == "colour"
    assert errors[3]["message"].startswith("input[2]: ")
    again = run_file(source, out, engine=engine)
    assert (again.n_done, again.n_before) == (0, 7)


def test_lines_for_scores_are_answered(engine: Any, tmp_path: Path) -> None:
    source = requests(
        tmp_path / "in.jsonl",
        {"query": "abc", "documents": ["x", "ab"]},
        {"query": "abc", "documents": ["abc"]},
        url="/v1/rerank",
    )
    out = tmp_path / "out.jsonl"
    assert run_file(source, out, engine=engine).n_failed == 0
    results = [line["response"]["body"]["results"] for line in lines_of(out)]
    assert sorted(len(found) for found in results) == [1, 2]
    assert {found[0]["relevance_score"] for found in results} == {1.0, score_of("abc", "ab")}


def test_lines_for_texts_and_vectors_are_not_mixed(engine: Any, tmp_path: Path) -> None:
    source = requests(tmp_path / "in.jsonl", {"input": "abc"})
    with source.open("a") as file:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file.write(json.dumps(line) + "\n")
    out = tmp_path / "out.jsonl"
    assert run_file(source, out, engine=engine).errors == {"url_mismatch": 1}


def test_streamed_file_refuses_lines_for_vectors(engine: Any, tmp_path: Path) -> None:
    source = requests(tmp_path / "in.jsonl", {"input": "abc"})
    (pair,) = stream_file(source, engine)
    assert pair[1] is None
    assert pair[0].error is not None
    assert pair[0].error.code == "invalid_url"


# ---- rerank ----


def test_rows_come_best_first(engine: Any, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("id,text\n1,xyz\n2,abc\n3,ab\n4,\n5,a\n")
    out = tmp_path / "out.jsonl"
    summary = rerank_file(source, out, "abc", engine=engine, column="text")
    assert (summary.n_items, summary.n_failed) == (5, 1)
    lines = lines_of(out)
    assert [line["id"] for line in lines] == ["2", "3", "5", "1", "4"]
    assert lines[0]["score"] == 1.0
    assert "empty" in lines[-1]["error"]


def test_best_rows_are_written_as_a_table(engine: Any, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("xyz\nabc\nab\n")
    out = tmp_path / "out.csv"
    rerank_file(source, out, "abc", engine=engine, top_n=2, raw_scores=True)
    assert [line.split(",")[0] for line in out.read_text().splitlines()] == ["line", "abc", "ab"]
    assert engine.asked == [(3, {"raw_scores": True})]
    with pytest.raises(ConfigError, match="exists already"):
        rerank_file(source, out, "abc", engine=engine)


def test_rerank_onto_a_full_disk_leaves_the_output_as_it_was(
    engine: Any, tmp_path: Path, table: Path
) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        with pytest.raises(OutputError) as error:
            rerank_file(table, out, "abc", engine=engine, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.path == out
    assert out.read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_rerank_keeps_a_file_that_came_meanwhile(
    engine: Any, tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.csv"
    rerank = engine.rerank

    def beside_another(*args: Any, **settings: Any) -> Any:
        out.write_text("mine\n")
        return rerank(*args, **settings)

    monkeypatch.setattr(engine, "rerank", beside_another)
    with pytest.raises(ConfigError, match="exists already"):
        rerank_file(table, out, "abc", engine=engine)
    assert out.read_text() == "mine\n"


def test_setting_without_an_effect_on_scores_is_refused(engine: Any, table: Path) -> None:
    out = table.with_name("out.csv")
    settings: dict[str, Any] = {"errors": "e.csv", "max_time_s": 1, "retry_errors": True}
    for name, value in settings.items():
        with pytest.raises(ConfigError, match=f"{name} has no effect"):
            rerank_file(table, out, "abc", engine=engine, column="text", **{name: value})


def test_rerank_reads_no_more_than_its_limit(engine: Any, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "in.txt")
    with fifo.open("r+b", buffering=0) as writer:  # never ends
        writer.write(b"abc\nxyz\nab\n" * 100)
        out = tmp_path / "out.csv"
        assert rerank_file(fifo, out, "abc", engine=engine, limit=2).n_items == 2


@pytest.mark.parametrize("as_scores", [False, True])
def test_chat_is_no_text_to_embed_or_score(
    synth: SynthFactory, tmp_path: Path, as_scores: bool
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    source.write_text(f'{{"prompt": "Hi"}}\n{json.dumps(chat)}\n')
    with cbatch.load(synth("bert-rerank" if as_scores else "bert")) as engine:
        done = (
            rerank_file(source, out, "Hi", engine=engine)
            if as_scores
            else embed_file(source, out, engine=engine)
        )
    assert done.n_failed == 1
    [error] = [line["error"] for line in lines_of(out) if line["error"]]
    assert "not a chat" in error


def test_pipe_that_begins_with_a_wrong_line_may_ask_for_embeddings(
    engine: Any, tmp_path: Path
) -> None:
    source = requests(tmp_path / "lines", {"input": "abc"})
    os.mkfifo(fifo := tmp_path / "in.jsonl")
    with fifo.open("r+b", buffering=0) as writer:
        writer.write(b"{bad\n" + source.read_bytes())
        done = run_file(fifo, tmp_path / "out.jsonl", engine=engine, limit=1, format="openai")
    assert done.errors == {"invalid_json_line": 1}
