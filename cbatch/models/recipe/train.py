"""Training: the big model by the answers, the draft by the big model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from cbatch.models.recipe.net import halved, hidden, logits, new_weights
from cbatch.models.recipe.rows import IGNORED, Batch, padded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from cbatch.bench.synthetic_shapes import Shape
    from cbatch.models.recipe.net import Weights

    Say = Callable[[str], None]
    LossOf = Callable[[Weights, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to learn; fixed before the start, so that a seed gives the same data.

    Args:
        n_tokens: to see in all, padding not counted.
        n_batch: tokens in a batch, padding counted.
        n_batches: batches in a step.
        n_threads: threads that compute them, each a whole batch.
        rate: highest learning rate.
        n_warm_up: steps up to it; afterwards it falls in a line to zero.
    """

    n_tokens: int
    n_batch: int = 3072
    n_batches: int = 2
    n_threads: int = 2
    rate: float = 3e-3
    n_warm_up: int = 100


def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both (n_rows, n_padded) int64."""
    n = padded(max(len(row.tokens) for row in batch))
    tokens = [row.tokens + [0] * (n - len(row.tokens)) for row in batch]
    targets = [row.targets + [IGNORED] * (n - len(row.targets)) for row in batch]
    return torch.tensor(tokens), torch.tensor(targets)


def train(shape: Shape, data: Iterator[Batch], plan: TrainingPlan, seed: int, say: Say) -> Weights:
    """Return a model that has learned the answers by heart and rule."""

    def loss(weights: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
        learned = targets != IGNORED
        states = hidden(weights, shape, tokens)[learned]
        return F.cross_entropy(logits(weights, states), targets[learned])

    return _fit(new_weights(shape, seed), data, plan, loss, say)


def distil(
    shape: Shape,
    data: Iterator[Batch],
    plan: TrainingPlan,
    seed: int,
    say: Say,
    teacher: tuple[Shape, Weights],
) -> Weights:
    """Return a smaller model that has learned what the teacher finds likely."""
    big_shape, big = teacher[0], halved(teacher[1])

    def loss(weights: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
        learned = targets != IGNORED
        with torch.no_grad():
            wanted = logits(big, hidden(big, big_shape, tokens)[learned]).log_softmax(-1)
        found = logits(weights, hidden(weights, shape, tokens)[learned]).log_softmax(-1)
        return F.kl_div(found, wanted, log_target=True, reduction="batchmean")

    return _fit(new_weights(shape, seed), data, plan, loss, say)


def _fit(
    weights: Weights, data: Iterator[Batch], plan: TrainingPlan, loss_of: LossOf, say: Say
) -> Weights:
    """Learn `plan.n_tokens` of `data`; mutates and returns `weights`."""
    optimizers = _optimizers(weights, plan.rate)
    watch = Watch(plan.n_tokens, say)

    def gradients(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
        loss = loss_of(halved(weights), *_tensors(batch))
        return loss.item(), torch.autograd.grad(loss, list(weights.values()))

    # A thread for a batch, rather than all for one operation: they wait for each other once a step.
    one_thread = partial(torch.set_num_threads, 1)
    one_thread()
    with ThreadPoolExecutor(plan.n_threads, initializer=one_thread) as pool:
        for i_step in count():
            if watch.n_seen >= plan.n_tokens:
                break
            step = list(islice(data, plan.n_batches))
            losses, parts = zip(*pool.map(gradients, step), strict=True)
            for weight, *grads in zip(weights.values(), *parts, strict=True):
                weight.grad = sum(grads) / len(grads)
            share = min((i_step + 1) / plan.n_warm_up, 1 - watch.n_seen / plan.n_tokens)
            _update(optimizers, list(weights.values()), plan.rate * share)
            watch.note(sum(len(row.tokens) for batch in step for row in batch), losses)
    return {name: w.detach() for name, w in weights.items()}


def _update(
    optimizers: Sequence[torch.optim.Optimizer], weights: Sequence[Tensor], rate: float
) -> None:
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def _optimizers(weights: Weights, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside and AdamW for the rest."""
    inner = [w for name, w in weights.items() if w.dim() == 2 and name != "token_embd.weight"]
    outer = [w for name, w in weights.items() if w.dim() == 1 or name == "token_embd.weight"]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


class Watch:
    """Says now and then how far the training is."""

    def __init__(self, n_tokens: int, say: Say, *, interval_s: float = 30.0) -> None:
        self.n_seen = 0
        self._n_tokens, self._say, self._interval_s = n_tokens, say, interval_s
        self._start = self._last = time.perf_counter()
        self._losses: list[float] = []

    def note(self, n_tokens: int, losses: Sequence[float]) -> None:
        """Count a step; print a line where the last one is long ago."""
        self.n_seen += n_tokens
        self._losses += losses
        now = time.perf_counter()
        if now - self._last < self._interval_s and self.n_seen < self._n_tokens:
            return
        self._last = now
        a_second = self.n_seen / (now - self._start)
        mean = sum(self._losses) / len(self._losses)
        left_s = max(self._n_tokens - self.n_seen, 0) / a_second
        self._losses.clear()
        self._say(
            f"{self.n_seen / 1e6:6.2f} of {self._n_tokens / 1e6:.1f} M tokens, loss {mean:.4f}, "
            f"{a_second:,.0f} tokens/s, {left_s / 60:.1f} min left"
        )
