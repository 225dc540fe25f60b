"""What draft tokens gain or cost: `python -m cbatch.bench.experiments.speculation [MODEL]`.

Engines on one model do the same job in turn: with `speculate="auto"`, twice with "off", and with each source of draft
tokens alone. A job is some answers for each slot. A line has a text, a number of slots, the tokens a second with "off",
and medians of ratios to them. `ratio` is of "auto", with its range; `again` is of "off" itself: its range is the noise.

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


def job(engine: Engine, prompts: Sequence[BatchPrompt], options: dict[str, Any]) -> Done:
    """Answer prompts."""
    before, start = engine.stats(), time.perf_counter()
    results = engine.run(list(prompts), options={**options, "seed": 1}).results()
    end, after = time.perf_counter(), engine.stats()
    return Done(
        sum(len(r.token_ids) for r in results),
        end - start,
        after.n_draft_tokens - before.n_draft_tokens,
        after.n_accepted_tokens - before.n_accepted_tokens,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each text and number of slots."""
    asked = parser(__doc__, model="the shipped one", n_rounds=4)
    asked.add_argument("--texts", default="copy,json,story,list,free")
    asked.add_argument("--running", default="1,2,4,8,16,32", help="slots")
    asked.add_argument("--items", type=int, default=16, help="answers of a job for each slot")
    asked.add_argument("--draft", help="a draft model")
    asked.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    asked.add_argument("--sources", default="ngram,job", help="sources to measure alone")
    a = asked.parse_args(words)
    sources = [s for s in a.sources.split(",") if s] + ["draft"] * bool(a.draft)
    drafting = {"draft": a.draft} if a.draft else {}
    ways: dict[str, dict[str, Any]] = {"auto": drafting, "off": {}, "again": {}}
    ways |= {s: drafting if s == "draft" else {} for s in sources}
    for n in [int(n) for n in a.running.split(",")]:
        with ExitStack() as stack:
            sizes: dict[str, Any] = {"parallel": n, "ctx_per_seq": 1024}
            engines = [
                stack.enter_context(
                    load(a.model, speculate="off" if way == "again" else way, **sizes, **given)
                )
                for way, given in ways.items()
            ]
            for text in a.texts.split(","):
                make, options = TEXTS[text]
                options = {**options, "max_tokens": a.tokens}
                prompts = [*map(make, range(n * a.items))]
                jobs = [partial(job, e, prompts, options) for e in engines]
                rounds = take_turns(a.rounds, *jobs)
                _emit(text, n, list(ways), rounds)


def _emit(text: str, n: int, ways: list[str], rounds: list[tuple[Done, ...]]) -> None:
    auto, off = [r[0] for r in rounds], [r[1] for r in rounds]
    n_drafted, n_accepted = sum(d.n_drafted for d in auto), sum(d.n_accepted for d in auto)
    others: dict[str, Any] = {
        way: ratios((r[i].rate, r[1].rate) for r in rounds)["ratio"]
        for i, way in enumerate(ways)
        if way not in ("auto", "off", "again")
    }
    again = sorted(r[2].rate / r[1].rate for r in rounds)
    others["again"] = [round(again[0], 3), round(again[-1], 3)]
    emit(
        text=text,
        running=n,
        off=median((d.rate for d in off), 1),
        **ratios((d.rate, plain.rate) for d, plain in zip(auto, off, strict=True)),
        **others,
        drafted_over_accepted=round(n_drafted / max(1, n_accepted), 2),
        drafted_share=round(n_drafted / sum(d.n_tokens for d in auto), 3),
    )


if __name__ == "__main__":
    main()
