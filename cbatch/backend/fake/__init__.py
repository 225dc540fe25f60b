"""A backend without a model, for tests of scheduling and for simulation at scale."""

from cbatch.backend.fake.fake_backend import FakeBackend, Faults, StepCost
from cbatch.backend.fake.fake_grammar import FakeConstraint, FakeGrammars, FakeMatcher
from cbatch.backend.fake.fake_tokens import fake_logprobs
from cbatch.backend.fake.fake_vocab import END_TOKEN, FakeVocab

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
