"""Text to tokens and back, over a loaded llama.cpp model; to be called from any thread."""

from __future__ import annotations

import ctypes
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.chat_template import ChatTemplate
from cbatch.errors import EngineClosedError, PromptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cbatch.backend import Message

_MAX_BYTES = 2**31 - 1  # llama_tokenize counts in int32
# Source: llama-vocab.cpp, token_to_piece: what it leaves out of the text
_HIDDEN = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_PIECE_BYTES = 64  # most pieces are shorter; a longer one is asked for twice
_N_TAIL_MAX = 20
"""Most tokens of a sequence after its first. Source: llama_sampler_init_dry, MAX_SEQ_LEN."""

_N_BREAKERS_KEPT = 64
"""Most sets of strings whose sequences are kept."""


class LlamaVocab:
    """A model's vocabulary and chat template; implements `cbatch.backend.Vocab`."""

    def __init__(
        self, model: Any, *, template: str | None = None, template_name: str = "the chat template"
    ) -> None:
        """Read what never changes; `model` is borrowed: close this object before it is freed.

        Args:
            model: `llama_model *` as ctypes gives it.
            template: Jinja source of the chat template; None without one.
            template_name: what error messages call it.
        """
        self._vocab: Any = llama_cpp.llama_model_get_vocab(model)
        self._end = ""
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        bos = int(llama_cpp.llama_vocab_bos(self._vocab))
        eos = int(llama_cpp.llama_vocab_eos(self._vocab))
        self._bos_text, self._eos_text = self._text(bos), self._text(eos)
        self._may_add_special = self._can_add_special(bos, eos)
        self._end_tokens = tuple(
            i for i in range(self._n_vocab) if llama_cpp.llama_vocab_is_eog(self._vocab, i)
        )
        self._pieces: list[bytes | None] = [None] * self._n_vocab
        self._breakers = BreakerTable(self._words, self._plain_tokens)
        self._shown: dict[int, bytes] = {}
        self._chat = ChatTemplate(
            template, bos_text=self._bos_text, eos_text=self._eos_text, name=template_name
        )

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""
        return self._n_vocab

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every id that ends a generation, ascending."""
        return self._end_tokens

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """Every id that the model's file says is never to be sampled, ascending.

        Source: llama.cpp common/sampling.cpp, which gives each a bias of −∞.
        """
        n_tokens = ctypes.c_int32(0)
        found = llama_cpp.llama_vocab_get_suppress_tokens(self._open_vocab, ctypes.byref(n_tokens))
        tokens = found[: n_tokens.value] if found else ()
        return tuple(sorted({t for t in tokens if 0 <= t < self._n_vocab}))

    @property
    def pointer(self) -> Any:
        """`llama_vocab *`, while the model is open.

        Raises:
            EngineClosedError: it is not.
        """
        return self._open_vocab

    @property
    def bos_text(self) -> str:
        """The beginning-of-text token as text; empty where the model has none."""
        return self._bos_text

    @property
    def eos_text(self) -> str:
        """The end-of-text token as text; empty where the model has none."""
        return self._eos_text

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        """Every id that adds nothing to the answer but can be written out; the first call looks at all ids."""
        get_attributes, vocab = llama_cpp.llama_vocab_get_attr, self._open_vocab
        return frozenset(t for t in range(self._n_vocab) if get_attributes(vocab, t) & _HIDDEN)

    @property
    def template(self) -> str:
        """The chat template's source; empty where there is none."""
        return self._chat.source

    @property
    def tool_refusal(self) -> str:
        """Why chats cannot have tools, naming the template; empty where they can."""
        return self._chat.tool_refusal

    def piece(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none.

        Raises:
            ValueError: no such token id.
        """
        if not 0 <= token < self._n_vocab:
            raise ValueError(f"token {token} is not in 0 … {self._n_vocab - 1}")
        known = self._pieces[token]
        if known is None:
            # Two threads may both get here: they write the same bytes.
            known = self._pieces[token] = self._read_piece(token)
        return known

    def shown_piece(self, token: int) -> bytes:
        """Return the bytes of a token; control tokens are written out.

        Raises:
            ValueError: no such token id.
        """
        if piece := self.piece(token):
            return piece
        if token not in self._shown:
            self._shown[token] = self._read_piece(token, is_shown=True)
        return self._shown[token]

    def named_token(self, mark: str) -> int | None:
        """Return the token that is this mark and nothing else, and that grammars name by its id; None without one."""
        tokens = self._tokenize(_encode(mark), add_special=False, parse_special=True)
        if len(tokens) != 1 or not self.is_named(tokens[0]):
            return None
        return tokens[0]

    def is_named(self, token: int) -> bool:
        """Whether grammars name a token by its id: one without text, or a mark in angle brackets.

        Source: llguidance's llamacpp.py, which selects the same tokens.
        """
        shown, attributes = (
            self.piece(token),
            llama_cpp.llama_vocab_get_attr(self._open_vocab, token),
        )
        is_bracketed = shown.startswith(b"<") and shown.endswith(b">")
        is_control = attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        is_mark = is_bracketed and attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        return not shown or bool(is_control or is_mark)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a raw prompt, the model's own prefix (BOS) added where it wants one.

        Special tokens written out in the text are read as such, as by llama-server's `/completion`.
        A text that starts with the BOS token's text gets no second one.

        Raises:
            RequestFailedError: the text is not valid Unicode, or longer than llama.cpp can count.
        """
        data = _encode(text)
        has_bos = bool(self._bos_text) and text.startswith(self._bos_text)
        add_special = self._may_add_special and not has_bos
        return self._tokenize(data, add_special=add_special, parse_special=True)

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the tokens of a chat by the model's template; a last `assistant` is left open.

        Args:
            messages: the chat.
            variables: further values for the template, such as `tools`.

        Raises:
            RequestFailedError: there is no template, or it refuses these messages.
        """
        return self.tokenize(self._chat.render(messages, variables))

    def dry_breakers(self, strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that DRY takes for these strings; see `cbatch.backend.Vocab`."""
        return self._breakers.find(strings)

    def close(self, why: str = "the model is closed") -> None:
        """Drop the model; later calls that need it raise `EngineClosedError` with `why`."""
        self._vocab, self._end = None, why

    @property
    def _open_vocab(self) -> Any:
        if self._vocab is None:
            raise EngineClosedError(self._end)
        return self._vocab

    def _plain_tokens(self, data: bytes) -> list[int]:
        return self._tokenize(data, add_special=False, parse_special=False)

    def _tokenize(self, data: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        n_room = len(data) + 8  # a byte is one token at most; a few more for BOS, EOS and spaces
        while True:
            tokens = (ctypes.c_int32 * n_room)()
            n = llama_cpp.llama_tokenize(
                self._open_vocab, data, len(data), tokens, n_room, add_special, parse_special
            )
            if n >= 0:
                return tokens[:n]
            if -n <= n_room:
                raise PromptError("the prompt has more tokens than llama.cpp can count")
            n_room = -n

    def _read_piece(self, token: int, *, is_shown: bool = False) -> bytes:
        n_room = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(n_room)
            n = llama_cpp.llama_token_to_piece(self._open_vocab, token, buffer, n_room, 0, is_shown)
            if n >= 0:
                return buffer.raw[:n]
            n_room = -n

    def _words(self) -> list[bytes]:
        """Return every token's text when it stands alone, special ones included."""
        return [self._word(token) for token in range(self._n_vocab)]

    def _word(self, token: int) -> bytes:
        tokens, n_room = (ctypes.c_int32 * 1)(token), _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(n_room)
            n = llama_cpp.llama_detokenize(self._open_vocab, tokens, 1, buffer, n_room, False, True)
            if n >= 0:
                return buffer.raw[:n]
            n_room = -n

    def _text(self, token: int) -> str:
        # An id that is not there makes llama.cpp throw, which ends the process.
        if not 0 <= token < self._n_vocab:
            return ""
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def _can_add_special(self, bos: int, eos: int) -> bool:
        # Source: llama-vocab.cpp, tokenize: asserts that the token to add exists.
        lacks_bos = llama_cpp.llama_vocab_get_add_bos(self._vocab) and bos < 0
        lacks_eos = llama_cpp.llama_vocab_get_add_eos(self._vocab) and eos < 0
        return not (lacks_bos or lacks_eos)


def _encode(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode: {error}") from error
    if len(data) > _MAX_BYTES:
        raise PromptError(f"the prompt has {len(data)} bytes, the most is {_MAX_BYTES}")
    return data


class BreakerTable:
    """DRY's sequence breakers: strings as the sequences of tokens in which they can stand. From any thread.

    Source: llama.cpp src/llama-sampler.cpp, get_overlapping_token_sequences and llama_sampler_init_dry.
    """

    def __init__(
        self, words: Callable[[], list[bytes]], tokenize: Callable[[bytes], list[int]]
    ) -> None:
        """Take what reads every token's text, special ones included, and what tokenizes plain text."""
        self._read_words, self._tokenize = words, tokenize
        self._words: list[bytes] | None = None
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self._reading = threading.Lock()

    def find(self, strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all sequences of tokens for these strings, ascending; the same object for the same strings."""
        key = tuple(strings)
        with self._reading:
            if key not in self._known:
                while len(self._known) >= _N_BREAKERS_KEPT:
                    del self._known[next(iter(self._known))]
                found = (sequence for text in key if text for sequence in self._of(text.encode()))
                self._known[key] = tuple(sorted(set(found)))
            return self._known[key]

    def _of(self, text: bytes) -> Iterator[tuple[int, ...]]:
        """Yield tokens that contain the text, and tokens that end with a part of it, followed by the rest's tokens."""
        if self._words is None:
            self._words = self._read_words()
        tails = {
            text[:i]: tuple(self._tokenize(text[i:])[:_N_TAIL_MAX]) for i in range(1, len(text))
        }
        for token, word in enumerate(self._words):
            if text in word:
                yield (token,)
            else:
                yield from ((token, *tail) for part, tail in tails.items() if word.endswith(part))
