"""`cbatch synth`: a random model to try things with."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cbatch.cli.completion import among, gguf_files
from cbatch.cli.option_table import Given, Option, in_panel, takes
from cbatch.cli.signals import ended_softly
from cbatch.cli.terminal import bar, say
from cbatch.errors import ConfigError
from cbatch.files.places import check_apart, check_new, is_dash
from cbatch.support.checks import MAX_INT, check_int

SIZES = "Sizes"

_own, _size = in_panel(None), partial(Option, SIZES, shown="the shape's", type=int)
_SIZES = (
    _size("n_vocab", "Tokens of the vocabulary.", shown="the vocabulary's, or the shape's"),
    _size("n_layer", "Layers."),
    _size("n_embd", "Width of the model."),
    _size("n_head", "Attention heads."),
    _size("n_kv_head", "Heads of keys and values."),
    _size("n_ff", "Width of a feed-forward layer, or of each expert."),
    _size(
        "tied",
        "Use the weights of the embedding for the output, too (--tied), or separate ones.",
        type=bool,
        names=("--tied/--untied",),
    ),
    _size("experts", "Experts of each layer; 0 for none.", setting="n_expert"),
    _size("experts_used", "Experts that a token uses.", shown="2 of them", setting="n_expert_used"),
    _size(
        "window",
        "Positions that layers with a sliding window see; 0 for none.",
        setting="n_window",
    ),
    _size("full_every", "With a window: every Nth layer sees the whole context.", shown="2"),
)
"""Fields of `Shape` as options."""


def _shapes(incomplete: str) -> list[str]:
    from cbatch.bench.synthetic_shapes import SHAPES

    return among(SHAPES)(incomplete)


@takes("llama_library", own=_SIZES)
def synth(
    output: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The model file to write.")],
    *,
    given: Given,  # the library quantises
    shape: Annotated[
        str,
        _own(
            "Sizes of the model: test, mamba (0.2 MB each), exact (14 MB), tiny (22 MB), small (330 MB), or those of "
            "well-known models: 0.5b, 1b, 3b, 8b. For pictures: qwen2-vl, gemma3 (0.2 MB each). For embeddings: bert, "
            "bert-cls, nomic-bert, jina-bert-v2, gemma-embedding, qwen3-embedding (0.2 MB each), minilm (25 MB), "
            "qwen3-0.6b-embedding; for rerank: bert-rerank, qwen3-rerank.",
            autocompletion=_shapes,
        ),
    ] = "test",
    type: Annotated[
        str | None,
        _own(
            "Weights: f32, f16, bf16, q8_0, q4_0, or a mix of types from llama.cpp's quantiser: q4_k_m, "
            "q6_k, iq4_xs and others.",
            "the shape's: q8_0",
        ),
    ] = None,
    vocab: Annotated[
        Path | None,
        _own("A GGUF file whose vocabulary is used.", "made up", autocompletion=gguf_files),
    ] = None,
    mmproj: Annotated[
        str | None,
        _own(
            "Write a projector instead, for a model that is --n-embd wide: llava, llava-tiles or whisper; "
            "qwen2-vl, or qwen2-omni with sound, for --shape qwen2-vl; gemma3 for --shape gemma3.",
            "a model is written",
        ),
    ] = None,
    seed: Annotated[int, _own("Seed of the weights.", min=0)] = 0,
    force: Annotated[bool, _own("Replace an existing file.", None, "--force")] = False,
) -> None:
    """Write a model with random weights: it answers nonsense at the speed of a real model.

    Example: cbatch synth model.gguf --shape tiny --vocab real.gguf --type q4_k_m
    """
    from cbatch.bench.synthetic import SHAPES, write_model  # numpy is slow to import
    from cbatch.bench.synthetic_tokenizer import take_tokenizer

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known are {', '.join(SHAPES)}")
    if is_dash(output):
        raise ConfigError("-: a model cannot be written to stdout: give a file")
    if given["experts_used"] is not None and not given["experts"]:
        raise ConfigError("--experts-used needs experts: give --experts, too")
    window = SHAPES[shape].n_window if given["window"] is None else given["window"]
    if given["full_every"] is not None and not window:
        raise ConfigError("--full-every needs a sliding window: give --window, too")
    check_apart(output, filter(None, (vocab,)))
    check_new(output, force=force)
    asked: dict[str, Any] = {} if type is None else {"type": type}
    asked |= given.settings(SIZES)
    if given["experts"]:
        asked.setdefault("n_expert_used", 2)
    if mmproj is not None:
        width = check_int("n_embd", asked.pop("n_embd", SHAPES[shape].n_embd), 1, MAX_INT)
        if names := [*asked, *(["vocab"] if vocab else [])]:
            raise ConfigError(f"a projector has no {', '.join(names)}: leave them out, or --mmproj")
        from cbatch.bench.synthetic_projector import write_projector

        path = write_projector(output, width, kind=mmproj, seed=seed)
        say(
            f"{path}: {path.stat().st_size:,} bytes, {mmproj} for a model of width {width}, seed {seed}"
        )
        return
    tokenizer = None if vocab is None else take_tokenizer(vocab, given["n_vocab"])
    if tokenizer is not None:
        asked["n_vocab"] = tokenizer.n_tokens
    sizes = replace(SHAPES[shape], **asked)
    with ended_softly(), bar(of_bytes=True) as show:
        path = write_model(output, sizes, tokenizer=tokenizer, seed=seed, force=force, show=show)
    say(f"{path}: {path.stat().st_size:,} bytes, {shape} {sizes.type}, seed {seed}")
    if sizes.substituted_rows and not sizes.weight_type.is_direct:
        widths = " and ".join(map(str, sizes.substituted_rows))
        say(
            f"{path}: rows of {widths} numbers are not a multiple of {sizes.weight_type.n_block}, so llama.cpp "
            f"stored their matrices in a type similar to {sizes.type}"
        )
