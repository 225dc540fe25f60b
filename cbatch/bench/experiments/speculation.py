"""What draft tokens gain or cost: `python -m cbatch.bench.experiments.speculation [MODEL]`.

Engines on one model, with `speculate="auto"`, "ngram", "off", and with a draft model, in turn. Each job is some answers
for each slot, all of which run to their end. `ratio` is of "auto": tokens a second over those of "off"; `ngram` and
`draft` likewise.

Texts: "copy", sentences to repeat; "json", fields of a sentence; "story"; "list", a raw text of lines that are alike,
which a model goes on with; "free", a raw text at temperature 1, in which nothing repeats itself.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cbatch.bench.harness import emit, median, parser, ratios, take_turns
from cbatch.loading import load
from cbatch.messages import BatchPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.engine import Engine

_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal")
_PLACES = ("Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Cork", "Nice", "Turin")
_LONG = {"temperature": 0, "ignore_eos": True}
_CHAT = {"temperature": 0}


def _chat(text: str) -> BatchPrompt:
    return BatchPrompt([{"role": "user", "content": text}])


def _copy(i: int) -> BatchPrompt:
    name, place = _NAMES[i % 8], _PLACES[i // 8 % 8]
    return _chat(f"Repeat after me: The blue lamp of {name} is on the table in {place}.")


def _json(i: int) -> BatchPrompt:
    name, place = _NAMES[i % 8], _PLACES[i * 3 % 8]
    return _chat(f"JSON with name, age and city: {name} is {20 + i} and comes from {place}.")


def _story(i: int) -> BatchPrompt:
    animal = ("fox", "owl", "dragon", "penguin", "lion", "mouse", "whale", "crow")[i % 8]
    place = ("desert", "castle", "forest", "city", "garden", "cave", "harbour", "school")[
        i // 8 % 8
    ]
    return _chat(f"Tell me a short story about a {animal} in the {place}.")


def _list(i: int) -> BatchPrompt:
    lines = [f"row {j}: name=item{i}, price={3 * j}, stock={j % 4};\n" for j in range(8)]
    return BatchPrompt(prompt="".join(lines))


def _free(i: int) -> BatchPrompt:
    return BatchPrompt(prompt=f"Notes on {_PLACES[i % 8]}, number {i}:")


TEXTS: dict[str, tuple[Callable[[int], BatchPrompt], dict[str, Any]]] = {
    "copy": (_copy, _CHAT),
    "json": (_json, _CHAT),
    "story": (_story, _CHAT),
    "list": (_list, _LONG),
    "free": (_free, {"temperature": 1, "ignore_eos": True}),
}
"""How each text's prompts are made, by number, and their options."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job that was done."""

    n_tokens: int
    seconds: float
    n_drafted: int
    n_accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.n_tokens / self.seconds


def job(engine: Engine, text: str, n: int, n_tokens: int) -> Done:
    """Compute `n` answers of a text, each of at most `n_tokens`."""
    make, options = TEXTS[text]
    before, start = engine.stats(), time.perf_counter()
    asked = {**options, "seed": 1, "max_tokens": n_tokens}
    results = engine.run([make(i) for i in range(n)], options=asked).results()
    seconds, after = time.perf_counter() - start, engine.stats()
    return Done(
        sum(len(r.token_ids) for r in results),
        seconds,
        after.n_draft_tokens - before.n_draft_tokens,
        after.n_accepted_tokens - before.n_accepted_tokens,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each text and number of answers."""
    asked = parser(__doc__, model="the shipped one", n_rounds=4)
    asked.add_argument("--texts", default="copy,json,story,list,free")
    asked.add_argument("--running", default="1,2,4,8,16", help="answers at once")
    asked.add_argument("--items", type=int, default=16, help="answers of a job for each slot")
    asked.add_argument("--draft", help="a draft model, for another engine")
    asked.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    a = asked.parse_args(words)
    ways: list[dict[str, Any]] = [{}, {"speculate": "off"}, {"speculate": "ngram"}]
    if a.draft:
        ways.append({"draft": a.draft})
    for n in [int(n) for n in a.running.split(",")]:
        with ExitStack() as stack:
            engines = [
                stack.enter_context(load(a.model, parallel=n, ctx_per_seq=1024, **settings))
                for settings in ways
            ]
            for text in a.texts.split(","):
                jobs = [partial(job, e, text, n * a.items, a.tokens) for e in engines]
                rounds = take_turns(a.rounds, *jobs)
                n_drafted = sum(auto.n_drafted for auto, *_ in rounds)
                emit(
                    text=text,
                    running=n,
                    off=median((off.rate for _, off, *_ in rounds), 1),
                    ngram=ratios((r[2].rate, r[1].rate) for r in rounds)["ratio"],
                    **(
                        {"draft": ratios((r[3].rate, r[1].rate) for r in rounds)["ratio"]}
                        if a.draft
                        else {}
                    ),
                    **ratios((auto.rate, off.rate) for auto, off, *_ in rounds),
                    drafted_over_accepted=round(
                        n_drafted / max(1, sum(auto.n_accepted for auto, *_ in rounds)), 2
                    ),
                    drafted_share=round(n_drafted / sum(auto.n_tokens for auto, *_ in rounds), 3),
                )


if __name__ == "__main__":
    main()
