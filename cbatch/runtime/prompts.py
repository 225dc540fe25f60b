"""Tokenizes prompts in advance, in other threads, so that the owner thread never waits for a prompt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from cbatch.errors import CBatchError, PromptTooLongError, failure_of
from cbatch.media import is_medium, shown_messages
from cbatch.messages import BatchPrompt
from cbatch.runtime.prompt_fit import N_WINDOWS, output_cap, set_prompt
from cbatch.runtime.scoring import n_joined
from cbatch.runtime.sequences import check_in_vocab
from cbatch.runtime.work_thread import WorkThread
from cbatch.sounds import is_sound
from cbatch.support.garbage import drop_frames
from cbatch.support.moments import NobodyWaitsError, TakesLongError, brief, pausing
from cbatch.support.picture_tokens import PictureTokens, edges_of
from cbatch.support.prefix_index import n_common
from cbatch.support.sound_length import told_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cbatch.backend import Vocab
    from cbatch.chat.chat_format import ChatFormat
    from cbatch.core.driver import SequenceDriver
    from cbatch.core.request import Request
    from cbatch.options import Grammar, RunOptions
    from cbatch.runtime.kept_rows import KeptRows

    class PostPrompts(Protocol):
        """Has a command done by the owner thread between two runs."""

        def __call__(self, command: Callable[[], object], *, is_refused: bool) -> object:
            """Take a command; one for refused prompts is to be done soon. From any thread."""


T = TypeVar("T")

_Item = TypeVar("_Item")

Tokenize: TypeAlias = "Callable[[BatchPrompt, RunOptions], Sequence[int]]"

_Found: TypeAlias = "tuple[SequenceDriver, FoundPrompt | CBatchError]"

_ToEncode: TypeAlias = "tuple[SequenceDriver, FoundPrompt | CBatchError | None, int]"
"""A sequence, its prompt if already tokenized, and about how many samples its pictures and sounds have."""

_Begun: TypeAlias = "tuple[BatchPrompt | None, RunOptions | None, str, Sequence[int]]"
"""A prompt with its options, its text and its tokens."""

_Chosen: TypeAlias = "tuple[BatchPrompt | None, RunOptions | None, FoundPrompt | None]"
"""A prompt with its options, and what was found of it."""

_N_LONG = 2**15
"""Characters or tokens above which a prompt is long. Tokenizing it takes some milliseconds."""

_N_LONG_SOUND = 2**21
"""Characters of a sound's base64 above which it is long: already its rows are counted by decoding it. Our choice."""

_N_LONG_SAMPLES = 2**23
"""Samples of all channels, by a sound's file, above which it is long: an MP3 file of that size has as many."""

_MP3, _N_EACH = ("SUQz", "//"), 4
"""How the base64 of MP3 files begins, and samples counted per character; others have one at most, or tell."""

_N_UNKNOWN = 2**28
"""Samples counted for a file that can be long but does not state its length."""

_N_PIECE = 2**19
"""Samples counted for a picture or a shorter sound: half a minute, encoded as one piece. Our choice."""

_N_VALUE = 16
"""Characters that a value counts for that is not text."""

_GATHER_S = 0.004
"""Prompts tokenized within this time of the first are given together, so that they can share a step."""


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """The tokens found for a prompt."""

    tokens: Sequence[int]
    n_first: int = 0
    """With a moving window: tokens of a chat's first message, 1 for other prompts."""
    grammar: Grammar | None = None
    """Where the request's grammar was open."""
    n_before: int = 0
    """Tokens before the request's `ending`; 0 without one."""


class PromptTokenizer:
    """Tokenizes prompts. From any thread."""

    def __init__(
        self,
        tokenize: Tokenize,
        n_window: int,
        chats: ChatFormat | None = None,
        vocab: Vocab | None = None,
        kept: KeptRows | None = None,
    ) -> None:
        """Make one; `chats` is for requests whose grammar is open, `vocab` encodes pictures and sounds.

        Where rows are `kept` in files, they are read in place of encoding.
        """
        self._tokenize, self._n_window, self._chats = tokenize, n_window, chats
        self._vocab, self._kept = vocab, kept
        self._begun: _Begun = None, None, "", ()
        """The last prompt that had an ending, as text and tokens: the next one may have another ending of it."""
        self._chosen: _Chosen = None, None, None
        """The last prompt of a request with several choices: the next one may be another choice's."""

    def tokenize(self, driver: SequenceDriver) -> None:
        """Make a sequence's prompt tokens, or set its error where that cannot be; no effect where that was done."""
        if not driver.is_tokenized:
            self.give(driver, self.encoded(self.find(driver.request)))

    def encoded(self, found: FoundPrompt | CBatchError) -> FoundPrompt | CBatchError:
        """Encode the pictures and sounds of a prompt, as far as they are not known; return it, or the error."""
        if isinstance(found, CBatchError) or not isinstance(found.tokens, PictureTokens):
            return found
        try:
            if self._vocab is not None:
                new = self._kept.read(found.tokens.pictures) if self._kept else ()
                self._vocab.encode(found.tokens)
                if self._kept and new:
                    self._kept.write(new)
        except Exception as error:
            return _failure(error)
        return found

    def stop_encoding(self) -> None:
        """End what is being rendered or encoded, and do no more of it."""
        if self._vocab is not None:
            self._vocab.stop_encoding()

    def find(self, request: Request) -> FoundPrompt | CBatchError:
        """Return the tokens of a request's prompt, or the error; a prompt that does not fit is an error, too.

        Raises a `TakesLongError` in a `brief` block.
        """
        try:
            if request.ending:
                return self._with_ending(request)
            found = self._of_choice(request)
            output_cap(request, len(found.tokens), self._n_window, found.n_first)
            return found
        except TakesLongError:
            raise
        except Exception as error:
            return _failure(error)

    def _of_choice(self, request: Request) -> FoundPrompt:
        """Return what was found of a prompt; the choices of one request share it."""
        if request.options.n_choices == 1 or request.prompt.has_media:
            return self._whole(request)
        prompt, options, found = self._chosen
        if found is None or prompt is not request.prompt or options is not request.options:
            found = self._whole(request)
            self._chosen = request.prompt, request.options, found
        return found

    def _whole(self, request: Request) -> FoundPrompt:
        prompt, grammar = self._settled(request)
        tokens = self._tokenize(prompt, request.options)
        return FoundPrompt(tokens, self._n_first(request, tokens), grammar)

    def _with_ending(self, request: Request) -> FoundPrompt:
        """Return the tokens of a prompt with its ending: scored are those that the prompt alone does not have."""
        prompt, options, text, before = self._begun
        if prompt is not request.prompt or options is not request.options:
            text = self._text(request)
            before = self._tokenize(BatchPrompt(prompt=text), request.options)
            self._begun = request.prompt, request.options, text, before
        tokens = self._tokenize(BatchPrompt(prompt=text + request.ending), request.options)
        output_cap(request, len(tokens), self._n_window)
        return FoundPrompt(tokens, n_before=n_joined(before, tokens))

    def _text(self, request: Request) -> str:
        if request.prompt.messages is None or self._chats is None:
            return request.prompt.prompt or ""
        return self._chats.render(request.prompt, request.options)

    def _settled(self, request: Request) -> tuple[BatchPrompt, Grammar | None]:
        """Return the prompt to tokenize, and the grammar where it was open: then the prompt is the chat's text."""
        if not request.is_grammar_open or self._chats is None:
            return request.prompt, request.grammar
        prompt = request.prompt
        if prompt.has_media:
            prompt = replace(prompt, messages=shown_messages(prompt.messages or ()))
        text = self._chats.render(prompt, request.options)
        grammar = self._chats.grammar(request.prompt, request.options, text)
        return request.prompt if request.prompt.has_media else BatchPrompt(prompt=text), grammar

    def give(self, driver: SequenceDriver, found: FoundPrompt | CBatchError) -> None:
        """Give a sequence its tokens or error."""
        if isinstance(found, CBatchError):
            driver.error = found
            return
        if driver.request.is_grammar_open:
            driver.set_grammar(found.grammar)
        try:
            set_prompt(driver, found.tokens, self._n_window, found.n_first, found.n_before)
            if isinstance(tokens := found.tokens, PictureTokens):
                driver.pictures, driver.n_audio_tokens = tokens.pictures, tokens.n_sound_rows
                driver.n_image_tokens = tokens.n_rows - tokens.n_sound_rows
                driver.picture_edges = edges_of(tokens)
        except CBatchError as error:
            driver.error = error

    def _n_first(self, request: Request, tokens: Sequence[int]) -> int:
        prompt, options = request.prompt, request.options
        if not options.n_discard and len(tokens) < self._n_window:
            return 0  # nothing is left out, and nothing is refused
        if prompt.messages is None:
            return 1
        try:
            first = self._tokenize(replace(prompt, messages=prompt.messages[:1]), options)
        except TakesLongError:
            raise
        except Exception:  # a template may refuse a single message
            return 1
        return max(1, n_common([*first], [*tokens]))


def is_encoded(found: FoundPrompt | CBatchError) -> bool:
    """Whether nothing of a prompt is to be encoded: pictures and sounds, as far as there are any, are known."""
    return isinstance(found, CBatchError) or getattr(found.tokens, "is_encoded", True)


def is_slow(found: FoundPrompt | CBatchError) -> bool:
    """Whether something of a prompt is to be encoded that takes long to decode."""
    return not isinstance(found, CBatchError) and getattr(found.tokens, "is_slow", False)


def _check_waits(driver: SequenceDriver | None) -> None:
    """Raise a `NobodyWaitsError` if the sequence has ended."""
    if driver is not None and driver.finish_reason is not None:
        raise NobodyWaitsError


def _failure(error: Exception) -> CBatchError:
    if isinstance(error, CBatchError):
        drop_frames(error)  # they hold the file's bytes, and what was decoded of it
    return failure_of("the prompt could not be prepared", error)


class PromptLanes:
    """Tokenizes the prompts of sequences in order: short prompts in one thread, long ones in another.

    Chats whose template takes long go on in a third thread. Pictures and sounds are encoded in a fourth, so that a
    prompt whose pictures are known does not wait; those that take long to decode, in a fifth. Between two pieces, the
    last two threads first encode one prompt that has at most half as many samples. Thus few prompts are begun at once,
    and a large one proceeds by one piece for each smaller one.

    When a request ends, work for it stops after the current piece.

    Without threads, the caller of `order` tokenizes at once.
    """

    def __init__(self, prompts: PromptTokenizer, n_ahead: int, *, is_threaded: bool) -> None:
        """Make lanes, unused before `begin`. `n_ahead`: prompts that are tokenized before a slot is free."""
        self.n_ahead = n_ahead if is_threaded else 0
        self._prompts, self._is_threaded = prompts, is_threaded
        self._ordered: set[SequenceDriver] = set()
        self._post: PostPrompts = _nowhere
        self._take: Callable[[SequenceDriver], object] = bool
        self._short = _Lane("cbatch-prompts", self._find_briefly)
        self._long = _Lane("cbatch-long-prompts", self._find_briefly)
        self._late = _Lane("cbatch-late-chats", self._find)
        self._encoder = _Lane("cbatch-encoder", self._encode, is_nice=True)
        self._slow = _Lane("cbatch-slow-encoder", self._encode, is_nice=True)

    def begin(self, post: PostPrompts, take: Callable[[SequenceDriver], object]) -> None:
        """Have `take` called through `post`, in the owner thread, for each tokenized or refused prompt's sequence."""
        self._post, self._take = post, take

    def order(self, driver: SequenceDriver) -> None:
        """Have a sequence's prompt made tokens, unless that was done or is under way. From any thread."""
        if not self._is_threaded:
            self._prompts.tokenize(driver)
        elif not driver.is_tokenized and driver not in self._ordered:
            self._ordered.add(driver)
            if not self.takes_long(driver):
                self._short.put(driver)
            elif any(map(_is_long_sound, _sounds(driver.request.prompt))):
                self._slow.put((driver, None, _n_samples(driver.request.prompt)))
            else:
                self._long.put(driver)

    def takes_long(self, driver: SequenceDriver) -> bool:
        """Whether a prompt takes long to become tokens, so that others should pass it."""
        if driver.takes_long is None:
            asked = driver.request
            driver.takes_long = self._is_threaded and _is_long(asked.prompt, asked.options)
        return driver.takes_long

    def order_first(self, drivers: Iterable[SequenceDriver], n_waiting: int) -> None:
        """Order prompts of new sequences, behind `n_waiting` others, that may soon get a slot. From any thread."""
        for driver in drivers if self._is_threaded else ():
            if driver.is_early or n_waiting + len(self._ordered) < self.n_ahead:
                self.order(driver)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller's thread tokenizes prompts."""
        return any(lane.is_current for lane in self._lanes)

    @property
    def _lanes(self) -> Sequence[_Lane[Any]]:
        return self._short, self._long, self._late, self._encoder, self._slow

    def close(self) -> None:
        """Finish the prompts under way, but not what is being encoded, and begin no others."""
        self._prompts.stop_encoding()
        for lane in self._lanes:
            lane.close()

    def _find_briefly(self, drivers: Callable[[], SequenceDriver | None]) -> None:
        with brief():
            self._find(drivers)

    def _find(self, drivers: Callable[[], SequenceDriver | None]) -> None:
        """Tokenize the prompts of `drivers` for a few milliseconds, and have the tokens taken."""
        found: list[_Found] = []
        until_s = monotonic() + _GATHER_S
        driver: SequenceDriver | None = None
        with pausing(lambda: _check_waits(driver)):
            while (driver := drivers()) is not None:
                try:
                    _check_waits(driver)
                    prompt = self._prompts.find(driver.request)
                except NobodyWaitsError:
                    self._ordered.discard(driver)
                    continue
                except TakesLongError:
                    self._late.put(driver)
                    continue
                if is_encoded(prompt):
                    found.append((driver, self._prompts.encoded(prompt)))
                else:
                    lane = self._slow if is_slow(prompt) else self._encoder
                    lane.put((driver, prompt, _n_samples(driver.request.prompt)))
                if monotonic() >= until_s:
                    break
        self._tell(found)

    def _encode(
        self,
        waiting: Callable[[Callable[[_ToEncode], bool]], _ToEncode | None],
        n_most: float = math.inf,
    ) -> None:
        """Encode media of the first prompt with at most `n_most` samples, tokenized or not; have its tokens taken."""
        if (found := waiting(lambda item: item[2] <= n_most)) is None:
            return
        driver, prompt, n_samples = found

        def in_pauses() -> None:
            _check_waits(driver)
            self._encode(waiting, n_samples / 2)

        try:
            with pausing(in_pauses):
                in_pauses()
                prompt = self._prompts.encoded(prompt or self._prompts.find(driver.request))
            self._tell([(driver, prompt)])
        except NobodyWaitsError:
            self._ordered.discard(driver)

    def _tell(self, found: Sequence[_Found]) -> None:
        if found:
            is_refused = any(isinstance(prompt, CBatchError) for _, prompt in found)
            self._post(partial(self._give, found), is_refused=is_refused)

    def _give(self, found: Sequence[_Found]) -> None:
        for driver, prompt in found:
            self._ordered.discard(driver)
            if driver.finish_reason is None and not driver.is_tokenized:
                self._prompts.give(driver, prompt)
                self._take(driver)


class _Lane(Generic[_Item]):
    """Work of one thread, in order."""

    def __init__(
        self,
        name: str,
        work: Callable[[Callable[..., _Item | None]], object],
        *,
        is_nice: bool = False,
    ) -> None:
        """Make one; `work` is called for new items, with a function that returns the next one that fits, or None."""
        self._thread = WorkThread(name, is_threaded=True, is_nice=is_nice)
        self._todo: deque[_Item] = deque()
        self._work, self._is_closed = work, False

    @property
    def is_current(self) -> bool:
        return self._thread.is_current

    def put(self, item: _Item) -> None:
        self._todo.append(item)
        self._thread.do(self._begin)  # finds nothing if this item was done with an earlier one

    def close(self) -> None:
        self._is_closed = True
        self._thread.close()

    def _begin(self) -> None:
        while self._todo and not self._is_closed:  # an interrupted `put` adds an item, but no work
            self._work(self._next)

    def _next(self, fits: Callable[[_Item], bool] = lambda _: True) -> _Item | None:
        for i in range(0 if self._is_closed else len(self._todo)):
            if fits(item := self._todo[i]):
                del self._todo[i]  # other threads add items behind it
                return item
        return None


def _nowhere(command: Callable[[], object], *, is_refused: bool) -> None:
    raise RuntimeError("internal error: PromptLanes was used before begin()")


def without_delay(work: Callable[[], T], prompt: BatchPrompt, options: RunOptions) -> T:
    """Return what `work` makes of a prompt; short chats do not wait for ones with slow templates. From any thread."""
    if not _is_long(prompt, options):
        with suppress(TakesLongError), brief():
            return work()
    return work()


def _is_long(prompt: BatchPrompt, options: RunOptions) -> bool:
    """Whether a prompt takes long to become tokens, or may: all of a chat counts, and what its template gets.

    A picture or a sound may: a small file can hold much.
    """
    if prompt.has_media:
        return True
    if prompt.messages is not None:
        return _is_large([*prompt.messages, options.template_variables])
    return len(prompt.prompt or prompt.tokens or ()) > _N_LONG


def _sounds(prompt: BatchPrompt) -> list[str]:
    """Return the base64 of each sound of a prompt, and "" for a picture."""
    return [
        part["input_audio"]["data"] if is_sound(part) else ""
        for message in (prompt.messages or ())
        if isinstance(message["content"], tuple)
        for part in message["content"]
        if is_medium(part)
    ]


def _is_long_sound(data: str) -> bool:
    return len(data) > _N_LONG_SOUND or _n_told(data) > _N_LONG_SAMPLES


def _n_samples(prompt: BatchPrompt) -> int:
    """Return about how many samples the pictures and sounds of a prompt have."""
    return sum(max(_N_PIECE, _n_told(data)) for data in _sounds(prompt))


def _n_told(data: str) -> int:
    """Return how many samples, over all channels, a sound's file states, or may have by its size."""
    if n_samples := told_samples(data):
        return n_samples
    if n_samples is None:
        return _N_UNKNOWN
    return len(data) * (_N_EACH if data.startswith(_MP3) else 1)


def _is_large(value: object) -> bool:
    """Whether JSON has more than `_N_LONG` characters, about; looks at no more of it."""
    n, todo = 0, [value]
    while todo and n <= _N_LONG:
        inner = todo.pop()
        n += len(inner) if isinstance(inner, str) else _N_VALUE
        if isinstance(inner, Mapping):
            todo += islice(inner.values(), _N_LONG // _N_VALUE)
        elif isinstance(inner, list | tuple):
            todo += inner[: _N_LONG // _N_VALUE]
    return n > _N_LONG


def tokenize(
    vocab: Vocab,
    prompt: BatchPrompt,
    options: RunOptions,
    n_window: int | None = None,
    n_trained: int = 0,
) -> Sequence[int]:
    """Return a prompt's tokens; computes nothing, and encodes nothing.

    Raises:
        RequestFailedError: the template refuses the chat, or a token is unknown.
        PromptTooLongError: the bytes alone exceed `n_window` tokens, 16 times as many with `n_discard`, or the first
            pictures and sounds do. The prompt was not tokenized to its end.
    """
    if prompt.tokens is not None:
        check_in_vocab(prompt.tokens, vocab)
        return prompt.tokens
    if prompt.has_media:

        def check_length(n: int) -> None:
            if n_window is not None and n > n_window:
                raise PromptTooLongError(n, n_window, is_least=True, n_trained=n_trained)

        variables = options.template_variables
        return vocab.picture_tokens(prompt.messages or (), variables, check_length)
    if prompt.messages is not None:
        text = vocab.render_text(prompt.messages, options.template_variables)
    else:
        text = prompt.prompt or ""
    n_windows = N_WINDOWS if options.n_discard else 1
    if n_window is not None and (n_least := vocab.n_tokens_least(text)) > n_windows * n_window:
        raise PromptTooLongError(n_least, n_window, is_least=True, n_trained=n_trained)
    return vocab.tokenize(text)
