"""Run batch files: `run_file` writes records to a file, `stream_file` yields results."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.chat.vector_calls import EmbedCall, VectorCall, VectorPrompt
from cbatch.engine import Engine, run_options_of
from cbatch.errors import ConfigError
from cbatch.files.input.item import item_key
from cbatch.files.input.item_stream import N_LOOKED_AHEAD, ItemStream
from cbatch.files.input.row_prompts import MEDIA_COLUMNS
from cbatch.files.outcome import Interrupted, RunSummary, Stopper
from cbatch.files.output.encoders import Encoder, RowEncoder, columns_asked
from cbatch.files.output.identity import Digests, InputIdentity
from cbatch.files.output.opening import OUTPUT_FORMAT
from cbatch.files.output.run_paths import check_places, check_replaceable, written_by
from cbatch.files.output.target import PipedOutput, RunOutputs
from cbatch.files.places import file_of
from cbatch.files.preview import why_refused
from cbatch.files.report.recording import Recording
from cbatch.files.settings import (
    OF_LOAD,
    FileOptions,
    check_engine,
    engine_for,
    read_to_load,
    split_settings,
)
from cbatch.files.vector_work import VectorEngine
from cbatch.files.work import RunContext, Work
from cbatch.loading import model_name
from cbatch.options import RunOptions, check_runs_through
from cbatch.progress import Progress, SilentView, View, check_view, choose_view, closing_line
from cbatch.runtime.batch_response import BatchResponse
from cbatch.support.checks import readable, shown
from cbatch.support.hub import local_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Mapping

    from cbatch.files.input.item_stream import Paths
    from cbatch.files.work import Ended, Ledger, OnEnded

_OF_OUTPUT = (
    "output_format",
    "output_column",
    "keep_columns",
    "errors",
    "retry_errors",
    "adopt",
    "force",
    "report",
    "trace",
)
"""Options that have no effect without an output."""


def run_file(  # noqa: PLR0913  # what runs, how, and who is told
    source: Paths,
    output: str | Path,
    *,
    engine: Engine | None = None,
    model: Any = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    progress: bool | View = False,
    on_result: OnEnded | None = None,
    stop: Stopper | None = None,
    vectors: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunSummary:
    """Run every item of batch files and write a record for each as it ends; an item with a record does not run again.

    Beside the output is its manifest, `OUT.manifest`, by which the same call continues a run that was stopped in any
    way. Ctrl-C once, SIGTERM or SIGHUP: running items are finished; twice: the run ends at once.

    Args:
        source: a file, a pattern, several of them, or "-" for stdin; see `cbatch.files.input.source.open_source`.
        output: a file, or "-" for stdout, which no later run can continue.
        engine: runs the items; None: one is loaded, and closed at the end.
        model: to load, see `cbatch.load`; `hf:OWNER/REPO/FILE.gguf` is downloaded first.
        options: that an item leaves out; before those of the engine.
        progress: whether to show progress on stderr, or a `View` that shows it.
        on_result: called with each item that ended and its result, None where the item has an error.
        stop: stops the run; None: signals do, in the main thread.
        vectors: settings of `Engine.embed`, by which each row's text is embedded instead of answered; see `embed_file`.
        settings: those of `FileOptions` and, where a model is loaded, of `cbatch.load`, by name.

    Raises:
        ConfigError: a wrong setting; a schema, grammar or template that cannot be compiled; the input cannot be read;
            the output has other settings, belongs to another run or is not of cbatch, see `open_outputs`. After
            every record is written: the report cannot be written.
        Interrupted: a signal ended the run. It is a KeyboardInterrupt and has the `summary`.
        OutputError: a record cannot be written. Committed records stay.
        EngineError: the model cannot be loaded, or its engine failed.
        RequestCancelledError: `cancel_all` of the given engine was called.
    """
    asked, load_settings = split_settings(settings)
    defaults, view = RunOptions.of(options), _view(progress)
    named, model, place = model, local_model(model), file_of("output", output)
    _check_calls(on_result, stop)
    to_load = read_to_load(model, load_settings)
    check_places(place, asked, to_load)
    with Recording(asked, view.say) as recording:
        run = _Run(asked, defaults, view, recording, stop or Stopper(), on_result, vectors)
        with ExitStack() as stack:
            if engine is not None:
                check_engine(engine)
            wants = defaults if engine is None else defaults.over(engine.options)
            columns = None if vectors is not None else columns_asked(wants)
            stream, target = _opened(stack, source, place, asked, columns=columns)
            if engine is None and all(map(os.path.isfile, to_load)):
                view.say(f"loading {named or 'the model shipped with cbatch'}")
            n_ahead = asked.window or N_LOOKED_AHEAD
            has_vectors = vectors is not None or _vector_call(stream) is not None
            lent = engine_for(
                engine,
                model,
                load_settings,
                lambda: None if has_vectors else stream.look_ahead(defaults, n_ahead),
                asked=asked,
                options=defaults,
                threaded=stream.is_piped,  # else the engine would stop while the pipe is silent
                isolates=True,
            )
            summary = run.of(
                stack.enter_context(lent), stream, target, model, is_own_engine=engine is None
            )
        if summary.is_complete:
            target.finish(summary.n_items)
        if summary.ending in ("asked", "now"):
            raise Interrupted(summary)
    return summary


@dataclass(frozen=True, slots=True)
class _Run:
    asked: FileOptions
    defaults: RunOptions
    view: View
    recording: Recording
    stop: Stopper
    on_result: OnEnded | None
    vectors: Mapping[str, Any] | None

    def of(
        self,
        engine: Engine,
        stream: ItemStream,
        target: RunOutputs,
        model: Any,
        *,
        is_own_engine: bool,
    ) -> RunSummary:
        asked, view, options = self.asked, self.view, run_options_of(engine, self.defaults)
        check_runs_through(options)
        if asked.strict:
            stream.check(lambda item: why_refused(item, engine, options))
        settings = _settings_of(engine, stream, target, options, asked)
        if self.vectors is not None:
            settings["embeddings"] = _as_text(self.vectors)
        digests = _digests(engine, options, self.vectors)
        with target.opened(settings, _origin(stream, target.path, digests)) as ledger:
            prefix = "" if is_own_engine else _prefix()
            context = RunContext(
                ledger, target.encoder, digests, options, model_name(model), prefix
            )
            work = Work(stream, context, self._runner(engine, stream), asked, self.stop)
            for line in (*_notes(engine, stream, asked), *ledger.notes, *_resumed(ledger)):
                view.say(line)
            title = ", ".join(readable(Path(name).name) for name in stream.source.paths[:3])
            with (
                self.recording.of(
                    engine,
                    title,
                    _for_people(settings, engine),
                    self.on_result,
                    lambda: work.tally.n_before,
                ) as on_ended,
                _shown(view, work, engine),
                self.stop,
            ):
                summary = work.run(on_ended).after(ledger.noted_errors)
            ledger.note_errors(summary.noted_errors)
            for line in _left_over(ledger) if summary.is_complete else ():
                view.say(line)
        return summary

    def _runner(self, engine: Engine, stream: ItemStream) -> Engine | VectorEngine:
        """Return what computes the items. ConfigError where the model cannot."""
        call = _vector_call(stream) if self.vectors is None else EmbedCall([])
        if call is None:
            return engine
        if why := call.lack(engine):
            raise ConfigError(f"{why}: give another model")
        if self.vectors is not None:
            engine.embed([], **self.vectors).cancel()  # refuses settings that do not fit the model
        return VectorEngine(engine, self.vectors, stream.is_dry)


def stream_file(
    source: Paths,
    engine: Engine,
    *,
    options: RunOptions | Mapping[str, Any] | None = None,
    **settings: Any,
) -> FileStream:
    """Run every item of batch files and yield pairs of an item and its result as they end; nothing is written.

    The result of an item with an error is None; a cancelled item, or one without time left, has a result. Leaving the
    iteration early cancels running items.

    Args:
        source: see `run_file`.
        engine: runs the items; for `async for` one with a thread.
        options: that an item leaves out.
        settings: those of `FileOptions` that concern the input: format, template, system, limit, shuffle, strict,
            window, max_time_s.

    Raises:
        ConfigError: a wrong setting, or the input cannot be read.
        EngineError: during the iteration, the engine failed or was closed.
        RequestCancelledError: during the iteration, the engine's `cancel_all` was called.
    """
    check_engine(engine)
    asked, load_settings = split_settings(settings)
    for name in (*load_settings, *_OF_OUTPUT, *OF_LOAD):
        if name in settings:
            raise ConfigError(f"{name} has no effect with a loaded engine and without an output")
    settled = run_options_of(engine, options)
    stream = ItemStream(source, asked)
    nowhere = PipedOutput()
    digests = _digests(engine, settled)
    context = RunContext(nowhere, Encoder(), digests, settled, model_name(None), _prefix())
    work = Work(stream, context, engine, asked, Stopper())
    return FileStream(work, stream, nowhere)


class FileStream:
    """Pairs of an item and its result, None where the item has an error; see `stream_file`. Iterate once."""

    def __init__(self, work: Work, *opened: ItemStream | PipedOutput) -> None:
        self._work = work
        self._open = ExitStack()
        for thing in opened:
            self._open.callback(thing.close)

    def __iter__(self) -> Iterator[Ended]:
        with self._open, closing(self._begun().as_completed()) as results:
            for result in results:
                yield from self._work.take(result, gives_left=True)
            yield from self._work.take_refused()
            self._work.check_engine()

    async def __aiter__(self) -> AsyncIterator[Ended]:
        with self._open, closing(self._begun().as_completed()) as results:
            async for result in results:
                for ended in self._work.take(result, gives_left=True):
                    yield ended
            for ended in self._work.take_refused():
                yield ended
            self._work.check_engine()

    def _begun(self) -> BatchResponse:
        response = self._work.start()
        assert isinstance(response, BatchResponse)  # of an engine
        return response


def _vector_call(stream: ItemStream) -> VectorCall | None:
    """Return the first call of a file whose lines ask for embeddings or scores. Waits for a line of a pipe."""
    prompt = stream.first_prompt() if stream.source.format == "openai" else None
    return prompt.call if isinstance(prompt, VectorPrompt) else None


def _opened(
    stack: ExitStack,
    source: Paths,
    output: Path,
    asked: FileOptions,
    *,
    columns: Collection[str] | None,
) -> tuple[ItemStream, RunOutputs]:
    """Return the input, which `stack` closes, and the output, after checks; `columns` is None for embeddings."""
    own = {os.path.realpath(path) for path in written_by(output, asked)}
    stream = stack.enter_context(closing(ItemStream(source, asked, own)))
    check_places(output, asked, stream.source.paths)
    check_replaceable(asked)
    has_vectors = columns is None
    outputs = RunOutputs(output, stream.source, asked, extra=columns or (), has_vectors=has_vectors)
    return stream, outputs


def _prefix() -> str:
    """Return a beginning of ids in an engine that others use too."""
    return f"{secrets.token_hex(4)}-"


def _digests(
    engine: Engine, settled: RunOptions, vectors: Mapping[str, Any] | None = None
) -> Digests:
    said = json.dumps(engine.fingerprint, sort_keys=True)
    return Digests(settled, said if vectors is None else f"{said}, {_as_text(vectors)}")


def _as_text(vectors: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name}={value!r}" for name, value in sorted(vectors.items())) or "as the model"
    )


def _origin(stream: ItemStream, output: Path, digests: Digests) -> InputIdentity:
    def look() -> list[tuple[str, bytes]]:
        return [(item_key(item), digests(item)) for item in stream.peek()]

    return InputIdentity(stream.source.paths, output, look, is_at_hand=stream.is_at_hand)


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
    return [f"continuing: {n_known:,} items have a record{failed}"] if n_known else []


def _left_over(ledger: Ledger) -> Iterator[str]:
    """Drop or set aside the records of items that are not in the input any more; yield messages."""
    n_removed, n_aside = ledger.settle_unclaimed()
    if n_removed:
        yield f"{n_removed:,} records removed: their items are not in the input any more"
    if n_aside:
        yield (
            f"{n_aside:,} records belong to items that are not in the input any more: they are kept, and come last "
            "when sorted"
        )


def _shown(view: View, work: Work, engine: Engine) -> AbstractContextManager[object]:
    if isinstance(view, SilentView):  # no thread for a view that shows nothing
        return nullcontext()
    return closing(Progress(view, work.counts, engine.stats, engine.stats(), engine.parallel))


def _settings_of(
    engine: Engine, stream: ItemStream, target: RunOutputs, options: RunOptions, asked: FileOptions
) -> dict[str, str]:
    """Return the settings that must be the same for a later run to continue this one, for people."""
    values = ((f.name, getattr(options, f.name)) for f in fields(RunOptions))
    said = [f"{name}={value!r}" for name, value in values if value is not None]
    columns = {}
    if isinstance(target.encoder, RowEncoder):
        layout = target.encoder.layout
        columns["answer columns"] = ", ".join(layout.types)
        columns["kept columns"] = "all" if layout.keeps_all else ", ".join(layout.own) or "none"
    return {
        "input format": stream.source.format,
        OUTPUT_FORMAT: target.format,
        "template": asked.template or "none",
        "system message": asked.system or "none",
        **{
            name.replace("_", " "): found
            for name in MEDIA_COLUMNS.values()
            if (found := getattr(asked, name))
        },
        "rows": _rows(stream, asked),
        **columns,
        **engine.fingerprint,
        "options": ", ".join(said) or "none",
    }


def _for_people(settings: Mapping[str, str], engine: Engine) -> dict[str, str]:
    """Return the settings of a run for its report: with the model's name, and `none` for empty ones."""
    named = {name: value or "none" for name, value in settings.items()}
    if engine.model_name:
        named["model"] = f"{engine.model_name}, {named['model']}"
    return named


def _rows(stream: ItemStream, asked: FileOptions) -> str:
    """Return what rows are, or the `prompt` of requests."""
    if stream.source.columns is None:
        return "prompts as chats" if asked.is_raw is False else "chats"
    return "text to complete" if asked.is_raw else "chats"


def _notes(engine: Engine, stream: ItemStream, asked: FileOptions) -> list[str]:
    """Say where prompts may be meant as chats: a model that was made for these answers text in another way."""
    is_open = asked.is_raw is None and stream.source.format == "cbatch" and stream.is_at_hand
    if not is_open or not engine.model_facts.chat_template:
        return []
    if not any(
        item.prompt is not None and item.prompt.prompt is not None for item in stream.peek()
    ):
        return []
    return [
        'each "prompt" in these lines is completed as text, without the chat template of the model: --chat asks it as '
        "a chat, --raw completes it without this note"
    ]
