"""What requests for embeddings and scores ask for, and their answers, in the formats of OpenAI, Jina, TEI and vLLM.

Source: OpenAI's API reference, embeddings; Jina's API, rerank; text-embeddings-inference, rerank; vLLM's server, score.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cbatch.errors import CBatchError, ConfigError
from cbatch.messages import BatchPrompt
from cbatch.options import MAX_PRIORITY
from cbatch.support.checks import (
    MAX_INT,
    MAX_KEY_LENGTH,
    check_choice,
    check_flag,
    check_int,
    check_seconds,
    check_string,
    check_text,
    shown,
    token_ids,
)
from cbatch.support.lazy_json import LazyList
from cbatch.support.plain import int_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Check = Callable[..., object]

POOLINGS = ("mean", "cls", "last")
"""Those of `Engine.embed` by which a text has one vector."""

_OF_BOTH: dict[str, tuple[Check, tuple[object, ...]]] = {
    "instruction": (check_string, ()),
    "priority": (check_int, (-MAX_PRIORITY, MAX_PRIORITY)),
    "timeout_s": (check_seconds, ()),
}
_OF_EMBED: dict[str, tuple[Check, tuple[object, ...]]] = {
    "dimensions": (check_int, (1, MAX_INT)),
    "normalize": (check_flag, ()),
    "pooling": (check_choice, POOLINGS),
    **_OF_BOTH,
}


class VectorCall(ABC):
    """A request for embeddings or scores."""

    fields: ClassVar[tuple[str, ...]]
    """Names that it reads."""
    ignored: ClassVar[tuple[str, ...]] = ("user", "metadata", "input_type")
    """Names that do not change the answer."""
    prompt_field: ClassVar[str]
    """The field that has the texts."""

    model: str | None
    settings: dict[str, Any]
    """Of the engine's method."""
    reranks: bool = False
    """Whether it asks for scores of a reranker."""

    @classmethod
    @abstractmethod
    def of(cls, body: Mapping[str, Any]) -> VectorCall:
        """Return the call that a body asks for, in which null means that a field is not said.

        Raises:
            ConfigError: a field is wrong; the message begins with its name.
        """

    @property
    @abstractmethod
    def texts(self) -> list[Any]:
        """The texts to compute."""

    @property
    def beginnings(self) -> dict[str, list[str]]:
        """What is computed before each text, or beside it, by field."""
        instruction = self.settings.get("instruction")
        return {"instruction": [instruction] * len(self.texts)} if instruction else {}

    @abstractmethod
    def lack(self, engine: Any) -> str:
        """Return why an engine cannot answer; "" if it can."""

    @abstractmethod
    def begun(self, engine: Any) -> list[Any]:
        """Have an engine begin; return its responses, over each of which results come as they end."""

    @abstractmethod
    def body(self, results: Sequence[Sequence[Any]], model: str) -> Any:
        """Return the answer.

        Args:
            results: of each response, in the order of its texts, without errors.
        """

    def place(self, i_text: int) -> str:
        """Return where a text stands in the request."""
        return f"{self.prompt_field}[{i_text}]"

    def place_of_result(self, i_result: int) -> str:
        """Return where the text of a result stands, of all results one after another."""
        return self.place(i_result)


def n_tokens_of(results: Sequence[Sequence[Any]]) -> int:
    """Return the tokens of all texts."""
    return sum(result.n_tokens for some in results for result in some)


def error_in(results: Sequence[Sequence[Any]]) -> tuple[int, CBatchError] | None:
    """Return the first result that is an error, by its place among all, and the error."""
    flat = [result for some in results for result in some]
    return next(((i, r.error) for i, r in enumerate(flat) if r.error is not None), None)


def usage_of(results: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Return the tokens of all texts, as OpenAI counts them."""
    n = n_tokens_of(results)
    return {"prompt_tokens": n, "total_tokens": n}


def embed_settings(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of `Engine.embed` that are given and right. Raises a `ConfigError`."""
    return _settings(said, _OF_EMBED)


def _settings(
    body: Mapping[str, Any], checks: Mapping[str, tuple[Check, tuple[object, ...]]]
) -> dict[str, Any]:
    """Return the settings of a body by the engine's names."""
    found = {
        name: check(name, body[name], *limits)
        for name, (check, limits) in checks.items()
        if body.get(name) is not None
    }
    return found | _truncation(body)


def _truncation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return which end of a text is left out, as TEI says it (true and a direction) or as the engine does."""
    said, direction = body.get("truncate"), body.get("truncation_direction") or "right"
    side = direction.lower() if isinstance(direction, str) else direction
    side = check_choice("truncation_direction", side, "left", "right")
    if said is None or said is False:
        return {}
    if said is True:
        return {"truncate": "start" if side == "left" else "end"}
    return {"truncate": check_choice("truncate", said, "end", "start")}


def _model_in(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    return None if model in (None, "") else check_text("model", model, MAX_KEY_LENGTH)


def _text(name: str, value: Any) -> str:
    """Return a text; Jina's documents may be objects that have one."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = value["text"]
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {shown(value)}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} must be a non-empty list of strings, not {shown(value)}")
    return [_text(f"{name}[{i}]", text) for i, text in enumerate(value)]


# ---- embeddings ----


@dataclass
class EmbedCall(VectorCall):
    """A request for embeddings."""

    inputs: list[Any]
    """Texts, or token ids."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `Engine.embed`."""
    is_base64: bool = False
    is_single: bool = False
    model: str | None = None

    prompt_field = "input"
    fields = ("input", "model", "encoding_format", "truncate", "truncation_direction", *_OF_EMBED)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> EmbedCall:
        """Return the call of a body."""
        said = body.get("input")
        if said is None:
            raise ConfigError("input is missing")
        form = check_choice(
            "encoding_format", body.get("encoding_format") or "float", "float", "base64"
        )
        is_single = isinstance(said, str) or (
            isinstance(said, list) and bool(said) and int_of(said[0]) is not None
        )
        listed = [said] if is_single else said
        if not isinstance(listed, list) or not listed:
            words = "a string, a list of token ids, or a non-empty list of these"
            raise ConfigError(f"input must be {words}, not {shown(said)}")
        inputs = [_input("input" if is_single else f"input[{i}]", x) for i, x in enumerate(listed)]
        return cls(inputs, _settings(body, _OF_EMBED), form == "base64", is_single, _model_in(body))

    @property
    def texts(self) -> list[Any]:
        """The inputs."""
        return self.inputs

    def place(self, i_text: int) -> str:
        """Return where an input stands."""
        return self.prompt_field if self.is_single else super().place(i_text)

    def lack(self, engine: Any) -> str:
        """Return why an engine cannot answer."""
        return "" if engine.can_embed else "this model cannot embed"

    def begun(self, engine: Any) -> list[Any]:
        """Have an engine embed the inputs."""
        return [engine.embed(self.inputs, **self.settings)]

    def body(self, results: Sequence[Sequence[Any]], model: str) -> Any:
        """Return OpenAI's answer."""
        (found,) = results
        data = LazyList(self._embedding, [*enumerate(found)])
        return {"object": "list", "data": data, "model": model, "usage": usage_of(results)}

    def _embedding(self, told: tuple[int, Any]) -> dict[str, Any]:
        index, result = told
        vector = result.embedding
        encoded = as_base64(vector) if self.is_base64 else vector.tolist()
        return {"object": "embedding", "index": index, "embedding": encoded}


def as_base64(embedding: Any) -> str:
    """Return the bytes of float32 numbers, the lowest byte first, as text."""
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()


def _input(place: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return list(token_ids(place, value))
    raise ConfigError(f"{place} must be a string or a list of token ids, not {shown(value)}")


# ---- rerank ----


@dataclass
class RerankCall(VectorCall):
    """A request for the documents that fit a query best."""

    query: str
    documents: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `Engine.rerank`."""
    top_n: int | None = None
    has_texts: bool = False
    """Whether the answer repeats the documents."""
    is_tei: bool = False
    """Whether the request is text-embeddings-inference's, whose answer is a list."""
    model: str | None = None
    reranks: bool = True

    prompt_field = "documents"
    fields = (
        *("query", "documents", "texts", "model", "top_n", "return_documents", "return_text"),
        *("raw_scores", "truncate", "truncation_direction", *_OF_BOTH),
    )

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> RerankCall:
        """Return the call of a body."""
        if body.get("query") is None:
            raise ConfigError("query is missing")
        is_tei = body.get("documents") is None and body.get("texts") is not None
        name, returned = ("texts", "return_text") if is_tei else ("documents", "return_documents")
        if body.get(name) is None:
            raise ConfigError(f"{name} is missing")
        query, documents = _text("query", body["query"]), _texts(name, body[name])
        if not query:
            raise ConfigError("query is empty")
        top_n = body.get("top_n")
        has_texts = body.get(returned)
        return cls(
            query,
            documents,
            _settings(body, _OF_BOTH) | _raw(body),
            None if top_n is None else check_int("top_n", top_n, 1, MAX_INT),
            has_texts is not None and check_flag(returned, has_texts),
            is_tei,
            _model_in(body),
        )

    @property
    def texts(self) -> list[Any]:
        """The documents."""
        return self.documents

    @property
    def beginnings(self) -> dict[str, list[str]]:
        """The instruction and the query."""
        return {**super().beginnings, "query": [self.query] * len(self.documents)}

    def place(self, i_text: int) -> str:
        """Return where a document stands."""
        return f"texts[{i_text}]" if self.is_tei else super().place(i_text)

    def lack(self, engine: Any) -> str:
        """Return why an engine cannot answer."""
        return "" if engine.can_rerank else "this model cannot rerank"

    @property
    def queries(self) -> list[tuple[str, list[str]]]:
        """The query with its documents."""
        return [(self.query, self.documents)]

    def begun(self, engine: Any) -> list[Any]:
        """Have an engine score the documents."""
        return [engine.rerank(self.query, self.documents, **self.settings)]

    def body(self, results: Sequence[Sequence[Any]], model: str) -> Any:
        """Return Jina's answer, or TEI's, the best first."""
        (found,) = results
        best = sorted(found, key=lambda result: (-result.score, result.index))[: self.top_n]
        if self.is_tei:
            return LazyList(self._of_tei, best)
        listed = LazyList(self._of_jina, best)
        return {"object": "list", "model": model, "usage": usage_of(results), "results": listed}

    def _of_tei(self, result: Any) -> dict[str, Any]:
        text = {"text": self.documents[result.index]} if self.has_texts else {}
        return {"index": result.index, "score": float(result.score), **text}

    def _of_jina(self, result: Any) -> dict[str, Any]:
        text = {"document": {"text": self.documents[result.index]}} if self.has_texts else {}
        return {"index": result.index, "relevance_score": float(result.score), **text}


def _raw(body: Mapping[str, Any]) -> dict[str, Any]:
    said = body.get("raw_scores")
    return {} if said is None else {"raw_scores": check_flag("raw_scores", said)}


# ---- score ----


@dataclass
class ScoreCall(VectorCall):
    """A request for the score of each pair of texts: a reranker's, or the cosine of their embeddings."""

    pairs: list[tuple[str, str]]
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    reranks: bool = True
    """Whether scores are a reranker's; known once an engine was seen."""

    prompt_field = "text_2"
    fields = (
        *("text_1", "text_2", "model", "raw_scores", "truncate", "truncation_direction", *_OF_BOTH),
    )

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ScoreCall:
        """Return the call of a body."""
        sides = []
        for name in ("text_1", "text_2"):
            said = body.get(name)
            if said is None:
                raise ConfigError(f"{name} is missing")
            sides.append(_texts(name, said) if isinstance(said, list) else [_text(name, said)])
        first, second = sides
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            words = f"text_1 has {len(first)} texts and text_2 {len(second)}"
            raise ConfigError(f"{words}: give one text in text_1, or as many as in text_2")
        settings = _settings(body, _OF_BOTH) | _raw(body)
        return cls([*zip(first, second, strict=True)], settings, _model_in(body))

    @property
    def texts(self) -> list[Any]:
        """The second text of each pair."""
        return [second for _, second in self.pairs]

    @property
    def beginnings(self) -> dict[str, list[str]]:
        """The instruction, and the first text of each pair."""
        return {**super().beginnings, "text_1": [first for first, _ in self.pairs]}

    def place_of_result(self, i_result: int) -> str:
        """Return where a text stands: all first texts are embedded before the second ones."""
        if self.reranks:
            return self.place(i_result)
        i_side, i_pair = divmod(i_result, len(self.pairs))
        return f"text_{i_side + 1}[{i_pair}]"

    def lack(self, engine: Any) -> str:
        """Return why an engine cannot answer."""
        self.reranks = engine.can_rerank
        return "" if engine.can_rerank or engine.can_embed else "this model cannot score texts"

    def begun(self, engine: Any) -> list[Any]:
        """Have an engine score the pairs."""
        firsts, seconds = ([*side] for side in zip(*self.pairs, strict=True))
        if self.reranks:
            return [engine.rerank(firsts, seconds, **self.settings)]
        settings = {n: v for n, v in self.settings.items() if n != "raw_scores"}
        return [engine.embed(firsts, **settings), engine.embed(seconds, **settings)]

    @property
    def queries(self) -> list[tuple[str, list[str]]]:
        """Each first text with the second one."""
        return [(first, [second]) for first, second in self.pairs]

    def body(self, results: Sequence[Sequence[Any]], model: str) -> Any:
        """Return vLLM's answer."""
        if self.reranks:
            scores = [float(result.score) for some in results for result in some]
        else:
            pairs = zip(*results, strict=True)  # of unit length
            scores = [float(a.embedding @ b.embedding) for a, b in pairs]
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {"object": "list", "model": model, "data": data, "usage": usage_of(results)}


# ---- as an item of a run ----

CALLS: Mapping[str, type[VectorCall]] = {
    "/v1/embeddings": EmbedCall,
    "/v1/rerank": RerankCall,
    "/v1/score": ScoreCall,
}
"""What reads the bodies of each url."""


@dataclass(frozen=True)
class VectorPrompt(BatchPrompt):
    """A call for embeddings or scores, where a run over a file has prompts."""

    call: VectorCall | None = None

    @classmethod
    def of(cls, call: VectorCall) -> VectorPrompt:
        """Return the item of a call; its prompt is all that the answer depends on, as text."""
        return cls(prompt=repr(call), call=call)
