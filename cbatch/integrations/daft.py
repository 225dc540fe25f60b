"""Daft: a provider for `daft.functions.prompt`, whose rows are computed together by one engine of the process."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from daft.ai.metrics import record_token_metrics
from daft.ai.protocols import Prompter, PrompterDescriptor
from daft.ai.provider import PROVIDERS, Provider
from daft.ai.typing import UDFOptions

from cbatch.engine import Engine
from cbatch.engine_spec import EngineSpec
from cbatch.errors import CBatchError, ConfigError
from cbatch.options import RunOptions
from cbatch.response import BatchResult

NAME = "cbatch"

_log = logging.getLogger("cbatch")


class CbatchProvider(Provider):
    """Models of this process: `prompt(column, provider=CbatchProvider(parallel=16), model="model.gguf")`.

    After an import of this module, `provider="cbatch"` is one without settings.
    """

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        """Keep arguments of `cbatch.load`. Raises a `ConfigError` for a wrong one."""
        self._name, self._settings = name or NAME, settings
        EngineSpec(**settings)

    @property
    def name(self) -> str:
        """The provider's name in a session."""
        return self._name

    def get_prompter(
        self,
        model: str | None = None,
        return_format: Any = None,
        system_message: str | None = None,
        **options: Any,
    ) -> Any:
        """Describe what `prompt` computes.

        Args:
            model: a file, or a name `hf:…`; the model that ships inside without one.
            return_format: a pydantic class that every answer is an instance of.
            system_message: the first message of every chat.
            options: `RunOptions`; and `on_error`: with "log" or "ignore", a row that fails is null.

        Raises:
            CBatchError: a wrong option or setting, before any row is computed.
        """
        settings = self._settings if model is None else {**self._settings, "model": model}
        own = {name: options.pop(name) for name in UDFOptions.__annotations__ if name in options}
        if return_format is not None:
            options["json_schema"] = return_format
        RunOptions.of(options)
        spec = EngineSpec(**settings)
        return CbatchPrompterDescriptor(
            self._name, spec, options, own, return_format, system_message
        )


@dataclass
class CbatchPrompterDescriptor(PrompterDescriptor):
    """What other processes need in order to compute a column; it can be pickled."""

    provider: str
    spec: EngineSpec
    options: dict[str, Any]
    udf_options: dict[str, Any]
    return_format: Any = None
    system_message: str | None = None

    def get_provider(self) -> str:
        """Return the provider's name."""
        return self.provider

    def get_model(self) -> str:
        """Return the model's file."""
        return self.spec.model or NAME

    def get_options(self) -> dict[str, Any]:
        """Return how Daft calls the prompter: each row's error is dealt with there, and nothing is tried again."""
        return self.udf_options | {"on_error": "raise", "max_retries": 0}

    def instantiate(self) -> CbatchPrompter:
        """Load the engine, unless this process has it; it stays until the process ends, for the next query."""
        return CbatchPrompter(self, self.spec.shared().__enter__())


class CbatchPrompter(Prompter):
    """Answers the rows of a column."""

    def __init__(self, told: CbatchPrompterDescriptor, engine: Engine) -> None:
        self._told, self._engine = told, engine

    async def prompt(self, messages: tuple[Any, ...]) -> Any:
        """Answer one row; null where a part of it is null. Daft asks many rows at a time.

        A row's error must not be raised unless all rows are to fail: Daft gathers them, and would lose them all.
        """
        if any(part is None for part in messages):
            return None
        try:
            return self._read(await self._engine.chat(self._chat(messages), **self._told.options))
        except (CBatchError, ValueError) as error:
            on_error = self._told.udf_options.get("on_error", "raise")
            if on_error == "raise":
                raise
            if on_error == "log":
                _log.warning("a row failed: %s", error)
            return None

    def _chat(self, messages: tuple[Any, ...]) -> list[dict[str, Any]]:
        if wrong := [type(part).__name__ for part in messages if not isinstance(part, str)]:
            raise ConfigError(f"cbatch reads text, not {wrong[0]}")
        system = self._told.system_message
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": "\n".join(messages)}]

    def _read(self, result: BatchResult) -> Any:
        used = result.usage
        record_token_metrics(
            protocol="prompt",
            model=self._told.get_model(),
            provider=self._told.provider,
            input_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            total_tokens=used.prompt_tokens + used.completion_tokens,
        )
        form = self._told.return_format
        return result.text if form is None else form.model_validate_json(result.text)


PROVIDERS[NAME] = CbatchProvider
