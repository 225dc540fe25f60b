"""What is free: the machine's and the control groups' word, weights that stay, and where the cells would be."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.backend import host_limits
from cbatch.backend.host_limits import host_free, host_most
from cbatch.backend.llama.model import Placement
from cbatch.backend.load import free_memory
from cbatch.backend.load.free_memory import free_for_cells, share_on_host
from cbatch.backend.load.open_model import open_model
from cbatch.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Pretend = Callable[..., None]


@dataclass
class Model:
    """As much of a loaded model as is asked here."""

    placement: Placement
    n_layers: int = 4
    name: str = "model.gguf"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a system that has 1,000 KiB free and no groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree:  5 kB\nMemAvailable:   1000 kB\n")
    (proc / "self/maps").write_text("")
    (proc / "self/cgroup").write_text("4:memory:/old\n0::/a/b\n")
    monkeypatch.setattr(host_limits, "_PROC", proc)
    monkeypatch.setattr(host_limits, "_OWN_GROUP", proc / "self/cgroup")
    monkeypatch.setattr(host_limits, "_CGROUPS", tmp_path / "groups")
    return tmp_path


def limit(group: Path, most: str, taken: int, of_files: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{taken}\n")
    (group / "memory.stat").write_text(f"anon 7\nactive_file {of_files}\ninactive_file 1\n")


@pytest.mark.parametrize("group", ["", "a", "a/b"])
@pytest.mark.parametrize(
    ("given", "n_free"),
    [
        (("500000", 200_000), 300_001),
        (("500000", 400_000, 300_000), 400_001),  # files in memory count as free
        (("100", 200), 0),
    ],
)
def test_narrowest_group_around_the_process_counts(
    system: Path, group: str, given: tuple[Any, ...], n_free: int
) -> None:
    assert host_free("m") == 1000 * 1024
    for folder in ("", "a", "a/b"):
        limit(system / "groups" / folder, "max", 10**9)
    limit(system / "groups/a/b/c", "1", 0)
    limit(system / "groups" / group, *given)
    assert host_free("m") == n_free


def test_mapped_weights_stay_in_memory(system: Path) -> None:
    own = system / "a model with spaces"
    lines = [
        f"7f0000000000-7f0000010000 r--s 00000000 fd:01 12 {own}",
        "7f0000010000-7f0000012000 r--s 00000000 fd:01 13 /models/other.gguf",
        "7f0000020000-7f0000090000 r-xp 00000000 fd:01 14 /lib/libc.so",
        "7f0000090000-7f00000a0000 rw-p 00000000 00:00 0",
    ]
    (system / "proc/self/maps").write_text("\n".join(lines))
    assert host_free(str(own)) == 1000 * 1024 - 0x12000


def test_host_gives_at_most_what_is_free_and_its_swap(system: Path) -> None:
    assert host_most() == 1000 * 1024
    (system / "proc/meminfo").write_text("MemAvailable:   1000 kB\nSwapFree:   24 kB\n")
    assert host_most() == 1024 * 1024
    limit(system / "groups/a/b", "500000", 200_000)
    assert host_most() == 300_001 + 24 * 1024


@pytest.mark.cpu("weights are mapped there")
def test_mapping_of_a_real_model_is_found(test_model: Path) -> None:
    n_mapped = partial(host_limits._mapped, str(test_model))
    n_others = n_mapped()  # which other tests have open
    with closing(open_model(test_model, EngineOptions(exact=True, repack="off"))) as model:
        assert n_others + 0.9 * model.n_bytes < n_mapped()
    assert n_mapped() == n_others


def test_system_that_does_not_tell_is_asked_elsewhere(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "proc/meminfo").unlink()
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert host_free("m") == 3 * 4096

    def refuse(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", refuse)
    assert host_free("m") is None


# ---- where cells are ----


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return what sets the free bytes of the host and of devices."""

    def have(host: int | None, *devices: int) -> None:
        monkeypatch.setattr(free_memory, "host_free", lambda path: host)
        monkeypatch.setattr(free_memory, "free_on_devices", lambda: list(devices))

    return have


def free(n_unloaded: int = 0, offload_kqv: bool = True, **placement: Any) -> int | None:
    model: Any = Model(Placement(**placement))
    return free_for_cells(model, EngineOptions(offload_kqv=offload_kqv), n_unloaded=n_unloaded)


@pytest.mark.parametrize(
    ("there", "given", "n_free"),
    [
        ((1000,), {}, 1000),  # there are no devices
        ((1000,), {"n_gpu_layers": 99}, 1000),
        ((1000,), {"n_unloaded": 300}, 700),
        ((1000,), {"n_unloaded": 3000}, 0),
        ((10, 600, 400), {}, 1000),
        ((10, 600, 400), {"n_gpu_layers": -1}, 1000),
        ((10, 600, 400), {"n_gpu_layers": 5}, 1000),
        ((10, 600, 400), {"n_unloaded": 100}, 900),
        ((10, 600, 400), {"offload_kqv": False}, 10),
        ((10, 600, 400), {"n_gpu_layers": 0}, 10),
        ((10, 600, 400), {"n_gpu_layers": 1}, 10),  # the output's layer is the first to go
        ((300, 400), {"n_gpu_layers": 3}, 600),  # two layers of four on each side
        ((900, 400), {"n_gpu_layers": 3}, 800),
        ((10, 600, 400), {"split_mode": "none", "main_gpu": 1}, 400),
        ((10, 600, 400), {"split_mode": "none"}, 600),
        ((10, 600, 400), {"tensor_split": (1.0, 3.0)}, 533),  # the scarcest decides
        ((10, 600, 400), {"tensor_split": (1.0,)}, 600),
        ((None,), {}, None),
        ((None, 400), {"n_gpu_layers": 3}, 800),
    ],
)
def test_free_memory_is_that_of_the_places_of_cells(
    pretend: Pretend, there: tuple[int | None, ...], given: dict[str, Any], n_free: int | None
) -> None:
    pretend(*there)
    assert free(**given) == n_free


def test_share_on_host_is_that_of_its_layers(pretend: Pretend) -> None:
    model: Any = Model(Placement(n_gpu_layers=2))
    pretend(10)
    assert share_on_host(model, EngineOptions()) == 1.0
    pretend(10, 600)
    assert share_on_host(model, EngineOptions()) == 0.75
