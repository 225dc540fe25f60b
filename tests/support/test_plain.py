"""Values of numpy, of enums and of other subclasses are taken as what they stand for, wherever they come in."""

from __future__ import annotations

import array
import math
from collections import UserDict, UserList
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.engine_options import MAX_THREADS, EngineOptions
from cbatch.errors import ConfigError, UnsupportedOptionError
from cbatch.messages import BatchPrompt, as_prompts, is_source
from cbatch.options import RunOptions
from cbatch.support.checks import check_seconds
from cbatch.support.plain import are_same, text_of_plain

if TYPE_CHECKING:
    from collections.abc import Callable


class Role(str, Enum):
    USER = "user"
    TOOL = "required"


class Word(Enum):
    USER = "user"
    NUMBER = 3


class Count(IntEnum):
    FEW = 3


class Shout(str):
    def __str__(self) -> str:
        return self.upper()

    def __hash__(self) -> int:
        raise RuntimeError("nobody may ask")

    __eq__ = None  # type: ignore[assignment]


class Scalar:
    """As a tensor of one number is: known by its methods alone."""

    def __init__(self, value: float, dtype: str = "torch.int64") -> None:
        self._value, self.dtype, self.shape = value, dtype, ()

    def __index__(self) -> int:
        if not isinstance(self._value, int):
            raise TypeError("no whole number")
        return self._value

    def __float__(self) -> float:
        return float(self._value)


class Raising:
    def __index__(self) -> int:
        raise RuntimeError("index")

    __float__ = __len__ = __iter__ = __index__

    def __repr__(self) -> str:
        raise RuntimeError("repr")


class RaisingDict(dict[str, Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("iter")

    keys = items = __iter__


CHAT = [{"role": "user", "content": "hi"}]


def is_plain(value: object) -> bool:
    """Whether a value is of Python's own types all through."""
    if isinstance(value, dict):
        return type(value) is dict and all(is_plain(k) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


# ---- words ----


@pytest.mark.parametrize("role", [Role.USER, Word.USER, np.str_("user"), Shout("user")])
def test_role_and_content_of_any_kind_of_text_are_plain(role: Any) -> None:
    [prompt] = as_prompts([{"role": role, "content": role, "name": role, "more": {"x": [role]}}])
    assert prompt.messages == (
        {"role": "user", "content": "user", "name": "user", "more": {"x": ["user"]}},
    )
    assert is_plain(prompt.messages)


def test_keys_parts_and_calls_of_enums_are_plain() -> None:
    class Key(str, Enum):
        ROLE = "role"
        CONTENT = "content"
        TYPE = "type"
        TEXT = "text"

    parts = [{Key.TYPE: Key.TEXT, Key.TEXT: Role.USER}]
    call = {"id": Role.USER, "function": {"name": Role.USER, "arguments": {Role.USER: np.int64(2)}}}
    chat: Any = [
        {Key.ROLE: Role.USER, Key.CONTENT: parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": Role.USER, "tool_call_id": Role.USER},
    ]
    [prompt] = as_prompts(chat)
    function = {"name": "user", "arguments": {"user": 2}}
    assert prompt.messages == (
        {"role": "user", "content": "user"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "user", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "user", "tool_call_id": "user"},
    )
    assert is_plain(prompt.messages)


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": Word.NUMBER, "content": "hi"}],
        [{"role": "user", "content": Word.NUMBER}],
        [{"role": "user", "content": "hi", "name": Word.NUMBER}],
    ],
)
def test_enum_of_another_value_is_refused_by_name(chat: Any) -> None:
    with pytest.raises(ConfigError, match=r"Word\.NUMBER"):
        as_prompts(chat)


def test_prompt_and_id_of_a_subclass_are_plain() -> None:
    prompt = BatchPrompt(prompt=Role.USER, id=Shout("user"))
    assert (prompt.prompt, prompt.id) == ("user", "user")
    assert is_plain((prompt.prompt, prompt.id))
    assert as_prompts([Role.USER, Shout("user")])[1].prompt == "user"


@pytest.mark.parametrize(
    ("name", "value", "settled"),
    [
        ("stop", Role.USER, ("user",)),
        ("stop", [Role.USER, np.str_("b")], ("user", "b")),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("cache_key", Shout("user"), "user"),
        ("regex", Role.USER, "user"),
        ("adapter", Role.USER, {"user": 1.0}),
        ("adapter", {Role.USER: np.float32(0.5)}, {"user": 0.5}),
        ("tool_choice", Role.TOOL, "required"),
        ("reasoning_format", Shout("none"), "none"),
        ("chat_template_kwargs", {Role.USER: Word.USER}, {"user": "user"}),
        ("dry_sequence_breakers", pd.Series(["a"]), ("a",)),
    ],
)
def test_word_of_an_option_is_plain(name: str, value: Any, settled: object) -> None:
    found = getattr(RunOptions.of({name: value}), name)
    assert found == settled
    assert is_plain(dict(found) if isinstance(found, dict) else found)


def test_name_of_an_option_may_be_an_enum_and_must_be_known() -> None:
    class Name(str, Enum):
        MAX = "max_tokens"

    assert RunOptions.of({Name.MAX: 5}) == RunOptions(max_tokens=5)
    with pytest.raises(UnsupportedOptionError, match="unknown option '5'") as caught:
        RunOptions.of({5: 3})  # type: ignore[dict-item]
    assert caught.value.option == "5"
    with pytest.raises(UnsupportedOptionError, match="_copied"):
        RunOptions.of({"_copied": None})


# ---- numbers ----


@pytest.mark.parametrize("five", [np.int8(5), np.uint64(5), np.array(5), Count(3) + 2, Scalar(5)])
def test_whole_numbers_of_any_kind_are_plain(five: Any) -> None:
    options = RunOptions(max_tokens=five, seed=five, logprobs=five, stop_token_ids=[five], n=five)
    assert options == RunOptions(max_tokens=5, seed=5, logprobs=5, stop_token_ids=[5], n=5)
    assert is_plain(
        (options.max_tokens, options.seed, options.top_logprobs, options.stop_token_ids)
    )
    assert RunOptions.of({"logit_bias": {"7": five}}).logit_bias == {7: 5.0}
    engine = EngineOptions(parallel=five, n_threads=five, tensor_split=[five], swap_mib=five)
    assert is_plain((engine.parallel, engine.n_threads, engine.tensor_split, engine.swap_mib))
    assert BatchPrompt(tokens=[five, Count.FEW]).tokens == (5, 3)


def test_token_of_a_bias_is_a_whole_number_of_any_kind() -> None:
    bias = {np.int64(5): 1.0, Count.FEW: 2.0}
    assert RunOptions.of({"logit_bias": bias}).logit_bias == {5: 1.0, 3: 2.0}
    for token in (np.float64(5), True, Role.USER, "5" * 5000, 2**31, None):
        with pytest.raises(ConfigError, match="logit_bias: a key must be a token id"):
            RunOptions.of({"logit_bias": {token: 1.0}})


@pytest.mark.parametrize(
    "half",
    [np.float32(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2), Scalar(0.5, "torch.bfloat16")],
)
def test_fractions_of_any_kind_are_plain(half: Any) -> None:
    options = RunOptions(temperature=half, timeout_s=half, logit_bias={3: half})
    assert options == RunOptions(temperature=0.5, timeout_s=0.5, logit_bias={3: 0.5})
    assert is_plain((options.temperature, options.timeout_s, options.logit_bias))


@pytest.mark.parametrize("flag", [np.True_, np.array(True)])
def test_flags_of_numpy_are_plain(flag: Any) -> None:
    assert RunOptions(ignore_eos=flag, echo=flag, logprobs=flag).ignore_eos is True
    assert EngineOptions(exact=flag).exact is True


@pytest.mark.parametrize(
    "value",
    [
        *(np.True_, np.array([5]), np.array([[5]]), np.datetime64(5, "s"), np.timedelta64(5, "s")),
        *(Decimal("NaN"), Decimal("sNaN"), 1j, np.complex64(1), "5", b"5", Raising(), [5], {5: 5}),
        *(np.float64("nan"), Fraction(10**400), Scalar(5, "torch.bool"), Word.USER, None.__class__),
    ],
)
def test_what_is_no_number_is_refused_by_the_name_of_its_option(value: Any) -> None:
    for name in ("max_tokens", "temperature", "timeout_s", "prompt_logprobs", "seed"):
        with pytest.raises(ConfigError, match=name):
            RunOptions.of({name: value})
    with pytest.raises(ConfigError, match="parallel"):
        EngineOptions.of({"parallel": value})
    with pytest.raises(ConfigError, match="logit_bias"):
        RunOptions(logit_bias={3: value})


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2], dtype=np.uint16),
        pd.Series([1, 2]),
        pa.array([1, 2]),
        array.array("q", [1, 2]),
        range(1, 3),
        UserList([1, 2]),
        [np.int64(1), np.array(2)],
    ],
)
def test_token_ids_may_be_any_list_of_whole_numbers(tokens: Any) -> None:
    found = BatchPrompt(tokens=tokens).tokens
    assert found == (1, 2)
    assert is_plain(found)
    assert RunOptions(stop_token_ids=tokens).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    "tokens",
    [
        *(
            np.array([[1, 2]]),
            np.array([1.0]),
            np.array(1),
            np.array([True]),
            b"ab",
            memoryview(b"a"),
        ),
        *(
            {1, 2},
            {1: 2},
            iter([1]),
            "12",
            np.array(["1"]),
            Raising(),
            [Raising()],
            UserDict({1: 2}),
        ),
    ],
)
def test_what_are_no_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        BatchPrompt(tokens=tokens)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        RunOptions(stop_token_ids=tokens)


@pytest.mark.parametrize("endless", [None, math.inf, np.float64("inf"), Decimal("Infinity")])
def test_endless_time_is_none_at_all(endless: Any) -> None:
    assert check_seconds("max_time_s", endless) == math.inf
    assert RunOptions(timeout_s=endless).timeout_s == (None if endless is None else math.inf)


def test_schema_and_tools_may_hold_numbers_of_numpy_and_words_of_enums() -> None:
    schema = {"enum": np.array([1, 2]), "maximum": np.float32(0.5), Role.USER: [Word.USER]}
    assert RunOptions(json_schema=schema).json_schema == (
        '{"enum":[1,2],"maximum":0.5,"user":["user"]}'
    )
    tools = [{"type": "function", "function": {"name": Role.USER, "parameters": schema}}]
    assert RunOptions(tools=tools).offered_tools.names == ("user",)


def test_options_that_cannot_be_read_are_refused() -> None:
    nested: list[Any] = []
    nested.append(nested)
    for said in (
        RaisingDict(max_tokens=3),
        {"stop": nested},
        {"tools": nested},
        {"tool_choice": nested},
        {"chat_template_kwargs": {"a": nested}},
        {"json_schema": {"a": nested}},
        {"logit_bias": RaisingDict(a=1)},
        {"adapter": RaisingDict(a=1)},
    ):
        with pytest.raises(ConfigError):
            RunOptions.of(said)
    for prompt in (nested, [RaisingDict(role="user", content="a")], [{**CHAT[0], "x": nested}]):
        with pytest.raises(ConfigError):
            as_prompts(prompt)


# ---- limits, copies ----


def test_limit_of_threads_is_that_of_llama_cpp() -> None:
    assert EngineOptions(n_threads=MAX_THREADS).n_threads == 512
    with pytest.raises(ConfigError, match="n_threads must be 1 … 512, not 513"):
        EngineOptions(n_threads=513)


@pytest.mark.parametrize(
    ("first", "changed", "expected"),
    [
        ({"max_tokens": 5}, {"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 5}, {"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 5}, {"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 5}, {"max_tokens": None}, {}),
        ({"logprobs": 3}, {"logprobs": 5}, {"logprobs": True, "top_logprobs": 5}),
        ({"logprobs": 3}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": 1}),
        ({"logprobs": 3}, {"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        ({"logprobs": 3}, {"logprobs": False}, {"logprobs": False}),
        ({"logprobs": 3}, {"logprobs": None}, {}),
        ({"logprobs": 3}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}),
        ({"logprobs": 3}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 3}, {"seed": 1}, {"top_logprobs": 3, "seed": 1}),
        ({"top_logprobs": 3}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}),
    ],
)
def test_copy_with_an_alias_changed_says_what_was_changed(
    first: Any, changed: Any, expected: Any
) -> None:
    copied = replace(RunOptions(**first), **changed)
    assert copied == RunOptions(**expected)
    assert (
        replace(copied, seed=9) == RunOptions(**expected, seed=9) if "seed" not in expected else 1
    )


def test_copy_that_contradicts_itself_is_refused() -> None:
    options = RunOptions(max_tokens=5, logprobs=3)
    with pytest.raises(ConfigError, match="the same option"):
        replace(options, max_tokens=6, max_completion_tokens=7)
    with pytest.raises(ConfigError, match="top_logprobs=4 needs"):
        replace(options, logprobs=False, top_logprobs=4)


# ---- batches ----


@pytest.mark.parametrize(
    "texts",
    [
        pd.Series(["a", "b"]),
        pd.Series(["a", "b"], index=["columns", "x"]),
        pa.array(["a", "b"]),
        pa.chunked_array([["a"], ["b"]]),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        {"a": 1, "b": 2}.keys(),
        {1: "a", 2: "b"}.values(),
        UserList(["a", "b"]),
    ],
)
def test_column_of_texts_is_a_batch_of_them(texts: Any) -> None:
    prompts = as_prompts(texts)
    assert [p.prompt for p in prompts] == ["a", "b"]
    assert is_plain([p.prompt for p in prompts])


def test_chats_of_a_column_may_be_arrays() -> None:
    column = pd.Series([np.array(CHAT, dtype=object), CHAT])
    assert [p.messages for p in as_prompts(column)] == [tuple(CHAT)] * 2


TABLES = (
    pd.DataFrame({"prompt": ["a"]}),
    pa.table({"prompt": ["a"]}),
    pa.record_batch({"prompt": ["a"]}),
)


@pytest.mark.parametrize("table", TABLES)
def test_table_is_refused_with_the_way_to_run_it(table: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: as_prompts(table),
        lambda: as_prompts([table]),
        lambda: BatchPrompt(prompt=table),
        lambda: BatchPrompt(messages=table),
        lambda: BatchPrompt(tokens=table),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"run_table of cbatch\.files"):
            call()


class Rows:
    """A stream of rows, as of a data set that is read over a network."""

    column_names = ("prompt",)

    def __iter__(self) -> Any:
        yield {"prompt": "a"}


def test_rows_that_come_one_by_one_are_refused_before_they_are_read() -> None:
    with pytest.raises(ConfigError, match="run_table"):
        is_source(Rows())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"text", "not bytes: decode them"),
        (bytearray(b"text"), "not bytearray: decode them"),
        (memoryview(b"text"), "not memoryview: decode them"),
        ([b"text"], r"prompts\[0\].*not bytes: decode them"),
        (Path("prompts.jsonl"), "run_file or stream_file"),
        ([Path("prompts.jsonl")], r"prompts\[0\].*run_file or stream_file"),
        ({"a", "b"}, "a set, and results come in the order"),
        (frozenset("ab"), "a set, and results come in the order"),
        ({"a": "b"}, "not dict"),
        (UserDict(a="b"), "not UserDict"),
        ([{"prompt": "a"}, "b"], r"prompts\[0\]: a mapping is not a prompt.*BatchPrompt\(\*\*it\)"),
        ({"a": "b"}.items(), r"prompts\[0\]: messages\[0\] must be a mapping"),
        (np.array([[1, 2], [3, 4]]), r"prompts\[0\]: these are numbers"),
        (np.array([1, 2]), r"prompts\[0\]: these are numbers"),
        (np.array(1), "cannot be read"),
        (pa.array([1, 2]), r"prompts\[0\]: these are numbers"),
        (pd.Series(["a", None]), r"prompts\[1\]"),
        (Word.NUMBER, r"not <Word\.NUMBER: 3>"),
        (Raising(), "prompts cannot be read"),
    ],
)
def test_what_is_no_batch_is_refused_with_what_to_do(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_prompts(given)


def test_file_is_refused_with_the_way_to_run_it(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\n")
    with path.open() as file, pytest.raises(ConfigError, match="run_file or stream_file"):
        is_source(file)


leaves = st.sampled_from([None, True, False, 0, 1, 0.0, -0.0, 1.0, "", "1", "True", "\ud800"])
nested: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner)
        | st.lists(st.tuples(leaves, inner), max_size=2).map(dict)
    ),
    max_leaves=4,
)


@given(nested, nested)
def test_plain_values_are_the_same_where_python_writes_them_alike(one: Any, other: Any) -> None:
    is_written_alike = repr(one) == repr(other)
    assert are_same(one, other) == is_written_alike
    assert (text_of_plain(one) == text_of_plain(other)) == is_written_alike
    assert are_same(one, deepcopy(one))


class Secretive(dict[str, int]):
    def __repr__(self) -> str:
        return "{}"


def test_values_that_are_not_plain_have_no_text() -> None:
    for value in (b"", Scalar(1), Secretive(a=1), Role.USER, 10**5000, Shout("a")):
        assert text_of_plain({"a": [value]}) is None
        assert are_same([value], [value])
