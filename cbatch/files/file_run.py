"""A batch file in, a file of records out: `run_file`; the same without an output: `stream_file`."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.checks import check_path, readable, shown
from cbatch.engine import model_name, run_options_of
from cbatch.errors import ConfigError
from cbatch.files.input.item import item_key
from cbatch.files.input.item_stream import N_LOOKED_AHEAD, ItemStream
from cbatch.files.outcome import Interrupted, Stopper
from cbatch.files.output.encoders import Encoder
from cbatch.files.output.identity import Digests, Origin
from cbatch.files.output.opening import OUTPUT_FORMAT
from cbatch.files.output.run_paths import check_places, check_replaceable, written_by
from cbatch.files.output.target import PipedOutput, Target
from cbatch.files.places import file_of
from cbatch.files.preview import why_refused
from cbatch.files.report.recording import Recording
from cbatch.files.settings import FileOptions, check_engine, engine_for, split_settings
from cbatch.files.window import Window
from cbatch.files.work import Way, Work
from cbatch.options import RunOptions
from cbatch.progress import Progress, SilentView, check_view, choose_view, closing_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from cbatch.engine import Engine
    from cbatch.files.input.item_stream import Paths
    from cbatch.files.outcome import RunSummary
    from cbatch.files.work import Ended, Ledger, OnEnded
    from cbatch.progress import Counts, View
    from cbatch.response import BatchResult, Reader

N_WINDOW_PER_SLOT = 8
"""Items read ahead for each slot, besides the four that the engine has in hand."""

_OF_OUTPUT = ("output_format", "errors", "retry_errors", "adopt", "force", "report", "trace")
"""Options that a run without an output has no use for."""


def run_file(
    source: Paths,
    output: str | Path,
    *,
    engine: Engine | None = None,
    model: Any = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    progress: bool | View = False,
    on_result: OnEnded | None = None,
    stop: Stopper | None = None,
    **settings: Any,
) -> RunSummary:
    """Run every item of batch files and write a record for each, as they end; what has its record is not run again.

    Beside the output stands its manifest, `OUT.manifest`: a run that was stopped, however, goes on where it was when
    it is called again. Ctrl-C once, SIGTERM or SIGHUP: what runs is finished; twice: it ends at once.

    Args:
        source: a file, a pattern, several of them, or "-" for stdin; see `cbatch.files.input.source.open_source`.
        output: a file, or "-" for stdout, which cannot be gone on with.
        engine: runs the items; None: one is loaded, and closed at the end.
        model: what to load, see `cbatch.load`.
        options: where an item says nothing; those of the engine come behind.
        progress: show on stderr how far it is; a `View` shows it as it likes.
        on_result: called with each item that ended and its result, None where the item is wrong.
        stop: what tells to stop; None: signals do, in the main thread.
        settings: those of `FileOptions` and, where a model is loaded, of `cbatch.load`, by name.

    Raises:
        ConfigError: a setting is wrong; the input cannot be read; the output is of other settings, another run's or
            not of cbatch; see `Journal.open`. Last of all, when every record is there: the report cannot be written.
        Interrupted: a signal ended it. It is a KeyboardInterrupt and has the `summary`.
        OutputError: a record cannot be written. What was committed stays.
        EngineError: the model cannot be loaded, or its engine cannot go on.
        RequestCancelledError: somebody has called `cancel_all` of the engine that was given.
    """
    asked, load_settings = split_settings(settings)
    defaults, view = RunOptions.of(options), _view(progress)
    place = file_of("output", output)
    _check_calls(on_result, stop)
    check_places(place, asked, [*_model_file(model), *_adapter_files(load_settings)])
    with ExitStack() as stack:
        reading, target = _opened(stack, source, place, asked)
        if engine is None:
            view.say(f"loading {model or 'the model that ships inside'}")
        n_ahead = asked.window or N_LOOKED_AHEAD
        runner = stack.enter_context(
            engine_for(
                engine,
                model,
                load_settings,
                lambda: reading.look_ahead(defaults, n_ahead),
                threaded=reading.is_piped,  # between steps a pipe would let everybody wait
            )
        )
        settled = run_options_of(runner, defaults)
        if asked.strict:
            reading.check(lambda item: why_refused(item, runner, settled))
        said = _settings_of(runner, reading, target, settled, asked)
        digests = _digests(runner, settled)
        ledger = stack.enter_context(
            target.opened(
                said,
                _origin(reading, target.path, digests),
                force=asked.force,
                retry_errors=asked.retry_errors,
            )
        )
        way = Way(ledger, target.encoder, digests, settled, model_name(model))
        stop = stop or Stopper()
        work = _work(reading, way, asked, stop, runner, is_own=engine is None)
        for line in (*ledger.notes, *_resumed(ledger)):
            view.say(line)
        title = ", ".join(readable(Path(name).name) for name in reading.source.paths[:3])
        recording = Recording(asked, view.say)
        with (
            recording.of(runner, title, said, on_result) as on_ended,
            _shown(view, work, reading, runner),
            stop,
        ):
            summary = work.run(runner, asked.max_time_s, on_ended)
        for line in _left_over(ledger) if summary.is_complete else ():
            view.say(line)
    if summary.is_complete:
        target.finish(summary.n_items)
    if summary.ending in ("asked", "now"):
        recording.tell()
        raise Interrupted(summary)
    recording.check()
    return summary


def stream_file(
    source: Paths,
    engine: Engine,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    **settings: Any,
) -> FileStream:
    """Run every item of batch files and give out pairs of an item and its result as they end; nothing is written.

    An item that is wrong comes with None; one that was cancelled, or for which no time was left, with its result. Who
    leaves early cancels what is in flight.

    Args:
        source: see `run_file`.
        engine: runs the items; for `async for` one with a thread.
        options: where an item says nothing.
        settings: those of `FileOptions` that are about the input: format, template, system, limit, shuffle, strict,
            window, max_time_s.

    Raises:
        ConfigError: a setting is wrong, or the input cannot be read.
        EngineError: in the midst of it, the engine cannot go on, or somebody has closed it.
        RequestCancelledError: in the midst of it, somebody has called the engine's `cancel_all`.
    """
    check_engine(engine)
    asked, load_settings = split_settings(settings)
    for name in (*load_settings, *_OF_OUTPUT):
        if name in settings:
            raise ConfigError(f"{name} has no effect here: the engine is there, and no output")
    settled = run_options_of(engine, options)
    reading = ItemStream(source, asked)
    nowhere = PipedOutput(None)
    way = Way(nowhere, Encoder(), _digests(engine, settled), settled, model_name(None))
    work = _work(reading, way, asked, Stopper(), engine, is_own=False)
    return FileStream(engine, work, asked.max_time_s, (reading, nowhere))


class FileStream:
    """Pairs of an item and its result, None where the item is wrong; see `stream_file`. Read it once."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        max_time_s: float | None,
        open_things: tuple[ItemStream, PipedOutput],
    ) -> None:
        self._engine, self._work, self._max_time_s = engine, work, max_time_s
        self._open = ExitStack()
        for thing in open_things:
            self._open.callback(thing.close)

    def __iter__(self) -> Iterator[Ended]:
        """Yield each pair."""
        with self._open, closing(self._start()) as results:
            for result in results:
                yield from self._work.take(result, gives_left=True)
            yield from ((item, None) for item in self._work.take_refused())
            self._check_engine()

    async def __aiter__(self) -> AsyncIterator[Ended]:
        """Yield each pair, in an event loop."""
        with self._open, closing(self._start()) as results:
            async for result in results:
                for ended in self._work.take(result, gives_left=True):
                    yield ended
            for item in self._work.take_refused():
                yield item, None
            self._check_engine()

    def _check_engine(self) -> None:
        if self._work.is_cut_off:
            self._engine.stats()  # raises where somebody has closed it

    def _start(self) -> Reader[BatchResult]:
        return self._work.start(self._engine, self._max_time_s).as_completed()


def _opened(
    stack: ExitStack, source: Paths, output: Path, asked: FileOptions
) -> tuple[ItemStream, Target]:
    """Return the input, which `stack` closes, and the output, once it is known that both can be had."""
    own = {os.path.realpath(path) for path in written_by(output, asked)}
    reading = stack.enter_context(closing(ItemStream(source, asked, own)))
    check_places(output, asked, reading.source.paths)
    check_replaceable(asked)
    target = Target.of(output, reading.source, asked)
    target.check(force=asked.force)
    return reading, target


def _digests(engine: Engine, settled: RunOptions) -> Digests:
    return Digests(settled, json.dumps(engine.fingerprint, sort_keys=True))


def _origin(reading: ItemStream, output: Path, digests: Digests) -> Origin:
    def look() -> list[tuple[str, bytes]]:
        return [(item_key(item), digests(item)) for item in reading.peek()]

    return Origin(reading.source.paths, output, look, is_at_hand=reading.is_at_hand)


def _work(
    reading: ItemStream,
    way: Way,
    asked: FileOptions,
    stop: Stopper,
    engine: Engine,
    *,
    is_own: bool,
) -> Work:
    window = Window(asked.window or N_WINDOW_PER_SLOT * engine.parallel)
    prefix = "" if is_own else f"{secrets.token_hex(4)}-"  # for others may use it too
    return Work(
        reading.items,
        way,
        window,
        stop,
        limit=asked.limit,
        prefix=prefix,
        is_dry=reading.is_dry,
    )


def _view(progress: bool | View) -> View:
    view = check_view(progress)
    return choose_view(closing_line, is_quiet=not view) if isinstance(view, bool) else view


def _check_calls(on_result: object, stop: object) -> None:
    if on_result is not None and not callable(on_result):
        raise ConfigError(f"on_result must be a function, not {shown(on_result)}")
    if not isinstance(stop, Stopper | None):
        raise ConfigError(f"stop must be a Stopper, not {shown(stop)}")


def _resumed(ledger: Ledger) -> list[str]:
    n_known = ledger.n_done + ledger.n_failed
    failed = f", {ledger.n_failed:,} of them failed" if ledger.n_failed else ""
    return [f"going on: {n_known:,} items have their record{failed}"] if n_known else []


def _left_over(ledger: Ledger) -> Iterator[str]:
    """Deal with the records of items that are not in the input any more; yield what became of them."""
    if n := ledger.drop_unclaimed(is_by_number=True):
        yield f"{n:,} records taken out: their items are not in the input any more"
    if n := ledger.set_unclaimed_aside():
        yield f"{n:,} records are of items that are not in the input any more: they stay, at the end when sorted"


@contextmanager
def _shown(view: View, work: Work, reading: ItemStream, engine: Engine) -> Iterator[None]:
    """Show how far it is for the length of the block."""

    def counts() -> Counts:
        return work.counts(reading.about())

    if isinstance(view, SilentView):  # a thread that asks nobody
        yield
        return
    with closing(Progress(view, counts, engine.stats, engine.stats(), engine.parallel)):
        yield


def _adapter_files(settings: Mapping[str, Any]) -> list[str]:
    return [str(path) for path in (settings.get("adapters") or {}).values()]


def _model_file(model: Any) -> list[str]:
    return [check_path("model", model)] if isinstance(model, str | os.PathLike) else []


def _settings_of(
    engine: Engine, reading: ItemStream, target: Target, options: RunOptions, asked: FileOptions
) -> dict[str, str]:
    """Return what must be as it was for a run to go on, in words for people."""
    said = {
        f.name: value for f in fields(RunOptions) if (value := getattr(options, f.name)) is not None
    }
    return {
        "input format": reading.source.format,
        OUTPUT_FORMAT: target.format,
        "template": asked.template or "none",
        "system message": asked.system or "none",
        "rows": "text to complete" if asked.is_raw else "chats",
        **engine.fingerprint,
        "options": ", ".join(f"{name}={value!r}" for name, value in said.items()) or "none",
    }
