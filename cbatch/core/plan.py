"""Data of a step: the plan, which says what the backend has to do, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cbatch.core.span import Span
    from cbatch.errors import RequestFailedError
    from cbatch.options import AdapterSet, LogitsProcessor, Sampling

Slot = NewType("Slot", int)

BROKEN_ROW = -1
"""In place of a token: the row's logits had a NaN or +∞, or there was no row.

Values in place of a token are negative. They are no return codes of `llama_decode`; `StepResult.code` has those."""

EMPTY_ROW = -3
"""In place of a token: every logit was −∞ after mask, bias and penalties."""

UNCHANGED = (0, 1, -1)
"""Return codes of `llama_decode` after which exactly the completed steps have cells. Source: include/llama.h."""

N_STEPS_MAX = 64
"""Most steps in one run. In an overcommitted pool, retained cells are dropped to make room for so many steps."""


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """A request's logits processor, and the tokens that it receives."""

    function: LogitsProcessor
    prompt: tuple[int, ...] = field(repr=False)
    output: Sequence[int] = field(repr=False)
    """The sequence's own list: do not change it. It has all output so far when a row is sampled."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The backend's settings for a sequence that enters a slot; valid until the slot is bound again."""

    slot: Slot
    output_origin: int
    """The position of the first output token. The random generator is keyed by a token's index in the output, which is
    its position minus this, so a recomputed sequence draws the same tokens. Each token that leaves the window lowers
    the origin by one (`StepPlan.shifts`); it may be negative."""
    sampling: Sampling
    stop_tokens: Collection[int]
    """All token ids that end the sequence, with the model's end-of-generation ids unless the request ignores them."""
    history: tuple[int, ...] = field(default=(), repr=False)
    """All tokens so far, prompt and output, including pending ones and those that left the window.
    Penalties and DRY see them, and every token computed later."""
    n_logprobs: int | None = None
    """Alternatives to report with the log-probability of each sampled token; None reports nothing."""
    n_target_top: int = 0
    """Alternatives to report with each of `Span.targets`."""
    constraint: object = None
    """The compiled constraint of the output, from the backend's `Grammars`; None for no constraint."""
    output: tuple[int, ...] = ()
    """The output so far, if there is a constraint; it satisfies the constraint."""
    processor: OwnProcessor | None = None
    """Changes each row of logits before anything else; None for no processor."""
    has_drafts: bool = False
    """Whether the backend may draft the tokens that followed an earlier occurrence of the newest ones; see
    `StepPlan.n_drafts`."""
    has_model_drafts: bool = False
    """Whether the backend may draft tokens that a draft model guesses."""
    draft_group: int = 0
    """With `has_drafts`, draft tokens may also come from answers of sequences with the same group; 0 for no group."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token by the model's own logits, before any option changes them.

    `top` has the requested number of likeliest tokens, sorted by probability and then by id, without those of
    probability 0. For a broken row, `logprob` is NaN.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One backend run. Its order: forget saved cells, save, rebuild, clear, trim, load, copy, shift, bind, compute.

    A slot with a constraint samples only tokens that the constraint allows. A span with an output in a slot with a
    constraint or a processor needs `n_steps` = 1, because its next step depends on the sampled token. `spans` are in
    ascending order of slot, at most one for each slot, with at most `N_TARGETS_MAX` targets together. They have at most
    `n_batch` tokens together, except a single span that is a whole picture; see `has_whole_pictures`.

    With `n_steps` > 1, every span has an output and none has targets, and each further step computes the tokens that
    the previous step sampled. The run ends early after a step in which a row sampled a stop token or was broken, after
    the first step that ends later than `slice_s`, when it is interrupted, or when decoding fails. A backend may also
    end it after any step.
    """

    spans: tuple[Span, ...]
    n_steps: int = 1
    slice_s: float = 0.0
    """Time limit of the run in seconds, from the beginning of computing; 0 for no limit."""
    n_drafts: int = 0
    """Most draft tokens that a step may compute after a row's own token; only in a run of several steps and with
    `KvCapabilities.can_draft`. A draft token is accepted if it equals the token sampled from the row before it; then
    the next token is sampled from its own row in the same step. So a row samples at least one token each step, and a
    run ends when a row has sampled `n_steps` tokens."""
    clears: tuple[Slot, ...] = ()
    """Slots to empty; they may be empty already."""
    binds: tuple[Binding, ...] = ()
    trims: tuple[tuple[Slot, int], ...] = ()
    """(slot, n): keep the slot's first n cells. Needs `KvCapabilities.can_trim`."""
    copies: tuple[tuple[Slot, Slot, int], ...] = ()
    """(from, to, n): copy the first n cells to an empty slot. Needs `KvCapabilities.can_copy`."""
    saves: tuple[tuple[Slot, int], ...] = ()
    """(slot, key): copy the slot's cells to host memory under an unused key. Needs `KvCapabilities.can_save`."""
    loads: tuple[tuple[Slot, int, int], ...] = ()
    """(slot, key, n): load the first n saved cells into an empty slot; without `can_trim`, all of them. Other slots and
    plans may load the same cells until they are forgotten."""
    shifts: tuple[tuple[Slot, int, int], ...] = ()
    """(slot, n_keep, n): remove `n` cells after the first `n_keep`; the rest move up. Needs `KvCapabilities.can_shift`.
    Skipped if a failed load has lost the slot's cells. The output begins `n` positions earlier; before `binds`."""
    forgets: tuple[int, ...] = ()
    """Keys of saved cells that no later plan will load. They are dropped at once, or after this plan's loads.
    This includes cells that this plan saves. Unknown keys are ignored."""
    adapters: AdapterSet = ()
    """The adapters with which all spans are computed."""
    is_rebuild: bool = False
    """Rebuild the context first: all slots are empty and unbound then; saved cells stay."""

    @property
    def dropped(self) -> frozenset[int]:
        """Keys that are dropped before anything is loaded; nothing need be saved under them."""
        return frozenset(self.forgets).difference(key for _, key, _ in self.loads)


@dataclass(frozen=True, slots=True)
class GrammarStep:
    """The state of a constraint after a sampled token."""

    forced: tuple[int, ...] = ()
    """Tokens that must follow: they become output, without cells yet. Empty if log-probabilities were asked for."""
    is_complete: bool = False
    """Whether nothing may follow the forced tokens."""
    problem: str = ""
    """Why the constraint cannot be followed further; the sampled token then counts as a broken row."""


FREE = GrammarStep()
"""The state of a sequence without a constraint."""


class DraftCounts(NamedTuple):
    """Draft tokens of one sequence that were computed, by source, and those of them that were accepted."""

    n_own: int = 0
    """Drafted from earlier tokens of the sequence itself."""
    n_job: int = 0
    n_model: int = 0
    n_own_accepted: int = 0
    n_job_accepted: int = 0
    n_model_accepted: int = 0

    def and_more(self, others: DraftCounts) -> DraftCounts:
        """Return the sums."""
        return DraftCounts(*map(add, self, others))


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a run did. `tokens[i]` are the tokens sampled for `spans[i]`: one for each step, more with accepted drafts,
    none without output."""

    tokens: list[list[int]]
    n_steps: int
    """Number of completed steps. A failed step does not count and has sampled nothing."""
    code: int = 0
    """The return code of the last `llama_decode`. If it is not 0, the step after `n_steps` completed ones failed."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    first_s: float = 0.0
    """Seconds of decoding and sampling in the first step. Later steps of a run compute one token for each row."""
    n_kept: tuple[int, ...] = ()
    """After code 2 or a code below −1: cells that each span's slot holds now, as far as is known."""
    lost: tuple[int, ...] = ()
    """Keys that could not be saved or loaded. If a load failed, nothing was copied or computed, and `n_steps` is 0."""
    n_pad_rows: int = 0
    """Pad rows of all completed steps."""
    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of host memory of saved cells, by key."""
    move_s: float = 0.0
    """Seconds spent before decoding on copies of cells between slots."""
    logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    """`logprobs[i][j]` belongs to `tokens[i][j]`. Empty for a span whose slot reports none; the whole is empty if no
    slot reports any."""
    scores: Mapping[Slot, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the targets of each span with targets; empty if the step failed."""
    grammar_steps: Mapping[Slot, GrammarStep] = field(default_factory=dict)
    """States of constraints after the sampled tokens, by slot; a missing one is `FREE`."""
    n_drafts: tuple[int, int, int] = (0, 0, 0)
    """Draft tokens that were computed, by source: the sequence itself, its group, a draft model."""
    n_accepted: tuple[int, int, int] = (0, 0, 0)
    """Draft tokens that were accepted, by the same sources."""
    drafted: Sequence[DraftCounts] = ()
    """Draft tokens of each span; empty if there were none."""
    failures: Mapping[Slot, RequestFailedError] = field(default_factory=dict)
    """Errors of logits processors; their slots have broken rows instead of tokens."""

    n_threads: int = 0
    """Threads that computed; 0 if unknown."""
    waited_s: float = 0.0
    """Seconds of decoding and sampling in which the thread that computes had no core, or slept until the other threads
    of its computation were done: mostly because of other programs. 0 if unknown."""

    @property
    def later_s(self) -> float:
        """Seconds of the steps after the first."""
        return max(0.0, self.decode_s + self.sample_s - self.first_s)


@dataclass(frozen=True, slots=True)
class KvCapabilities:
    """What a backend's memory can do; found out by trying, not by the model's name."""

    kind: Literal["partitioned", "unified", "recurrent"]
    """`partitioned`: `n_cells / n_slots` cells for each slot. `unified`: one pool for all slots, with or without
    recurrent states besides. `recurrent`: a state of fixed size for each slot, with or without cells of its own."""
    n_cells: int
    """Total number of cells."""
    can_trim: bool = True
    """Whether the end of a sequence can be removed."""
    can_draft: bool = False
    """Whether steps may have draft tokens; see `StepPlan.n_drafts`. Implies `can_trim`."""
    can_save: bool = False
    """Whether a sequence's cells can be copied to host memory, and from there into any slot."""
    can_check: bool = True
    """Whether cells from a file can be checked before they are loaded; if not, no cells are kept on disk."""
    can_copy: bool = False
    """Whether the first cells of one slot can be copied to another. Implies `can_trim`."""
    can_shift: bool = False
    """Whether cells can be removed from the middle of a sequence. Implies `can_trim`."""
    has_whole_pictures: bool = False
    """Whether all rows of a picture are computed in one step: they attend to later rows, or share a position."""
    saved_bytes: int = 0
    """Bytes of host memory of a saved sequence, without its cells."""
    saved_bytes_per_cell: int = 0

    def n_saved_bytes(self, n_cells: int) -> int:
        """Return the bytes of host memory of a saved sequence with `n_cells` cells."""
        return self.saved_bytes + n_cells * self.saved_bytes_per_cell
