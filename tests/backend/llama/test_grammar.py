"""Grammars for a real vocabulary: what compiles, what is refused and in what time, what is allowed next."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

import cbatch
from cbatch.backend.llama.grammar import LlamaGrammars, find_problem, grammar_sandbox
from cbatch.backend.llama.grammar_matchers import Constraint, GrammarMatchers
from cbatch.chat.tool_grammar import budget_grammar
from cbatch.core.plan import BROKEN_ROW, Binding, GrammarStep, Slot
from cbatch.core.span import Span
from cbatch.errors import GrammarError
from cbatch.options import GREEDY, Grammar, RunOptions
from cbatch.support.checks import MAX_INT
from tests import schema_fuzz
from tests.backend.llama.vocabularies import RWKV, write_plain_model_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cbatch.backend.llama.model import LlamaModel

SLOT = Slot(1)
A_WHILE_S = 5.0
"""Of the processor: far more than any of these takes, whatever else the machine does."""


@pytest.fixture(scope="module")
def grammars(model: LlamaModel) -> Iterator[LlamaGrammars]:
    made = LlamaGrammars(model)
    yield made
    made.close()


def compiled(grammars: LlamaGrammars, **options: Any) -> Constraint:
    grammar = RunOptions(**options).structure
    assert grammar is not None
    return grammars.compile(grammar)


def tokens_of(model: LlamaModel, text: bytes) -> list[int]:
    """The tokens of an output, which no BOS begins."""
    return model.vocab._tokenize(text, add_special=False, parse_special=True)


def guides(
    constraint: Constraint, *, output: Sequence[int] = (), stops: Sequence[int] = (2, 4)
) -> GrammarMatchers:
    """Guides of two slots, the second of which has the constraint."""
    made = GrammarMatchers(2, 1)
    made.bind(Binding(SLOT, 3, GREEDY, tuple(stops), constraint=constraint, output=tuple(output)))
    return made


def allowed(mask: npt.NDArray[np.uint32], n_vocab: int) -> npt.NDArray[np.bool_]:
    """Return (n_vocab,) bool: whether each token's bit is set."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=n_vocab)
    return bits.astype(np.bool_)


def row() -> Span:
    return Span(SLOT, 5, (7,), has_output=True)


def may_follow(made: GrammarMatchers, n_vocab: int) -> list[int]:
    [mask] = made.masks([row()]) or [None]
    made.fill([row()])
    assert mask is not None
    return [int(token) for token in np.flatnonzero(allowed(mask, n_vocab))]


def texts(model: LlamaModel, tokens: Sequence[int]) -> set[bytes]:
    return {model.vocab.piece(t) for t in tokens}


# ---- what is allowed ----


def test_end_tokens_are_allowed_only_where_the_grammar_is_complete(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    made = guides(compiled(grammars, regex="a+"))
    ends = set(model.vocab.end_tokens)
    assert len(ends) > 1
    assert not ends & set(may_follow(made, model.vocab.n_vocab))
    [token] = tokens_of(model, b"a")
    assert made.follow([row()], [[token]]) == ([[token]], {})
    assert ends < set(may_follow(made, model.vocab.n_vocab))


def test_ignored_end_tokens_are_never_allowed(model: LlamaModel, grammars: LlamaGrammars) -> None:
    [token] = tokens_of(model, b"a")
    made = guides(compiled(grammars, regex="a+"), output=[token], stops=())
    found = may_follow(made, model.vocab.n_vocab)
    assert found
    assert not set(model.vocab.end_tokens) & set(found)


def test_tokens_without_text_are_not_allowed_in_a_json_string(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    output = tokens_of(model, b'"a')
    made = guides(compiled(grammars, json_schema={"type": "string"}), output=output)
    found = may_follow(made, model.vocab.n_vocab)
    assert len(found) > 100
    assert all(model.vocab.piece(t) for t in found)


def test_rows_of_other_slots_have_no_mask(grammars: LlamaGrammars) -> None:
    made = guides(compiled(grammars, regex="a"))
    other = Span(Slot(0), 0, (1,), has_output=True)
    silent = Span(SLOT, 0, (1,), has_output=False)
    assert made.masks([other, silent]) is None
    masks = made.masks([other, row()])
    assert masks is not None
    assert [m is None for m in masks] == [True, False]
    made.bind(Binding(SLOT, 3, GREEDY, ()))  # without a constraint
    assert made.masks([row()]) is None


@pytest.mark.real
def test_grammar_is_followed_where_no_token_ends_answers(tmp_path: Path) -> None:
    path = write_plain_model_of(tmp_path / "model.gguf", RWKV)
    with cbatch.load(path, parallel=2, ctx_per_seq=64, n_threads=1) as engine:
        response = engine.run(["say", "é", "do"], options={"regex": "[a-z]{3}", "max_tokens": 8})
        said, failed, did = response.results(return_errors=True)
        for regex in ("é", "[ab]xé"):
            [result] = engine.run(["say"], options={"regex": regex}).results(return_errors=True)
            assert isinstance(result.error, cbatch.GrammarError)
            assert "no tokens for a text that must follow" in str(result.error)
        assert engine.run(["abc"], options={"max_tokens": 3}).results()[0].finish_reason == "length"
    assert [r.finish_reason for r in (said, did)] == ["stop", "stop"]
    assert all(len(r.text) == 3 and r.text.islower() for r in (said, did))
    assert failed.finish_reason == "error"


@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_of_one_grammar_are_apart(
    model: LlamaModel, grammars: LlamaGrammars, n_threads: int
) -> None:
    constraint, made = compiled(grammars, regex="ab|cd"), GrammarMatchers(3, n_threads)
    [a], [c] = (tokens_of(model, t) for t in (b"a", b"c"))
    for slot, output in enumerate(([], [a], [c])):
        made.bind(Binding(Slot(slot), 3, GREEDY, (), constraint=constraint, output=tuple(output)))
    chunks = [Span(Slot(i), 5, (7,), has_output=True) for i in range(3)]
    masks = made.masks(chunks)
    made.fill(chunks)
    assert masks is not None
    n = model.vocab.n_vocab
    found = [texts(model, np.flatnonzero(allowed(m, n)).tolist()) for m in masks if m is not None]
    assert found[0] >= {b"a", b"c"}
    assert found[1:] == [{b"b"}, {b"d"}]


# ---- what follows ----


def test_what_leaves_no_choice_is_forced_and_ends(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    made = guides(compiled(grammars, json_schema={"const": "hello there"}))
    first = may_follow(made, model.vocab.n_vocab)[0]
    tokens, guided = made.follow([row()], [[first]])
    assert tokens == [[first]]
    text = b"".join(map(model.vocab.piece, (first, *guided[SLOT].forced)))
    assert json.loads(text) == "hello there"
    assert guided[SLOT].is_complete


def test_token_that_is_not_allowed_breaks_the_row_with_a_reason(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    made = guides(compiled(grammars, regex="a"))
    assert made.follow([row()], [[BROKEN_ROW]]) == ([[BROKEN_ROW]], {})
    [b] = tokens_of(model, b"b")
    tokens, guided = made.follow([row()], [[b]])
    assert tokens == [[BROKEN_ROW]]
    assert guided[SLOT].problem


def test_grammar_that_outgrows_its_limits_fails_its_row(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    ways = " | ".join('"a"' + " s" * n for n in range(60))
    behind_the_trial = f"start: /b{{33}}/ s\ns: {ways}\n"
    made = guides(compiled(grammars, grammar=behind_the_trial))
    guided: dict[Slot, GrammarStep] = {}
    for _ in range(60):
        found = may_follow(made, model.vocab.n_vocab)
        guided = made.follow([row()], [[found[-1] if found else 0]])[1]
        if guided.get(SLOT, GrammarStep()).problem:
            break
    assert "max is 2000" in guided[SLOT].problem


# ---- what compiles ----


def test_long_text_is_sampled_until_a_part_is_left_that_is_forced(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    """What must follow takes a time that grows with its square: in the owner's thread, for each choice."""
    text = b'"' + b"ab" * 4000 + b'"'
    made = guides(compiled(grammars, json_schema={"const": "ab" * 4000}))
    found, n_asked = b"", 0
    for _ in range(len(text)):
        longest = max(
            may_follow(made, model.vocab.n_vocab), key=lambda t: len(model.vocab.piece(t))
        )
        _, steps = made.follow([row()], [[longest]])
        found += model.vocab.piece(longest)
        step = steps.get(SLOT)
        if step is not None:
            break
        n_asked += 1
    assert step is not None
    assert not step.problem
    rest = b"".join(map(model.vocab.piece, step.forced))
    assert 0 < len(rest) <= 4096 < len(text) - 1024
    assert found + rest == text
    assert n_asked > 10


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ('root ::= "yes" | "no"', {b"y", b"n"}),
        ('root ::= [\\u0041-\\u0043] "x"', {b"A", b"B", b"C"}),
        ('root ::= ws "x"\nws ::= [ ]*\n', {b" ", b"x"}),
    ],
)
def test_gbnf_is_known_and_converted(
    model: LlamaModel, grammars: LlamaGrammars, text: str, first: set[bytes]
) -> None:
    made = guides(compiled(grammars, grammar=text))
    assert {t[:1] for t in texts(model, may_follow(made, model.vocab.n_vocab))} == first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"grammar": "start: foo\n"}, r'unknown name: "foo"'),
        ({"grammar": 'start: "a" |\n  )\n'}, r"2\(3\)"),
        ({"grammar": "root ::= foo\n"}, "'foo' not found"),
        ({"grammar": "root ::= (\n"}, "line 2"),
        ({"grammar": 'start ::= "a"\nroot ::= start start\n'}, "already exists"),
        ({"json_schema": {"type": "strnig"}}, "strnig"),
        ({"json_schema": {"enum": [1], "type": "string"}}, "Unsatisfiable"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"$ref": "#"}}, "nothing matches"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "not fetch"),
        ({"json_schema": {"$ref": "http://localhost:1/x.json"}}, "not fetch"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    grammars: LlamaGrammars, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(GrammarError, match=said) as caught:
        compiled(grammars, **options)
    assert caught.value.kind in ("regex", "lark", "gbnf", "json_schema")
    assert caught.value.reason in str(caught.value)
    assert "<state>" not in caught.value.reason


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"const": "<[5]>"}},
        {"json_schema": {"properties": {"<|im_start|>": {"enum": ["<[^5]>"]}}}},
        {"regex": "a<[5]>"},
        {"grammar": 'start: "<[5]>" /"<[5]>/ // "a\n'},
        {"grammar": "start: <|im_start|> <[700-701]> <[^5,700]>{2} <[*]>"},
    ],
    ids=str,
)
def test_grammar_names_tokens_of_the_vocabulary_outside_of_texts(
    grammars: LlamaGrammars, options: dict[str, Any]
) -> None:
    assert compiled(grammars, **options)


def test_grammar_that_names_an_unknown_token_is_told_the_known_ones(
    grammars: LlamaGrammars,
) -> None:
    with pytest.raises(GrammarError, match=r"unknown special token.*<\|im_end\|>"):
        compiled(grammars, grammar="start: <nothing>")


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def doubled(depth: int, by: str) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"a{i}": {by: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$defs": {**defs, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


NASTY: dict[str, Grammar] = {
    "deep": Grammar("json_schema", nested(500)),
    "many values": Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    "loop of all": Grammar(
        "json_schema",
        '{"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"},{"type":"string"}]}}}',
    ),
    "doubling all": Grammar("json_schema", json.dumps(doubled(25, "allOf"))),
    "many properties": Grammar(
        "json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(20_000)}})
    ),
    "multiple": Grammar("json_schema", '{"type":"integer","multipleOf":999999937}'),
    "long string": Grammar("json_schema", '{"type":"string","minLength":1000000}'),
    "patterns": Grammar(
        "json_schema",
        json.dumps({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(10, 20)]}),
    ),
    "groups": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "crossed patterns": Grammar(
        "json_schema",
        json.dumps({"type": "string", "allOf": [{"pattern": f"x{i}"} for i in range(30)]}),
    ),
    "crossed terminals": Grammar(
        "lark",
        "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i + 1}}}/" for i in range(20)) + "\n",
    ),
    "chain of rules": Grammar(
        "lark",
        "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(4000)) + 'r4000: "z"\n',
    ),
    "doubling terminals": Grammar(
        "lark",
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(2400)) + 'T2400: "a"\n',
    ),
    "counts": Grammar("regex", "((a{1000}){1000}){1000}"),
    "exponential": Grammar("regex", "(a|b)*a(a|b){30}"),
    "alternatives": Grammar("regex", "|".join(f"x{i}.*y{i}" for i in range(3000))),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | s s s | "a" | ""\n'),
    "repeated": Grammar("lark", 'start: a{100000000}\na: "x" b\nb: "y"\n'),
    "json in lark": Grammar("lark", "start: %json " + "[" * 3000),
    "long gbnf": Grammar("gbnf", "root ::= " + '"a" ' * 10_000),
    "rules of gbnf": Grammar(
        "gbnf", "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(2000))
    ),
    "groups of gbnf": Grammar("gbnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
}


@pytest.mark.parametrize("named", ["/nowhere/python", "", "/bin/true"])
def test_where_nothing_can_be_tried_only_usual_grammars_are_compiled(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr("sys.executable", named)
    grammars = LlamaGrammars(model)
    usual = json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(50)}})
    for _ in range(2):
        assert grammars.compile(Grammar("json_schema", usual))
        with pytest.raises(OSError, match="not possible here"):
            grammars.compile(NASTY["crossed terminals"])
        with pytest.raises(OSError, match="not possible here"):
            grammars.compile(Grammar("json_schema", '{"type":"number","multipleOf":-15793585}'))
    grammars.close()


# ---- what would end the process ----

LEAST = -(2**63)
DEADLY: dict[str, dict[str, Any]] = {
    "const": {"json_schema": {"const": LEAST}},
    "one above": {"json_schema": {"const": LEAST + 512}},
    "enum": {"json_schema": {"enum": ["a", LEAST]}},
    "both bounds": {"json_schema": {"type": "integer", "minimum": LEAST, "maximum": LEAST}},
    "saturating bounds": {
        "json_schema": {"type": "integer", "minimum": 11 * LEAST, "maximum": 11 * LEAST}
    },
    "nested": {"json_schema": {"properties": {"a": {"items": {"enum": [[{"b": LEAST}]]}}}}},
    "as a float": {"json_schema": '{"type":"integer","minimum":-1e19,"maximum":-1e19}'},
    "format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": LEAST}}}
    },
    "in lark": {"grammar": f'start: "a" %json {{"const": {LEAST}}}'},
    "multiple without end": {"json_schema": {"type": "number", "multipleOf": -15793585}},
}


@pytest.mark.parametrize("options", DEADLY.values(), ids=DEADLY.keys())
def test_grammar_that_ends_its_compiler_is_refused_the_next_compiles(
    grammars: LlamaGrammars, options: dict[str, Any]
) -> None:
    with pytest.raises(GrammarError):
        compiled(grammars, **options)
    assert compiled(grammars, regex="a")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "maximum": 99223372036854775808}, "99223372036854775808 .maximum."),
        ({"type": "number", "minimum": -1e300}, "-1e.300 .minimum."),
        ({"const": 9007199254740993}, "9007199254740993 .const."),
        ({"enum": [1, [2, {"a": 18446744073709551615}]]}, "18446744073709551615 .a."),
        ({"properties": {"default": {"const": 2**53 + 1}}}, "9007199254740993 .const."),
        ({"const": 10**400}, "of 401 digits"),
    ],
)
def test_number_that_would_become_another_is_refused_by_name(
    grammars: LlamaGrammars, schema: dict[str, Any], said: str
) -> None:
    for options in (
        {"json_schema": schema},
        {"grammar": f"start: %json {json.dumps(schema)}"},
    ):
        with pytest.raises(GrammarError, match=said):
            compiled(grammars, **options)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"const": 2**63 - 1}, "9223372036854775807"),
        ({"const": 2**53}, "9007199254740992"),
        ({"const": -(2**63) + 1024}, "-9223372036854774784"),
        ({"const": 1e30}, "1" + "0" * 30),
        ({"const": True, "default": 2**70, "examples": [2**70]}, "true"),
    ],
)
def test_number_at_the_edge_is_followed_exactly(
    model: LlamaModel, grammars: LlamaGrammars, schema: dict[str, Any], answer: str
) -> None:
    made, text = guides(compiled(grammars, json_schema=schema)), b""
    for _ in range(len(answer)):
        token = may_follow(made, model.vocab.n_vocab)[-1]
        said = made.follow([row()], [[token]])[1].get(SLOT, GrammarStep())
        text += b"".join(map(model.vocab.piece, (token, *said.forced)))
        if said.is_complete:
            break
    assert text.decode() == answer


def test_budget_of_thinking_is_followed_in_a_vocabulary(
    model: LlamaModel, grammars: LlamaGrammars
) -> None:
    marks = ("<s>", "<|im_start|>")
    begin, end = (model.vocab.named_token(mark) for mark in marks)
    assert begin is not None
    assert end is not None
    [other] = tokens_of(model, b"a")
    everything = [*range(model.vocab.n_vocab)]

    def limit(n_tokens: int) -> Constraint:
        named_token = model.vocab.named_token
        grammar = budget_grammar(marks, n_tokens, thinking="may", named_token=named_token)
        return grammars.compile(grammar)

    made = guides(limit(2))
    assert may_follow(made, len(everything)) == everything
    said = [made.follow([row()], [[token]])[1] for token in (begin, other, other)]
    assert said == [{}, {}, {SLOT: GrammarStep((end,))}]
    for token in (begin, *[other] * 9):
        assert may_follow(made, len(everything)) == everything
        assert made.follow([row()], [[token]]) == ([[token]], {})
    made = guides(limit(2), output=[begin, other, other])
    assert may_follow(made, len(everything)) == [end]
    assert guides(limit(MAX_INT)).follow([row()], [[begin]]) == ([[begin]], {})
    assert guides(limit(0)).follow([row()], [[begin]])[1] == {SLOT: GrammarStep((end,))}


@pytest.mark.real
def test_trial_finds_what_ends_the_compiler_and_starts_again_once_closed() -> None:
    from llguidance import LLMatcher

    trial = grammar_sandbox()
    for name, make in (
        ("const", LLMatcher.grammar_from_json_schema),
        ("saturating bounds", LLMatcher.grammar_from_json_schema),
        ("in lark", LLMatcher.grammar_from_lark),
    ):
        structure = RunOptions(**DEADLY[name]).structure
        assert structure is not None
        trial.start()
        assert find_problem(trial, make(structure.text))
        assert not find_problem(trial, LLMatcher.grammar_from_regex("a"))
        trial.close()
        trial.close()


@pytest.mark.real
def test_schemas_of_every_kind_end_no_process() -> None:
    outcome = schema_fuzz.run(7, n_cases=60)
    assert outcome.found == []
    assert outcome.n_cases == 60
    assert {"refused", "complete", "followed"} <= outcome.counts.keys()


@pytest.mark.parametrize("grammar", NASTY.values(), ids=NASTY.keys())
def test_nasty_grammar_is_compiled_or_refused_in_bounded_time_and_steps(
    model: LlamaModel, grammars: LlamaGrammars, grammar: Grammar
) -> None:
    start = time.process_time()
    try:
        made = guides(grammars.compile(grammar))
    except GrammarError:
        assert time.process_time() - start < A_WHILE_S * 4
        return
    assert time.process_time() - start < A_WHILE_S
    rng = np.random.default_rng(0)
    for _ in range(30):
        start = time.process_time()
        found = may_follow(made, model.vocab.n_vocab)
        token = int(rng.choice(found)) if found else 0
        said = made.follow([row()], [[token]])[1].get(SLOT, GrammarStep())
        assert time.process_time() - start < A_WHILE_S / 5
        if said.problem or said.is_complete:
            break
