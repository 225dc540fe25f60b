"""The options of the commands, each declared once: its name, type and help, and the setting that its value becomes."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from operator import not_
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import typer

from cbatch.backend.named_library import use_library
from cbatch.cli.completion import among, gguf_files
from cbatch.cli.sets import read_text, set_options, value_of
from cbatch.engine_options import EngineOptions, Policy, Speculate
from cbatch.errors import ConfigError
from cbatch.files.file_formats import Format
from cbatch.files.places import file_of
from cbatch.files.settings import FileOptions
from cbatch.options import RunOptions, check_runs_through
from cbatch.support.checks import (
    MAX_TIME_S,
    check_choice,
    check_flag,
    check_float,
    check_int,
    check_path,
    check_seconds,
)
from cbatch.support.hub import local_model

RUN = "Options"
FILES = "Files"
MODEL = "Model"
SCHEDULING = "Scheduling"
DEVICES = "Memory and devices"
ANSWERS = "Answers"


def option(
    *names: Any, help: str, panel: str | None = None, default: str | None = None, **more: Any
) -> Any:
    """Declare an option for typer; if its default is None, the help shows `default` instead.

    The option's environment variable is not shown: the help of `cbatch` has the rule for all names.
    """
    shown: Any = True if default is None else default
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=shown, show_envvar=False, **more
    )


def in_panel(panel: str | None) -> Callable[..., Any]:
    """Return a function that declares options of a panel of the help; a flag follows from its parameter's name."""

    def declare(help: str, default: str | None = None, *names: str, **more: Any) -> Any:
        return option(*names, help=help, panel=panel, default=default, **more)

    return declare


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the table, which commands take by its name; if its type is a list, it may be repeated.

    Args:
        panel: the part of the help that shows it; also decides where its value goes: `RUN` and `FILES` to
            `run_file`, `ANSWERS` to `RunOptions`, the others to `EngineOptions`.
        shown: the default that the help shows, if it is not that of the setting.
        type: of the value, if it does not follow from the setting.
        names: "--name" and "-n", if they do not follow from `name`.
        metavar: what the help calls the value.
        setting: the name of the setting, if it is not `name`; empty for an option that only the command uses.
        read: turns the given value into the setting's.
        callback: does the same, before anything is checked.
        completion: returns the shell's completions of a partial value; None: the setting's choices, if it has any.
        owner: the dataclass that has the setting, if it is not that of the panel.
    """

    panel: str
    name: str
    help: str
    shown: str | None = None
    type: Any = None
    names: tuple[str, ...] = ()
    metavar: str | None = None
    setting: str | None = None
    read: Callable[[Any], Any] = lambda value: value
    callback: Callable[..., Any] | None = None
    completion: Callable[[str], list[str]] | None = None
    owner: Any = None

    def parameter(self) -> inspect.Parameter:
        """Return the parameter by which typer knows the option."""
        default, kind, words = self._of_setting()
        is_flag = kind is bool
        names = self.names or ((f"--{self.name.replace('_', '-')}",) if is_flag else ())
        # a default number stays with the engine: what is not given is not a setting of the run
        is_plain_flag = is_flag and not any("/" in name for name in names)
        initial = False if is_plain_flag else default if isinstance(default, str) else None
        shown = self.shown or (str(default) if initial is None and default is not None else None)
        info = option(
            initial,
            *names,
            help=self.help,
            panel=self.panel,
            default=shown,
            metavar=self.metavar,
            callback=self.callback,
            autocompletion=self.completion or (among(words) if words else None),
        )
        kind = kind if initial is not None else kind | None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind
        )

    def _of_setting(self) -> tuple[Any, Any, Sequence[str]]:
        """Return the setting's default, type and choices; the option's own type takes precedence."""
        for f in fields(self.owner or _OWNERS.get(self.panel, EngineOptions)):
            if f.name == (self.setting or self.name):
                check = f.metadata.get("check")
                words = f.metadata["limits"] if check is check_choice else ()
                return f.default, self.type or _TYPES.get(check, str), words
        return None, self.type, ()


def named_adapters(given: list[str] | None) -> dict[str, str] | None:
    """Return files by name; a file without a name is named after itself, without folder and ending."""
    if not given:
        return None
    pairs = [text.partition("=") if "=" in text else (Path(text).stem, "", text) for text in given]
    files = {name: file for name, _, file in pairs}
    if len(files) < len(pairs):
        raise ConfigError(f"two adapters have the same name: {', '.join(given)}; give NAME=FILE")
    return files


def number_or_word(text: str | None) -> int | str | None:
    """Return a number that is written in digits, other text as it is."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,99}", text) else text


def model_of(ctx: typer.Context, model: Path | None) -> Any:
    """Return the model that an option or argument names. Nothing is downloaded during shell completion."""
    return model if ctx.resilient_parsing else local_model(model)


def in_reach(param: typer.CallbackParam, value: float) -> float:
    """Return a number of seconds; raise if it is infinite, or longer than a process can wait."""
    return check_float(str(param.name), value, 0.0, MAX_TIME_S)


def shares_of(text: str | None) -> list[float] | None:
    """Return the numbers in a text such as `3,1`."""
    if text is None:
        return None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"tensor_split must be numbers separated by commas, such as 3,1, not {text!r}"
        ) from None


def template_of(text: str | None) -> str | None:
    """Return a chat template: a name or Jinja unchanged; for `@FILE` or the path of a file, its content."""
    place = "--chat-template"
    if text is None or text.startswith("@"):
        return text and read_text(place, text[1:])
    if "{{" in text or "{%" in text:
        return text
    is_path = os.path.isfile(os.path.expanduser(text)) or "/" in text or Path(text).suffix
    return read_text(place, text) if is_path else text


def parts_of(text: str | None) -> list[str] | None:
    """Return the parts of a text such as `a,b,c`; an empty text has none."""
    if text is None:
        return None
    return [part.strip() for part in text.split(",")] if text.strip() else []


def template_variables(text: str | None) -> dict[str, Any] | None:
    """Return variables for the chat template, given as JSON or as `@FILE`."""
    if text is None:
        return None
    found: dict[str, Any] = value_of("chat_template_kwargs", text, "--chat-template-kwargs")
    return found


def or_none(value: Any) -> Any:
    """Return None for an absent flag and for an empty list, which both count as not given."""
    return value or None


_OWNERS: Mapping[str, Any] = {RUN: FileOptions, FILES: FileOptions, ANSWERS: RunOptions}
"""The dataclasses of settings that are not the engine's, by panel."""
_TYPES: Mapping[Any, type] = {
    check_int: int,
    check_float: float,
    check_seconds: float,
    check_flag: bool,
    check_path: Path,
    file_of: Path,
}
"""The type of an option whose setting has this check; with a check that is not listed, str."""

_run = partial(Option, RUN)
_file = partial(Option, FILES)
_model = partial(Option, MODEL)
_schedule = partial(Option, SCHEDULING)
_device = partial(Option, DEVICES)
_answer = partial(Option, ANSWERS)

OPTIONS = (
    _run("demo", "Run 64 chats that show what the shipped model can do.", setting="", type=bool),
    _run(
        "max_time_s",
        "Stop after this many seconds; the next run does the remaining items.",
        "as long as it takes",
    ),
    _run(
        "isolate",
        "Compute in a separate process, so that a crash of llama.cpp loses no answer.",
        "--isolate",
        names=("--isolate/--no-isolate",),
    ),
    _run(
        "replicas",
        "Worker processes, which share the cores: a number, or auto.",
        "none",
        metavar="N",
        read=number_or_word,
        type=str,
        completion=among(["auto"]),
    ),
    _run(
        "ray",
        "Compute with --replicas actors on the Ray cluster at this address; auto: the cluster of this machine, local: "
        "a new one here. The input is Parquet, OUT is a folder.",
        "on this machine",
        metavar="ADDRESS",
        setting="",
        type=str,
        completion=among(["local", "auto"]),
    ),
    _run("json", "Print progress and summary as JSON lines on stderr.", setting="", type=bool),
    _run(
        "quiet", "Print no progress and no summary.", names=("--quiet", "-q"), setting="", type=bool
    ),
    _file("errors", "A separate file for items that fail.", "in the output"),
    _file(
        "format",
        "Input format: auto, openai, cbatch, jsonl, csv, tsv, text, parquet or arrow.",
        completion=among(["auto", *get_args(Format)]),
    ),
    _file(
        "output_format",
        "Output format.",
        "by the ending of the output's name, else the input's",
        completion=among(get_args(Format)),
    ),
    _file("output_column", "Name of the answer's column in tables.", "response", metavar="NAME"),
    _file(
        "keep_columns",
        "Input columns to keep in a table of answers, such as id,review.",
        "all",
        metavar="NAMES",
        read=parts_of,
        type=str,
    ),
    _file("template", "Template of a row's prompt, such as 'Classify: {review}'.", "none"),
    _file("system", "A system message for each row; may be a template.", "none"),
    _file("image_column", "The column with a picture for each row.", "none", metavar="NAME"),
    _file("audio_column", "The column with a sound for each row.", "none", metavar="NAME"),
    _file(
        "raw",
        "Read rows, and prompts in JSON lines, as text to complete (--raw) or as chats (--chat).",
        "rows are chats, a prompt is text",
        names=("--raw/--chat",),
        setting="is_raw",
    ),
    _file("limit", "Run at most this many items.", "all"),
    _file("shuffle", "Run the items in random order."),
    _file("dedupe", "Compute equal items once, if greedy or with a seed."),
    _file("strict", "Check the whole input first; run nothing if an item is invalid."),
    _file("check", "Check the input and count its tokens; run nothing.", setting="", type=bool),
    _file("dry_run", "Run a sample and estimate the time of the whole run.", setting="", type=bool),
    _file("retry_errors", "Run failed items again."),
    _file("adopt", "Rebuild a lost manifest from the JSON lines of the output, and continue."),
    _file("force", "Continue although settings differ; replace a file that is not cbatch's."),
    _file("report", "Write a report of the run as an HTML page.", "none", metavar="HTML"),
    _file("trace", "Write a trace of all steps, for Perfetto or Chrome.", "none", metavar="JSON"),
    _file("window", "Items to read ahead, to run them in a faster order.", "8 for each slot"),
    _model(
        "model",
        "A GGUF file, or hf:OWNER/REPO/FILE.gguf.",
        "the one shipped with cbatch",
        names=("--model", "-m"),
        setting="",
        type=Path,
        callback=model_of,
        completion=gguf_files,
    ),
    _model(
        "parallel",
        "Slots of all workers together: requests that run at once.",
        "16 for each worker, fewer if memory is short",
    ),
    _model(
        "ctx_per_seq",
        "Tokens of prompt and answer that a slot holds.",
        "2048, fewer if the model was trained for fewer or memory is short",
    ),
    _model("n_ctx", "Tokens that all slots hold together, instead of --ctx-per-seq."),
    _model(
        "kv", "KV cache: auto, partitioned (a part for each slot) or unified (one pool for all)."
    ),
    _model(
        "cache_type_k", "Type of stored keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl."
    ),
    _model("cache_type_v", "Type of stored values; all but f16, bf16, f32 need flash attention."),
    _model("flash_attn", "Flash attention: auto, on or off."),
    _model(
        "memory_mib",
        "Most MiB for the KV cache; ignored with --n-ctx, or with both --parallel and --ctx-per-seq.",
        "half of what is free",
    ),
    _schedule(
        "policy",
        f"Which request comes next: {', '.join(get_args(Policy)[:-1])} or {get_args(Policy)[-1]}.",
        completion=among(get_args(Policy)),
    ),
    _schedule("quantum", "With --policy round_robin: tokens of a turn.", "64"),
    _schedule("ageing_s", "Seconds of waiting that raise the priority by one.", "10"),
    _schedule(
        "admission",
        "With --kv unified, admit requests by their estimated (optimistic) or longest possible answers (reserve).",
        "optimistic",
    ),
    _schedule("max_queue", "Most requests that may wait.", "any number"),
    _schedule("when_full", "If --max-queue is reached: wait, or reject items.", "wait"),
    _schedule(
        "ttft",
        "Order of waiting prompts: first (one by one, for early first tokens), any (for the fastest steps), auto.",
    ),
    _schedule(
        "prefill_budget", "Most prompt tokens in a step that also decodes.", "by measured times"
    ),
    _schedule("prefill_chunk", "Most prompt tokens of one request in a step.", "what a step holds"),
    _schedule(
        "itl_ms",
        "Target milliseconds of a step that also decodes, instead of --prefill-budget.",
        "none",
    ),
    _schedule(
        "speculate",
        "Source of draft tokens, which are used where they make answers faster: auto, ngram (the request), "
        "job (also other answers), draft (the draft model), off; or 1 to 15: always this many.",
        metavar="WORD|N",
        read=number_or_word,
        completion=among(get_args(Speculate)),
    ),
    _schedule("swap_mib", "MiB of host memory for the KV cache of preempted requests."),
    _schedule(
        "checkpoint_mib",
        "MiB of host memory for checkpoints of shared prefixes, which sliding windows and recurrent states need.",
        "an eighth of what is free, at most 4096",
    ),
    _schedule(
        "no_share_prefixes", "Do not share common prefixes.", setting="share_prefixes", read=not_
    ),
    _device("n_batch", "Most tokens in a step."),
    _device("n_ubatch", "Most tokens in one run of llama.cpp's graph."),
    _device("cache_mib", "Most MiB in --cache-dir."),
    _device("cache_media", "Keep encoded pictures and sounds in --cache-dir."),
    _device(
        "repack",
        "Layout of the weights in memory: auto (the fastest on this processor), llama (repacked by llama.cpp), "
        "off (as in the file, so that processes can share the memory).",
    ),
    _device(
        "no_mmap",
        "Read the model into memory instead of mapping its file.",
        setting="use_mmap",
        read=not_,
    ),
    _device(
        "mlock",
        "Lock the weights in memory, so that they are not swapped out.",
        setting="use_mlock",
    ),
    _device("no_offload_kqv", "Keep the KV cache off the GPU.", setting="offload_kqv", read=not_),
    _device(
        "split_mode",
        "How to split the model over GPUs: none, layer, row or tensor.",
        "llama.cpp's: layer",
    ),
    _device("main_gpu", "The GPU to use with --split-mode none.", "0"),
    _device(
        "tensor_split",
        "Share of the model on each GPU, such as 3,1.",
        "by free memory",
        metavar="SHARES",
        read=shares_of,
    ),
    _model(
        "exact",
        "Guarantee that answers do not change with the other requests in the batch; fail if impossible.",
    ),
    _model(
        "threads",
        "Threads that compute; a given number never changes.",
        "all cores that the process may use, or fewer if that is faster",
        setting="n_threads",
    ),
    _model("gpu_layers", "Layers on the GPU.", "llama.cpp's: all", setting="n_gpu_layers"),
    _model(
        "llama_library",
        "llama.cpp's library, or a folder that has it.",
        "LLAMA_CPP_LIB_PATH, else llama-cpp-python's",
        metavar="PATH",
        setting="library",
    ),
    _model(
        "adapter",
        "A LoRA adapter; may be repeated. All requests use a single one; of several, each request names its own.",
        names=("--adapter",),
        metavar="[NAME=]FILE",
        setting="adapters",
        read=named_adapters,
        type=list[str],
    ),
    _model(
        "draft",
        "A smaller model with the same vocabulary: it guesses tokens, and the model keeps those it agrees with.",
        metavar="FILE",
    ),
    _model(
        "mmproj",
        "The model's projector, which chats with pictures or sound need.",
        metavar="FILE",
    ),
    _model(
        "cache_dir",
        "Folder of KV caches saved under a cache_key.",
        "CBATCH_CACHE_DIR, else in the user's cache folder",
    ),
    _model(
        "chat_template",
        '"chatml", a Jinja template, or a file with one.',
        "the model's own",
        metavar="NAME|JINJA|FILE",
        read=template_of,
    ),
    _answer("max_tokens", "Most tokens of an answer.", "what the slot holds", type=int),
    _answer("temperature", "Sampling temperature; 0 is greedy.", "the model's, else 0.8"),
    _answer(
        "top_k",
        "Sample from this many of the likeliest tokens; 0: from all.",
        "the model's, else 40",
    ),
    _answer(
        "top_p", "Keep the likeliest tokens with this total probability.", "the model's, else 0.95"
    ),
    _answer(
        "min_p",
        "Drop tokens below this share of the likeliest one's probability.",
        "the model's, else 0.05",
    ),
    _answer("seed", "Seed of sampling, for repeatable answers.", "random"),
    _answer("stop", "Text that ends an answer; may be repeated.", read=or_none, type=list[str]),
    _answer("ignore_eos", "Continue where the model would end its answer.", read=or_none),
    _answer(
        "choice",
        "Have the model answer with one of these texts, such as good,bad.",
        "any text",
        metavar="TEXTS",
        read=parts_of,
        type=str,
    ),
    _answer(
        "choice_probs",
        "Score each text of --choice, answer with the likeliest, and write their probabilities.",
        read=or_none,
    ),
    _answer("slot", "The slot to run in, from 0; each request waits until it is free.", "any"),
    _answer(
        "timeout_s",
        "Most seconds from the submission of a request to its end.",
        "as long as it takes",
    ),
    _answer(
        "chat_template_kwargs",
        "Variables for the chat template, such as '{\"enable_thinking\": false}', or @FILE; "
        "a request's own take precedence.",
        "the template's own",
        metavar="JSON",
        read=template_variables,
        type=str,
    ),
    _answer(
        "set",
        "Any option of a request, such as n=3 or json_schema=@FILE; may be repeated.",
        names=("--set",),
        metavar="NAME=VALUE",
        setting="",
        type=list[str],
    ),
)
"""The options of `run`, in the order of its help; other commands may take them too."""

NAMES = tuple(o.name for o in OPTIONS)

ENGINE = (MODEL, SCHEDULING, DEVICES)
"""The panels whose options are an engine's."""


def names_in(*panels: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the options of these panels."""
    return tuple(o.name for o in OPTIONS if o.panel in panels and o.name not in without)


class Given:
    """The options of the table that a command line gives, and the settings that they become."""

    def __init__(self, values: Mapping[str, Any], own: Sequence[Option] = ()) -> None:
        """Keep the values of the options that a command takes, by name; `own` are not in the table."""
        self._values, self._options = values, (*OPTIONS, *own)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def settings(self, *panels: str) -> dict[str, Any]:
        """Return the settings of these panels, without those that were not given."""
        named = {
            o.name if o.setting is None else o.setting: o.read(self._values[o.name])
            for o in self._options
            if o.panel in panels and o.name in self._values and o.setting != ""
        }
        return {name: value for name, value in named.items() if value is not None}

    def engine_settings(self) -> dict[str, Any]:
        """Return the settings for `cbatch.load`, checked as far as possible without the model."""
        settings = self.settings(*ENGINE)
        EngineOptions.of(settings)
        return settings

    def files(self) -> list[str]:
        """Return the files that options of the model and of answers name: as FILE, @FILE, NAME=FILE or NAME=@FILE."""
        read = [o for o in self._options if o.panel in (*ENGINE, ANSWERS)]
        values = [value for o in read if (value := self._values.get(o.name)) is not None]
        texts = [
            str(v) for value in values for v in (value if isinstance(value, list) else [value])
        ]
        named = [*texts, *(re.sub(r"^([^=]+=)?@?", "", text) for text in texts)]
        return [path for path in map(os.path.expanduser, named) if os.path.isfile(path)]

    def run_options(self) -> RunOptions:
        """Return the options of all requests; a single adapter is used for all, unless `--set` says otherwise."""
        given = self.settings(ANSWERS)
        given |= set_options(self["set"] or (), given)
        adapters = named_adapters(self["adapter"])
        if adapters and len(adapters) == 1:
            given.setdefault("adapter", next(iter(adapters)))
        return check_runs_through(RunOptions.of(given))


def takes(
    *names: str, also: Mapping[str, str] = MappingProxyType({}), own: Sequence[Option] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter `given` by these options of the table.

    Args:
        names: of the options.
        also: other spellings that this command accepts, such as "-ctk", and the options that they mean.
        own: options of this command alone.
    """
    options = [*own, *(o for o in OPTIONS if o.name in names)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(*args: Any, **values: Any) -> None:
            given = Given({o.name: values.pop(o.name) for o in options}, own)
            use_library(given["llama_library"])
            command(*args, given=given, **values)

        signature = inspect.signature(command)
        parameters = [
            parameter
            for p in signature.parameters.values()
            for parameter in ([o.parameter() for o in options] if p.name == "given" else [p])
        ]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.also = also  # type: ignore[attr-defined]  # `Command` reads it
        return call

    return decorate


def model_argument(help: str) -> Any:
    """Declare the argument MODEL of a command; -m is an alternative."""
    return typer.Argument(metavar="MODEL", help=help, callback=model_of, autocompletion=gguf_files)


MODEL_OPTION = option(
    "--model",
    "-m",
    metavar="MODEL",
    help="The same as MODEL.",
    default="none",
    callback=model_of,
    autocompletion=gguf_files,
)
"""The option -m of a command with the argument MODEL, for the spelling that all other commands have."""


def one_model(file: Path | None, model: Path | None) -> Path | None:
    """Return the model that an argument or -m names."""
    if file is not None and model is not None:
        raise ConfigError(f"MODEL is {file} and -m is {model}: give one of them")
    return file if model is None else model


def name_of(model: Path | None) -> str:
    """Return what messages call a model."""
    return "the model shipped with cbatch" if model is None else str(model)
