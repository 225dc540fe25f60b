from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.errors import ConfigError
from cbatch.files.input.row_prompts import Template, as_text


def fill(text: str, **row: object) -> str:
    return Template(text, row.keys()).fill(row)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("Classify: {review}", "Classify: good"),
        ("{review}{n}{review}", "good3good"),
        ("{{{review}}} {{}}", "{good} {}"),
        ("no field", "no field"),
        ("", ""),
    ],
)
def test_fields_are_filled_and_doubled_braces_are_braces(text: str, filled: str) -> None:
    assert fill(text, review="good", n=3) == filled


def test_any_name_of_a_column_can_be_a_field_and_braces_stay() -> None:
    name = "review text: a.b[0]!r"
    assert Template("{" + name + "}", [name]).fill({name: "{b} {{"}) == "{b} {{"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["{a.__class__}", "{a[0]}", "{a!r}", "{a:>9}", "{}", "{0}"], "no column .* are: a"),
        (["{a", "a}", "{{a}", "{a}}", "{a{a}}"], "at character . is unmatched"),
    ],
)
def test_field_that_is_no_column_or_not_closed_is_refused(texts: list[str], words: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=words):
            fill(text, a="x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (None, ""),
        (3, "3"),
        (0.5, "0.5"),
        (True, "true"),
        (["ä", None], '["ä", null]'),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_value_stands_in_a_prompt_as(value: object, text: str) -> None:
    assert as_text(value) == text


@given(st.text(), st.text(), st.text())
def test_what_is_written_with_doubled_braces_comes_out(before: str, value: str, after: str) -> None:
    escaped = [text.replace("{", "{{").replace("}", "}}") for text in (before, after)]
    assert fill("{a}".join(escaped), a=value) == before + value + after
