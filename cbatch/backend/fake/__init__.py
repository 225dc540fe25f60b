"""A backend without a model, for tests of scheduling and for simulation at scale."""

from cbatch.backend.fake.fake_backend import FakeBackend, Faults, StepCost
from cbatch.backend.fake.fake_tokens import (
    END_TOKEN,
    FakeConstraint,
    FakeGrammars,
    FakeMatcher,
    FakeVocab,
    fake_logprobs,
)

__all__ = [
    "END_TOKEN",
    "FakeBackend",
    "FakeConstraint",
    "FakeGrammars",
    "FakeMatcher",
    "FakeVocab",
    "Faults",
    "StepCost",
    "fake_logprobs",
]
