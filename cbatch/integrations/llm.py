"""The command and library `llm`: a plugin with the shipped model, and with files that `llm cbatch add` names."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import llm
from pydantic import create_model

from cbatch.errors import CBatchError
from cbatch.integrations._llm_words import as_openai, end_of, events_of, options_of
from cbatch.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

    from cbatch.engine import Engine
    from cbatch.engine_spec import EngineSpec
    from cbatch.runtime.batch_response import BatchResponse

_TYPES = {"int | None": int, "float | None": float, "bool | None": bool, "str | None": str}
_FOR_BATCHES = {"n", "best_of", "echo", "slot", "pause_every", "prefill_only", "prompt_logprobs"}
"""Options that `llm`, which shows one answer as it comes, has no use for."""

_FIELDS: dict[str, Any] = {
    f.name: (_TYPES[str(f.type)] | None, None)
    for f in fields(RunOptions)
    if f.type in _TYPES and f.name not in _FOR_BATCHES
}

Options = create_model("Options", __base__=llm.Options, stop=(str | None, None), **_FIELDS)
"""`RunOptions` of a single value: `llm -o temperature 0`."""


class _LoadedOnce:
    """A model that is loaded when it is first used, and stays."""

    def __init__(self, model_id: str, settings: Mapping[str, Any]) -> None:
        """Name a model; its first use loads it. `settings` are arguments of `cbatch.load`."""
        self.model_id, self.settings = model_id, settings
        self._is_kept = False

    @property
    def spec(self) -> EngineSpec:
        """The engine of this model: one for a process, whichever model object asks for it."""
        from cbatch.engine_spec import EngineSpec  # slow to import, and `llm` imports all plugins

        return EngineSpec(**self.settings)

    def _keep(self) -> None:
        """Have it stay loaded from now on, until the process ends."""
        if not self._is_kept:
            self.spec.shared().__enter__()
            self._is_kept = True


class _Chats(_LoadedOnce):
    """What the model for plain code and the one for async code have in common."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    Options = Options

    def _submit(self, engine: Engine, prompt: Any) -> BatchResponse:
        self._keep()
        chat = [each for message in prompt.messages for each in as_openai(message)]
        return engine.submit(chat, options=options_of(prompt))


class Cbatch(_Chats, llm.Model):
    """A model for plain code."""

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[Any]:
        """Yield the events of an answer."""
        with self.spec.shared() as engine:
            answer = self._submit(engine, prompt)
            for chunk in answer:
                yield from events_of(chunk)
            yield from end_of(answer.result(), response)


class AsyncCbatch(_Chats, llm.AsyncModel):
    """A model for async code."""

    async def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any
    ) -> AsyncIterator[Any]:
        """Yield the events of an answer."""
        async with self.spec.shared() as engine:
            answer = self._submit(engine, prompt)
            async for chunk in answer:
                for event in events_of(chunk):
                    yield event
            for event in end_of(await answer.only(), response):
                yield event


class CbatchEmbeddings(_LoadedOnce, llm.EmbeddingModel):
    """A model that makes vectors: `llm embed`, `llm embed-multi`, `llm similar`."""

    batch_size = 1000  # texts for which `llm` waits together. Our choice.

    def embed_batch(
        self, items: Iterable[str | bytes], *, key: str | None = None
    ) -> Iterator[list[float]]:
        """Yield the vector of each text, of length 1."""
        with self.spec.shared() as engine:
            self._keep()
            yield from engine.embed(items).array().tolist()


def _file() -> Path:
    return Path(llm.user_dir()) / "cbatch.json"


def _added() -> dict[str, dict[str, Any]]:
    """Return the settings of every model that was added, by its name."""
    return dict(json.loads(_file().read_text("utf-8"))) if _file().exists() else {}


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the shipped model as `cbatch`, and every model that was added."""
    for name, settings in {"cbatch": {}, **_added()}.items():
        register(Cbatch(name, settings), AsyncCbatch(name, settings))


@llm.hookimpl
def register_embedding_models(register: Any) -> None:
    """Register the same models for embeddings: which of them have one is known when they are loaded."""
    for name, settings in {"cbatch": {}, **_added()}.items():
        register(CbatchEmbeddings(name, settings))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm cbatch add`."""

    @cli.group(name="cbatch")
    def group() -> None:
        """Models that cbatch computes."""

    @group.command()
    @click.argument("name")
    @click.argument("model")
    @click.option(
        "settings",
        "-s",
        "--set",
        nargs=2,
        multiple=True,
        help="Name and value of an argument of cbatch.load.",
    )
    def add(name: str, model: str, settings: Any) -> None:
        """Add a GGUF file, or hf:OWNER/REPO/FILE.gguf, under a name."""
        from cbatch.engine_spec import EngineSpec

        try:
            given = {key: _value(value) for key, value in settings}
            spec = EngineSpec(model, **given)
        except CBatchError as error:
            raise click.ClickException(str(error)) from None
        models = {**_added(), name: {"model": spec.model, **given}}
        _file().write_text(json.dumps(models, indent=2), "utf-8")
        click.echo(f"llm -m {name} answers with {spec.model}")
