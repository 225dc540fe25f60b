"""One model's `exact=True` proven at length: which steps are alike, what company changes, what it costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cbatch.backend.llama.row_digests import DigestingStepper, RowDigests
from cbatch.backend.load.loader import describe_model, find_widths, load_backend
from cbatch.engine import Engine
from cbatch.engine_options import BITWISE, EngineOptions
from cbatch.errors import UnsupportedTaskError
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.response import BatchResult
from cbatch.verify.one_model import output_rate

_SHORTEST, _LONGEST = 3, 600
_N_OUTPUT, _N_TIMED = 12, 48
_N_COMMON, _N_OWN = 520, 12
_N_ROUNDS, _N_RUNS = 3, 2
_N_TIES = 5
_QUANTUM = 5

_CHECKS: Sequence[tuple[str, dict[str, Any]]] = (
    ("in a batch", {"share_prefixes": False}),
    ("in turns, saved and restored", {"policy": "round_robin", "quantum": _QUANTUM}),
    (
        "in turns, computed again",
        {"policy": "round_robin", "quantum": _QUANTUM, "swap_mib": 0},
    ),
    ("with common beginnings shared", {}),
)


@dataclass(frozen=True, slots=True)
class Check:
    """Answers of one engine beside those that were computed alone."""

    name: str
    n_tokens: int
    n_equal: int
    """Tokens that are the same, sampled from the same row of logits to the bit."""
    n_cached: int
    """Prompt tokens that were not computed again."""
    n_pad_rows: int


@dataclass(frozen=True, slots=True)
class ProbeAnswers:
    """What an engine answered, the number of each prompt being its seed."""

    results: Sequence[BatchResult]
    rows: RowDigests

    def sampled(self) -> list[tuple[int, bytes | None]]:
        """Return each token of the answers and the digest of the logits that it was sampled from."""
        return [
            (token, self.rows.get((i, result.usage.prompt_tokens - 1 + k)))
            for i, result in enumerate(self.results)
            for k, token in enumerate(result.token_ids)
        ]


@dataclass(frozen=True, slots=True)
class Tie:
    """A token of an answer and how much likelier it was than the next one."""

    prompt: int
    """Its number, from 0."""
    position: int
    """Of the output, from 0."""
    margin: float
    """Of log-probabilities."""


@dataclass(frozen=True, slots=True)
class Price:
    """Output tokens a second with `exact=True` and without, of paired rounds."""

    name: str
    exact_tps: float
    default_tps: float
    ratio: float
    """The median of the rounds' ratios."""


@dataclass(slots=True)
class Proof:
    """What was found of one model."""

    model: str
    exactness: str
    parallel: int
    n_window: int
    flash_attn: str
    step_rows: str | None
    """Rows of decoding steps, in words."""
    probe_s: float
    is_remembered: bool
    widths: list[list[int]]
    """Numbers of rows that give the same bits, together; without pad rows."""
    checks: list[Check] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    """The nearest ones."""
    median_margin: float = 0.0
    prices: list[Price] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether `exact=True` holds and no check found a difference."""
        return self.exactness == BITWISE and all(c.n_equal == c.n_tokens for c in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "is_exact": self.is_exact}


def prove(
    path: Path, parallel: int, n_prompts: int, tell: Callable[[str], object] = lambda _: None
) -> Proof:
    """Prove a model's `exact=True` at length; where it is refused, say why and which steps are alike.

    Args:
        n_prompts: different prompts of 3 to 600 tokens, as far as a window has room.
        tell: called with what comes next.

    Raises:
        CBatchError: the model does not load, or the engine failed.
    """
    options = EngineOptions(parallel=parallel, exact=True)
    tell("the probe")
    said = describe_model(path, options, asks_probe=True)
    if not said["can_generate"]:
        raise UnsupportedTaskError("generate", "verify proves that answers are exact")
    settled = EngineOptions(
        parallel=parallel,
        exact=True,
        flash_attn=said["flash_attn"],
        ctx_per_seq=said["n_window"],
    )
    tell("numbers of rows")
    proof = Proof(
        model=path.name,
        exactness=said["exactness"],
        parallel=said["parallel"],
        n_window=said["n_window"],
        flash_attn=said["flash_attn"],
        step_rows=said["step_rows"],
        probe_s=said["probe_s"],
        is_remembered=said["is_remembered"],
        widths=find_widths(path, settled),
    )
    if proof.exactness != BITWISE:
        return proof
    items = different_prompts(n_prompts, said["n_window"], said["n_vocab"])
    tell("each prompt alone")
    engine, rows = _recording(path, proof, share_prefixes=False)
    with engine:
        alone = ProbeAnswers([engine.submit(item).result() for item in items], rows)
    for name, settings in _CHECKS:
        tell(name)
        proof.checks.append(compare(name, *_recording(path, proof, **settings), items, alone))
    margins = sorted(_margins(alone.results), key=lambda tie: tie.margin)
    proof.ties = margins[:_N_TIES]
    proof.median_margin = median(tie.margin for tie in margins) if margins else 0.0
    for name, n in ((f"{proof.parallel} at once", proof.parallel), ("one", 1)):
        tell(f"the price, {name}")
        proof.prices.append(_price(name, path, proof, n, said["n_vocab"]))
    return proof


def _engine(path: Path, proof: Proof, **settings: Any) -> Engine:
    return load(path, parallel=proof.parallel, ctx_per_seq=proof.n_window, **settings)


def _recording(path: Path, proof: Proof, **settings: Any) -> tuple[Engine, RowDigests]:
    rows: RowDigests = {}
    sizes: dict[str, Any] = {"parallel": proof.parallel, "ctx_per_seq": proof.n_window}
    options = EngineOptions(exact=True, **sizes, **settings)
    backend, _ = load_backend(path, options, stepper=partial(DigestingStepper, rows=rows))
    return Engine(backend, schedule=options), rows


def different_prompts(n_prompts: int, n_window: int, n_vocab: int) -> list[BatchPrompt]:
    """Return different prompts, most of them short, two or more of the longest with a common beginning.

    Seeds tell them apart.
    """
    dice, longest = random.Random(1), max(_SHORTEST, min(_LONGEST, n_window - _N_OUTPUT))
    last = max(1, n_prompts - 1)
    sizes = [_SHORTEST + round((i / last) ** 3 * (longest - _SHORTEST)) for i in range(n_prompts)]
    made = [dice.choices(range(n_vocab), k=n) for n in sizes]
    n_common = min(_N_COMMON, max(0, longest - _N_OWN))
    for i in range(max(2, n_prompts // 6) if n_prompts > 1 else 0):
        made[-1 - i] = [*made[-1][:n_common], *dice.choices(range(n_vocab), k=_N_OWN)]
    options = {"temperature": 0, "max_tokens": _N_OUTPUT, "ignore_eos": True, "logprobs": 2}
    return [BatchPrompt(tokens=t, options={**options, "seed": i}) for i, t in enumerate(made)]


def compare(
    name: str, made: Engine, rows: RowDigests, items: Sequence[BatchPrompt], alone: ProbeAnswers
) -> Check:
    """Return how the answers of an engine, which is closed then, are beside those that were computed alone."""
    with made as engine:
        found = ProbeAnswers(engine.run(items).results(), rows)
        n_pad_rows = engine.stats().n_pad_rows
    expected = alone.sampled()
    pairs = list(zip(expected, found.sampled(), strict=True))
    return Check(
        name,
        n_tokens=len(pairs),
        n_equal=sum(a == b and b[1] is not None for a, b in pairs),
        n_cached=sum(result.usage.cached_tokens for result in found.results),
        n_pad_rows=n_pad_rows,
    )


def _margins(results: Sequence[BatchResult]) -> Iterator[Tie]:
    for i, result in enumerate(results):
        for position, token in enumerate(result.logprobs or ()):
            if len(token.top) > 1:
                yield Tie(i, position, token.top[0].logprob - token.top[1].logprob)


def _price(name: str, path: Path, proof: Proof, n_at_once: int, n_vocab: int) -> Price:
    rounds = []
    for i in range(_N_ROUNDS):
        pair = {}
        for exact in (True, False)[:: 1 if i % 2 else -1]:
            with _engine(path, proof, exact=exact) as engine:
                pair[exact] = _rate(engine, n_at_once, n_vocab)
        rounds.append((pair[True], pair[False]))
    return Price(
        name,
        exact_tps=median(exact for exact, _ in rounds),
        default_tps=median(default for _, default in rounds),
        ratio=median(exact / default for exact, default in rounds),
    )


def _rate(engine: Engine, n_at_once: int, n_vocab: int) -> float:
    dice = random.Random(2)
    prompts = (
        [dice.choices(range(n_vocab), k=_N_OWN) for _ in range(n_at_once)] for _ in range(_N_RUNS)
    )
    return max(output_rate(engine, of_run, _N_TIMED) for of_run in prompts)
