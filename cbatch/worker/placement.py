"""Which cores each worker of a pool computes on, and its share of slots and memory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cbatch.errors import ConfigError
from cbatch.support.checks import shown
from cbatch.support.taken_cores import STAT, TakenCores

_NODES = Path("/sys/devices/system/node")


def nodes_of(cores: Iterable[int], folder: Path = _NODES) -> list[list[int]]:
    """Return cores by the memory that is near to them (NUMA node); all together where the system does not tell."""
    left, found = set(cores), []
    for path in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda p: int(p.parent.name[4:])):
        with suppress(OSError, ValueError):
            near = left & _listed(path.read_text())
            if near:
                found.append(sorted(near))
                left -= near
    return [*found, sorted(left)] if left else found


def _listed(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def divide_cores(nodes: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """Return the cores of each of `n` workers: whole nodes where these suffice, else parts of one node each.

    Workers share cores where there are fewer cores than workers.
    """
    if len(nodes) >= n:
        parts = [list[int]() for _ in range(n)]
        for node in sorted(nodes, key=len, reverse=True):
            min(parts, key=len).extend(node)
        return [sorted(part) for part in parts]
    shares = [list[int]() for _ in nodes]  # the workers of each node
    for i in range(n):
        k = (
            i
            if i < len(nodes)
            else max(range(len(nodes)), key=lambda k: len(nodes[k]) / len(shares[k]))
        )
        shares[k].append(i)
    found: dict[int, list[int]] = {}
    for node, workers in zip(nodes, shares, strict=True):
        for k, i in enumerate(workers):
            begin, end = k * len(node) // len(workers), (k + 1) * len(node) // len(workers)
            found[i] = [*node[begin:end]] or [node[k % len(node)]]
    return [found[i] for i in range(n)]


N_ROWS_LEAST = 16
"""Slots that the worker of a NUMA node needs to be worth it: each worker reads all weights for its own rows alone."""

N_ROWS_LEAST_SMALL = 8
"""The same where the weights stay in the cores' caches. Source: measured, docs/understand/performance.md."""

N_SMALL_BYTES = 64 * 2**20
"""Weights that stay in caches, about. Source: measured with 12 and 140 MiB; between them our choice."""


N_TAKEN = 0.5
"""Cores of two that other programs keep busy from which two workers are faster whatever the weights: threads of one
context wait for the slowest, workers do not. Source: measured with an endless loop, docs/understand/performance.md."""

_SAMPLE_S = 0.25


def n_cores_taken(
    cores: Iterable[int], path: Path = STAT, wait: Callable[[float], object] = time.sleep
) -> float:
    """Return how many of some cores others keep busy, over a quarter of a second; 0.0 where nothing tells."""
    taken = TakenCores(cores, path)
    wait(_SAMPLE_S)
    return taken.n_since() or 0.0


def choose_replicas(
    nodes: Sequence[Sequence[int]],
    n_bytes: int,
    n_slots: int | None,
    n_taken: Callable[[Iterable[int]], float] = n_cores_taken,
) -> int:
    """Return how many workers compute a model on the CPU fastest: 1 where dividing the cores does not pay.

    Dividing spares the barriers between threads, thousands a step. Within a NUMA node that pays where the weights stay
    in the caches, and on two cores where other programs keep one busy; else two workers read the weights from memory
    twice (0.90 to 0.96 of one with 16 rows each). On machines with several nodes the rule is one worker for each, and
    not measured.

    Args:
        nodes: the cores that this process may use, by NUMA node.
        n_bytes: the size of the weights.
        n_slots: slots of all workers together; None where each has the default number.
        n_taken: returns how many cores others keep busy.
    """
    cores = [core for node in nodes for core in node]
    n = max(len(nodes), min(2, len(cores)))
    if n_slots is None or n_slots >= n * N_ROWS_LEAST_SMALL:
        is_pressed = n_bytes > N_SMALL_BYTES and len(cores) == 2 and n_taken(cores) >= N_TAKEN
        if n_bytes <= N_SMALL_BYTES or is_pressed:
            return n
    n = len(nodes)
    return n if n_slots is None or n_slots >= n * N_ROWS_LEAST else 1


def divide(amount: int | None, n: int) -> list[int | None]:
    """Return the shares of `n` workers in a number of things; the first ones get what is left over."""
    if amount is None:
        return [None] * n
    return [amount // n + (i < amount % n) for i in range(n)]


def place(cores: object) -> None:
    """Have this process compute on these cores alone; None for any."""
    if cores is None:
        return
    is_list = isinstance(cores, list) and all(type(c) is int and c >= 0 for c in cores)
    if not cores or not is_list:
        raise ConfigError(f"cores must be a list of core numbers, not {shown(cores)}")
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # cores that are gone meanwhile
            os.sched_setaffinity(0, cores)  # type: ignore[arg-type]
