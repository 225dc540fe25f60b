"""`cbatch run --ray`: Parquet in, a directory of Parquet or JSON lines out, computed by the actors of a Ray cluster."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from bisect import bisect_left
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cbatch.backend.host_limits import available_cores
from cbatch.engine_options import DEFAULT_PARALLEL
from cbatch.engine_spec import EngineSpec
from cbatch.errors import ConfigError, EngineError, words_of
from cbatch.files.input.columnar import import_pyarrow, rows_of
from cbatch.files.outcome import Interrupted, RunSummary
from cbatch.files.output.encoders import AnswerColumns, columns_asked, dump
from cbatch.files.output.identity import mark_of_opened
from cbatch.files.settings import FileOptions, split_settings
from cbatch.integrations.ray import MAX_CONCURRENCY, N_ROWS_PER_SLOT, answer, marks_of
from cbatch.integrations.ray_cluster import import_ray
from cbatch.options import RunOptions
from cbatch.support.folders import lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.progress import View

_TAKEN = ("template", "system", "is_raw", "output_column", "keep_columns", "replicas", "force")
"""Options of a run over files that have an effect on a cluster; `output_format` and `format`, too."""

_ROW_HASH = "row_hash"
"""The column by which Ray knows a row again: of the file's path and the row's place in it."""

_OF_ANSWERS = ("adapters", "cache_type_", "chat_template", "exact", "rope_", "yarn_")
"""Beginnings of the names of engine settings that change answers."""

_MARKS = "files"
"""A key in the folder's settings: a digest of each file that is loaded or read."""

_SETTINGS, _DONE = "_cbatch.json", "_done"  # readers of folders of Parquet leave such names out

_N_FILES = 200
"""Files of an output, about: what a stopped run loses is what was not written yet. Our choice."""

_N_ROWS_MOST = 8192  # of a file: our choice

_PROGRESS_S = 10.0
"""Seconds between two lines of progress. Our choice."""


def run_on_ray(
    source: Sequence[str],
    output: str,
    *,
    address: str,
    view: View,
    model: Any = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> RunSummary:
    """Answer every row of Parquet files; a row whose answer is in the output already does not run again.

    Args:
        source: files, folders or URLs that every node can read.
        output: a folder or URL that every node can write to.
        address: of the cluster; "local" starts one on this machine, "auto" takes the one that this machine is in.
        view: is told what happens.
        model: a path that every node has, or a name `hf:…`.
        options: of all rows.
        settings: of `FileOptions` and `cbatch.load`, by name; `replicas` are the actors, and `parallel` and `n_threads`
            are for each of them.

    Raises:
        ConfigError: an option that has no effect on a cluster, an input or an output that does not fit, or actors that
            would wait for ever.
        EngineError: there is no cluster at the address, or its job failed.
        Interrupted: Ctrl-C; answers that are written stay.
    """
    asked, of_engine = split_settings(settings)
    job = _RayJob(source, output, asked, RunOptions.of(options), model, of_engine)
    _connect(address)
    _quieten()
    n_items = job.n_rows()
    with job.alone():
        return _run(job, n_items, view)


def _run(job: _RayJob, n_items: int, view: View) -> RunSummary:
    """Answer the rows that have no answer; see `run_on_ray`."""
    ray, start_s = import_ray(), time.perf_counter()
    job.keep_settings()
    if n_removed := job.forget_removed():
        view.say(f"{n_removed:,} rows are answered again: their files are gone from {job.output}")
    n_before = job.n_committed()
    if n_before:
        view.say(f"continuing: {n_before:,} rows are answered")
    try:
        if n_before < n_items:
            with _shown(view, job.n_committed, n_items):
                job.run(n_items)
    except KeyboardInterrupt:
        raise Interrupted(job.summary("now", n_items, n_before, start_s)) from None
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise EngineError(f"the job on Ray failed: {_last_line(words_of(error))}") from error
    return job.summary("done", n_items, n_before, start_s)


@contextmanager
def _shown(view: View, count: Callable[[], int], n_items: int) -> Iterator[None]:
    """Say now and then, where it has changed, how many rows are written."""
    is_over, start_s = threading.Event(), time.perf_counter()
    n_first = count()

    def watch() -> None:
        n_last = n_first
        while not is_over.wait(_PROGRESS_S):
            with suppress(OSError):  # a file is being renamed
                n_now = count()
                if n_now != n_last:
                    rate = (n_now - n_first) / (time.perf_counter() - start_s)
                    view.say(f"{n_now:,} of {n_items:,} rows written, {rate:,.1f} rows/s")
                    n_last = n_now

    thread = threading.Thread(target=watch, name="cbatch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _quieten() -> None:
    """Have Ray Data print warnings only: its progress is for one who knows its operators."""
    import_ray().data.DataContext.get_current().enable_progress_bars = False
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler) is not logging.FileHandler:
            handler.setLevel(max(handler.level, logging.WARNING))


class _RayJob:
    """The rows of an input, and the folder of their answers."""

    def __init__(
        self,
        source: Sequence[str],
        output: str,
        asked: FileOptions,
        options: RunOptions,
        model: Any,
        of_engine: Mapping[str, Any],
    ) -> None:
        import_pyarrow()
        import_ray()
        from pyarrow import fs

        _check_asked(asked)
        self._paths = [_place(path) for path in source]
        self.output = _place(output)
        self._is_parquet = asked.output_format != "jsonl"
        self._asked, self._options = asked, options
        self._spec = EngineSpec(model, **of_engine)
        self._files, self._folder = fs.FileSystem.from_uri(self.output)
        rows = {name: getattr(asked, name) for name in _TAKEN[:5]}
        self._rows = {name: value for name, value in rows.items() if value is not None}
        if asked.keep_columns is not None:
            self._rows["keep_columns"] = [*dict.fromkeys((*asked.keep_columns, _ROW_HASH))]
        self._layout: AnswerColumns | None = None

    # ---- what is there ----

    def n_rows(self) -> int:
        """Return the number of rows of the input, by the ends of its files; ConfigError where one cannot be read."""
        found = 0
        for files, path, _ in self._inputs():
            try:
                with files.open_input_file(path) as raw:
                    metadata = import_pyarrow().parquet.read_metadata(raw)
            except (import_pyarrow().ArrowException, OSError) as error:
                raise ConfigError(
                    f"{path}: cannot be read as Parquet, which --ray needs: {error}"
                ) from error
            found += metadata.num_rows
            names = metadata.schema.to_arrow_schema().names
            if _ROW_HASH in names:
                raise ConfigError(
                    f"{path}: has a column {_ROW_HASH!r}, which cbatch uses to identify rows: rename it"
                )
            self._layout = AnswerColumns(
                [*names, _ROW_HASH],
                keep=self._rows.get("keep_columns"),
                output_column=self._asked.output_column,
                extra=columns_asked(self._options),
            )
        return found

    def _inputs(self) -> Iterator[tuple[Any, str, int]]:
        """Yield the file system, path and bytes of each file of the input."""
        from pyarrow import fs

        for path in self._paths:
            files, place = fs.FileSystem.from_uri(path)
            [info] = files.get_file_info([place])
            if info.type == fs.FileType.NotFound:
                raise ConfigError(f"{path}: there is no such file")
            if info.type != fs.FileType.Directory:
                yield files, place, info.size
                continue
            for each in files.get_file_info(fs.FileSelector(place, recursive=True)):
                is_hidden = each.base_name.startswith(("_", "."))
                if each.type == fs.FileType.File and not is_hidden:
                    yield files, each.path, each.size

    def n_committed(self) -> int:
        """Return the number of rows of which Ray has noted that their answers are written."""
        return sum(n_rows for _, n_rows in self._committed())

    def _committed(self) -> Iterator[tuple[str, int]]:
        """Yield the path of each note of Ray's, and its number of rows."""
        from pyarrow import fs

        selector = fs.FileSelector(f"{self._folder}/{_DONE}", allow_not_found=True)
        for info in self._files.get_file_info(selector):
            if info.type == fs.FileType.File and not info.base_name.endswith(".pending.parquet"):
                with self._files.open_input_file(info.path) as file:
                    yield info.path, import_pyarrow().parquet.read_metadata(file).num_rows

    def forget_removed(self) -> int:
        """Remove the notes whose answers are gone, and return their number of rows.

        The name of a file of answers begins with that of its note: Ray, too, finds files so.
        """
        outputs = sorted(PurePosixPath(path).name for path in self._outputs())
        n_removed = 0
        for path, n_rows in self._committed():
            name = PurePosixPath(path).stem
            place = bisect_left(outputs, name)
            if not any(output.startswith(name) for output in outputs[place : place + 1]):
                self._files.delete_file(path)
                n_removed += n_rows
        return n_removed

    def _columns(self) -> tuple[str, str, str]:
        """Return the names of the columns of errors and tokens in the output."""
        assert self._layout is not None  # `n_rows` comes first
        names = dict(zip(self._layout.types, self._layout.added, strict=True))
        return names["error"], names["prompt_tokens"], names["completion_tokens"]

    def _outputs(self) -> Iterator[str]:
        from pyarrow import fs

        ending = ".parquet" if self._is_parquet else ".jsonl"
        selector = fs.FileSelector(self._folder, allow_not_found=True)
        for info in self._files.get_file_info(selector):
            if info.type == fs.FileType.File and info.base_name.endswith(ending):
                yield info.path

    def _answers(self, path: str, columns: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        with self._files.open_input_file(path) as file:
            if self._is_parquet:
                parquet = import_pyarrow().parquet.ParquetFile(file)
                yield from (b.to_pydict() for b in parquet.iter_batches(columns=[*columns]))
            else:
                for line in file.read().splitlines():
                    row = json.loads(line)
                    yield {name: [row.get(name)] for name in columns}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder, and lock it where it is on a disk of this machine; ConfigError where another run has it."""
        from pyarrow import fs

        try:
            self._files.create_dir(self._folder, recursive=True)
        except OSError as error:
            raise ConfigError(
                f"{self.output}: cannot make a folder for the answers: {words_of(error)}"
            ) from error
        if not isinstance(self._files, fs.LocalFileSystem):
            yield
            return
        fd = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lock(fd)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"{self.output}: another run is writing to it: wait for its end, or give another -o"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(fd)

    def keep_settings(self) -> None:
        """Note what the answers depend on, or compare it with an earlier run's; ConfigError where it differs."""
        given = {
            f.name: repr(getattr(self._options, f.name))
            for f in fields(RunOptions)
            if getattr(self._options, f.name) is not None
        }
        said = {
            "input": sorted(f"{path} {n_bytes}" for _, path, n_bytes in self._inputs()),
            "model": self._spec.model or "the model shipped with cbatch",
            "options": given,
            "settings": {
                name: repr(value)
                for name, value in self._spec.settings.items()
                if name.startswith(_OF_ANSWERS)
            },
            "rows": {name: repr(value) for name, value in self._rows.items()},
            "format": "parquet" if self._is_parquet else "jsonl",
        }
        path = f"{self._folder}/{_SETTINGS}"
        try:
            with self._files.open_input_file(path) as file:
                before = json.loads(file.read())
        except FileNotFoundError:
            before = None
            if next(self._outputs(), None) is not None:
                raise ConfigError(
                    f"{self.output}: has files that cbatch did not write: give another -o"
                ) from None
        differ = [n for n in said if before is not None and before.get(n, said[n]) != said[n]]
        marks = self._marks_of_files()
        noted = (before or {}).get(_MARKS, {})
        differ += [file for file in marks if noted.get(file, marks[file]) != marks[file]]
        if differ and not self._asked.force:
            raise ConfigError(
                f"{self.output}: was made with another {', '.join(differ)}: use the same, or another -o; --force "
                "keeps those answers, and answers the other rows with the new settings"
            )
        with self._files.open_output_stream(path) as file:
            file.write(dump({**said, _MARKS: {**noted, **marks}}))

    def _marks_of_files(self) -> dict[str, str]:
        """Return a digest of each file that is loaded, if this machine has it, and of each file of the input."""
        marks = marks_of(self._spec)
        for files, path, _ in self._inputs():
            with files.open_input_file(path) as file:
                marks[path] = mark_of_opened(file)
        return marks

    # ---- the work ----

    def run(self, n_items: int) -> None:
        """Answer the rows that have no answer, and write them."""
        ray = import_ray()
        from ray.data.checkpoint import CheckpointConfig

        ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
            id_column=_ROW_HASH,
            checkpoint_path=f"{self.output}/{_DONE}",
            delete_checkpoint_on_success=False,  # else the same command would run all again
        )
        dataset = ray.data.read_parquet(self._paths, include_row_hash=True)
        n_actors = self._asked.replicas
        answers = answer(
            dataset,
            self._spec,
            n_actors=n_actors if isinstance(n_actors, int) else None,
            n_cpus=self._spec.settings.get("n_threads"),
            batch_size=self._batch_size(n_items, n_actors),
            options=self._options,
            **self._rows,
        )
        n_rows = max(1, min(_N_ROWS_MOST, math.ceil(n_items / _N_FILES)))
        if self._is_parquet:
            answers.write_parquet(self.output, min_rows_per_file=n_rows)
        else:
            answers.write_datasink(_json_lines(self.output, n_rows))

    def _batch_size(self, n_items: int, n_actors: object) -> int:
        """Return the usual number of rows for the slots, or fewer, so that each actor has batches enough."""
        n_slots = self._spec.settings.get("parallel") or DEFAULT_PARALLEL
        n = n_actors if isinstance(n_actors, int) else 1
        n_share = n_items // (n * 2 * MAX_CONCURRENCY)
        return max(1, math.ceil(n_slots / MAX_CONCURRENCY), min(N_ROWS_PER_SLOT * n_slots, n_share))

    def summary(self, ending: Any, n_items: int, n_before: int, start_s: float) -> RunSummary:
        """Return the numbers of the run, by what is in the output."""
        n_rows = n_failed = n_prompt_tokens = n_output_tokens = 0
        first_error = ""
        error, prompt_tokens, output_tokens = columns = self._columns()
        for file in self._outputs():
            for row in self._answers(file, columns):
                n_rows += len(row[error])
                errors = [each for each in row[error] if each is not None]
                n_failed += len(errors)
                first_error = first_error or next(iter(errors), "")
                n_prompt_tokens += sum(n or 0 for n in row[prompt_tokens])
                n_output_tokens += sum(n or 0 for n in row[output_tokens])
        return RunSummary(
            ending,
            n_items=n_items,
            n_done=n_rows - n_before,
            n_failed=n_failed,
            n_before=n_before,
            n_left=n_items - n_rows,
            prompt_tokens=n_prompt_tokens,
            output_tokens=n_output_tokens,
            elapsed_s=time.perf_counter() - start_s,
            errors={"rows": n_failed} if n_failed else {},
            first_error=first_error,
        )


def _connect(address: str) -> None:
    """Join the cluster, or start one for "local"; EngineError where there is none."""
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        if (
            address == "local"
        ):  # Ray counts CPUs for reading and for checkpoints, which hardly compute
            ray.init(num_cpus=available_cores() + 2, include_dashboard=False)
        else:
            ray.init(address=address)
    except Exception as error:  # the one of a node that does not start has no type of its own
        raise EngineError(
            f"--ray {address}: no cluster answers there: {words_of(error)}"
        ) from error


def _last_line(text: str) -> str:
    """Return the last line of an error of Ray's, which is the traceback in an actor, then what was raised there."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), text)


def _place(path: str) -> str:
    """Return a URL as it is, and a path as one that is the same in any folder."""
    path = str(path).rstrip("/") or "/"
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _check_asked(asked: FileOptions) -> None:
    """Refuse options without effect on a cluster."""
    default = FileOptions()
    known = (*_TAKEN, "format", "output_format")
    for f in fields(FileOptions):
        if f.name not in known and getattr(asked, f.name) != getattr(default, f.name):
            flag = f.name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect with --ray: leave it out")
    if asked.format not in ("auto", "parquet"):
        raise ConfigError(f"--ray reads Parquet, not {asked.format}")
    if asked.output_format not in (None, "parquet", "jsonl"):
        raise ConfigError(
            f"--ray writes a folder of parquet or jsonl (--output-format), not {asked.output_format}"
        )


def _json_lines(path: str, n_rows: int) -> Any:
    """Return a sink of Ray that writes JSON lines; Ray's own turns whole numbers beside nulls into fractions."""
    from ray.data.datasource import BlockBasedFileDatasink

    class JsonLines(BlockBasedFileDatasink):
        def write_block_to_file(self, block: Any, file: Any) -> None:
            for row in rows_of(block.to_arrow()):
                file.write(dump(row))

    return JsonLines(path, min_rows_per_file=n_rows, file_format="jsonl")
