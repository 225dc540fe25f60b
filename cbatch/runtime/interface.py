"""The interface between `Engine` and what computes: a backend in this process, or worker processes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol, TypeAlias

from msgspec import Meta

from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.runtime.crossings import ElsewhereError, crosses
from cbatch.runtime.row_comparison import RowComparison
from cbatch.runtime.step_record import SlotState, StepRecord
from cbatch.stats import EngineStats
from cbatch.support.checks import MAX_INT
from cbatch.support.model_facts import ModelFacts

if TYPE_CHECKING:
    from cbatch.embedding import TextSettings
    from cbatch.errors import EngineClosedError
    from cbatch.response import BatchOutputChunk, BatchResult
    from cbatch.runtime.ids import RequestId

    OnEnd: TypeAlias = Callable[[EngineClosedError | None], object]
    OnAdmit: TypeAlias = Callable[[Sequence[str]], object]

Id: TypeAlias = Annotated[str, Meta(min_length=1, pattern="^[^\\0]*$")]
"""The id of a request, as other processes give it: one with a NUL is that of one choice's sequence."""

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INT)]

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INT)]


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which nothing computes."""

    cause: str
    """Why nothing computes."""
    retry_s: float | None
    """Seconds until the next start of a worker, 0 while one is being started; None if none will be started."""
    has_failed: bool = True
    """Whether a start of a worker has failed since the outage began; if not, the first start is under way."""


class Target(Protocol):
    """Where the output of a batch's requests goes."""

    @property
    def is_streamed(self) -> bool:
        """Whether chunks are wanted as they come, instead of together with the result."""

    @property
    def wants_tokens(self) -> bool:
        """Whether chunks come for each new token, also where the last ones are not text yet."""

    def deliver(
        self, chunks: Sequence[BatchOutputChunk], results: Sequence[tuple[int, BatchResult]]
    ) -> None:
        """Take new chunks, and results with their places in the batch. Must be quick, and never raises."""

    def expect_choices(self, n: int) -> None:
        """Have one request end `n` times: once for each choice."""


class BatchTarget(Target, Protocol):
    """A target that knows its requests."""

    @property
    def ids(self) -> Mapping[int, str]:
        """Ids by place, of all requests in flight and of some that have ended."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Requests that are queued together, or not at all; those of one call of `run`, or one that a feed has read.

    Of several, one that is refused for its own options ends with its error, and the others are queued.
    """

    prompts: Sequence[BatchPrompt]
    ids: Sequence[RequestId]
    names: Sequence[str]
    """How errors name each prompt; "" for its id."""
    options: RunOptions
    ends_s: float
    """Deadline of the whole batch, in seconds of `time.perf_counter`."""
    target: Target
    places: Sequence[int] = (0,)
    """The requests' places in their batch."""
    age_s: float = 0.0
    """Seconds since the requests were first submitted: their times and deadlines count from then."""
    may_wait: bool = True
    """Whether the caller's thread may wait for room in the queue; if not, the requests alone wait."""
    asks_again: bool = False
    """Whether requests whose worker process died are asked again."""
    is_paused: bool = False
    """Whether the requests are paused from the start: they compute nothing before they are resumed."""
    is_fed: bool = False
    """Whether a feed waits if the queue has no room, even with `when_full="reject"`."""
    is_checked: bool = False
    """Whether prompts are tokenized at once, however many wait, so that a prompt that cannot run ends soon."""
    is_part: bool = False
    """Whether the requests are only some of those of one call."""
    job: int = 0
    """The number of the call that the requests belong to; 0 for none."""
    texts: TextSettings | None = None
    """How the prompts are embedded or scored; None if they are requests for answers."""
    is_awaited: bool = True
    """Whether the caller waits until other processes have accepted the prompts; otherwise a refused prompt ends with an
    error."""

    @property
    def is_group(self) -> bool:
        """Whether a request that is refused for its own options does not concern the others."""
        return self.is_part or len(self.prompts) > 1


class BatchOrders(Protocol):
    """Commands for the requests of one batch. During a step no command waits: see `Loop.call`."""

    def check_wait(self) -> None:
        """Raise an `InsideStepError` if the caller's thread would wait for itself."""

    def watch(self, target: BatchTarget, /) -> None:
        """Deliver a batch's chunks as they come: its `is_streamed` has become true. Does not wait."""

    def cancel_batch(self, target: BatchTarget, /) -> int:
        """End a batch's requests in flight; return how many there were. Waits for the current step."""

    def cancel_batch_soon(self, target: BatchTarget, /) -> None:
        """End a batch's requests in flight before the next plan. Does not wait; a closed engine has ended them."""

    def cancel_waiting_soon(self, target: BatchTarget, /) -> None:
        """End a batch's requests that never had a slot. Does not wait."""


class Orders(BatchOrders, Protocol):
    """Orders for requests in flight. An id that was handed out means its own request, text the one that has it now."""

    def cancel(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> int:
        """End requests, or those alone that never had a slot; return how many. Waits for the current step."""

    def cancel_soon(self, ids: Iterable[str], *, is_for_waiting: bool = False) -> None:
        """End requests before the next plan; else as `cancel`. Does not wait."""

    def resume_soon(self, turns: Iterable[tuple[str, int]]) -> None:
        """Resume paused requests before the next plan, each for its number of tokens. Does not wait."""

    @crosses("pause")
    def pause(self, id: Id) -> bool:
        """Stop a request where it is; False where it is not in flight or paused already."""
        raise ElsewhereError

    @crosses("resume")
    def resume(self, id: Id, n_tokens: Count | None = None) -> bool:
        """Let a paused request go on, for `n_tokens` where given; False where it is not in flight or not paused."""
        raise ElsewhereError

    @crosses("compare_rows")
    def compare_rows(self, ids: Sequence[Id] | None = None) -> list[RowComparison]:
        """Compare the next rows of requests in a shared step and alone; see `Engine.compare_rows`."""
        raise ElsewhereError


class Questions(Protocol):
    """What an engine is asked, here or in another process."""

    @crosses("check_options")
    def check_options(self, options: RunOptions) -> None:
        """Raise a `ConfigError` for options of a run that name an adapter which is not loaded."""
        raise ElsewhereError

    @crosses("cancel_all")
    def cancel_all(self) -> int:
        """End every request in flight; return how many there were."""
        raise ElsewhereError

    @crosses("count", waits=True)
    def n_tokens_of(self, prompt: BatchPrompt, options: RunOptions) -> int:
        """Return how many tokens a prompt has; computes nothing. Raises as `Engine.count_tokens`."""
        raise ElsewhereError

    @crosses("tokens", waits=True)
    def tokens_of(self, prompt: BatchPrompt, options: RunOptions) -> Sequence[int]:
        """Return a prompt's tokens; computes nothing. Raises as `Engine.tokenize`."""
        raise ElsewhereError

    @crosses("token_lists", waits=True)
    def token_lists_of(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text. Raises as `Engine.tokenize`."""
        raise ElsewhereError

    @crosses("text", waits=True)
    def text_of(self, prompt: BatchPrompt, options: RunOptions) -> str:
        """Return a chat as the model sees it, or a raw prompt as it is. Raises as `Engine.render`."""
        raise ElsewhereError

    @crosses("pieces")
    def pieces_of(self, tokens: Sequence[TokenId]) -> list[bytes]:
        """Return the bytes of tokens, control tokens written out. Raises as `Engine.pieces`."""
        raise ElsewhereError

    @crosses("model_facts")
    def model_facts(self) -> ModelFacts:
        """Return what the model is."""
        raise ElsewhereError

    @crosses("check", waits=True)
    def checked(self, prompt: BatchPrompt, options: RunOptions) -> int:
        """Return how many tokens a prompt has. Raises the errors with which it would end before it runs."""
        raise ElsewhereError

    @crosses("slots")
    def slots(self) -> list[SlotState]:
        """Return what each slot holds now."""
        raise ElsewhereError

    @crosses("stats")
    def stats(self) -> EngineStats:
        """Return a snapshot of the work done."""
        raise ElsewhereError

    @crosses("reset_stats")
    def reset_stats(self) -> None:
        """Set the statistics to zero."""
        raise ElsewhereError

    @crosses("exactness", waits=True)
    def exactness(self) -> str:
        """Return the text of `Engine.exactness`; may compute for some seconds."""
        raise ElsewhereError

    @crosses("fingerprint")
    def fingerprint(self) -> dict[str, str]:
        """Return what answers depend on besides prompt and options, by name. See `Engine.fingerprint`."""
        raise ElsewhereError


class Runtime(Questions, Protocol):
    """Computes requests. Every method from any thread."""

    def listen(self, on_end: OnEnd | None, on_admit: OnAdmit | None = None) -> None:
        """Have a listener told of the end and of admissions, in place of an earlier one; None for nobody.

        Args:
            on_end: called once at the end, before the requests in flight end; with the error that has ended the
                runtime, if any.
            on_admit: called with the ids of sequences before the first step that computes something of them. It must
                be quick.
        """

    @property
    def n_slots(self) -> int:
        """Requests that run at once."""

    @property
    def n_window(self) -> int:
        """Tokens, prompt and answer, that one slot holds."""

    @property
    def is_threaded(self) -> bool:
        """Whether work is done without `pump`."""

    @property
    def has_limit(self) -> bool:
        """Whether queueing may wait for room in the queue."""

    @property
    def is_apart(self) -> bool:
        """Whether other processes compute, and to queue requests there that are not awaited takes no time here."""

    @property
    def orders(self) -> Orders:
        """Takes orders for requests in flight."""

    @property
    def ids(self) -> Container[str]:
        """The ids in flight."""

    @property
    def outage(self) -> Outage | None:
        """Why nothing computes now, though the runtime is open; None if all is well."""

    def check_open(self) -> None:
        """Raise an `EngineClosedError` where the runtime is closed, has failed, or belongs to the parent process."""

    def add(self, submission: Submission) -> None:
        """Check requests and queue them, which may wait for room; none is where it raises. See `Engine.run`."""

    def enter(self, submission: Submission) -> Callable[[], None]:
        """Check requests and make them known; return what queues them, and is to be called. Else as `add`."""

    def extend(
        self, result: BatchResult, n_tokens: int, target: Target, *, is_paused: bool = False
    ) -> RequestId:
        """Queue a request that continues a result, or pause it from the start; return its id. See `Engine.extend`."""

    def call_at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have `action` done at `when_s` of `time.perf_counter`, in some thread. It must be quick."""

    def record_steps(self, into: Callable[[StepRecord], object] | None) -> None:
        """Have `into` called after each run of steps. None ends that."""

    def pump(self) -> bool:
        """Do one step in the caller's thread, where there is no other; False where there is nothing to do."""

    def close(self, within_s: float | None = None) -> None:
        """End every request and free the model; see `Engine.close`. Twice is harmless."""
