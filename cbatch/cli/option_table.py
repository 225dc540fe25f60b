"""The options of the commands, each declared once: its name, type and help, and the setting that its value becomes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from operator import not_
from pathlib import Path
from typing import Any

import typer

from cbatch.cli.sets import set_options
from cbatch.engine_options import EngineOptions
from cbatch.errors import ConfigError
from cbatch.options import RunOptions

FILES = "Files"
MODEL = "Model"
SCHEDULING = "Scheduling"
DEVICES = "Memory and devices"
ANSWERS = "Answers"


def option(
    *names: Any, help: str, panel: str | None = None, default: str | None = None, **more: Any
) -> Any:
    """Declare an option for typer; `default` is what the help says where None stands for something.

    The root's help tells how its environment variable is called.
    """
    shown: Any = True if default is None else default
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=shown, show_envvar=False, **more
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One option that a command takes by its name; a list is an option that may be given again.

    Args:
        panel: the box of the help that it is in, which also decides where its value goes: `FILES` to `run_file`,
            `ANSWERS` to `RunOptions`, the others to `EngineOptions`.
        shown: the default as the help says it, where None stands for something.
        names: "--name" and "-n" where they do not follow from `name`.
        metavar: what the help calls the value.
        setting: the name of the setting where it is not `name`; empty for what only the command uses.
        read: makes the setting's value of what was given.
    """

    panel: str
    name: str
    type: Any
    help: str
    shown: str | None = None
    default: Any = None
    names: tuple[str, ...] = ()
    metavar: str | None = None
    setting: str | None = None
    read: Callable[[Any], Any] = lambda value: value

    @property
    def initial(self) -> Any:
        """What the command gets where the option was not given."""
        return False if self.type is bool else self.default

    def parameter(self) -> inspect.Parameter:
        """Return the parameter by which typer knows the option."""
        is_flag = self.type is bool
        names = self.names or ((f"--{self.name.replace('_', '-')}",) if is_flag else ())
        kind = self.type if self.initial is not None else self.type | None
        info = option(
            self.initial,
            *names,
            help=self.help,
            panel=self.panel,
            default=self.shown,
            metavar=self.metavar,
        )
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind
        )


def named_adapters(given: list[str] | None) -> dict[str, str] | None:
    """Return files by name; a file without a name is called as it is without folder and ending."""
    if not given:
        return None
    pairs = [text.partition("=") if "=" in text else (Path(text).stem, "", text) for text in given]
    files = {name: file for name, _, file in pairs}
    if len(files) < len(pairs):
        raise ConfigError(f"two adapters have one name: {', '.join(given)}; give NAME=FILE")
    return files


def shares_of(text: str | None) -> list[float] | None:
    """Return the numbers of `3,1`."""
    if text is None:
        return None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"tensor_split must be numbers separated by commas, such as 3,1, not {text!r}"
        ) from None


def _or_none(value: Any) -> Any:
    """Return None for an absent flag and for an empty list: they say nothing."""
    return value or None


_file = partial(Option, FILES)
_model = partial(Option, MODEL)
_schedule = partial(Option, SCHEDULING)
_device = partial(Option, DEVICES)
_answer = partial(Option, ANSWERS)

OPTIONS = (
    _file("errors", Path, "A file of their own for items that fail.", "in the output"),
    _file(
        "format",
        str,
        "Of the input: auto, openai, cbatch, jsonl, csv, tsv, text, parquet or arrow.",
        default="auto",
    ),
    _file("output_format", str, "Of the output.", "as its name says, else as the input"),
    _file("template", str, "The prompt of a row: 'Classify: {review}'.", "none"),
    _file("system", str, "A system message for each row, a template too.", "none"),
    _file("raw", bool, "Rows are text to complete, not chats.", setting="is_raw"),
    _file("limit", int, "Most items to run.", "all"),
    _file("shuffle", bool, "Run the items in random order."),
    _file("strict", bool, "Check the whole input first, stop at a bad item."),
    _file("check", bool, "Check the input and count its tokens; run nothing.", setting=""),
    _file("dry_run", bool, "Run a sample, say how long all would take.", setting=""),
    _file("retry_errors", bool, "Run again what has failed before."),
    _file("adopt", bool, "Make a lost manifest again, of the JSON lines in the output, and go on."),
    _file(
        "force",
        bool,
        "Go on though settings differ, or replace a file that is not cbatch's.",
        setting="",
    ),
    _file("report", Path, "A page on the run.", "none", metavar="HTML"),
    _file("trace", Path, "Its steps, for Perfetto or Chrome.", "none", metavar="JSON"),
    _file("window", int, "Items read ahead to be put in order.", "8 a slot"),
    _model(
        "model",
        Path,
        "A GGUF file.",
        "the one that ships inside",
        names=("--model", "-m"),
        setting="",
    ),
    _model("parallel", int, "Slots: requests that run at once.", "16, or what the memory holds"),
    _model(
        "ctx_per_seq",
        int,
        "Tokens, prompt and answer, that one slot holds.",
        "2048, or what the model was trained for or the memory holds",
    ),
    _model("n_ctx", int, "Tokens of all slots together, instead of --ctx-per-seq."),
    _model(
        "kv",
        str,
        "Memory: auto, partitioned (a part for each slot) or unified (one pool).",
        default=EngineOptions.kv,
    ),
    _model(
        "cache_type_k",
        str,
        "How keys are stored: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl.",
        default=EngineOptions.cache_type_k,
    ),
    _model(
        "cache_type_v",
        str,
        "How values are stored; all but f16, bf16, f32 need flash attention.",
        default=EngineOptions.cache_type_v,
    ),
    _model(
        "flash_attn", str, "Flash attention: auto, on or off.", default=EngineOptions.flash_attn
    ),
    _model(
        "memory_mib",
        int,
        "Most memory for cells, where sizes are not said.",
        "half of what is free",
    ),
    _schedule(
        "policy",
        str,
        "Which request comes next: fcfs, priority, shortest or round_robin.",
        default=EngineOptions.policy,
    ),
    _schedule("quantum", int, "Tokens of a turn in round_robin.", "64"),
    _schedule("ageing_s", float, "Seconds of waiting that count as a point of priority.", "10"),
    _schedule(
        "admission",
        str,
        "In a unified pool: optimistic, or reserve for the worst case.",
        "optimistic",
    ),
    _schedule("max_queue", int, "Most requests that wait.", "any number"),
    _schedule("when_full", str, "With --max-queue: wait, or reject items.", "wait"),
    _schedule("prefill_budget", int, "Most prompt tokens in a step that also decodes.", "as fits"),
    _schedule(
        "prefill_chunk", int, "Most prompt tokens of one request in a step.", "what a step holds"
    ),
    _schedule(
        "itl_ms", float, "Milliseconds a step to aim at, instead of --prefill-budget.", "none"
    ),
    _schedule("swap_mib", int, "Host memory for cells of requests that lost their slot.", "1024"),
    _schedule(
        "no_share_prefixes",
        bool,
        "Compute common beginnings anew.",
        setting="share_prefixes",
        read=not_,
    ),
    _device("n_batch", int, "Most tokens in a step.", "2048"),
    _device("n_ubatch", int, "Most tokens in a run of the graph.", "512"),
    _device("cache_mib", int, "Most that --cache-dir may hold.", "10240"),
    _device(
        "no_mmap", bool, "Read the model instead of mapping it.", setting="use_mmap", read=not_
    ),
    _device("mlock", bool, "Keep the weights in memory.", setting="use_mlock"),
    _device(
        "no_offload_kqv", bool, "Keep the cells off the GPU.", setting="offload_kqv", read=not_
    ),
    _device(
        "split_mode", str, "Over several GPUs: none, layer, row or tensor.", "llama.cpp's: layer"
    ),
    _device("main_gpu", int, "The GPU of --split-mode none.", "0"),
    _device(
        "tensor_split",
        str,
        "Shares of the GPUs, such as 3,1.",
        "by free memory",
        metavar="SHARES",
        read=shares_of,
    ),
    _model("exact", bool, "Promise answers that do not depend on company, or refuse."),
    _model("threads", int, "Threads to compute in.", "the cores it may use", setting="n_threads"),
    _model("gpu_layers", int, "Layers on the GPU.", "llama.cpp's: all", setting="n_gpu_layers"),
    _model(
        "adapter",
        list[str],
        "A LoRA adapter; one alone answers all, of several each line's options name one.",
        names=("--adapter",),
        metavar="[NAME=]FILE",
        setting="adapters",
        read=named_adapters,
    ),
    _model(
        "cache_dir",
        Path,
        "Folder of cells that requests keep under a cache_key.",
        "the user's, or CBATCH_CACHE_DIR",
    ),
    _model("chat_template", str, '"chatml" or Jinja.', "the model's own"),
    _answer("max_tokens", int, "Most tokens of an answer.", "what the slot holds"),
    _answer("temperature", float, "0 is greedy.", "the model's, else 0.8"),
    _answer("top_k", int, "0 keeps all.", "the model's, else 40"),
    _answer("top_p", float, "Keep the likeliest with this share.", "the model's, else 0.95"),
    _answer(
        "min_p", float, "Drop what is below this share of the likeliest.", "the model's, else 0.05"
    ),
    _answer("seed", int, "For answers that repeat.", "drawn"),
    _answer("stop", list[str], "Text that ends an answer; may be given again.", read=_or_none),
    _answer("ignore_eos", bool, "Go on where the model would end.", read=_or_none),
    _answer("timeout_s", float, "Seconds for each request, from now on.", "as long as it takes"),
    _answer(
        "set",
        list[str],
        "Any option of a request, such as n=3, or json_schema=@FILE; may be given again.",
        names=("--set",),
        metavar="NAME=VALUE",
        setting="",
    ),
)
"""Every option that `run` takes and that other commands may take too, in the order of its help."""

NAMES = tuple(o.name for o in OPTIONS)


class Given:
    """The options of the table that a command line gives, and the settings that they become."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Keep values by the names of options; a command does not take those that are left out."""
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def settings(self, *panels: str) -> dict[str, Any]:
        """Return the settings of these panels, without those that were not given."""
        named = {
            o.name if o.setting is None else o.setting: o.read(self._values[o.name])
            for o in OPTIONS
            if o.panel in panels and o.name in self._values and o.setting != ""
        }
        return {name: value for name, value in named.items() if value is not None}

    def engine_settings(self) -> dict[str, Any]:
        """Return what `cbatch.load` gets, checked as far as it can be without the model."""
        settings = self.settings(MODEL, SCHEDULING, DEVICES)
        EngineOptions.of(settings)
        return settings

    def run_options(self) -> RunOptions:
        """Return the options of all requests; an adapter that is alone answers all, unless `--set` says otherwise."""
        given = self.settings(ANSWERS)
        given |= set_options(self["set"] or (), given)
        adapters = named_adapters(self["adapter"])
        if adapters and len(adapters) == 1:
            given.setdefault("adapter", next(iter(adapters)))
        return RunOptions.of(given)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command's parameter `given` stands for these options of the table."""
    options = [o for o in OPTIONS if o.name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(*args: Any, **values: Any) -> None:
            given = Given({o.name: values.pop(o.name) for o in options})
            command(*args, given=given, **values)

        signature = inspect.signature(command)
        parameters = [
            parameter
            for p in signature.parameters.values()
            for parameter in ([o.parameter() for o in options] if p.name == "given" else [p])
        ]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def name_of(model: Path | None) -> str:
    """Return what to call a model."""
    return "the model that ships inside" if model is None else str(model)
