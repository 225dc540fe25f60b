"""What a caller may ask of one request: `RunOptions`, merged from the nearest down to the model's own defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeGuard

from cbatch.errors import ConfigError, UnsupportedOptionError

MAX_SEED = 2**64 - 1
MAX_PARALLEL = 256
"""llama.cpp's LLAMA_MAX_SEQ. Source: src/llama-cparams.h."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence's next token is chosen, every value settled.

    Filters in llama.cpp's order: `top_k` (0 = all), `top_p` (1 = all), `min_p` (0 = all), then `temperature`
    (0 = greedy, whatever the rest says). The draw is a function of (`seed`, `i_choice`, output position) alone.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    i_choice: int = 0


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one request; `None` means "not said here", and the nearest that says it wins.

    Args:
        max_tokens: most tokens to generate, ≥ 1; not said: to the end of the slot's window.
        max_completion_tokens: OpenAI's newer name for `max_tokens`; give one of them.
        stop: a string, or several, that end the answer; not part of it unless `include_stop`.
        stop_token_ids: token ids that end the answer, besides the model's own.
        include_stop: keep the stop string that ended the answer in its text.
        ignore_eos: go on past the model's end-of-generation tokens.
        temperature: ≥ 0; 0 is greedy. Not said: the model's `general.sampling.temp`, else 0.8.
        top_k: keep the k most probable tokens, 0 keeps all. Not said: the model's, else 40.
        top_p: keep the smallest set with this probability, 0 … 1. Not said: the model's, else 0.95.
        min_p: drop tokens below this share of the most probable one, 0 … 1. Not said: the model's, else 0.05.
        seed: 0 … 2⁶⁴ − 1; 0 is a seed like any other. Not said: one is drawn and reported in the result.

    Raises:
        ConfigError: a value of the wrong type or out of range.
        UnsupportedOptionError: a name that is not listed above.

    Source of the names: the OpenAI API and llama.cpp; of the defaults: llama.cpp `common/common.h`.
    """

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __new__(cls, **options: Any) -> RunOptions:
        """Refuse unknown names with cbatch's own error."""
        for name in options:
            if name not in _NAMES:
                raise UnsupportedOptionError(name, sorted(_NAMES))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every value once, where the caller still sees the line that is wrong."""
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ConfigError(
                    "max_tokens and max_completion_tokens are one option: give one of them"
                )
            self._settle("max_tokens", self.max_completion_tokens)
            self._settle("max_completion_tokens", None)
        self._settle("stop", _strings("stop", self.stop))
        self._settle("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_float("temperature", self.temperature, 0.0, 1e4)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_bool("include_stop", self.include_stop)
        _check_bool("ignore_eos", self.ignore_eos)

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: RunOptions | Mapping[str, Any] | None) -> RunOptions:
        """Return `value` as options: as it is, built from a mapping, or empty for None.

        Raises:
            ConfigError: neither options nor a mapping, or a value in it is wrong.
        """
        if value is None:
            return _UNSAID
        if isinstance(value, RunOptions):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        raise ConfigError(f"options must be RunOptions or a mapping, not {type(value).__name__}")

    def over(self, other: RunOptions) -> RunOptions:
        """Return these options where they say something and `other` where they do not."""
        said = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if not said:
            return other
        return RunOptions(**{name: said.get(name, getattr(other, name)) for name in _NAMES})

    def sampling(self, defaults: Mapping[str, float], seed: int) -> Sampling:
        """Return the settled sampling values: these, then the model's `defaults`, then llama.cpp's."""
        names = ("temperature", "top_k", "top_p", "min_p")
        said = {name: v for name in names if (v := getattr(self, name)) is not None}
        known: dict[str, Any] = {**defaults, **said}
        return Sampling(seed=seed, **known)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and how its context is made; see `cbatch.load` for what each one means.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
    """

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineOptions:
        """Return the options of these names.

        Raises:
            UnsupportedOptionError: a name that there is not.
        """
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnsupportedOptionError(name, known)
        return cls(**settings)

    parallel: int = 16
    n_ctx: int | None = None
    ctx_per_seq: int | None = None
    kv: Literal["auto", "partitioned", "unified"] = "auto"
    exact: bool = False
    flash_attn: Literal["auto", "on", "off"] = "auto"
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        for f in fields(self):
            if f.default is not None and getattr(self, f.name) is None:
                raise ConfigError(f"{f.name} must not be None")
        _check_int("parallel", self.parallel, 1, MAX_PARALLEL)
        for name in ("n_ctx", "ctx_per_seq", "n_threads"):
            _check_int(name, getattr(self, name), 1, 2**31 - 1)
        _check_int("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        _check_int("n_batch", self.n_batch, self.parallel, 2**20)
        _check_int("n_ubatch", self.n_ubatch, 1, 2**20)
        _check_choice("kv", self.kv, ("auto", "partitioned", "unified"))
        _check_choice("flash_attn", self.flash_attn, ("auto", "on", "off"))
        for name in ("exact", "use_mmap", "use_mlock"):
            _check_bool(name, getattr(self, name))
        if not isinstance(self.chat_template, str | None):
            raise ConfigError(f"chat_template must be a string, not {self.chat_template!r}")
        self._check_sizes()
        self._check_exact()

    def _check_sizes(self) -> None:
        if self.n_ctx is not None and self.ctx_per_seq is not None:
            raise ConfigError(
                "give n_ctx (cells in total) or ctx_per_seq (one slot's window), not both"
            )
        if self.n_ctx is not None and self.n_ctx < 2 * self.parallel:
            raise ConfigError(
                f"n_ctx={self.n_ctx} leaves {self.n_ctx // self.parallel} cells for each of "
                f"{self.parallel} slots: raise it, or use fewer slots (parallel)"
            )

    def _check_exact(self) -> None:
        if self.exact and self.kv == "unified":
            raise ConfigError(
                "exact=True cannot hold with kv='unified': the place of a cell changes the rounding; "
                "use kv='partitioned'"
            )
        if self.exact and self.flash_attn == "on":
            raise ConfigError(
                "exact=True cannot hold with flash_attn='on': its kernel depends on the shape of a step"
            )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if not _is_int(value):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low} … {high}, not {value!r}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if not (_is_int(value) or (isinstance(value, float) and math.isfinite(value))):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be {low:g} … {high:g}, not {value!r}")


def _check_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _strings(name: str, value: object) -> tuple[str, ...] | None:
    """Return the non-empty strings of `value`; an empty stop string would match everywhere and is left out."""
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise ConfigError(f"{name} must be a string or a list of strings, not {value!r}")
    try:
        "".join(items).encode()
    except UnicodeEncodeError:  # json.loads gives such strings; no text of a model can hold one
        raise ConfigError(f"{name} holds half of a surrogate pair: {value!r}") from None
    return tuple(s for s in items if s)


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(_is_int(t) and t >= 0 for t in value)
    ):
        raise ConfigError(f"{name} must be a list of token ids (0 and above), not {value!r}")
    return tuple(value)


_NAMES = frozenset(f.name for f in fields(RunOptions))
_UNSAID = RunOptions()
