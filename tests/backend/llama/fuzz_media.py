"""Damaged files of pictures and sounds: `python -m tests.backend.llama.fuzz_media --files 2000`.

Each is a chat of its own, many at a time, beside whole ones. A damaged file may have an answer or a `PromptError`,
nothing else; the whole ones have the answers that they have alone. `--seed` repeats what was drawn.

Memory does not grow: that is told by what malloc has given out. What is resident grows with what malloc keeps for later
in its arenas; it stays with `MALLOC_MMAP_THRESHOLD_=131072`, by which large blocks are given back.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
from PIL import Image

import cbatch
from cbatch.bench.synthetic import SHAPES, write_model
from cbatch.bench.synthetic_projector import write_projector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SOUNDS = ("WAV", "FLAC", "OGG", "MP3")
GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
_N_TOGETHER = 40
_TEMPLATE = {"tokenizer.chat_template": "{{ messages[0].content }}"}


def whole_file(kind: str, seed: int) -> bytes:
    """Return a file of a small picture, or of a short sound."""
    draw, file = np.random.default_rng(seed), io.BytesIO()
    if kind in PICTURES:
        side = (int(n) for n in draw.integers(8, 90, 2))
        pixels: NDArray[np.uint8] = draw.integers(0, 255, (*side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, kind)
    else:
        samples = draw.normal(0, 0.1, (int(draw.integers(500, 9000)), int(draw.integers(1, 3))))
        rate = int(draw.choice([8_000, 16_000, 44_100]))
        soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return a file with some bytes changed, doubled or left out, and perhaps its end cut off."""
    spoiled = bytearray(data)
    for _ in range(draw.randrange(1, 8)):
        n_head = min(len(spoiled), 64) if draw.random() < 0.5 else len(spoiled)
        at = draw.randrange(n_head)
        way = draw.random()
        if way < 0.7:
            spoiled[at] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif way < 0.85:
            spoiled[at:at] = spoiled[at : at + draw.randrange(1, 40)]
        else:
            del spoiled[at : at + draw.randrange(1, 40)]
        spoiled = spoiled or bytearray(b"\0")
    if draw.random() < 0.3:
        del spoiled[draw.randrange(1, len(spoiled) + 1) :]
    return bytes(spoiled)


def chat(kind: str, data: bytes) -> list[dict[str, Any]]:
    """Return a chat about a file."""
    name = "image" if kind in PICTURES else "audio"
    parts = [{"type": name, name: data}, {"type": "text", "text": "Hm?"}]
    return [{"role": "user", "content": parts}]


def fuzz(
    engine: cbatch.Engine, kinds: tuple[str, ...], n_files: int, seed: int
) -> Iterator[Counter[str]]:
    """Ask about so many damaged files, and a whole one in each batch; yield how the batches ended, by error."""
    draw = random.Random(seed)
    good = chat(kinds[0], whole_file(kinds[0], seed))
    [expected] = engine.run([good], options=GREEDY).results()
    for first in range(0, n_files, _N_TOGETHER):
        asked = [good]
        for i in range(first, min(n_files, first + _N_TOGETHER)):
            kind = kinds[i % len(kinds)]
            asked.append(chat(kind, damaged(whole_file(kind, seed + i), draw)))
        whole, *results = engine.run(asked, options=GREEDY).results(return_errors=True)
        if whole.token_ids != expected.token_ids:
            raise RuntimeError(f"seed {seed}: a whole file has another answer: {whole}")
        yield Counter(type(r.error).__name__ if r.error else "answer" for r in results)


class _Mallinfo(ctypes.Structure):
    """Source: glibc, malloc.h, struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _given_out_mib() -> float:
    """Return what malloc has given out in all of the process."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return float(found.uordblks + found.hblkhd) / 2**20


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=2000, help="half pictures, half sounds")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    told: dict[str, Any] = {"seed": asked.seed, "n_files": asked.files}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "m.gguf", SHAPES["test"], metadata=_TEMPLATE)
        for name, kinds, kind in (("pictures", PICTURES, "llava"), ("sounds", SOUNDS, "whisper")):
            path = write_projector(Path(folder) / f"{name}.gguf", SHAPES["test"].n_embd, kind=kind)
            start_s, ended, rss, given = time.perf_counter(), Counter[str](), [], []
            slowest_s = 0.0
            with cbatch.load(model, mmproj=path, parallel=4, ctx_per_seq=256) as engine:
                begin_s = time.perf_counter()
                for counts in fuzz(engine, kinds, asked.files // 2, asked.seed):
                    slowest_s = max(slowest_s, time.perf_counter() - begin_s)
                    begin_s = time.perf_counter()
                    ended += counts
                    rss.append(round(_resident_mib()))
                    given.append(round(_given_out_mib(), 1))
            told[name] = {
                "ended": dict(ended),
                "seconds": round(time.perf_counter() - start_s, 1),
                "slowest_batch_s": round(slowest_s, 1),
                "resident_mib": [*rss[:: max(1, len(rss) // 4)], rss[-1]],
                "given_out_mib": [*given[:: max(1, len(given) // 4)], given[-1]],
                "is_clean": not ended.keys() - {"answer", "PromptError"},
            }
    print(json.dumps(told, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
