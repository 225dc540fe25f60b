"""Writes the report and the trace of a run over a file, if its options ask for them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cbatch.errors import ConfigError
from cbatch.files.report.page import write_report
from cbatch.files.report.trace import TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from cbatch.engine import Engine
    from cbatch.files.input.item import Item
    from cbatch.files.report.recorder import RunRecorder
    from cbatch.files.settings import FileOptions
    from cbatch.files.work import OnEnded
    from cbatch.response import BatchResult
    from cbatch.runtime.step_record import StepRecord


class Recording:
    """Records a run for its report and its trace.

    A report that cannot be written is an error at the end of the block, after everything else is done; where another
    error ends the block, it is a message.
    """

    def __init__(self, asked: FileOptions, say: Callable[[str], object]) -> None:
        """Record nothing yet; messages for people go to `say`."""
        self._asked, self._say = asked, say
        self._failure: ConfigError | None = None
        self._trace: TraceWriter | None = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._trace is not None and self._trace.keeps_older:
            self._say(f"{self._asked.trace}: the earlier trace stays, because nothing was computed")
        if self._trace is not None and self._trace.error is not None:
            why = self._trace.error.strerror or self._trace.error
            self._say(f"{self._asked.trace}: the trace ends early: {why}")
        if self._failure is None:
            return
        if error is None:
            raise self._failure
        self._say(str(self._failure))

    @contextmanager
    def of(
        self,
        engine: Engine,
        title: str,
        settings: Mapping[str, str],
        on_ended: OnEnded | None,
        n_before: Callable[[], int],
    ) -> Iterator[OnEnded]:
        """Record an inner block, and lend the function for items that ended; `n_before` tells how many ran earlier.

        An earlier report and trace stay where no item runs.

        Raises:
            ConfigError: no trace can be written.
        """
        if self._asked.report is None and self._asked.trace is None:
            yield _telling(None, on_ended)
            return
        from cbatch.files.report.recorder import RunRecorder, tee  # numpy is slow to import

        with ExitStack() as stack:
            recorders: list[Callable[[StepRecord], object]] = []
            if self._asked.trace is not None:
                self._trace = stack.enter_context(TraceWriter(self._asked.trace))
                recorders.append(self._trace)
            recorder = None
            if self._asked.report is not None:
                recorder = RunRecorder(engine.parallel)
                recorders.append(recorder)
                stack.callback(self._write, self._asked.report, recorder, title, settings, n_before)
            stack.callback(engine.record_steps, None)
            engine.record_steps(tee(*recorders))
            yield _telling(recorder, on_ended)

    def _write(
        self,
        path: Path,
        recorder: RunRecorder,
        title: str,
        settings: Mapping[str, str],
        n_before: Callable[[], int],
    ) -> None:
        results = recorder.results
        results.n_before = n_before()
        if results.n_before and not results.n_done and path.is_file() and path.stat().st_size:
            self._say(f"{path}: the earlier report stays, because no item ran")
            return
        try:
            write_report(path, recorder, title=title, settings=settings)
        except ConfigError as error:
            self._failure = error


def _telling(recorder: RunRecorder | None, on_ended: OnEnded | None) -> OnEnded:
    def tell(item: Item, result: BatchResult | None) -> None:
        if recorder is not None and result is not None:
            recorder.add_result(result)
        elif recorder is not None and item.error is not None:
            recorder.add_error(item.error.code, item.error.message)
        if on_ended is not None:
            on_ended(item, result)

    return tell
