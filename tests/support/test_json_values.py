"""JSON text is read in bounded time: its values are counted before any is made, and none is visited as garbage."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.errors import ConfigError
from cbatch.files.file_run import run_file
from cbatch.files.input.json_requests import loaded
from cbatch.support import checks
from cbatch.support.checks import MAX_NAMES, MAX_VALUES, TooManyValuesError, read_json
from cbatch.support.garbage import uncollected
from tests.files.runs import SHORT, records
from tests.runtime.backends import in_thread
from tests.server.clients import COMPLETIONS, USER, call, error_of, fake_app
from tests.server.kept import begun, content, ended, kept_app, line, lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N_LISTS = MAX_VALUES // 2
TOO_MANY = b'{"x": [' + b"[]," * N_LISTS + b"0]}"
TOO_MANY_WORDS = "it has 2,000,002 values; at most 2,000,000 are read"

values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a,[{":}]\\\n\u20ac'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('a:"\\', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


NAMES = "{" + ",".join(f'"{i}":0' for i in range(300_000)) + "}"


def n_marks(value: Any, names: set[str]) -> int:
    """Commas and opening brackets of a value's JSON text; its names are put into `names`."""
    if not isinstance(value, list | dict):
        return 0
    if isinstance(value, dict):
        names.update(value)
        value = [*value.values()]
    return max(1, len(value)) + sum(n_marks(one, names) for one in value)


@given(values, st.booleans())
def test_values_and_names_outside_strings_are_counted(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    names: set[str] = set()
    n_values = n_marks(value, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_N_FEW", 0)
        patch.setattr(checks, "MAX_VALUES", n_values)
        assert read_json(text) == value
        if names:
            patch.setattr(checks, "MAX_NAMES", len(names) - 1)
            with pytest.raises(TooManyValuesError):
                read_json(text)
        if n_values > 1:
            patch.setattr(checks, "MAX_VALUES", n_values - 1)
            with pytest.raises(TooManyValuesError):
                read_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOO_MANY.decode(), TOO_MANY_WORDS),
        ("[" + '"a",' * 3 * 10**6 + "0]", "it has 3,000,000 strings; at most 2,000,000 are read"),
        (NAMES, "it has 300,000 different names; at most 262,144 are read"),
        (NAMES.replace('":', '" \t:'), "it has 300,000 different names"),
    ],
)
def test_too_many_are_refused(text: str, words: str) -> None:
    with pytest.raises(TooManyValuesError, match=words):
        read_json(text)


@pytest.mark.parametrize(
    "value",
    [
        [5] * 10**6,
        {"messages": USER * MAX_NAMES},
        "a,[{:" * 10**6,
        '\\":,' * 10**6,
    ],
    ids=["tokens", "chat", "text", "quotes"],
)
def test_what_users_send_is_read(value: Any) -> None:
    assert read_json(json.dumps(value)) == value


# ---- where text comes in ----


def test_body_with_too_many_values_is_refused() -> None:
    with fake_app(4, 256) as app:
        headers = {"content-type": "application/json"}
        answer = call(app, COMPLETIONS, method="POST", content=TOO_MANY, headers=headers)
    assert TOO_MANY_WORDS in error_of(answer, 400)["message"]


def test_text_of_json_in_a_body_is_bounded_too() -> None:
    with fake_app(4, 256) as app:
        answer = call(app, COMPLETIONS, {"prompt": "a", "json_schema": TOO_MANY.decode()})
    assert "must be a string of 1 … 1048576 characters" in error_of(answer, 400)["message"]


def test_line_of_a_batch_with_too_many_values_fails_it(tmp_path: Path) -> None:
    with kept_app(tmp_path) as app:
        batch = ended(app, begun(app, lines(line("a")) + TOO_MANY))
        assert content(app, batch["output_file_id"]) == []
    (error,) = batch["errors"]["data"]
    assert (error["line"], error["code"]) == (2, "invalid_json_line")
    assert error["message"].startswith(TOO_MANY_WORDS)


def test_line_of_a_run_with_too_many_values_fails_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n' + TOO_MANY)
    with Engine(FakeBackend(2, 64)) as engine:
        summary = run_file(source, target, engine=engine, options=SHORT)
    assert (summary.n_done, summary.n_failed) == (2, 1)
    assert any(TOO_MANY_WORDS in str(record.get("error")) for record in records(target))


def test_option_of_json_text_is_bounded() -> None:
    with pytest.raises(ConfigError, match=TOO_MANY_WORDS):
        checks.parsed("json_schema", TOO_MANY.decode())


# ---- the collector ----


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generations that were collected since the list was cleared; nothing is frozen."""
    found: list[int] = []
    gc.unfreeze()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.freeze()  # as conftest has it


def is_young(value: Any) -> bool:
    return any(value is young for i in (0, 1) for young in gc.get_objects(generation=i))


def test_line_is_read_without_looks_for_garbage(looks: list[int]) -> None:
    data = b'{"x": [' + b"[]," * 2**16 + b"0]}"
    looks.clear()
    value, wrong = loaded(data)
    assert (wrong, looks) == (None, [1])  # of what was young before
    assert not is_young(value["x"])
    assert gc.isenabled()


@pytest.mark.usefixtures("looks")
def test_garbage_that_became_old_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    for name, value in (
        ("_count", lambda: len(alive)),
        ("_blocks._n_all_most", 0),
        ("_blocks._n_old_most", 0),
    ):
        monkeypatch.setattr(f"cbatch.support.garbage.{name}", value)
    for _ in range(20):
        with uncollected():
            made = [Cycle() for _ in range(20_000)]
            alive.update(made)
        del made
    assert len(alive) < 300_000


def test_blocks_overlap() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            begun.set()
            assert may_end.wait(60)

    ended = in_thread(other)
    assert begun.wait(60)
    with uncollected():
        pass
    assert not gc.isenabled()
    may_end.set()
    ended()
    assert gc.isenabled()


def test_collector_that_a_program_has_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_that_a_program_has_frozen_stay_frozen() -> None:
    gc.freeze()
    n = gc.get_freeze_count()
    with uncollected():
        pass
    assert n * 0.9 < gc.get_freeze_count() <= n
