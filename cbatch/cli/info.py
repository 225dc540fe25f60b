"""`cbatch info`: a model file's properties, and the window of its slots."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cbatch.cli.main import write
from cbatch.cli.option_table import MODEL_OPTION, Given, model_argument, one_model, option, takes
from cbatch.cli.terminal import busy, printable
from cbatch.engine_options import EngineOptions
from cbatch.files.places import stdout

_MIB, _GIB = 2**20, 2**30


@takes(
    *("parallel", "ctx_per_seq", "n_ctx", "kv", "cache_type_k", "cache_type_v", "flash_attn"),
    *("memory_mib", "checkpoint_mib", "threads", "gpu_layers", "llama_library", "draft", "mmproj"),
)
def info(
    file: Annotated[
        Path | None, model_argument("A GGUF file; without one, the model shipped with cbatch.")
    ] = None,
    *,
    model: Annotated[Path | None, MODEL_OPTION] = None,
    given: Given,
    exactness: Annotated[
        bool,
        option(
            "--exactness",
            help="Test whether answers depend on other requests in the batch; takes some seconds.",
        ),
    ] = False,
    exact: Annotated[
        bool, option("--exact", help="Like --exactness, with the model loaded with exact=True.")
    ] = False,
    company: Annotated[
        bool,
        option(
            "--company",
            help="Test whether llama.cpp computes this model correctly in batches; loads the weights.",
        ),
    ] = False,
    costs: Annotated[
        bool,
        option(
            "--costs",
            help="Measure how long steps take, and show the best prompt budget and number of rows; takes some seconds.",
        ),
    ] = False,
    json: Annotated[bool, option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Show what a model file is, what each slot would hold, and how much memory it takes.

    Example: cbatch info model.gguf --parallel 8 --cache-type-k q8_0
    """
    model = one_model(file, model)
    options = EngineOptions.of({**given.engine_settings(), "exact": exact})
    from cbatch.backend.load.loader import describe_model  # llama_cpp is slow to import

    found = describe_model(model, options, asks_probe=exactness or exact, asks_company=company)
    found["costs"] = _costs(model, {**given.engine_settings(), "exact": exact}) if costs else None
    width = shutil.get_terminal_size().columns if stdout().isatty() else None
    write((_as_json(found) if json else as_text(found, width)) + "\n")


def _costs(model: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    from cbatch.bench.fitted_costs import fitted_costs  # slow to import

    with busy("measuring how long steps take"):
        return fitted_costs(model, settings)


_FLASH_ATTENTION = {"auto": "on if this model supports it", "on": "on", "off": "off"}
_ABSENT = "none in the file"
_UNTESTED = "together, unless a test while loading finds wrong results; --company tests it now"


def as_text(found: Mapping[str, Any], width: int | None = None) -> str:
    """Return the result of `describe_model` as aligned lines, wrapped to `width` if given."""
    lines = [(f"{name:<13}  ", printable(" ".join(value.split()))) for name, value in _rows(found)]
    if width is None:
        return "\n".join(name + value for name, value in lines)
    return "\n".join(_wrapped(name, value, width) for name, value in lines)


def _wrapped(name: str, value: str, width: int) -> str:
    room = max(width, len(name) + 8)
    return textwrap.fill(
        value,
        room,
        initial_indent=name,
        subsequent_indent=" " * len(name),
        break_on_hyphens=False,
    )


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _rows_of_file(found)
    if found["can_generate"]:
        yield from _rows_of_slots(found)
    else:
        yield "weights", _weights(found)


def _rows_of_file(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "name", found["name"] or _ABSENT
    yield "architecture", found["architecture"]
    yield "file type", found["file_type"]
    yield "file size", f"{found['n_bytes']:,} bytes ({found['n_bytes'] / _MIB:,.1f} MiB)"
    yield "parameters", f"{found['n_params']:,}"
    yield "trained for", f"{found['n_ctx_train']:,} tokens"
    yield "chat template", "yes" if found["has_chat_template"] else "none: give --chat-template"
    yield "vocabulary", f"{found['n_vocab']:,} tokens"
    yield "end tokens", _listed(map(str, found["end_tokens"]))
    yield "sampling", _listed(f"{k} {v:g}" for k, v in found["sampling_defaults"].items())
    tasks = {"generate": "generates text", "embed": "embeds texts", "rerank": "reranks documents"}
    yield "what it does", ", ".join(words for task, words in tasks.items() if found[f"can_{task}"])
    if found["pooling"]:
        yield (
            "vectors",
            f"{found['n_embedding']:,} numbers, pooling {found['pooling']}, for up to {found['n_embed_max']:,} tokens",
        )


def _weights(found: Mapping[str, Any]) -> str:
    why_not = found["why_not_packed"]
    packed = f"not packed: {why_not}" if why_not else "packed for this processor"
    return f"{_size(found['n_weight_bytes'])}, {packed}"


def _rows_of_slots(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    n_window, n_cells = found["n_window"], found["n_cells"]
    yield "slots", f"{found['parallel']}" + _by(found["parallel_why"])
    window = f"{n_window:,} tokens per slot, for prompt and answer; {n_cells:,} in all"
    yield "window", window + _by(found["n_window_why"])
    yield "threads", f"{found['n_threads']}" + _by(found["n_threads_why"])
    yield "weights", _weights(found)
    yield "KV cache", _cells(found)
    if found["n_short_cells"]:
        size = f"{found['n_short_cells']:,} tokens, {_size(found['n_short_bytes'])}"
        yield "second cache", f"{size}; faster while all requests are short"
    if found["draft"]:
        yield "draft model", f"{found['draft']}, {_size(found['n_draft_bytes'])} of weights"
    if found["mmproj"]:
        yield (
            "projector",
            f"{found['mmproj']}, {_size(found['n_mmproj_bytes'])}: chats may have {found['mmproj_takes']}",
        )
    why = found["flash_attn_why"]
    yield "flash attn", _FLASH_ATTENTION[found["flash_attn"]] + _by(why)
    yield (
        "memory",
        f"{_size(found['n_free_bytes'])} free; the KV cache may take {_size(found['n_budget_bytes'])}",
    )
    yield "at most", _most(found)
    if found["checkpoint_mib"] is not None:
        yield (
            "checkpoints",
            f"{_size(found['checkpoint_mib'] * _MIB)} at most, to reuse common prefixes",
        )
    yield "requests run", found["company"] or _UNTESTED
    if found["exactness"] is not None:
        yield "exactness", found["exactness"]
    if found["step_rows"] is not None:
        yield "decoding", f"in steps of {found['step_rows']}"
    if found["probe_s"] is not None:
        when = " in an earlier load, and is remembered" * found["is_remembered"]
        yield "probe", f"took {found['probe_s']:.1f} s{when}"
    if found["costs"] is not None:
        yield from _cost_rows(found["costs"])


def _cost_rows(costs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from cbatch.bench.tuning import LEAST_CPU

    rows = ", ".join(f"{_ms(s)} with {n}" for n, s in costs["rows_s"].items())
    yield "decoding step", f"{rows} rows"
    run, token = _ms(costs["prompt_s"]), _ms(costs["token_s"])
    late = _ms(costs["token_s"] + 1000 * costs["cell_s"])
    yield (
        "prompts",
        f"{run} more for a step with prompts, and {token} for each prompt token ({late} after 1,000 others)",
    )
    budgets = [f"{n:,} beside {rows}" for rows, n in costs["budget_tokens"].items()]
    if budgets:
        said = f"{', '.join(budgets)} rows"
        yield (
            "prompt budget",
            f"{said}: prompt tokens of a new request in a step, while output is streamed",
        )
    if costs["cpu_share"] < LEAST_CPU:
        yield (
            "measured",
            f"with {costs['cpu_share']:.0%} of the cores: other programs were busy, so measure again",
        )
    n = costs["width"]
    tps = n / costs["rows_s"][str(n)]
    yield "best width", f"{n} rows, {tps:,.0f} tokens/s: the fastest number of requests at once"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _by(why: str) -> str:
    return f" ({why})" * bool(why)


def _cells(found: Mapping[str, Any]) -> str:
    if found["n_cell_bytes"] is None:
        return "not known from the file"
    about = "about " * found["is_about"]
    parts = [f"{found['n_cell_bytes']:,} bytes a token"] * (found["n_cell_bytes"] > 0)
    parts += [f"{found['n_state_bytes']:,} bytes a slot"] * (found["n_state_bytes"] > 0)
    kv = f"{found['kv']}: {found['kv_why']}"
    types = f"(keys {found['cache_type_k']}, values {found['cache_type_v']}; {kv})"
    return f"{about}{' and '.join(parts)}, {about}{_size(found['n_memory_bytes'])} in all {types}"


def _most(found: Mapping[str, Any]) -> str:
    """Return how many slots fit with this window, and what window fits with these slots."""
    if found["n_cell_bytes"] is None or found["n_budget_bytes"] is None:
        return "not known"
    return (
        f"{found['n_slots_fit']} slots of {found['n_window']:,} tokens (--parallel), "
        f"or {found['parallel']} slots of {found['n_window_fit']:,} (--ctx-per-seq)"
    )


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "not known"
    return f"{n_bytes / _MIB:,.1f} MiB" if n_bytes < _GIB else f"{n_bytes / _GIB:,.1f} GiB"


def _listed(words: Iterator[str]) -> str:
    return ", ".join(words) or _ABSENT


def _as_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False)
