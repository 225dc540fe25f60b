"""Weights and pieces to a GGUF file that llama.cpp loads."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from cbatch.bench.synthetic_shapes import Shape, gguf_package
from cbatch.bench.synthetic_vocabulary import BOS, CONTROL_TOKENS, TURN_END, UNK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from gguf import GGUFReader, GGUFWriter

    Arrays = Mapping[str, npt.NDArray[np.float32]]

N_CTX_TRAIN = 2048
ROPE_BASE = 10_000.0
NORM_EPS = 1e-5

CHAT = Shape(6, 192, 6, 3, 480, 1536, "q8_0", N_CTX_TRAIN, tied=True)
DRAFT = Shape(3, 128, 4, 2, 224, 1536, "q8_0", N_CTX_TRAIN, tied=True)
"""The two that ship; the draft guesses for the other, so it does at most a quarter of its work."""

TEMPLATE = """{% if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool['function'] | tojson }}
{% endfor %}To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['tool_calls'] %}{{ message['content'] or '' }}{% for call in message['tool_calls'] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{% else %}{{ message['content'] }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML, as the models are trained with it; with tools, a system message before it. Calls are those of Hermes."""

_DESCRIPTION = "A very small chat model for trying cbatch, trained on generated text alone"


def weight_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of every weight by its GGUF name, matrices as `(n_out, n_in)`.

    There is no output matrix: the embedding's is used.
    """
    width, n_kv, n_ff = shape.n_embd, shape.n_kv_head * shape.n_head_dim, shape.n_ff
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.n_vocab, width)}
    for i in range(shape.n_layer):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (n_kv, width),
            "attn_v": (n_kv, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
            "ffn_gate": (n_ff, width),
            "ffn_up": (n_ff, width),
            "ffn_down": (width, n_ff),
        }
        sizes |= {f"blk.{i}.{name}.weight": size for name, size in block.items()}
    return sizes | {"output_norm.weight": (width,)}


def n_multiply_adds(shape: Shape) -> int:
    """Return the multiplications of weights for one token, the output matrix included."""
    return sum(n_out * sizes[0] for n_out, *sizes in weight_sizes(shape).values() if sizes)


def write_gguf(
    path: Path, shape: Shape, pieces: Sequence[str], weights: Arrays, *, name: str
) -> None:
    """Write a model; matrices in `shape.type`, norms in float32.

    Args:
        path: where; the file is replaced.
        shape: sizes; `n_vocab` is the number of pieces.
        pieces: the vocabulary by id, as `learn_pieces` returns it.
        weights: float32 by the names and sizes of `weight_sizes`.
        name: the model's name in the metadata.

    Raises:
        ConfigError: the `gguf` package is not installed.
    """
    gguf = gguf_package("the recipe")
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, shape, name)
    _add_tokenizer(writer, pieces)
    kind = gguf.GGMLQuantizationType[shape.type.upper()]
    for tensor, size in weight_sizes(shape).items():
        data = np.ascontiguousarray(weights[tensor], np.float32).reshape(size)
        if data.ndim == 1:
            writer.add_tensor(tensor, data)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(path: Path, pieces: Sequence[str]) -> None:
    """Write a GGUF for its vocabulary alone: the smallest network there is, with weights of zero."""
    shape = Shape(1, 32, 1, 1, 32, len(pieces), "f32", N_CTX_TRAIN, tied=True)
    weights = {name: np.zeros(size, np.float32) for name, size in weight_sizes(shape).items()}
    write_gguf(path, shape, pieces, weights, name="vocabulary")


def replace_template(path: Path, template: str) -> None:
    """Write another chat template into a model that `write_gguf` has made; tensors stay as they are.

    Raises:
        ConfigError: the `gguf` package is not installed.
    """
    gguf = gguf_package("the recipe")
    reader = gguf.GGUFReader(path)
    field, data = reader.fields["tokenizer.chat_template"], path.read_bytes()
    length, text = field.parts[-2], field.parts[-1]
    start = field.offset + sum(part.nbytes for part in field.parts[:-2])
    end = start + length.nbytes + text.nbytes
    new = template.encode()
    head = data[:start] + len(new).to_bytes(8, "little") + new
    head += data[end : _end_of_infos(reader)]
    head += bytes(-len(head) % reader.alignment)
    path.write_bytes(head + data[reader.data_offset :])


def _end_of_infos(reader: GGUFReader) -> int:
    """Return where the description of the last tensor ends; padding and the tensors follow."""
    last = reader.tensors[-1].field
    return int(last.offset + sum(part.nbytes for part in last.parts))


def write_digests(path: Path, files: Sequence[Path]) -> None:
    """Write the SHA-256 of each file by its name, as JSON."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    path.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def _add_metadata(writer: GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_description(_DESCRIPTION)
    writer.add_license("MIT")
    writer.add_file_type({"f32": 0, "q8_0": 7}[shape.type])  # Source: llama.h, llama_ftype
    writer.add_quantization_version(2)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_kv_head)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(shape.n_head_dim)
    writer.add_rope_freq_base(ROPE_BASE)


def _add_tokenizer(writer: GGUFWriter, pieces: Sequence[str]) -> None:
    n_special = len(CONTROL_TOKENS) + 256
    n_learned = len(pieces) - n_special
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    # A higher score is merged first, so a piece comes after the pieces it is made of.
    writer.add_token_scores([0.0] * n_special + [-float(i) for i in range(n_learned)])
    # Source: llama.h, llama_token_type: 1 normal, 2 unknown, 3 control, 6 byte.
    writer.add_token_types([2] + [3] * (len(CONTROL_TOKENS) - 1) + [6] * 256 + [1] * n_learned)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(TURN_END)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
