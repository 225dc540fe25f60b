"""`cbatch tune`: what each setting is worth for a model on this machine."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbatch.cli.bench import show_tables
from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import (
    MODEL_OPTION,
    OPTIONS,
    Given,
    in_reach,
    model_argument,
    one_model,
    option,
    takes,
)
from cbatch.cli.terminal import bar, say
from cbatch.engine_options import DEFAULT_PARALLEL, EngineOptions
from cbatch.errors import CBatchError, ConfigError
from cbatch.files.output.durable import write_whole
from cbatch.files.places import check_apart, check_new
from cbatch.support.hub import parts_of_model

if TYPE_CHECKING:
    from cbatch.bench.model_text import ModelText
    from cbatch.bench.tuning import SettingChange, TunedSide, Tuner
    from cbatch.bench.workloads import Workload


_JOBS = ("decode", "mixed", "shared")
_N_WINDOW, _N_SLACK = 2048, 16
"""Tokens of a slot, if the model was trained for them, and those beyond a request: as for `cbatch bench`."""
_N_EACH = 2
"""Requests of a job for each that runs at once. Our choice."""


@takes(
    *("parallel", "ctx_per_seq", "kv", "cache_type_k", "cache_type_v", "flash_attn", "n_ubatch"),
    *("speculate", "threads", "gpu_layers", "llama_library"),
)
def tune(
    file: Annotated[
        Path | None, model_argument("A GGUF file; without one, the model shipped with cbatch.")
    ] = None,
    *,
    model: Annotated[Path | None, MODEL_OPTION] = None,
    given: Given,
    minutes: Annotated[
        float,
        option(
            min=0.01, callback=in_reach, help="Begin no new measurement after this many minutes."
        ),
    ] = 15.0,
    at_once: Annotated[
        int | None, option(min=1, max=4096, help="Requests at once.", default="as many as slots")
    ] = None,
    json_file: Annotated[
        Path | None,
        option(
            "--json", metavar="FILE", help="Write all measurements to this file.", default="none"
        ),
    ] = None,
    force: Annotated[bool, option("--force", help="Replace an existing file.")] = False,
    quiet: Annotated[bool, option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Measure what each setting is worth for a model on this machine, and name the flags to use.

    Settings that are given stay as they are. Each other one is changed, in turn, and compared with its
    default on the jobs decode, mixed and shared of `cbatch bench`. Leave the machine alone meanwhile.
    After Ctrl-C, the results so far are printed. The result for flash attention is kept for later loads.

    Example: cbatch tune model.gguf --minutes 30 --json tuned.json
    """
    model = one_model(file, model)
    if json_file is not None:
        check_apart(json_file, parts_of_model(model) if model else ())
        check_new(json_file, force=force)
    settings = {"parallel": DEFAULT_PARALLEL, **_chosen(given.engine_settings())}
    from cbatch.bench.model_text import model_text

    with model_text(None if model is None else str(model)) as text:
        settings.setdefault("ctx_per_seq", min(_N_WINDOW, text.n_ctx_train))
        tuner = _tuner(text, settings, at_once, minutes)
        error = _run(tuner, is_quiet=quiet)
    is_noted = not tuner.is_disturbed and _note(tuner, text.path, settings)
    facts = {"model": text.path, "minutes": minutes, "at_once": tuner.pace.n_clients, **settings}
    _show(tuner, facts, is_noted=is_noted)
    if json_file is not None:
        _write(json_file, facts, tuner, is_noted=is_noted)
    if isinstance(error, KeyboardInterrupt):
        raise typer.Exit(ExitCode.INTERRUPTED)
    if error is not None:
        raise error


def _chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are as they would be anyway."""
    usual = EngineOptions()
    return {name: value for name, value in settings.items() if value != getattr(usual, name)}


def _tuner(
    text: "ModelText", settings: Mapping[str, Any], at_once: int | None, minutes: float
) -> "Tuner":
    from cbatch.backend.host_limits import available_cores
    from cbatch.backend.load.loader import describe_model  # slow to import
    from cbatch.bench.pacing import Pace
    from cbatch.bench.sides import ProcessSide
    from cbatch.bench.tuning import Tuner, changes_of
    from cbatch.bench.workloads import WORKLOADS

    jobs = [WORKLOADS[name] for name in _JOBS]
    _check_window(jobs, settings["ctx_per_seq"])
    n_cores, n_clients = available_cores(), at_once or settings["parallel"]
    options = EngineOptions.of(settings)

    def make_side(changed: Mapping[str, Any]) -> "TunedSide":
        return ProcessSide("engine", text.path, {**settings, **changed})

    def changes() -> "list[SettingChange]":
        found = describe_model(text.path, options, asks_probe=False)
        return changes_of(
            settings,
            n_cores,
            found["flash_attn"],
            options.speculate,
            is_packed=not found["why_not_packed"],
        )

    return Tuner(
        jobs,
        make_side,
        lambda job, n, seed: job.chains(text.exact, n, seed),
        changes,
        Pace(n_clients),
        _N_EACH * n_clients,
        60 * minutes,
        min(options.n_threads or n_cores, n_cores),
    )


def _check_window(jobs: "list[Workload]", n_window: int) -> None:
    n_needed = max(job.n_window for job in jobs) + _N_SLACK
    if n_needed > n_window:
        raise ConfigError(
            f"the jobs need slots of {n_needed:,} tokens, but have {n_window:,}: raise --ctx-per-seq, if the model "
            "was trained for so many"
        )


def _run(tuner: "Tuner", *, is_quiet: bool) -> BaseException | None:
    """Measure; return what has ended it early."""
    try:
        with bar(is_quiet=is_quiet) as tuner.show:
            if not is_quiet:
                tuner.say = _say_verdict
            tuner.run()
    except (KeyboardInterrupt, CBatchError) as error:
        return error
    return None


def _say_verdict(settings: Mapping[str, Any], verdict: str) -> None:
    say(f"{_flags(settings)}: {verdict}")


def _note(tuner: "Tuner", path: str, settings: Mapping[str, Any]) -> bool:
    """Keep what was found of flash attention for later loads; return whether there was something."""
    found = tuner.attention()
    if found is None:
        return False
    from cbatch.backend.load.loader import note_attention

    is_off, seen = found
    return note_attention(path, EngineOptions.of(settings), seen, is_off=is_off)


# ---- what is shown ----


def _advised(tuner: "Tuner", *, is_noted: bool) -> str:
    advice = dict(tuner.advice())
    if is_noted:
        advice.pop("flash_attn", None)
    return f"use {_flags(advice)}" if advice else "the defaults are best here"


def _flags(settings: Mapping[str, Any]) -> str:
    names = {o.setting or o.name: f"--{o.name.replace('_', '-')}" for o in OPTIONS}
    return " ".join(f"{names[name]} {value}" for name, value in settings.items())


def _remarks(tuner: "Tuner", *, is_noted: bool) -> Iterator[str]:
    noise = [f"{job.name} {tuner.noise(job.name):.1%}" for job in tuner.jobs]
    share = f"CPU time over wall time: {tuner.cpu_share:.2f}"
    yield f"noise, by two engines with the same settings: {', '.join(noise)}; {share}"
    if tuner.is_disturbed:
        yield "other programs were busy: run it again on a quiet machine; nothing was kept for later loads"
    if is_noted and (found := tuner.attention()):
        word = "off" if found[0] else "on"
        yield f"flash attention {word} is kept for later loads with these settings; no flag is needed"
    if untold := tuner.untold:
        names = "; ".join(_flags(change.settings) for change in untold)
        yield f"not measured: {names}. To measure all takes about {tuner.needed_s / 60:.0f} minutes (--minutes)"


def _show(tuner: "Tuner", facts: Mapping[str, Any], *, is_noted: bool) -> None:
    from cbatch.bench.summary import TextTable

    names = [job.name for job in tuner.jobs]
    rows = []
    for tried in tuner.tried:
        worth = tuner.worth(tried)
        ratios = [str(worth[name]) if name in worth else "–" for name in names]
        rows.append((_flags(tried.change.settings), *ratios, tuner.verdict(tried)))
    title = "speed with the change over speed without it, ± noise"
    table = TextTable(title, ("setting", *names, "verdict"), rows)
    show_tables([table] if rows else [], [*_remarks(tuner, is_noted=is_noted)], [], facts)
    write(_advised(tuner, is_noted=is_noted) + "\n")


def _write(path: Path, facts: Mapping[str, Any], tuner: "Tuner", *, is_noted: bool) -> None:
    from cbatch.files.report.page import machine_and_versions

    found = {
        "settings": facts,
        "machine": machine_and_versions(),
        **tuner.as_dict(),
        "flags": _advised(tuner, is_noted=is_noted),
        "is_noted": is_noted,
    }
    write_whole(path, json.dumps(found, indent=1) + "\n")
