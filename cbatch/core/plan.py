"""What a step is: a plan says everything the backend has to do, a result everything it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NewType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.errors import RequestFailedError
    from cbatch.options import AdapterSet, LogitsProcessor, Sampling

Slot = NewType("Slot", int)

BROKEN_ROW = -1
"""Stands for a token where a row's logits held a NaN or +∞, or where there was no row.

Tokens that are none are below 0; they are no codes of `llama_decode`, which are in `StepResult.code`."""

EMPTY_ROW = -3
"""Stands for a token where every logit was −∞ after mask, bias and penalties: no token was left."""

UNCHANGED = (0, 1, -1)
"""Return codes of `llama_decode` after which every cell is where the result says. Source: include/llama.h."""

N_STEPS_MAX = 64
"""Most steps in one run. In an overcommitted pool, retained cells are emptied for so many."""

N_TARGETS_MAX = 64
"""Most targets of all chunks of one step: with a vocabulary of 256,000 their logits take 64 MB. Our choice."""


@dataclass(frozen=True, slots=True)
class PromptCuts:
    """Where prompts are cut into chunks, so that no bits depend on company.

    Where `most` is more than `multiple`, a token's bits are the same however its prompt is cut at multiples, and a
    chunk may be as long as a step has room for. Else a prompt is cut at every multiple.
    """

    multiple: int = 0
    """Chunks begin at multiples of this; 0: anywhere."""
    most: int = 0
    """Most tokens of a chunk."""
    least: int = 1
    """Fewest tokens of a prompt's last chunk, unless it is the only one."""
    ends_in_row: bool = False
    """Whether the last token of a prompt whose next token is sampled is computed as a row, beside those that decode,
    unless the prompt ends at a multiple: cells before that are shared."""

    @classmethod
    def every(cls, n: int) -> PromptCuts:
        """Return cuts at every multiple of `n`; anywhere where it is 0."""
        return cls(n, n)

    def __bool__(self) -> bool:
        """Whether there are rules at all."""
        return self.multiple > 0

    def __str__(self) -> str:
        """Say it in words."""
        return str(self.multiple) if self.is_every else f"any multiple of {self.multiple}"

    @property
    def is_every(self) -> bool:
        """Whether a prompt is cut at every multiple."""
        return self.most == self.multiple

    @property
    def n_room(self) -> int:
        """The tokens that a step must have room for, so that every prompt can go on."""
        return self.most if self.is_every else self.multiple + self.least - 1

    @property
    def when_scored(self) -> PromptCuts:
        """The cuts of a prompt that is scored."""
        return PromptCuts.every(min(self.multiple, N_TARGETS_MAX))

    def whole(self, n: int) -> int:
        """Return the last place up to `n` where a chunk may begin."""
        return n - n % self.multiple if self.multiple else n

    def n_before_row(self, n_prompt: int) -> int:
        """Return how many tokens of a prompt are computed in chunks: all, or all before the row in which it ends."""
        return n_prompt - bool(self.ends_in_row and n_prompt % self.multiple)

    def parts(self, chunk: Chunk) -> Sequence[Chunk]:
        """Return a chunk as it is computed: without the row in which its prompt ends, and that row."""
        end = chunk.start + len(chunk.tokens)
        is_end = chunk.has_output and not chunk.targets and len(chunk.tokens) > 1
        return chunk.split() if is_end and self.n_before_row(end) < end else (chunk,)

    def n_chunk(self, start: int, n_prompt: int, room: int) -> int:
        """Return how long a prompt's chunk from `start` is with room for so many tokens; 0 where none fits."""
        n_left = n_prompt - start
        n_next = min(n_left, self.multiple - start % self.multiple)
        if self.is_every or start % self.multiple:
            return n_next if n_next <= room else 0
        if n_left <= min(room, self.most):
            return n_left
        return max(
            0, self.whole(min(start + room, start + self.most, n_prompt - self.least)) - start
        )


ANYWHERE = PromptCuts()


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """A request's logits processor, and the tokens that it is given."""

    function: LogitsProcessor
    prompt: tuple[int, ...] = field(repr=False)
    output: Sequence[int] = field(repr=False)
    """The sequence's own list; do not change it. When a row is sampled, it has all output so far."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What the backend must know of a sequence that enters a slot; it holds until the slot is bound again."""

    slot: Slot
    output_origin: int
    """The position of the first output token. The random generator is keyed by a token's number in the output, which is
    its position minus this, so a sequence that is computed again draws the same tokens. Each token that is removed from
    the window lowers the origin by one; it may be negative."""
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    """Every token id that ends the sequence, the model's end-of-generation ids included unless ignored."""
    history: tuple[int, ...] = field(default=(), repr=False)
    """All its tokens so far, prompt and output, also without a cell or taken out of the window.
    Penalties and DRY see them, and every token that is computed after them."""
    n_logprobs: int | None = None
    """How many alternatives to report with the log-probability of each sampled token; None reports nothing."""
    n_target_top: int = 0
    """How many alternatives to report with each of `Chunk.targets`."""
    constraint: object = None
    """What the sequence must match, as the backend's `Grammars` compiled it; None for anything."""
    output: tuple[int, ...] = ()
    """With a constraint: the output so far, which it has followed."""
    processor: OwnProcessor | None = None
    """Changes each row of logits before anything else; None: no processor."""
    has_drafts: bool = False
    """Whether the backend may draft tokens of it: `StepPlan.n_drafts`."""
    draft_group: int = 0
    """Not 0: drafts may come from the answers of sequences with the same number, too."""


@dataclass(slots=True)
class Chunk:
    """The part of one sequence in this step: `tokens` stand at positions `start`, `start + 1`, …

    Nothing changes one. It is not frozen: a step makes one a row, and a frozen one takes four times as long to make.
    """

    slot: Slot
    start: int
    tokens: Sequence[int]
    has_output: bool
    """Whether the last token's logits are sampled: it is the sequence's last pending token."""
    targets: Sequence[int] = ()
    """The tokens that follow the chunk's first `len(targets)` tokens, whose log-probabilities are to be reported; none
    for a last token that has an output."""

    def split(self) -> tuple[Chunk, Chunk]:
        """Return the tokens before the last one, and the last one, which has the output; there are no targets."""
        end = self.start + len(self.tokens) - 1
        before = Chunk(self.slot, self.start, self.tokens[:-1], has_output=False)
        return before, Chunk(self.slot, end, self.tokens[-1:], has_output=self.has_output)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token by the model's own logits, before any option changes them.

    `top` are the likeliest tokens with theirs, the likeliest first and the lower id first among equals: as many as
    are asked for, but none whose probability is 0. For a broken row `logprob` is NaN.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One backend run. In this order: forget saved cells, save, rebuild, clear, trim, load, copy, shift, bind, compute.

    A slot that is bound with a constraint samples only tokens that it allows. A chunk with an output in a slot with a
    constraint or a processor needs `n_steps` = 1, because its next step depends on the token sampled.
    `chunks` are in ascending order of slot, one a slot at most, with `N_TARGETS_MAX` targets at most in all. With
    `n_steps` > 1 every chunk has an output and none has targets, and each further step computes the token that the
    step before sampled, one a slot. The run ends early after a step in which a row sampled one of its stop tokens or
    was broken, after the first that ends later than `slice_s`, when it is interrupted, or when decoding failed; a
    backend may also end it after any step.
    """

    chunks: tuple[Chunk, ...]
    n_steps: int = 1
    slice_s: float = 0.0
    """Seconds of the run, from where computing begins; 0 for no limit."""
    n_drafts: int = 0
    """Most draft tokens that a step may compute behind a row's own token: only in a run of several steps, and where
    `KvCapabilities.can_draft`. A draft that equals the token sampled before it is accepted: its own row is sampled in
    the same step. So a row samples one token a step or more, and a run ends when one has sampled `n_steps`."""
    clears: tuple[Slot, ...] = ()
    """Slots to empty, whatever is in them."""
    binds: tuple[Binding, ...] = ()
    trims: tuple[tuple[Slot, int], ...] = ()
    """(slot, n): keep its first n cells. Only where `KvCapabilities.can_trim`."""
    copies: tuple[tuple[Slot, Slot, int], ...] = ()
    """(from, to, n): copy the first n cells to an empty slot. Only where `KvCapabilities.can_copy`."""
    saves: tuple[tuple[Slot, int], ...] = ()
    """(slot, key): copy its cells to host memory under a key that is free. Only where `KvCapabilities.can_save`."""
    loads: tuple[tuple[Slot, int, int], ...] = ()
    """(slot, key, n): put the first n of saved cells into an empty slot: all of them where memory cannot trim. Other
    slots and plans may load the same cells until they are forgotten."""
    shifts: tuple[tuple[Slot, int, int], ...] = ()
    """(slot, n_keep, n): remove `n` cells after the first `n_keep`; the rest move up. `KvCapabilities.can_shift`.
    Not done where the slot's cells were lost by a load that failed."""
    forgets: tuple[int, ...] = ()
    """Keys of saved cells that no later plan will load: gone at once, or when this plan has loaded them. What is saved
    under such a key is kept only until then; an unknown key does no harm."""
    adapters: AdapterSet = ()
    """What all chunks are computed with."""
    is_rebuild: bool = False
    """Make the context anew first: every slot is empty and unbound then; saved cells stay."""

    @property
    def dropped(self) -> frozenset[int]:
        """Keys that are gone before anything is loaded: nothing need be saved under them."""
        return frozenset(self.forgets).difference(key for _, key, _ in self.loads)


@dataclass(frozen=True, slots=True)
class GrammarStep:
    """What a constraint says once a token was sampled under it."""

    forced: tuple[int, ...] = ()
    """What must follow, without a choice: output that has no cells yet. Nothing where log-probabilities are asked."""
    is_complete: bool = False
    """Whether nothing more may follow, after the forced ones."""
    problem: str = ""
    """Why the constraint cannot be followed any further; a broken row stands for the token sampled then."""


FREE = GrammarStep()
"""What is said of a sequence without a constraint: nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a run did. `tokens[i]` are the tokens sampled for `chunks[i]`: one a step, more where drafts were
    accepted, or none without output."""

    tokens: list[list[int]]
    n_steps: int
    """Steps done in full. A failing step is not among them and has sampled nothing."""
    code: int = 0
    """The return code of the last `llama_decode`; not 0 means that the step after the `n_steps` failed."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    first_s: float = 0.0
    """Decoding and sampling of the first step; the later ones of a run compute one token a row."""
    n_kept: tuple[int, ...] = ()
    """After code 2 or below −1: how many cells each chunk's slot holds now, as far as is known."""
    lost: tuple[int, ...] = ()
    """Keys that could not be saved or loaded. Where a load failed nothing was copied or computed: `n_steps` is 0."""
    n_pad_rows: int = 0
    """Rows of no sequence that were computed to give steps their shape, of all steps that were done."""
    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    """The host memory that saved cells take, by their keys."""
    move_s: float = 0.0
    """Copying cells from slot to slot, as far as it was done before decoding."""
    logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    """`logprobs[i][j]` are those of `tokens[i][j]`; nothing for a chunk whose slot reports none, and empty where all
    report none."""
    scores: Mapping[Slot, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the targets of each chunk that has some; empty where the step was not done."""
    grammar_steps: Mapping[Slot, GrammarStep] = field(default_factory=dict)
    """What constraints say of the tokens sampled in their slots; a constraint with nothing to say is left out."""
    n_drafts: tuple[int, int, int] = (0, 0, 0)
    """Draft tokens that were computed: that the sequence repeats, of its group, of a draft model."""
    n_accepted: tuple[int, int, int] = (0, 0, 0)
    """Those of them that were accepted."""
    failures: Mapping[Slot, RequestFailedError] = field(default_factory=dict)
    """Errors of logits processors; their slots have broken rows in place of tokens."""

    @property
    def later_s(self) -> float:
        """Seconds of the steps after the first."""
        return max(0.0, self.decode_s + self.sample_s - self.first_s)


@dataclass(frozen=True, slots=True)
class KvCapabilities:
    """What a backend's memory is and can do; found out by trying, not by the model's name."""

    kind: Literal["partitioned", "unified", "recurrent"]
    """`partitioned`: `n_cells / n_slots` cells for each slot. `unified`: one pool for all. `recurrent`: a state for
    each slot, of one size however long the sequence is, alone or beside cells of its own; where states are beside one
    pool of cells, the kind is `unified`."""
    n_cells: int
    """Cells in total."""
    can_trim: bool = True
    """Whether the end of a sequence can be taken off."""
    can_draft: bool = False
    """Whether steps may have draft tokens: `StepPlan.n_drafts`. Implies `can_trim`."""
    can_save: bool = False
    """Whether a sequence's cells can be copied out and into another slot."""
    can_check: bool = True
    """Whether cells from elsewhere can be told from what would do harm: otherwise none are kept on disk."""
    can_copy: bool = False
    """Whether the beginning of one sequence can be had in another slot. Implies `can_trim`."""
    can_shift: bool = False
    """Whether cells can be taken out of the middle of a sequence. Implies `can_trim`."""
    saved_bytes: int = 0
    """Host memory of a saved sequence, without its cells."""
    saved_bytes_per_cell: int = 0

    def n_saved_bytes(self, n_cells: int) -> int:
        """Return the host memory that `n_cells` saved cells of one sequence take."""
        return self.saved_bytes + n_cells * self.saved_bytes_per_cell
