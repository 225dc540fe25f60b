"""Every error can be told to another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cbatch.errors import (
    CacheError,
    CBatchError,
    ConfigError,
    DeadlineError,
    DecodeError,
    DuplicateIdError,
    OutputError,
    PromptTooLongError,
    QueueFullError,
    UnsupportedOptionError,
)
from cbatch.response import BatchError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        PromptTooLongError(9, 8, 2),
        DuplicateIdError("a"),
        DeadlineError(1.5),
        QueueFullError(3, 2, 1),
        CacheError("k", "damaged", is_missing=True),
        UnsupportedOptionError("x", ["y"]),
        BatchError([], ValueError("no")),
        OutputError(Path("out"), "the disk is full"),
        DecodeError(-3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_that_is_pickled_comes_back_with_its_words_and_numbers(error: CBatchError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert repr(vars(again)) == repr(vars(error))
