"""What a grammar's compiler says, as users read it."""

from __future__ import annotations

from cbatch.backend.llama.grammar_matchers import readable_problem


def test_wrong_expression_is_told_in_one_line_with_its_place() -> None:
    said = (
        'at 1(8): invalid regex "x(ab" (in regex): regex parse error:\n    x(ab\n     ^\n'
        "error: unclosed group\n   1 | start: /x(ab/\n              ^"
    )
    assert readable_problem(said) == "unclosed group, at character 2 of 'x(ab'"
    assert readable_problem("NoExtension\n<state>") == "nothing matches it"
