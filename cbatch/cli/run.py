"""`cbatch run`: a batch file in, a file of answers out."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import cbatch
from cbatch.cli.demo import demo_prompts, write_shown
from cbatch.cli.lines import STDOUT, check_target, is_pipe, open_target, read_prompts, write_result
from cbatch.cli.main import ExitCode, say
from cbatch.cli.options import (
    Adapters,
    CacheDir,
    CacheTypeK,
    CacheTypeV,
    ChatTemplate,
    CtxPerSeq,
    Exact,
    FlashAttn,
    GpuLayers,
    IgnoreEos,
    Kv,
    MaxTokens,
    MemoryMib,
    MinP,
    ModelPath,
    NCtx,
    Parallel,
    Policy,
    Seed,
    Stop,
    Temperature,
    Threads,
    TimeoutS,
    TopK,
    TopP,
    answer_options,
    name_of,
    named_adapters,
    option,
    said,
)
from cbatch.messages import LookAhead
from cbatch.options import EngineOptions, check_seconds
from cbatch.runtime.progress import choose_view, summary_lines


def run(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="IN.jsonl", help="Requests, one JSON object a line; - is stdin."),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            metavar="OUT.jsonl",
            help="Where answers go, one a line as they complete; - is stdout.",
            default="of --demo: text on stdout",
        ),
    ] = None,
    demo: Annotated[
        bool, option("--demo", help="Ask 64 chats that show what the model inside can do.")
    ] = False,
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
    max_time_s: Annotated[
        float | None,
        option(
            help="Seconds for the whole batch; what is not done then ends as it is.",
            default="as long as it takes",
        ),
    ] = None,
    force: Annotated[bool, option("--force", help="Replace an existing output.")] = False,
    quiet: Annotated[bool, option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Answer every request of a batch file.

    A line: {"id": "a", "messages": [{"role": "user", "content": "Hi"}],
    "options": {"max_tokens": 9}}; instead of messages, prompt (text) or tokens
    (ids); id and options may be left out. A line's options come before those
    given here.

    Without a model at hand: cbatch run --demo

    Example: cbatch run chats.jsonl -m model.gguf -o answers.jsonl --max-tokens 64
    """
    adapters = named_adapters(adapter)
    options = answer_options(
        adapter=None if adapters is None or len(adapters) > 1 else next(iter(adapters)),
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )
    check_seconds("max_time_s", max_time_s)
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
        exact=exact,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        adapters=adapters,
        cache_dir=cache_dir,
        chat_template=chat_template,
    )
    EngineOptions.of(settings)
    _check_call(source, output, demo=demo)
    target = STDOUT if output is None else output
    check_target(target, *filter(None, (source, model)), force=force)
    prompts = demo_prompts() if source is None else read_prompts(source)
    view = choose_view(summary_lines, is_quiet=quiet, has_free_terminal=not is_pipe(target))
    view.say(f"loading {name_of(model)} for {len(prompts)} item{'s' * (len(prompts) != 1)}")
    with (
        cbatch.load(
            model, options=options, look_ahead=look_ahead(prompts, options), **settings
        ) as engine,
        open_target(target, force=force) as file,
    ):
        write = write_shown(prompts) if output is None else write_result
        response = engine.run(prompts, max_time_s=max_time_s, progress=view)
        n_failed = write_all(response, partial(write, file))
    if n_failed:
        say(f'cbatch: {n_failed} of {len(prompts)} items failed: see "error" in their lines')
        raise typer.Exit(ExitCode.SOME_FAILED)


def look_ahead(prompts: Sequence[cbatch.BatchPrompt], options: cbatch.RunOptions) -> LookAhead:
    """Return the prompts of a run with the options that hold for each."""
    return LookAhead(
        [(p, cbatch.RunOptions.of(p.options).over(options)) for p in prompts], is_all=True
    )


def _check_call(source: Path | None, output: Path | None, *, demo: bool) -> None:
    if demo and source is not None:
        raise cbatch.ConfigError(f"--demo brings its own chats: leave out {source}")
    if source is None and not demo:
        raise cbatch.ConfigError("give a batch file, or --demo to see what the model inside can do")
    if output is None and not demo:
        raise cbatch.ConfigError("give --output (-o) a file for the answers, or - for stdout")


def write_all(response: cbatch.BatchResponse, write: Callable[[cbatch.BatchResult], None]) -> int:
    """Write each result as it completes; return how many failed."""
    n_failed = 0
    with closing(response.as_completed()) as results:
        for result in results:
            write(result)
            n_failed += result.error is not None
    return n_failed
