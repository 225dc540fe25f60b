"""`cbatch run --demo`: chats that the shipped model can answer, and answers for people to read."""

import json
import shutil
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import cbatch
from cbatch.cli.option_table import name_of
from cbatch.files.file_formats import check_name
from cbatch.files.input.item_stream import ahead_of
from cbatch.files.output.encoders import dump
from cbatch.files.output.json_answers import result_as_json
from cbatch.files.places import check_apart, check_new, opened
from cbatch.models import DEMO_CHATS
from cbatch.progress import View

_GREEDY = cbatch.RunOptions(temperature=0)
_MAX_WIDTH = 100


def run_demo(
    target: Path,
    view: View,
    model: Path | None,
    options: cbatch.RunOptions,
    settings: dict[str, Any],
    *,
    is_shown: bool,
    force: bool,
) -> None:
    """Answer the chats of --demo: as text where they are shown, else as records."""
    prompts = demo_prompts()
    check_name(target, "cbatch")
    check_apart(target, filter(None, (model,)))
    check_new(target, force=force)
    view.say(f"loading {name_of(model)} for {len(prompts)} items")
    look_ahead = ahead_of(prompts, options, is_all=True)
    with (
        cbatch.load(model, options=options, look_ahead=look_ahead, **settings) as engine,
        opened(target, force=force) as file,
    ):
        by_id = {str(prompt.id): prompt for prompt in prompts}
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        with closing(engine.run(prompts, progress=view).as_completed()) as results:
            for result in results:
                if is_shown:
                    file.write(f"{as_text(by_id[result.id], result, width)}\n\n".encode())
                    file.flush()
                else:
                    write_result(file, result)


def demo_prompts() -> list[cbatch.BatchPrompt]:
    """Return 64 mixed chats, to be answered greedily."""
    lines = DEMO_CHATS.read_text(encoding="utf-8").splitlines()
    return [
        cbatch.BatchPrompt(json.loads(line)["messages"], id=str(i), options=_GREEDY)
        for i, line in enumerate(lines)
    ]


def as_text(prompt: cbatch.BatchPrompt, result: cbatch.BatchResult, width: int) -> str:
    """Return a chat for people to read: questions begin with `>`, answers stand below."""
    messages = [(str(m["role"]), str(m["content"])) for m in prompt.messages or ()]
    messages.append(("assistant", result.text if result.error is None else f"({result.error})"))
    return "\n".join(_paragraph(role, text, width) for role, text in messages)


def _paragraph(role: str, text: str, width: int) -> str:
    mark = {"user": "> ", "system": "# "}.get(role, "  ")
    return textwrap.fill(text, width, initial_indent=mark, subsequent_indent="  ")


def write_result(file: BinaryIO, result: cbatch.BatchResult) -> None:
    """Write one result as a line, and flush it."""
    file.write(dump(result_as_json(result)))
    file.flush()
