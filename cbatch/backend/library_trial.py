"""Tries a library of llama.cpp in a process of its own: what it computes with the model that ships inside.

Run by `cbatch.backend.named_library.tried`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbatch.backend.named_library import backend_folders
from cbatch.errors import CBatchError, ConfigError, IncompatibleLlamaError, words_of

MODEL = Path(__file__).parents[1] / "models" / "chat.gguf"
_PROMPT = b"<|im_start|>user\nCount from 3 to 7.<|im_end|>\n<|im_start|>assistant\n"
N_PROMPT = 16
ANSWER = (280, 360, 281, 360, 282, 360, 283, 360, 284, 4)
"""The greedy answer, "3, 4, 5, 6, 7" and the end; the likeliest token leads by 6 or more each time."""

FIRST = {280: 23.348, 281: 13.353, 279: 12.974, 278: 12.818}
"""Logits behind the prompt. Source: llama-cpp-python 0.3.36 on a CPU with AVX2."""

_TOLERANCE = 0.5
"""Kernels and devices round differently, by some hundredths here. Our choice."""

_N_CTX, _N_BATCH, _N_UBATCH, _N_SEQUENCES = 512, 128, 64, 2
_N_ROOM = 64
"""Tokens of a batch. Our choice."""


def main() -> None:
    """Print what a library is and what is wrong with it, as JSON; the argument is the number of a device, or absent.

    The keys: `problem`, None or why it cannot be used; `kind`, `cbatch doctor`'s name of that, if any. Where it
    could be loaded also `library`, its file; `version`; `system`, llama.cpp's own line of instruction sets; `backends`,
    numbers of devices by name; `unloaded`, why files of backends do not load, by name; and `devices`, each with name,
    maker, takes_layers, n_free and n_total.
    """
    try:
        found = _found(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    except IncompatibleLlamaError as error:
        found = {"problem": error.reason, "kind": error.kind}
    except ConfigError as error:  # of the place that is named
        found = {"problem": words_of(error), "kind": "library-missing"}
    except (CBatchError, OSError, AttributeError) as error:
        found = {"problem": words_of(error)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def _found(i_device: int | None) -> dict[str, Any]:
    from cbatch.backend.bindings import library_file, library_version, llama_cpp
    from cbatch.backend.devices import backends, devices

    found, file = devices(), library_file()
    kept = ("name", "maker", "takes_layers", "n_free", "n_total")
    problem = wrong_answer(llama_cpp, None if i_device is None else found[i_device].handle)
    return {
        "problem": problem,
        "kind": "answer-wrong" if problem else "",
        "library": str(file),
        "version": library_version(),
        "system": llama_cpp.llama_print_system_info().decode(errors="replace"),
        "backends": backends(),
        "unloaded": _unloaded(file),
        "devices": [{name: getattr(d, name) for name in kept} for d in found],
    }


def _unloaded(file: Path) -> dict[str, str]:
    """Return why backends beside a library do not load, by the names of their files, such as for lack of a driver."""
    found = [path for folder in backend_folders(file) for path in folder.glob("libggml-*")]
    paths = [path for path in found if path.suffix in (".so", ".dylib") or ".so." in path.name]
    return {path.name: reason for path in paths if (reason := _why_not_loaded(path))}


def _why_not_loaded(path: Path) -> str:
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return words_of(error)
    return ""


def wrong_answer(llama: Any, device: Any, *, repacks: bool = False) -> str | None:
    """Return how the answer of the model that ships differs from what it is; None: it does not.

    Args:
        device: the device that computes; None for the CPU.
        repacks: weights may lie in memory in another way than in the file; the AMX trap has a trial of its own.
    """
    params = llama.llama_model_default_params()
    params.use_extra_bufts = repacks
    params.n_gpu_layers = 0 if device is None else -1
    chosen = (ctypes.c_void_p * 2)(device, None)
    if device is not None:
        params.devices = ctypes.cast(chosen, ctypes.c_void_p)
    model = llama.llama_model_load_from_file(os.fsencode(MODEL), params)
    if not model:
        return f"it cannot load {MODEL}"
    contexts = [_context(llama, model, is_unified=flag) for flag in (True, False)]
    if not all(contexts):
        return "it cannot make a context"
    windows = [llama.llama_n_ctx_seq(context) for context in contexts]
    if windows != [_N_CTX, _N_CTX // _N_SEQUENCES]:
        return f"its contexts of {_N_CTX} cells have windows of {windows[0]} and {windows[1]} cells"
    context = contexts[1]
    given = (_N_BATCH, _N_UBATCH, _N_SEQUENCES)
    taken = tuple(getattr(llama, f"llama_n_{w}")(context) for w in ("batch", "ubatch", "seq_max"))
    if taken != given:
        return f"its contexts have n_batch, n_ubatch and n_seq_max {taken}, not {given}"
    tokens = (llama.llama_token * _N_ROOM)()
    vocab = llama.llama_model_get_vocab(model)
    n = llama.llama_tokenize(vocab, _PROMPT, len(_PROMPT), tokens, _N_ROOM, True, True)
    if n != N_PROMPT:
        return f"it splits a text of {N_PROMPT} tokens into {n} tokens"
    return _wrong_tokens(llama, context, tokens[:n], llama.llama_vocab_n_tokens(vocab))


def _context(llama: Any, model: Any, *, is_unified: bool) -> Any:
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = _N_CTX, _N_BATCH, _N_UBATCH
    params.n_seq_max, params.kv_unified = _N_SEQUENCES, is_unified
    params.n_threads = params.n_threads_batch = 1
    return llama.llama_init_from_model(model, params)


def _wrong_tokens(llama: Any, context: Any, prompt: Sequence[int], n_vocab: int) -> str | None:
    batch = llama.llama_batch_init(_N_ROOM, 0, 1)
    if code := _decode(llama, context, batch, [(token, i, 0) for i, token in enumerate(prompt)]):
        return f"llama_decode returned {code}"
    logits = llama.llama_get_logits_ith(context, len(prompt) - 1)
    off = max(abs(logits[token] - value) for token, value in FIRST.items())
    if not off <= _TOLERANCE:  # not a number is no number either
        return f"it computes wrongly: a logit of the model shipped with cbatch is off by {off:.3g}"
    llama.llama_memory_seq_cp(llama.llama_get_memory(context), 0, 1, -1, -1)
    for i, token in enumerate(ANSWER[:-1]):
        place = len(prompt) + i
        if code := _decode(llama, context, batch, [(token, place, 0), (token, place, 1)]):
            return f"llama_decode returned {code}"
        for row in (0, 1):
            logits = llama.llama_get_logits_ith(context, row)
            best = max(range(n_vocab), key=logits.__getitem__)
            if best != ANSWER[i + 1]:
                return f"it computes wrongly: token {best} in place of {ANSWER[i + 1]}"
    return None


def _decode(llama: Any, context: Any, batch: Any, rows: Sequence[tuple[int, int, int]]) -> int:
    """Compute tokens, each with its position and sequence, and the logits of the last of each sequence."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = i + 1 == len(rows) or rows[i + 1][2] != sequence
    return int(llama.llama_decode(context, batch))
