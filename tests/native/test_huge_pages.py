"""Memory of ggml's CPU backend is in huge pages where the system gives them to programs that ask."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from cbatch.backend.bindings import said
from cbatch.backend.load import packed
from tests.native.test_packed import ggml, ptr, size

SMAPS = Path("/proc/self/smaps")

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address."""
    is_found = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


def flags_of_buffer(n_bytes: int) -> list[str]:
    """The flags of the memory of a buffer, in its middle."""
    kind = ggml("ggml_backend_cpu_buffer_type", ptr)()
    made = ggml("ggml_backend_buft_alloc_buffer", ptr, ptr, size)(kind, n_bytes)
    try:
        base = ggml("ggml_backend_buffer_get_base", ptr, ptr)(made)
        ctypes.memset(base, 1, n_bytes)
        return flags_at(base + n_bytes // 2)
    finally:
        ggml("ggml_backend_buffer_free", None, ptr)(made)


@pytest.mark.skipif(not said("ggml_version"), reason="a build of ggml that is not known")
def test_large_buffers_ask_for_huge_pages() -> None:
    packed.use_huge_pages()
    packed.use_huge_pages()  # once a process
    assert "hg" in flags_of_buffer(2**26)
