"""Files and settings of a run that are of the wrong kind: what a user means, or a typed error."""

from __future__ import annotations

import io
import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.frames import run_table
from cbatch.files.output.sorting import sort_in_place, sort_to
from cbatch.files.preview import check_file, estimate_file
from cbatch.files.settings import FileOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OPTIONS = {"max_tokens": 2, "ignore_eos": True}
TABLE = pd.DataFrame({"prompt": ["a"]})


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(Engine(FakeBackend(2, 64, 32), options=OPTIONS)) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"id": "{i}", "prompt": "a"}}\n' for i in "ab"))
    return path


def ids(path: Path) -> list[str]:
    return sorted(json.loads(line)["id"] for line in path.read_text().splitlines())


# ---- names of files ----


@pytest.mark.parametrize(
    "wrong",
    [5, b"in.jsonl", None, {"in.jsonl"}, "", "a\0b", ["in.jsonl", 5], io.StringIO("{}"), TABLE],
    ids=lambda value: type(value).__name__,
)
def test_source_that_is_no_name_is_refused(engine: Engine, tmp_path: Path, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: run_file(wrong, tmp_path / "out.jsonl", engine=engine),
        lambda: stream_file(wrong, engine),
        lambda: check_file(wrong, engine=engine),
        lambda: estimate_file(wrong, engine=engine),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="source"):
            call()


@pytest.mark.parametrize("wrong", [5, b"out", None, "", "a\0b", ["out"], "x" * 300])
def test_output_that_is_no_name_is_refused(engine: Engine, source: Path, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: run_file(source, wrong, engine=engine),
        lambda: sort_in_place(wrong),
        lambda: sort_to(wrong, source.with_name("sorted")),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()


def test_names_may_be_text_and_begin_with_the_home(
    engine: Engine, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(source.parent))
    out: Any = "~/out.jsonl"
    run_file("~/in.jsonl", out, engine=engine, report="~/page.html")
    assert ids(source.with_name("out.jsonl")) == ["a", "b"]
    assert source.with_name("page.html").is_file()
    assert [counts.n_records for counts in sort_in_place(out).values()] == [2]
    target, by = cast("Any", "~/sorted.jsonl"), cast("Any", str(source))
    assert sort_to(out, target).n_records == 2
    assert ids(source.with_name("sorted.jsonl")) == ["a", "b"]
    source.with_name("out.jsonl.manifest").unlink()
    assert sort_to(out, target, by=by, force=True).n_records == 2
    found: Any = source.parent.glob("in*.jsonl")  # a pattern of the caller's own
    assert check_file(found, engine=engine).n_items == 2


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("format", 5),
            ("format", None),
            ("output_format", b"csv"),
            ("template", 5),
            ("system", []),
        ),
        *(
            ("is_raw", 1),
            ("shuffle", "no"),
            ("strict", None),
            ("retry_errors", 0),
            ("force", "yes"),
        ),
        *(("limit", 0), ("limit", 1.0), ("shuffle_seed", "a"), ("shuffle_seed", None)),
        *(("window", True), ("max_time_s", "1"), ("errors", 5), ("report", ""), ("trace", b"a\0")),
    ],
)
def test_setting_of_the_wrong_kind_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        FileOptions(**{name: value})


def test_numbers_and_flags_of_numpy_are_plain() -> None:
    given: dict[str, Any] = {"limit": np.int64(5), "shuffle": np.True_, "shuffle_seed": np.uint8(3)}
    options = FileOptions(**given, max_time_s=float("inf"))
    assert (options.limit, options.shuffle, options.shuffle_seed) == (5, True, 3)
    assert type(options.limit) is int


@pytest.mark.parametrize("wrong", [5, "engine", {}])
def test_engine_of_the_wrong_kind_is_refused(source: Path, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: run_file(source, source.with_name("out.jsonl"), engine=wrong),
        lambda: stream_file(source, wrong),
        lambda: check_file(source, engine=wrong),
        lambda: estimate_file(source, engine=wrong),
        lambda: run_table(TABLE, engine=wrong),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="engine must be an Engine"):
            call()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"progress": 1}, "progress must be True, False or a View"),
        ({"on_result": 5}, "on_result must be a function"),
        ({"stop": 5}, "stop must be a Stopper"),
        ({"options": {5: 3}}, "unknown option '5'"),
    ],
)
def test_what_run_file_is_told_is_checked(
    engine: Engine, source: Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_file(source, source.with_name("out.jsonl"), engine=engine, **given)
    assert not source.with_name("out.jsonl").exists()


@pytest.mark.parametrize(
    "given", [{"template": 5}, {"system": b"a"}, {"is_raw": 1}, {"progress": 1}]
)
def test_what_run_table_is_told_is_checked(engine: Engine, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        run_table(TABLE, engine=engine, **given)


@pytest.mark.parametrize(
    "given", [{"n_sample": 0}, {"n_sample": "1"}, {"sample_s": "1"}, {"sample_s": -1}]
)
def test_what_estimate_file_is_told_is_checked(
    engine: Engine, source: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        estimate_file(source, engine=engine, **given)


def test_unknown_setting_is_refused_by_name(engine: Engine, source: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match="windows"):
        check_file(source, engine=engine, windows=3)
