"""Text to tokens and back, over a loaded llama.cpp model; to be called from any thread."""

from __future__ import annotations

import ctypes
import re
import secrets
import threading
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.breakers import find_breakers
from cbatch.backend.llama.chat_template import ChatTemplate
from cbatch.backend.llama.text_marks import TextMark, TextMarks, UnknownCharacters
from cbatch.backend.threads import run_in_fresh_thread
from cbatch.errors import NoThreadError, PromptError
from cbatch.media import marked_messages, medium_of
from cbatch.pictures import NO_PROJECTOR
from cbatch.sounds import NO_ENCODER
from cbatch.support.interrupts import HeldBack
from cbatch.support.picture_tokens import FIRST_PICTURE, PictureTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cbatch.backend import Message
    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.projector import Projector

_MAX_BYTES = 2**31 - 1  # llama_tokenize counts in int32
# Source: llama-vocab.cpp, token_to_piece: what it leaves out of the text
_HIDDEN = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_PIECE_BYTES = 64  # most pieces are shorter; a longer one is asked for twice
_N_PART = 2**11
"""Largest text, in bytes, that is not divided: the time for special tokens grows with the square of the length."""

_N_UNKNOWN = 2**9
"""Least number of characters of a part that begins with one that is in no token. Measured on a million emoji: 0.6 to
0.8 s of CPU with 128 to 1,024 characters, minutes as a whole."""

_N_LONG = 2**14
"""Bytes of a text from which it is worth a look at the whole vocabulary to find how many tokens it has at least."""

_N_DEEP = 2**12
_N_DEEP_BYTES = 1024
"""Bytes of a text from which it is tokenized on a stack of its own, and of stack for each. Measured: a word of 30,000
letters overflows 8 MiB, one of 100,000 does not overflow 128 MiB."""
_STACK_BYTES = 2**23

_BREAKER_BYTES_KEPT = 2**24
"""Most bytes of DRY's breakers that are kept, by their strings. Our choice: ordinary ones take some 100 KiB."""


class LlamaVocab:
    """A model's vocabulary and chat template; implements `cbatch.backend.Vocab`."""

    def __init__(self, model: LlamaModel, *, template: str | None, template_name: str) -> None:
        """Read what never changes of an open model; `template` is Jinja, None without a chat template."""
        self._model, self._pointer = model, llama_cpp.llama_model_get_vocab(model.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._pointer))
        kind = llama_cpp.llama_vocab_type(self._pointer)
        self.has_pieces = kind != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        """Whether tokens stand for text; llama.cpp ends the process where it is asked for text that is not there."""
        bos = int(llama_cpp.llama_vocab_bos(self._pointer))
        eos = int(llama_cpp.llama_vocab_eos(self._pointer))
        self.bos_id, self.bos_text = bos, self._text(bos)
        self.eos_id, self.eos_text = eos, self._text(eos)
        self.fim = self._fim_tokens()
        self._may_add_special = self._can_add_special(bos, eos)
        self.end_tokens = tuple(
            i for i in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(self._pointer, i)
        )
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._shown: dict[int, bytes] = {}
        self._reading = threading.Lock()
        self._breakers: dict[tuple[str, ...], bytes] = {}
        """Those that were found, asked for longest ago first."""
        self.template = template or ""
        self.projector: Projector | None = None
        """What encodes pictures and sounds; set once it is loaded."""
        self._chat = ChatTemplate(
            template, bos_text=self.bos_text, eos_text=self.eos_text, name=template_name
        )

    @property
    def pointer(self) -> Any:
        """`llama_vocab *`, while the model is open.

        Raises:
            EngineClosedError: the model is closed.
        """
        self._model.check_open()
        return self._pointer

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """See `Vocab`. Source: llama.cpp common/sampling.cpp, which gives each of these tokens a bias of −∞."""
        n_tokens = ctypes.c_int32(0)
        found = llama_cpp.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(n_tokens))
        tokens = found[: n_tokens.value] if found else ()
        return tuple(sorted({t for t in tokens if 0 <= t < self.n_vocab}))

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        """See `Vocab`; the first call looks at all ids."""
        if not self.has_pieces:
            return frozenset()
        get_attributes, vocab = llama_cpp.llama_vocab_get_attr, self.pointer
        return frozenset(t for t in range(self.n_vocab) if get_attributes(vocab, t) & _HIDDEN)

    @property
    def adds_bos(self) -> bool:
        """Whether BOS is put before raw prompts."""
        adds = self._may_add_special and llama_cpp.llama_vocab_get_add_bos(self.pointer)
        return self.bos_id >= 0 and bool(adds)

    def start_chats(self) -> None:
        """See `Vocab`."""
        self._chat.start()

    @property
    def tool_refusal(self) -> str:
        """Why chats cannot have tools, naming the template; empty where they can."""
        return self._chat.tool_refusal

    def piece(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; control tokens add none.

        Raises:
            ValueError: no such token id.
        """
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in 0 … {self.n_vocab - 1}")
        known = self._pieces[token]
        if known is None:
            # Two threads may both get here: they write the same bytes.
            known = self._pieces[token] = self._read_piece(token)
        return known

    def shown_piece(self, token: int) -> bytes:
        """Return the bytes of a token, as `piece` does; control tokens are written out."""
        if piece := self.piece(token):
            return piece
        if token not in self._shown:
            self._shown[token] = self._read_piece(token, is_shown=True)
        return self._shown[token]

    def named_token(self, mark: str) -> int | None:
        """Return the token that is this mark and nothing else, and that grammars name by its id; None without one."""
        if not self.has_pieces:
            return None
        try:
            tokens = self._tokenize(_encode(mark), add_special=False, parse_special=True)
        except PromptError:  # it has characters without a token
            return None
        return tokens[0] if len(tokens) == 1 and self.is_named(tokens[0]) else None

    def is_named(self, token: int) -> bool:
        """Whether grammars name a token by its id: one without text, or a mark in angle brackets.

        Source: llguidance's llamacpp.py, which selects the same tokens.
        """
        shown = self.piece(token)
        attributes = llama_cpp.llama_vocab_get_attr(self.pointer, token)
        is_bracketed = shown.startswith(b"<") and shown.endswith(b">")
        is_control = attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        is_mark = is_bracketed and attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        return not shown or bool(is_control or is_mark)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a raw prompt, the model's own prefix (BOS) added where it wants one.

        Special tokens written out in the text are read as such, as by llama-server's `/completion`.
        A text that starts with the BOS token's text gets no second one.

        Raises:
            RequestFailedError: the text is not valid Unicode, or longer than llama.cpp can count, or the model has no
                vocabulary.
        """
        if not self.has_pieces:
            raise PromptError("this model has no vocabulary: give token ids (tokens)")
        data = _encode(text)
        has_bos = bool(self.bos_text) and text.startswith(self.bos_text)
        add_special = self._may_add_special and not has_bos
        return self._tokenize(data, add_special=add_special, parse_special=True)

    def tokenize_pair(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the tokens by which a reranker scores a document; see `cbatch.backend.Vocab`.

        Source: llama.cpp's tools/server/server-common.cpp, format_prompt_rerank.
        """
        template = llama_cpp.llama_model_chat_template(self._model.pointer, b"rerank")
        if template:
            text = _instructed(template.decode(errors="replace"), instruction)
            parts = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda found: parts[found[0]], text)
            return self._tokenize(_encode(text), add_special=False, parse_special=True)
        if instruction is not None:
            raise PromptError("this reranker takes no instruction: leave it out")
        ask = self.pointer
        eos = self.eos_id if self.eos_id >= 0 else int(llama_cpp.llama_vocab_sep(ask))
        end = [eos] if llama_cpp.llama_vocab_get_add_eos(ask) else []
        part = (
            [int(llama_cpp.llama_vocab_sep(ask))] if llama_cpp.llama_vocab_get_add_sep(ask) else []
        )
        begin = [self.bos_id] if llama_cpp.llama_vocab_get_add_bos(ask) else []
        asked, found = (
            self._tokenize(_encode(t), add_special=False, parse_special=False)
            for t in (query, document)
        )
        return [*begin, *asked, *end, *part, *found, *end]

    @cached_property
    def n_added(self) -> tuple[int, int]:
        """How many special tokens are put before a text, and behind it; see `cbatch.backend.Vocab`."""
        if not self.has_pieces or not self._may_add_special:
            return 0, 0
        n_all = len(self._tokenize(b"", add_special=True, parse_special=True))
        return max(0, n_all - self._n_end), self._n_end

    @cached_property
    def _n_end(self) -> int:
        """Number of special tokens added after a text: EOS or SEP. Source: src/llama-vocab.cpp, tokenize."""
        kind = llama_cpp.llama_vocab_type(self.pointer)
        if kind in (llama_cpp.LLAMA_VOCAB_TYPE_RWKV, llama_cpp.LLAMA_VOCAB_TYPE_PLAMO2):
            return 0
        has_sep = kind == llama_cpp.LLAMA_VOCAB_TYPE_WPM
        return int(has_sep or llama_cpp.llama_vocab_get_add_eos(self.pointer))

    def render_text(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> str:
        """Return the text of a chat by the model's template; see `cbatch.backend.Vocab`."""
        self._model.check_open()
        return self._chat.render(messages, variables)

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the tokens of a chat by the model's template; see `cbatch.backend.Vocab`."""
        return self.tokenize(self.render_text(messages, variables))

    @property
    def picture_refusal(self) -> str:
        """Why chats cannot have pictures; empty where they can."""
        return self.projector.picture_refusal if self.projector else NO_PROJECTOR

    @property
    def sound_refusal(self) -> str:
        """Why chats cannot have sound; empty where they can."""
        return self.projector.sound_refusal if self.projector else NO_ENCODER

    @property
    def audio_rate(self) -> int:
        """Samples per second that the model wants of a sound; 0 where it takes none."""
        return 0 if self.sound_refusal or self.projector is None else self.projector.audio_rate

    def picture_tokens(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        check_length: Callable[[int], object] | None = None,
    ) -> PictureTokens:
        """Return the tokens of a chat with pictures or sounds; see `cbatch.backend.Vocab`.

        Source: llama.cpp, common/chat.cpp, to_json_oaicompat, and tools/mtmd/mtmd.cpp: the texts between pictures are
        tokenized each for itself.
        """
        projector = self.projector
        if projector is None:
            raise PromptError(NO_PROJECTOR)
        secret = secrets.token_hex(8)  # which no text has
        marked, parts = marked_messages(messages, lambda i, _: f"<picture {secret} {i}>")
        first, *rest = re.split(rf"<picture {secret} (\d+)>", self.render_text(marked, variables))
        order, others = [int(i) for i in rest[::2]], rest[1::2]
        if sorted(order) != [*range(len(parts))]:
            raise PromptError(
                "the chat template drops or repeats a picture or sound of these messages: load the model with another "
                "chat_template, or give text alone"
            )
        tokens, pictures = self.tokenize(first), []
        if self.n_added[1]:
            del tokens[-self.n_added[1] :]
        for i, text in zip(order, others, strict=True):
            pictures.append(projector.picture(medium_of(parts[i])))
            tokens += pictures[-1].tokens
            tokens += self._tokenize(_encode(text), add_special=False, parse_special=True)
            if check_length is not None:
                check_length(len(tokens))
        if tokens[-1] >= FIRST_PICTURE:
            raise PromptError("the prompt ends with a picture or a sound: text must follow it")
        return PictureTokens(tokens, pictures, sum(p.n_sound_rows for p in pictures))

    @property
    def media_fingerprint(self) -> Mapping[str, str]:
        """What rows of pictures and sounds depend on; see `cbatch.backend.Vocab`."""
        return self.projector.fingerprint if self.projector else {}

    def encode(self, tokens: PictureTokens) -> None:
        """Encode what a chat shows, as far as it is not known; see `cbatch.backend.Vocab`."""
        if self.projector is not None:
            self.projector.encode(tokens.pictures)  # type: ignore[arg-type]  # which `picture_tokens` put there

    def stop_encoding(self) -> None:
        """End what is being rendered or encoded, for nobody waits for it; see `cbatch.backend.Vocab`."""
        self._chat.stop()
        if self.projector is not None:
            self.projector.stop()

    def close(self) -> None:
        """End the chat template's processes."""
        self._chat.close()

    def n_tokens_least(self, text: str) -> int:
        """Return a lower bound of a text's tokens; see `cbatch.backend.Vocab`."""
        n_bytes = len(text.encode(errors="replace"))
        if n_bytes <= _N_LONG or not self._keeps_bytes:
            return 0
        return n_bytes // self._n_piece_max

    @cached_property
    def _keeps_bytes(self) -> bool:
        """Whether tokenizing drops no byte of a text. Source: src/llama-vocab.cpp, tokenize."""
        kind = llama_cpp.llama_vocab_type(self.pointer)
        kinds = llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE
        strips = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
        return kind in kinds and not any(self._attributes(t) & strips for t in self._special)

    @cached_property
    def _n_piece_max(self) -> int:
        """Length of the longest token in bytes, control tokens written out."""
        return max(1, *(len(self.shown_piece(token)) for token in range(self.n_vocab)))

    def _attributes(self, token: int) -> int:
        return int(llama_cpp.llama_vocab_get_attr(self.pointer, token))

    @cached_property
    def _special(self) -> list[int]:
        """The special tokens: llama.cpp looks for them in a text before all others."""
        special = _HIDDEN | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        return [t for t in range(self.n_vocab) if self._attributes(t) & special]

    @cached_property
    def _marks(self) -> TextMarks:
        """The special tokens in a text in which they are read as such."""
        return TextMarks([*map(self._mark, self._special)])

    @cached_property
    def _own_marks(self) -> TextMarks:
        """Those in any text: not the ones that are control tokens, too."""
        return TextMarks(
            [self._mark(t) for t in self._special if not self._attributes(t) & _HIDDEN]
        )

    def _mark(self, token: int) -> TextMark:
        attributes = self._attributes(token)
        return TextMark(
            llama_cpp.llama_vocab_get_text(self.pointer, token),
            strips_left=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP),
            strips_right=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP),
        )

    def dry_breakers(self, strings: Sequence[str]) -> bytes:
        """Return the sequences of tokens that DRY takes for these strings, packed."""
        if not self.has_pieces:
            return b""
        key = tuple(strings)
        with self._reading:
            found = self._breakers.pop(key, None)
            if found is None:
                found = find_breakers(key, self._words, self._tokens_of)
            self._breakers[key] = found
            while sum(map(len, self._breakers.values())) > _BREAKER_BYTES_KEPT:
                del self._breakers[next(iter(self._breakers))]
        return found

    def _tokens_of(self, data: bytes) -> list[int]:
        return self._tokenize(data, add_special=False, parse_special=False)

    def _tokenize(self, data: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text: of one part after the other where it is long."""
        parts = [(data, 0)]
        if len(data) > _N_PART:
            marks = self._marks if parse_special else self._own_marks
            found = marks.parts(data, _N_PART)
            parts = [part for each in found for part in self._parts_of(each)]
        tokens = self._tokens_of_part(
            parts[0][0], add_special=add_special, parse_special=parse_special
        )
        if len(parts) > 1:
            n_text = len(tokens) - (self._n_end if add_special else 0)
            end = tokens[n_text:]
            del tokens[n_text:]
            for part, n_before in parts[1:]:
                more = self._tokens_of_part(part, add_special=False, parse_special=parse_special)
                tokens += more[n_before:]
            tokens += end
        return tokens

    def _parts_of(self, data: bytes) -> Sequence[tuple[bytes, int]]:
        """Divide a text at unknown characters; for each part also the tokens before it that are not of the text."""
        unknown = self._unknown
        if unknown is None or len(data) <= _N_PART:
            return [(data, 0)]
        parts = unknown.parts(data.decode(), _N_UNKNOWN)
        return [(part.encode(), self._n_before if i else 0) for i, part in enumerate(parts)]

    @cached_property
    def _unknown(self) -> UnknownCharacters | None:
        """The characters of no token, of a vocabulary that is searched for them; the first call reads all tokens."""
        if llama_cpp.llama_vocab_type(self.pointer) != llama_cpp.LLAMA_VOCAB_TYPE_SPM:
            return None
        get, pointer = llama_cpp.llama_vocab_get_text, self.pointer
        texts = (get(pointer, token).decode(errors="replace") for token in range(self.n_vocab))
        unknown = UnknownCharacters(texts, [*map(self._mark, self._special)])
        return unknown if unknown.example else None

    @cached_property
    def _n_before(self) -> int:
        """Tokens that llama.cpp puts before a text that begins with an unknown character: of a space, or none."""
        example = self._unknown.example.encode() if self._unknown else b""
        once, twice = (
            len(self._tokens_of_part(text, add_special=False, parse_special=False))
            for text in (example, 2 * example)
        )
        return 2 * once - twice

    def _tokens_of_part(self, data: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        n_room = len(data) + 8  # a byte is one token at most; a few more for BOS, EOS and spaces
        while True:
            tokens = (ctypes.c_int32 * n_room)()
            given = data, len(data), tokens, n_room, add_special, parse_special
            work = partial(self._write_tokens, *given)
            n = work() if len(data) < _N_DEEP else _with_stack(len(data), work)
            if n >= 0:
                return self._checked(tokens[:n])
            if -n <= n_room:
                raise PromptError("the prompt has more tokens than llama.cpp can count")
            n_room = -n

    def _write_tokens(self, *given: Any) -> int:
        with HeldBack(), self._model.in_use():  # a handler that raises leaves no use of it counted
            return int(llama_cpp.llama_tokenize(self.pointer, *given))

    def _checked(self, tokens: list[int]) -> list[int]:
        """Refuse what is not a token. Source: llama-vocab.cpp, which also gives −1 if the vocabulary lacks `<unk>`."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.n_vocab:
            raise PromptError("the model's vocabulary has no tokens for a part of the text")
        return tokens

    def _read_piece(self, token: int, *, is_shown: bool = False) -> bytes:
        if not self.has_pieces:
            return b""
        to_piece, vocab = llama_cpp.llama_token_to_piece, self.pointer
        return _read(lambda buffer, n_room: to_piece(vocab, token, buffer, n_room, 0, is_shown))

    @cached_property
    def _words(self) -> list[bytes]:
        """Every token's text when it stands alone, special ones included."""
        return [self._read_word(token) for token in range(self.n_vocab)]

    def _read_word(self, token: int) -> bytes:
        tokens = (ctypes.c_int32 * 1)(token)
        to_text, vocab = llama_cpp.llama_detokenize, self.pointer
        return _read(lambda buffer, n: to_text(vocab, tokens, 1, buffer, n, False, True))

    def _text(self, token: int) -> str:
        # An id that is not there makes llama.cpp throw, which ends the process.
        if not (self.has_pieces and 0 <= token < self.n_vocab):
            return ""
        text: bytes = llama_cpp.llama_vocab_get_text(self.pointer, token)
        return text.decode(errors="replace")

    def _fim_tokens(self) -> dict[str, int]:
        names = ("pre", "suf", "mid", "rep", "sep")
        found = {n: int(getattr(llama_cpp, f"llama_vocab_fim_{n}")(self._pointer)) for n in names}
        return {name: token for name, token in found.items() if token >= 0}

    def _can_add_special(self, bos: int, eos: int) -> bool:
        # Source: llama-vocab.cpp, tokenize: asserts that the tokens to add exist; BERT adds both to every text.
        if llama_cpp.llama_vocab_type(self.pointer) == llama_cpp.LLAMA_VOCAB_TYPE_WPM:
            return bos >= 0 and llama_cpp.llama_vocab_sep(self.pointer) >= 0
        lacks_bos = llama_cpp.llama_vocab_get_add_bos(self.pointer) and bos < 0
        lacks_eos = llama_cpp.llama_vocab_get_add_eos(self.pointer) and eos < 0
        return not (lacks_bos or lacks_eos)


def _instructed(template: str, instruction: str | None) -> str:
    """Return a reranker's template with another instruction: in its place, or in the line that Qwen's has for it."""
    if instruction is None:
        return template
    for place in (r"\{instruction\}", r"(?<=<Instruct>: ).*"):
        found, n = re.subn(place, lambda _: instruction, template, count=1)
        if n:
            return found
    raise PromptError("this model's template has no place for an instruction: leave it out")


def _with_stack(n_bytes: int, work: Callable[[], int]) -> int:
    """Return what `work` returns, done with a stack for texts of `n_bytes`.

    llama.cpp splits texts by `std::regex` for some vocabularies, which calls itself for every character of a word.

    Raises:
        PromptError: the system has no memory for such a stack.
    """
    try:
        return run_in_fresh_thread(work, n_stack=_STACK_BYTES + _N_DEEP_BYTES * n_bytes)
    except NoThreadError:
        raise PromptError(f"out of memory for the stack to tokenize {n_bytes:,} bytes") from None


def _read(fill: Callable[[Any, int], int]) -> bytes:
    """Return the bytes that a llama.cpp function writes; it returns their number, or minus the room that it needs."""
    n_room = _PIECE_BYTES
    while True:
        buffer = ctypes.create_string_buffer(n_room)
        n = fill(buffer, n_room)
        if n >= 0:
            return buffer.raw[:n]
        n_room = -n


def _encode(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode: {error}") from error
    if len(data) > _MAX_BYTES:
        raise PromptError(f"the prompt has {len(data)} bytes; at most {_MAX_BYTES} are allowed")
    return data
