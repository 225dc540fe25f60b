from __future__ import annotations

from typing import Any

import pytest

from cbatch.options import RunOptions
from cbatch.runtime.sequences import OptionsMerger

ENGINE = RunOptions(max_tokens=9, temperature=0)


def test_settled_options_follow_what_is_said_and_what_it_is_put_over() -> None:
    settled, own = OptionsMerger(), RunOptions(max_tokens=3)
    settled.over(own, ENGINE)
    assert settled.over(RunOptions(max_tokens=4), ENGINE).max_tokens == 4
    assert settled.over(own, RunOptions(temperature=1)).temperature == 1
    assert settled.over(RunOptions(), ENGINE) is ENGINE


@pytest.mark.parametrize(
    ("first", "other"),
    [(True, 1), (1, 1.0), (0.0, -0.0), ([0], [False]), ({"a": 1, "b": 2}, {"b": 2, "a": 1})],
)
def test_options_that_only_python_takes_for_equal_are_told_apart(first: Any, other: Any) -> None:
    settled = OptionsMerger()
    for value in (first, other):
        own = RunOptions(chat_template_kwargs={"x": value})
        found = settled.over(own, ENGINE)
        assert repr(found.chat_template_kwargs) == repr({"x": value})
        assert settled.over(RunOptions(chat_template_kwargs={"x": value}), ENGINE) is found
