"""`cbatch doctor`: what is installed, what is wrong or slow about it, and what to do."""

import json as encoding
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbatch.backend.named_library import VARIABLE
from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import option
from cbatch.cli.terminal import printable

if TYPE_CHECKING:
    from cbatch.verify.checkup import Advice
    from cbatch.verify.installation import Installation


def doctor(
    *,
    llama_library: Annotated[
        Path | None,
        option(
            metavar="PATH",
            help="Library of llama.cpp to check, or a folder that has it.",
            default="LLAMA_CPP_LIB_PATH, else llama-cpp-python's",
        ),
    ] = None,
    json: Annotated[bool, option("--json", help="Print one JSON object, for bug reports.")] = False,
) -> None:
    """Check the installation: versions, llama.cpp's library, processor, devices, and what they compute.

    The exit code is 1 if something is broken.

    Example: cbatch doctor --json
    """
    from cbatch.files.report.page import machine_facts, version_facts
    from cbatch.verify.checkup import check_up
    from cbatch.verify.installation import examine

    if llama_library is not None:
        os.environ[VARIABLE] = str(llama_library)  # a wrong path is a finding
    found = examine(version_facts(), machine_facts())
    advice = check_up(found)
    is_broken = any(a.severity == "broken" for a in advice)
    if json:
        told = {**found.as_json(), "is_broken": is_broken, "findings": [asdict(a) for a in advice]}
        write(encoding.dumps(told, ensure_ascii=False) + "\n")
    else:
        for line in (*_facts(found), "", *_findings(advice)):
            write(printable(line) + "\n")
    if is_broken:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _facts(found: "Installation") -> Iterator[str]:
    library = found.library
    rows = [*found.versions.items()]
    if library.get("version"):
        rows.append(("llama.cpp", f"{library['version']}, {library['library']}"))
        rows.append(("instructions", _instructions(library["system"])))
    rows += found.machine.items()
    rows += [("variable", f"{name}={value}") for name, value in found.variables.items()]
    for device in library.get("devices", ()):
        problem = found.answers[device["name"]]
        size = f"{device['n_free'] / 2**30:,.1f} of {device['n_total'] / 2**30:,.1f} GiB free"
        is_right = "answers right" if problem is None else problem
        rows.append(("device", f"{device['name']}, {device['maker']}: {size}; {is_right}"))
    for name, value in rows:
        yield f"{name:<16}  {' '.join(value.split())}"


def _instructions(system: str) -> str:
    """Return llama.cpp's line of instruction sets, without those that it does not have."""
    words = [part.strip() for part in system.replace(":", "|").split("|")]
    return " ".join(word.removesuffix(" = 1") for word in words if word.endswith(" = 1"))


def _findings(advice: "Sequence[Advice]") -> Iterator[str]:
    if not advice:
        yield "nothing is wrong"
    for a in advice:
        yield f"{a.severity}: {a.text}"
        yield f"  {a.todo}"
