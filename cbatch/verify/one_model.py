"""One model tried in this process: in company and alone, with common beginnings, exactly."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from time import perf_counter

from cbatch.backend.load.loader import describe_model, load_backend
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions
from cbatch.errors import CBatchError, ConfigError, ModelLoadError
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.response import BatchResult, TokenLogprob
from cbatch.verify.findings import Finding

_N_WINDOW = 512
_N_PROMPTS = 8
_SIZES = (3, 70, 9, 5, 40, 17, 66, 33)
"""Of prompts: shorter and longer than what kernels take at once, and than a small model's window."""

_N_OUTPUT, _N_TIMED = 12, 48
_N_COMMON, _N_OWN = 200, 5


def verify(path: Path, n_slots: int) -> Finding:
    """Try a model; what it is refused for is found, not raised.

    Raises:
        CBatchError: the engine failed.
    """
    found = Finding(path.name)
    options = EngineOptions(parallel=n_slots, ctx_per_seq=_N_WINDOW)
    try:
        said = describe_model(path, options, asks_probe=False)
        found = replace(found, architecture=said["architecture"], file_type=said["file_type"])
        backend, _ = load_backend(path, options)
        found = replace(found, is_cut_anywhere=backend.memory.can_trim)
        with Engine(backend, schedule=options) as engine:
            found = _tried(found, engine, path)
    except (ModelLoadError, ConfigError) as error:
        return replace(found, refusal=_words(error, path))
    n_bytes = said["n_memory_bytes"]
    return replace(
        found,
        exactness=_exactness(path, n_slots),
        n_slot_bytes=None if n_bytes is None else n_bytes // said["parallel"],
    )


def _tried(found: Finding, engine: Engine, path: Path) -> Finding:
    tokens = _Tokens(engine.model_facts.n_vocab)
    prompts = [tokens.take(min(n, engine.n_window // 4)) for n in _SIZES[:_N_PROMPTS]]
    results = _answers(engine, prompts)
    with load(path, parallel=1, ctx_per_seq=_N_WINDOW, n_ubatch=1) as alone:
        expected = [_answers(alone, [prompt])[0] for prompt in prompts]
    rounding = rounding_of(found.file_type)
    differences = [
        f"prompt {i} of {len(prompt)} tokens: {by}"
        for i, prompt, a, b in zip(count(1), prompts, expected, results, strict=False)
        if (by := difference(a.logprobs or (), b.logprobs or (), rounding))
    ]
    timed = [tokens.take(_N_OWN) for _ in range(engine.parallel)]
    return replace(
        found,
        company=engine.company,
        difference=differences[0] if differences else "",
        n_compared=sum(len(result.token_ids) for result in results),
        shared=_shared(engine, tokens),
        resumed=_resumed(engine, tokens),
        tokens_per_s=output_rate(engine, timed, _N_TIMED),
    )


def difference(
    alone: Sequence[TokenLogprob], company: Sequence[TokenLogprob], rounding: float
) -> str:
    """Return how an answer differs from the one computed alone, by more than rounding; empty where it does not.

    At the first token that is another one, both must have been about equally likely; what follows is not compared.
    """
    for i, (a, b) in enumerate(zip(alone, company, strict=True), 1):
        of_other = {t.token_id: t.logprob for t in a.top}.get(b.token_id)
        is_alike = of_other is not None and abs(of_other - a.logprob) <= 2 * rounding
        if a.token_id != b.token_id:
            return "" if is_alike else f"token {i} is {b.token_id}, alone {a.token_id}"
        if not abs(a.logprob - b.logprob) <= rounding:
            by = abs(a.logprob - b.logprob)
            return f"the log-probability of token {i} differs by {by:.2g}"
    return ""


def rounding_of(file_type: str) -> float:
    """Return by how much log-probabilities may differ. Source: measured on tests/zoo, and docs/understand/exactness.md.

    Quantised weights round activations to 8 bits in every layer: a difference in the last bit grows to percents.
    """
    if file_type.startswith(("q", "iq", "mx", "tq")):
        return 1.0
    return {"f16": 0.05, "bf16": 0.1}.get(file_type, 0.02)


def output_rate(engine: Engine, prompts: Sequence[Sequence[int]], n_output: int) -> float:
    """Return the output tokens a second of these prompts together, with `n_output` tokens each."""
    said = {"temperature": 0, "max_tokens": n_output, "ignore_eos": True}
    start_s = perf_counter()
    results = engine.run([BatchPrompt(tokens=t) for t in prompts], options=said).results()
    return sum(len(r.token_ids) for r in results) / (perf_counter() - start_s)


class _Tokens:
    """Made-up prompts, no two with a common beginning."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab, self._dice, self._first = n_vocab, random.Random(1), count()

    def take(self, n: int) -> tuple[int, ...]:
        more = self._dice.choices(range(self._n_vocab), k=n - 1)
        return (next(self._first) % self._n_vocab, *more)


def _answers(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[BatchResult]:
    said = {"temperature": 0, "max_tokens": _N_OUTPUT, "ignore_eos": True, "logprobs": 5}
    return engine.run([BatchPrompt(tokens=prompt) for prompt in prompts], options=said).results()


def _shared(engine: Engine, tokens: _Tokens) -> float:
    """Have prompts with a common beginning answered; return the share of it that was not computed again."""
    common = tokens.take(min(_N_COMMON, engine.n_window // 2))
    prompts = [(*common, *tokens.take(_N_OWN)) for _ in range(max(2 * engine.parallel, _N_PROMPTS))]
    results = _answers(engine, prompts)
    n_cached = sum(result.usage.cached_tokens for result in results)
    return n_cached / (len(common) * (len(prompts) - 1))


def _resumed(engine: Engine, tokens: _Tokens) -> float:
    """Have three prompts with a common beginning answered, one after another; return the share that the last had."""
    common = tokens.take(min(_N_COMMON, engine.n_window // 2))
    for _ in range(3):
        [result] = _answers(engine, [(*common, *tokens.take(_N_OWN))])
    return result.usage.cached_tokens / len(common)


def _exactness(path: Path, n_slots: int) -> str:
    try:
        with load(path, parallel=n_slots, ctx_per_seq=_N_WINDOW, exact=True) as engine:
            return engine.exactness
    except CBatchError as error:
        return _words(error, path)


def _words(error: CBatchError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ").partition(";")[0]


def main() -> None:
    """Try the model that the arguments name and print the finding as JSON; for a process of its own."""
    path, n_slots = sys.argv[1:]
    try:
        found = verify(Path(path), int(n_slots))
    except CBatchError as error:
        found = Finding(Path(path).name, end=_words(error, Path(path)))
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
