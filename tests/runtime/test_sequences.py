from __future__ import annotations

import math
from typing import Any

import pytest

from cbatch.backend.fake import FakeBackend
from cbatch.chat.chat_format import ChatFormat
from cbatch.core.plan import Slot
from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.sequences import OptionsMerger, SequenceMaker

ENGINE = RunOptions(max_tokens=9, temperature=0)
CHAT = [{"role": "user", "content": "a"}]


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


def test_variables_that_no_template_names_are_one_warning_for_all_choices() -> None:
    backend = FakeBackend(1, 2**15)
    backend.vocab.template = "{{ known }}"
    kwargs = {"known": 1, **{f"v{i}": 1 for i in range(1003)}}
    with Engine(backend, options={"max_tokens": 1}) as engine:
        result = engine.submit(CHAT, options={"n": 4, "chat_template_kwargs": kwargs}).result()
        few = engine.submit(CHAT, options={"chat_template_kwargs": {"a": 1, "b": 2}}).result()
        none = engine.submit(CHAT, options={"chat_template_kwargs": {"known": 1}}).result()
    behind = "which the chat template does not use"
    said = f"chat_template_kwargs has 'v0', 'v1', 'v2' and 1,000 more, {behind}"
    assert [choice.warnings for choice in result.choices] == [(said,)] * 4
    assert few.warnings == (f"chat_template_kwargs has 'a', 'b', {behind}",)
    assert none.warnings == ()


def test_many_stop_tokens_are_a_set_wherever_a_token_is_looked_for() -> None:
    options = RunOptions(stop_token_ids=[*range(300)])
    maker = SequenceMaker(backend := FakeBackend(1), ScheduleOptions(), ChatFormat(backend.vocab))
    [driver] = maker.of_prompt(BatchPrompt(prompt="a"), "a", options, 0.0, math.inf)
    found = driver.request.stop_tokens
    assert isinstance(found, frozenset)
    assert driver.binding(Slot(0)).stop_tokens is driver.reply.silent is found
    assert isinstance(driver.request.asked_stops, frozenset)


def test_requests_of_one_call_share_their_biases_and_stops() -> None:
    options = RunOptions(logit_bias={7: -1.0, 3: 2.0}, n=2, stop_token_ids=[1, 2])
    maker = SequenceMaker(backend := FakeBackend(1), ScheduleOptions(), ChatFormat(backend.vocab))
    found = [
        driver.request
        for text in ("a", "b")
        for driver in maker.of_prompt(BatchPrompt(prompt=text), text, options, 0.0, math.inf)
    ]
    assert found[0].sampling.logit_bias == ((3, 2.0), (7, -1.0))
    assert len({id(request.sampling.logit_bias) for request in found}) == 1
    assert len({id(request.stop_tokens) for request in found}) == 1
    assert len({id(request.asked_stops) for request in found}) == 1
