"""llama-server's `/infill`: text between two parts of a file, from models trained for it.

Source: llama.cpp tools/server, post_infill; server-common.cpp, format_prompt_infill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from cbatch.engine import tokens_of_each
from cbatch.messages import BatchPrompt
from cbatch.server.http_errors import absent
from cbatch.server.llama_completions import LlamaCall, wanted_in
from cbatch.server.openai_completions import OF_TEXT, moot_in
from cbatch.server.request_fields import Dialect, RequestFields, asked_of
from cbatch.server.typed_bodies import read_body

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from cbatch.engine import Engine
    from cbatch.support.model_facts import ModelFacts


class _OtherFile(Struct):
    text: str
    filename: str = "tmp"


class InfillBody(Struct):
    """A request, but for options."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    """The beginning of the missing text."""
    input_extra: list[_OtherFile] = []
    """Texts of other files."""
    response_fields: Any = None


DIALECT = Dialect(own=InfillBody.__struct_fields__, defaults=OF_TEXT)

_NEEDED = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
"""Tokens that a model needs for infill."""

_OF_EDITORS = ("t_max_prompt_ms", "t_max_predict_ms", "n_indent")
"""Limits that editors send with each request. They would only shorten answers, so they are ignored."""

_N_NEAR = 2048
"""Most tokens of text around the gap, three quarters of them before it. Source: llama.cpp's default of `n_batch`."""

_N_MARKS = 4
"""Special tokens of a prompt: prefix, suffix, middle and BOS."""

_SNIPPET = "\n\n--- snippet ---\n\n"
"""Precedes the text of another file if the model has no token for that."""


class InfillCall(LlamaCall):
    """A gap to fill in."""

    prompt_field = "input_prefix"

    def __init__(self, asked: RequestFields, said: InfillBody, wanted: Sequence[str]) -> None:
        # a stand-in of the prompt's size, until its texts are tokenized
        texts = (said.input_prefix, said.prompt, said.input_suffix)
        size = "".join([*texts, *(file.filename + file.text for file in said.input_extra)])
        super().__init__(asked, [BatchPrompt(prompt=size or " ")], [said.prompt], wanted)
        self._texts, self._extra = texts, said.input_extra

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> InfillCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        given = dict(body)
        ignored = [name for name in _OF_EDITORS if given.pop(name, None) is not None]
        samplers = given.get("samplers")
        if isinstance(samplers, list) and "infill" in samplers:
            given["samplers"] = [name for name in samplers if name != "infill"]
            ignored.append("samplers.infill")
        ignored += moot_in(given)
        asked = asked_of(given, DIALECT, ignored=ignored, is_strict=is_strict)
        return cls(asked, read_body(InfillBody, given), wanted_in(given))

    def see_facts(self, facts: ModelFacts) -> None:
        """See what the model is. Raises a `HttpProblemError` if it cannot fill in."""
        super().see_facts(facts)
        missing = [words for name, words in _NEEDED.items() if name not in facts.fim]
        if missing:
            words = " and no ".join(missing)
            raise absent(f"this model does not support infill: it has no {words} token")

    @property
    def asks_vocabulary(self) -> bool:
        """True: texts are always tokenized."""
        return True

    def see_vocabulary(self, engine: Engine, facts: ModelFacts) -> Iterator[None]:
        """Make the prompt: other files, the text before the gap, and the text after it."""
        yield from super().see_vocabulary(engine, facts)
        prefix, begun, suffix = tokens_of_each(engine, self._texts)
        n_window, n_output = engine.n_window, self.asked.options.max_tokens
        n_output = n_window // 4 if n_output is None else min(n_output, n_window // 2)
        n_room = n_window - n_output
        n_near = max(0, min(_N_NEAR, n_room - _N_MARKS))
        first = [token for token in engine.tokenize("a")[:1] if token == facts.bos_id]
        fim = facts.fim
        prefix = _last(prefix, n_near * 3 // 4)
        suffix = suffix[: max(0, n_near // 4 - len(begun) - 2)]
        near = [*first, fim["pre"], *prefix, *begun, fim["suf"], *suffix, fim["mid"]]
        extra = yield from _extra_tokens(self._extra, fim, engine, n_room - len(near))
        self.prompts = [BatchPrompt(tokens=[*extra, *near])]


def _extra_tokens(
    files: Sequence[_OtherFile], fim: Mapping[str, int], engine: Engine, n_most: int
) -> Generator[None, None, list[int]]:
    """Return the last `n_most` tokens of other files, or all. Yields after each file."""
    sep = [fim["sep"]] if "sep" in fim else []
    project, name = tokens_of_each(engine, ("myproject\n", "filename\n"))
    parts = [[*sep, *name] if sep else []]  # the last comes first
    n_tokens = len(parts[0])
    texts = (
        text for f in reversed(files) for text in (f"{f.filename}\n" if sep else _SNIPPET, f.text)
    )
    found = tokens_of_each(engine, texts)
    for head in found:
        if n_tokens >= n_most:
            break
        parts.append([*sep, *head, *next(found)])
        n_tokens += len(parts[-1])
        yield
    if "rep" in fim:
        parts.append([fim["rep"], *project])
    return _last([token for part in reversed(parts) for token in part], n_most)


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[max(0, len(tokens) - n) :] if n > 0 else []
