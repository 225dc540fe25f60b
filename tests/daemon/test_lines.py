"""The daemon's requests, slots and turns, on a machine whose steps the test does by hand."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.daemon.lines import END, MORE
from tests.daemon.machines import Daemon, stream
from tests.profiles import examples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


# ---- one request ----


def play(daemon: Daemon, moves: str) -> None:
    """Do what a scene says, a move at each `; `: a line, with steps until all is paused; or one of the words below."""
    for move in moves.split("; "):
        word, _, rest = move.partition(" ")
        if word == "start":  # an id, its total and quantum, a slot
            id, total, quantum, *more = rest.split(maxsplit=3)
            daemon.start(int(id), int(total), int(quantum), more=" ".join(more))
        elif word == "end":  # where a request ends by itself
            id, n = rest.split()
            daemon.machine.end_at[int(id)] = int(n)
        elif word == "send":  # a line without a step
            daemon.send(rest)
        elif word == "steps":
            for _ in range(int(rest)):
                daemon.machine.step(daemon.lines)
        elif word == "work":
            daemon.machine.work(daemon.lines)
        else:
            daemon.say(move)


def stream_of(daemon: Daemon, id: int, said: str) -> list[int]:
    """The values of a stream told as numbers of tokens, `.` for MORE and `!` for END."""
    found: list[int] = []
    n = 0
    for part in re.findall(r"\d+|[.!]", said):
        if part.isdigit():
            found += daemon.expected(id, n + int(part))[n:]
            n += int(part)
        else:
            found.append(MORE if part == "." else END)
    return found


THREE = "start 5 3 2; start 6 8 2; start 7 3 2; work"
SCENES: dict[str, tuple[str, dict[int, str], list[str]]] = {
    "steps bring the rest and one end": (
        "start 5 5 2; SCHED_STEP; SCHED_STEP; SCHED_STEP", {5: "2.2.1!"}, ["SCHED_STEP: idle"],
    ),
    "a request that ends by itself ends once": (
        "end 5 3; start 5 8 2; SCHED_DRAIN", {5: "2.1!"}, ["ended: stop, 3 tokens"],
    ),
    "a start takes the lowest free slot": (
        "start 5 8 2; start 6 8 2; start 7 8 2; CANCEL 6; start 8 8 2; LIST_TARGET_CACHE_SLOTS",
        {}, ["LIST_TARGET_CACHE_SLOTS 0:5:5:0 1:8:3:1 2:7:5:0 3:-:0:0"],
    ),
    "a start takes the slot that it names": (
        "start 5 8 2 SLOT 3; LIST_REQUESTS", {}, ["LIST_REQUESTS 5:3:8:0:2:0"],
    ),
    "a slot that is taken": (
        "start 5 8 2; start 6 8 2 SLOT 0", {6: "!"}, ["slot 0 has request 5, which is active"],
    ),
    "a slot out of range": (
        "start 6 8 2 SLOT 4", {6: "!"}, ["slot 4 is out of range: there are 4 slots"],
    ),
    "no free slot": (
        "start 5 8 2; start 6 8 2; start 7 8 2; start 8 8 2; start 9 8 2",
        {5: "", 9: "!"}, ["all 4 slots are in use"],
    ),
    **{
        f"defect 2: a drain goes on behind {line}": (
            f"start 5 8 2; start 6 8 2; send SCHED_DRAIN; steps 3; send {line}; work",
            {5: "2.2.2.2!"}, [],
        )
        for line in ("CANCEL 6", "LIST_REQUESTS", "FOO")
    },
    "defect 3: the whole window is checked at start": (
        "start 5 61 2; start 6 62 2; SCHED_DRAIN", {6: "!", 5: "2." * 30 + "1!"},
        ["3 + 62 tokens are more than a slot holds: 64"],
    ),
    "defect 4: a cancel ends the stream of its own id": (
        "start 5 8 2; start 6 8 2; CANCEL 5", {5: "!", 0: "", 6: "2."}, [],
    ),
    "defect 5: a continue behind a cancel is refused": (
        "start 5 8 2; CANCEL 5; REQ 5 CONTINUE 2; REQ 5 SLOT 0 CONT 2; SLOT 0 CONTINUE 2",
        {5: "!!!", 0: "!"}, [],
    ),
    "defect 6: one id is active in one slot, and lives on": (
        "start 5 8 2; start 5 8 2 SLOT 2; work; SCHED_DRAIN", {5: "2..2.2.2!"}, [],
    ),
    "defect 7: a shared step ends a request at its own end": (
        "end 5 3; start 5 8 2; start 6 8 2; SCHED_BATCH_TARGET_STEP; SCHED_BATCH_TARGET_STEP",
        {5: "2.1.!", 6: "2.1.1."}, [],
    ),
    **{
        f"defect 8: {line!r} has its id and an end": (f"{line}; REQ 7 {line}", {0: "!", 7: "!"}, [])
        for line in ("FOO", "SNAPSHOT 0", "RESTORE 0 p.bin 8", "\0")
    },
    "a late cancel touches no other request": (
        "start 5 2 2; work; start 6 8 2; CANCEL 5; CANCEL 99; SCHED_DRAIN",
        {5: "2!", 99: "", 6: "2.2.2.2!"}, ["cancelled already, or never active"],
    ),
    "a continue while a turn runs waits for it": (
        "start 5 12 2; send REQ 5 CONTINUE 3; work", {5: "2.3."}, [],
    ),
    "a request that reached its total is continued": (
        "start 5 4 2; SCHED_DRAIN; REQ 5 CONTINUE 5; CANCEL 5; REQ 5 CONTINUE 1",
        {5: "2.2!5!!"}, ["cannot be continued"],
    ),
    "a continue beyond the window is refused": (
        "start 5 60 99; work; REQ 5 CONTINUE 2; REQ 5 CONTINUE 1", {5: "60!!1!"},
        ["63 + 2 tokens are more than a slot holds: 64"],
    ),
    "a continue of who is not active": (
        "start 5 8 2; work; REQ 6 SLOT 0 CONTINUE 2", {5: "2.", 6: "!"}, ["request 6 is not active"],
    ),
    "a continue in the slot of another": (
        "start 5 8 2; work; REQ 5 SLOT 1 CONTINUE 2", {5: "2.."},
        ["request 5 is in slot 0, not in 1"],
    ),
    "a continue where another is since then": (
        "start 5 4 4; work; start 6 4 4; work; REQ 5 CONTINUE 2", {5: "4!!", 6: "4!"},
        ["request 5 is not active and cannot be continued"],
    ),
    "turns beyond the total are refused": (
        "start 5 5 2; send REQ 5 CONTINUE 3; send REQ 5 CONTINUE 1; work", {5: "2..3!"},
        ["request 5 has turns already for all of its 5 tokens"],
    ),
    "a refused line is answered at once": (
        "start 5 8 2; work; send REQ 5 CONTINUE 0", {5: "2.."}, [],
    ),
    "a refused line adds no second end": ("start 5 2 2; send REQ 5 FOO; work", {5: "2!"}, []),
    "a peek shows the next shared step": (
        f"{THREE}; SCHED_BATCH_PEEK; SCHED_BATCH_PEEK 2; SCHED_STEP; SCHED_BATCH_PEEK 2", {6: "2."},
        [
            "SCHED_BATCH_PEEK rows=3 5:0:5 6:1:5 7:2:5", "SCHED_BATCH_PEEK rows=2 5:0:5 6:1:5",
            "SCHED_BATCH_PEEK rows=2 6:1:5 7:2:5",
        ],
    ),
    "a tail takes those with one token left": (
        f"{THREE}; SCHED_BATCH_TARGET_TAIL; SCHED_BATCH_TARGET_TAIL",
        {5: "2.1!", 6: "2.", 7: "2.1!"}, ["SCHED_BATCH_TARGET_TAIL rows=0"],
    ),
    "a shared drain ends where nobody is left to share with": (
        f"{THREE}; SCHED_BATCH_DRAIN; SCHED_DRAIN", {5: "2.1!", 6: "2.1.2.2.1!", 7: "2.1!"},
        ["SCHED_BATCH_DRAIN rows=1 6:1:6"],
    ),
    "a misspelt command is no prompt": (
        "SCHED_SETP 3", {0: "!"}, ["neither a command nor a prompt: SCHED_SETP: No such file"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_lines_bring_the_streams_and_words_of_their_scene(daemon: Daemon, scene: str) -> None:
    moves, streams, words = SCENES[scene]
    play(daemon, moves)
    assert {id: daemon.out.of(id) for id in streams} == {
        id: stream_of(daemon, id, said) for id, said in streams.items()
    }
    assert all(daemon.out.said(said) for said in words)


@pytest.mark.parametrize(("order", "n_steps"), [("SCHED_DRAIN", 3), ("SCHED_STEP", 1)])
def test_defect_9_prompt_that_is_computed_blocks_nobody(
    daemon: Daemon, order: str, n_steps: int
) -> None:
    play(daemon, "start 5 6 2; work")
    daemon.start(6, 4, 2, n_prompt=60)
    play(daemon, f"send {order}; steps {n_steps}")
    assert daemon.out.of(6) == []
    assert daemon.out.tokens_of(5) == daemon.expected(5, 2 + n_steps)
    daemon.say("SCHED_DRAIN")
    assert daemon.out.tokens_of(6) == daemon.expected(6, 4, n_prompt=60)


def test_failed_request_has_its_reason_and_one_end(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    daemon.machine.break_request(daemon.lines, "5.0.0")
    assert daemon.out.of(5) == [END]
    assert daemon.out.said("failed: the row is broken")
    daemon.start(6, 2, 2)
    daemon.machine.work(daemon.lines)
    assert daemon.out.of(6) == [*daemon.expected(6, 2), END]


# ---- prompts ----


def test_bad_prompt_files_are_refused_by_name(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"12345")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    daemon.prompt(1, 1000, name="high")
    daemon.prompt(1, -1, name="low")
    daemon.prompt(*[1] * 65, name="long")
    words = {
        "odd": "5 bytes are not whole tokens of 4 bytes",
        "empty": "the file is empty",
        "folder": "not a file of token ids",
        "pipe": "not a file of token ids",
        "none": "No such file or directory",
        "high": "token 1000 is not in the vocabulary of 1,000",
        "low": "token -1 is not in the vocabulary of 1,000",
        "long": "65 tokens, but a slot holds at most 64",
    }
    for i, (name, what) in enumerate(words.items(), 1):
        daemon.say(f"REQ {i} START {tmp_path / name} 8 2")
        assert daemon.out.of(i) == [END], name
        assert daemon.out.texts[-1] == (i, f"error in line {i}: {tmp_path / name}: {what}")
    assert not daemon.machine.runs


# ---- the ten defects of the daemon whose lines these are ----


def test_defect_1_longer_word_request_and_blanks_in_a_name_are_read(daemon: Daemon) -> None:
    daemon.say(f"REQUEST 7 START {daemon.prompt(9, name='my  prompt.bin')} 2 2")
    assert daemon.out.of(7) == [*stream([9], 2), END]


def test_defect_10_shared_step_is_one_order_to_the_machine(daemon: Daemon) -> None:
    for id in (5, 6, 7):
        daemon.start(id, 8, 2, n_prompt=id)  # other positions, too
    daemon.machine.work(daemon.lines)
    daemon.say("SCHED_BATCH_TARGET_STEP")
    assert daemon.machine.turns == [[("5.0.0", 1), ("6.1.0", 1), ("7.2.0", 1)]]
    assert daemon.machine.n_prefilled == 5 + 6 + 7


# ---- order ----


def test_drain_gives_nobody_two_quanta_before_another_one(daemon: Daemon) -> None:
    for id, quantum in ((5, 1), (6, 4), (7, 2)):
        daemon.start(id, 12, quantum)
    daemon.say("SCHED_DRAIN")
    marks = [id for id, value in daemon.out.frames if value in (MORE, END)]
    for n in range(3, 9, 3):
        assert {*marks[n - 3 : n]} == {5, 6, 7}
    for id in (5, 6, 7):
        assert daemon.out.tokens_of(id) == daemon.expected(id, 12)


def test_steps_go_round_over_slots_and_wait_for_each_other(daemon: Daemon) -> None:
    for id in (5, 6, 7):
        daemon.start(id, 8, 1)
    for _ in range(4):
        daemon.send("SCHED_STEP")
    daemon.machine.work(daemon.lines)
    daemon.say(*["SCHED_STEP"] * 3)
    keys = ("5.0.0", "6.1.0", "7.2.0", "5.0.0", "6.1.0", "7.2.0", "5.0.0")
    assert daemon.machine.turns == [[(key, 1)] for key in keys]


def test_request_is_admitted_during_a_drain(daemon: Daemon) -> None:
    daemon.start(5, 12, 2)
    daemon.send("SCHED_DRAIN")
    for _ in range(5):
        daemon.machine.step(daemon.lines)
    daemon.start(6, 4, 2)
    daemon.machine.work(daemon.lines)
    assert daemon.out.tokens_of(6) == daemon.expected(6, 4)
    assert daemon.out.frames.index((6, END)) < daemon.out.frames.index((5, END))
    assert daemon.out.said("SCHED_DRAIN: idle")


# ---- cancel and continue ----


def test_cancelled_request_says_nothing_more(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    daemon.start(6, 8, 2)
    daemon.send("SCHED_DRAIN")
    daemon.machine.step(daemon.lines)
    late = daemon.machine.runs["5.0.0"]
    daemon.send("REQ 5 CANCEL")
    assert "5.0.0" not in daemon.machine.runs
    daemon.machine.runs["5.0.0"] = late  # as if a step was under way
    daemon.machine.step(daemon.lines)
    del daemon.machine.runs["5.0.0"]
    assert daemon.out.of(5) == [*daemon.expected(5, 1), END]
    daemon.machine.work(daemon.lines)
    assert daemon.out.tokens_of(6) == daemon.expected(6, 8)


def test_continue_in_parts_is_one_run(daemon: Daemon) -> None:
    daemon.start(5, 12, 2)
    daemon.machine.work(daemon.lines)
    n_prefilled = daemon.machine.n_prefilled
    daemon.say("REQ 5 CONTINUE 3", "REQ 5 SLOT 0 CONT 1", "REQ 5 CONTINUE 99")
    assert daemon.out.tokens_of(5) == daemon.expected(5, 12)
    assert [i for i, v in enumerate(daemon.out.of(5)) if v < 0] == [2, 6, 8, 15]
    assert daemon.machine.n_prefilled == n_prefilled


# ---- shared steps ----


def three(daemon: Daemon) -> None:
    play(daemon, THREE)


def test_shared_step_goes_round(daemon: Daemon) -> None:
    three(daemon)
    daemon.say(*["SCHED_BATCH_TARGET_STEP 2"] * 2)
    assert daemon.machine.turns == [[("5.0.0", 1), ("6.1.0", 1)], [("7.2.0", 1), ("6.1.0", 1)]]


def test_shared_drain_of_two_serves_all_in_turn(daemon: Daemon) -> None:
    for id in (5, 6, 7):
        daemon.start(id, 6, 2)
    daemon.say("SCHED_BATCH_DRAIN 2", "SCHED_DRAIN")
    assert [{key for key, _ in turn} for turn in daemon.machine.turns][:3] == [
        {"5.0.0", "6.1.0"},
        {"7.2.0", "5.0.0"},
        {"6.1.0", "7.2.0"},
    ]
    assert {n for turn in daemon.machine.turns for _, n in turn} == {2}  # each step is shared
    for id in (5, 6, 7):
        assert daemon.out.tokens_of(id) == daemon.expected(id, 6)


def test_probe_reports_differences_and_changes_nothing(daemon: Daemon) -> None:
    three(daemon)
    daemon.machine.different["6.1.0"] = 8
    before = [*daemon.out.frames]
    daemon.say("LIST_REQUESTS", "SCHED_BATCH_PROBE", "LIST_REQUESTS", "SCHED_BATCH_PROBE 1")
    assert daemon.out.frames == before
    assert daemon.out.said("compared=") == ["SCHED_BATCH_PROBE compared=3 differences=1 6:7:8"]
    assert len({*daemon.out.said("LIST_REQUESTS")}) == 1
    daemon.say("SCHED_DRAIN")
    assert daemon.out.tokens_of(6) == daemon.expected(6, 8)


def test_shared_steps_need_tagged_frames(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, is_tagged=False)
    daemon.say("SCHED_BATCH_TARGET_STEP", "SCHED_BATCH_PEEK", "SCHED_BATCH_DRAIN 2")
    assert daemon.out.frames == [(0, END)] * 3
    assert len(daemon.out.said("shared steps need --stream-tagged")) == 3


def test_untagged_stream_has_one_request_at_a_time(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, is_tagged=False)
    daemon.start(5, 4, 2)
    daemon.start(6, 4, 2)
    daemon.machine.work(daemon.lines)
    daemon.start(6, 4, 2)
    a, b, c, d = daemon.expected(5, 4)
    values = [value for _, value in daemon.out.frames]
    assert values == [a, b, MORE, MORE, MORE]  # END would seem to be the end of 5
    daemon.send("SCHED_DRAIN")
    daemon.send("FOO")
    daemon.machine.work(daemon.lines)
    assert [value for _, value in daemon.out.frames][5:] == [c, d, END, END]
    daemon.start(6, 2, 2)
    daemon.machine.work(daemon.lines)
    assert daemon.out.of(6) == [*daemon.expected(6, 2), END]


# ---- the oldest command ----


@pytest.mark.parametrize("is_tagged", [False, True])
def test_prompts_are_answered_one_after_the_other(tmp_path: Path, is_tagged: bool) -> None:
    daemon = Daemon(tmp_path, is_tagged=is_tagged)
    a, b = daemon.prompt(5), daemon.prompt(6)
    daemon.send(f"{a} 3")
    daemon.send(f"{b} 2")
    daemon.machine.work(daemon.lines)
    assert daemon.out.of(0) == [*stream([5], 3), END, *stream([6], 2), END]


def test_prompt_for_a_slot_with_an_owner_is_refused(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    path = daemon.prompt(6)
    daemon.say(f"{path} 2", f"REQ 9 SLOT 1 {path} 2")
    assert daemon.out.of(0) == [END]
    assert daemon.out.said("slot 0 has request 5, which is active")
    assert daemon.out.of(9) == [*stream([6], 2), END]


def test_waiting_prompt_is_cancelled(daemon: Daemon) -> None:
    path = daemon.prompt(5)
    daemon.send(f"REQ 8 {path} 3")
    daemon.send(f"REQ 9 {path} 3")
    daemon.send("CANCEL 9")
    daemon.machine.work(daemon.lines)
    assert daemon.out.of(9) == [END]
    assert daemon.out.of(8) == [*stream([5], 3), END]


# ---- the end ----


def test_end_of_input_drains_what_is_active(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    daemon.send(f"{daemon.prompt(6)} 3")
    daemon.send(f"REQ 9 SLOT 1 {daemon.prompt(6)} 3")
    daemon.lines.end_input()
    assert not daemon.lines.is_done
    daemon.machine.work(daemon.lines)
    assert daemon.lines.is_done
    assert daemon.out.tokens_of(5) == daemon.expected(5, 8)
    assert daemon.out.of(9) == [*stream([6], 3), END]
    assert daemon.out.of(0) == [END]  # slot 0 was taken
    assert not daemon.out.said("SCHED_DRAIN")


def test_client_that_leaves_ends_its_requests(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    daemon.send("SCHED_DRAIN")
    daemon.lines.leave()
    assert daemon.lines.is_done
    assert not daemon.machine.runs


def test_engine_that_stops_ends_every_stream(daemon: Daemon) -> None:
    daemon.start(5, 8, 2)
    daemon.start(6, 8, 2)
    daemon.machine.work(daemon.lines)
    daemon.machine.is_closed = True
    daemon.send("SCHED_DRAIN")
    assert daemon.lines.is_done
    assert [daemon.out.of(id)[-1] for id in (5, 6)] == [END, END]
    daemon.start(7, 8, 2)
    assert daemon.out.of(7) == [END]


def test_no_more_commands_wait_than_may(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbatch.daemon.lines.N_WAITING_MAX", 3)
    daemon.start(5, 8, 2)
    for _ in range(5):
        daemon.send("SCHED_STEP")
    assert len(daemon.out.said("3 commands wait already")) == 2


# ---- snapshots ----


def test_snapshot_names_the_tokens_of_a_slot_and_is_listed(daemon: Daemon) -> None:
    a, b = daemon.prompt(5, 1, 2), daemon.prompt(6, 1, 2, 3)
    daemon.say("LIST_SLOTS", f"{a} 4", "SNAPSHOT 2", f"SLOT 1 {b} 2", "SLOT 1 SNAPSHOT 0")
    daemon.say("LIST_SLOTS", "FREE_SNAPSHOT 2", "LIST_SLOTS", "FREE_SNAPSHOT 2")
    assert daemon.out.said("[snap]") == [
        *("[snap] slots=", "[snap] inline slot=2 cur_pos=7", "[snap] inline slot=0 cur_pos=6"),
        *("[snap] slots=0,2", "[snap] freed slot=2", "[snap] slots=0", "[snap] freed slot=2"),
    ]


def test_prompt_that_begins_with_its_snapshot_is_answered(daemon: Daemon) -> None:
    daemon.say(f"{daemon.prompt(5, 1)} 2", "SNAPSHOT 3")
    longer = daemon.prompt(5, 1, *stream([5, 1], 2), 8, name="longer.bin")
    daemon.say(f"REQ 7 SLOT 2 RESTORE 3 {longer} 4")
    assert daemon.out.of(7) == [*stream([5, 1, *stream([5, 1], 2), 8], 4), END]


@pytest.mark.parametrize(("more", "n"), [("LIST_REQUESTS", 5), ("CANCEL 0", 2)])
def test_snapshot_waits_for_the_end_of_the_prompt_before_it(
    daemon: Daemon, more: str, n: int
) -> None:
    daemon.send(f"{daemon.prompt(5, 1)} 3")
    daemon.send("SNAPSHOT 0")
    assert daemon.out.said("[snap]") == []
    daemon.say(more)
    assert daemon.out.said("[snap]") == [f"[snap] inline slot=0 cur_pos={n}"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RESTORE 1 {other} 4", "does not begin with the tokens of snapshot 1"),
        ("RESTORE 1 {short} 4", "does not begin with the tokens of snapshot 1"),
        ("RESTORE 2 {other} 4", "there is no snapshot 2"),
        ("RESTORE 1 {other}.none 4", "other.bin.none: No such file"),
        ("SLOT 9 SNAPSHOT 1", "slot 9 is out of range"),
        ("SLOT 1 SNAPSHOT 1", "no request has run in slot 1 yet"),
    ],
)
def test_snapshot_that_cannot_be_is_refused_with_an_end(
    daemon: Daemon, line: str, words: str
) -> None:
    daemon.say(f"{daemon.prompt(5, 1, 2)} 3", "SNAPSHOT 1")
    other = daemon.prompt(5, 1, 3, 4, 5, 6, 7, name="other.bin")
    short = daemon.prompt(5, 1, name="short.bin")
    daemon.say(f"REQ 4 {line.format(other=other, short=short)}")
    assert daemon.out.of(4) == [END]
    assert daemon.out.said(words)


# ---- chance ----

WORDS = st.sampled_from(
    [
        *("REQ 1", "REQ=2", "REQUEST 3", "REQ 0", "SLOT 0", "SLOT=1", "SLOT 9", "REQ 1 REQ 2"),
        *("CANCEL", "CANCEL 1", "CANCEL 2", "CANCEL 3", "CONTINUE 1", "CONT 3", "CONTINUE 0"),
        *("START p1.bin 6 2", "START p2.bin 1 1", "START p3.bin 61 9", "START p1.bin 62 9"),
        *("START none 6 2", "START p1.bin 6", "START p1.bin 6 0", "p1.bin 3", "p2.bin 0"),
        *("SCHED_STEP", "SCHED_DRAIN", "SCHED_BATCH_PEEK", "SCHED_BATCH_PROBE 2", "\0", "\xff"),
        *("SCHED_BATCH_TARGET_TAIL", "SCHED_BATCH_TARGET_STEP", "SCHED_BATCH_DRAIN 2", "٣"),
        *("LIST_REQUESTS", "LIST_TARGET_CACHE_SLOTS", "SNAPSHOT 0", "park", "FOO", "", "="),
        *(
            "SNAPSHOT 1",
            "RESTORE 0 p1.bin 3",
            "RESTORE 1 p2.bin 2",
            "FREE_SNAPSHOT 0",
            "LIST_SLOTS",
        ),
    ]
)
MOVES = st.lists(
    st.one_of(
        st.lists(WORDS, min_size=1, max_size=3).map(" ".join),
        st.tuples(st.sampled_from(["REQ 1", "REQ 2", "REQ 3"]), WORDS).map(" ".join),
        st.text(max_size=12),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES, is_tagged=st.booleans(), n_end=st.integers(0, 5))
def test_random_lines_stop_nothing_and_every_start_ends_once(
    moves: list[str | int],
    is_tagged: bool,
    n_end: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    daemon = Daemon(tmp_path, n_slots=2, is_tagged=is_tagged)
    for id in (1, 2, 3):
        daemon.prompt(id, 1, 2)
    daemon.machine.end_at[2] = n_end
    for move in moves:
        if isinstance(move, int):
            for _ in range(move):
                daemon.machine.step(daemon.lines)
        else:
            daemon.lines.take_line(move.encode("utf-8", "surrogatepass"))
    daemon.lines.end_input()
    daemon.machine.work(daemon.lines)
    assert daemon.lines.is_done
    assert not daemon.machine.runs
    check_ends(daemon, is_tagged=is_tagged)


def check_ends(daemon: Daemon, *, is_tagged: bool) -> None:
    """Each life of a request has one end, each error one mark, and no token comes behind an end."""
    n_lives = len(daemon.out.said("started in slot") + daemon.out.said("continued in slot"))
    n_ended = len(daemon.out.said("ended: "))
    n_errors = len(daemon.out.said("error in line"))
    n_ends = sum(value == END for _, value in daemon.out.frames)
    assert n_lives == n_ended
    assert n_ended <= n_ends <= n_ended + n_errors
    if is_tagged:
        for id in {id for id, _ in daemon.out.frames}:
            assert daemon.out.of(id)[-1] == END or not daemon.out.tokens_of(id)
