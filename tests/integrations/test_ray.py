"""Answers of Ray's actors: the rows, what fails, what is refused before anything waits for ever, and Ray Serve."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError, EngineClosedError, ModelLoadError
from cbatch.files.frames import run_table
from cbatch.integrations import ray as integration
from cbatch.integrations.ray_cluster import why_never
from tests.integrations.clusters import WORDS, actors, wait_until, with_ray
from tests.runtime.backends import FailingBackend

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0, "max_tokens": 6}
ENGINE: dict[str, Any] = {"parallel": 4, "ctx_per_seq": 256}

on_cluster = [
    pytest.mark.real,
    with_ray,
    # Ray's own: sockets and files that it leaves open, and calls of its own deprecated functions
    pytest.mark.filterwarnings("ignore"),
]


def chats(n: int) -> pa.Table:
    messages = [[{"role": "user", "content": f"Say {WORDS[i % 5]}."}] for i in range(n)]
    return pa.table({"n": range(n), "messages": messages})


# ---- without a cluster ----


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="install cbatch with its extra ray"):
        integration.served()


@pytest.mark.parametrize(
    ("nodes", "n", "n_cpus", "n_spare", "why"),
    [
        ([3.0], 2, 1, 1, ""),
        ([2.0], 2, 1, 1, "leave fewer than 1"),
        ([3.0], 2, 1, 2, "leave fewer than 2"),
        ([2.0], 2, 0.5, 1, ""),
        ([4.0, 4.0], 3, 2, 1, ""),
        ([3.0, 3.0], 3, 2, 1, "do not fit"),
        ([4.0], 1, 8, 1, "do not fit"),
    ],
)
def test_actors_that_would_wait_for_ever_are_found(
    nodes: list[float], n: int, n_cpus: float, n_spare: int, why: str
) -> None:
    assert why_never(nodes, n, n_cpus, n_spare).startswith(why)
    assert bool(why_never(nodes, n, n_cpus, n_spare)) == bool(why)


class EndedError(BaseException):
    """Stands for the end of the process."""


@with_ray
def test_dead_engine_ends_the_process_of_its_actor(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FailingBackend(2, 256, 256, error=RuntimeError("broken"), fail_at=2)
    monkeypatch.setattr("cbatch.engine_spec.load", lambda *given, **more: Engine(backend))

    def end(code: int) -> None:
        assert code == 1
        raise EndedError

    monkeypatch.setattr(os, "_exit", end)
    answers = integration.Answers(is_raw=True, options={"ignore_eos": True, "max_tokens": 9})
    with pytest.raises(EndedError):
        answers(pa.table({"prompt": ["a", "b"]}))
    assert "broken" in capfd.readouterr().err


@with_ray
def test_actor_that_has_loaded_another_file_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, loaded = tmp_path / "model.gguf", list[Engine]()
    path.write_bytes(b"GGUF" + bytes(200))
    marks = integration.marks_of(EngineSpec(path))
    path.write_bytes(b"GGUF" + bytes(199) + b"1")

    def load(*_: object, **__: object) -> Engine:
        loaded.append(Engine(FakeBackend()))
        return loaded[-1]

    monkeypatch.setattr("cbatch.engine_spec.load", load)
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: is not the file that the job began with"
    ):
        integration.Answers(path, marks=marks)
    with pytest.raises(EngineClosedError):
        loaded[0].submit("a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nope": 1}, "unknown option 'nope'"),
        ({"parallel": 0}, "parallel"),
        ({"is_raw": True, "system": "x"}, "is for chats"),
        ({"options": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_wrong_setting_is_refused_before_there_is_a_job(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        integration.answer(None, **settings)


# ---- on a cluster ----


def each(mark: Any) -> Any:
    for one in on_cluster:
        mark = one(mark)
    return mark


@each
def test_answers_are_those_of_this_process_also_beside_failing_rows(cluster: Any) -> None:
    """Columns have their types whatever is in them, and no value is pickled."""
    table = [{**row, "options": None} for row in chats(60).to_pylist()]
    table[3]["messages"] = None
    table[17]["messages"] = [{"role": "user", "content": "x" * 5000}]
    table[30]["options"] = json.dumps({"max_tokens": 1})
    table[44]["options"] = "{"
    rows = pa.Table.from_pylist(table, chats(1).schema.append(pa.field("options", pa.string())))
    settings: dict[str, Any] = {"options": GREEDY, "options_column": "options"}
    dataset = integration.answer(
        cluster.data.from_arrow(rows), n_actors=2, n_cpus=1, exact=True, **ENGINE, **settings
    )
    out = pa.concat_tables(dataset.iter_batches(batch_format="pyarrow")).sort_by("n")
    with cbatch.load(exact=True, n_threads=1, **ENGINE) as engine:
        here = run_table(rows, engine=engine, **settings)
    assert out.schema.equals(here.schema)
    assert out.select([*here.column_names]).to_pylist() == here.to_pylist()
    failed = [i for i, error in enumerate(out["error"].to_pylist()) if error is not None]
    assert failed == [3, 17, 44]
    assert out["completion_tokens"][30].as_py() == 1


@each
def test_error_of_a_row_is_raised_where_that_is_asked(cluster: Any) -> None:
    rows = cluster.data.from_items([{"prompt": "Say red."}, {"prompt": None}])
    dataset = integration.answer(rows, n_cpus=1, raise_errors=True, options=GREEDY, **ENGINE)
    with pytest.raises(
        Exception, match="1 of 2 rows failed; the first, row 2: the prompt is empty"
    ):
        dataset.materialize()


@each
def test_killed_actor_loses_and_doubles_no_row(cluster: Any) -> None:
    options = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
    dataset = integration.answer(
        cluster.data.from_arrow(chats(96)),
        n_actors=2,
        n_cpus=1,
        batch_size=8,
        options=options,
        **ENGINE,
    )
    done, all_rows = threading.Event(), list[dict[str, Any]]()

    def run() -> None:
        for row in dataset.iter_rows():
            all_rows.append(row)
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(done.is_set)
    victim = actors()[0]
    os.kill(victim, signal.SIGKILL)
    thread.join()
    assert victim not in actors()
    assert sorted(row["n"] for row in all_rows) == [*range(96)]
    assert not [row for row in all_rows if row["error"]]


@each
def test_job_that_would_hang_or_idle_is_refused_with_the_reason(
    cluster: Any, tmp_path: Path
) -> None:
    rows = cluster.data.from_arrow(chats(4))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n_actors": 4, "n_cpus": 1}, "wait for ever.*fewer actors.*num_cpus=5"),
        ({"n_actors": 2, "n_cpus": 4}, "do not fit"),
        ({"batch_size": 2, "max_concurrency": 2, "parallel": 8}, "8 slots idle"),
        ({"model": tmp_path / "none.gguf"}, "none.gguf: is missing on 1 of 1 nodes"),
        ({"template": "{nope}"}, "no column 'nope'"),
        ({"options_column": "nope"}, "no column 'nope' with options"),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            integration.answer(rows, **settings)
    pickled = cluster.data.from_arrow(pa.table({"prompt": pa.array([b"Say red."])}))
    with pytest.raises(ConfigError, match="'prompt' has type binary"):
        integration.answer(pickled)


@each
def test_model_that_no_actor_can_load_fails_the_job_by_name(cluster: Any, tmp_path: Path) -> None:
    """The file is there, so the job begins; Ray would start actors again and again if their processes ended."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(200))
    dataset = integration.answer(
        cluster.data.from_arrow(chats(40)), path, n_actors=2, n_cpus=1, options=GREEDY, **ENGINE
    )
    with pytest.raises(Exception, match=r"damaged\.gguf: is written for .* or damaged"):
        dataset.materialize()
    wait_until(lambda: not actors())  # also those of jobs before


class Recorder:
    """Stands for a dataset, and keeps what `answer` asks of it."""

    def schema(self, **given: Any) -> None:
        return None

    def repartition(self, **given: Any) -> Recorder:
        self.repartitioned = given
        return self

    def map_batches(self, *given: Any, **more: Any) -> Recorder:
        self.mapped = more
        [self.spec] = more["fn_constructor_args"]
        return self


@each
def test_actors_get_batches_enough_and_their_shares(cluster: Any, test_model: Path) -> None:
    """Ray's defaults would give an actor one batch at a time, and all batches of a small job to one actor."""
    asked = integration.answer(Recorder(), test_model, n_actors=3, parallel=6, memory_mib=10)
    assert asked.repartitioned == {"target_num_rows_per_block": 24}
    assert asked.spec.settings == {"parallel": 6, "memory_mib": 10, "n_sharing": 3}
    assert (asked.mapped["batch_format"], asked.mapped["num_cpus"]) == ("pyarrow", 1)
    assert asked.mapped["memory"] == 10 * 2**20 + test_model.stat().st_size
    compute = asked.mapped["compute"]
    assert (compute.min_size, compute.max_size) == (3, 3)
    assert compute.max_concurrent_calls_per_actor == 4
    assert compute.max_tasks_in_flight_per_actor == 5
    assert compute.enable_true_multi_threading


# ---- Serve ----


@each
def test_replicas_of_serve_stream_and_free_slots_of_clients_that_leave(
    cluster: Any,
) -> None:
    """Two replicas are ready when they have loaded; one slot each, so a client that left would block others."""
    import httpx
    from ray import serve

    app = integration.served(
        deployment={"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}},
        parallel=1,
        ctx_per_seq=2048,
        options={"temperature": 0},
    )
    chat = {"messages": [{"role": "user", "content": "Say red."}]}
    endless = {**chat, "stream": True, "max_tokens": 1900, "ignore_eos": True}
    try:
        serve.start(http_options={"port": 8123})
        serve.run(app, name="cbatch")
        url = "http://127.0.0.1:8123/v1/chat/completions"
        with httpx.Client(timeout=None) as client:
            for _ in range(4):  # more than there are slots: each leaves after its first words
                with client.stream("POST", url, json=endless) as response:
                    lines = (line for line in response.iter_lines() if line.startswith("data:"))
                    assert [next(lines) for _ in range(3)]
            said = [client.post(url, json=chat).json() for _ in range(4)]
        assert [s["choices"][0]["message"]["content"] for s in said] == ["red"] * 4
    finally:
        serve.shutdown()


@each
def test_serve_without_the_model_fails_to_deploy(cluster: Any, tmp_path: Path) -> None:
    from ray import serve

    once = {"max_constructor_retry_count": 1}
    app = integration.served(tmp_path / "none.gguf", deployment=once)
    try:
        serve.start(http_options={"port": 8124})
        with pytest.raises(RuntimeError, match="cbatch failed"):
            serve.run(app, name="cbatch")
        status = serve.status().applications["cbatch"]
        assert "none.gguf" in status.deployments["cbatch"].message
    finally:
        serve.shutdown()
