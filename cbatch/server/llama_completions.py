"""llama-server's own completions. Source: llama.cpp tools/server, README.md and server-task.cpp."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from cbatch.chat.openai_format import chat_tokens
from cbatch.engine import Engine, tokens_of_each
from cbatch.errors import ConfigError
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import BatchResult
from cbatch.server.answer_events import Ended, Event, Text, choices_of
from cbatch.server.call import Call
from cbatch.server.http_errors import bad_request, refused
from cbatch.server.openai_answers import extensions, timings_of
from cbatch.server.openai_completions import OF_TEXT, is_token, moot_in, prompt_of
from cbatch.server.prompt_size import check_tokens
from cbatch.server.request_fields import Dialect, RequestFields, asked_of, field_errors
from cbatch.server.small_endpoints import settings_of
from cbatch.server.sse import StreamEncoder, frame_pieces
from cbatch.support.checks import shown, strings_of, token_ids
from cbatch.support.lazy_json import LazyList
from cbatch.support.model_facts import ModelFacts

DIALECT = Dialect(own=("prompt", "response_fields"), defaults=OF_TEXT)
"""Without `n_predict`, an answer may fill the window."""

_N_PATHS = 128
"""Most paths of `response_fields`, and characters of each: our choice; each is looked up in every choice."""

_STOP_TYPES = {"stop": "eos", "length": "limit", "window": "limit"}
"""llama-server's words for finish reasons; an answer that a stop string has ended is `word`, others are `none`."""


class LlamaCall(Call):
    """Prompts to complete in llama-server's format."""

    prompt_field = "prompt"

    def __init__(
        self,
        asked: RequestFields,
        prompts: Sequence[BatchPrompt],
        said: Sequence[Any],
        wanted: Sequence[str],
    ) -> None:
        """Make one; `said` are the prompts as the client sent them, `wanted` the paths of the answer that it gets."""
        super().__init__(asked, prompts)
        self._said, self._wanted = said, wanted
        self._end_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any], *, is_strict: bool = False) -> LlamaCall:
        """Return the call that a body asks for. Raises a `HttpProblemError`."""
        asked = asked_of(body, DIALECT, is_strict=is_strict)
        asked.ignored += moot_in(body)
        said = _listed(body)
        is_one = len(said) == 1
        prompts = [_prompt(s, "prompt" if is_one else f"prompt[{i}]") for i, s in enumerate(said)]
        return cls(asked, prompts, said, wanted_in(body))

    def see_facts(self, facts: ModelFacts) -> None:
        """Take the model's facts."""
        super().see_facts(facts)
        self._end_ids = facts.end_ids

    @property
    def asks_vocabulary(self) -> bool:
        """Whether texts must be tokenized before the call can run."""
        return super().asks_vocabulary or any(map(_is_mixed, self._said))

    def see_vocabulary(self, engine: Engine, facts: ModelFacts) -> Iterator[None]:
        """Tokenize texts that have a bias, and texts that are mixed with tokens in a prompt."""
        yield from super().see_vocabulary(engine, facts)
        for i, said in enumerate(self._said):
            if _is_mixed(said):
                check_tokens(said, engine.n_window, self.prompt_field)
                tokens: list[int] = []
                for some in _tokens_of_pieces(engine, said):
                    tokens += some
                    yield
                self.prompts[i] = BatchPrompt(tokens=tokens)

    def body(self, results: Sequence[BatchResult], model: str) -> dict[str, Any] | LazyList:
        """Return the whole answer: a list where there are several."""
        told = [*enumerate(choice for result in results for choice in choices_of(result))]
        whole = partial(self._whole, model)
        return whole(told[0]) if len(told) == 1 else LazyList(whole, told)

    def _whole(self, model: str, told: tuple[int, BatchResult]) -> dict[str, Any]:
        index, choice = told
        more = {}
        if choice.logprobs is not None:
            more["completion_probabilities"] = chat_tokens(choice.logprobs)
        tokens = choice.token_ids if self.asked.has_tokens else ()
        return self.ended(index, choice, model, content=choice.text, tokens=tokens, **more)

    def stream(self, model: str) -> LlamaStream:
        """Return what encodes the answer's events."""
        return LlamaStream(self, model)

    def part(self, index: int, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields that all parts of an answer have."""
        slot = self.asked.options.slot
        return {
            "index": index,
            "content": content,
            "tokens": [*tokens],
            "id_slot": -1 if slot is None else slot,
            "stop": False,
        }

    def ended(
        self,
        index: int,
        choice: BatchResult,
        model: str,
        *,
        content: str = "",
        tokens: Sequence[int] = (),
        **more: Any,
    ) -> dict[str, Any]:
        """Return a whole answer, or the last part of a stream."""
        usage, word = choice.usage, choice.stop_reason
        has_word = isinstance(word, str)
        said = {
            **self.part(index, content, tokens),
            "stop": True,
            "model": model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": {**self._settings, "seed": choice.seed},
            "prompt": self._said[index // self.n_choices],
            "has_new_line": "\n" in choice.text,
            "truncated": choice.finish_reason == "window",
            "stop_type": "word" if has_word else _STOP_TYPES.get(choice.finish_reason, "none"),
            "stopping_word": word if has_word else "",
            "tokens_cached": usage.prompt_tokens + max(0, usage.completion_tokens - 1),
            "timings": timings_of(choice),
            **more,
            **extensions(choice),
        }
        return _nested(said, self._wanted) if self._wanted else said

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What all answers tell of how they were made; known once defaults were seen."""
        options, of_model = self.settled
        n_most = -1 if options.max_tokens is None else options.max_tokens
        return {
            **settings_of(options, of_model),
            "n_predict": n_most,
            "max_tokens": n_most,
            "stop": [*(options.stop or ())],
            "stream": self.asked.common.stream,
            "n_probs": options.top_logprobs or 0,
            "ignore_eos": bool(options.ignore_eos),
            "logit_bias": self._biases(options),
        }

    def _biases(self, options: RunOptions) -> list[dict[str, Any]]:
        """Return the tokens with a bias, those that `ignore_eos` bans too; null stands for −∞."""
        banned = self._end_ids if options.ignore_eos else ()
        biases = {**(options.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}
        return [
            {"token": token, "bias": None if bias == -math.inf else bias}
            for token, bias in sorted(biases.items())
        ]


class LlamaStream(StreamEncoder):
    """Encodes the events of some completions."""

    def __init__(self, call: LlamaCall, model: str) -> None:
        super().__init__()
        self._call, self._model = call, model
        self._n_tokens: dict[int, int] = {}
        """Tokens of each choice so far."""

    def frame(self, event: Event) -> Iterator[bytes]:
        """Return the frames of one event, in pieces."""
        if isinstance(event, Ended):
            return frame_pieces(self._call.ended(event.i_choice, event.choice, self._model))
        if not isinstance(event, Text):
            raise TypeError(f"not an event of a completion: {event!r}")
        index = event.i_choice
        self._n_tokens[index] = self._n_tokens.get(index, 0) + len(event.token_ids)
        said = self._call.part(index, event.text, event.token_ids)
        said["tokens_predicted"] = self._n_tokens[index]
        if event.logprobs is not None:
            said["completion_probabilities"] = chat_tokens(event.logprobs)
        return frame_pieces(said)

    def progress(self, told: Mapping[str, Any]) -> Iterator[bytes]:
        """Return the frame that tells the progress of the prompt."""
        return frame_pieces({**self._call.part(0, "", ()), "prompt_progress": told})


def _nested(said: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the values at `/`-separated paths, by path; paths to no value are left out."""
    found = {}
    for path in paths:
        value: Any = said
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found


def wanted_in(body: Mapping[str, Any]) -> Sequence[str]:
    """Return the paths of `response_fields`; none for a whole answer. Raises a `HttpProblemError`."""
    name = "response_fields"
    with field_errors(name):
        paths = () if body.get(name) is None else strings_of(name, body[name])
        if len(paths) > _N_PATHS or any(len(path) > _N_PATHS for path in paths):
            words = f"at most {_N_PATHS} paths of at most {_N_PATHS} characters"
            raise ConfigError(f"{name} must have {words}")
    return paths


# ---- prompts: a text, tokens, both mixed, an object with a text, or a list of these ----


def _listed(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts as they are written. Raises a `HttpProblemError`."""
    if "prompt" not in body:
        raise bad_request("prompt is missing", "prompt")
    said = "" if body["prompt"] is None else body["prompt"]
    is_list = isinstance(said, list) and not any(map(is_token, said))
    if said == []:
        raise bad_request("prompt must have a text or a token, not []", "prompt")
    return [_text_of(item) for item in (said if is_list else [said])]


def _text_of(item: Any) -> Any:
    """Return the text of a prompt that is an object; another prompt as it is."""
    if not isinstance(item, dict):
        return item
    if item.get("multimodal_data"):
        raise refused("prompt", "multimodal_data has pictures or sound; send text only")
    return item.get("prompt_string")


def _is_mixed(said: Any) -> bool:
    return isinstance(said, list) and any(isinstance(piece, str) for piece in said)


def _prompt(said: Any, place: str) -> BatchPrompt:
    """Return a prompt; for a mixed one a stand-in of its size, until its texts are tokenized."""
    if not _is_mixed(said):
        return prompt_of(said, place)
    texts = [piece for piece in said if isinstance(piece, str)]
    with field_errors("prompt"):
        token_ids(place, [piece for piece in said if not isinstance(piece, str)])
    return BatchPrompt(prompt="".join(texts) or shown(said))


def _tokens_of_pieces(engine: Engine, said: Sequence[Any]) -> Iterator[Sequence[int]]:
    """Yield the tokens of each piece of a mixed prompt; a text at its beginning gets the BOS token."""
    first, *others = said
    if first != "":
        yield engine.tokenize(first) if isinstance(first, str) else (first,)
    found = tokens_of_each(engine, (piece for piece in others if isinstance(piece, str)))
    for piece in others:
        yield next(found) if isinstance(piece, str) else (piece,)
