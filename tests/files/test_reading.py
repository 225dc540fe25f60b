"""The input of a run: looked into, counted, copied where it has to be."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

from cbatch.files.reading import Reading
from cbatch.files.settings import FileOptions
from cbatch.options import RunOptions
from tests.files.runs import write_requests

if TYPE_CHECKING:
    from pathlib import Path


def test_number_of_items_is_about_right_before_all_were_read(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 20_000)
    with closing(Reading(str(source), FileOptions())) as reading:
        assert reading.about() is None
        for _ in islice(reading.items, 10_000):
            pass
        assert abs((reading.about() or 0) - 20_000) < 2_000


def test_what_is_looked_at_ahead_comes_again(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 10)
    with closing(Reading(str(source), FileOptions())) as reading:
        ahead = reading.look_ahead(RunOptions(max_tokens=7), 4)
        assert ahead is not None
        assert [options.max_tokens for _, options in ahead.prompts] == [7] * 4
        assert not ahead.is_all
        assert [item.number for item in reading.items] == list(range(1, 11))


def test_shuffled_input_is_counted_and_has_every_item_once(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", 50)
    with closing(Reading(str(source), FileOptions(shuffle=True))) as reading:
        numbers = [item.number for item in reading.items]
        assert (reading.n_items, reading.about(), reading.is_piped) == (50, 50, False)
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(1, 51))
