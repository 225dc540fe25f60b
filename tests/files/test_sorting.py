"""Records in the order of the input, from the manifest or by ids, and files that a run can go on with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING

import pytest

from cbatch.errors import ConfigError, OutputError
from cbatch.files.output import durable as disk
from cbatch.files.output.manifest import Manifest
from cbatch.files.output.sorting import Sorted, sort_in_place, sort_to
from tests.files.journals import HEADER, journal_of, open_journal, records, run_pass
from tests.files.machine import LOSSES, Loss, Machine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DIGEST = bytes(16)


def fill(folder: Path, numbers: Sequence[int]) -> Path:
    """Write the records of these items in this order; every fifth is an error."""
    with open_journal(folder) as journal:
        for number in numbers:
            journal.claim(f"item-{number}", DIGEST, number)
        for number in numbers:
            record = f"{number} {'x' * number}\n".encode()
            journal.add(number, record, is_error=number % 5 == 0)
    return folder / "out"


def numbers_in(path: Path) -> list[int]:
    [header, *lines] = path.read_bytes().splitlines(keepends=True)
    assert header == HEADER
    return [int(line.split()[0]) for line in lines]


def test_sort_in_place_restores_the_order_of_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fill(tmp_path, [3, 12, 10, 1, 2, 5])
    (tmp_path / ".out.part").write_text("mine")
    assert sort_in_place(out) == {out: Sorted(4), tmp_path / "errors": Sorted(2)}
    assert numbers_in(out) == [1, 2, 3, 12]
    assert numbers_in(tmp_path / "errors") == [5, 10]
    assert sorted(os.listdir(tmp_path)) == [".out.part", "errors", "out", "out.manifest"]
    with monkeypatch.context() as patch:
        patch.setattr(disk, "create", lambda *args: pytest.fail("it is sorted"))
        assert sort_in_place(out)[out] == Sorted(4)
    with open_journal(tmp_path) as journal:
        claims = [journal.claim(f"item-{n}", DIGEST, n) for n in (1, 2, 3, 4)]
        assert claims == ["done"] * 3 + ["new"]
        journal.add(4, b"4 new\n", is_error=False)
    assert numbers_in(out) == [1, 2, 3, 12, 4]


def test_order_is_that_of_the_latest_input(tmp_path: Path) -> None:
    out = fill(tmp_path, [1, 2, 3])
    with open_journal(tmp_path) as journal:
        for number, name in enumerate(["item-3", "item-1", "item-2"], 1):
            assert journal.claim(name, DIGEST, number) == "done"
    sort_in_place(out)
    assert numbers_in(out) == [3, 1, 2]


def test_line_put_in_at_the_top_moves_all_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_items, commits = 3000, list[Manifest]()
    out = fill(tmp_path, range(1, n_items + 1))
    commit = Manifest.commit

    def counted(manifest: Manifest) -> None:
        commits.append(manifest)
        commit(manifest)

    monkeypatch.setattr(Manifest, "commit", counted)
    with open_journal(tmp_path) as journal:
        commits.clear()
        for number in range(1, n_items + 1):
            claim = journal.claim(f"item-{number}", DIGEST, number + 1)
            assert claim == ("done" if number % 5 else "failed")
            assert number < 1025 * (len(commits) + 1)  # the moved items are committed in between
        assert journal.claim("item-0", DIGEST, 1) == "new"
        journal.add(1, b"0 first\n", is_error=False)
    sort_in_place(out)
    assert numbers_in(out) == [n for n in range(n_items + 1) if n % 5 or not n]


def test_what_a_killed_run_left_is_repaired_first(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number in (2, 1):
        journal.claim(str(number), DIGEST, number)
        journal.add(number, b"%d\n" % number, is_error=False)
    journal.commit()
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path, killed)
    journal.close()
    with (killed / "out").open("ab") as file:
        file.write(b"torn")
    counts = sort_in_place(killed / "out")[killed / "out"]
    assert "were moved to out.cut-off" in " ".join(counts.notes)
    assert numbers_in(killed / "out") == [1, 2]


@pytest.mark.parametrize("loss", LOSSES)
def test_kill_before_every_step_of_a_sort_loses_nothing(tmp_path: Path, loss: Loss) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    fill(whole, [4, 10, 3, 5, 2, 1])
    expected = records(whole)
    for i_kill in count():
        folder = tmp_path / f"{i_kill}"
        shutil.copytree(whole, folder)
        machine = Machine(folder, i_kill, loss)
        if not machine.is_killed(lambda folder: sort_in_place(folder / "out")):
            break
        if not i_kill % 2:
            assert records(machine.picture) == expected
            run_pass(machine.picture, 0, 0)
        sort_in_place(machine.picture / "out")
        assert records(machine.picture) == expected
        assert numbers_in(machine.picture / "out") == [1, 2, 3, 4]
    assert i_kill > 10


def test_sort_to_another_file_leaves_the_output_as_it_is(tmp_path: Path) -> None:
    out = fill(tmp_path, [3, 1, 2])
    assert sort_to(out, tmp_path / "sorted") == Sorted(3)
    assert numbers_in(tmp_path / "sorted") == [1, 2, 3]
    assert numbers_in(out) == [3, 1, 2]
    assert not list(tmp_path.glob(".*"))


def test_sort_to_a_file_that_is_there_is_refused_or_replaces_it(tmp_path: Path) -> None:
    out = fill(tmp_path, [3, 1, 2])
    target = tmp_path / "sorted"
    target.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sorted: exists already: give another file, or --force"):
        sort_to(out, target)
    assert sort_to(out, target, force=True) == Sorted(3)
    assert numbers_in(target) == [1, 2, 3]


@pytest.mark.parametrize("name", ["out", "out.manifest", "link"])
def test_sort_onto_the_output_itself_is_refused(tmp_path: Path, name: str) -> None:
    out = fill(tmp_path, [2, 1])
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(ConfigError, match=r"is the output itself: to sort it in place"):
        sort_to(out, tmp_path / name, force=True)
    assert numbers_in(out) == [2, 1]


def test_full_disk_leaves_output_and_target_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = fill(tmp_path, [2, 1])

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_at", fail)
        with pytest.raises(OutputError, match=r"sorted: the disk is full"):
            sort_to(out, tmp_path / "sorted")
        with pytest.raises(OutputError, match=r"the disk is full"):
            sort_in_place(out)
    assert sorted(os.listdir(tmp_path)) == ["errors", "out", "out.manifest"]
    sort_in_place(out)
    assert numbers_in(out) == [1, 2]


LIMITED = """
import resource, sys
from cbatch.cli import app
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
app(sys.argv[2:])
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("n_most", "target"),
    [(100_000, None), (1_200_000, "sorted")],
    ids=["in place", "behind a block"],
)
def test_sort_on_a_full_disk_says_one_line_and_loses_nothing(
    tmp_path: Path, n_most: int, target: str | None
) -> None:
    with journal_of(tmp_path / "out") as journal:
        for number in range(200, 0, -1):
            journal.claim(str(number), DIGEST, number)
            record = f"{number} {'x' * 10_000}\n".encode()
            journal.add(number, record, is_error=False)
    before = (tmp_path / "out").read_bytes()
    to = [] if target is None else ["-o", str(tmp_path / target)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(n_most), "sort", str(tmp_path / "out"), *to],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "larger than is allowed" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["out", "out.manifest"]
    assert (tmp_path / "out").read_bytes() == before
    assert sort_in_place(tmp_path / "out") == {tmp_path / "out": Sorted(200)}


def test_sort_while_a_run_writes_is_refused(tmp_path: Path) -> None:
    out = fill(tmp_path, [2, 1])
    with open_journal(tmp_path):
        for target in (None, tmp_path / "sorted"):
            with pytest.raises(ConfigError, match="another run is writing to it"):
                sort_in_place(out) if target is None else sort_to(out, target)


def test_sort_of_an_edited_file_is_refused(tmp_path: Path) -> None:
    out = fill(tmp_path, [2, 1])
    with out.open("a", encoding="utf-8") as file:
        file.write("mine\n")
    with pytest.raises(ConfigError, match=r"5 bytes were added"):
        sort_in_place(out)


def test_sort_without_a_manifest_or_a_file_is_refused(tmp_path: Path) -> None:
    out, by = tmp_path / "out", requests(tmp_path / "in.jsonl", "a")
    for sort in (sort_in_place, lambda path: sort_to(path, tmp_path / "sorted", by=[by])):
        with pytest.raises(ConfigError, match="out: cannot be read: No such file"):
            sort(out)
    out.write_text("{}\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no manifest beside it"):
            sort_in_place(out)
        with pytest.raises(ConfigError, match=r"give the input \(--by INPUT\)"):
            sort_to(out, tmp_path / "sorted")
        assert out.read_text(encoding="utf-8") == "{}\n"
        (tmp_path / "out.manifest").touch()  # an empty one lists nothing


# ---- by the input ----


def write_lines(path: Path, *objects: object, end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(o) for o in objects) + end, encoding="utf-8")
    return path


def requests(path: Path, *ids: str) -> Path:
    return write_lines(path, *({"id": id, "prompt": "x"} for id in ids))


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_of_items_that_are_gone_come_last_until_they_come_back(tmp_path: Path) -> None:
    out = fill(tmp_path, [3, 1, 2, 4])
    for names, order in (((4, 2), [4, 2, 1, 3]), ((1, 2, 3, 4), [1, 2, 3, 4])):
        n_gone = 4 - len(names)
        with open_journal(tmp_path) as journal:
            for number, name in enumerate(names, 1):
                assert journal.claim(f"item-{name}", DIGEST, number) == "done"
            assert journal.settle_unclaimed() == (0, n_gone)
        assert sort_to(out, tmp_path / "sorted", force=True) == Sorted(4, n_gone)
        assert sort_in_place(out)[out] == Sorted(4, n_gone)
        assert numbers_in(out) == numbers_in(tmp_path / "sorted") == order


def test_sort_by_the_input_needs_no_manifest(tmp_path: Path) -> None:
    out = write_lines(tmp_path / "out", *({"id": id} for id in ["b", "c", "a"]), end="")
    by = requests(tmp_path / "in.jsonl", "a", "b", "c", "d")
    assert sort_to(out, tmp_path / "sorted", by=[by]) == Sorted(3)
    assert ids_in(tmp_path / "sorted") == ["a", "b", "c"]


def test_sorted_records_take_no_inputs_place_also_by_force(tmp_path: Path) -> None:
    by, out = tmp_path / "in.jsonl", tmp_path / "out"
    by.write_text('{"id": "a", "prompt": "p"}\n')
    out.write_text('{"id": "a", "text": "t"}\n')
    asked = by.read_bytes()
    (tmp_path / "link").hardlink_to(by)
    for target in (by, tmp_path / "link"):
        with pytest.raises(ConfigError, match="is the input: give another file for the results"):
            sort_to(out, target, by=[by], force=True)
    assert by.read_bytes() == asked


def test_sort_by_the_input_keeps_unknown_and_double_lines(tmp_path: Path) -> None:
    given = [("x", 1), ("b", 1), ("a", 1), ("b", 2), ("y", 1)]
    out = write_lines(tmp_path / "out", *({"id": id, "n": n} for id, n in given))
    by = requests(tmp_path / "in.jsonl", "a", "b", "a")
    assert sort_to(out, tmp_path / "sorted", by=[by]) == Sorted(5, 2)
    found = [json.loads(line) for line in (tmp_path / "sorted").read_text("utf-8").splitlines()]
    assert [(r["id"], r["n"]) for r in found] == [
        ("a", 1), ("b", 1), ("b", 2), ("x", 1), ("y", 1),
    ]  # fmt: skip


def test_sort_by_the_input_reads_the_ids_of_openai(tmp_path: Path) -> None:
    names = ["one", "two"]
    asked = [
        {"custom_id": n, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        for n in names
    ]
    by = write_lines(tmp_path / "in.jsonl", *asked)
    out = write_lines(tmp_path / "out", *({"id": "r", "custom_id": n} for n in names[::-1]))
    sort_to(out, tmp_path / "sorted", by=[by])
    text = (tmp_path / "sorted").read_text(encoding="utf-8")
    assert [json.loads(line)["custom_id"] for line in text.splitlines()] == names


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("id,text", r"out, line 2: is not JSON, and only JSON lines"),
        ('{"text": "x"}', r"out, line 2: has neither custom_id nor id"),
        ("[1]", r"out, line 2: has neither custom_id nor id"),
    ],
)
def test_sort_by_the_input_refuses_lines_without_ids(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "out").write_text(f'{{"id": "a"}}\n{line}\n', encoding="utf-8")
    by = requests(tmp_path / "in.jsonl", "a")
    with pytest.raises(ConfigError, match=said):
        sort_to(tmp_path / "out", tmp_path / "sorted", by=[by])
    assert not (tmp_path / "sorted").exists()


def test_input_is_refused_where_there_is_a_manifest(tmp_path: Path) -> None:
    out = fill(tmp_path, [2, 1])
    with pytest.raises(ConfigError, match=r"has a manifest, which knows the order"):
        sort_to(out, tmp_path / "sorted", by=[tmp_path / "in.jsonl"])


def test_records_larger_than_a_buffer_are_copied_whole(tmp_path: Path) -> None:
    with journal_of(tmp_path / "out") as journal:
        for number in (2, 1, 3):
            journal.claim(str(number), DIGEST, number)
            record = str(number).encode() * (3 * 2**20) + b"\n"
            journal.add(number, record, is_error=False)
    sort_in_place(tmp_path / "out")
    expected = [str(n).encode() * (3 * 2**20) for n in (1, 2, 3)]
    assert (tmp_path / "out").read_bytes().splitlines() == expected
