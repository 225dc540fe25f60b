"""Structured output: grammars compiled by llguidance, each tried in a process of its own first."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.llama.grammar_matchers import Constraint, readable_problem
from cbatch.backend.llama.sandbox import Limits, NoAnswerError, Sandbox
from cbatch.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
"""A fifth of llguidance's own limits. `((a{1000}){1000}){1000}` delays a step by 0.5 s and takes 190 MiB under those,
0.05 s and 30 MiB under these. Its eager check of large regexes stays on: without it that one never ends. Measured."""

_N_GBNF_MAX = 2**15
_N_GBNF_RULES_MAX = 256
"""Most characters and rules of a grammar in GBNF: the converter's time grows with the square of the rules."""

_N_PLAIN_LENGTH = 2**15
_N_PLAIN_PARTS = 250
_N_PLAIN_CROSSED = 3
"""Most characters, lines or keys, and patterns of a grammar that is compiled where none can be tried first."""

_QUICK_S = 0.5
"""What ordinary grammars take at most; one with 400 properties takes 0.3 s. Measured."""

_SPECIAL = b"\xff"
"""Marks a token that is not text: grammars can only name it. Source: llguidance, toktrie."""


class LlamaGrammars:
    """Implements `Grammars` for a loaded model; llguidance's tokenizer is made with the first grammar."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._sandbox, self._quick_sandbox = grammar_sandbox(), grammar_sandbox()
        self._tokenizer: Any = None
        self._making = threading.Lock()
        """Held while the tokenizer is made."""

    def compile(self, grammar: Grammar) -> Constraint:
        """Compile a grammar, after a process of its own tried it; see `Grammars.compile`."""
        return self._compiled(grammar, self._sandbox, None)

    def compile_quickly(self, grammar: Grammar) -> Constraint | None:
        """Compile a grammar that its process tries within a moment; see `Grammars.compile_quickly`."""
        try:
            return self._compiled(grammar, self._quick_sandbox, _QUICK_S)
        except NoAnswerError:
            self._quick_sandbox.start()  # it gets ready while the caller goes on
            return None

    def takes_long(self, grammar: Grammar) -> bool:
        """Whether a grammar may take long; see `Grammars.takes_long`."""
        return is_suspicious(grammar)

    def _compiled(self, grammar: Grammar, sandbox: Sandbox, within_s: float | None) -> Constraint:
        """Compile a grammar. Raises a `NoAnswerError` if its trial does not end `within_s`, where given."""
        if not self._model.vocab.has_pieces:
            raise GrammarError(
                grammar.kind, "this model has no vocabulary, so its tokens have no text"
            )
        source = _source(grammar)
        sandbox.start()
        with self._model.in_use(), self._making:
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(self._model)
        problem = _problem_of(grammar, source, sandbox, within_s)
        if not problem:
            with self._model.in_use():
                constraint = self._compile(source)
                problem = _first_problem(constraint)
        if problem:
            raise GrammarError(grammar.kind, readable_problem(problem))
        return constraint

    def _compile(self, source: str) -> Constraint:
        import llguidance  # slow to import

        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        vocab = self._model.vocab
        n_words, n_row_words = ((n + 31) // 32 for n in (self._tokenizer.vocab_size, vocab.n_vocab))
        return Constraint(matcher, n_words, n_row_words, vocab.end_tokens)

    def close(self) -> None:
        """Drop the tokenizer, before the model is closed; nothing may be compiled or followed afterwards."""
        self._tokenizer = None
        self._sandbox.close()
        self._quick_sandbox.close()


def check_grammar(grammar: Grammar) -> None:
    """Try a grammar without a model.

    Raises:
        GrammarError: no model could follow it.
    """
    # where it cannot be tried now, its requests will tell
    with closing(grammar_sandbox()) as sandbox, suppress(OSError):
        if problem := find_problem(sandbox, _tried(grammar, _source(grammar))):
            raise GrammarError(grammar.kind, readable_problem(problem))


_TOKENS = re.compile(
    r'"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)*/?'
    r"|(?P<others><\[\^[^]<\n]*]>)|(?P<token><(?!\[\*]>)[^<>\s]+>)"
)
"""The tokens that a grammar in Lark names; and its texts and expressions, in which nothing is one. An unclosed one ends
with its line, or many would take long."""


def _tried(grammar: Grammar, source: str) -> str:
    """Return what to try of a grammar with a vocabulary of bytes, which has none of the tokens that it names."""
    if grammar.kind in ("json_schema", "regex"):
        return source
    stands_for = {"others": "<[*]>", "token": '"<>"'}
    return _TOKENS.sub(lambda found: stands_for.get(found.lastgroup or "", found[0]), source)


def grammar_sandbox() -> Sandbox:
    """Return a sandbox that tries grammars."""
    job = Path(__file__).with_name("grammar_job.py")
    return Sandbox(str(job), _LIMITS, Limits(cpu_s=3, wall_s=30.0, n_bytes=2 * 2**30))


def _problem_of(grammar: Grammar, source: str, sandbox: Sandbox, within_s: float | None) -> str:
    problem = find_problem(sandbox, _tried(grammar, source), within_s)
    if sandbox.problem and is_suspicious(grammar):
        raise OSError(
            f"it must be tested in a separate process first, which is not possible here: {sandbox.problem}"
        )
    return problem


def find_problem(sandbox: Sandbox, source: str, within_s: float | None = None) -> str:
    """Return what is wrong with a grammar; "" if some steps under it worked, or no process can be started.

    Raises:
        NoAnswerError: the trial does not end `within_s`, where given.
        OSError: the process was ended from outside, or got too little of a processor.
    """
    try:
        return str(sandbox.ask(source, within_s))
    except UnicodeEncodeError as error:
        return f"it is not valid Unicode: {error}"
    except NoAnswerError as error:
        if sandbox.problem:
            return ""
        if within_s is not None:
            raise
        if not error.is_lasting:
            raise OSError("testing it took too much time or memory: try again") from error
        return "compiling it takes more time, memory or depth than is allowed: simplify it"


def make_tokenizer(model: LlamaModel) -> Any:
    """Return llguidance's tokenizer for a model's tokens; it uses the model's vocabulary, so free it first.

    A token whose text is not part of answers is not text for grammars either.
    """
    import llguidance

    vocab = model.vocab
    pointer = llama_cpp.llama_model_get_vocab(model.pointer)
    tokens = [_token_bytes(vocab, i) for i in range(vocab.n_vocab)]
    end_tokens = list(vocab.end_tokens)
    if not end_tokens:  # llguidance needs one: an id that no row of logits has
        end_tokens = [len(tokens)]
        tokens.append(_SPECIAL + b"<end>")
    tokenize = ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
    return llguidance.LLTokenizer.from_llamacpp(
        tokens=tokens, vocab_ptr=pointer, tokenize_fptr=tokenize, eos_token=end_tokens, slices=None
    )


def _token_bytes(vocab: LlamaVocab, token: int) -> bytes:
    """Return a token's bytes as llguidance takes them, with the mark where grammars name the token."""
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
    """Whether a grammar is large, or combines patterns: llguidance's own limits do not always stop these.

    A chain of 1,200 references overflows the stack; 20,000 properties take 30 s; so do 30 patterns in one `allOf`, and
    15 expressions joined by `&`; `multipleOf` with seven digits and a bound never ends. Measured, llguidance 1.9.1.
    """
    text = grammar.text
    if len(text) > _N_PLAIN_LENGTH:  # the others would take long: the owner's thread asks
        return True
    n_crossed = text.count("&") + text.count("~") if grammar.kind == "lark" else 0
    n_patterns = sum(text.count(f'"{key}"') for key in ("pattern", "format", "patternProperties"))
    return (
        text.count("\n") > _N_PLAIN_PARTS
        or text.count('":') > _N_PLAIN_PARTS
        or text.count('"$ref"') > _N_PLAIN_PARTS
        or n_patterns + n_crossed > _N_PLAIN_CROSSED
        or "multipleOf" in text
    )


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    n_rules = text.count("::=")
    if len(text) > _N_GBNF_MAX or n_rules > _N_GBNF_RULES_MAX:
        raise ValueError(
            f"it has {len(text)} characters and {n_rules} rules; the limits of GBNF are {_N_GBNF_MAX} and "
            f"{_N_GBNF_RULES_MAX}: write it in Lark"
        )
    return str(gbnf_to_lark(re.sub(r"\\\\|\\u([0-9a-fA-F]{4})", _character, text)))


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape: the converter drops zeros of its number."""
    if escape[1] is None:
        return escape[0]
    code = int(escape[1], 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _first_problem(constraint: Constraint) -> str:
    """Compute which tokens may come first; return why a grammar is too large or matches nothing, else nothing."""
    matcher, mask = constraint.matcher, np.zeros(constraint.n_words, np.uint32)
    if not matcher.is_error():
        matcher = matcher.deep_copy()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        return str(matcher.get_error())
    return "" if mask.any() else "no text that this model's tokens can write matches it"


# ---- numbers in schemas: llguidance reads all of them as 64-bit floats ----

_LEAST = -(2**63) + 1024
"""The next float below is -2^63, by which llguidance 1.9.1 overflows its stack. Measured."""
_MOST = 2**63 - 1
"""It is read as 2^63 and clipped to itself; any other number that is not a float becomes another number."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOTES = ("default", "examples", "example", "title", "description", "$comment")
"""Keys whose values allow or forbid nothing, except for properties of such names, which are objects."""

_EMBEDDED = re.compile(r"%json\s*")


def find_bad_number(grammar: Grammar) -> str:
    """Return why llguidance would misread a number in a grammar's schemas; empty where it reads all exactly.

    Raises:
        ValueError, RecursionError: a schema is not JSON.
    """
    for schema in _schemas(grammar):
        for key, number in _numbers(schema):
            if not _is_exact(key, number):
                return (
                    f"the number {_shown(number)} ({key}) cannot be enforced exactly: integers and bounds must be "
                    f"{_LEAST} … {_MOST}, and beyond ±2^53 exact as 64-bit floats; "
                    "use a string with a pattern instead"
                )
    return ""


def _schemas(grammar: Grammar) -> Iterator[Any]:
    if grammar.kind == "json_schema":
        yield json.loads(grammar.text)
    elif grammar.kind in ("lark", "tool_choice", "thinking_budget"):
        for place in _EMBEDDED.finditer(grammar.text):
            # no JSON: it stands in a text or a comment; otherwise the compiler reports it
            with suppress(ValueError):
                yield json.JSONDecoder().raw_decode(grammar.text, place.end())[0]


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that restrict what is allowed, each with its key."""
    todo: list[tuple[str, Any]] = [("schema", schema)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(k, v) for k, v in value.items() if k not in _NOTES or isinstance(v, dict)]
        elif isinstance(value, list):
            todo += [(key, v) for v in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _is_exact(key: str, number: float) -> bool:
    if isinstance(number, float) and key not in _BOUNDS:
        return True
    return number == _MOST or (_LEAST <= number <= _MOST and float(number) == number)


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:30]}… of {len(text)} digits"
