"""What a measurement asks: kinds of requests with sizes in tokens, and files of one's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cbatch.bench.measured import Chains, WorkRequest
from cbatch.errors import CBatchError, ConfigError
from cbatch.options import RunOptions
from cbatch.support.checks import read_json, why_unread
from cbatch.support.prefix_index import n_common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from cbatch.bench.exact_text import ExactText

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0}

RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""A list of records longer than any answer: strings, numbers and names that are forced."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of requests. Sizes are tokens; two of them are the least and the most.

    Args:
        told: one line about it.
        own: of each prompt, behind what is common to all.
        output: of each answer.
        n_common: tokens that all prompts begin with.
        n_turns: requests of a conversation; each turn's prompt is the one before it, a prepared answer of
            `output` tokens, and the turn's own tokens.
        options: fields of `RunOptions`.
    """

    name: str
    told: str
    own: tuple[int, int]
    output: tuple[int, int]
    n_common: int = 0
    n_turns: int = 1
    options: Mapping[str, Any] = field(default_factory=lambda: SAMPLED)

    @property
    def n_window(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.n_common + self.n_turns * (self.own[1] + self.output[1])

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        common = f"{self.n_common:,} in common, " if self.n_common else ""
        turns = f", {self.n_turns} turns" if self.n_turns > 1 else ""
        return f"{common}{_span(self.own)} in, {_span(self.output)} out{turns}"

    def chains(self, text: ExactText, n: int, seed: str) -> Chains:
        """Return `n` conversations, of one request each as a rule; equal for equal seeds."""
        chance = random.Random(f"{self.name} {seed}")
        common = text.after("", self.n_common, chance) if self.n_common else ""
        return [self._chain(text, common, i, chance) for i in range(n)]

    def _chain(
        self, text: ExactText, common: str, i: int, chance: random.Random
    ) -> list[WorkRequest]:
        chain: list[WorkRequest] = []
        prompt, n_prompt = common, self.n_common
        for i_turn in range(self.n_turns):
            if i_turn:
                n_prompt += chain[-1].n_output
                prompt = text.after(prompt, n_prompt, chance)
            n_prompt += chance.randint(*self.own)
            prompt = text.after(prompt, n_prompt, chance)
            options = {**self.options, "seed": chance.getrandbits(31)}
            id = f"{i}.{i_turn}" if self.n_turns > 1 else str(i)
            chain.append(WorkRequest(id, prompt, n_prompt, chance.randint(*self.output), options))
        return chain


def _span(sizes: tuple[int, int]) -> str:
    low, high = sizes
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


WORKLOADS: Mapping[str, Workload] = {
    w.name: w
    for w in (
        Workload("decode", "short prompts, long answers", (16, 16), (128, 128)),
        Workload("mixed", "prompts and answers of all lengths", (32, 256), (16, 128)),
        Workload("shared", "prompts with a common beginning", (20, 20), (32, 32), n_common=600),
        Workload("burst", "many short questions", (8, 24), (4, 16)),
        Workload("chat", "chats of several turns", (24, 48), (32, 32), n_common=64, n_turns=4),
        Workload(
            "json",
            "answers that match a JSON schema",
            (32, 32),
            (64, 64),
            options={**SAMPLED, "json_schema": RECORDS},
        ),
        Workload("long", "long prompts, short answers", (1500, 1500), (32, 32)),
    )
}


def workload_of(
    name: str,
    *,
    own: tuple[int, int] | None = None,
    output: tuple[int, int] | None = None,
    n_common: int | None = None,
) -> Workload:
    """Return a workload by name, with other sizes where they are given.

    Raises:
        ConfigError: there is no such workload, or a size is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; known are {', '.join(WORKLOADS)}")
    made = WORKLOADS[name]
    made = replace(
        made,
        own=made.own if own is None else own,
        output=made.output if output is None else output,
        n_common=made.n_common if n_common is None else n_common,
    )
    for what, (low, high) in (("prompts", made.own), ("answers", made.output)):
        if not 1 <= low <= high:
            raise ConfigError(
                f"tokens of {what} must be 1 or more, with the smaller number first, not {low}-{high}"
            )
    if made.n_common < 0:
        raise ConfigError(f"tokens in common must be at least 0, not {made.n_common}")
    return made


def n_distinct(prompts: Iterable[Sequence[int]]) -> int:
    """Return how many tokens must be computed if each common beginning is computed once."""
    ordered = sorted(map(tuple, prompts))
    n_all = sum(map(len, ordered))
    return n_all - sum(n_common(before, tokens) for before, tokens in pairwise(ordered))


def read_requests(path: Path, tokenize: Callable[[str], Sequence[int]]) -> Chains:
    """Return the requests of a JSONL file: `{"prompt", "max_tokens"}`, an "id" and options of a request if wanted.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; the message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    chains: Chains = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                chains.append([_request(line, number, tokenize)])
            except (ValueError, CBatchError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not chains:
        raise ConfigError(
            f'{path}: has no requests: give JSON lines with "prompt" and "max_tokens"'
        )
    return chains


def _request(line: str, number: int, tokenize: Callable[[str], Sequence[int]]) -> WorkRequest:
    try:
        data = read_json(line)
    except ValueError as error:
        raise ConfigError(why_unread(error, line)) from None
    if not isinstance(data, dict) or not isinstance(data.get("prompt"), str):
        raise ConfigError('a request must be an object with a "prompt" string')
    n_output = data.get("max_tokens")
    if type(n_output) is not int or n_output < 1:
        raise ConfigError('a request needs "max_tokens", a whole number of at least 1')
    options = {k: v for k, v in data.items() if k not in ("id", "prompt", "max_tokens")}
    RunOptions.of(options)
    n_prompt = len(tokenize(data["prompt"]))
    if not n_prompt:
        raise ConfigError("the prompt has no tokens")
    id = str(data.get("id", number))
    return WorkRequest(id, data["prompt"], n_prompt, n_output, {"min_p": 0.0, **options})
