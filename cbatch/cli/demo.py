"""`cbatch run --demo`: chats that the model inside can answer, and answers for people to read."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import BinaryIO

import cbatch

_GREEDY = cbatch.RunOptions(temperature=0)
_MAX_WIDTH = 100


def demo_prompts() -> list[cbatch.BatchPrompt]:
    """Return 64 mixed chats, to be answered greedily."""
    from cbatch.models.recipe.tasks import (
        demo_chats,  # a folder of rules that no other command needs
    )

    return [
        cbatch.BatchPrompt(chat.prompt, id=str(i), options=_GREEDY)
        for i, chat in enumerate(demo_chats())
    ]


def write_shown(
    prompts: Sequence[cbatch.BatchPrompt],
) -> Callable[[BinaryIO, cbatch.BatchResult], None]:
    """Return what writes a result as text, below what was asked."""
    by_id = {str(prompt.id): prompt for prompt in prompts}
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)

    def write(file: BinaryIO, result: cbatch.BatchResult) -> None:
        file.write((as_text(by_id[result.id], result, width) + "\n\n").encode())
        file.flush()

    return write


def as_text(prompt: cbatch.BatchPrompt, result: cbatch.BatchResult, width: int) -> str:
    """Return a chat as a person reads it: `>` before what was asked, the answers below."""
    said = [(str(m["role"]), str(m["content"])) for m in prompt.messages or ()]
    said.append(("assistant", result.text if result.error is None else f"({result.error})"))
    return "\n".join(_paragraph(role, text, width) for role, text in said)


def _paragraph(role: str, text: str, width: int) -> str:
    mark = {"user": "> ", "system": "# "}.get(role, "  ")
    return textwrap.fill(text, width, initial_indent=mark, subsequent_indent="  ")
