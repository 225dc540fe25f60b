"""No grammar ends the process: `python -m tests.schema_fuzz --minutes 10 --seed 1` looks for one that does.

Schemas with numbers from the edges of every type, expressions and grammars with counts from there, references in
circles, and texts that are broken. Each is compiled and followed for some tokens in a process that must outlive it.
What is neither done nor refused by `GrammarError` or `ConfigError` is printed with the case that brings it again:
`python -m tests.schema_fuzz --seed 1 --case 17`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cbatch.backend.llama.grammar import LlamaGrammars

T = TypeVar("T")

_N_IN_CHILD = 200
_N_FOLLOWED = 24
_PATIENCE_S = 90.0
"""A trial may take 30 s by the clock; three times that is a hang."""


# ---- numbers from the edges ----


def _integers() -> list[str]:
    powers = [2**n for n in (0, 1, 7, 8, 15, 16, 31, 32, 52, 53, 62, 63, 64, 65, 127, 128, 1024)]
    powers += [10**n for n in (1, 2, 9, 10, 15, 16, 17, 18, 19, 20, 38, 100, 308, 309)]
    near = [sign * p + d for p in powers for sign in (1, -1) for d in (-1, 0, 1)]
    return [str(n) for n in dict.fromkeys([0, *near])]


def _words(text: str) -> list[str]:
    return text.split()


INTEGERS = _integers()
FLOATS = _words(
    """
0.0 -0.0 0.1 -0.1 0.5 1.5 -1.5 1e-1 1.0 1e0 1e1 1E+2 3.14159 0.30000000000000004 123456789.123456789
5e-324 4.9e-325 2.2250738585072014e-308 1e-308 1e-400 1e-17 1e-10 1e15 1e16 1e17 1e18 1e19 1e22 1e38
3.4028235e38 1e39 1e100 1e308 1.7976931348623157e308 1.7976931348623159e308 1e309 1e400 1e999999999999
9007199254740993.0 9223372036854775807.5 -9223372036854775808.0 -9.223372036854775808e18
18446744073709551616.0 NaN Infinity -Infinity 1e 01 +1 .5 1. 0x10
"""
)
COUNTS = _words(
    """
0 1 2 3 7 8 100 255 256 1000 65535 65536 1000000 2147483647 2147483648 4294967295 4294967296
9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 -1 1.5 1e3 1e400
"""
)
FORMATS = _words(
    """
date date-time time duration email hostname ipv4 ipv6 uuid uri regex unknown
"""
)
ATOMS = _words(
    r"""
a b . \d \w \s \b ^ $ [a-z] [^a] \p{L} \p{Han} [\x00-\x{10FFFF}] (?i:k) (?s:.) \x{110000} \u{0} é 😀
[z-a] [] [[:alpha:]&&[^a]] (?=a) \1 (?-u:\xff) ()
"""
)
GBNF_ATOMS = _words(
    r"""
"a" "" [a-z] [^a] [\x00-\xff] [\u0000-\U0010FFFF] "\uD800" [] . [z-a] unknown
"""
)
LARK_ATOMS = _words(
    """
"a" "" "A"i T INT unknown <[*]> <[^1]> <|x|> <|im_end|> "a".."z" "z".."a"
"""
)
_LONG = "9" * 5000


class Dice:
    """Makes one case of a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._n_parts = 0

    def options(self) -> dict[str, Any]:
        """Return the options of a request."""
        kinds = {
            "json_schema": self._schema_text,
            "regex": lambda: self._regex(4),
            "grammar": self._lark,
            "gbnf": self._gbnf,
            "format": self._response_format,
            "tools": self._tools,
        }
        kind = self._random.choices([*kinds], [10, 4, 3, 2, 1, 2])[0]
        text = kinds[kind]()
        if self._chance(0.05):
            text = self._broken(text)
        name = {"gbnf": "grammar", "format": "response_format"}.get(kind, kind)
        return {name: text}

    def _broken(self, text: str) -> str:
        for _ in range(self._random.randint(1, 3)):
            at = self._random.randrange(len(text) + 1)
            n_cut = self._random.choice([0, 0, 1, 2])
            text = (
                text[:at] + self._pick(["", "\\", '"', "{", "é", "\x00", "9"]) + text[at + n_cut :]
            )
        return text

    def _pick(self, among: Sequence[T]) -> T:
        return self._random.choice(among)

    def _one(self, *makers: Callable[[], str]) -> str:
        return self._pick(makers)()

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    # ---- schemas, as text: json would write numbers in its own way ----

    def _number(self) -> str:
        if self._chance(0.02):
            return self._pick([_LONG, "-" + _LONG, f"0.{_LONG}", f"1e{_LONG}"])
        if self._chance(0.3):
            return self._pick(FLOATS)
        if self._chance(0.3):
            return str(self._random.randint(-(2**66), 2**66) >> self._random.randrange(66))
        return self._pick(INTEGERS)

    def _count(self) -> str:
        return self._pick(COUNTS[:8]) if self._chance(0.5) else self._pick(COUNTS)

    def _schema_text(self) -> str:
        depth = self._pick([1, 1, 2, 2, 3, 4])
        body = self._schema(depth)
        if self._chance(0.1):
            n = self._pick([2, 10, 60, 130, 300])
            wrap = self._pick(
                [
                    ('{"items":', "}"),
                    ('{"properties":{"a":', "}}"),
                    ('{"anyOf":[', "]}"),
                    ('{"not":', "}"),
                ]
            )
            body = wrap[0] * n + body + wrap[1] * n
        if self._chance(0.15):
            names = [f"d{i}" for i in range(self._pick([1, 2, 5, 40]))]
            defs = ",".join(f'"{n}":{self._referring(names)}' for n in names)
            body = f'{{"$ref":"#/$defs/{self._pick(names)}","$defs":{{{defs}}}}}'
        return body

    def _referring(self, names: list[str]) -> str:
        ref = f'{{"$ref":"#/$defs/{self._pick(names)}"}}'
        other = f'{{"$ref":"#/$defs/{self._pick(names)}"}}'
        return self._pick(
            [
                ref,
                f'{{"allOf":[{ref},{other}]}}',
                f'{{"anyOf":[{ref},{self._schema(1)}]}}',
                f'{{"type":"object","properties":{{"a":{ref},"b":{self._schema(1)}}}}}',
                f'{{"type":"array","items":{ref},"minItems":{self._count()}}}',
                f'{{"$ref":"#/$defs/{self._pick(names)}/items"}}',
                self._schema(1),
            ]
        )

    def _schema(self, depth: int) -> str:
        if self._chance(0.03):
            return self._pick(["true", "false", "{}", "null", "[]", "1", '"a"'])
        makers = [self._numeric, self._numeric, self._string, self._listed]
        if depth > 0:
            makers += [self._array, self._object, self._joined]
        return self._pick(makers)(depth)

    def _of(self, parts: dict[str, str]) -> str:
        kept = [f'"{k}":{v}' for k, v in parts.items()]
        self._random.shuffle(kept)
        return "{" + ",".join(kept) + "}"

    def _some(self, parts: dict[str, Callable[[], str]]) -> dict[str, str]:
        return {k: make() for k, make in parts.items() if self._chance(0.4)}

    def _numeric(self, depth: int) -> str:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        parts = self._some(dict.fromkeys(names, self._number))
        if self._chance(0.3) and "minimum" in parts:
            parts["maximum"] = parts["minimum"]
        if self._chance(0.9):
            parts["type"] = self._pick(
                ['"integer"', '"number"', '["integer","null"]', '["number","string"]']
            )
        return self._of(parts)

    def _string(self, depth: int) -> str:
        parts = self._some(
            {
                "minLength": self._count,
                "maxLength": self._count,
                "pattern": lambda: json.dumps(self._regex(2)),
                "format": lambda: json.dumps(self._pick(FORMATS)),
            }
        )
        return self._of({"type": '"string"', **parts})

    def _listed(self, depth: int) -> str:
        if self._chance(0.5):
            return f'{{"const":{self._value(2)}}}'
        values = [self._value(2) for _ in range(self._pick([0, 1, 2, 5]))]
        return f'{{"enum":[{",".join(values)}]}}'

    def _value(self, depth: int) -> str:
        makers: list[Callable[[], str]] = [
            self._number,
            self._number,
            lambda: json.dumps(self._pick(["", "a", "é\n", "\x7f", "😀" * 9])),
        ]
        makers += [lambda: self._pick(["null", "true", "false"])]
        if depth > 0:
            makers += [
                lambda: f"[{self._value(depth - 1)},{self._value(depth - 1)}]",
                lambda: f'{{"a":{self._value(depth - 1)},"":{self._value(depth - 1)}}}',
            ]
        return self._pick(makers)()

    def _array(self, depth: int) -> str:
        parts = self._some(
            {
                "items": lambda: self._schema(depth - 1),
                "prefixItems": lambda: f"[{self._schema(depth - 1)},{self._schema(depth - 1)}]",
                "minItems": self._count,
                "maxItems": self._count,
                "contains": lambda: self._schema(0),
                "uniqueItems": lambda: "true",
            }
            if self._chance(0.1)
            else {
                "items": lambda: self._schema(depth - 1),
                "prefixItems": lambda: f"[{self._schema(depth - 1)}]",
                "minItems": self._count,
                "maxItems": self._count,
            }
        )
        return self._of({"type": '"array"', **parts})

    def _object(self, depth: int) -> str:
        names = [
            self._pick(["a", "b", "c", "", "é", '"', "\\"])
            for _ in range(self._random.randrange(4))
        ]
        fields = ",".join(
            f"{json.dumps(n)}:{self._schema(depth - 1)}" for n in dict.fromkeys(names)
        )
        parts = self._some(
            {
                "required": lambda: json.dumps(names),
                "additionalProperties": lambda: self._pick(
                    ["false", "true", self._schema(depth - 1)]
                ),
                "minProperties": self._count,
                "maxProperties": self._count,
                "patternProperties": lambda: (
                    f"{{{json.dumps(self._regex(1))}:{self._schema(depth - 1)}}}"
                ),
            }
        )
        return self._of({"type": '"object"', "properties": f"{{{fields}}}", **parts})

    def _joined(self, depth: int) -> str:
        key = self._pick(["anyOf", "allOf", "oneOf", "not", "if"])
        if key in ("not", "if"):
            return f'{{"{key}":{self._schema(depth - 1)},"type":"integer"}}'
        members = ",".join(self._schema(depth - 1) for _ in range(self._pick([1, 2, 3])))
        extra = ',"minimum":' + self._number() if self._chance(0.3) else ""
        return f'{{"{key}":[{members}]{extra}}}'

    def _response_format(self) -> str:
        return (
            f'{{"type":"json_schema","json_schema":{{"name":"a","schema":{self._schema_text()}}}}}'
        )

    def _tools(self) -> str:
        return self._object(3)

    # ---- expressions and grammars ----

    def _regex(self, depth: int) -> str:
        if depth <= 0 or self._chance(0.2):
            return self._pick(ATOMS)
        inner = self._regex(depth - 1)
        return self._one(
            lambda: inner + self._regex(depth - 1),
            lambda: f"({inner}|{self._regex(depth - 1)})",
            lambda: f"({inner})" + self._pick(["*", "+", "?", "*?", "**"]),
            lambda: f"({inner}){{{self._count()},{self._count()}}}",
            lambda: f"({inner}){{{self._count()},}}",
            lambda: f"({inner}){{{self._count()}}}",
        )

    def _lark(self) -> str:
        n_rules = self._pick([1, 2, 3, 6])
        names = [f"r{i}" for i in range(n_rules)]
        lines = [f"start: {self._lark_body(names, 3)}"]
        lines += [f"{name}{self._attributes()}: {self._lark_body(names, 3)}" for name in names]
        lines += [f"T: {self._terminal(3)}"]
        extra = [
            "%ignore /[ \\t]+/",
            "%import common.INT",
            "%llguidance {}",
            '%llguidance {"no_forcing": true}',
            "",
        ]
        lines += [self._pick(extra)]
        return "\n".join(lines)

    def _attributes(self) -> str:
        if self._chance(0.8):
            return ""
        said = [
            f"max_tokens={self._count()}",
            f"temperature={self._number()}",
            'stop=""',
            "capture",
            "lazy",
            'suffix="a"',
        ]
        return f"[{self._pick(said)}]"

    def _lark_body(self, names: list[str], depth: int) -> str:
        if depth <= 0 or self._chance(0.2):
            made = [
                f"/{self._regex(2)}/",
                f"<[{self._count()}]>",
                f"<[{self._count()}-{self._count()}]>",
                f"%json {self._schema(2)}",
                '%regex { "substring_words": "a b c" }',
            ]
            return self._pick([*LARK_ATOMS, *names, *made, *made])
        inner = self._lark_body(names, depth - 1)
        return self._one(
            lambda: f"{inner} {self._lark_body(names, depth - 1)}",
            lambda: f"({inner} | {self._lark_body(names, depth - 1)})",
            lambda: f"({inner})" + self._pick(["*", "+", "?"]),
            lambda: f"({inner}){{{self._count()},{self._count()}}}",
            lambda: f"({inner}){{{self._count()}}}",
            lambda: f"({inner})~{self._count()}..{self._count()}",
        )

    def _terminal(self, depth: int) -> str:
        if depth <= 0:
            return self._pick(['"a"', "/[a-c]+/", f"/{self._regex(2)}/", '""', "T"])
        inner, other = self._terminal(depth - 1), self._terminal(depth - 1)
        return self._pick(
            [
                f"({inner} & {other})",
                f"~({inner})",
                f"({inner} | {other})",
                f"{inner} {other}",
                f"({inner}){{{self._count()}}}",
            ]
        )

    def _gbnf(self) -> str:
        names = [f"r{i}" for i in range(self._pick([1, 2, 4]))]
        lines = [f"root ::= {self._gbnf_body(names, 3)}"]
        lines += [f"{name} ::= {self._gbnf_body(names, 3)}" for name in names]
        return "\n".join(lines)

    def _gbnf_body(self, names: list[str], depth: int) -> str:
        if depth <= 0:
            return self._pick([*GBNF_ATOMS, *names])
        inner = self._gbnf_body(names, depth - 1)
        return self._one(
            lambda: f"{inner} {self._gbnf_body(names, depth - 1)}",
            lambda: f"({inner} | {self._gbnf_body(names, depth - 1)})",
            lambda: f"({inner})" + self._pick(["*", "+", "?"]),
            lambda: f"({inner}){{{self._count()},{self._count()}}}",
        )


# ---- in the process that must outlive it ----


def check(grammars: LlamaGrammars, options: dict[str, Any], seed: str) -> str:
    """Compile what a request asks for and follow it; return what came of it. Anything untyped is raised."""
    from cbatch.errors import ConfigError, GrammarError

    try:
        constraint = grammars.compile(_grammar(options))
    except ConfigError:
        return "refused at once"
    except GrammarError:
        return "refused"
    return _follow(constraint, random.Random(seed))


def _grammar(options: dict[str, Any]) -> Any:
    from cbatch.chat.formats import answer_format
    from cbatch.chat.tool_grammar import call_grammar
    from cbatch.errors import ConfigError
    from cbatch.options import RunOptions

    if "tools" not in options:
        return RunOptions.of(options).structure
    try:
        parameters = json.loads(options["tools"])
    except ValueError as error:  # whoever reads the file says so
        raise ConfigError(str(error)) from error
    function = {"name": "f", "parameters": parameters}
    said = RunOptions.of(
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    return call_grammar(
        answer_format("<tool_call>"),
        said.demanded_tools,
        thinking="none",
        is_one=False,
        named_token=dict[str, int]().get,
    )


def _follow(constraint: Any, dice: random.Random) -> str:
    import numpy as np

    from cbatch.backend.llama.grammar_matchers import GrammarMatchers
    from cbatch.core.plan import Binding, GrammarStep, Slot
    from cbatch.core.span import Span
    from cbatch.options import GREEDY

    slot = Slot(0)
    made, row = GrammarMatchers(1, 1), Span(slot, 5, (7,), has_output=True)
    made.bind(Binding(slot, 3, GREEDY, (), constraint=constraint))
    for _ in range(_N_FOLLOWED):
        [mask] = made.masks([row]) or [None]
        made.fill([row])
        assert mask is not None
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not bits.size:
            return "nothing may follow"
        said = made.follow([row], [[int(dice.choice(bits))]])[1].get(slot, GrammarStep())
        if said.problem or said.is_complete:
            return "broken" if said.problem else "complete"
    return "followed"


def _child(seed: int, first: int, end: int) -> None:
    from cbatch.backend.llama.grammar import LlamaGrammars
    from cbatch.backend.load.open_model import open_model, shipped_model

    model = open_model(shipped_model())
    grammars = LlamaGrammars(model)
    for number in range(first, end):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        case = f"{seed}:{number}"
        sys.stdout.write(f"{check(grammars, Dice(case).options(), case)}\n")
    grammars.close()
    model.close()


# ---- outside ----


@dataclass(slots=True)
class Outcome:
    """What came of all cases."""

    n_cases: int
    found: list[str]
    counts: dict[str, int]


def run(seed: int, *, n_cases: int | None = None, seconds: float = 0.0) -> Outcome:
    """Run so many cases, or for so long; return what ended a process, was raised untyped, or hung."""
    outcome, end_s = Outcome(0, [], {}), time.perf_counter() + seconds
    while outcome.n_cases < (n_cases or sys.maxsize):
        if n_cases is None and time.perf_counter() > end_s:
            break
        end = outcome.n_cases + min(_N_IN_CHILD, (n_cases or sys.maxsize) - outcome.n_cases)
        n_done, problem = _run_child(seed, outcome.n_cases, end, outcome.counts)
        outcome.n_cases = n_done
        if problem:
            outcome.found.append(f"case {n_done - 1}: {problem}")
    return outcome


def _run_child(seed: int, first: int, end: int, counts: dict[str, int]) -> tuple[int, str]:
    """Run cases in a process; return how far it came, and what was wrong with the last of them."""
    command = [
        sys.executable,
        "-m",
        "tests.schema_fuzz",
        "--seed",
        str(seed),
        "--child",
        f"{first}:{end}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    errors = threading.Thread(
        target=lambda: said.append(process.stderr.read() if process.stderr else "")
    )
    errors.start()
    n_done = first
    assert process.stdout is not None
    watch = threading.Timer(_PATIENCE_S, process.kill)
    watch.start()
    for line in process.stdout:
        watch.cancel()
        watch = threading.Timer(_PATIENCE_S, process.kill)
        watch.start()
        if line.strip().isdigit():
            n_done = int(line) + 1
        else:
            counts[line.strip()] = counts.get(line.strip(), 0) + 1
    code = process.wait()
    watch.cancel()
    errors.join()
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()
    lines = said[0].strip().splitlines()
    return n_done, f"exit code {code}: {lines[-1] if lines else ''}" if code else ""


def main() -> None:
    """Look for cases; exit with 1 where one was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--case", type=int, help="show this one and run it alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        first, end = map(int, given.child.split(":"))
        _child(given.seed, first, end)
        return
    if given.case is not None:
        sys.stdout.write(f"{Dice(f'{given.seed}:{given.case}').options()}\n")
        sys.stdout.flush()
        _child(given.seed, given.case, given.case + 1)
        return
    outcome = run(given.seed, seconds=given.minutes * 60)
    for line in outcome.found:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(
        f"{outcome.n_cases} cases of seed {given.seed}: {outcome.counts}, {len(outcome.found)} found\n"
    )
    sys.exit(bool(outcome.found))


if __name__ == "__main__":
    main()
