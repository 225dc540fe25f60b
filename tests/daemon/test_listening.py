"""A socket for one client at a time."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.daemon import listening
from cbatch.daemon.listening import Listener, socket_at
from cbatch.errors import ConfigError
from tests.runtime.backends import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def busy(first: bytes) -> bytes:
    """What a client is told that has to wait."""
    return b"busy, " + first


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_S)
    client.connect(os.fspath(path))
    return client


def test_second_client_is_told_and_closed_and_the_next_one_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(Listener(path, busy)) as listener:
        with connected(path) as first, closing(listener.clients()) as clients:
            served = next(clients)
            with connected(path) as second:
                second.sendall(b"Ann")
                assert second.recv(20) == b"busy, Ann"
                assert second.recv(20) == b""
            served.sendall(b"hello")
            assert first.recv(9) == b"hello"
        with connected(path) as third, closing(listener.clients()) as clients:
            next(clients).sendall(b"again")
            assert third.recv(9) == b"again"
    assert not path.exists()


def test_client_that_comes_before_the_one_before_it_has_left_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.daemon.listening._LEAVING_S", PATIENCE_S)
    path = tmp_path / "s"
    with closing(Listener(path, busy)) as listener, closing(listener.clients()) as clients:
        with connected(path):
            next(clients)
            second = connected(path)
        with second:
            next(clients).sendall(b"again")
            assert second.recv(9) == b"again"


def test_client_is_hung_up_on_when_the_next_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(Listener(path, busy)) as listener, connected(path) as first:
        with closing(listener.clients()) as clients:
            next(clients)
        assert first.recv(9) == b""


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED"])
def test_error_that_passes_ends_no_listener(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, errors = socket.socket.accept, [OSError(getattr(errno, name), "")] * 2

    def accept_later(self: socket.socket) -> object:
        if errors:
            raise errors.pop()
        return accept(self)

    monkeypatch.setattr("cbatch.daemon.listening._PAUSE_S", 0.001)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    path = tmp_path / "s"
    with closing(Listener(path, busy)) as listener, connected(path) as first:
        with closing(listener.clients()) as clients:
            next(clients).sendall(b"hello")
        assert first.recv(9) == b"hello"
    assert not errors


def test_other_error_ends_the_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: socket.socket) -> object:
        raise OSError(errno.EINVAL, "odd")

    monkeypatch.setattr(socket.socket, "accept", fail)
    with (
        closing(Listener(tmp_path / "s", busy)) as listener,
        closing(listener.clients()) as clients,
        pytest.raises(OSError, match="odd"),
    ):
        next(clients)


def test_client_for_which_there_is_no_thread_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "s"
    with closing(Listener(path, busy)) as listener, closing(listener.clients()) as clients:
        with connected(path) as first:
            served = next(clients)
            with monkeypatch.context() as short:
                short.setattr(threading.Thread, "start", fail)
                with connected(path) as second:
                    assert second.recv(9) == b""
            served.sendall(b"hello")
            assert first.recv(9) == b"hello"
        with connected(path) as last:
            next(clients).sendall(b"again")
            assert last.recv(9) == b"again"


def test_few_clients_are_told_to_wait_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.daemon.listening._N_WAITING", 2)
    monkeypatch.setattr("cbatch.daemon.listening._LEAVING_S", 0.001)
    lock, two, go = threading.Lock(), threading.Semaphore(0), threading.Event()
    n_now, most = 0, 0

    def slow(first: bytes) -> bytes:
        nonlocal n_now, most
        with lock:
            n_now += 1
            most = max(most, n_now)
        two.release()
        assert go.wait(PATIENCE_S)
        with lock:
            n_now -= 1
        return b"busy"

    path = tmp_path / "s"
    with ExitStack() as opened:
        listener = opened.enter_context(closing(Listener(path, slow)))
        clients = opened.enter_context(closing(listener.clients()))
        opened.enter_context(connected(path))
        next(clients)
        others = [opened.enter_context(connected(path)) for _ in range(8)]
        for other in others:
            other.sendall(b"Ann")
        assert two.acquire(timeout=PATIENCE_S)
        assert two.acquire(timeout=PATIENCE_S)
        go.set()
        assert [other.recv(9) for other in others] == [b"busy"] * len(others)
    assert most == 2


def test_listener_ends_while_all_places_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.daemon.listening._N_WAITING", 1)
    monkeypatch.setattr("cbatch.daemon.listening._LEAVING_S", PATIENCE_S)
    path = tmp_path / "s"
    with (
        closing(Listener(path, busy)) as listener,
        closing(listener.clients()) as clients,
        connected(path),
        connected(path),
    ):
        next(clients)
        listener.close()
        assert "cbatch-listener" not in {thread.name for thread in threading.enumerate()}


def test_port_that_is_free_is_found_and_named() -> None:
    with closing(Listener(0, busy)) as listener:
        host, _, port = listener.name.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), PATIENCE_S), pytest.raises(ConfigError):
            Listener(int(port), busy)


def test_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with closing(Listener(tmp_path / "s", busy)):
        for name, words in {
            "file": "file: exists and is not a socket: give another path",
            "none/s": "none/s: No such file or directory",
            "s": "s: another process listens there: give another path",
            "x" * 200: "too long",
        }.items():
            with pytest.raises(ConfigError, match=words):
                Listener(tmp_path / name, busy)
    assert (tmp_path / "file").exists()


def test_left_socket_is_taken_over_by_one_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes between the first's `bind` and `listen`, when the socket looks left behind, too."""
    path, has_waited, listens = tmp_path / "s", threading.Event(), socket.socket.listen
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))
    errors: list[ConfigError] = []

    def second() -> None:
        try:
            socket_at(path).close()
        except ConfigError as error:
            errors.append(error)
        has_waited.set()

    def listen(opened: socket.socket, *args: Any) -> None:
        if not other.ident:
            other.start()
            assert has_waited.wait(PATIENCE_S)
        listens(opened, *args)

    def pause(_: float) -> None:
        has_waited.set()

    other = threading.Thread(target=second)
    monkeypatch.setattr(socket.socket, "listen", listen)
    monkeypatch.setattr(listening, "_LONGEST_WAIT_S", math.inf)
    monkeypatch.setattr("cbatch.support.folders.time.sleep", pause)
    with socket_at(path):
        other.join(PATIENCE_S)
    assert [f"{path}: another process listens there: give another path"] == [*map(str, errors)]


def test_only_the_same_user_may_open_the_socket(tmp_path: Path) -> None:
    with closing(Listener(tmp_path / "s", busy)):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_file_in_place_of_the_socket_stays_when_listening_ends(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with closing(Listener(path, busy)):
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"
