"""`cbatch synth`: a random model to try things with."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cbatch.cli.option_table import option
from cbatch.cli.terminal import say
from cbatch.errors import ConfigError
from cbatch.files.places import check_new, is_dash


def synth(
    output: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="Where the model goes.")],
    *,
    shape: Annotated[
        str, option(help="test, mamba (0.2 MB each), exact (14 MB), tiny (22 MB), small (330 MB).")
    ] = "test",
    type: Annotated[
        str | None,
        option(help="Weights: f32, f16, q8_0 or q4_0.", default="the shape's: q8_0"),
    ] = None,
    seed: Annotated[int, option(help="Of the weights.", min=0)] = 0,
    force: Annotated[bool, option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a model with random weights, which answers with nonsense at the speed of a real one.

    Example: cbatch synth model.gguf --shape tiny
    """
    from cbatch.bench.synthetic import SHAPES, write_model  # numpy is slow to import

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known are {', '.join(SHAPES)}")
    if is_dash(output):
        raise ConfigError("-: a model cannot be written to stdout: give a file")
    check_new(output, force=force)
    sizes = SHAPES[shape] if type is None else replace(SHAPES[shape], type=type)
    path = write_model(output, sizes, seed=seed, force=force)
    say(f"{path}: {path.stat().st_size:,} bytes, {shape} {sizes.type}, seed {seed}")
