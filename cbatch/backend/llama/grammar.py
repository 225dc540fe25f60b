"""Structured output: grammars compiled by llguidance, and the masks of tokens that they allow next."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.grammar_sandbox import GrammarSandbox
from cbatch.backend.llama.schema_numbers import find_bad_number
from cbatch.core.plan import BROKEN_ROW, Binding, Chunk, GrammarStep, Slot
from cbatch.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from cbatch.backend.llama.model import LlamaModel
    from cbatch.backend.llama.vocab import LlamaVocab
    from cbatch.options import Grammar

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's `json.dumps` writes it: white space without end could fill an answer."""

_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""A fifth of llguidance's own: with those `((a{1000}){1000}){1000}` holds a step up for 0.5 s and takes 190 MiB, with
these for 0.05 s and 30 MiB. Its eager look at large regexes stays on: without, that one never ends. Measured."""

_N_GBNF_MAX = 2**15
_N_GBNF_RULES_MAX = 256
"""Of a grammar in GBNF: the converter is Python, and takes time with the square of the rules."""

_N_PLAIN_LENGTH = 2**15
_N_PLAIN_PARTS = 250
_N_PLAIN_CROSSED = 3
"""Characters, lines or keys, and patterns up to which a grammar is compiled where none can be tried first."""

_N_TEAM_MIN = 4
"""Threads from which on masks are computed by several: with two, of which the decoder's other one spins on for a while,
it took as long or longer. Measured with 16 rows of 152,000 tokens, and of 1,500."""

_SPECIAL = b"\xff"
"""Before a token's text: it is no text, and a grammar means it by name alone. Source: llguidance, toktrie."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A compiled grammar; opaque to all but this module."""

    matcher: Any
    """At its beginning; never moved, only copied."""
    n_words: int
    """Of 32 tokens each in a mask."""
    end_tokens: tuple[int, ...]


class LlamaGrammars:
    """Implements `Grammars` for a loaded model; llguidance's tokenizer is made with the first grammar."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._trial = GrammarSandbox(_LIMITS)
        self._tokenizer: Any = None

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar; see `Grammars.compile`. It is tried in a process of its own first."""
        source = _source(grammar)
        self._trial.start()
        with self._model.busy:  # which is not freed meanwhile
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(self._model)
        self._try(grammar, source)
        return self._compile(grammar, source)

    def _try(self, grammar: Grammar, source: str) -> None:
        problem = self._trial.find_problem(_of_bytes(source))
        if self._trial.problem and is_suspicious(grammar):
            why = f"that cannot be done here: {self._trial.problem}"
            problem = f"it must be tried in a process of its own first, and {why}"
        if problem:
            raise GrammarError(grammar.kind, _readable(problem))

    def _compile(self, grammar: Grammar, source: str) -> Constraint:
        import llguidance  # slow to import

        limits = llguidance.LLParserLimits(**_LIMITS)
        with self._model.busy:
            self._model.check_open()
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
            _check(grammar, matcher)
            n_words = (self._tokenizer.vocab_size + 31) // 32
            constraint = Constraint(matcher, n_words, self._model.vocab.end_tokens)
            _try_first_mask(grammar, constraint)
        return constraint

    def close(self) -> None:
        """Let go of the tokenizer. Before the model is closed; nothing may be compiled or followed afterwards."""
        self._tokenizer = None
        self._trial.close()


def make_tokenizer(model: LlamaModel) -> Any:
    """Return llguidance's tokenizer for a model's tokens; it uses the model's vocabulary, so free it first.

    A token whose text is not shown in answers is no text for a grammar either.
    """
    import llguidance

    vocab = model.vocab
    pointer = llama_cpp.llama_model_get_vocab(model.pointer)
    tokens = [_token_bytes(vocab, i) for i in range(vocab.n_vocab)]
    end_tokens = list(vocab.end_tokens)
    if not end_tokens:  # llguidance wants one: a token that no row has
        end_tokens = [len(tokens)]
        tokens.append(_SPECIAL + b"<end>")
    tokenize = ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
    return llguidance.LLTokenizer.from_llamacpp(
        tokens=tokens,
        vocab_ptr=pointer,
        tokenize_fptr=tokenize,
        eos_token=end_tokens,
        slices=None,
    )


def _token_bytes(vocab: LlamaVocab, token: int) -> bytes:
    """Return a token's bytes as llguidance wants them: those that are named marked."""
    if not vocab.is_named(token):
        return vocab.piece(token)
    text: bytes = llama_cpp.llama_vocab_get_text(vocab.pointer, token)
    return _SPECIAL + text


# ---- from options to what llguidance reads ----


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    try:
        if problem := find_bad_number(grammar):
            raise ValueError(problem)
        if grammar.kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_STYLE)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            lark = _lark_of_gbnf(grammar.text) if grammar.kind == "gbnf" else grammar.text
            source = LLMatcher.grammar_from_lark(lark)
    except (Exception, RecursionError) as error:
        raise GrammarError(grammar.kind, str(error)) from error
    return str(source)


def is_suspicious(grammar: Grammar) -> bool:
    """Whether a grammar is large, or crosses patterns, which llguidance's own limits do not always stop.

    A chain of 1,200 references overflows the stack; 20,000 properties take 30 s; so do 30 patterns in one `allOf`, and
    15 expressions joined by `&`; `multipleOf` with seven digits and a bound never ends. Measured, llguidance 1.9.1.
    """
    text = grammar.text
    n_crossed = text.count("&") + text.count("~") if grammar.kind == "lark" else 0
    n_patterns = sum(text.count(f'"{key}"') for key in ("pattern", "format", "patternProperties"))
    return (
        len(text) > _N_PLAIN_LENGTH
        or text.count("\n") > _N_PLAIN_PARTS
        or text.count('":') > _N_PLAIN_PARTS
        or text.count('"$ref"') > _N_PLAIN_PARTS
        or n_patterns + n_crossed > _N_PLAIN_CROSSED
        or "multipleOf" in text
    )


def _of_bytes(source: str) -> str:
    """Return a grammar for a vocabulary of bytes, which has no marks."""
    return re.sub(r"<\[\d+\]>", '"<>"', source)


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    n_rules = text.count("::=")
    if len(text) > _N_GBNF_MAX or n_rules > _N_GBNF_RULES_MAX:
        raise ValueError(
            f"{len(text)} characters and {n_rules} rules, the most in GBNF is {_N_GBNF_MAX} and {_N_GBNF_RULES_MAX}: "
            "write it in Lark"
        )
    return str(gbnf_to_lark(re.sub(r"\\\\|\\u([0-9a-fA-F]{4})", _character, text)))


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape: the converter cuts zeros off its number."""
    if escape[1] is None:
        return escape[0]
    code = int(escape[1], 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _check(grammar: Grammar, matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(grammar.kind, problem_of(matcher))


def _try_first_mask(grammar: Grammar, constraint: Constraint) -> None:
    """Compute what may come first: here a grammar that matches nothing fails, and one that is too large."""
    matcher, mask = constraint.matcher.deep_copy(), np.zeros(constraint.n_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    _check(grammar, matcher)
    if not mask.any():
        raise GrammarError(grammar.kind, "no text matches it that these tokens can write")


def problem_of(matcher: Any) -> str:
    """Return what a matcher says is wrong."""
    return _readable(str(matcher.get_error()))


def _readable(message: str) -> str:
    """Return a matcher's message without the dump of its state."""
    said = re.split(r"\n<(?:state|non-verbose|backtrace)", message)[0].strip()
    return "nothing matches it" if said.startswith("NoExtension") else said


# ---- following it ----


@dataclass(eq=False, slots=True)
class _Row:
    """The matcher of one slot."""

    matcher: Any
    banned: NDArray[np.uint32] | None
    """Bits of end tokens that are not to be sampled."""
    forces: bool = True
    """Whether tokens that must follow are not sampled: they have no log-probabilities then."""
    problem: str = ""


class GrammarMatchers:
    """The matchers of all slots: what each may sample next, and what follows from what it sampled. Owner thread."""

    def __init__(self, n_slots: int, n_threads: int) -> None:
        self._n_slots, self._n_threads = n_slots, n_threads
        self._rows: dict[Slot, _Row] = {}
        self._masks = np.zeros((n_slots, 0), np.uint32)
        self._executor: Any = None
        self._filler: ThreadPoolExecutor | None = None

    def bind(self, binding: Binding) -> None:
        """Have a slot follow its constraint from the output so far on; without one, anything."""
        self._rows.pop(binding.slot, None)
        constraint = binding.constraint
        if not isinstance(constraint, Constraint):
            return
        if self._masks.shape[1] != constraint.n_words:
            self._masks = np.zeros((self._n_slots, constraint.n_words), np.uint32)
        forces = binding.n_logprobs is None
        row = _Row(constraint.matcher.deep_copy(), _banned(constraint, binding), forces=forces)
        if binding.output and not row.matcher.consume_tokens(list(binding.output)):
            row.problem = problem_of(row.matcher)
        self._rows[binding.slot] = row

    def masks(self, chunks: Sequence[Chunk]) -> list[NDArray[np.uint32] | None] | None:
        """Return the memory of the masks, one a chunk, to be written by `fill`; None where no chunk wants one."""
        if not self._guided(chunks):
            return None
        return [
            self._masks[c.slot] if c.has_output and c.slot in self._rows else None for c in chunks
        ]

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Write the masks of chunks. Raises nothing: a row that cannot be followed has its problem noted."""
        rows = [(slot, row) for slot, row in self._guided(chunks) if not row.problem]
        self._compute(rows)
        for slot, row in rows:
            if row.matcher.is_error():
                row.problem = problem_of(row.matcher)
            elif row.banned is not None:
                self._masks[slot] &= ~row.banned

    def fill_meanwhile(self, chunks: Sequence[Chunk]) -> Callable[[], object]:
        """Do as `fill` does in another thread; return what waits for it. One at a time."""
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "cbatch-masks")
        return self._filler.submit(self.fill, chunks).result

    def follow(
        self, chunks: Sequence[Chunk], tokens: Sequence[list[int]]
    ) -> tuple[list[list[int]], dict[Slot, GrammarStep]]:
        """Take what was sampled; return it, broken where it breaks a constraint, and what follows from it."""
        sampled = {c.slot: row for c, row in zip(chunks, tokens, strict=True)}
        guided: dict[Slot, GrammarStep] = {}
        for slot, row in self._guided(chunks):
            guidance = _after(row, sampled[slot][-1])
            if guidance.problem:
                sampled[slot] = [BROKEN_ROW]
            if guidance != _NOTHING:
                guided[slot] = guidance
        return list(sampled.values()), guided

    def close(self) -> None:
        """Let go of all matchers."""
        self._rows.clear()
        self._executor = None
        if self._filler is not None:
            self._filler.shutdown()
            self._filler = None

    def _guided(self, chunks: Sequence[Chunk]) -> list[tuple[Slot, _Row]]:
        if not self._rows:
            return []
        slots = (c.slot for c in chunks if c.has_output)
        return [(slot, self._rows[slot]) for slot in slots if slot in self._rows]

    def _compute(self, rows: Sequence[tuple[Slot, _Row]]) -> None:
        masks = self._masks
        n_bytes = masks.strides[0]
        if len(rows) > 1 and self._n_threads >= _N_TEAM_MIN:
            jobs = [(row.matcher, int(slot)) for slot, row in rows]
            self._team().unsafe_compute_mask_ptr(jobs, masks.ctypes.data, n_bytes, len(masks))
            return
        for slot, row in rows:
            row.matcher.unsafe_compute_mask_ptr(masks.ctypes.data + slot * n_bytes, n_bytes)

    def _team(self) -> Any:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._n_threads)
        return self._executor


_NOTHING = GrammarStep()


def _banned(constraint: Constraint, binding: Binding) -> NDArray[np.uint32] | None:
    """Return the bits of end tokens that a sequence does not end at: it ends with its grammar."""
    ignored = [t for t in constraint.end_tokens if t not in binding.stop_tokens]
    if not ignored:
        return None
    bits = np.zeros(constraint.n_words, np.uint32)
    for token in ignored:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def _after(row: _Row, token: int) -> GrammarStep:
    """Take a sampled token; return what must follow, and whether that is all."""
    if not row.problem and token >= 0 and not row.matcher.consume_token(token):
        row.problem = problem_of(row.matcher)
    if row.problem:
        return GrammarStep(problem=row.problem)
    if token < 0 or row.matcher.is_stopped():
        return GrammarStep(is_complete=token >= 0)
    forced: list[int] = row.matcher.compute_ff_tokens() if row.forces else []
    if forced and not row.matcher.consume_tokens(forced):
        row.problem = problem_of(row.matcher)
        return GrammarStep(problem=row.problem)
    return GrammarStep(tuple(forced), is_complete=bool(row.matcher.is_stopped()))
