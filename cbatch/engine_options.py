"""How a model is loaded and its requests are scheduled: `EngineOptions`, which extend `ScheduleOptions`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast, get_args

from cbatch.errors import ELSEWHERE, ConfigError, UnsupportedOptionError, names_like
from cbatch.options import RunOptions
from cbatch.support.checks import (
    MAX_INT,
    MAX_KEY_LENGTH,
    MAX_TIME_S,
    check_choice,
    check_fields,
    check_flag,
    check_float,
    check_int,
    check_names,
    check_path,
    check_string,
    check_text,
    checked,
    given_only,
    name_of,
    reading,
    shown,
)
from cbatch.support.plain import int_of, list_of, text_of

MAX_PARALLEL = 256
"""llama.cpp's LLAMA_MAX_SEQ. Source: src/llama-cparams.h."""

BITWISE = "bitwise"
"""What `Engine.exactness` says where `exact=True` holds."""

DEFAULT_CHECKPOINT_MIB = 1024
"""Where nobody knows how much memory is free. Our choice."""

DEFAULT_PARALLEL = 16
"""Slots where memory allows. Source: measured; on CPUs a token takes far less time in steps of 8 or 16 rows."""

CellType: TypeAlias = Literal[
    "f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
"""How keys or values are stored. Source: llama.cpp common/arg.cpp, kv_cache_types."""

Kv: TypeAlias = Literal["auto", "partitioned", "unified"]
Policy: TypeAlias = Literal["fcfs", "priority", "shortest", "round_robin"]
Ttft: TypeAlias = Literal["auto", "first", "any"]
Speculate: TypeAlias = Literal["off", "ngram", "job", "draft", "auto"]
SplitMode: TypeAlias = Literal["none", "layer", "row", "tensor"]
Repack: TypeAlias = Literal["auto", "llama", "off"]
RopeScaling: TypeAlias = Literal["none", "linear", "yarn", "longrope"]

MAX_DRAFTS = 15
"""Most draft tokens after a row's own token. Our choice: a step of more than eight rows is seldom as short."""

MAX_RPC_SERVERS = 16
"""Source: ggml/include/ggml-rpc.h, GGML_RPC_MAX_SERVERS."""

MAX_THREADS = 512
"""ggml ends the process where it cannot start a thread. Source: ggml/include/ggml.h, GGML_MAX_N_THREADS."""


def check_speculate(name: str, value: object) -> Speculate | int:
    """Return where draft tokens come from, or how many there are."""
    text, number = text_of(value), int_of(value)
    if text in get_args(Speculate):
        return cast("Speculate", text)
    if number is None or not 1 <= number <= MAX_DRAFTS:
        words = ", ".join(get_args(Speculate))
        raise ConfigError(f"{name} must be one of {words} or 1 … {MAX_DRAFTS}, not {shown(value)}")
    return number


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Which requests run, and how many prompt tokens a step takes.

    Args:
        policy: which waiting request is admitted next: "fcfs", the oldest; "priority", the highest `priority`, with
            ageing; "shortest", the fewest prompt tokens; "round_robin", turns of `quantum` tokens.
        quantum: tokens of a turn in "round_robin". Default: 64.
        ageing_s: seconds of waiting that count as one point of priority. Default: 10.
        admission: in unified memory, "optimistic" admits by the expected output and preempts sequences when the pool
            is full; "reserve" admits only what fits in the worst case. Default: optimistic.
        max_queue: most requests that wait for a slot. Default: any number.
        when_full: at `max_queue`, "wait" in `run` until there is room, or "reject" with `QueueFullError`.
        ttft: how prompts that wait together get their first tokens: "first", one after the other, in steps no larger
            than pays; "any", in the fastest shape, many in one step; "auto", the former where output is streamed.
        prefill_budget: most prompt tokens in a step that also decodes. Default: as many as take three times as long as
            the rest of the step, while a reader streams output; less for a long prompt.
        prefill_chunk: most prompt tokens of one sequence in a step. Default: as many as the step holds.
        itl_ms: milliseconds to aim at for a step that also decodes, instead of `prefill_budget`; and for it and the
            computing of texts before the next one.
        speculate: "auto" drafts the tokens that followed the newest ones where they stood before, in the prompt, the
            answer, or other answers of the same call, or that the `draft` model guesses. They are computed in the same
            step, and those that are sampled too are kept; as many are drafted as make answers faster, by what steps
            take and how many were kept. Answers differ by no more than the rounding that other requests in the batch
            cause too. With `exact`, and where memory cannot be cut, there are none. "ngram": from the prompt and the
            answer alone. "job": also from other answers of the same call. "draft": from the `draft` model alone. A
            number from 1 to 15: so many from any source wherever there are as many, whatever they cost. "off": one
            token a step.
        swap_mib: host memory for the cells of preempted sequences; cells that do not fit are computed again.
        share_prefixes: compute a common prefix of prompts once and share its cells.
        checkpoint_mib: most host memory for checkpoints, by which sequences share a prefix where memory cannot be cut
            (sliding windows, recurrent states); with 0 each of them computes it. Default: an eighth of what is free,
            at most 4096.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
    """

    policy: Policy = checked(check_choice, *get_args(Policy), default="fcfs")
    quantum: int | None = checked(check_int, 1, MAX_INT)
    ageing_s: float | None = checked(check_float, 1e-3, MAX_TIME_S)
    admission: Literal["reserve", "optimistic"] | None = checked(
        check_choice, "reserve", "optimistic"
    )
    max_queue: int | None = checked(check_int, 0, MAX_INT)
    when_full: Literal["wait", "reject"] | None = checked(check_choice, "wait", "reject")
    ttft: Ttft = checked(check_choice, *get_args(Ttft), default="auto")
    prefill_budget: int | None = checked(check_int, 1, MAX_INT)
    prefill_chunk: int | None = checked(check_int, 1, MAX_INT)
    itl_ms: float | None = checked(check_float, 1e-3, 1e9)
    speculate: Speculate | int = checked(check_speculate, default="auto")
    swap_mib: int = checked(check_int, 0, MAX_INT, default=1024)
    share_prefixes: bool = checked(check_flag, default=True)
    checkpoint_mib: int | None = checked(check_int, 0, MAX_INT)

    __repr__ = given_only

    @property
    def n_checkpoint_bytes(self) -> int:
        """Most host memory that checkpoints take."""
        n_mib = DEFAULT_CHECKPOINT_MIB if self.checkpoint_mib is None else self.checkpoint_mib
        return n_mib * 2**20

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_pairs()

    def _check_pairs(self) -> None:
        self._check_need("quantum", "policy", ("round_robin",))
        self._check_need("ageing_s", "policy", ("priority",))
        if self.when_full is not None and self.max_queue is None:
            raise ConfigError(
                f"when_full={self.when_full!r} needs max_queue: a queue without a limit is never full"
            )
        if self.itl_ms is not None and self.prefill_budget is not None:
            raise ConfigError(
                f"give itl_ms={self.itl_ms} or prefill_budget={self.prefill_budget}, not both: itl_ms sets the budget"
            )

    def _check_need(self, name: str, other: str, wanted: tuple[str | None, ...]) -> None:
        """Check that where an option is given, another has one of the `wanted` values, the first as a rule."""
        value, found = getattr(self, name), getattr(self, other)
        if value is not None and found not in wanted:
            raise ConfigError(f"{name}={value} needs {other}={wanted[0]!r}, not {found!r}")


def check_shares(name: str, value: object) -> tuple[float, ...]:
    """Return the shares of a model that devices hold."""
    items = list_of(value)
    if not items:
        raise ConfigError(
            f"{name} must be a list of numbers, one for each device, not {shown(value)}"
        )
    shares = tuple(check_float(f"a share in {name}", share, 0.0, 1e6) for share in items)
    if not any(shares):
        raise ConfigError(f"{name} has no share above 0: leave it out to split by free memory")
    return shares


def check_servers(name: str, value: object) -> tuple[str, ...]:
    """Return the addresses of RPC servers."""
    items = list_of(value)
    if not items:
        raise ConfigError(f"{name} must be a list of 'host:port', not {shown(value)}")
    if len(items) > MAX_RPC_SERVERS:
        raise ConfigError(f"{name} has {len(items)} servers; at most {MAX_RPC_SERVERS} are allowed")
    return tuple(_server(name, item) for item in items)


def _server(name: str, value: object) -> str:
    text = text_of(value) or ""
    host, _, port = text.partition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not (host and is_number and 0 < int(port) < 2**16):
        raise ConfigError(
            f"{name}: a server must be 'host:port' with a port of 1 … 65535, not {shown(value)}"
        )
    return text


def check_adapter_files(name: str, value: object) -> dict[str, str]:
    """Return adapters' files by name."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of names to files, not {shown(value)}")
    files = {}
    for key, path in value.items():
        text = check_text(f"a name in {name}", key, MAX_KEY_LENGTH)
        files[text] = check_path(f"the file of {name} {text!r}", path)
    return files


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ScheduleOptions):
    """How a model is loaded and how its context is made.

    Args:
        parallel: slots, 1 … 256; default: 16, or as many as the memory holds.
        n_ctx: cells in total. Give it or `ctx_per_seq`; default: `parallel` windows.
        ctx_per_seq: one slot's window; default: 2,048 or what the model was trained for, or what `look_ahead` needs, or
            what the memory holds. llama.cpp rounds it up to a multiple of 256.
        memory_mib: most memory for cells; ignored with `n_ctx`, or `parallel` and `ctx_per_seq`; default: half of what
            is free.
        kv: "partitioned" or "unified" memory; "auto": partitioned, unless prompts of `look_ahead` have much in common.
        cache_type_k: how keys are stored: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.
        cache_type_v: how values are stored.
        exact: promise that tokens do not depend on other requests: proven by a probe, else refused.
        exact_slots: with `exact`, total slots of all engines that must give the same bits; default: `parallel`; with
            replicas, that of all together.
        flash_attn: "on" or "off"; "auto": llama.cpp's choice, but off if a trial of this model found that faster.
        n_batch: most tokens in a step.
        n_ubatch: most tokens in one run of the compute graph.
        n_threads: default: the cores that this process may use, and fewer where that is faster, as while other
            programs use them.
        n_gpu_layers: layers on devices; default: llama.cpp's, all. With `offload_kqv`, `split_mode`, `main_gpu`,
            `tensor_split` and `rpc_servers` it says which devices hold the layers and their cells.
        rope_scaling: with `rope_freq_base`, `rope_freq_scale`, `yarn_ext_factor`, `yarn_attn_factor`, `yarn_beta_fast`,
            `yarn_beta_slow` and `yarn_orig_ctx`: positions, where the model's own do not do.
        repack: how weights are laid out in memory. "auto": packed for cbatch's own kernels, where this processor has
            them and the machine's memory would hold the weights three times; otherwise as with "llama": as llama.cpp
            repacks them. "off": as in the file, mapped, so that processes share them.
        use_mmap: map the model's file into memory, where its weights stay as they are in the file.
        use_mlock: lock the weights in memory, so that they are not swapped out.
        chat_template: "chatml" or a Jinja template, instead of the model's own.
        adapters: LoRA files by the names that requests give.
        draft: a smaller model's file, with the same vocabulary: it drafts tokens too; see `speculate`.
        mmproj: the model's projector, a GGUF file: chats may have pictures or sound then; see
            `cbatch.pictures` and `cbatch.sounds`.
        cache_dir: the folder for cells that requests save; default: the user's own.
        cache_mib: the most that the folder may hold.
        cache_media: keep the rows of encoded pictures and sounds in that folder, too.
        library: llama.cpp's library, or a folder that has it, in place of the one that `LLAMA_CPP_LIB_PATH` names or
            llama-cpp-python has. A process has one: the first load decides.

    Raises:
        ConfigError: a value of the wrong type, out of range, or at odds with another.
    """

    parallel: int | None = checked(check_int, 1, MAX_PARALLEL)
    n_ctx: int | None = checked(check_int, 1, MAX_INT)
    ctx_per_seq: int | None = checked(check_int, 1, MAX_INT)
    memory_mib: int | None = checked(check_int, 1, MAX_INT)
    kv: Kv = checked(check_choice, *get_args(Kv), default="auto")
    cache_type_k: CellType = checked(check_choice, *get_args(CellType), default="f16")
    cache_type_v: CellType = checked(check_choice, *get_args(CellType), default="f16")
    exact: bool = checked(check_flag, default=False)
    exact_slots: int | None = checked(check_int, 1, MAX_PARALLEL * MAX_PARALLEL)
    flash_attn: Literal["auto", "on", "off"] = checked(
        check_choice, "auto", "on", "off", default="auto"
    )
    n_batch: int = checked(check_int, 1, 2**20, default=2048)
    n_ubatch: int = checked(check_int, 1, 2**20, default=512)
    n_threads: int | None = checked(check_int, 1, MAX_THREADS)
    n_gpu_layers: int | None = checked(check_int, -1, MAX_INT)
    offload_kqv: bool = checked(check_flag, default=True)
    split_mode: SplitMode | None = checked(check_choice, *get_args(SplitMode))
    main_gpu: int | None = checked(check_int, 0, MAX_INT)
    tensor_split: Sequence[float] | None = checked(check_shares)
    rpc_servers: Sequence[str] | None = checked(check_servers)
    rope_scaling: RopeScaling | None = checked(check_choice, *get_args(RopeScaling))
    rope_freq_base: float | None = checked(check_float, 1.0, 1e12)
    rope_freq_scale: float | None = checked(check_float, 1e-6, 1e6)
    yarn_ext_factor: float | None = checked(check_float, 0.0, 1e6)
    yarn_attn_factor: float | None = checked(check_float, 0.0, 1e6)
    yarn_beta_fast: float | None = checked(check_float, 0.0, 1e6)
    yarn_beta_slow: float | None = checked(check_float, 0.0, 1e6)
    yarn_orig_ctx: int | None = checked(check_int, 1, MAX_INT)
    repack: Repack = checked(check_choice, *get_args(Repack), default="auto")
    use_mmap: bool = checked(check_flag, default=True)
    use_mlock: bool = checked(check_flag, default=False)
    chat_template: str | None = checked(check_string)
    adapters: Mapping[str, str | os.PathLike[str]] | None = checked(check_adapter_files)
    draft: str | os.PathLike[str] | None = checked(check_path)
    mmproj: str | os.PathLike[str] | None = checked(check_path)
    cache_dir: str | os.PathLike[str] | None = checked(check_path)
    cache_mib: int = checked(check_int, 1, MAX_INT, default=10_240)
    cache_media: bool = checked(check_flag, default=False)
    library: str | os.PathLike[str] | None = checked(check_path)

    __repr__ = given_only

    def __new__(cls, **settings: Any) -> EngineOptions:
        """Refuse unknown names with cbatch's own error."""
        check_names(cls.__dataclass_fields__, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_devices()
        self._check_rope()
        self._check_sizes()
        self._check_flash_attn()
        self._check_exact()
        self._check_schedule()

    @classmethod
    def of(cls, settings: Mapping[str, Any], others: Collection[str] = ()) -> EngineOptions:
        """Return the options of these names.

        Args:
            others: names that have another place: they may be there, and are left out.

        Raises:
            UnsupportedOptionError: an unknown name.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings must be a mapping, not {shown(settings)}")
        with reading("settings"):
            given = {name_of(name): value for name, value in settings.items()}
        _check_names(given, [*others, *cls.__dataclass_fields__])
        return cls(**{name: value for name, value in given.items() if name not in others})

    @property
    def n_slots(self) -> int:
        """Slots: `parallel`, or its default where memory allows."""
        return self.parallel or DEFAULT_PARALLEL

    @property
    def n_exact_slots(self) -> int:
        """Total slots of all engines that give the same bits with `exact`."""
        return self.exact_slots or self.n_slots

    @property
    def has_quantised_values(self) -> bool:
        """Whether values are stored in blocks, which llama.cpp reads only with flash attention."""
        return is_quantised(self.cache_type_v)

    def _check_devices(self) -> None:
        if self.tensor_split is not None and self.split_mode == "none":
            raise ConfigError(
                f"tensor_split={list(self.tensor_split)} is for several devices, "
                "but split_mode='none' uses one: leave one of them out"
            )

    def _check_rope(self) -> None:
        if self.rope_scaling == "none" and self.rope_freq_scale is not None:
            raise ConfigError(
                f"rope_freq_scale={self.rope_freq_scale} has no effect with rope_scaling='none': "
                "use 'linear' or 'yarn', or leave it out"
            )
        for name in (f.name for f in fields(self) if f.name.startswith("yarn_")):
            self._check_need(name, "rope_scaling", ("yarn", None))

    def _check_sizes(self) -> None:
        if self.n_ctx is not None and self.ctx_per_seq is not None and self.kv != "unified":
            raise ConfigError(
                "give n_ctx (cells in total) or ctx_per_seq (one slot's window), not both; "
                "with kv='unified' both are allowed: n_ctx for the pool, ctx_per_seq for the most that one request uses"
            )
        if self.n_ctx is not None and (self.ctx_per_seq or 0) > self.n_ctx:
            raise ConfigError(
                f"ctx_per_seq={self.ctx_per_seq} is more than the pool, n_ctx={self.n_ctx}: lower it, or raise n_ctx"
            )
        if self.n_batch < self.n_slots:
            raise ConfigError(
                f"n_batch={self.n_batch} is less than parallel={self.n_slots}, but a step needs a row for every slot: "
                "raise n_batch, or lower parallel"
            )
        if self.n_ctx is not None and self.n_ctx < 2 * self.n_slots:
            raise ConfigError(
                f"n_ctx={self.n_ctx} leaves {self.n_ctx // self.n_slots} cells for each of "
                f"{self.n_slots} slots: raise it, or use fewer slots (parallel)"
            )

    def _check_flash_attn(self) -> None:
        if self.flash_attn == "off" and self.has_quantised_values:
            raise ConfigError(
                f"cache_type_v={self.cache_type_v!r} needs flash attention: "
                "leave flash_attn='off' out, or use 'f16', 'bf16' or 'f32'"
            )
        if self.split_mode == "tensor" and self.flash_attn == "off":
            raise ConfigError(
                "split_mode='tensor' needs flash attention: leave flash_attn='off' out"
            )

    def _check_exact(self) -> None:
        if self.exact_slots is not None and not self.exact:
            raise ConfigError(f"exact_slots={self.exact_slots} needs exact=True")
        if self.n_exact_slots < self.n_slots:
            raise ConfigError(
                f"exact_slots={self.exact_slots} is less than parallel={self.n_slots}: raise it, or leave it out"
            )
        if self.exact and self.kv == "unified":
            raise ConfigError(
                "exact=True cannot be guaranteed with kv='unified': the position of a cell changes the rounding; "
                "use kv='partitioned'"
            )
        if self.exact and self.adapters:
            raise ConfigError(
                f"exact=True cannot be guaranteed with adapters ({', '.join(self.adapters)}): their f16 or f32 weights "
                "use other kernels in steps of few rows; merge an adapter into the model, or leave exact out"
            )
        if self.draft is None and self.speculate == "draft":
            raise ConfigError("speculate='draft' needs a draft model: add draft=FILE")
        if self.exact and self.speculate != "off" and self.speculate != "auto":
            raise ConfigError(
                f"exact=True cannot be guaranteed with speculate={self.speculate!r}: the number of rows changes the "
                "rounding; use 'off', or 'auto', which then has no draft tokens"
            )
        if self.draft is not None and (self.exact or self.speculate in ("off", "ngram", "job")):
            other = "exact=True" if self.exact else f"speculate={self.speculate!r}"
            raise ConfigError(
                f"draft={str(self.draft)!r} has no effect with {other}: leave one of them out"
            )
        if self.exact and self.admission == "optimistic":
            raise ConfigError(
                "exact=True cannot be guaranteed with admission='optimistic', which recomputes output: use 'reserve'"
            )

    def _check_schedule(self) -> None:
        for name in ("prefill_chunk", "prefill_budget"):
            value = getattr(self, name)
            if value is not None and value > self.n_batch:
                raise ConfigError(
                    f"{name}={value} is more than a step holds, n_batch={self.n_batch}: lower it, or raise n_batch"
                )
        if self.admission == "optimistic" and self.kv != "unified":
            raise ConfigError(
                f"admission='optimistic' needs kv='unified', not {self.kv!r}, where each slot has its own cells"
            )
        if self.exact and self.prefill_chunk is not None:
            raise ConfigError(
                f"exact=True cuts all prompts at the same places: leave prefill_chunk={self.prefill_chunk} out"
            )


def is_quantised(cell_type: str) -> bool:
    """Return whether a cell type stores blocks of numbers rather than single numbers."""
    return cell_type not in ("f16", "f32", "bf16")


def _check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse unknown names of settings; options of requests and the model's path are told their place."""
    of_requests = [f.name for f in fields(RunOptions) if f.name not in known]
    for name in given:
        if name in known:
            continue
        reason = ""
        if name in ("model_path", "model"):
            reason = "the model's path is the first argument"
        elif close := names_like(ELSEWHERE.get(name, name), of_requests, 1, 0.8):
            reason = f"it is an option of requests: give options={{{close[0]!r}: …}}"
        raise UnsupportedOptionError(name, known, reason=reason)
