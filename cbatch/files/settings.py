"""The settings of a run over a file, checked before anything is read; and the engine of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch.backend.named_library import use_library
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.files.places import file_of
from cbatch.loading import check_replicas, check_structure, load
from cbatch.messages import LookAhead
from cbatch.options import MAX_SEED, RunOptions
from cbatch.support.checks import (
    check_fields,
    check_flag,
    check_int,
    check_path,
    check_seconds,
    check_string,
    check_text,
    checked,
    shown,
    strings_of,
)
from cbatch.support.hub import parts_of_model

MAX_WINDOW = 65_536
"""Most items of a window: more would not be ordered better."""

OF_LOAD = ("isolate", "replicas")
"""Options that have no effect on an engine that is loaded already."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How a batch file is read, run and written.

    Args:
        format: of the input; "auto" tells it by the names of the files and their first lines.
        output_format: of the output; None for that of the input.
        output_column: the name of the column with the answer's text, in tables; None: "response".
        keep_columns: columns of the input that a table of answers has, in this order; None: all.
        template: the prompt of each row, with `{column}` for the row's value.
        system: a system message for each row, a template as well.
        is_raw: True: rows, and the `prompt` of cbatch's requests, are text to complete as it is; False: each is a chat
            of one message. None: rows are chats, and a request's `prompt` is text, as in Python.
        image_column: the column of a table with a picture for each row, which stands before its text: the bytes of a
            file, a data URL, or the name of a file, from the table's folder on.
        audio_column: the column of a table with a sound for each row, as `image_column`.
        errors: a file of their own for records of errors.
        limit: most items to run; items that are done do not count.
        shuffle: read the input in random order. It is copied to a temporary file first; 8 bytes of memory an item.
        dedupe: compute items that are equal once, where the answer is certain to be the same; see `Engine.run`.
        shuffle_seed: the same number gives the same order.
        strict: check the whole input before anything runs, and stop at the first item with an error.
        retry_errors: run items again that ended with an error.
        adopt: if the manifest is lost or does not fit, make it again of the JSON lines in the output.
        force: continue although settings differ from those of the earlier run, or replace a file that is not cbatch's.
        window: items that are read ahead for a better order; None: 8 a slot.
        max_time_s: seconds for the whole run; items that are not done then are left for the next run.
        report: file for an HTML page on the run.
        trace: file for the steps of the run, for Perfetto.
        isolate: compute in a worker process, which is replaced if it dies: that costs no answer. None: yes for a file
            of a model, no for a `llama_cpp.Llama`.
        replicas: worker processes to compute in, which share cores, slots and memory; "auto": see `cbatch.load`.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    format: str = checked(check_string, default="auto")
    output_format: str | None = checked(check_string)
    output_column: str | None = checked(check_text, 1000)
    keep_columns: Sequence[str] | None = checked(strings_of)
    template: str | None = checked(check_string)
    system: str | None = checked(check_string)
    is_raw: bool | None = checked(check_flag)
    image_column: str | None = checked(check_text, 1000)
    audio_column: str | None = checked(check_text, 1000)
    errors: Path | None = checked(file_of)
    limit: int | None = checked(check_int, 1, 2**63 - 1)
    shuffle: bool = checked(check_flag, default=False)
    dedupe: bool = checked(check_flag, default=False)
    shuffle_seed: int = checked(check_int, -MAX_SEED, MAX_SEED, default=0)
    strict: bool = checked(check_flag, default=False)
    retry_errors: bool = checked(check_flag, default=False)
    adopt: bool = checked(check_flag, default=False)
    force: bool = checked(check_flag, default=False)
    window: int | None = checked(check_int, 1, MAX_WINDOW)
    max_time_s: float | None = checked(check_seconds)
    report: Path | None = checked(file_of)
    trace: Path | None = checked(file_of)
    isolate: bool | None = checked(check_flag)
    replicas: int | Literal["auto"] | None = checked(check_replicas)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.adopt and self.force:
            raise ConfigError(
                "adopt keeps the existing records, but force may replace them: give one of them"
            )
        if self.replicas is not None and self.isolate is False:
            raise ConfigError("replicas are separate processes: leave out isolate=False")
        if self.replicas == "auto" and self.isolate:
            raise ConfigError(
                "isolate needs a number of replicas, because auto may mean no separate process"
            )

    def n_workers(self, *, isolates: bool = False) -> int | Literal["auto"] | None:
        """Worker processes to load a model into, as `cbatch.load` takes them; None for this process.

        Args:
            isolates: what an `isolate` that is not said means.
        """
        isolates = isolates if self.isolate is None else self.isolate
        return self.replicas or (1 if isolates else None)


def split_settings(settings: Mapping[str, Any]) -> tuple[FileOptions, dict[str, Any]]:
    """Return the options of the file, and the others, which are the engine's.

    Raises:
        ConfigError: a wrong value.
        UnsupportedOptionError: an unknown name.
    """
    names = FileOptions.__dataclass_fields__
    EngineOptions.of(settings, names)
    of_file = {name: value for name, value in settings.items() if name in names}
    return FileOptions(**of_file), {k: v for k, v in settings.items() if k not in names}


# ---- the engine ----


def read_to_load(model: object, settings: Mapping[str, Any]) -> list[str]:
    """Return the files of a model that are read to load it, with settings of `cbatch.load`, by name."""
    named = [*(settings.get("adapters") or {}).values()]
    named += [settings[name] for name in ("draft", "mmproj") if settings.get(name)]
    if isinstance(model, str | os.PathLike):
        named += parts_of_model(Path(check_path("model", model))) or [model]
    return [*map(str, named)]


def check_engine(engine: object) -> None:
    """Check the type of an engine.

    Raises:
        ConfigError: a value of another type.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine must be an Engine returned by load, not {shown(engine)}")


@contextmanager
def engine_for(
    given: Engine | None,
    model: Any,
    settings: Mapping[str, Any],
    look_ahead: Callable[[], LookAhead | None],
    *,
    asked: FileOptions,
    options: RunOptions,
    threaded: bool = False,
    isolates: bool = False,
) -> Iterator[Engine]:
    """Lend the engine that is given, or load one for the length of the block.

    Args:
        given: stays open.
        model: to load, see `cbatch.load`.
        settings: of `cbatch.load`, by name.
        look_ahead: returns the first prompts, for the size of windows; called if an engine is loaded.
        options: of the run, of which a schema, regex or grammar is compiled before anything is loaded.
        asked: says which processes the model is loaded into.
        threaded: whether a loaded engine has a thread of its own; else it computes while a result is awaited.
        isolates: whether a model file is loaded into a worker process where nothing is said.

    Raises:
        ConfigError: an engine is given, and a model or settings too; a schema, regex or grammar cannot be compiled.
        EngineError: the model cannot be loaded.
    """
    use_library(settings.get("library"))
    check_structure(options)
    if given is None:
        is_file = model is None or isinstance(model, str | os.PathLike)
        n = asked.n_workers(isolates=isolates and is_file)
        where: dict[str, Any] = {"threaded": threaded} if n is None else {"replicas": n}
        with load(model, look_ahead=look_ahead(), **where, **settings) as engine:
            yield engine
        return
    check_engine(given)
    of_load = [*settings, *(name for name in OF_LOAD if getattr(asked, name) is not None)]
    if model is not None or of_load:
        names = ", ".join(of_load) or "model"
        raise ConfigError(
            f"{names}: the engine is loaded already; leave that out, or give no engine"
        )
    yield given
