"""How good the models are: held-out questions through the engine, greedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_vocabulary import TURN_END
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.models.recipe.tasks import SHORT_TASKS, Example, held_out_chats, is_right
from cbatch.response import BatchResult

_GREEDY = {"temperature": 0, "max_tokens": 400}
_N_SLOTS = 16
_N_FORCED = 200  # answers on which the draft is compared


def measure(
    model: Path, draft: Path, *, n: int = 800, seed: int = 2, say: Callable[[str], None]
) -> None:
    """Say how many held-out questions get a right answer, by task, and how often the draft agrees.

    Args:
        draft: the draft's; where it is missing it is left out.
        say: takes a line.
    """
    examples = held_out_chats(seed, n)
    results = _answers(model, examples)
    for line in _table(examples, results):
        say(line)
    if draft.exists():
        say(f"the draft agrees on {agreement(model, draft, examples, results):.1%} of the tokens")


def _answers(model: Path, examples: Sequence[Example]) -> list[BatchResult]:
    with load(model, parallel=_N_SLOTS) as engine:
        return engine.run([e.prompt for e in examples], options=_GREEDY).results()


def _table(examples: Sequence[Example], results: Sequence[BatchResult]) -> Iterator[str]:
    total, right = Counter[str](), Counter[str]()
    for example, result in zip(examples, results, strict=True):
        total[example.task] += 1
        right[example.task] += is_right(example, result.text)
    for task in sorted(total):
        yield f"{task:10} {right[task]:4} / {total[task]:<4} {right[task] / total[task]:6.1%}"
    short = [task for task in SHORT_TASKS if task in total]
    n_right, n_total = sum(right[t] for t in short), sum(total[t] for t in short)
    yield f"short tasks {n_right} / {n_total}: {n_right / n_total:.1%}"
    n_ended = sum(result.finish_reason == "stop" for result in results)
    yield f"ended by themselves {n_ended} / {len(results)}: {n_ended / len(results):.2%}"


def agreement(
    model: Path, draft: Path, examples: Sequence[Example], results: Sequence[BatchResult]
) -> float:
    """Return the share of the model's tokens that the draft finds likeliest after the ones before."""
    with closing(open_model(model)) as opened:
        prompts = [opened.vocab.render(e.prompt) for e in examples[:_N_FORCED]]
    wanted: list[int] = []
    forced: list[BatchPrompt] = []
    for prompt, result in zip(prompts, results, strict=False):
        answer = [*result.token_ids, TURN_END]
        wanted += answer
        forced += [BatchPrompt(tokens=[*prompt, *answer[:i]]) for i in range(len(answer))]
    options = {"temperature": 0, "max_tokens": 1}
    with load(draft, parallel=_N_SLOTS) as engine:
        guesses = engine.run(forced, options=options).results()
    found = [(*guess.token_ids, TURN_END)[0] for guess in guesses]
    return sum(a == b for a, b in zip(wanted, found, strict=True)) / len(wanted)
