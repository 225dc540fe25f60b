"""`cbatch bench`: measures a model on this machine, compared with other programs."""

import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbatch.cli.completion import among, among_several
from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import (
    MODEL_OPTION,
    Given,
    in_panel,
    in_reach,
    model_argument,
    one_model,
    takes,
)
from cbatch.cli.signals import ended_softly
from cbatch.cli.terminal import say
from cbatch.engine_options import DEFAULT_PARALLEL, EngineOptions
from cbatch.errors import ConfigError
from cbatch.files.output.durable import write_whole
from cbatch.files.places import check_apart, check_new, stdout
from cbatch.support.checks import check_int
from cbatch.support.hub import parts_of_model

if TYPE_CHECKING:
    from cbatch.bench.comparison import Comparison, ComparisonPlan, Load
    from cbatch.bench.measured import Chains
    from cbatch.bench.model_text import ModelText
    from cbatch.bench.sides import HttpSide, Side
    from cbatch.bench.summary import TextTable
    from cbatch.bench.text_work import VectorWorkload
    from cbatch.bench.vector_comparison import VectorComparison, VectorPlan
    from cbatch.bench.workloads import Workload

_output, _side, _request = in_panel("Output"), in_panel("Sides"), in_panel("Requests")
_file = partial(_output, metavar="FILE")
_N_SLACK = 16
"""Tokens of a slot beyond the longest request: llama-server wants one, a server may add marks. Our choice."""
_N_WINDOW = 2048
"""Tokens of a slot at least, if the model was trained for them: as `cbatch.load` has them."""
_MAX_AT_ONCE = 4096
_PRINTED_WIDTH = 180
"""Columns of a table that goes to no terminal."""
_FLAGS = {"n_threads": "threads", "n_gpu_layers": "gpu-layers"}
"""Options of `cbatch serve` that are not called as the setting."""


def _cases(incomplete: str) -> list[str]:
    from cbatch.bench.cases import present

    return among(present())(incomplete)


def _named_workloads(incomplete: str) -> list[str]:
    from cbatch.bench.text_work import VECTOR_WORKLOADS
    from cbatch.bench.workloads import WORKLOADS

    return among_several([*WORKLOADS, *VECTOR_WORKLOADS])(incomplete)


@takes(
    *("parallel", "ctx_per_seq", "kv", "cache_type_k", "cache_type_v", "flash_attn"),
    *("exact", "threads", "gpu_layers", "llama_library"),
)
def bench(
    file: Annotated[
        Path | None, model_argument("A GGUF file; without one, the model shipped with cbatch.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- WORDS]", help="Arguments for --case."),
    ] = None,
    *,
    model: Annotated[Path | None, MODEL_OPTION] = None,
    given: Given,
    workload: Annotated[
        str,
        _request(
            "Kinds of requests; see --list.",
            "decode, mixed, shared, burst",
            metavar="NAMES",
            autocompletion=_named_workloads,
        ),
    ] = "decode,mixed,shared,burst",
    requests: Annotated[
        Path | None,
        _request(
            'Requests of your own: JSON lines with "prompt" and "max_tokens".',
            "none",
            metavar="FILE",
        ),
    ] = None,
    at_once: Annotated[str, _request("Numbers of requests at once.", metavar="NUMBERS")] = "1,4,16",
    rate: Annotated[
        str | None,
        _request(
            "Rates of requests a second, which come at random times, instead of --at-once.",
            "none",
            metavar="NUMBERS",
        ),
    ] = None,
    count: Annotated[
        int | None, _request("Requests in a round.", "4 for each request at once", min=1)
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        _request("Tokens of each prompt after the common ones.", "the workload's", metavar="N[-N]"),
    ] = None,
    output_tokens: Annotated[
        str | None, _request("Tokens of each answer.", "the workload's", metavar="N[-N]")
    ] = None,
    common_tokens: Annotated[
        int | None,
        _request("Common tokens at the beginning of all prompts.", "the workload's", min=0),
    ] = None,
    rounds: Annotated[int, _request("Rounds of each measurement.", min=1)] = 3,
    seed: Annotated[int, _request("Seed of all random choices.", min=0)] = 1,
    warm: Annotated[
        bool,
        _request(
            "Also send each round's requests a second time, with prompts in the cache.",
            None,
            "--warm",
        ),
    ] = False,
    stream: Annotated[
        bool, _request("Have answers streamed.", None, "--stream/--no-stream")
    ] = True,
    sides: Annotated[
        str | None,
        _side(
            "Programs to compare; see --list.",
            "engine, one, llama, static, bare; with servers: engine, serve, bare",
            metavar="NAMES",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        _side(
            "Program llama-server to compare with, started with the same slots and memory.",
            "none",
            metavar="PATH",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        _side(
            "A running server with the same model and OpenAI's API; may be repeated.",
            "none",
            metavar="URL",
        ),
    ] = None,
    against_model: Annotated[
        str | None,
        _side("The model's name on the servers of --against.", "the first listed", metavar="NAME"),
    ] = None,
    api_key: Annotated[str | None, _side("API key for --against.", "none", metavar="KEY")] = None,
    timeout_s: Annotated[
        float, _side("Seconds to wait for a server's answer.", min=0.001, callback=in_reach)
    ] = 600.0,
    json_file: Annotated[
        Path | None, _file("Write all figures to this file.", "none", "--json")
    ] = None,
    markdown_file: Annotated[
        Path | None, _file("Write the tables to this file.", "none", "--markdown")
    ] = None,
    html_file: Annotated[
        Path | None, _file("Write a page with plots to this file.", "none", "--html")
    ] = None,
    svg_file: Annotated[
        Path | None, _file("Write a plot of the rates to this file.", "none", "--svg")
    ] = None,
    sources: Annotated[
        list[str] | None,
        _file(
            "Measure nothing: draw --svg from this file of --json; may be repeated.",
            "none",
            "--from",
        ),
    ] = None,
    force: Annotated[bool, _output("Replace existing files.", None, "--force")] = False,
    quiet: Annotated[bool, _output("Print no line for each round.", None, "--quiet", "-q")] = False,
    list_all: Annotated[
        bool, _output("List workloads, sides and cases, and exit.", None, "--list")
    ] = False,
    case: Annotated[
        str | None,
        _output(
            "Run a single benchmark instead; see --list.",
            "none",
            metavar="NAME",
            autocompletion=_cases,
        ),
    ] = None,
) -> None:
    """Measure a model on this machine, compared with one request at a time, a bare loop and servers.

    Prompts have an exact number of tokens. All sides answer the same requests in turn; a side gets
    no rate for wrong answers. After Ctrl-C, the results so far are printed.

    Example: cbatch bench model.gguf --llama-server ~/llama.cpp/build/bin/llama-server
    """
    model = one_model(file, model)
    if list_all:
        write("\n".join(_listed()) + "\n")
        return
    if case is not None:
        from cbatch.bench.cases import run_case  # slow to import

        with ended_softly():  # some start servers
            run_case(case, [*([] if model is None else [str(model)]), *(words or ())])
        return
    if words:
        raise ConfigError(f"{words[0]}: one model at a time; only a --case takes more arguments")
    files = {"json": json_file, "markdown": markdown_file, "html": html_file, "svg": svg_file}
    read = [*(sources or ()), *filter(None, (requests, llama_server))]
    read += parts_of_model(model) if model else []
    for file in filter(None, files.values()):
        check_apart(file, read)
        check_new(file, force=force)
    if sources:
        if model is not None or not svg_file or json_file or markdown_file or html_file:
            raise ConfigError(
                "--from measures nothing: give --svg FILE, and neither MODEL nor another output file"
            )
        _draw(sources, _names(workload), svg_file)
        return
    beside = Beside(llama_server, against or [], against_model, api_key, timeout_s)
    tell = bool if quiet else say
    if texts := _vector_workloads(workload, prompt_tokens, common_tokens):
        _refuse(
            "embeddings and rerank",
            requests=requests,
            rate=rate,
            output_tokens=output_tokens,
            warm=warm,
            no_stream=not stream,
            html=html_file,
            svg=svg_file,
        )
        from cbatch.bench.vector_comparison import VectorPlan

        texts_plan = VectorPlan(texts, _numbers("at_once", at_once), rounds, seed, count)
        named = _sides(sides, beside, of_texts=True)
        _measure_vectors(texts_plan, named, model, given.engine_settings(), beside, files, tell)
        return
    if requests is not None:
        _refuse(
            "--requests, which have sizes of their own",
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            common_tokens=common_tokens,
            count=count,
        )
    from cbatch.bench.comparison import ComparisonPlan  # slow to import

    loads = _loads(at_once, rate)
    kinds = _workloads(workload, prompt_tokens, output_tokens, common_tokens)
    settings = {"parallel": DEFAULT_PARALLEL, **given.engine_settings()}
    is_exact = settings.get("exact", False)
    plan = ComparisonPlan(kinds, loads, rounds, seed, count, None, warm, is_exact, stream)
    named = _sides(sides, beside)
    _measure_answers(plan, named, (model, requests), settings, beside, files, tell)


def _measure_answers(
    plan: "ComparisonPlan",
    names: Sequence[str],
    of: tuple[Path | None, Path | None],
    settings: dict[str, Any],
    beside: "Beside",
    files: Mapping[str, Path | None],
    say_round: Callable[[str], object],
) -> None:
    from cbatch.bench.model_text import model_text

    model, requests = of
    with model_text(None if model is None else str(model)) as text:
        kinds, chains = _of_file(requests, [*plan.workloads], text)
        settings["ctx_per_seq"] = _window(kinds, settings.get("ctx_per_seq"), text.n_ctx_train)
        plan = replace(plan, workloads=kinds, file=chains)
        comparison = _comparison(plan, text, settings, names, beside)
        comparison.say = say_round
        is_broken_off = _run(comparison)
    facts = {"model": text.path, "seed": plan.seed, "rounds": plan.n_rounds, **settings}
    _end(comparison, facts, files, is_broken_off=is_broken_off)


def _run(comparison: "Comparison | VectorComparison") -> bool:
    """Measure, and end the processes of the sides; return whether Ctrl-C has ended it."""
    with ended_softly():
        try:
            comparison.run()
        except KeyboardInterrupt:
            say("interrupted: these are the complete rounds")
            return True
        finally:
            comparison.close()
    return False


def _exit(*, is_broken_off: bool, has_problems: bool) -> None:
    if is_broken_off:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if has_problems:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _comparison(
    plan: "ComparisonPlan",
    text: "ModelText",
    settings: dict[str, Any],
    named: Sequence[str],
    beside: "Beside",
) -> "Comparison":
    from cbatch.bench.comparison import Comparison
    from cbatch.bench.sides import BareSide, ProcessSide

    def own(name: str) -> "Side":
        if name == "serve":
            return beside.ours(text, settings)
        slots = {"parallel": 1} if name == "one" else {}
        return ProcessSide(name, text.path, settings | slots)

    found = [own(name) for name in named if name != "bare"]
    return Comparison(
        plan,
        [*found, *beside.theirs(text, settings)],
        settings["parallel"],
        text.exact,
        text.tokenize,
        bare=BareSide("bare", text.path, settings) if "bare" in named else None,
        judge=ProcessSide("engine", text.path, settings),
        end_tokens=text.end_tokens,
    )


def _end(
    comparison: "Comparison",
    facts: dict[str, Any],
    files: Mapping[str, Path | None],
    *,
    is_broken_off: bool,
) -> None:
    from cbatch.bench.summary import Summary
    from cbatch.cli.bench_page import Rates, bench_page, bench_picture

    summary = Summary(comparison)
    remarks, problems = summary.remarks(), summary.problems()
    _report(
        facts,
        [*summary.tables()],
        (remarks, problems),
        summary.as_dict(),
        files,
        html=lambda machine: bench_page(summary, facts, machine),
        svg=lambda machine: bench_picture([Rates.of(summary, facts)]),
    )
    _exit(is_broken_off=is_broken_off, has_problems=bool(problems))


def _report(
    facts: dict[str, Any],
    tables: "Sequence[TextTable]",
    lines: tuple[Sequence[str], Sequence[str]],
    figures: Mapping[str, Any],
    files: Mapping[str, Path | None],
    **pages: Callable[[dict[str, str]], str],
) -> None:
    from cbatch.bench.summary import markdown
    from cbatch.files.report.page import machine_and_versions

    (remarks, problems), machine = lines, machine_and_versions()
    show_tables(tables, remarks, problems, facts)
    said = [_line_of(facts), _line_of(machine), *remarks, *problems]
    found = {"settings": facts, "machine": machine, **figures}
    makers: dict[str, Callable[[dict[str, str]], str]] = {
        "json": lambda _: json.dumps(found, indent=1) + "\n",
        "markdown": lambda _: markdown(tables, said),
        **pages,
    }
    for kind, path in files.items():
        if path is not None:
            write_whole(path, makers[kind](machine))


# ---- what was asked ----


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ConfigError(f"no name in {text!r}: give names separated by commas; see --list")
    return list(dict.fromkeys(found))


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{name} must be whole numbers separated by commas, such as 1,4,16, not {text!r}"
        ) from None
    return [check_int(name, n, 1, _MAX_AT_ONCE) for n in dict.fromkeys(found)]


def _loads(at_once: str, rate: str | None) -> "list[Load]":
    from cbatch.bench.comparison import Load

    if rate is None:
        return [Load(at_once=n) for n in _numbers("at_once", at_once)]
    return [Load(rate=each) for each in _rates(rate)]


def _sides(asked: str | None, beside: "Beside", *, of_texts: bool = False) -> list[str]:
    from cbatch.bench.sides import KINDS, VECTOR_KINDS, check_kinds

    alone = "engine,llama" if of_texts else "engine,one,llama,static,bare"
    beside_others = "engine,serve" if of_texts else "engine,serve,bare"
    named = _names(asked or (beside_others if beside.has_any else alone))
    check_kinds(named, VECTOR_KINDS if of_texts else KINDS)
    return named


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise ConfigError(
            f"rate must be numbers of requests a second above 0, such as 0.5,2, not {text!r}"
        )
    return list(dict.fromkeys(found))


def _span(name: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not re.fullmatch("[0-9]{1,99}(-[0-9]{0,99})?", text):
        raise ConfigError(
            f"{name} must be a number of tokens, or a range such as 32-256, not {text!r}"
        )
    return int(low), int(high or low)


def _workloads(
    names: str, prompt_tokens: str | None, output_tokens: str | None, n_common: int | None
) -> "list[Workload]":
    from cbatch.bench.workloads import workload_of

    own, output = _span("prompt_tokens", prompt_tokens), _span("output_tokens", output_tokens)
    return [workload_of(name, own=own, output=output, n_common=n_common) for name in _names(names)]


def _vector_workloads(
    names: str, prompt_tokens: str | None, n_common: int | None
) -> "list[VectorWorkload]":
    """Return the named workloads of texts; none where no name is of one."""
    from cbatch.bench.text_work import VECTOR_WORKLOADS, vector_workload

    named = _names(names)
    found = [name for name in named if name in VECTOR_WORKLOADS]
    if not found:
        return []
    if others := [name for name in named if name not in found]:
        raise ConfigError(
            f"{', '.join(found)} and {', '.join(others)} cannot be measured together: run them one at a time"
        )
    own = _span("prompt_tokens", prompt_tokens)
    return [vector_workload(name, own=own, n_common=n_common) for name in found]


def _refuse(on: str, **given: Any) -> None:
    """Raise a `ConfigError` for an option that is given and has no effect on something."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {on}: leave it out")


def _measure_vectors(
    plan: "VectorPlan",
    names: Sequence[str],
    model: Path | None,
    settings: Mapping[str, Any],
    beside: "Beside",
    files: Mapping[str, Path | None],
    say_round: Callable[[str], object],
) -> None:
    from cbatch.bench.model_text import model_text
    from cbatch.bench.vector_comparison import VectorComparison
    from cbatch.cli.bench_vectors import check_fit, vector_sides

    with model_text(None if model is None else str(model)) as text:
        check_fit(plan.workloads, text)
        at_once = max(plan.loads)
        make = partial(
            vector_sides, names=names, text=text, settings=settings, beside=beside, at_once=at_once
        )
        comparison = VectorComparison(plan, make, text.tokenize, say_round)
        is_broken_off = _run(comparison)
    facts = {"model": text.path, "seed": plan.seed, "rounds": plan.n_rounds, **settings}
    problems = comparison.refused
    _report(facts, [*comparison.tables()], ([], problems), comparison.as_dict(), files)
    _exit(is_broken_off=is_broken_off, has_problems=bool(problems))


def _of_file(
    path: Path | None, kinds: "list[Workload]", text: "ModelText"
) -> "tuple[list[Workload], Chains | None]":
    """Return the requests of a file as a kind of its own with the sizes that they have; without a file, the kinds."""
    from cbatch.bench.workloads import Workload, read_requests

    if path is None:
        return kinds, None
    chains = read_requests(path, text.tokenize)
    requests = [request for chain in chains for request in chain]
    prompts, outputs = [r.n_prompt for r in requests], [r.n_output for r in requests]
    own, output = (min(prompts), max(prompts)), (min(outputs), max(outputs))
    return [Workload(path.stem, f"{len(requests)} requests from a file", own, output)], chains


def _window(kinds: "Sequence[Workload]", asked: int | None, n_trained: int) -> int:
    """Return the tokens of a slot: what was asked, or enough for every request."""
    needed = max(kind.n_window for kind in kinds) + _N_SLACK
    longest = max(kinds, key=lambda kind: kind.n_window)
    window = asked or max(needed, min(_N_WINDOW, n_trained))
    if needed > window or (asked is None and window > n_trained):
        room = (
            f"a slot holds ({window:,})" if asked else f"the model was trained for ({n_trained:,})"
        )
        raise ConfigError(
            f"{longest.name} needs a window of {needed:,} tokens, more than {room}: "
            "lower --prompt-tokens, --common-tokens or --output-tokens, or set --ctx-per-seq"
        )
    return window


@dataclass(frozen=True, slots=True)
class Beside:
    """The servers that a command line names."""

    program: Path | None
    urls: Sequence[str]
    model: str | None
    key: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        from cbatch.bench.openai_client import Address

        for url in self.urls:
            Address.of(url)
        if not self.urls and (self.model is not None or self.key is not None):
            raise ConfigError("--against-model and --api-key need --against: give the server's URL")
        if self.program is not None and not self.program.is_file():
            raise ConfigError(f"{self.program}: is not a file: give the path of llama-server")

    @property
    def has_any(self) -> bool:
        """Whether there are servers of others."""
        return bool(self.urls) or self.program is not None

    def words_of(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the arguments by which `cbatch serve` has settings."""
        words: list[str] = []
        for name, value in settings.items():
            flag = f"--{_FLAGS.get(name, name.replace('_', '-'))}"
            if value is not False:
                words += [flag] if value is True else [flag, str(value)]
        return words

    def ours(self, text: "ModelText", settings: Mapping[str, Any]) -> "HttpSide":
        """Return `cbatch serve`."""
        from cbatch.bench.sides import cbatch_server

        return self._http("serve", partial(cbatch_server, text.path, self.words_of(settings)), text)

    def theirs(
        self, text: "ModelText", settings: Mapping[str, Any], words: Sequence[str] = ()
    ) -> "Iterator[HttpSide]":
        """Yield the servers of others; llama-server has these arguments more."""
        from cbatch.bench.openai_client import Address
        from cbatch.bench.sides import llama_server, there_already

        if self.program is not None:
            options = EngineOptions.of(settings)
            start = partial(llama_server, str(self.program), text.path, options, words)
            yield self._http("llama-server", start, text, schema_field="json_schema")
        for url in self.urls:
            more = {"model": self.model, "key": self.key}
            name, start = str(Address.of(url)), partial(there_already, url)
            yield self._http(name, start, text, is_remote=True, **more)

    def _http(
        self, name: str, start: Any, text: "ModelText", *, is_remote: bool = False, **of_client: Any
    ) -> "HttpSide":
        from cbatch.bench.openai_client import OpenAIClient
        from cbatch.bench.sides import HttpSide

        of_client |= {"tokenize": text.answer_tokens, "timeout_s": self.timeout_s}
        client = partial(OpenAIClient, **of_client)
        return HttpSide(name, start, client, is_remote=is_remote)


# ---- what is shown ----


def _listed() -> Iterator[str]:
    from cbatch.bench.cases import present, told
    from cbatch.bench.sides import KINDS
    from cbatch.bench.text_work import VECTOR_WORKLOADS
    from cbatch.bench.workloads import WORKLOADS

    yield "workloads (--workload), sizes in tokens:"
    yield from (f"  {w.name:<22}{w.told} ({w.sizes})" for w in WORKLOADS.values())
    yield from (f"  {w.name:<22}{w.told} ({w.sizes})" for w in VECTOR_WORKLOADS.values())
    yield "sides (--sides; --llama-server PATH and --against URL add servers):"
    yield from (f"  {name:<22}{words}" for name, words in KINDS.items())
    if cases := present():
        yield "cases (--case NAME MODEL -- WORDS):"
        yield from (f"  {name:<22}{told(name)}" for name in cases)


def show_tables(
    tables: "Sequence[TextTable]",
    remarks: Sequence[str],
    problems: Sequence[str],
    facts: Mapping[str, Any],
) -> None:
    """Print the tables on stdout, and what was refused on stderr."""
    from cbatch.bench.summary import text_table

    width = shutil.get_terminal_size().columns if stdout().isatty() else _PRINTED_WIDTH
    told = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    lines = told(_line_of(facts))
    for table in tables:
        lines += ["", *told(table.title), *text_table(table, width)]
        lines += told(table.note) if table.note else []
    for remark in remarks:
        lines += told(remark)
    write("\n".join(lines) + "\n")
    for line in problems:
        say(f"refused: {line}")


def _line_of(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _draw(sources: Sequence[str], workloads: Sequence[str], path: Path) -> None:
    from cbatch.cli.bench_page import bench_picture, merged, read_rates

    runs = merged([read_rates(Path(source)) for source in sources], workloads)
    if not any(run.rows for run in runs):
        raise ConfigError(f"no rates of {', '.join(workloads)} in {', '.join(sources)}")
    write_whole(path, bench_picture(runs))
