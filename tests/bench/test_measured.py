"""What is noted of one answer."""

from __future__ import annotations

from cbatch.bench.measured import Arrivals


def test_tokens_delivered_together_have_equal_gaps() -> None:
    seen = Arrivals(0.0)
    for now_s, n_tokens in ((1.0, 1), (2.0, 4), (2.5, 1)):
        seen.note(now_s, n_tokens)
    answer = seen.answer("a", 3.0, 6)
    assert (answer.first_s, answer.gaps_s) == (1.0, (0.25,) * 4 + (0.5,))


def test_answer_without_deliveries_has_no_gaps() -> None:
    answer = Arrivals(0.0).answer("a", 3.0, 6)
    assert (answer.first_s, answer.gaps_s) == (None, ())
