"""llama.cpp's log lines, kept natively and handed to `logging`."""

from __future__ import annotations

import logging
import threading

import llama_cpp
import pytest
from llama_cpp._logger import llama_log_callback

from cbatch.backend.llama.library import library
from cbatch.backend.llama.log import LlamaLog, llama_log


def say(log: LlamaLog, level: int, text: str) -> None:
    library().cbatch_log_callback(level, text.encode(), log.ring)


def drained(log: LlamaLog, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="cbatch.llama"):
        log.drain()
    return [(r.levelno, r.getMessage()) for r in caplog.records]


def test_log_passes_lines_on_with_their_levels(caplog: pytest.LogCaptureFixture) -> None:
    log = LlamaLog(4096)
    library().cbatch_log_set_debug(log.ring, 1)
    for level, text in [
        (2, "info\n"),
        (3, "warn\n"),
        (4, "error\n"),
        (1, "debug\n"),
        (0, "bare\n"),
    ]:
        say(log, level, text)
    assert drained(log, caplog) == [
        (logging.INFO, "info"),
        (logging.WARNING, "warn"),
        (logging.ERROR, "error"),
        (logging.DEBUG, "debug"),
        (logging.INFO, "bare"),
    ]
    assert log.reason() == "warn; error"
    assert drained(log, caplog) == []


def test_log_leaves_debug_lines_out_until_told(caplog: pytest.LogCaptureFixture) -> None:
    log = LlamaLog(4096)
    for has_debug in (0, 1):
        library().cbatch_log_set_debug(log.ring, has_debug)
        for level, text in [(2, "a"), (5, "b\n"), (1, "c"), (5, "d\n"), (3, "e\n")]:
            say(log, level, text)
    lines = [text for _, text in drained(log, caplog)]
    assert lines == ["ab", "e", "ab", "cd", "e"]
    say(log, 4, "broken\n")
    assert [log.drain() for _ in range(2)] == [["broken"], []]


def test_log_joins_continuations_across_drains_up_to_the_next_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LlamaLog(4096)
    say(log, 3, "load")
    say(log, 5, "ing .")
    assert drained(log, caplog) == []
    for level, text in ((5, ".\nnext\n"), (4, "no newline"), (2, "é\n")):
        say(log, level, text)
    assert drained(log, caplog) == [
        (logging.WARNING, "loading .."),
        (logging.WARNING, "next"),
        (logging.ERROR, "no newline"),
        (logging.INFO, "é"),
    ]


def test_log_that_overflows_keeps_the_newest_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    log = LlamaLog(100)
    for i in range(30):
        say(log, 2, f"line {i:02}\n")  # 16 bytes each, 6 fit
    lines = [text for _, text in drained(log, caplog)]
    assert lines == [
        "24 older lines of llama.cpp's log were dropped",
        *(f"line {i}" for i in range(24, 30)),
    ]


def test_log_cuts_a_text_longer_than_the_ring(caplog: pytest.LogCaptureFixture) -> None:
    log = LlamaLog(64)
    say(log, 2, "x" * 500)
    say(log, 2, "\n")
    say(log, 2, "y\n")
    assert [text for _, text in drained(log, caplog)][-1] == "y"


def test_log_ring_too_small_is_refused() -> None:
    with pytest.raises(MemoryError):
        LlamaLog(63)


def test_log_takes_lines_from_many_threads_whole(caplog: pytest.LogCaptureFixture) -> None:
    log = LlamaLog(1 << 16)

    def talk(name: str) -> None:
        for _ in range(100):
            say(log, 2, f"{name * 20}\n")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [text for _, text in drained(log, caplog)]
    assert sorted(lines) == sorted(name * 20 for name in "abcd" for _ in range(100))


@pytest.mark.real
def test_log_installed_catches_what_llama_cpp_says() -> None:
    log = llama_log()
    log.install()
    log.install()
    log.remove()
    path = b"/nowhere/model.gguf"
    try:
        assert not llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        found = log.drain()
    finally:
        log.remove()
    assert any(path.decode() in line for line in found)


def test_log_removed_gives_llama_cpp_python_its_callback_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, given = LlamaLog(64), []
    monkeypatch.setattr(llama_cpp, "llama_log_set", lambda callback, data: given.append(callback))
    log.install()
    log.remove()
    assert given[1] is llama_log_callback
    assert len(given) == 2
