"""llama-server's `/infill`: text between two parts of a file, from models trained for it.

Source: llama.cpp tools/server, post_infill; server-common.cpp, format_prompt_infill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.messages import BatchPrompt
from cbatch.server.http_errors import absent, bad_request
from cbatch.server.llama_completions import DEFAULTS, LlamaCall
from cbatch.server.openai_completions import moot_in
from cbatch.server.request_fields import asked_of
from cbatch.support.checks import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.engine import Engine
    from cbatch.server.request_fields import RequestFields
    from cbatch.support.model_facts import ModelFacts

    Tokens = Callable[[str], list[int]]

OWN = ("prompt", "input_prefix", "input_suffix", "input_extra", "response_fields")

_NEEDED = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
"""Tokens that a model needs for infill."""

_OF_EDITORS = ("t_max_prompt_ms", "t_max_predict_ms", "n_indent")
"""Limits that editors send with each request. They would only shorten answers, so they are ignored by name."""

_N_NEAR = 2048
"""Most tokens of text around the gap, three quarters of them before it. Source: llama.cpp's default of `n_batch`."""

_N_MARKS = 4
"""Special tokens of a prompt: prefix, suffix, middle and BOS."""

_SNIPPET = "\n\n--- snippet ---\n\n"
"""Precedes the text of another file if the model has no token for that."""


class InfillCall(LlamaCall):
    """A gap to fill in."""

    prompt_field = "input_prefix"

    def __init__(
        self, asked: RequestFields, texts: Sequence[str], extra: Sequence[tuple[str, str]]
    ) -> None:
        """Make one.

        Args:
            asked: the fields of the call.
            texts: the text before the gap, the beginning of the missing text, and the text after the gap.
            extra: names and texts of other files.
        """
        # a stand-in of the prompt's size, until its texts are tokenized
        size = "".join([*texts, *(text for pair in extra for text in pair)])
        super().__init__(asked, [BatchPrompt(prompt=size or " ")], [texts[1]])
        self._texts, self._extra = texts, extra

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> InfillCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        given = dict(body)
        ignored = [name for name in _OF_EDITORS if given.pop(name, None) is not None]
        samplers = given.get("samplers")
        if isinstance(samplers, list) and "infill" in samplers:
            given["samplers"] = [name for name in samplers if name != "infill"]
            ignored.append("samplers.infill")
        asked = asked_of(given, OWN, defaults=DEFAULTS, is_strict=is_strict)
        asked.ignored += [*ignored, *moot_in(given)]
        for name in ("input_prefix", "input_suffix"):
            if name not in asked.own:
                raise bad_request(f"{name} is missing", name)
        texts = [asked.own.get(name, "") for name in ("input_prefix", "prompt", "input_suffix")]
        for name, text in zip(("input_prefix", "prompt", "input_suffix"), texts, strict=True):
            if not isinstance(text, str):
                raise bad_request(f"{name} must be a string, not {shown(text)}", name)
        extra = _extra(asked.own.get("input_extra", []))
        return cls(asked, texts, extra)

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

    def see_vocabulary(self, engine: Engine, facts: ModelFacts) -> None:
        """Make the prompt: other files, the text before the gap, and the text after it."""
        super().see_vocabulary(engine, facts)

        def tokens_of(text: str) -> list[int]:
            return engine.tokenize(text, add_special=False) if text else []

        prefix, begun, suffix = map(tokens_of, self._texts)
        n_window, n_output = engine.n_window, self.asked.options.max_tokens
        n_output = n_window // 4 if n_output is None else min(n_output, n_window // 2)
        n_room = n_window - n_output
        n_near = max(0, min(_N_NEAR, n_room - _N_MARKS))
        fim, first = (
            facts.fim,
            [token for token in engine.tokenize("a")[:1] if token == facts.bos_id],
        )
        prefix = _last(prefix, n_near * 3 // 4)
        suffix = suffix[: max(0, n_near // 4 - len(begun) - 2)]
        near = [*first, fim["pre"], *prefix, *begun, fim["suf"], *suffix, fim["mid"]]
        extra = _extra_tokens(self._extra, fim, tokens_of, n_room - len(near))
        self.prompts = [BatchPrompt(tokens=[*extra, *near])]


def _extra_tokens(
    files: Sequence[tuple[str, str]], fim: Mapping[str, int], tokens_of: Tokens, n_most: int
) -> list[int]:
    """Return the last `n_most` tokens of other files, or all."""

    def head(name: str) -> list[int]:
        return [fim["sep"], *tokens_of(f"{name}\n")] if "sep" in fim else tokens_of(_SNIPPET)

    found = head("filename") if "sep" in fim else []
    for name, text in reversed(files):
        if len(found) >= n_most:
            break
        found = [*head(name), *tokens_of(text), *found]
    if "rep" in fim:
        found = [fim["rep"], *tokens_of("myproject\n"), *found]
    return _last(found, n_most)


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[max(0, len(tokens) - n) :] if n > 0 else []


def _extra(said: Any) -> list[tuple[str, str]]:
    """Return names and texts of other files. Raises a `HttpProblemError`."""
    field = "input_extra"
    if not isinstance(said, list):
        raise bad_request(f"{field} must be a list of objects, not {shown(said)}", field)
    found = []
    for i, item in enumerate(said):
        if not isinstance(item, dict) or not isinstance(item.get("text"), str):
            raise bad_request(
                f"{field}[{i}] must be an object with a text, not {shown(item)}", field
            )
        name = item.get("filename", "tmp")
        if not isinstance(name, str):
            raise bad_request(f"{field}[{i}].filename must be a string, not {shown(name)}", field)
        found.append((name, item["text"]))
    return found
