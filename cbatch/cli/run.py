"""`cbatch run`: batch files in, a file of records out."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import cbatch
from cbatch.cli.demo import run_demo
from cbatch.cli.main import ExitCode, leave_stdout
from cbatch.cli.option_table import FILES, NAMES, RUN, Given, names_in, option, takes
from cbatch.cli.terminal import busy, note_at_once, say, tell
from cbatch.files.file_run import run_file
from cbatch.files.outcome import Interrupted, RunSummary, Stopper
from cbatch.files.output.run_paths import check_places
from cbatch.files.places import STDOUT, check_apart, is_dash
from cbatch.files.preview import SAMPLE_S, CheckSummary, Estimate, check_file, estimate_file
from cbatch.files.settings import FileOptions
from cbatch.progress import (
    PLAIN_INTERVAL_S,
    BatchSnapshot,
    LiveView,
    PlainView,
    View,
    choose_view,
    summary_lines,
)

_FOR_DEMO = ("demo", "json", "quiet", "force")
_NOT_FOR_DEMO = names_in(RUN, FILES, without=_FOR_DEMO)


@takes(*NAMES)
def run(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IN...", help="Batch files or patterns, all of one format; - is stdin."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            metavar="OUT",
            help="The file for the answers; - is stdout. A run that was stopped continues there.",
            default="with --demo: text on stdout",
        ),
    ] = None,
    given: Given,
) -> None:
    """Answer every item of batch files.

    Items are OpenAI's batch lines, or cbatch's: {"id": "a", "messages": [{"role":
    "user", "content": "Hi"}], "options": {"max_tokens": 9}}. Instead of messages
    they may have a prompt (text to complete, with --chat a question) or tokens
    (ids); id and options are optional. Rows of CSV, TSV, Parquet or JSON need
    --template, or a column prompt, text or messages; in a text file, each line is
    a prompt. An item's options override those given here.

    After Ctrl-C, a crash or a full disk, the same command continues the run.
    The first Ctrl-C finishes the running items, a second one stops at once.

    Without a model: cbatch run --demo

    Example: cbatch run chats.jsonl -m model.gguf -o answers.jsonl --max-tokens 64
    """
    options, settings = given.run_options(), given.engine_settings()
    is_dry = given["check"] or given["dry_run"]
    _check_call(source, output, demo=given["demo"], needs_output=not is_dry)
    target = STDOUT if output is None else output
    view = view_for(target, is_quiet=given["quiet"], is_json=given["json"])
    if given["demo"]:
        _check_demo(given)
        check_apart(target, given.files())
        with ending_with_the_reader(view):
            run_demo(
                target,
                view,
                given["model"],
                options,
                settings,
                is_shown=output is None,
                force=given["force"],
            )
        return
    files = given.settings(RUN, FILES)
    call = {"model": given["model"], "options": options, **files, **settings}
    if given["ray"]:
        _answer_on_ray(source or [], target, view, given["ray"], is_dry=is_dry, call=call)
    elif is_dry:
        _look(source or [], view, is_estimate=given["dry_run"], call=call)
    else:
        check_places(target, FileOptions(**files), given.files())
        finish_run(source or [], target, view, call)


def finish_run(
    source: list[str],
    target: Path,
    view: View,
    call: dict[str, Any],
    runs: Callable[..., RunSummary] = run_file,
) -> None:
    """Run the items and report the end."""
    stopper = Stopper(note_at_once if isinstance(view, EventView) else None, takes_all=True)
    try:
        with ending_with_the_reader(view):
            summary = runs(source, target, progress=view, stop=stopper, **call)
    except Interrupted as error:
        _tell(view, f"cbatch: {error.summary.resume_hint}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    end_run(summary, view)


def _answer_on_ray(
    source: list[str], target: Path, view: View, address: str, *, is_dry: bool, call: dict[str, Any]
) -> None:
    from cbatch.integrations.ray_run import run_on_ray  # Ray is slow to import

    if is_dry:
        raise cbatch.ConfigError("--check and --dry-run have no effect with --ray: leave them out")
    if is_dash(target):
        raise cbatch.ConfigError("--ray writes a folder of files: give --output (-o) a folder")
    try:
        summary = run_on_ray(source, _url_or_path(target), address=address, view=view, **call)
    except Interrupted as error:
        _tell(view, f"cbatch: {error.summary.resume_hint}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    view.say(
        f"items   {summary.n_done + summary.n_before} of {summary.n_items}, {summary.n_failed} failed\n"
        f"in      {summary.prompt_tokens:,} tokens\n"
        f"out     {summary.output_tokens:,} tokens\n"
        f"time    {summary.elapsed_s:.2f} s"
    )
    end_run(summary, view)


def _url_or_path(path: Path) -> str:
    """Return a path as text, and a URL, of which a path has made `s3:/bucket`, as it was."""
    return re.sub(r"^([a-z][a-z0-9+.-]+):/(?!/)", r"\1://", str(path))


@contextmanager
def ending_with_the_reader(view: View) -> Iterator[None]:
    """End with a message if the reader of stdout leaves; errors of named pipes are reported as those of files."""
    try:
        yield
    except BrokenPipeError as error:
        if error.filename:
            raise
        leave_stdout()
        _tell(
            view,
            "cbatch: the run ends, because stdout was closed; with -o FILE finished answers are kept",
        )
        raise typer.Exit(ExitCode.DONE) from None


def _look(source: list[str], view: View, *, is_estimate: bool, call: dict[str, Any]) -> None:
    is_shown = isinstance(view, PlainView | LiveView)
    if is_estimate:
        doing = f"loading the model and computing a sample for at most {SAMPLE_S:g} s"
        with busy(doing) if is_shown else nullcontext():
            estimate = estimate_file(source, **call)
        _say_all(view, "estimate", estimate)
        return
    with busy("loading the model and counting tokens") if is_shown else nullcontext():
        found = check_file(source, **call)
    _say_all(view, "check", found)
    if found.n_errors:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _say_all(view: View, kind: str, found: CheckSummary | Estimate) -> None:
    if isinstance(view, EventView):
        view.tell(kind, found)
    else:
        say("\n".join(found.lines()))


def _tell(view: View, line: str) -> None:
    """Print how the run ended, also with --quiet; with --json as an event."""
    (view.say if isinstance(view, EventView) else say)(line)


def end_run(summary: RunSummary, view: View) -> None:
    """Tell what is left to do, and which items failed."""
    if summary.resume_hint:
        _tell(view, f"cbatch: {summary.resume_hint}")
    if summary.n_errors:
        again = "; --retry-errors runs those again" if summary.n_failed_before else ""
        _tell(view, f"cbatch: {_in_flags(summary.failures)}{again}")
        raise typer.Exit(ExitCode.SOME_FAILED)


def _in_flags(failures: str) -> str:
    """Return a summary in which the error of a prompt that is too long names flags."""
    if "one slot's window holds" not in failures:
        return failures
    for name, flag in _FLAGS.items():
        failures = re.sub(rf"\b{name}\b", flag, failures)
    return failures


_FLAGS = {
    "ctx_per_seq": "--ctx-per-seq",
    "n_ctx": "--n-ctx",
    "set n_discard": "give --set n_discard=N",
    "lower n_keep": "lower --set n_keep",
    "lower max_tokens": "lower --max-tokens",
    "leave strict_max_tokens out": "leave --set strict_max_tokens out",
}
"""What the error of a prompt that is too long names, as flags."""


def view_for(target: Path, *, is_quiet: bool, is_json: bool) -> View:
    """Return what shows the progress of a run."""
    if is_json:
        return EventView()
    return choose_view(summary_lines, is_quiet=is_quiet, has_free_terminal=not is_dash(target))


def _check_demo(given: Given) -> None:
    """Refuse options for files: --demo would ignore them."""
    for name in _NOT_FOR_DEMO:
        if given[name] not in (None, False, "auto"):
            flag = name.replace("_", "-")
            raise cbatch.ConfigError(f"--demo brings its own chats: leave out --{flag}")


def _check_call(
    source: list[str] | None, output: Path | None, *, demo: bool, needs_output: bool
) -> None:
    if demo and source:
        raise cbatch.ConfigError(f"--demo brings its own chats: leave out {source[0]}")
    if not source and not demo:
        raise cbatch.ConfigError(
            "give a batch file, or --demo to see what the shipped model can do"
        )
    if output is None and not demo and needs_output:
        raise cbatch.ConfigError("give --output (-o) a file for the answers, or - for stdout")


# ---- progress for programs ----


class EventView:
    """A progress view that prints JSON objects, one a line, with their kind under `event`."""

    interval_s = PLAIN_INTERVAL_S

    def say(self, line: str) -> None:
        """Print a note."""
        tell("note", text=line)

    def tell(self, kind: str, found: Any) -> None:
        """Print the values of a dataclass."""
        tell(kind, **{f.name: getattr(found, f.name) for f in fields(found)})

    def show(self, snapshot: BatchSnapshot) -> None:
        """Print the progress."""
        tell("progress", **as_json(snapshot))

    def finish(self, snapshot: BatchSnapshot) -> None:
        """Print the summary."""
        tell("summary", **as_json(snapshot))


def as_json(s: BatchSnapshot) -> dict[str, Any]:
    """Return the progress of a run as JSON values."""
    counts = s.counts
    return {
        "n_total": counts.n_total,
        "n_about": counts.n_about,
        "n_done": counts.n_done,
        "n_before": counts.n_before,
        "n_failed": counts.n_failed,
        "n_running": s.n_running,
        "n_waiting": s.n_waiting,
        "n_slots": s.n_slots,
        "prompt_tokens": s.n_prompt_tokens,
        "cached_tokens": s.n_cached_tokens,
        "output_tokens": s.n_output_tokens,
        "elapsed_s": round(s.elapsed_s, 3),
        "ending": counts.ending,
        "left_s": None if s.left_s is None else round(s.left_s, 1),
    }
