from __future__ import annotations

from cbatch.options import RunOptions
from cbatch.runtime.sequences import OptionsMerger

ENGINE = RunOptions(max_tokens=9, temperature=0)


def test_settled_options_follow_what_is_said_and_what_it_is_put_over() -> None:
    settled, own = OptionsMerger(), RunOptions(max_tokens=3)
    settled.over(own, ENGINE)
    assert settled.over(RunOptions(max_tokens=4), ENGINE).max_tokens == 4
    assert settled.over(own, RunOptions(temperature=1)).temperature == 1
    assert settled.over(RunOptions(), ENGINE) is ENGINE
