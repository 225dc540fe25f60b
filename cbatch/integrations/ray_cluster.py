"""A cluster of Ray: what it has, and what would wait for ever on it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from cbatch.errors import ConfigError
from cbatch.support.checks import check_float, check_int
from cbatch.support.hub import is_hub_name

_MAX_ACTORS = 10_000


def import_ray() -> Any:
    """Return Ray; ConfigError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed: install cbatch with its extra ray, here and on every node"
        ) from None
    return ray


def cpus_of_nodes() -> list[float]:
    """Return the CPUs of each node, as Ray counts them."""
    ray = import_ray()
    if not ray.is_initialized():
        raise ConfigError(
            "Ray is not connected to a cluster: call ray.init() first, with or without an address"
        )
    return [n["Resources"].get("CPU", 0.0) for n in ray.nodes() if n["Alive"]] or [0.0]


def settle_actors(n: int | None, n_cpus: float | None, *, can_grow: bool) -> tuple[int, float]:
    """Return how many actors there are to be, and the CPUs of each; ConfigError where they would wait for ever."""
    nodes = cpus_of_nodes()
    n = len([c for c in nodes if c]) or 1 if n is None else check_int("n_actors", n, 1, _MAX_ACTORS)
    n_spare = 2 if import_ray().data.DataContext.get_current().checkpoint_config else 1
    if n_cpus is None:
        sizes = range(max(1, int(max(nodes))), 0, -1)
        n_cpus = next((c for c in sizes if not why_never(nodes, n, c, n_spare)), 1)
    n_cpus = check_float("n_cpus", n_cpus, 0.01, 10_000)
    if not can_grow and (why := why_never(nodes, n, n_cpus, n_spare)):
        n_needed = math.ceil(n * n_cpus) + n_spare
        raise ConfigError(
            f"{n} actors of {n_cpus:g} CPUs {why}: give fewer actors (n_actors) or fewer CPUs for each (n_cpus), or "
            f"tell Ray of more CPUs (ray.init(num_cpus={n_needed}) on one machine), or set can_grow=True"
        )
    return n, n_cpus


def why_never(nodes: Sequence[float], n: int, n_cpus: float, n_spare: int) -> str:
    """Return why actors would wait for ever; empty where they would not.

    Reading the input takes one of the spare CPUs. Leaving out rows that Ray has checkpoints of takes another.
    """
    if sum(int(c // n_cpus) for c in nodes) < n:
        return f"do not fit into the cluster, whose nodes have {', '.join(f'{c:g}' for c in nodes)}"
    if sum(nodes) - n * n_cpus < n_spare:
        return (
            f"leave fewer than {n_spare} of the cluster's {sum(nodes):g} CPUs for reading, and would wait for ever for "
            "their input"
        )
    return ""


def check_model(model: str | None) -> None:
    """Raise a `ConfigError` that names the nodes that do not have the model's file."""
    if model is None or is_hub_name(model):
        return
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(os.path.isfile)
    names = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
    places = [NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in names]
    found = ray.get([look.options(scheduling_strategy=place).remote(model) for place in places])
    without = [name for name, is_there in zip(names.values(), found, strict=True) if not is_there]
    if without:
        raise ConfigError(
            f"{model}: is missing on {len(without)} of {len(names)} nodes ({', '.join(without[:3])}): put it on every "
            "node, at the same path, or give hf:OWNER/REPO/FILE.gguf"
        )
