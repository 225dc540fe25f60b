"""What threads hand to the owner: commands in order, timers when they are due, turns one after another."""

from __future__ import annotations

import threading
from functools import partial

from cbatch.runtime.commands import Commands, FairLock
from tests.runtime.backends import PATIENCE_S, in_thread


def test_commands_are_done_in_order_and_those_that_they_add_too() -> None:
    commands, done = Commands(), list[str]()
    commands.put(partial(done.append, "a"))
    commands.put(lambda: commands.put(partial(done.append, "c")))
    commands.put(partial(done.append, "b"))
    commands.do_all()
    assert done == ["a", "b", "c"]
    assert not len(commands)


def test_timers_are_due_by_their_times_and_equal_ones_in_order() -> None:
    commands, done = Commands(), list[str]()
    for when_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        commands.set_timer(when_s, partial(done.append, name))
    commands.do_due(0.5)
    assert (done, commands.next_s) == ([], 1.0)
    commands.do_due(1.0)
    assert (done, commands.next_s) == (["first", "second"], 2.0)
    commands.do_due(9.0)
    assert (done[2:], commands.next_s) == (["late"], None)


def test_fair_lock_can_be_taken_again_by_its_owner_alone() -> None:
    lock = FairLock()
    with lock.held(), lock.held():
        assert lock.is_mine
        assert in_thread(lambda: lock.is_mine)() is False
    assert not lock.is_mine


def test_fair_lock_lets_others_in_between_the_turns_of_one() -> None:
    lock, order, waits = FairLock(), list[str](), threading.Event()

    def take() -> None:
        waits.set()
        with lock.held():
            order.append("other")

    with lock.held():
        other = in_thread(take)
        assert waits.wait(PATIENCE_S)
    while not order:  # takes it again and again: without fairness it could be for ever
        with lock.held():
            pass
    other()
    assert order == ["other"]
