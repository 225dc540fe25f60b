"""Pictures and sounds with `exact=True`: the same bits alone, in company, shared, and in another process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import cbatch
from cbatch.bench.synthetic_projector import write_projector
from tests.backend.llama.media import chat_with
from tests.backend.llama.test_pictures import picture
from tests.backend.llama.test_sounds import file_of, tone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import SynthFactory

pytestmark = [pytest.mark.real, pytest.mark.own_library]

SEEN = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
KINDS = {"llava": "test", "qwen2-omni": "qwen2-vl", "gemma3": "gemma3"}


def chats(kind: str, seed: int) -> list[list[dict[str, Any]]]:
    """Chats that begin with the same picture or text, or with none."""
    draw = random.Random(seed)

    def shown(n: int) -> list[Any]:
        seeds = [draw.randrange(3) for _ in range(n)]
        return [file_of(tone(i)) if kind == "audio" else picture(i, 200, 70) for i in seeds]

    begins = [["a" * 70], ["ab" * 30, *shown(1)], shown(1), []]
    words = ["What is it?", "Describe it. " * 12, "Hm"]
    return [
        chat_with(kind, *draw.choice(begins), draw.choice(words), *shown(n), draw.choice(words))
        for n in (1, 0, 2, 1, 0, 1, 2, 1, 1, 0)
    ]


def bits(results: Sequence[cbatch.BatchResult]) -> list[object]:
    return [[(t.token_id, t.logprob, [*t.top]) for t in r.logprobs or ()] for r in results]


@pytest.mark.parametrize("name", [*KINDS, "whisper"])
def test_company_sharing_and_process_change_no_bit(
    synth: SynthFactory, tmp_path: Path, name: str
) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = synth(KINDS.get(name, "test"), metadata={"tokenizer.chat_template": source})
    projector = write_projector(tmp_path / "p.gguf", 64, kind=name, seed=1)
    given: dict[str, Any] = {"mmproj": projector, "ctx_per_seq": 768, "exact": True}
    asked = chats("audio" if name == "whisper" else "image", 4)
    with cbatch.load(model, parallel=4, share_prefixes=False, **given) as engine:
        alone = [engine.run([each], options=SEEN).results()[0] for each in asked]
    with cbatch.load(model, parallel=4, **given) as engine:
        together = engine.run(asked * 2, options=SEEN).results()
    assert any(r.usage.cached_tokens for r in together)
    with cbatch.load(model, parallel=4, prefill_budget=64, replicas=1, **given) as engine:
        elsewhere = engine.run(asked, options=SEEN).results()
    assert bits(together) == bits(alone * 2)
    assert bits(elsewhere) == bits(alone)
