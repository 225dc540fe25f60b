"""The model that ships inside: right answers, ends, and the same answers in every company."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import pytest

import cbatch
from cbatch.backend.load.open_model import shipped_model
from cbatch.errors import ModelLoadError
from cbatch.models.recipe.tasks import SHORT_TASKS, held_out_chats, is_right

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

EXAMPLES = held_out_chats(seed=7, n=220)
GREEDY = {"temperature": 0, "max_tokens": 400}


def test_held_out_questions_are_answered_right_and_end() -> None:
    with cbatch.load(parallel=16, options=GREEDY) as engine:
        results = engine.run([e.prompt for e in EXAMPLES]).results()
    n_asked, n_right = Counter[str](), Counter[str]()
    for example, result in zip(EXAMPLES, results, strict=True):
        kind = "short" if example.task in SHORT_TASKS else example.task
        n_asked[kind] += 1
        n_right[kind] += is_right(example, result.text)
    assert n_asked["short"] >= 180
    for kind, n in n_asked.items():
        assert n_right[kind] >= 0.9 * n, (kind, n_right[kind], n)
    assert sum(r.finish_reason == "stop" for r in results) >= 0.99 * len(results)


def test_answers_alone_are_the_answers_in_company() -> None:
    with cbatch.load(parallel=16, exact=True, options=GREEDY) as engine:
        assert engine.exactness == "bitwise"
        together = engine.run([e.prompt for e in EXAMPLES]).results()
        for example, result in islice(zip(EXAMPLES, together, strict=True), 0, None, 4):
            assert engine.submit(example.prompt).result().token_ids == result.token_ids


def test_answer_goes_on_from_an_earlier_turn() -> None:
    chat = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    with cbatch.load(parallel=1, options=GREEDY) as engine:
        assert "Ada" in engine.run(chat).result().text


@pytest.mark.parametrize("damage", ["missing", "cut", "no digests", "wrong digests"])
def test_damaged_package_says_how_to_install_it_again(tmp_path: Path, damage: str) -> None:
    good = shipped_model()
    data = good.read_bytes()
    if damage != "missing":
        (tmp_path / good.name).write_bytes(data[:-1] if damage == "cut" else data)
    if damage != "no digests":
        text = good.with_name("digests.json").read_text(encoding="utf-8")
        (tmp_path / "digests.json").write_text("[]" if damage == "wrong digests" else text)
    with pytest.raises(ModelLoadError, match=r"pip install --force-reinstall --no-deps \."):
        shipped_model(tmp_path)
