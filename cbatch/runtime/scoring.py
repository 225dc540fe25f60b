"""How likely a model finds texts: each text is the end of a prompt, and only this end is scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar
from uuid import uuid4

from cbatch.errors import CBatchError, ConfigError, PromptError
from cbatch.messages import BatchPrompt, Prompt, as_prompt
from cbatch.options import RunOptions
from cbatch.response import BatchResult, Score
from cbatch.support.checks import check_flag, reading, shown, token_ids
from cbatch.support.plain import int_of, list_of, text_of
from cbatch.support.prefix_index import n_common

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from cbatch.runtime.batch_response import BatchResponse

T = TypeVar("T")

Continuation: TypeAlias = "str | Sequence[int]"
Pair: TypeAlias = "tuple[Prompt, Continuation | Sequence[Continuation]]"

OPTIONS = {
    "max_tokens": 0,
    "prompt_logprobs": 1,
    "n": 1,
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "chat_template_kwargs": {},
}
"""Of a request that scores: nothing is sampled; the likeliest token tells what greedy decoding would take.

The chat template has been applied before.
"""


class ScoredTokens(NamedTuple):
    """The tokens of one request; those from `start` on are scored."""

    tokens: Sequence[int]
    start: int


class Tokenizer(NamedTuple):
    """How prompts become tokens."""

    tokens_of: Callable[[BatchPrompt], Sequence[int]]
    text_of: Callable[[BatchPrompt], str]
    n_window: int
    first_token: int
    """What stands before a text that nothing stands before; −1 for nothing."""


class Continuations(NamedTuple):
    """A context, None for none, and what may follow it."""

    context: BatchPrompt | None
    continuations: tuple[Continuation, ...]

    @classmethod
    def of(cls, pair: Any) -> Continuations:
        """Return a caller's pair, checked as far as it can be without a model."""
        with reading("pairs"):
            given = list_of(pair)
            if given is None or len(given) != 2:
                raise ConfigError(f"score takes pairs (context, continuations), not {shown(pair)}")
            context = None if text_of(given[0]) == "" else _without_media(given[0])
            listed = [given[1]] if text_of(given[1]) is not None else list_of(given[1])
            if not listed:
                raise ConfigError(
                    f"continuations must be texts or lists of token ids, not {shown(given[1])}"
                )
            if int_of(listed[0]) is not None:
                listed = [listed]
            return cls(context, tuple(map(_continuation, listed)))

    @property
    def prompt(self) -> BatchPrompt | None:
        """What the caller gave, with options of its own."""
        return self.context

    def requests(self, tokenizer: Tokenizer) -> list[list[ScoredTokens]]:
        """Return one request for each continuation.

        A context and its continuation are made tokens together, for tokens may not part where the texts do: scored are
        those from the first on that the context alone does not have.

        Raises:
            PromptError: there is no token before a continuation's first.
            CBatchError: a text cannot be made tokens.
        """
        context = self.context
        if context is not None and context.tokens is not None:
            return [[_joined(tokenizer, context.tokens, c)] for c in self.continuations]
        text = "" if context is None else tokenizer.text_of(context)
        before = tokenizer.tokens_of(BatchPrompt(prompt=text)) if text else ()
        return [[_continued(tokenizer, text, before, c)] for c in self.continuations]


class WholeText(NamedTuple):
    """A text of which all tokens are scored."""

    prompt: BatchPrompt

    @classmethod
    def of(cls, text: Any) -> WholeText:
        """Return a caller's text, checked as far as it can be without a model."""
        return cls(_without_media(text))

    def requests(self, tokenizer: Tokenizer) -> list[list[ScoredTokens]]:
        """Return windows that are no longer than a slot's; each but the first begins with the last token before it."""
        prompt = self.prompt
        tokens = prompt.tokens or tokenizer.tokens_of(
            BatchPrompt(prompt=tokenizer.text_of(prompt)) if prompt.messages else prompt
        )
        if not tokens:
            raise PromptError("the text has no token to score")
        if tokens[0] != tokenizer.first_token >= 0:
            tokens = (tokenizer.first_token, *tokens)
        step = tokenizer.n_window - 1
        if step < 1:
            raise PromptError("a slot's window of one token has no room to score another")
        starts = range(0, max(1, len(tokens) - 1), step)
        return [[ScoredTokens(tokens[i : i + step + 1], 1) for i in starts]]


def _without_media(text: Any) -> BatchPrompt:
    prompt = as_prompt(text)
    if prompt.has_media:
        raise ConfigError(
            "texts with pictures or sound cannot be scored yet: leave the pictures and sounds out"
        )
    return prompt


def _continuation(value: Any) -> Continuation:
    text = text_of(value)
    found = token_ids("a continuation", value) if text is None else text
    if not found:
        raise ConfigError("a continuation must not be empty")
    return found


def _joined(
    tokenizer: Tokenizer, before: Sequence[int], continuation: Continuation
) -> ScoredTokens:
    if isinstance(continuation, str):
        raise PromptError(
            "a context of tokens needs continuations of tokens, because a text is tokenized together with its context"
        )
    first = tokenizer.first_token
    if not before and first >= 0:
        before = (first,)
        continuation = continuation[1:] if continuation[0] == first else continuation
    return ScoredTokens((*before, *continuation), _start(len(before)))


def _continued(
    tokenizer: Tokenizer, text: str, before: Sequence[int], continuation: Continuation
) -> ScoredTokens:
    if not isinstance(continuation, str):
        return _joined(tokenizer, before, continuation)
    tokens = tokenizer.tokens_of(BatchPrompt(prompt=text + continuation))
    if text:
        return ScoredTokens(tokens, _start(n_joined(before, tokens)))
    return _joined(tokenizer, (), tokens)


def n_joined(before: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens of a text with its continuation are those of the text before it alone."""
    return min(n_common([*before], [*tokens]), len(tokens) - 1)


def _start(n_before: int) -> int:
    if not n_before:
        raise PromptError(
            "this continuation has no context, and the model adds no token at the beginning: a first token has no "
            "log-probability, so give a context"
        )
    return n_before


class _ScoreBook:
    """The requests of some items, and what is known of their scores. The feed's thread has it, too."""

    def __init__(self, items: Sequence[Continuations | WholeText], tokenizer: Tokenizer) -> None:
        self.items, self._tokenizer = items, tokenizer
        self._name = uuid4().hex[:12]
        self._found: list[list[list[Score | None]]] = [[] for _ in items]
        self._places: dict[str, tuple[int, int, int, int]] = {}

    def prompts(self) -> Iterator[BatchPrompt]:
        """Yield the requests, read ahead in another thread."""
        for i, item in enumerate(self.items):
            try:
                requests = item.requests(self._tokenizer)
            except CBatchError as error:
                n = len(item.continuations) if isinstance(item, Continuations) else 1
                self._found[i] = [[Score(error=error)] for _ in range(n)]
                continue
            self._found[i] = [[None] * len(windows) for windows in requests]
            own = RunOptions.of(item.prompt.options if item.prompt else None)
            for j, windows in enumerate(requests):
                for k, (tokens, start) in enumerate(windows):
                    id = f"score-{self._name}-{i}-{j}-{k}"
                    self._places[id] = i, j, k, start
                    options = RunOptions.of({**OPTIONS, "prompt_logprobs_start": start})
                    yield BatchPrompt(tokens=tokens, id=id, options=options.over(own))

    def take(self, result: BatchResult) -> None:
        i, j, k, start = self._places.pop(result.id)
        scored = (result.prompt_logprobs or ())[start:]
        error = result.error
        if error is None and (None in scored or not scored):
            error = PromptError(
                f"the request ended before all tokens were scored: {result.finish_reason}"
            )
        self._found[i][j][k] = Score(() if error else tuple(filter(None, scored)), error)

    def scores(self) -> list[list[Score]]:
        return [[_merged(windows) for windows in item] for item in self._found]


class Scores(Generic[T]):
    """Scores that are being computed: call `results()`, or `await` this object, for one entry per item, in order.

    Leaving before the end, or dropping this object, cancels the requests that have not ended.
    """

    def __init__(
        self,
        items: Sequence[Continuations | WholeText],
        tokenizer: Tokenizer,
        run: Callable[[Iterable[BatchPrompt]], BatchResponse],
        fold: Callable[[list[Score]], T],
    ) -> None:
        """Queue the requests of `items` one by one; `fold` makes an entry of an item's scores."""
        self._fold, self._book = fold, _ScoreBook(items, tokenizer)
        self._response = run(self._book.prompts())

    def __del__(self) -> None:
        if hasattr(self, "_response"):  # else it was refused
            self._response.leave()

    def __repr__(self) -> str:
        return f"<Scores of {len(self._book.items):,} items: {self._response!r}>"

    def __await__(self) -> Generator[Any, None, list[T]]:
        """Wait in an event loop. A task that is cancelled here cancels the requests."""
        return self.gather().__await__()

    async def gather(self, *, return_errors: bool = False) -> list[T]:
        """Do as `results` in an event loop."""
        returns_errors = check_flag("return_errors", return_errors)
        async for result in self._response.as_completed():
            self._book.take(result)
        return self._all(returns_errors=returns_errors)

    def results(self, *, return_errors: bool = False) -> list[T]:
        """Wait for all scores.

        Args:
            return_errors: return failed scores, which have an `error`, in their places instead of raising.

        Raises:
            CBatchError: the first error of a score.
        """
        returns_errors = check_flag("return_errors", return_errors)
        for result in self._response.as_completed():
            self._book.take(result)
        return self._all(returns_errors=returns_errors)

    def _all(self, *, returns_errors: bool) -> list[T]:
        found = self._book.scores()
        if not returns_errors:
            for score in (score for item in found for score in item):
                if score.error is not None:
                    raise score.error
        return [self._fold(item) for item in found]


def _merged(windows: Sequence[Score | None]) -> Score:
    """Return the score of a text from those of its windows."""
    scores = [score for score in windows if score is not None]
    if len(scores) == 1:
        return scores[0]
    error = next((score.error for score in scores if score.error is not None), None)
    return Score(() if error else tuple(token for score in scores for token in score.tokens), error)
