"""Texts are divided at marks so that llama.cpp finds the same marks in the parts as in the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbatch.backend.llama.text_marks import TextMark, TextMarks

Found = list[tuple[bool, bytes]]
"""What a text is made of: marks, and what is between them."""


def found_by_llama_cpp(data: bytes, marks: list[TextMark]) -> Found:
    """Take the marks out of a text. Source: src/llama-vocab.cpp, tokenizer_st_partition."""
    found: Found = [(False, data)]
    for mark in sorted(marks, key=lambda mark: len(mark.text), reverse=True):
        pieces, found = found, []
        for is_mark, piece in pieces:
            while not is_mark and (i := piece.find(mark.text)) >= 0:
                left, piece = piece[:i], piece[i + len(mark.text) :]
                found += [(False, left.rstrip() if mark.strips_left else left), (True, mark.text)]
                piece = piece.lstrip() if mark.strips_right else piece
            found.append((is_mark, piece))
        found = [pair for pair in found if pair[1]]
    return found


TEXTS = st.text("ab \n", min_size=1, max_size=5).map(str.encode)
SELDOM = st.sampled_from([False, False, False, True])
MARKS = st.lists(
    st.builds(TextMark, TEXTS, SELDOM, SELDOM), max_size=6, unique_by=lambda mark: mark.text
)


@given(marks=MARKS, pieces=st.data())
def test_parts_have_the_marks_of_the_whole(marks: list[TextMark], pieces: st.DataObject) -> None:
    words = st.sampled_from([*(mark.text for mark in marks), b"a", b"b", b" ", b"\n"])
    data = b"".join(pieces.draw(st.lists(words, max_size=30)))
    parts = TextMarks(marks).parts(data, 1)
    assert b"".join(parts) == data
    found = [pair for part in parts for pair in found_by_llama_cpp(part, marks)]
    assert found == found_by_llama_cpp(data, marks)


RUNS = [TextMark(b"\n" * n) for n in range(1, 32)]


def test_text_is_divided_among_runs_of_white_space_and_within_long_ones() -> None:
    for data in (b"a\n\n" * 500, b"\n" * 1500, b"a\n\n\nb  c\n" * 150):
        parts = TextMarks(RUNS).parts(data, 64)
        assert b"".join(parts) == data
        assert all(64 <= len(part) < 128 for part in parts[:-1])


def test_text_is_not_divided_where_marks_may_be_others() -> None:
    marks = [TextMark(b"aba"), TextMark(b"bab")]
    assert TextMarks(marks).parts(b"ab" * 500, 64) == [b"ab" * 500]
    assert TextMarks([]).parts(b"ab" * 500, 64) == [b"ab" * 500]
    assert len(TextMarks([TextMark(b"aba")]).parts(b"ab" * 500, 64)) > 1
