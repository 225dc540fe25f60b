"""`python -m cbatch.models.recipe`: train the models that ship inside, or measure them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch.backend.load.open_model import open_model
from cbatch.errors import CBatchError, ConfigError
from cbatch.models import CHAT_MODEL, DEMO_CHATS, DRAFT_MODEL
from cbatch.models.recipe.export import (
    CHAT,
    DRAFT,
    TEMPLATE,
    replace_template,
    write_digests,
    write_gguf,
    write_vocabulary,
)
from cbatch.models.recipe.measure import measure
from cbatch.models.recipe.pieces import learn_pieces
from cbatch.models.recipe.rows import RowMaker, batches
from cbatch.models.recipe.tasks import demo_lines, training_chats
from cbatch.support.folders import part_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbatch.bench.synthetic_shapes import Shape
    from cbatch.models.recipe.net import Weights

_N_CHATS_FOR_PIECES = 40_000
_DIGESTS = "digests.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "measure":
            measure(args.model, args.draft, n=args.n, seed=args.seed, say=_say)
        elif args.command == "template":
            files = [args.out / CHAT_MODEL.name, args.out / DRAFT_MODEL.name]
            for file in files:
                replace_template(file, TEMPLATE)
            write_digests(args.out / _DIGESTS, files)
        elif args.command == "demo":
            (args.out / DEMO_CHATS.name).write_text(demo_lines(), encoding="utf-8")
        else:
            _make(args)
    except CBatchError as error:
        sys.stderr.write(f"recipe: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("recipe: interrupted, nothing written\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cbatch.models.recipe", description=__doc__)
    parser.add_argument("--out", type=Path, default=CHAT_MODEL.parent, help="folder of the files")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--seed", type=int, default=1, help="of the chats and the first weights")
    parser.add_argument("--tokens", type=int, default=16_000_000, help="to train on")
    parser.add_argument("--draft-tokens", type=int, default=5_000_000, help="for the draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.set_defaults(command="make")
    commands = parser.add_subparsers()
    asked = commands.add_parser("measure", help="ask held-out questions")
    asked.add_argument("--model", type=Path, default=CHAT_MODEL)
    asked.add_argument("--draft", type=Path, default=DRAFT_MODEL)
    asked.add_argument("--n", type=int, default=800, help="questions")
    asked.add_argument("--seed", type=int, default=2)
    asked.set_defaults(command="measure")
    changed = commands.add_parser("template", help="write the chat template anew, and nothing else")
    changed.set_defaults(command="template")
    shown = commands.add_parser("demo", help="write the chats of `cbatch run --demo`")
    shown.set_defaults(command="demo")
    return parser


def _make(args: argparse.Namespace) -> None:
    """Train both models and write them; nothing is written before both are there."""
    files = [args.out / CHAT_MODEL.name, args.out / DRAFT_MODEL.name]
    _check(files, args)
    texts = (
        f"{message['role']}\n{message['content']}"
        for chat in islice(training_chats(args.seed), _N_CHATS_FOR_PIECES)
        for message in chat.messages
    )
    pieces = learn_pieces(texts, CHAT.n_vocab)
    _say(f"{len(pieces)} pieces")
    chat, draft = _train(pieces, args)
    args.out.mkdir(parents=True, exist_ok=True)
    _write(files[0], CHAT, pieces, chat, "cbatch chat")
    _write(files[1], DRAFT, pieces, draft, "cbatch draft")
    write_digests(args.out / _DIGESTS, files)
    measure(files[0], files[1], say=_say)


def _check(files: Sequence[Path], args: argparse.Namespace) -> None:
    for file in files:
        if file.exists() and not args.force:
            raise ConfigError(f"{file} is there already; use --force to replace it")
    if min(args.tokens, args.draft_tokens, args.threads) < 1:
        raise ConfigError("--tokens, --draft-tokens and --threads are ≥ 1")
    for name in ("torch", "gguf"):
        if find_spec(name) is None:
            raise ConfigError(f"the recipe needs {name}: pip install {name}")


def _train(pieces: Sequence[str], args: argparse.Namespace) -> tuple[Weights, Weights]:
    from cbatch.models.recipe.train import TrainingPlan, distil, train

    plan = TrainingPlan(args.tokens, n_threads=args.threads)
    draft_plan = replace(plan, n_tokens=args.draft_tokens)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocabulary.gguf"
        write_vocabulary(vocabulary, pieces)
        with closing(open_model(vocabulary)) as model:
            maker = RowMaker(model.vocab)
            data = batches(training_chats(args.seed + 1), maker, plan.n_batch, args.seed)
            _say(f"the chat model learns {plan.n_tokens:,} tokens")
            chat = train(CHAT, data, plan, args.seed, _say)
            _say(f"the draft learns {draft_plan.n_tokens:,} tokens")
            draft = distil(DRAFT, data, draft_plan, args.seed, _say, teacher=(CHAT, chat))
    return chat, draft


def _write(path: Path, shape: Shape, pieces: Sequence[str], weights: Weights, name: str) -> None:
    """Write a model whole or not at all."""
    with part_beside(path) as part:
        arrays = {key: weight.numpy() for key, weight in weights.items()}
        write_gguf(part, shape, pieces, arrays, name=name)
        part.replace(path)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
