"""Calls with values of every kind end with a result or with an error of cbatch's, and the engine goes on.

`python -m tests.type_fuzz --minutes 5 --seed 1` looks for others; `--case 17` does one of them again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import cbatch
from cbatch.backend.fake import FakeBackend
from cbatch.engine import Engine
from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import CBatchError
from cbatch.files.file_run import run_file, stream_file
from cbatch.files.frames import run_table
from cbatch.files.output.sorting import sort_in_place, sort_to
from cbatch.files.preview import check_file, estimate_file
from cbatch.files.settings import FileOptions
from cbatch.messages import BatchPrompt, LookAhead
from cbatch.options import RunOptions
from tests.odd_values import GOOD, changed, odd
from tests.runtime.backends import is_threaded, mailbox_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from cbatch.response import BatchResult
    from cbatch.runtime.batch_response import BatchResponse

PATIENCE_S = 60.0
"""A case that takes longer hangs."""

RUN_NAMES = tuple(f.name for f in fields(RunOptions))
ENGINE_NAMES = tuple(f.name for f in fields(EngineOptions))
SCHEDULE_NAMES = tuple(f.name for f in fields(ScheduleOptions))
FILE_NAMES = tuple(f.name for f in fields(FileOptions))
OF_MODELS = (
    "chat_template",
    "kv",
    "exact",
    "flash_attn",
    "n_threads",
    "cache_dir",
    "adapters",
    "policy",
)
"""Settings with which a model is loaded: others would ask for all memory there is."""


@dataclass(frozen=True, slots=True)
class World:
    """What a case works with: its own chances, an engine that others use too, and a folder."""

    rng: Random
    engine: Engine
    folder: Path

    def odd(self) -> Any:
        """Return a value of some kind."""
        return odd(self.rng)

    def maybe(self, **good: Any) -> dict[str, Any]:
        """Return arguments, one of them odd; some are left out."""
        names = [name for name in good if self.rng.random() < 0.5]
        odd_one = self.rng.choice(list(good))
        return {
            **{name: good[name] for name in names},
            odd_one: self.odd() if self.rng.random() < 0.5 else changed(self.rng, good[odd_one]),
        }

    def said(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return one or two odd settings of these names."""
        return {name: self.odd() for name in self.rng.sample(names, self.rng.randrange(1, 3))}


def options(w: World) -> None:
    """Options of a request, of an engine, of a schedule and of a file; copies of them."""
    made = w.rng.choice((RunOptions, EngineOptions, ScheduleOptions, FileOptions))
    if made is RunOptions and w.rng.random() < 0.3:
        first = RunOptions(max_tokens=5, logprobs=3, stop=["a"], logit_bias={3: 1.0})
        replace(first, **w.said(RUN_NAMES))
        return
    if w.rng.random() < 0.2:
        w.rng.choice((RunOptions.of, EngineOptions.of))(w.odd())
        return
    made(**w.said(tuple(f.name for f in fields(made))))


def prompt(w: World) -> None:
    """A prompt, or prompts to look at."""
    good = {"messages": GOOD[1](), "prompt": "a", "tokens": [5], "id": "a", "options": {"seed": 1}}
    if w.rng.random() < 0.1:
        pairs = [(BatchPrompt(prompt="a"), RunOptions())]
        LookAhead(**{"prompts": pairs, **w.maybe(prompts=pairs, is_all=True)})
        return
    drain(w, w.engine.submit(BatchPrompt(**{**w.maybe(**good), **w.maybe(**good)})))


def run(w: World) -> None:
    """A batch, with what belongs to it."""
    several: list[Any] = ["a", w.odd()]
    prompts: Any = w.rng.choice((several, iter(several), w.odd(), w.odd()))
    good = {"options": {"seed": 1}, "max_time_s": 9.0, "progress": False}
    more = {} if w.rng.random() < 0.5 else w.maybe(**good)
    with contextlib.redirect_stderr(io.StringIO()):
        drain(w, w.engine.run(prompts, **more))


def run_with_options(w: World) -> None:
    """A good prompt with odd options, of the run and of the item."""
    item = BatchPrompt(prompt="a", options=w.said(RUN_NAMES))
    prompts: list[Any] = [item, "b"]
    drain(w, w.engine.run(prompts, options=w.said(RUN_NAMES)))


def submit(w: World) -> None:
    """One prompt, or how many tokens it has."""
    given = w.odd() if w.rng.random() < 0.5 else changed(w.rng, w.rng.choice(GOOD)())
    if w.rng.random() < 0.3:
        w.engine.count_tokens(given, **w.maybe(options={"seed": 1}))
        return
    drain(w, w.engine.submit(given, options={"max_tokens": 3}))


def ask(w: World) -> None:
    """Ids to cancel, pause and resume by; what records steps."""
    response = w.engine.submit("a", options={"max_tokens": 8})
    id: Any = w.rng.choice((w.odd(), response.ids[0]))
    try:
        w.rng.choice((w.engine.cancel, w.engine.pause, w.engine.resume, w.engine.record_steps))(id)
    finally:
        w.engine.resume(response.ids[0])
        drain(w, response)
        w.engine.record_steps(None)


def extend(w: World) -> None:
    """Results to go on from, and for how many tokens."""
    result = w.engine.submit("a", options={"max_tokens": 3}).result(timeout=PATIENCE_S)
    drain(w, w.engine.extend(w.rng.choice((result, w.odd())), w.rng.choice((2, w.odd()))))


def read(w: World) -> None:
    """Ways to read a response."""
    response = w.engine.run(w.rng.choice((["a", "b"], ["a"], (t for t in "ab"), (t for t in "a"))))
    good = {"timeout": PATIENCE_S, "return_errors": True}
    with contextlib.suppress(TimeoutError):
        if w.rng.random() < 0.5:
            response.result(timeout=w.odd())
        else:
            response.results(**w.maybe(**good))
    drain(w, response)


def make_engine(w: World) -> None:
    """An engine of one's own."""
    good = {"options": {"seed": 1}, "schedule": None, "threaded": True, "cache_dir": None}
    said = w.maybe(**good, cache_mib=10)
    with contextlib.closing(Engine(FakeBackend(2, 64, 32), **said)) as engine:
        drain(w, engine.submit("a", options={"max_tokens": 2}))


def load(w: World) -> None:
    """A model."""
    small: dict[str, Any] = {"parallel": 1, "ctx_per_seq": 256, "n_threads": 1}
    kind = w.rng.random()
    if kind < 0.3:
        cbatch.load(w.odd(), **small).close()
    elif kind < 0.5:
        good = {"options": {"seed": 1}, "threaded": False, "look_ahead": None}
        cbatch.load(**w.maybe(**good), **small).close()
    else:
        name = w.rng.choice(OF_MODELS)
        cbatch.load(**{**small, name: w.odd()}).close()


LINES: tuple[Callable[[], Any], ...] = (
    lambda: {"prompt": "a"},
    lambda: {"id": "x", "messages": GOOD[1]()},
    lambda: {"id": "y", "prompt": "b", "options": {"max_tokens": 2, "stop": ["a"]}},
    lambda: {
        "custom_id": "z",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": GOOD[1](), "max_tokens": 2, "tools": GOOD[5]()},
    },
    lambda: {"tokens": [300, 301], "id": "t"},
)


def written(w: World) -> Path:
    """Return a file of lines, some of them odd."""
    make = w.rng.choice(LINES)
    lines = [json.dumps(make())]
    for _ in range(w.rng.randrange(4)):
        with contextlib.suppress(Exception):  # what JSON cannot hold
            lines.append(json.dumps(changed(w.rng, make())))
    text = "\n".join(lines).encode()
    if w.rng.random() < 0.3:
        i = w.rng.randrange(len(text))
        text = text[:i] + w.rng.choice((b"\0", b"\xff\xfe", b"\n", b'"', b"{" * 2000)) + text[i:]
    ending = w.rng.choice(
        (".jsonl", ".jsonl", ".csv", ".txt", ".tsv", ".json", ".parquet", ".gz", "")
    )
    path = w.folder / f"in{w.rng.choice(('', '', chr(0xDCFF), 'é'))}{ending}"
    path.write_bytes(text)
    return path


def files(w: World) -> None:
    """Files of prompts: what is in them, where they are, and how they are run."""
    source = written(w) if w.rng.random() < 0.7 else w.odd()
    more = {} if w.rng.random() < 0.4 else w.said(FILE_NAMES)
    more |= {"engine": w.engine} if w.rng.random() < 0.9 else {"engine": w.rng.choice((5, w.odd()))}
    more |= w.maybe(options={"max_tokens": 2}) if w.rng.random() < 0.2 else {}
    kind = w.rng.randrange(4)
    if kind == 0:
        output = w.folder / "out.jsonl" if w.rng.random() < 0.7 else w.odd()
        more |= w.maybe(progress=False, on_result=None, stop=None) if w.rng.random() < 0.2 else {}
        run_file(source, output, **more)
        w.rng.choice((sort_in_place, lambda out: sort_to(out, w.odd())))(output)
    elif kind == 1:
        for _ in stream_file(source, **more):
            pass
    elif kind == 2:
        check_file(source, **more)
    else:
        sizes = w.maybe(n_sample=2, sample_s=1.0) if w.rng.random() < 0.5 else {}
        estimate_file(source, **{"n_sample": 2, "sample_s": 1.0, **sizes}, **more)


def tables(w: World) -> None:
    """Tables of rows."""
    import pandas as pd

    table = pd.DataFrame({"prompt": ["a", "b"], "x": [1, 2]}) if w.rng.random() < 0.5 else w.odd()
    good = {"template": "{prompt} {x}", "system": "s", "is_raw": True, "progress": False}
    run_table(table, engine=w.engine, **w.maybe(**good, options={"max_tokens": 2}))


def sort(w: World) -> None:
    """Outputs to be sorted."""
    path = w.folder / "out.jsonl"
    run_file(_good_lines(w), path, engine=w.engine, force=True)
    if w.rng.random() < 0.5:
        sort_in_place(w.odd())
    else:
        sort_to(w.rng.choice((path, w.odd())), w.odd(), **w.maybe(by=(), force=True))


def _good_lines(w: World) -> Path:
    path = w.folder / "good.jsonl"
    path.write_text('{"id": "a", "prompt": "a"}\n{"id": "b", "prompt": "b"}\n')
    return path


CASES: tuple[tuple[Callable[[World], None], int], ...] = (
    *((options, 6), (prompt, 5), (run, 6), (run_with_options, 5), (submit, 4), (ask, 2)),
    *((extend, 2), (read, 3), (make_engine, 2), (files, 6), (tables, 2), (sort, 2)),
)
"""Kinds of cases, and how often each comes."""


def drain(w: World, response: BatchResponse) -> None:
    """Read a response in some way; what it gives is a result, or an error of cbatch's."""
    how = w.rng.random()
    try:
        if how < 0.1:
            list(response)
        elif how < 0.2:
            check(list(response.as_completed()))
        elif how < 0.3 and is_threaded(w.engine):
            check(anyio.run(_gathered, response))
        else:
            check(response.results(timeout=PATIENCE_S, return_errors=True))
    except Exception as error:
        if error is not mailbox_of(response).items.error:  # which a generator's own error is
            raise


async def _gathered(response: BatchResponse) -> list[BatchResult]:
    return [result async for result in response.as_completed()]


def check(results: list[BatchResult]) -> None:
    """Assert that an item that failed has an error of cbatch's, and that all can be shown."""
    for result in results:
        assert result.error is None or isinstance(result.error, CBatchError), result
        assert str(result.error) is not None
        assert repr(result)


@dataclass(slots=True)
class Engines:
    """Engines that live through all cases, with what each answers to a plain request."""

    made: list[tuple[Engine, tuple[int, ...]]]

    def still_answer(self, engine: Engine) -> None:
        """Assert that an engine answers as it did."""
        expected = next(tokens for known, tokens in self.made if known is engine)
        found = _answer(engine)
        assert found == expected, f"a plain request is answered by {found}, not {expected}"


def _answer(engine: Engine) -> tuple[int, ...]:
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 1}
    return engine.submit("plain", options=options).result(timeout=PATIENCE_S).token_ids


@contextlib.contextmanager
def engines(*, has_model: bool) -> Iterator[Engines]:
    """Make the engines."""
    short = {"max_tokens": 8}
    with contextlib.ExitStack() as stack:
        found = [
            Engine(FakeBackend(2, 64, 32), options=short),
            Engine(FakeBackend(2, 64, 32), options=short, threaded=False),
        ]
        if has_model:
            found.append(cbatch.load(parallel=2, ctx_per_seq=256, n_threads=1, options=short))
        for engine in found:
            stack.callback(engine.close)
        yield Engines([(engine, _answer(engine)) for engine in found])


@contextlib.contextmanager
def watched_threads(errors: list[str]) -> Iterator[None]:
    """Note what other threads raise, and what nobody can."""

    def note(args: Any) -> None:
        errors.append("".join(traceback.format_exception(args.exc_value)))

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook = sys.unraisablehook = note
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def one(seed: str, found: Engines, folder: Path, *, has_model: bool) -> str:
    """Do one case; return what is wrong with its end, empty where nothing is."""
    rng = random.Random(seed)
    kinds = [*CASES, (load, 1)] if has_model else CASES
    case = rng.choices([kind for kind, _ in kinds], [n for _, n in kinds])[0]
    engine = rng.choice(found.made)[0]
    errors: list[str] = []
    faulthandler.dump_traceback_later(PATIENCE_S * 2, exit=True)
    with watched_threads(errors), tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            with contextlib.chdir(own) if hasattr(contextlib, "chdir") else _inside(own):
                case(World(rng, engine, Path(own)))
        except CBatchError as error:
            errors += _unreadable(error)
        except Exception:
            errors.append(traceback.format_exc())
        try:
            found.still_answer(engine)
        except Exception:
            errors.append(f"the engine does not go on: {traceback.format_exc()}")
    faulthandler.cancel_dump_traceback_later()
    return f"{case.__name__}: {'; '.join(errors)}" if errors else ""


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _unreadable(error: CBatchError) -> list[str]:
    try:
        return [] if str(error) else ["an error without words"]
    except Exception:
        return [f"an error that cannot be read: {traceback.format_exc()}"]


def main() -> None:
    """Do cases until the time is over; say which failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="do this one alone")
    parser.add_argument("--no-model", action="store_true", help="on fake backends alone")
    a = parser.parse_args()
    has_model, ends_s, n_failed = not a.no_model, time.monotonic() + 60 * a.minutes, 0
    n = a.case or 0
    with (
        tempfile.TemporaryDirectory(prefix="type-fuzz-") as folder,
        engines(has_model=has_model) as found,
    ):
        os.environ["HOME"] = folder
        sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
        while time.monotonic() < ends_s:
            wrong = one(f"{a.seed}:{n}", found, Path(folder), has_model=has_model)
            if wrong:
                n_failed += 1
                sys.stderr.write(f"--seed {a.seed} --case {n}: {wrong}\n")
            n += 1
            if a.case is not None:
                break
    sys.stderr.write(f"{n if a.case is None else 1} cases, {n_failed} failed\n")
    sys.exit(bool(n_failed))


if __name__ == "__main__":
    main()
