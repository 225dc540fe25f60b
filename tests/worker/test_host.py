"""Commands of a program, and what it is told."""

from __future__ import annotations

import io
import os
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch import BatchPrompt, Engine, RunOptions
from cbatch.backend.fake import FakeBackend
from cbatch.core.plan import KvCapabilities
from cbatch.engine_options import ScheduleOptions
from cbatch.errors import NoThreadError
from cbatch.runtime.local import LocalRuntime
from cbatch.worker import host
from cbatch.worker.host import SessionEnd
from cbatch.worker.service import serve_client
from tests.no_threads import NoThreads
from tests.runtime.backends import PATIENCE_S, GatedBackend
from tests.worker.programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = ["one", "two", "three", "four"]
ALIKE = "a beginning that both prompts have, "


@pytest.fixture
def program() -> Iterator[Program]:
    with Program(FakeBackend(2, 64)) as made:
        assert made.read()["parallel"] == 2
        yield made


def answers(prompts: list[str], **options: Any) -> dict[str, str]:
    """What an engine without a border says, by prompt."""
    with Engine(FakeBackend(2, 64)) as engine:
        results = engine.run(prompts, options=options).results()
    return {prompt: result.text for prompt, result in zip(prompts, results, strict=True)}


def test_input_that_ends_at_once_gets_all_answers(program: Program) -> None:
    options = {"max_tokens": 9, "seed": 3}
    items = [{"prompt": prompt, "id": prompt} for prompt in PROMPTS]
    program.send("run", n=1, items=items, options=options)
    program.send("run", n="a", items=[{"prompt": "x"}, {"tokens": [65]}])
    found = program.rest()
    assert found["replies"] == [[1, PROMPTS], ["a", ["4", "5"]]]
    texts = {r["id"]: r["text"] for r in found["results"]}
    assert {id: texts[id] for id in PROMPTS} == answers(PROMPTS, **options)
    assert sorted(texts) == sorted(found["admitted"]) == sorted([*PROMPTS, "4", "5"])
    assert "chunks" not in found
    assert program.ending is SessionEnd.DONE


def test_chunks_come_on_request_and_join_to_the_text(program: Program) -> None:
    options = {"max_tokens": 20, "ignore_eos": True}
    program.send("run", items=[{"prompt": "x", "id": "x"}], options=options, stream=True)
    found = program.rest()
    [result] = found["results"]
    chunks = found["chunks"]
    assert "".join(chunk["text"] for chunk in chunks) == result["text"]
    assert [t for chunk in chunks for t in chunk["token_ids"]] == result["token_ids"]
    assert chunks[-1]["finish_reason"] == result["finish_reason"]


@pytest.mark.parametrize("by_token", [False, True])
def test_by_token_has_tokens_come_that_are_no_text_yet(by_token: bool) -> None:
    backend = GatedBackend(1, 64, hold_at=1)
    with Program(backend) as program:
        program.read()
        options = {"max_tokens": 4, "seed": seed_of_half_a_character()}
        program.send(
            "run", items=[{"prompt": "x"}], options=options, stream=True, by_token=by_token
        )
        backend.wait_until_held()
        program.send("count", n=1, prompt={"prompt": "x"})
        found = program.read_until("replies")
        assert [chunk["text"] for chunk in found.get("chunks", [])] == ([""] if by_token else [])
        backend.release()


def seed_of_half_a_character() -> int:
    with Engine(FakeBackend(1, 64)) as engine:
        for seed in range(1000):
            result = engine.submit("x", options={"max_tokens": 1, "seed": seed}).result()
            if result.token_ids and 0xC2 <= result.token_ids[0] < 0xF5:
                return seed
    raise AssertionError


def test_pause_resume_slots_and_cancel_are_answered() -> None:
    backend = GatedBackend(2, 64, hold_at=3)
    with Program(backend) as program:
        program.read()
        options = {"max_tokens": 30, "ignore_eos": True}
        program.call("run", items=[{"prompt": "abc", "id": "x", "options": options}])
        backend.wait_until_held()
        backend.release_when_asked()
        assert program.call("pause", id="x") is True
        assert program.call("pause", id="x") is False
        first, second = program.call("slots")
        assert (first["id"], first["status"], first["n_prompt"]) == ("x", "paused", 3)
        assert first["n_cells"] == first["n_computed"] >= 3
        assert (second["id"], second["status"]) == (None, "free")
        assert program.call("resume", id="x") is True
        assert program.call("cancel", ids=["x", "unknown"]) in (0, 1)
        assert program.call("stats")["n_submitted"] == 1
        assert program.call("cancel_all") == 0


def test_paused_request_goes_on_when_the_input_ends() -> None:
    backend = GatedBackend(1, 64, hold_at=2)
    with Program(backend) as program:
        program.read()
        program.call("run", items=[{"prompt": "abc"}], options={"ignore_eos": True})
        backend.wait_until_held()
        backend.release_when_asked()
        program.call("pause", id="0")
        [result] = program.rest()["results"]
    assert result["finish_reason"] == "window"


@pytest.mark.parametrize("schedule", [None, ScheduleOptions(max_queue=0)], ids=["plain", "limit"])
@pytest.mark.parametrize("more", [{}, {"paused": True}], ids=["running", "paused"])
def test_requests_that_pause_by_themselves_go_on_when_the_input_ends(
    schedule: ScheduleOptions | None, more: dict[str, Any]
) -> None:
    with Program(FakeBackend(1, 64), schedule=schedule) as program:
        program.read()
        options = {"ignore_eos": True, "pause_every": 3, "max_tokens": 20}
        for i in range(4):
            program.send("run", items=[{"prompt": "abc", "id": str(i)}], options=options, **more)
        results = program.rest()["results"]
    assert [len(result["token_ids"]) for result in results] == [20] * 4


def test_close_ends_requests_with_what_they_have_and_is_answered_last() -> None:
    backend = GatedBackend(1, 1000, hold_at=5)
    with Program(backend) as program:
        program.read()
        items = [{"prompt": "a", "id": "a"}, {"prompt": "b", "id": "b"}]
        program.call("run", items=items, options={"ignore_eos": True})
        backend.wait_until_held()
        backend.release_when_asked()
        program.send("close", n=7)
        found = program.rest()
    first, second = sorted(found["results"], key=lambda result: result["id"])
    assert (first["finish_reason"], len(first["token_ids"]) > 0) == ("cancelled", True)
    assert second["error"]["type"] == "RequestCancelledError"
    assert found["replies"] == [[7, None]]
    assert program.ending is SessionEnd.DONE


def test_extend_takes_a_result_as_it_came(program: Program) -> None:
    item = {"prompt": "abc", "id": "x"}
    options = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    program.send("run", items=[item], options=options)
    [result] = program.read_until("results")["results"]
    again = {"prompt": item, "options": options, "result": result}
    program.send("extend", n=1, n_tokens=4, **again)
    found = program.rest()
    [longer] = found["results"]
    assert found["replies"] == [[1, "x"]]
    [whole] = answers(["abc"], max_tokens=9, ignore_eos=True, seed=3).values()
    assert (longer["text"], len(longer["token_ids"])) == (whole, 9)


def test_wrong_extension_is_refused_by_name(program: Program) -> None:
    item = {"prompt": "abc", "id": "x"}
    program.send("run", items=[item], options={"max_tokens": 5, "ignore_eos": True})
    [result] = program.read_until("results")["results"]
    good = {"prompt": item, "result": result, "n_tokens": 4}
    for changed, word in (
        ({"result": {"usage": {}}}, "result"),
        ({"prompt": {"prompt": "abc"}}, "id"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"result": {**result, "token_ids": [4000] * 5}}, "not in the vocabulary"),
        ({"result": {**result, "token_ids": ["a"]}}, "token_ids"),
        ({"result": {**result, "token_ids": [-1]}}, "token_ids"),
        ({"result": {**result, "usage": {"prompt_tokens": 0.5}}}, "prompt_tokens"),
        ({"result": {**result, "finish_reason": "soon"}}, "finish_reason"),
        ({"result": {**result, "origin": "x"}}, "origin"),
        ({"result": {**result, "seed": -1}}, "seed"),
        ({"result": {**result, "logprobs": [[1, 2, 3, 4]]}}, "logprobs"),
    ):
        program.send("extend", n=1, **{**good, **changed})
        [[number, value, error]] = program.read_until("replies")["replies"]
        assert (number, value) == (1, None)
        assert word in error["message"]
    assert program.call("count", prompt=item) == 3


@pytest.mark.parametrize("n_there", [50, 58, 61, 62, 65, 77, 78, 300])
@pytest.mark.parametrize("n_discard", [1, 16])
def test_extension_of_more_than_the_window_begins_with_what_fits(
    n_there: int, n_discard: int
) -> None:
    """The result is of an engine whose window is larger."""
    there = extension_of([65] * n_there, n_discard=n_discard, ignore_eos=True, seed=3)
    results = extended_after(there, n_tokens=5)
    assert results["a"]["finish_reason"] == "length"
    assert results["a"]["token_ids"][:n_there] == [65] * n_there
    assert len(results["a"]["token_ids"]) == n_there + 5
    n_over = 3 + n_there + 4 - 64
    assert results["a"]["usage"].get("context_shifts", 0) == max(0, -(-n_over // n_discard))
    assert results["other"]["text"]


@pytest.mark.parametrize(("n_there", "is_late"), [(60, False), (61, True), (300, True)])
def test_extension_that_scores_its_prompt_must_fit_the_window(n_there: int, is_late: bool) -> None:
    there = extension_of([65] * n_there, n_discard=16, prompt_logprobs=0, ignore_eos=True)
    results = extended_after(there, n_tokens=1)
    error = results["a"].get("error") or {"type": None}
    assert error["type"] == ("PromptTooLongError" if is_late else None)
    assert results["other"]["text"]


def test_alternatives_of_alternatives_are_not_read() -> None:
    """They would be made one within the other, as deep as a client writes them."""
    there = extension_of([65, 66], logprobs=True, ignore_eos=True)
    top: list[dict[str, Any]] = []
    for _ in range(400):
        top = [{"token_id": 1, "data": "YQ==", "logprob": -1.0, "top": top}]
    there["result"]["logprobs"] = top * 2
    found = extended_after(there, n_tokens=1)["a"]
    assert [len(token["top"]) for token in found["logprobs"]] == [1, 1, 0]


def extended_after(there: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    """The results of an extension and of another request, where windows of 64 tokens can move."""
    memory = KvCapabilities("partitioned", 2 * 64, can_shift=True)
    with Program(FakeBackend(2, 64, memory=memory)) as program:
        program.read()
        program.send("extend", n_tokens=n_tokens, **there)
        options = {"ignore_eos": True, "seed": 3, "max_tokens": 5}
        program.send("run", items=[{"prompt": "other", "id": "other"}], options=options)
        return {r["id"]: r for r in program.rest()["results"]}


def extension_of(token_ids: list[int], **options: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": len(token_ids)}
    result = {"finish_reason": "length", "usage": usage, "seed": 3, "token_ids": token_ids}
    return {"prompt": {"tokens": [1, 2, 3], "id": "a"}, "options": options, "result": result}


def test_result_with_a_foreign_number_gets_no_foreign_cells(program: Program) -> None:
    """The number names the cells of a request: that of another one must not give its cells."""
    options = {"max_tokens": 5, "ignore_eos": True, "seed": 3}
    results = []
    mine, other = ALIKE + "1", ALIKE + "2"
    for prompt in (mine, other):
        program.send("run", items=[{"prompt": prompt, "id": prompt}], options=options)
        results += program.read_until("results")["results"]
    forged = {**results[0], "origin": results[1]["origin"]}
    item = {"prompt": mine, "id": mine}
    program.send("extend", prompt=item, options=options, result=forged, n_tokens=4)
    [longer] = program.rest()["results"]
    [whole] = answers([mine], max_tokens=9, ignore_eos=True, seed=3).values()
    assert longer["text"] == whole


def test_wrong_command_is_answered_by_name_or_among_errors(program: Program) -> None:
    for line, word in (
        ('"op": "run", "items": [{"prompt": "x"}], "max_tokens": 3', "max_tokens"),
        ('"op": "run"', "items"),
        ('"op": "run", "items": [{"prompt": "x", "text": "y"}]', "text"),
        ('"op": "run", "items": [{"prompt": "x", "options": {"tmp": 1}}]', "tmp"),
        ('"op": "run", "items": [{"prompt": "x"}], "options": [1]', "options"),
        ('"op": "cancel", "ids": "x"', "ids"),
        ('"op": "cancel", "ids": ["a\\u00000"]', "ids"),
        ('"op": "stats", "slot": 3', "slot"),
        ('"op": "dance"', "dance"),
        ('"no": 1', "op"),
    ):
        program.raw(b'{"n": 1, %b}' % line.encode())
        [[number, value, error]] = program.read_until("replies")["replies"]
        assert (number, value) == (1, None)
        assert word in error["message"]
    for unread in (
        b"{",
        b"[1]",
        b'{"op": "stats", "n": [1]}',
        b'{"op": "stats", "n": NaN}',
        b"\xff",
    ):
        program.raw(unread)
        [error] = program.read_until("errors")["errors"]
        assert error["type"] == "ConfigError"


def test_empty_lines_of_windows_and_a_last_one_without_an_end_are_taken(
    program: Program,
) -> None:
    line = b'{"op": "count", "n": 1, "prompt": {"prompt": "abc"}}'
    program.raw(b"\r\n\n  \r\n" + line + b"\r")
    program.input.write(line)
    assert program.rest() == {"replies": [[1, 3], [1, 3]]}


def test_defaults_of_the_daemon_count_where_a_program_says_nothing() -> None:
    with Program(FakeBackend(1, 64), options=RunOptions(max_tokens=3, ignore_eos=True)) as program:
        program.read()
        program.send("run", items=[{"prompt": "a"}, {"prompt": "b", "options": {"max_tokens": 5}}])
        found = program.rest()
    assert sorted(len(r["token_ids"]) for r in found["results"]) == [3, 5]


def test_queue_that_is_full_is_answered_and_nothing_stays() -> None:
    backend = GatedBackend(1, 64, hold_at=1)
    schedule = ScheduleOptions(max_queue=1, when_full="reject")
    with Program(backend, schedule=schedule) as program:
        program.read()
        options = {"ignore_eos": True}
        program.call("run", items=[{"prompt": "a"}, {"prompt": "b"}], options=options)
        backend.wait_until_held()
        backend.release_when_asked()
        program.send("run", n=2, items=[{"prompt": "c"}, {"prompt": "d"}, {"prompt": "e"}])
        found = program.rest()
    [[_, _, error]] = found["replies"]
    assert error["type"] == "QueueFullError"
    assert len(found["results"]) == 2


def test_requests_that_wait_for_room_are_answered_when_it_comes() -> None:
    with Program(FakeBackend(1, 64), schedule=ScheduleOptions(max_queue=0)) as program:
        program.read()
        for i in range(20):
            program.send(
                "run", n=i, items=[{"prompt": "a", "id": str(i)}], options={"max_tokens": 2}
            )
        found = program.rest()
    assert sorted(found["replies"]) == [[i, [str(i)]] for i in range(20)]
    assert len(found["results"]) == 20


def test_failed_engine_is_told_and_ends_the_time() -> None:
    class Broken(FakeBackend):
        def run(self, plan: Any) -> Any:
            raise MemoryError("no more")

    with Program(Broken(1, 64)) as program:
        program.read()
        program.send("run", items=[{"prompt": "a"}])
        found: dict[str, Any] = program.read_until("died")
        assert "died" in found
        program.rest()
    assert program.ending is SessionEnd.FAILED


@pytest.mark.parametrize("name", ["cbatch-outbox", "cbatch-lines"])
def test_client_for_whom_there_is_no_thread_costs_nobody_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = NoThreads(monkeypatch, name)
    runtime = LocalRuntime(FakeBackend(1, 64), ScheduleOptions())
    with closing(runtime), open(os.devnull, "w+b") as nobody:
        with pytest.raises(NoThreadError):
            serve_client(runtime, io.BytesIO(b'{"cbatch": 2}'), nobody.fileno())
        threads.is_over = True
        ending = serve_client(runtime, io.BytesIO(b'{"cbatch": 2}'), nobody.fileno())
        assert ending is SessionEnd.DONE


def test_long_commands_that_compute_are_limited_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "N_LATER_BYTES_MAX", 3000)
    go, count = threading.Event(), LocalRuntime.n_tokens_of

    def held(self: LocalRuntime, prompt: BatchPrompt, options: RunOptions) -> int:
        assert go.wait(PATIENCE_S)
        return count(self, prompt, options)

    monkeypatch.setattr(LocalRuntime, "n_tokens_of", held)
    item = {"prompt": "x" * 2000}
    with Program(FakeBackend(1, 64)) as program:
        program.read()
        program.send("count", n=1, prompt=item)
        program.send("count", n=2, prompt=item)
        [[number, _, error]] = program.read_until("replies")["replies"]
        assert (number, error["type"]) == (2, "ConfigError")
        assert "bytes, and this one has 2," in error["message"]
        assert "at most 3,000 are allowed together: try again later" in error["message"]
        go.set()
        assert program.read_until("replies")["replies"] == [[1, 2000]]
        assert program.call("count", prompt={"prompt": "x" * 5000}) == 5000
