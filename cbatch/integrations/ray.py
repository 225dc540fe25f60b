"""Ray: answers to the rows of a Ray Dataset, on the machines of a cluster, and a model behind Ray Serve.

An actor computes in a worker process of its own (`replicas=1`), unless the settings say otherwise: what crashes
llama.cpp costs its row, and the actor stays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.backend.host_limits import available_cores
from cbatch.backend.llama.fingerprint import file_digest, model_parts
from cbatch.engine_options import DEFAULT_PARALLEL
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError, EngineError, ModelLoadError
from cbatch.files.frames import run_table
from cbatch.files.input.row_prompts import Asking, RowPrompts
from cbatch.files.settings import read_to_load
from cbatch.integrations.ray_cluster import check_model, cpus_of_nodes, import_ray, settle_actors
from cbatch.loading import load_async
from cbatch.options import RunOptions, check_runs_through
from cbatch.support.checks import check_int

_OF_ASKING = ("template", "system", "is_raw", "options_column")
_OF_ROWS = (*_OF_ASKING, "options", "output_column", "keep_columns", "raise_errors")

MAX_CONCURRENCY = 4
"""Batches that an actor has at a time: the others fill the slots while one ends.

Source: measured with a prototype: 7.95 of 8 slots were busy, on two cores with two actors."""

N_ROWS_PER_SLOT = 4
"""Rows of a batch for each slot. Our choice: with two and answers of twelve tokens, Ray's own work for each batch left
half of the slots idle on a machine that others used."""


class Answers:
    """Answers the rows of Arrow tables, for `Dataset.map_batches`. Several threads may call one at a time."""

    def __init__(
        self, model: Any = None, *, marks: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        """Load the model, in an actor with the cores that Ray assigned to it and its share of the node's memory.

        Args:
            model: as for `cbatch.load`, or an `EngineSpec`.
            marks: what `marks_of` gave where the job began, so that no actor answers with other files.
            settings: of `cbatch.files.run_table` (`template`, `options`, `options_column`, `raise_errors`, …), and of
                `cbatch.load`, by name.

        Raises:
            ConfigError, ModelLoadError: see `cbatch.load`; and a file of another digest.
        """
        self._rows, spec = _split(model, settings)
        self._engine = _placed(spec).load()
        expected = marks or {}
        for path, mark in marks_of(spec).items():
            if expected.get(path, mark) != mark:
                self._engine.close()
                raise ModelLoadError(
                    f"{path}: is not the file that the job began with: put that one back, or begin a new job"
                )

    def __call__(self, table: Any) -> Any:
        """Return a `pyarrow.Table` with the columns of the answers, whose types do not depend on the rows.

        A row that fails has an `error`. An engine that has failed ends the process: Ray starts another and repeats the
        batch; an actor that goes on would fail all batches that it gets.

        Raises:
            RequestFailedError: with `raise_errors`, a row failed.
        """
        try:
            return run_table(table, engine=self._engine, **self._rows)
        finally:
            if (outage := self._engine.outage) is not None and outage.has_failed:
                _end_process(outage.cause)


def answer(
    dataset: Any,
    model: Any = None,
    *,
    n_actors: int | None = None,
    n_cpus: float | None = None,
    batch_size: int | None = None,
    max_concurrency: int = MAX_CONCURRENCY,
    can_grow: bool = False,
    **settings: Any,
) -> Any:
    """Return a dataset with the answers to the rows of another one, computed by actors when it is read or written.

    Args:
        dataset: a `ray.data.Dataset`.
        model: as for `cbatch.load`, a path that every node has; or an `EngineSpec`.
        n_actors: engines. Default: one for each node.
        n_cpus: CPUs of each, which are its threads. Default: what the nodes have, but one CPU for reading and writing.
        batch_size: rows of a batch. Default: four for each slot.
        max_concurrency: batches that an actor computes at a time.
        can_grow: whether the cluster adds machines for actors that wait; else what does not fit is refused.
        settings: as for `Answers`.

    Raises:
        ConfigError: a wrong setting; actors that would wait for ever or slots that would idle; a node without the
            model; or columns that do not fit, where the dataset knows them.
    """
    rows, spec = _split(model, settings)
    _check_columns(dataset, rows)
    n_most = max(cpus_of_nodes())
    n, n_each = settle_actors(n_actors, n_cpus, can_grow=can_grow)
    n_slots = _n_slots(spec)
    size = check_int("batch_size", batch_size or N_ROWS_PER_SLOT * n_slots, 1, 2**31 - 1)
    n_at_once = check_int("max_concurrency", max_concurrency, 1, 1000)
    if size * n_at_once < n_slots:
        raise ConfigError(
            f"batch_size={size} × max_concurrency={n_at_once} rows at a time leave some of {n_slots} slots idle: raise "
            "one of them, or lower parallel"
        )
    check_model(spec.model)
    n_sharing = max(1, min(n, int(n_most // n_each)))
    ray = import_ray()
    return dataset.repartition(target_num_rows_per_block=size).map_batches(
        Answers,
        fn_constructor_args=(spec.changed(**{"n_sharing": n_sharing, **spec.settings}),),
        fn_constructor_kwargs={**rows, "marks": marks_of(spec)},
        batch_size=size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=n,
            max_concurrent_calls_per_actor=n_at_once,
            # more in flight would all go to the actor that is there first
            max_tasks_in_flight_per_actor=n_at_once + 1,
            enable_true_multi_threading=True,
        ),
        num_cpus=n_each,
        memory=_n_bytes(spec),
        udf_modifying_row_count=False,
    )


def served(
    model: Any = None,
    *,
    deployment: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return an application for `serve.run`: cbatch's HTTP endpoints, in replicas that are ready when they have loaded.

    A replica whose engine has failed is unhealthy, and Ray Serve replaces it.

    Args:
        model: as for `cbatch.load`, a path that every node has; or an `EngineSpec`.
        deployment: options of `serve.deployment`, such as `num_replicas` and `ray_actor_options`.
        server: settings of `cbatch.server.create_app`.
        settings: of `cbatch.load`, by name.

    Raises:
        ConfigError: a wrong setting.
    """
    from cbatch.server.server_settings import ServerSettings

    spec = model if isinstance(model, EngineSpec) else EngineSpec(model, **settings)
    ServerSettings(**(server or {}))
    import_ray()
    from ray import serve

    given = {"name": "cbatch", "max_ongoing_requests": 8 * _n_slots(spec), **(deployment or {})}
    return serve.deployment(**given)(serve.ingress()(Served)).bind(spec, dict(server or {}))


class Served:
    """A replica of `served`."""

    def __init__(self, spec: EngineSpec, server: dict[str, Any]) -> None:
        self._spec, self._server = spec, server

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the application when the model is loaded; Ray Serve calls it before it calls the replica ready."""
        from cbatch.server.app import create_app

        spec = _placed(self._spec)
        self._engine = await load_async(spec.model, **spec.settings)
        return create_app(self._engine, **self._server)

    async def check_health(self) -> None:
        """Raise where the engine has failed."""
        if (outage := self._engine.outage) is not None and outage.has_failed:
            raise EngineError(f"the engine does not compute: {outage.cause}")


# ---- settings ----


def _split(model: Any, settings: Mapping[str, Any]) -> tuple[dict[str, Any], EngineSpec]:
    """Return the settings of rows, checked, and the engine."""
    rows = {name: value for name, value in settings.items() if name in _OF_ROWS}
    rest = {name: value for name, value in settings.items() if name not in _OF_ROWS}
    Asking(**{name: rows[name] for name in _OF_ASKING if name in rows})
    rows["options"] = check_runs_through(RunOptions.of(rows.get("options")))
    if not isinstance(model, EngineSpec):
        return rows, EngineSpec(model, **rest)
    return rows, model.changed(**rest) if rest else model


def marks_of(spec: EngineSpec) -> dict[str, str]:
    """Return a digest of each file that is loaded, by path, as far as this machine has it."""
    places = map(Path, read_to_load(spec.model, spec.settings))
    return {str(p): file_digest(model_parts(str(p))) for p in places if p.is_file()}


def _placed(spec: EngineSpec) -> EngineSpec:
    """Return the engine of this actor: with its cores, its share of the memory, and a worker process."""
    ray, given = import_ray(), {"replicas": 1}
    if ray.is_initialized():
        context = ray.get_runtime_context()
        if n_cpus := context.get_assigned_resources().get("CPU", 0):
            [n_all] = [
                node["Resources"].get("CPU", 0)
                for node in ray.nodes()
                if node["NodeID"] == context.get_node_id()
            ]
            given["n_threads"] = max(1, min(int(n_cpus), available_cores()))
            given["n_sharing"] = max(1, int(n_all // n_cpus))
    return spec.changed(**{**given, **spec.settings})


def _n_slots(spec: EngineSpec) -> int:
    """Return the slots of an engine: of all its worker processes, where the memory allows."""
    n = spec.settings.get("replicas")
    return int(spec.settings.get("parallel") or DEFAULT_PARALLEL * (n if isinstance(n, int) else 1))


def _n_bytes(spec: EngineSpec) -> int | None:
    """Return the memory that Ray is to set aside for an actor; None where `memory_mib` does not tell."""
    n_mib = spec.settings.get("memory_mib")
    if n_mib is None:
        return None
    files = map(str, filter(None, (spec.model, spec.settings.get("mmproj"))))
    return int(n_mib) * 2**20 + sum(map(os.path.getsize, filter(os.path.isfile, files)))


def _check_columns(dataset: Any, rows: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` for columns that cannot be asked, where the dataset knows its columns."""
    schema = dataset.schema(fetch_if_missing=False)
    if schema is None:
        return
    types = dict(zip(schema.names, map(str, schema.types), strict=True))
    asking = Asking(**{name: rows[name] for name in _OF_ASKING if name in rows})
    for name in RowPrompts(asking, [*types], "dataset").columns:
        if "binary" in types[name]:
            raise ConfigError(
                f"column {name!r} has type {types[name]}, not text: cast it, or give map_batches "
                "batch_format='pyarrow', so that chats are not pickled"
            )


def _end_process(cause: str) -> None:
    """End this process at once: Ray replaces an actor whose process has ended, and repeats its tasks."""
    os.write(2, f"cbatch: {cause}: this actor ends, and Ray starts another one\n".encode())
    os._exit(1)
