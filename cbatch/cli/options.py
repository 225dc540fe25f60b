"""The options that several commands have, declared once, and how their values reach the library."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cbatch.cli.sets import set_options
from cbatch.errors import ConfigError
from cbatch.options import RunOptions

_MODEL = "Model"
_ANSWERS = "Answers"
_SCHEDULE = "Scheduling"
_DEVICES = "Memory and devices"


def option(
    *names: str, help: str, panel: str | None = None, default: str | None = None, **more: Any
) -> Any:
    """Declare an option; how it is called in the environment stands in the root's help, not beside each.

    Args:
        names: "--name" and "-n"; none for the parameter's own.
        help: what the help says of it.
        panel: the box of the help that it is in.
        default: what the help says it is by default, where None stands for something.
        more: for `typer.Option`.
    """
    shown: Any = True if default is None else default
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=shown, show_envvar=False, **more
    )


ModelPath = Annotated[
    Path | None,
    option("--model", "-m", help="A GGUF file.", default="the one that ships inside", panel=_MODEL),
]
Parallel = Annotated[
    int | None,
    option(
        help="Slots: requests that run at once.",
        default="16, or what the memory holds",
        panel=_MODEL,
    ),
]
CtxPerSeq = Annotated[
    int | None,
    option(
        help="Tokens, prompt and answer, that one slot holds.",
        default="2048, or what the model was trained for or the memory holds",
        panel=_MODEL,
    ),
]
NCtx = Annotated[
    int | None, option(help="Tokens of all slots together, instead of --ctx-per-seq.", panel=_MODEL)
]
Kv = Annotated[
    str,
    option(
        help="Memory: auto, partitioned (a part for each slot) or unified (one pool).", panel=_MODEL
    ),
]
CacheTypeK = Annotated[
    str,
    option(
        help="How keys are stored: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl.",
        panel=_MODEL,
    ),
]
CacheTypeV = Annotated[
    str,
    option(
        help="How values are stored; all but f16, bf16, f32 need flash attention.", panel=_MODEL
    ),
]
FlashAttn = Annotated[str, option(help="Flash attention: auto, on or off.", panel=_MODEL)]
MemoryMib = Annotated[
    int | None,
    option(
        help="Most memory for cells, where sizes are not said.",
        default="half of what is free",
        panel=_MODEL,
    ),
]
Policy = Annotated[
    str,
    option(
        help="Which request comes next: fcfs, priority, shortest or round_robin.", panel=_SCHEDULE
    ),
]
Quantum = Annotated[
    int | None, option(help="Tokens of a turn in round_robin.", default="64", panel=_SCHEDULE)
]
AgeingS = Annotated[
    float | None,
    option(
        help="Seconds of waiting that count as a point of priority.", default="10", panel=_SCHEDULE
    ),
]
Admission = Annotated[
    str | None,
    option(
        help="In a unified pool: optimistic, or reserve for the worst case.",
        default="optimistic",
        panel=_SCHEDULE,
    ),
]
MaxQueue = Annotated[
    int | None, option(help="Most requests that wait.", default="any number", panel=_SCHEDULE)
]
WhenFull = Annotated[
    str | None,
    option(help="With --max-queue: wait, or reject items.", default="wait", panel=_SCHEDULE),
]
PrefillBudget = Annotated[
    int | None,
    option(
        help="Most prompt tokens in a step that also decodes.", default="as fits", panel=_SCHEDULE
    ),
]
PrefillChunk = Annotated[
    int | None,
    option(
        help="Most prompt tokens of one request in a step.",
        default="what a step holds",
        panel=_SCHEDULE,
    ),
]
ItlMs = Annotated[
    float | None,
    option(
        help="Milliseconds a step to aim at, instead of --prefill-budget.",
        default="none",
        panel=_SCHEDULE,
    ),
]
SwapMib = Annotated[
    int | None,
    option(
        help="Host memory for cells of requests that lost their slot.",
        default="1024",
        panel=_SCHEDULE,
    ),
]
NoSharePrefixes = Annotated[
    bool,
    option("--no-share-prefixes", help="Compute common beginnings anew.", panel=_SCHEDULE),
]
NBatch = Annotated[
    int | None, option(help="Most tokens in a step.", default="2048", panel=_DEVICES)
]
NUbatch = Annotated[
    int | None, option(help="Most tokens in a run of the graph.", default="512", panel=_DEVICES)
]
CacheMib = Annotated[
    int | None, option(help="Most that --cache-dir may hold.", default="10240", panel=_DEVICES)
]
NoMmap = Annotated[
    bool, option("--no-mmap", help="Read the model instead of mapping it.", panel=_DEVICES)
]
Mlock = Annotated[bool, option("--mlock", help="Keep the weights in memory.", panel=_DEVICES)]
NoOffloadKqv = Annotated[
    bool, option("--no-offload-kqv", help="Keep the cells off the GPU.", panel=_DEVICES)
]
SplitMode = Annotated[
    str | None,
    option(
        help="Over several GPUs: none, layer, row or tensor.",
        default="llama.cpp's: layer",
        panel=_DEVICES,
    ),
]
MainGpu = Annotated[
    int | None, option(help="The GPU of --split-mode none.", default="0", panel=_DEVICES)
]
TensorSplit = Annotated[
    str | None,
    option(
        metavar="SHARES",
        help="Shares of the GPUs, such as 3,1.",
        default="by free memory",
        panel=_DEVICES,
    ),
]
Exact = Annotated[
    bool,
    option(
        "--exact", help="Promise answers that do not depend on company, or refuse.", panel=_MODEL
    ),
]
Threads = Annotated[
    int | None, option(help="Threads to compute in.", default="the cores it may use", panel=_MODEL)
]
GpuLayers = Annotated[
    int | None, option(help="Layers on the GPU.", default="llama.cpp's: all", panel=_MODEL)
]
Adapters = Annotated[
    list[str] | None,
    option(
        "--adapter",
        metavar="[NAME=]FILE",
        help="A LoRA adapter; one alone answers all, of several each line's options name one.",
        panel=_MODEL,
    ),
]
CacheDir = Annotated[
    Path | None,
    option(
        help="Folder of cells that requests keep under a cache_key.",
        default="the user's, or CBATCH_CACHE_DIR",
        panel=_MODEL,
    ),
]
ChatTemplate = Annotated[
    str | None, option(help='"chatml" or Jinja.', default="the model's own", panel=_MODEL)
]
MaxTokens = Annotated[
    int | None,
    option(help="Most tokens of an answer.", default="what the slot holds", panel=_ANSWERS),
]
Temperature = Annotated[
    float | None, option(help="0 is greedy.", default="the model's, else 0.8", panel=_ANSWERS)
]
TopK = Annotated[
    int | None, option(help="0 keeps all.", default="the model's, else 40", panel=_ANSWERS)
]
TopP = Annotated[
    float | None,
    option(
        help="Keep the likeliest with this share.", default="the model's, else 0.95", panel=_ANSWERS
    ),
]
MinP = Annotated[
    float | None,
    option(
        help="Drop what is below this share of the likeliest.",
        default="the model's, else 0.05",
        panel=_ANSWERS,
    ),
]
TimeoutS = Annotated[
    float | None,
    option(
        help="Seconds for each request, from now on.", default="as long as it takes", panel=_ANSWERS
    ),
]
Seed = Annotated[
    int | None, option(help="For answers that repeat.", default="drawn", panel=_ANSWERS)
]
Stop = Annotated[
    list[str] | None, option(help="Text that ends an answer; may be given again.", panel=_ANSWERS)
]
IgnoreEos = Annotated[
    bool, option("--ignore-eos", help="Go on where the model would end.", panel=_ANSWERS)
]
Set = Annotated[
    list[str] | None,
    option(
        "--set",
        metavar="NAME=VALUE",
        help="Any option of a request, such as n=3, or json_schema=@FILE; may be given again.",
        panel=_ANSWERS,
    ),
]


def said(**values: Any) -> dict[str, Any]:
    """Return the values that were given."""
    return {name: value for name, value in values.items() if value is not None}


def named_adapters(given: list[str] | None) -> dict[str, str] | None:
    """Return files by name; a file alone is called as it is without folder and ending."""
    if not given:
        return None
    pairs = [text.partition("=") if "=" in text else (Path(text).stem, "", text) for text in given]
    files = {name: file for name, _, file in pairs}
    if len(files) < len(pairs):
        raise ConfigError(f"two adapters have one name: {', '.join(given)}; give NAME=FILE")
    return files


def name_of(model: Path | None) -> str:
    """Return what to call a model."""
    return "the model that ships inside" if model is None else str(model)


def shares_of(text: str | None) -> list[float] | None:
    """Return the numbers of `3,1`."""
    if text is None:
        return None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"tensor_split must be numbers with commas between, not {text!r}"
        ) from None


def answer_options(
    adapters: dict[str, str] | None,
    *,
    stop: list[str] | None,
    ignore_eos: bool,
    sets: list[str] | None = None,
    **values: Any,
) -> RunOptions:
    """Return the options of the answers panel; an empty list and an absent flag say nothing.

    An adapter that is alone answers all, unless `sets`, each `name=value`, has another.
    """
    given = said(stop=stop or None, ignore_eos=ignore_eos or None, **values)
    given |= set_options(sets or (), given)
    if adapters and len(adapters) == 1:
        given.setdefault("adapter", next(iter(adapters)))
    return RunOptions.of(given)
