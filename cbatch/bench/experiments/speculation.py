"""What draft tokens gain or cost: `python -m cbatch.bench.experiments.speculation [MODEL]`.

Engines on one model do the same job in turn: with `speculate="auto"`, twice with "off", and with each source of draft
tokens alone. A job is some answers for each slot. A line has a text, a number of slots, the tokens a second with "off",
and medians of ratios to them. `ratio` is of "auto", with its range; `again` is of "off" itself: its range is the noise.

Texts: "copy", sentences to repeat; "json", fields of a sentence; "story"; "list", a raw text of lines that are alike,
which a model goes on with; "free", a raw text at temperature 1, in which nothing repeats itself.

With `--joining` there is one slot more, for answers of five tokens one after another: a new prompt every fifth step.
With `--tail` the job is 200 answers of uneven lengths: `tail` is the ratio of the times from where no answer waits for
a slot to the end, and `different` counts the answers that are not those of "off".
With `--llama-server PROGRAM` there are only "auto" and that server, in its default and with each `--spec-type`, over
HTTP with as many connections as slots: ratios of "auto" over each.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from cbatch.bench.experiments.rounds import beside, median, parser, ratios, take_turns
from cbatch.bench.harness import emit
from cbatch.bench.sides import llama_server
from cbatch.engine_options import EngineOptions
from cbatch.loading import load
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions

if TYPE_CHECKING:
    import argparse
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from cbatch.engine import Engine

_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal")
_PLACES = ("Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Cork", "Nice", "Turin")
_LONG = {"temperature": 0, "ignore_eos": True}
_CHAT = {"temperature": 0}

_N_JOINING = 5
"""Tokens of an answer whose prompt joins: so many steps."""

_N_TAIL = 200
"""Answers of a job with a tail."""


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


def _joining(i: int) -> BatchPrompt:
    words = " ".join(f"{_NAMES[(i * j) % 8]} {_PLACES[(i + j) % 8]}" for j in range(12))
    options = RunOptions(max_tokens=_N_JOINING, ignore_eos=True, temperature=1)
    return BatchPrompt(prompt=f"{i}: {words}", options=options)


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

    tokens: list[tuple[int, ...]]
    seconds: float
    tail_s: float
    n_drafted: int
    n_accepted: int

    @property
    def n_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.n_tokens / self.seconds


@contextmanager
def _seen_waiting(engine: Engine) -> Iterator[list[float]]:
    """Yield a list that gets the times at which answers waited for a slot."""
    times = [0.0]

    def watch(is_over: threading.Event) -> None:
        while not is_over.wait(0.05):
            if engine.stats().n_waiting:
                times.append(time.perf_counter())

    with beside(watch):
        yield times


def job(engine: Engine, prompts: Sequence[BatchPrompt], options: dict[str, Any]) -> Done:
    """Answer prompts."""
    with _seen_waiting(engine) as times:
        before, start = engine.stats(), time.perf_counter()
        results = engine.run(list(prompts), options={**options, "seed": 1}).results()
        end, after = time.perf_counter(), engine.stats()
    return Done(
        [tuple(r.token_ids) for r in results],
        end - start,
        end - max(start, times[-1]),
        after.n_draft_tokens - before.n_draft_tokens,
        after.n_accepted_tokens - before.n_accepted_tokens,
    )


class _PeerServer:
    """A llama-server that answers prompts, as many at once as it has slots."""

    def __init__(self, url: str, n_slots: int) -> None:
        self._place = url.removeprefix("http://").partition("/")[0]
        self._pool = ThreadPoolExecutor(n_slots)

    def job(self, prompts: Sequence[BatchPrompt], options: dict[str, Any]) -> Done:
        """Answer prompts; token ids are not told."""
        start = time.perf_counter()
        counts = list(self._pool.map(partial(self._answer, options), prompts))
        seconds = time.perf_counter() - start
        n_drafted, n_accepted = sum(c[1] for c in counts), sum(c[2] for c in counts)
        return Done([(0,) * c[0] for c in counts], seconds, 0.0, n_drafted, n_accepted)

    def _answer(self, options: dict[str, Any], prompt: BatchPrompt) -> tuple[int, int, int]:
        """Return how many tokens an answer has, how many were drafted, and accepted."""
        path = "/completion"
        given: dict[str, Any] = {"prompt": prompt.prompt}
        if prompt.messages is not None:
            path, given = "/v1/chat/completions", {"messages": list(prompt.messages)}
        body = {**given, **options, "seed": 1}
        connection = HTTPConnection(self._place, timeout=300)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        times = json.loads(connection.getresponse().read())["timings"]
        connection.close()
        return times["predicted_n"], times.get("draft_n", 0), times.get("draft_n_accepted", 0)


def _against(a: argparse.Namespace, n: int) -> None:
    """Print a line for each text: "auto" over llama-server's ways to speculate."""
    sizes: dict[str, Any] = {"parallel": n, "ctx_per_seq": 1024}
    kinds = {"off": [], **{kind: ["--spec-type", kind] for kind in a.spec_types.split(",") if kind}}
    if a.draft:
        kinds["draft"] = ["--spec-type", "draft-simple", "-md", a.draft]
    options, drafting = EngineOptions(**sizes), {"draft": a.draft} if a.draft else {}
    with ExitStack() as stack:
        engine = stack.enter_context(load(a.model, **sizes, **drafting))
        servers = [
            _PeerServer(stack.enter_context(start).url, n)
            for start in [
                llama_server(a.llama_server, a.model, options, more) for more in kinds.values()
            ]
        ]
        for text in a.texts.split(","):
            asked = {**TEXTS[text][1], "max_tokens": a.tokens}
            prompts = _prompts(text, n, a)
            ours: Callable[[], Done] = partial(job, engine, prompts, asked)
            theirs = [partial(server.job, prompts, asked) for server in servers]
            rounds = take_turns(a.rounds, ours, *theirs)
            over = {
                kind: ratios((r[0].rate, r[i].rate) for r in rounds)["ratio"]
                for i, kind in enumerate(kinds, 1)
            }
            accepted = {
                kind: [sum(r[i].n_drafted for r in rounds), sum(r[i].n_accepted for r in rounds)]
                for i, kind in enumerate(kinds, 1)
            }
            rate = median((r[0].rate for r in rounds), 1)
            emit(text=text, running=n, auto=rate, over=over, server_drafts=accepted)


def _prompts(text: str, n: int, a: argparse.Namespace) -> list[BatchPrompt]:
    make, _ = TEXTS[text]
    if a.tail:
        # most are short, one in ten is long
        lengths = [a.tokens * 4 if i % 10 == 9 else 8 + i * 37 % a.tokens for i in range(_N_TAIL)]
        return [
            BatchPrompt(made.messages, prompt=made.prompt, options=RunOptions(max_tokens=length))
            for made, length in zip(map(make, range(_N_TAIL)), lengths, strict=True)
        ]
    n_joining = a.items * a.tokens // _N_JOINING if a.joining else 0
    return [*map(make, range(n * a.items)), *map(_joining, range(n_joining))]


def main(words: Sequence[str] | None = None) -> None:
    """Print one JSON line for each text and number of slots."""
    asked = parser(__doc__, model="the shipped one", n_rounds=4)
    asked.add_argument("--texts", default="copy,json,story,list,free")
    asked.add_argument("--running", default="1,2,4,8,16,32", help="slots")
    asked.add_argument("--items", type=int, default=16, help="answers of a job for each slot")
    asked.add_argument("--draft", help="a draft model")
    asked.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    asked.add_argument("--sources", default="ngram,job", help="sources to measure alone")
    asked.add_argument("--joining", action="store_true", help="add a new prompt every fifth step")
    asked.add_argument("--tail", action="store_true", help="200 answers of uneven lengths")
    asked.add_argument("--llama-server", metavar="PROGRAM", help="compare with this server instead")
    asked.add_argument("--spec-types", default="ngram-mod,ngram-simple", help="of that server")
    a = asked.parse_args(words)
    if a.llama_server:
        for n in [int(n) for n in a.running.split(",")]:
            _against(a, n)
        return
    sources = [s for s in a.sources.split(",") if s] + ["draft"] * bool(a.draft)
    drafting = {"draft": a.draft} if a.draft else {}
    ways: dict[str, dict[str, Any]] = {"auto": drafting, "off": {}}
    if not a.tail:
        ways |= {"again": {}}
    ways |= {s: drafting if s == "draft" else {} for s in sources}
    for n in [int(n) for n in a.running.split(",")]:
        with ExitStack() as stack:
            sizes = {"parallel": n + a.joining, "ctx_per_seq": 1024}
            engines = [
                stack.enter_context(
                    load(a.model, speculate="off" if way == "again" else way, **sizes, **given)
                )
                for way, given in ways.items()
            ]
            for text in a.texts.split(","):
                options = {**TEXTS[text][1], "max_tokens": a.tokens}
                prompts = _prompts(text, n, a)
                jobs = [partial(job, e, prompts, options) for e in engines]
                rounds = take_turns(a.rounds, *jobs, n_warm_up=0 if a.tail else 1)
                _emit(text, n, list(ways), rounds, is_tail=a.tail)


def _emit(
    text: str, n: int, ways: list[str], rounds: list[tuple[Done, ...]], *, is_tail: bool
) -> None:
    auto, off = [r[0] for r in rounds], [r[1] for r in rounds]
    n_drafted, n_accepted = sum(d.n_drafted for d in auto), sum(d.n_accepted for d in auto)
    others: dict[str, Any] = {
        way: ratios((r[i].rate, r[1].rate) for r in rounds)["ratio"]
        for i, way in enumerate(ways)
        if way not in ("auto", "off", "again")
    }
    if "again" in ways:
        again = sorted(r[2].rate / r[1].rate for r in rounds)
        others["again"] = [round(again[0], 3), round(again[-1], 3)]
    tails = {
        "tail": median(
            plain.tail_s / drafted.tail_s for drafted, plain in zip(auto, off, strict=True)
        ),
        "tail_s": median((d.tail_s for d in off), 2),
        "different": sum(x != y for x, y in zip(auto[-1].tokens, off[-1].tokens, strict=True)),
    }
    emit(
        text=text,
        running=n,
        off=median((d.rate for d in off), 1),
        **ratios((d.rate, plain.rate) for d, plain in zip(auto, off, strict=True)),
        **others,
        **(tails if is_tail else {}),
        drafted_over_accepted=round(n_drafted / max(1, n_accepted), 2),
        drafted_share=round(n_drafted / sum(d.n_tokens for d in auto), 3),
    )


if __name__ == "__main__":
    main()
