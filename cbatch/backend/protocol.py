"""What a backend must be able to do, and what belongs to it: a vocabulary and grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cbatch.core.plan import KvCapabilities, StepPlan, StepResult
    from cbatch.core.span import PromptCuts
    from cbatch.embedding import Pooling
    from cbatch.options import AdapterSet, Grammar
    from cbatch.support.model_facts import ModelFacts
    from cbatch.support.picture_tokens import PictureTokens

Message = Mapping[str, object]
"""One chat message: at least `role` and `content`."""


class Vocab(Protocol):
    """Text to tokens and back. Every method may be called from any thread; nothing here touches the context."""

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every id that ends a generation, ascending."""

    @property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Every id that the model's file says is never to be sampled, ascending."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """Every id that adds nothing to the answer but can be written out, such as the mark of a tool call."""

    @property
    def template(self) -> str:
        """The chat template's source; empty where there is none."""

    def start_chats(self) -> None:
        """Start what renders chats. Raises a ModelLoadError where the system has no process for it."""

    @property
    def tool_refusal(self) -> str:
        """Why chats cannot have tools, naming the template; empty where they can."""

    @property
    def picture_refusal(self) -> str:
        """Why chats cannot have pictures; empty where they can."""

    @property
    def sound_refusal(self) -> str:
        """Why chats cannot have sound; empty where they can."""

    def picture_tokens(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        check_length: Callable[[int], object] | None = None,
    ) -> PictureTokens:
        """Return the tokens of a chat with pictures or sounds, whose rows have ids of their own; encodes nothing.

        Args:
            variables: further variables of the template.
            check_length: called with the tokens so far after each picture or sound; raises where these are too many.

        Raises:
            RequestFailedError: the template refuses the chat, a file is refused, or the model takes none.
        """

    @property
    def media_fingerprint(self) -> Mapping[str, str]:
        """What rows of pictures and sounds depend on, by readable names."""

    def encode(self, tokens: PictureTokens) -> None:
        """Encode what a chat shows, as far as it is not known; takes seconds. Not in the owner thread.

        Raises:
            RequestFailedError: a file is damaged, or llama.cpp cannot encode it.
            EngineClosedError: `stop_encoding` was called.
        """

    def stop_encoding(self) -> None:
        """End what is being rendered or encoded, and do no more of it: the engine closes. From any thread."""

    def piece(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none."""

    def shown_piece(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens are written out."""

    def named_token(self, mark: str) -> int | None:
        """Return the token that is this mark and nothing else, and that grammars name by its id; None without one."""

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a raw prompt, the model's own prefix (BOS) added where it wants one, never twice."""

    def tokenize_pair(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the tokens by which a reranker scores a document: by the model's template, or joined by its marks.

        Raises:
            PromptError: a text cannot be made tokens, or the template has no place for the instruction.
        """

    @property
    def n_added(self) -> tuple[int, int]:
        """How many special tokens `tokenize` puts before a text, and behind it."""

    def n_tokens_least(self, text: str) -> int:
        """Return a lower bound of a text's tokens without tokenizing it; 0 if none is known."""

    def render_text(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> str:
        """Return the text of which `render` returns the tokens. Raises as `render`."""

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the tokens of a chat by the model's template; a last message from `assistant` is left open.

        Args:
            messages: the chat; the arguments of `tool_calls` are mappings.
            variables: further values for the template, such as `tools`.

        Raises:
            RequestFailedError: there is no template, or it refuses these messages.
        """

    def dry_breakers(self, strings: Sequence[str]) -> bytes:
        """Return the sequences of tokens that DRY takes for these strings, in a form of the backend's own.

        The first call may take a second or so; results are kept.
        """


class Embedder(Protocol):
    """Computes vectors of texts. One thread at a time."""

    @property
    def n_most(self) -> int:
        """Tokens of the longest text."""

    @property
    def n_full(self) -> int:
        """Tokens of several texts together beyond which one more takes longer than alone; a longer text goes alone."""

    @property
    def n_texts(self) -> int:
        """Most texts in a call; 1 where the bits of a vector would depend on other texts and must not."""

    @property
    def n_shared(self) -> int:
        """Tokens from which on a beginning that all texts of a call have is computed once; 0 where it never is."""

    def prepare(self, texts: Sequence[Sequence[int]]) -> None:
        """Have memory for texts, as `compute` does first. Any thread, while no other computes.

        Raises:
            PlanError: the texts break a rule; nothing was done.
            TextTooLongError: the memory that is free is not enough.
        """

    def compute(
        self, texts: Sequence[Sequence[int]], take_turn: Callable[[], float] | None = None
    ) -> list[NDArray[np.float32] | None]:
        """Return the vector of each text, None where there is none.

        Args:
            texts: tokens of each, 1 … `n_most`, in the vocabulary; at most `n_texts`, and more than one only up to
                `n_full` tokens, a shared beginning left out.
            take_turn: called amid the computing of a causal model, in the same thread, soon at first. It may run the
                backend; it returns the seconds for which to go on before it is called again, infinity while nothing
                else waits. What it raises ends the computing.

        Returns:
            (dimension,) float32, not normalised, a copy; with pooling none (n_tokens, dimension).

        Raises:
            DecodeError: llama.cpp could not compute them.
            Exception: those of `prepare` and `take_turn`.
        """

    def hurry(self) -> None:
        """Have `take_turn` called soon. From any thread."""

    def close(self) -> None:
        """Free what it has of its own. Twice is harmless."""


class Grammars(Protocol):
    """Grammars for one model's tokens."""

    def compile(self, grammar: Grammar) -> object:
        """Return a compiled grammar, for `Binding.constraint`; may take seconds. One thread at a time, not the owner.

        Raises:
            GrammarError: it cannot be compiled, or is larger than the limits; so it is each time.
            Exception: any other: it could not be compiled now.
        """

    def compile_quickly(self, grammar: Grammar) -> object | None:
        """Return what `compile` does, or None if that takes longer than a moment. One thread at a time; else as there.

        Another thread may call `compile` at the same time.
        """

    def takes_long(self, grammar: Grammar) -> bool:
        """Whether a grammar may take longer than a moment, by its text. From any thread."""


class Backend(Protocol):
    """Runs step plans. One thread only, except for `interrupt`; sizes never change."""

    @property
    def n_slots(self) -> int:
        """Sequences that can run at once: slots `0 … n_slots − 1`."""

    @property
    def n_window(self) -> int:
        """Positions one slot holds."""

    @property
    def n_batch(self) -> int:
        """Most tokens one step may hold."""

    @property
    def cuts(self) -> PromptCuts:
        """Where prompts are cut into chunks."""

    @property
    def memory(self) -> KvCapabilities:
        """What the memory is, and which moves of a plan it can do."""

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary and template."""

    @property
    def grammars(self) -> Grammars:
        """What compiles grammars for plans of this backend."""

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Sampling values that the model's file recommends, by the names of `Sampling`."""

    @property
    def model_facts(self) -> ModelFacts:
        """What the model is, for those who ask."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do one plan. Mutates cells of the slots in it and nothing else.

        Raises:
            PlanError: the plan breaks a rule of `StepPlan` or exceeds a size above; nothing was done.
            ModelLoadError: the context could not be made anew.
        """

    def make_embedder(self, pooling: Pooling) -> Embedder:
        """Return what computes vectors with the same weights. From any thread; may take a second.

        Raises:
            ModelLoadError: there is no memory for it.
            UnsupportedTaskError: the model cannot do that pooling.
        """

    @property
    def adapters(self) -> Sequence[str]:
        """The names of LoRA adapters that a plan may ask for."""

    @property
    def answer_settings(self) -> Mapping[str, str]:
        """Settings that change answers by more than the rounding, which company changes too; by readable names."""

    def fingerprint(self, adapters: AdapterSet) -> Mapping[str, str]:
        """Return what cells computed with `adapters` depend on, by readable names. From any thread; may read files."""

    def validate_state(self, data: NDArray[np.uint8], n_wanted: int) -> NDArray[np.uint8]:
        """Check the layout and the numbers of an exported state; return its first cells. From any thread.

        Args:
            data: (n_bytes,) uint8, as `export_state` of a backend with the same fingerprint returned it.
            n_wanted: how many cells to return; all of them where memory cannot trim.

        Returns:
            (n_bytes,) uint8, for `import_state`.

        Raises:
            ValueError: the layout is not this memory's, or numbers are not finite; the text ends a sentence about the
                cells.
        """

    def import_state(self, key: int, data: NDArray[np.uint8], n_cells: int) -> None:
        """Keep a state for a plan to load under `key`. Owner thread.

        Args:
            key: one that is not in use.
            data: (n_bytes,) uint8, as `validate_state` returned it, kept until it is loaded or forgotten.
            n_cells: how many cells it holds.
        """

    def export_state(self, key: int, *, is_kept: bool = False) -> NDArray[np.uint8] | None:
        """Return the state that is saved under `key`, None where it was lost; forget it unless `is_kept`. Owner thread.

        Returns:
            (n_bytes,) uint8, not to be changed.
        """

    def rest(self) -> None:
        """Give back what the thread that calls `run` computes with; nothing runs for a while. In that thread."""

    def interrupt(self) -> None:
        """Ask the run in flight, or else the next one, to end after its current step. From any thread."""

    def close(self) -> None:
        """Free the context and what the backend loaded. Twice is harmless."""
