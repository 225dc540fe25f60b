"""`cbatch run`: batch files in, a file of records out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import cbatch
from cbatch.cli.demo import run_demo
from cbatch.cli.events import EventView, note_at_once
from cbatch.cli.main import ExitCode, leave_stdout
from cbatch.cli.options import (
    Adapters,
    Admission,
    AgeingS,
    CacheDir,
    CacheMib,
    CacheTypeK,
    CacheTypeV,
    ChatTemplate,
    CtxPerSeq,
    Exact,
    FlashAttn,
    GpuLayers,
    IgnoreEos,
    ItlMs,
    Kv,
    MainGpu,
    MaxQueue,
    MaxTokens,
    MemoryMib,
    MinP,
    Mlock,
    ModelPath,
    NBatch,
    NCtx,
    NoMmap,
    NoOffloadKqv,
    NoSharePrefixes,
    NUbatch,
    Parallel,
    Policy,
    PrefillBudget,
    PrefillChunk,
    Quantum,
    Seed,
    Set,
    SplitMode,
    Stop,
    SwapMib,
    Temperature,
    TensorSplit,
    Threads,
    TimeoutS,
    TopK,
    TopP,
    WhenFull,
    answer_options,
    named_adapters,
    option,
    said,
    shares_of,
)
from cbatch.cli.words import say
from cbatch.engine_options import EngineOptions
from cbatch.files.check import CheckSummary, check_file
from cbatch.files.estimate import Estimate, estimate_file
from cbatch.files.file_run import run_file
from cbatch.files.places import STDOUT, is_dash
from cbatch.files.stop import Interrupted, Stopper
from cbatch.files.summary import RunSummary
from cbatch.progress import View, choose_view, summary_lines

_FILES = "Files"


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
            help="Where records go, as items end; - is stdout. A run that was stopped goes on there.",
            default="of --demo: text on stdout",
        ),
    ] = None,
    demo: Annotated[
        bool, option("--demo", help="Ask 64 chats that show what the model inside can do.")
    ] = False,
    errors: Annotated[
        Path | None,
        option(
            help="A file of their own for items that fail.", default="in the output", panel=_FILES
        ),
    ] = None,
    format: Annotated[
        str,
        option(
            help="Of the input: auto, openai, cbatch, jsonl, csv, tsv, text, parquet or arrow.",
            panel=_FILES,
        ),
    ] = "auto",
    output_format: Annotated[
        str | None,
        option(help="Of the output.", default="as its name says, else as the input", panel=_FILES),
    ] = None,
    template: Annotated[
        str | None,
        option(help="The prompt of a row: 'Classify: {review}'.", default="none", panel=_FILES),
    ] = None,
    system: Annotated[
        str | None,
        option(help="A system message for each row, a template too.", default="none", panel=_FILES),
    ] = None,
    raw: Annotated[
        bool, option("--raw", help="Rows are text to complete, not chats.", panel=_FILES)
    ] = False,
    limit: Annotated[
        int | None, option(help="Most items to run.", default="all", panel=_FILES)
    ] = None,
    shuffle: Annotated[
        bool, option("--shuffle", help="Run the items in random order.", panel=_FILES)
    ] = False,
    strict: Annotated[
        bool,
        option("--strict", help="Check the whole input first, stop at a bad item.", panel=_FILES),
    ] = False,
    check: Annotated[
        bool,
        option("--check", help="Check the input and count its tokens; run nothing.", panel=_FILES),
    ] = False,
    dry_run: Annotated[
        bool,
        option("--dry-run", help="Run a sample, say how long all would take.", panel=_FILES),
    ] = False,
    retry_errors: Annotated[
        bool, option("--retry-errors", help="Run again what has failed before.", panel=_FILES)
    ] = False,
    adopt: Annotated[
        bool,
        option(
            "--adopt",
            help="Make a lost manifest again, of the JSON lines in the output, and go on.",
            panel=_FILES,
        ),
    ] = False,
    force: Annotated[
        bool,
        option(
            "--force",
            help="Go on though settings differ, or replace a file that is not cbatch's.",
            panel=_FILES,
        ),
    ] = False,
    report: Annotated[
        Path | None,
        option(metavar="HTML", help="A page on the run.", default="none", panel=_FILES),
    ] = None,
    trace: Annotated[
        Path | None,
        option(
            metavar="JSON", help="Its steps, for Perfetto or Chrome.", default="none", panel=_FILES
        ),
    ] = None,
    window: Annotated[
        int | None,
        option(help="Items read ahead to be put in order.", default="8 a slot", panel=_FILES),
    ] = None,
    model: ModelPath = None,
    parallel: Parallel = None,
    ctx_per_seq: CtxPerSeq = None,
    n_ctx: NCtx = None,
    kv: Kv = EngineOptions.kv,
    cache_type_k: CacheTypeK = EngineOptions.cache_type_k,
    cache_type_v: CacheTypeV = EngineOptions.cache_type_v,
    flash_attn: FlashAttn = EngineOptions.flash_attn,
    memory_mib: MemoryMib = None,
    policy: Policy = EngineOptions.policy,
    quantum: Quantum = None,
    ageing_s: AgeingS = None,
    admission: Admission = None,
    max_queue: MaxQueue = None,
    when_full: WhenFull = None,
    prefill_budget: PrefillBudget = None,
    prefill_chunk: PrefillChunk = None,
    itl_ms: ItlMs = None,
    swap_mib: SwapMib = None,
    no_share_prefixes: NoSharePrefixes = False,
    n_batch: NBatch = None,
    n_ubatch: NUbatch = None,
    cache_mib: CacheMib = None,
    no_mmap: NoMmap = False,
    mlock: Mlock = False,
    no_offload_kqv: NoOffloadKqv = False,
    split_mode: SplitMode = None,
    main_gpu: MainGpu = None,
    tensor_split: TensorSplit = None,
    exact: Exact = False,
    threads: Threads = None,
    gpu_layers: GpuLayers = None,
    adapter: Adapters = None,
    cache_dir: CacheDir = None,
    chat_template: ChatTemplate = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    timeout_s: TimeoutS = None,
    set: Set = None,
    max_time_s: Annotated[
        float | None,
        option(
            help="Stop after so many seconds; what is not done then is left for the next run.",
            default="as long as it takes",
        ),
    ] = None,
    json: Annotated[
        bool, option("--json", help="Progress and summary as JSON lines, on stderr.")
    ] = False,
    quiet: Annotated[bool, option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Answer every item of batch files.

    OpenAI batch lines, or cbatch's: {"id": "a", "messages": [{"role": "user",
    "content": "Hi"}], "options": {"max_tokens": 9}}; instead of messages, prompt
    (text) or tokens (ids); id and options may be left out. Rows of CSV, TSV,
    Parquet or JSON, and lines of text, by a template. An item's options come
    before those given here.

    Stopped by Ctrl-C, a crash or a full disk, the same command goes on where it
    was. Ctrl-C once finishes what runs, twice stops now.

    Without a model at hand: cbatch run --demo

    Example: cbatch run chats.jsonl -m model.gguf -o answers.jsonl --max-tokens 64
    """
    adapters = named_adapters(adapter)
    options = answer_options(
        adapters,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
        sets=set,
    )
    settings = said(
        parallel=parallel,
        ctx_per_seq=ctx_per_seq,
        n_ctx=n_ctx,
        kv=kv,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attn=flash_attn,
        memory_mib=memory_mib,
        policy=policy,
        quantum=quantum,
        ageing_s=ageing_s,
        admission=admission,
        max_queue=max_queue,
        when_full=when_full,
        prefill_budget=prefill_budget,
        prefill_chunk=prefill_chunk,
        itl_ms=itl_ms,
        swap_mib=swap_mib,
        share_prefixes=not no_share_prefixes,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        cache_mib=cache_mib,
        use_mmap=not no_mmap,
        use_mlock=mlock,
        offload_kqv=not no_offload_kqv,
        split_mode=split_mode,
        main_gpu=main_gpu,
        tensor_split=shares_of(tensor_split),
        exact=exact,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        adapters=adapters,
        cache_dir=cache_dir,
        chat_template=chat_template,
    )
    EngineOptions.of(settings)
    looks_only = check or dry_run
    _check_call(source, output, demo=demo, needs_output=not looks_only)
    target = STDOUT if output is None else output
    view = _view(target, is_quiet=quiet, is_json=json)
    of_files = {
        "errors": errors,
        "format": format,
        "output_format": output_format,
        "template": template,
        "system": system,
        "is_raw": raw,
        "limit": limit,
        "shuffle": shuffle,
        "strict": strict,
        "retry_errors": retry_errors,
        "adopt": adopt,
        "window": window,
        "report": report,
        "trace": trace,
        "max_time_s": max_time_s,
    }
    if demo:
        _check_demo({**of_files, "check": check, "dry_run": dry_run})
        with _ending_with_the_reader(view):
            run_demo(target, view, model, options, settings, is_shown=output is None, force=force)
        return
    call = {"model": model, "options": options, "force": force, **of_files, **settings}
    if looks_only:
        _look(source or [], view, is_dry_run=dry_run, call=call)
    else:
        _answer(source or [], target, view, call)


def _answer(source: list[str], target: Path, view: View, call: dict[str, Any]) -> None:
    """Run the items, and say how it ended."""
    stopper = Stopper(note_at_once if isinstance(view, EventView) else None, takes_all=True)
    try:
        with _ending_with_the_reader(view):
            summary = run_file(source, target, progress=view, stop=stopper, **call)
    except Interrupted as error:
        _tell(view, f"cbatch: {error.summary.resume_hint}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    _end(summary, view)


@contextmanager
def _ending_with_the_reader(view: View) -> Iterator[None]:
    """End with a word where the reader of stdout leaves; a named pipe that is left is told as any other file."""
    try:
        yield
    except BrokenPipeError as error:
        if error.filename:
            raise
        leave_stdout()
        _tell(
            view,
            "cbatch: the reader of stdout has left, so the run ends here; -o FILE keeps what is done",
        )
        raise typer.Exit(ExitCode.DONE) from None


def _look(source: list[str], view: View, *, is_dry_run: bool, call: dict[str, Any]) -> None:
    """Say what is in the input, or what a run would take; no record is written."""
    if is_dry_run:
        _say_all(view, "estimate", estimate_file(source, **call))
        return
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
    """Say how it ended, which --quiet does not keep back; among events as one of them."""
    (view.say if isinstance(view, EventView) else say)(line)


def _end(summary: RunSummary, view: View) -> None:
    if summary.resume_hint:
        _tell(view, f"cbatch: {summary.resume_hint}")
    if summary.n_errors:
        n, n_all = summary.n_errors, summary.n_items
        _tell(view, f'cbatch: {n} of {n_all} items failed: see "error" in their records')
        raise typer.Exit(ExitCode.SOME_FAILED)


def _view(target: Path, *, is_quiet: bool, is_json: bool) -> View:
    if is_json:
        return EventView()
    return choose_view(summary_lines, is_quiet=is_quiet, has_free_terminal=not is_dash(target))


def _check_demo(of_files: dict[str, Any]) -> None:
    """Refuse what is for files: --demo would take no notice of it."""
    for name, value in of_files.items():
        if value not in (None, False, "auto"):
            option = name.removeprefix("is_").replace("_", "-")
            raise cbatch.ConfigError(f"--demo brings its own chats: leave out --{option}")


def _check_call(
    source: list[str] | None, output: Path | None, *, demo: bool, needs_output: bool
) -> None:
    if demo and source:
        raise cbatch.ConfigError(f"--demo brings its own chats: leave out {source[0]}")
    if not source and not demo:
        raise cbatch.ConfigError("give a batch file, or --demo to see what the model inside can do")
    if output is None and not demo and needs_output:
        raise cbatch.ConfigError("give --output (-o) a file for the answers, or - for stdout")
