"""What README and docs say is so: snippets and commands run, tables and trees list everything there is."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
from argparse import ArgumentParser
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import cbatch
from cbatch.bench.cases import present, run_case
from cbatch.bench.sides import check_kinds
from cbatch.bench.text_work import VECTOR_WORKLOADS
from cbatch.bench.workloads import WORKLOADS
from cbatch.cli import app
from cbatch.engine_options import EngineOptions
from cbatch.files.settings import FileOptions
from cbatch.options import RunOptions, Sampling
from tests import lifecycle_page, protocol_page, test_imports
from tests.test_imports import room

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
PAGES = [ROOT / "README.md", *DOCS]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `cbatch` command in a page's shell blocks."""
    for line in "\n".join(blocks(page, "bash")).replace("&&", "\n").splitlines():
        words = shlex.split(line)
        if words and Path(words[0]).name == "cbatch":
            yield words[1:]


def measurements(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command that measures: in backticks, and in blocks of commands."""
    text = page.read_text(encoding="utf-8")
    lines = [*re.findall(r"`([^`\n]+)`", text)]
    lines += "\n".join([*blocks(page, "bash"), *blocks(page, "sh")]).splitlines()
    for line in lines:
        if re.match(r"(python -m cbatch\.bench\.[\w.]+|cbatch bench)( |$)", line):
            said = re.sub(r"[\[\]…]|>.*", "", line)
            yield shlex.split(re.sub(r"(?<=-rows) N\b", " 1", said))


PRINTED = re.compile(r"""print\(.*\)  # ("[^"]+"|\[[^]]*\]|[\w ]*\d[\w ]*)""")
"""What the comment of a line says that it prints: a quoted beginning, a list, or words with a number."""


class ParsedError(Exception):
    """A command line could be read; nothing is to be run."""


def parse_measurement(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the command is not there, or does not know a word."""
    if words[:2] == ["cbatch", "bench"]:
        click = get_command(app).commands["bench"]  # type: ignore[attr-defined]
        asked = click.make_context("bench", words[2:]).params
        for name in asked["workload"].split(","):
            assert name in {*WORKLOADS, *VECTOR_WORKLOADS}
        check_kinds((asked["sides"] or "engine").split(","))
        assert asked["case"] in (None, "NAME", *present())
        return
    really = ArgumentParser.parse_args

    def parse_only(parser: ArgumentParser, given: list[str]) -> None:
        really(parser, given)
        raise ParsedError

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_only)
    assert find_spec(words[2])
    with pytest.raises(ParsedError):
        run_case(words[2].rpartition(".")[2], words[3:])
    monkeypatch.undo()


def table(name: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading: what stands in backticks first, and the other cells."""
    section = text_of(name).split(heading)[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
    return {first: [cell.strip() for cell in rest.split("|")] for first, rest in rows}


@pytest.fixture
def workplace(tmp_path: Path, test_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder with the docs and a model, and work there, on one core."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "model.gguf").symlink_to(test_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbatch.backend.llama.llama_backend.available_cores", lambda: 1)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_snippets_run_and_print_what_they_promise(
    page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {}
    for snippet in blocks(page, "python"):
        exec(compile(snippet, page.name, "exec"), namespace)
        printed = capsys.readouterr().out
        for promise in PRINTED.findall(snippet):
            assert promise.strip('"') in printed, promise


@pytest.mark.real
def test_quickstart_makes_a_folder_in_which_examples_run(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "docs", clone / "docs")
    (clone / "cbatch").mkdir()
    (clone / "cbatch/models").symlink_to(ROOT / "cbatch/models")
    [line] = [text for text in blocks(ROOT / "docs/use/quickstart.md", "sh") if "mkdir" in text]
    subprocess.run(line, shell=True, check=True, cwd=clone)
    made = tmp_path / "try"
    shipped = (ROOT / "cbatch/models/chat.gguf").read_bytes()
    assert (made / "model.gguf").read_bytes() == shipped
    assert (made / "docs/examples/tools.jinja").is_file()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_run_one_after_another(page: Path, workplace: Path) -> None:
    asked = list(commands(page))
    if asked and asked[0][0] == "synth":
        (workplace / "model.gguf").unlink()
    for args in asked:
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, (args, result.output)


def test_commands_of_all_pages_write_files_of_their_own() -> None:
    written = [
        (args[i + 1], page.name)
        for page in PAGES
        for args in commands(page)
        for i, word in enumerate(args)
        if args[0] == "run" and word in ("-o", "--report", "--trace")
    ]
    assert len(dict(written)) == len(written) >= 7, written


def test_commands_of_the_readme_answer_as_it_says(workplace: Path) -> None:
    demo, ask, run = commands(ROOT / "README.md")
    shown = CliRunner().invoke(app, demo).stdout
    for block in blocks(ROOT / "README.md", "text")[0].split("\n\n"):
        assert block.strip() in shown, block
    assert len(CliRunner().invoke(app, ask).stdout) > 200
    assert CliRunner().invoke(app, run).exit_code == 0
    answers = (workplace / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == len(text_of("docs/examples/chats.jsonl").splitlines()) == 64


def test_first_example_is_short() -> None:
    assert len(blocks(ROOT / "README.md", "python")[0].splitlines()) <= 12


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors_of(page: Path) -> set[str]:
    """Return the names of a page's headings in links, as GitHub makes them."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    words = (line.lstrip("#").strip().lower().replace(" ", "-") for line in lines)
    return {re.sub(r"[^\w-]", "", heading) for heading in words}


def test_links_into_pages_lead_to_headings() -> None:
    wrong = []
    for page in PAGES:
        for to, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            target = page.parent / to if to else page
            if anchor not in anchors_of(target):
                wrong.append(f"{page.name}: {to}#{anchor}")
    assert wrong == []


def test_every_page_is_linked_from_the_first_page_of_its_folder() -> None:
    for page in DOCS:
        first = page.parent / "README.md"
        assert page == first or f"]({page.name})" in first.read_text(encoding="utf-8"), page
    for first in ROOT.glob("docs/*/README.md"):
        assert f"docs/{first.parent.name}/README.md)" in text_of("README.md")
        assert f"]({first.parent.name}/README.md)" in text_of("docs/README.md")


def test_architecture_names_files_that_exist() -> None:
    named = re.findall(
        r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|cpp))`", text_of("docs/understand/architecture.md")
    )
    roots = (ROOT / "cbatch", ROOT)
    assert len(named) > 20
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_architecture_names_every_module_of_core() -> None:
    page = text_of("docs/understand/architecture.md")
    modules = sorted(Path(cbatch.__file__).parent.glob("core/[a-z]*.py"))
    assert len(modules) > 10
    assert [path.name for path in modules if f"`core/{path.name}`" not in page] == []


def arrows() -> dict[str, set[str]]:
    """The rooms that each room of the architecture's diagram points to."""
    found: dict[str, set[str]] = {}
    for line in blocks(ROOT / "docs/understand/architecture.md", "mermaid")[0].splitlines()[1:]:
        start, _, end = re.sub(r'\["[^"]*"\]|-\. "[^"]*" \.-', "", line).partition(">")
        found.setdefault(start.strip(" -"), set()).update({end.strip()} - {""})
    return found


def test_architecture_draws_every_room_and_what_it_imports() -> None:
    """Every room of the wall's table is drawn, its arrows are allowed there, and they lead to all that it sees."""
    drawn = arrows()
    sees = {
        place: {"face" if p in test_imports.FACE else room(p.rstrip(":")) for p in places}
        for place, places in test_imports.SEES.items()
        if place not in (*test_imports.FACE, *test_imports.LEFT_OUT, "__main__")
    }
    sees |= {
        "face": {"support"},
        "support": set(),
    }  # errors, which support sees, are not drawn apart
    assert drawn.keys() == sees.keys()
    for name, ends in drawn.items():
        assert ends <= sees.get(name, set()), name
        reached: set[str] = set()
        while (more := {e for r in (reached or {name}) for e in drawn[r]}) - reached:
            reached |= more
        assert sees.get(name, set()) - {name} <= reached, name


def test_architecture_lists_the_modules_of_the_face() -> None:
    listed = re.search(r'face\["(.*)"\]', text_of("docs/understand/architecture.md"))
    assert listed is not None
    assert set(re.findall(r"(\w+)(?=,|:)", listed[1])) == test_imports.FACE


def test_architecture_tells_a_decode_step_in_a_dozen_files() -> None:
    """The files that it names are those that a step calls, but for small helpers."""
    page = (
        text_of("docs/understand/architecture.md")
        .split("## One step")[1]
        .split("In a step that")[0]
    )
    told = dict.fromkeys(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|cpp))`", page))
    assert 10 <= len(told) <= 12


def test_every_run_option_is_documented_with_its_default() -> None:
    documented = table("docs/use/options.md", "## Of a request")
    assert list(documented) == [f.name for f in fields(RunOptions)]
    for f in fields(Sampling):
        if f.name in documented and f.name not in ("seed", "logit_bias"):
            assert documented[f.name][0] == repr(f.default).removesuffix(".0")


def test_every_engine_option_is_documented_with_its_default() -> None:
    documented = table("docs/use/options.md", "## Of the engine")
    assert {name: cells[0] for name, cells in documented.items()} == {
        f.name: f"`{f.default!r}`" for f in fields(EngineOptions)
    }


def test_every_file_option_is_documented_with_its_default() -> None:
    documented = table("docs/use/options.md", "## Of a run over files")
    assert {name: cells[0] for name, cells in documented.items()} == {
        f.name: f"`{f.default!r}`" for f in fields(FileOptions)
    }


def test_every_error_is_documented_under_its_parent() -> None:
    tree = blocks(ROOT / "docs/use/errors.md", "")[0]
    depths = {m[2]: len(m[1]) // 4 for m in re.finditer(r"^([│├└─ ]*)(\w+)", tree, re.MULTILINE)}
    classes = [
        c
        for _, c in inspect.getmembers(cbatch, inspect.isclass)
        if issubclass(c, cbatch.CBatchError)
    ]
    assert depths == {c.__name__: len(own_line(c)) - 1 for c in classes}


def own_line(error: type[BaseException]) -> list[type[BaseException]]:
    """Return an error and its parents up to CBatchError, by first base."""
    if error is cbatch.CBatchError:
        return [error]
    [parent, *_] = error.__bases__
    return [error, *own_line(parent)]


def test_protocol_page_has_the_commands_of_the_code() -> None:
    written = protocol_page.SECTION.search(text_of("docs/operate/processes.md"))
    assert written is not None
    assert written[0] == protocol_page.section(), "run `python -m tests.protocol_page`"


def test_lifecycle_page_has_the_table_of_the_code() -> None:
    written = lifecycle_page.SECTION.search(text_of("docs/understand/lifecycle.md"))
    assert written is not None
    assert written[0] == lifecycle_page.section(), "run `python -m tests.lifecycle_page`"


def test_every_finish_reason_is_documented() -> None:
    documented = table("docs/understand/lifecycle.md", "## Finish reasons")
    assert tuple(documented) == get_args(cbatch.FinishReason)


def test_floor_of_llama_cpp_python_is_that_of_the_package() -> None:
    [floor] = re.findall(r"llama-cpp-python>=([\d.]+)", text_of("pyproject.toml"))
    assert f"≥ {floor}," in text_of("docs/operate/compatibility.md")
    assert f"llama-cpp-python=={floor}" in text_of("docs/operate/compatibility.md")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_measure_exist_and_know_their_words(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [words for words in measurements(page) if "NAME" not in words[-1]]
    for words in asked:
        parse_measurement(words, monkeypatch)
    with_measurements = (ROOT / "README.md", "performance.md", "benchmarks.md")
    assert asked or not {page, page.name} & {*with_measurements}


def test_every_table_of_figures_has_its_command() -> None:
    sections = re.split(r"\n(?=##+ )", text_of("docs/understand/performance.md"))
    with_tables = [section for section in sections if re.search(r"^\|", section, re.MULTILINE)]
    assert len(with_tables) > 10
    command = re.compile(r"`(python -m cbatch\.bench\.[\w.]+|cbatch bench) ")
    assert [s.splitlines()[0] for s in with_tables if not command.search(s)] == []
    assert command.search(text_of("README.md").split("## Measurements")[1].split("\n|")[0])
