"""One sequence of the driver's tests, with no scheduler around it."""

from __future__ import annotations

from typing import Any

from cbatch.backend.fake import FakeVocab
from cbatch.core.driver import SequenceDriver
from cbatch.core.plan import Slot
from cbatch.runtime.prompt_fit import set_prompt
from tests.helpers import make_request

N_WINDOW = 16
A, B, C, D = b"abcd"
HALF = "é".encode()[0]


def make_driver(**options: Any) -> SequenceDriver:
    return SequenceDriver.of(make_request(**options), FakeVocab(320).piece, 0.0)


def make_running(n_prompt: int = 2, **options: Any) -> SequenceDriver:
    driver = make_driver(**options)
    set_prompt(driver, list(range(n_prompt)), N_WINDOW)
    driver.admit(Slot(0), 1.0)
    return driver
