"""`cbatch run`: a batch file in, a file of answers out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

import cbatch
from cbatch.cli.lines import check_target, is_pipe, open_target, read_prompts, write_result
from cbatch.cli.main import ExitCode, say
from cbatch.cli.progress import Progress, View, choose_view
from cbatch.options import EngineOptions, RunOptions

_MODEL = "Model"
_EVERY = "Every request, where its line says nothing"


def run(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="Requests, one JSON object a line; - is stdin."),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.jsonl",
            help="Where answers go, one a line as they complete; - is stdout.",
        ),
    ],
    model: Annotated[
        Path,
        typer.Option("--model", "-m", help="A GGUF file.", rich_help_panel=_MODEL),
    ],
    parallel: Annotated[
        int, typer.Option(help="Slots: requests that run at once.", rich_help_panel=_MODEL)
    ] = EngineOptions.parallel,
    ctx_per_seq: Annotated[
        int | None,
        typer.Option(
            help="Tokens, prompt and answer, that one slot holds (2048, or what the model was trained for).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            help="Tokens of all slots together, instead of --ctx-per-seq.", rich_help_panel=_MODEL
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Promise answers that do not depend on company, or refuse.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads (the cores it may use).", rich_help_panel=_MODEL),
    ] = None,
    gpu_layers: Annotated[
        int | None,
        typer.Option(help="Layers on the GPU (llama.cpp's default: all).", rich_help_panel=_MODEL),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help='"chatml" or Jinja, instead of the model\'s own.', rich_help_panel=_MODEL
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", rich_help_panel=_EVERY)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", rich_help_panel=_EVERY)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all.", rich_help_panel=_EVERY)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest with this share.", rich_help_panel=_EVERY),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop what is below this share of the likeliest.", rich_help_panel=_EVERY
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="For answers that repeat.", rich_help_panel=_EVERY)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends an answer; may be given again.", rich_help_panel=_EVERY),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past the model's end.", rich_help_panel=_EVERY),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Answer every request of a batch file.

    A line: {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "options": {"max_tokens": 9}};
    instead of messages, prompt (text) or tokens (ids); id and options may be left out.
    """
    options = RunOptions.of(
        _said(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or None,
            ignore_eos=ignore_eos or None,
        )
    )
    settings = _said(
        parallel=parallel,
        ctx_per_seq=ctx_per_seq,
        n_ctx=n_ctx,
        exact=exact,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        chat_template=chat_template,
    )
    EngineOptions.of(settings)
    check_target(output, source, force=force)
    prompts = read_prompts(source)
    view = choose_view(is_quiet=quiet, has_free_terminal=not is_pipe(output))
    view.say(f"loading {model} for {len(prompts)} items")
    with (
        cbatch.load(model, options=options, **settings) as engine,
        open_target(output, force=force) as file,
    ):
        n_failed = answer(engine, prompts, file, view)
    if n_failed:
        say(f'cbatch: {n_failed} of {len(prompts)} items failed: see "error" in their lines')
        raise typer.Exit(ExitCode.SOME_FAILED)


def answer(
    engine: cbatch.Engine, prompts: Sequence[cbatch.BatchPrompt], file: BinaryIO, view: View
) -> int:
    """Run a batch and write each result as it completes; return how many failed."""
    with Progress(engine, len(prompts), view) as progress:
        for result in engine.run(prompts).as_completed():
            write_result(file, result)
            progress.count(has_failed=result.error is not None)
    return progress.n_failed


def _said(**values: Any) -> dict[str, Any]:
    """Return the values that were given."""
    return {name: value for name, value in values.items() if value is not None}
