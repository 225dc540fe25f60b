"""Lines of the daemon as commands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.daemon.line_commands import GENERATE, MAX_ID, MAX_LINE, Line, LineError, read_line
from tests.profiles import examples


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("REQ 1 START p.bin 8 2", Line("START", 1, None, "p.bin", 8, 2)),
        ("REQ=1 SLOT=3 START p.bin 8 2", Line("START", 1, 3, "p.bin", 8, 2)),
        ("REQUEST 1 SLOT 3 START p.bin 8 2", Line("START", 1, 3, "p.bin", 8, 2)),
        ("slot 0 req 7 start my  prompt.bin 8 2", Line("START", 7, 0, "my  prompt.bin", 8, 2)),
        ("\tREQ\t1\tSTART\tp.bin\t8\t2\r\n", Line("START", 1, None, "p.bin", 8, 2)),
        ("REQ 1 CONTINUE 4", Line("CONTINUE", 1, None, n=4)),
        ("REQ 1 SLOT 2 CONT 4", Line("CONTINUE", 1, 2, n=4)),
        ("REQ 5 CANCEL", Line("CANCEL", 5)),
        ("CANCEL 5", Line("CANCEL", 5)),
        ("REQ 5 CANCEL 5", Line("CANCEL", 5)),
        ("SCHED_STEP", Line("SCHED_STEP")),
        ("sched_drain", Line("SCHED_DRAIN")),
        ("SCHED_BATCH_PEEK", Line("SCHED_BATCH_PEEK")),
        ("SCHED_BATCH_PROBE 2", Line("SCHED_BATCH_PROBE", n=2)),
        ("SCHED_BATCH_TARGET_STEP 3", Line("SCHED_BATCH_TARGET_STEP", n=3)),
        ("SCHED_BATCH_DRAIN 99", Line("SCHED_BATCH_DRAIN", n=99)),
        ("LIST_TARGET_CACHE_SLOTS", Line("LIST_TARGET_CACHE_SLOTS")),
        ("LIST_REQUESTS", Line("LIST_REQUESTS")),
        ("p.bin 8", Line(GENERATE, None, None, "p.bin", 8)),
        ("REQ 3 SLOT 1 a b.bin 8", Line(GENERATE, 3, 1, "a b.bin", 8)),
        (f"REQ {MAX_ID} CANCEL", Line("CANCEL", MAX_ID)),
    ],
)
def test_line_is_read_as_its_command(text: str, expected: Line) -> None:
    assert read_line(text.encode()) == expected


@pytest.mark.parametrize("text", ["", " ", "\r\n", "\t\n"])
def test_empty_line_says_nothing(text: str) -> None:
    assert read_line(text.encode()) is None


@pytest.mark.parametrize(
    ("data", "id", "words"),
    [
        (b"FOO", None, "unknown command 'FOO'"),
        (b"REQ 4 FOO bar", 4, "unknown command 'FOO'"),
        (b"REQ 4", 4, "no command after REQ"),
        (b"REQ", None, "REQ needs a number"),
        (b"REQ START p 8 2", None, "REQ must be a whole number, 0 … 1073741823, not 'START'"),
        (b"REQ 1073741824 START p 8 2", None, "REQ must be 0 … 1073741823, not '1073741824'"),
        (b"REQ 1 REQ 2 CANCEL", 1, "REQ is given twice"),
        (b"REQ 1 SLOT 1025 START p 8 2", 1, "SLOT must be 0 … 1024, not '1025'"),
        (b"REQ 1 SLOT x START p 8 2", 1, "SLOT must be a whole number"),
        (b"START p 8 2", None, "START needs REQ with an id of 1"),
        (b"REQ 0 START p 8 2", 0, "START needs REQ with an id of 1"),
        (b"REQ 1 START", 1, "usage: START <prompt_file> <total> <quantum>"),
        (b"REQ 1 START p 0 2", 1, "total must be 1 … 2147483647, not '0'"),
        (b"REQ 1 START p 8 0", 1, "quantum must be 1"),
        (b"REQ 1 START p 8.0 2", 1, "total must be a whole number"),
        ("REQ 1 START p ٣ 2".encode(), 1, "total must be a whole number, 1 … 2147483647, not '٣'"),
        (b"REQ 1 START p 1" + b"0" * 9000 + b" 2", 1, "total must be 1"),
        (b"REQ 1 CONTINUE", 1, "the number of tokens needs a number"),
        (b"REQ 1 CONTINUE 0", 1, "the number of tokens must be 1"),
        (b"CANCEL", None, "CANCEL needs the id of a request"),
        (b"REQ 1 CANCEL 2", 1, "REQ 1 and CANCEL 2 name two requests"),
        (b"SLOT 1 CANCEL 2", None, "CANCEL takes the id of a request, and no SLOT"),
        (b"REQ 3 SCHED_STEP", 3, "REQ and SLOT are only allowed before commands for one request"),
        (b"SCHED_STEP 3", None, "SCHED_STEP takes no arguments, not '3'"),
        (b"SCHED_BATCH_PEEK 0", None, "max of SCHED_BATCH_PEEK must be 1"),
        (b"p.bin 0", None, "the number of tokens must be 1"),
        (b"REQ 9 SNAPSHOT", 9, "the number of SNAPSHOT needs a number, 0 … 63"),
        (b"SNAPSHOT 64", None, "the number of SNAPSHOT must be 0 … 63"),
        (b"RESTORE 0", None, "usage: RESTORE <snapshot> <prompt_file> <n>"),
        (b"RESTORE 0 p.bin", None, "usage: RESTORE <snapshot> <prompt_file> <n>"),
        (b"RESTORE 0 p.bin 0", None, "the number of tokens must be 1"),
        (
            b"RESTORE_CHAIN 0 1 p.bin 8",
            None,
            "RESTORE_CHAIN is not offered: a prompt can begin with one snapshot",
        ),
        (b"FREE_SNAPSHOT -1", None, "the number of FREE_SNAPSHOT must be 0"),
        (b"LIST_SLOTS 1", None, "LIST_SLOTS takes no arguments, not '1'"),
        (b"park all", None, "PARK is not offered: the weights stay in memory"),
        (b"compress p.bin", None, "COMPRESS is not offered"),
        (b"REQ 1 START \xff 8 2", 1, "the line is not UTF-8 at byte 13"),
        (b"REQ 1 START a\0b 8 2", 1, "the line has a NUL byte"),
        (b"REQ 1 START p" + b"x" * MAX_LINE, 1, "the line has more than 1,048,576 bytes"),
        (b" " * (MAX_LINE + 1), None, "the line has more than 1,048,576 bytes"),
    ],
)
def test_wrong_line_names_its_id_and_its_mistake(data: bytes, id: int | None, words: str) -> None:
    with pytest.raises(LineError) as raised:
        read_line(data)
    assert raised.value.id == id
    assert str(raised.value).startswith(words)
    assert len(str(raised.value)) < 300


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["REQ", "REQ=", "REQUEST", "SLOT", "START", "CONT", "CANCEL", "SCHED_STEP", "="]
            ),
            st.integers().map(str),
            st.text(max_size=8),
            st.sampled_from(["\0", "\udcff", " ", "\t"]),
        ),
        max_size=8,
    )
)
def test_any_line_is_a_command_or_a_line_error(words: list[str]) -> None:
    data = " ".join(words).encode("utf-8", "surrogatepass").replace(b"\n", b" ")
    try:
        line = read_line(data)
    except LineError as error:
        assert error.id is None or 0 <= error.id <= MAX_ID  # noqa: PT017
    else:
        assert line is None or line.id is None or 0 <= line.id <= MAX_ID
