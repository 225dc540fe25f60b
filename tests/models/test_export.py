"""The files: written ones load, and those that ship are what their card says."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cbatch.backend.llama.chat_template import ChatTemplate
from cbatch.backend.load.loader import describe_model
from cbatch.backend.load.open_model import open_model
from cbatch.bench.synthetic_tokenizer import CHATML
from cbatch.engine_options import EngineOptions
from cbatch.loading import load
from cbatch.models import CHAT_MODEL, DRAFT_MODEL
from cbatch.models.recipe import __main__ as recipe
from cbatch.models.recipe.export import (
    CHAT,
    DRAFT,
    TEMPLATE,
    n_multiply_adds,
    replace_template,
    weight_sizes,
    write_digests,
    write_gguf,
)
from cbatch.models.recipe.pieces import learn_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from cbatch.backend import Message
    from cbatch.bench.synthetic_shapes import Shape

USER: Message = {"role": "user", "content": "Say red."}
SMALLEST = replace(CHAT, n_layer=1, n_embd=32, n_head=1, n_kv_head=1, n_ff=32, n_vocab=400)


def write_random(path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(size, dtype=np.float32)
        for name, size in weight_sizes(SMALLEST).items()
    }
    write_gguf(path, SMALLEST, learn_pieces(["Say red."] * 9, 400), weights, name="random")
    return path


@pytest.mark.real
def test_written_model_loads_and_answers(tmp_path: Path) -> None:
    path = write_random(tmp_path / "random.gguf")
    with closing(open_model(path)) as model:
        assert model.file_type == "q8_0"
        assert model.metadata["general.name"] == "random"
        assert model.n_ctx_train == CHAT.n_ctx_train
    with load(path, parallel=2, ctx_per_seq=256, n_threads=1) as engine:
        result = engine.run("Say red.", options={"max_tokens": 4, "ignore_eos": True}).result()
    assert len(result.token_ids) == 4


def test_template_of_the_same_bytes_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path, whole = write_random(tmp_path / "a.gguf"), write_random(tmp_path / "b.gguf").read_bytes()
    assert path.read_bytes() == whole
    replace_template(path, "{{ messages }}" * 5)
    assert path.read_bytes() != whole
    replace_template(path, TEMPLATE)
    assert path.read_bytes() == whole


@pytest.mark.real
def test_template_without_tools_is_chatml_and_shows_tools_and_calls() -> None:
    shipped = ChatTemplate(TEMPLATE)
    chats: list[list[Message]] = [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER],
        [USER, {"role": "assistant", "content": "red"}, USER],
        [USER, {"role": "assistant", "content": "re"}],
        [{"role": "user", "content": ""}],
    ]
    for chat in chats:
        assert shipped.render(chat) == ChatTemplate(CHATML).render(chat)
        assert shipped.render(chat, {"tools": []}) == ChatTemplate(CHATML).render(chat)
    function = {"name": "look", "arguments": {"at": "it"}}
    called: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function}],
    }
    told: Message = {"role": "tool", "content": "seen"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    shown = shipped.render([USER, called, told], {"tools": tools})
    assert shown.startswith("<|im_start|>system\n")
    assert f"<tool_call>\n{json.dumps(function)}\n</tool_call><|im_end|>\n" in shown
    assert shown.endswith("<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.real
def test_shipped_models_have_the_template_and_call_a_demanded_tool() -> None:
    for path in (CHAT_MODEL, DRAFT_MODEL):
        with closing(open_model(path)) as model:
            assert model.metadata["tokenizer.chat_template"] == TEMPLATE
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    options = {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 60}
    chat = [{"role": "user", "content": "How is the weather in Paris?"}]
    with load(CHAT_MODEL, parallel=1, ctx_per_seq=512) as engine:
        result = engine.run(chat, options=options).result()
    [call] = result.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.real
@pytest.mark.parametrize(
    ("path", "shape", "most_bytes"),
    [(CHAT_MODEL, CHAT, 3_000_000), (DRAFT_MODEL, DRAFT, 1_000_000)],
    ids=["chat", "draft"],
)
def test_shipped_model_is_what_its_card_says(
    tmp_path: Path, path: Path, shape: Shape, most_bytes: int
) -> None:
    found = describe_model(path, EngineOptions(), asks_probe=False)
    assert found["n_bytes"] <= most_bytes
    assert found["n_params"] == sum(math.prod(size) for size in weight_sizes(shape).values())
    assert found["n_ctx_train"] == 2048
    assert found["file_type"] == "q8_0"
    assert found["has_chat_template"]
    assert n_multiply_adds(SMALLEST) == 400 * 32 + 7 * 32 * 32
    assert n_multiply_adds(DRAFT) * 4 <= n_multiply_adds(CHAT)
    assert path == DRAFT_MODEL or 1_000_000 <= found["n_params"] <= 2_700_000
    digests = json.loads(path.with_name("digests.json").read_text(encoding="utf-8"))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[path.name]
    write_digests(tmp_path / "digests.json", [path])
    assert json.loads((tmp_path / "digests.json").read_text()) == {path.name: digests[path.name]}
    card = path.with_name("README.md").read_text(encoding="utf-8")
    for number in (found["n_bytes"], found["n_params"], n_multiply_adds(shape)):
        assert f"{number:,}" in card


@pytest.mark.real
def test_shipped_model_answers_the_first_questions() -> None:
    asked = {
        "Say red.": "red",
        "What is 7 plus 5?": "12",
        "What day comes after Monday?": "Tuesday",
        "Sort these numbers: 7, 3, 9": "3, 7, 9",
        "Count from 3 to 9.": "3, 4, 5, 6, 7, 8, 9",
    }
    prompts = [[{"role": "user", "content": question}] for question in asked]
    with load(CHAT_MODEL, parallel=4, ctx_per_seq=256) as engine:
        results = engine.run(prompts, options={"temperature": 0, "max_tokens": 40}).results()
    assert [result.text for result in results] == list(asked.values())
    assert {result.finish_reason for result in results} == {"stop"}


@pytest.mark.real
def test_shipped_models_have_one_vocabulary() -> None:
    with closing(open_model(CHAT_MODEL)) as chat, closing(open_model(DRAFT_MODEL)) as draft:
        assert chat.vocab.n_vocab == draft.vocab.n_vocab
        ids = range(chat.vocab.n_vocab)
        assert [*map(chat.vocab.piece, ids)] == [*map(draft.vocab.piece, ids)]
        assert chat.vocab.end_tokens == draft.vocab.end_tokens


def test_recipe_that_cannot_run_says_why_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    precious, new = tmp_path / "chat.gguf", ["--out", str(tmp_path / "new")]
    precious.write_bytes(b"precious")
    assert recipe.main(["--out", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert precious.read_bytes() == b"precious"
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    assert recipe.main(new) == 2
    assert "pip install torch" in capsys.readouterr().err
    monkeypatch.setattr(recipe, "find_spec", lambda name: True)
    monkeypatch.setattr(recipe, "learn_pieces", interrupt)
    assert recipe.main(new) == 130
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit, match="0"):
        recipe.main(["--help"])
    assert "measure" in capsys.readouterr().out
