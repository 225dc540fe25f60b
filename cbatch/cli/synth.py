"""`cbatch synth`: a random model to try things with."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cbatch.cli.completion import among, gguf_files
from cbatch.cli.option_table import Given, in_panel, takes
from cbatch.cli.signals import ended_softly
from cbatch.cli.terminal import bar, say
from cbatch.errors import ConfigError
from cbatch.files.places import check_apart, check_new, is_dash

_own, _size = in_panel(None), in_panel("Sizes")
_OF_SHAPE = "the shape's"


def _shapes(incomplete: str) -> list[str]:
    from cbatch.bench.synthetic_shapes import SHAPES

    return among(SHAPES)(incomplete)


@takes("llama_library")
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
    n_vocab: Annotated[
        int | None,
        _size("Tokens of the vocabulary.", "the vocabulary's, or the shape's", min=1),
    ] = None,
    n_layer: Annotated[int | None, _size("Layers.", _OF_SHAPE, min=1)] = None,
    n_embd: Annotated[int | None, _size("Width of the model.", _OF_SHAPE, min=1)] = None,
    n_head: Annotated[int | None, _size("Attention heads.", _OF_SHAPE, min=1)] = None,
    n_kv_head: Annotated[int | None, _size("Heads of keys and values.", _OF_SHAPE, min=1)] = None,
    n_ff: Annotated[
        int | None,
        _size("Width of a feed-forward layer, or of each expert.", _OF_SHAPE, min=1),
    ] = None,
    tied: Annotated[
        bool | None,
        _size(
            "Use the weights of the embedding for the output, too (--tied), or separate ones.",
            _OF_SHAPE,
            "--tied/--untied",
        ),
    ] = None,
    experts: Annotated[
        int | None, _size("Experts of each layer; 0 for none.", _OF_SHAPE, min=0)
    ] = None,
    experts_used: Annotated[
        int | None, _size("Experts that a token uses.", "2 of them", min=1)
    ] = None,
    window: Annotated[
        int | None,
        _size("Positions that layers with a sliding window see; 0 for none.", _OF_SHAPE, min=0),
    ] = None,
    full_every: Annotated[
        int | None,
        _size("With a window: every Nth layer sees the whole context.", "2", min=2),
    ] = None,
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
    if experts_used is not None and not experts:
        raise ConfigError("--experts-used needs experts: give --experts, too")
    if full_every is not None and not (SHAPES[shape].n_window if window is None else window):
        raise ConfigError("--full-every needs a sliding window: give --window, too")
    check_apart(output, filter(None, (vocab,)))
    check_new(output, force=force)
    asked: dict[str, Any] = {
        "type": type,
        "n_vocab": n_vocab,
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": n_kv_head,
        "n_ff": n_ff,
        "tied": tied,
        "n_expert": experts,
        "n_expert_used": experts_used or 2 if experts else None,
        "n_window": window,
        "full_every": full_every,
    }
    given_sizes = {name: value for name, value in asked.items() if value is not None}
    if mmproj is not None:
        if names := [*given_sizes, *(["vocab"] if vocab else [])]:
            raise ConfigError(f"a projector has no {', '.join(names)}: leave them out, or --mmproj")
        from cbatch.bench.synthetic_projector import write_projector

        width = n_embd or SHAPES[shape].n_embd
        path = write_projector(output, width, kind=mmproj, seed=seed)
        say(
            f"{path}: {path.stat().st_size:,} bytes, {mmproj} for a model of width {width}, seed {seed}"
        )
        return
    if n_embd is not None:
        given_sizes["n_embd"] = n_embd
    tokenizer = None if vocab is None else take_tokenizer(vocab, n_vocab)
    if tokenizer is not None:
        given_sizes["n_vocab"] = tokenizer.n_tokens
    sizes = replace(SHAPES[shape], **given_sizes)
    with ended_softly(), bar(of_bytes=True) as show:
        path = write_model(output, sizes, tokenizer=tokenizer, seed=seed, force=force, show=show)
    say(f"{path}: {path.stat().st_size:,} bytes, {shape} {sizes.type}, seed {seed}")
    if sizes.substituted_rows and not sizes.weight_type.is_direct:
        widths = " and ".join(map(str, sizes.substituted_rows))
        say(
            f"{path}: rows of {widths} numbers are not a multiple of {sizes.weight_type.n_block}, so llama.cpp "
            f"stored their matrices in a type similar to {sizes.type}"
        )
