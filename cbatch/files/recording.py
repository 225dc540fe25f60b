"""The report and the trace of a run over a file, where they are asked for."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cbatch.files.recorder import RunRecorder, tee
from cbatch.files.report import write_report
from cbatch.files.trace import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from cbatch.core.stats import StepRecord
    from cbatch.engine import Engine
    from cbatch.files.item import Item
    from cbatch.files.settings import FileOptions
    from cbatch.files.work import OnEnded
    from cbatch.response import BatchResult


@contextmanager
def recorded(
    engine: Engine,
    asked: FileOptions,
    title: str,
    settings: Mapping[str, str],
    on_ended: OnEnded | None,
    say: Callable[[str], object],
) -> Iterator[OnEnded | None]:
    """Record the block as it is asked for, and give it what is to be told of each item that ended.

    What is worth knowing besides goes to `say`.

    Raises:
        ConfigError: the report or the trace cannot be written.
    """
    with ExitStack() as stack:
        recorders: list[Callable[[StepRecord], object]] = []
        if asked.trace is not None:
            recorders.append(stack.enter_context(_traced(asked.trace, say)))
        if asked.report is not None:
            recorder = RunRecorder(engine.parallel)
            recorders.append(recorder)
            stack.callback(write_report, asked.report, recorder, title=title, settings=settings)
            on_ended = _telling(recorder, on_ended)
        if recorders:
            stack.callback(engine.record_steps, None)
            engine.record_steps(tee(*recorders))
        yield on_ended


@contextmanager
def _traced(path: Path, say: Callable[[str], object]) -> Iterator[TraceWriter]:
    """Lend what writes the trace, and tell where it could not write all of it."""
    with TraceWriter(path) as trace:
        yield trace
    if trace.error is not None:
        say(f"{path}: the trace ends early: {trace.error.strerror or trace.error}")


def _telling(recorder: RunRecorder, on_ended: OnEnded | None) -> OnEnded:
    def tell(item: Item, result: BatchResult | None) -> None:
        if result is not None:
            recorder.add_result(result)
        elif item.error is not None:
            recorder.add_error(item.error.code, item.error.message)
        if on_ended is not None:
            on_ended(item, result)

    return tell
