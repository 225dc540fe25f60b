"""`--set name=value` and the flags of scheduling: every option of a request, and who runs when."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from cbatch.cli.option_table import Given, template_of
from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import ConfigError
from cbatch.options import RunOptions
from tests.cli.conftest import Done, invoke, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import cbatch

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]

VALUES: dict[str, tuple[str, object]] = {
    "max_tokens": ("7", 7),
    "max_completion_tokens": ("7", None),
    "strict_max_tokens": ("true", True),
    "stop": ("END", ("END",)),
    "stop_token_ids": ("[1, 2]", (1, 2)),
    "include_stop": ("true", True),
    "ignore_eos": ("0", False),
    "temperature": ("0.5", 0.5),
    "top_k": ("0", 0),
    "top_p": ("1", 1),
    "min_p": ("1e-2", 0.01),
    "typical_p": (".5", 0.5),
    "top_n_sigma": ("-1", -1),
    "xtc_probability": ("0.1", 0.1),
    "xtc_threshold": ("0.2", 0.2),
    "repeat_penalty": ("1.1", 1.1),
    "repeat_last_n": ("9", 9),
    "presence_penalty": ("-1.5", -1.5),
    "frequency_penalty": ("1", 1),
    "dry_multiplier": ("0.8", 0.8),
    "dry_base": ("2", 2),
    "dry_allowed_length": ("3", 3),
    "dry_penalty_last_n": ("5", 5),
    "dry_sequence_breakers": ('["x", "y"]', ("x", "y")),
    "logit_bias": ('{"5": -Infinity, "6": 2}', {5: -math.inf, 6: 2}),
    "seed": ("18446744073709551615", 2**64 - 1),
    "n": ("2", 2),
    "best_of": ("3", 3),
    "logprobs": ("true", True),
    "top_logprobs": ("2", 2),
    "prompt_logprobs": ("0", 0),
    "prompt_logprobs_start": ("7", 7),
    "choice_probs": ("true", True),
    "echo": ("yes", True),
    "priority": ("-5", -5),
    "slot": ("0", 0),
    "pause_every": ("4", 4),
    "timeout_s": ("2.5", 2.5),
    "cache_salt": ("salt", "salt"),
    "cache_key": ("a key", "a key"),
    "save_cache": ("on", True),
    "cache_required": ("off", False),
    "prefill_only": ("no", False),
    "n_keep": ("-1", -1),
    "n_discard": ("64", 64),
    "adapter": ("x", {"x": 1.0}),
    "tools": (json.dumps(TOOLS), tuple(TOOLS)),
    "tool_choice": ("auto", "auto"),
    "parallel_tool_calls": ("true", True),
    "chat_template_kwargs": ('{"enable_thinking": false}', {"enable_thinking": False}),
    "reasoning_format": ("none", "none"),
    "thinking_budget": ("0", 0),
    "skip_special_tokens": ("FALSE", False),
    "json_schema": (json.dumps(SCHEMA), json.dumps(SCHEMA, separators=(",", ":"))),
    "response_format": ('{"type": "json_object"}', '{"type":"json_object"}'),
    "regex": ("@[a-z]+=1", "@[a-z]+=1"),
    "choice": ('["a", "b, c"]', ("a", "b, c")),
    "grammar": ("start: /a=b/", "start: /a=b/"),
}


def options_of(*sets: str, **said: Any) -> RunOptions:
    return Given({"set": list(sets), **said}).run_options()


def test_every_option_of_a_request_has_its_value_here() -> None:
    assert {*VALUES, "logits_processor"} == {f.name for f in fields(RunOptions)}


def options_with(name: str, *, sign: str = "_") -> RunOptions:
    """Options with the value of `VALUES`, and with another that it needs."""
    more = {"best_of": ["n=2"], "top_logprobs": ["logprobs=true"]}.get(name, [])
    return options_of(f"{name.replace('_', sign)}={VALUES[name][0]}", *more)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "pause_every"])
def test_value_is_read_by_the_type_of_its_option(name: str) -> None:
    found, (_, value) = getattr(options_with(name), name), VALUES[name]
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)
    assert getattr(options_with(name, sign="-"), name) == value


def test_template_variables_have_a_flag_with_json_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "variables.json"
    file.write_text('{"enable_thinking": false}', encoding="utf-8")
    for text in ('{"enable_thinking": false}', f"@{file}"):
        options = Given({"chat_template_kwargs": text}).run_options()
        assert options.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("text", ["", "true", "[1]", "{", "@no-such-file"])
def test_template_variables_that_are_no_object_are_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template-kwargs"):
        Given({"chat_template_kwargs": text}).run_options()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("logprobs=3", "top_logprobs", 3),
        ('stop=["a", "b"]', "stop", ("a", "b")),
        ("stop=a=b", "stop", ("a=b",)),
        ("stop=5", "stop", ("5",)),
        ("stop=@none", "stop", ("@none",)),
        ('adapter={"a": 0.5}', "adapter", {"a": 0.5}),
        ("max_completion_tokens=4", "max_tokens", 4),
    ],
)
def test_value_of_an_option_of_several_types(text: str, name: str, value: object) -> None:
    assert getattr(options_of(text), name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temperature", "--set temperature: give a name and a value"),
        ("temperatur=1", "unknown option; did you mean temperature?"),
        ("xyz=1", "unknown option; known are adapter, best_of"),
        ("pause_every=4", "pause_every=4 needs a program that calls engine.resume"),
        ("temperature=hot", "temperature: must be a number, not 'hot'"),
        ("temperature=-1", "temperature must be 0 … 10000, not -1"),
        ("max_tokens=2.5", "max_tokens: must be a whole number, not '2.5'"),
        (f"max_tokens={'9' * 5000}", "must be a whole number"),
        ("logprobs=maybe", "must be true or false or a whole number"),
        ("ignore_eos=maybe", "must be true or false, not 'maybe'"),
        ("stop_token_ids=5", "must be a JSON list, not '5'"),
        ("logit_bias={5: 1}", "must be a JSON object"),
        (f"tools={'[' * 5000}", "must be a JSON list"),
        ("json_schema={", "json_schema: not JSON: Expecting"),
        ("json_schema=@none.json", "none.json: cannot be read: No such file"),
        ("reasoning_format=x", "reasoning_format must be one of auto, none"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_wrong_name_or_value_is_refused_with_the_way_out(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        options_of(text)
    assert words in str(raised.value)
    assert len(str(raised.value)) < 1500


def test_option_that_is_said_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature: --temperature gives this option too"):
        options_of("temperature=1", temperature=0.5)
    with pytest.raises(ConfigError, match="n: occurs twice"):
        options_of("n=1", "n=2")
    with pytest.raises(ConfigError, match="give one of them"):
        options_of("max_completion_tokens=3", max_tokens=3)
    assert options_of("n=2", temperature=0.5).temperature == 0.5


def test_adapter_that_is_alone_answers_all_unless_another_is_set() -> None:
    for sets, found in (([], {"a": 1.0}), (['adapter={"a": 0.5}'], {"a": 0.5})):
        assert options_of(*sets, adapter=["a=a.gguf"]).adapter == found


def test_long_value_comes_from_a_file(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")
    assert options_of(f"json_schema=@{schema}") == options_of(f"json_schema={json.dumps(SCHEMA)}")
    schema.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        options_of(f"json_schema=@{schema}")


SMALL = ("--parallel", 2, "--threads", 1, "--quiet")


def test_run_and_ask_take_them(
    write_input: Callable[..., Path], tmp_path: Path, test_model: Path
) -> None:
    source, out = write_input({"prompt": "a"}), tmp_path / "out.jsonl"
    sets = ("--set", "n=2", "--set", "ignore_eos=true", "--set", "max_tokens=3")
    asked = ("run", source, "-o", out, "-m", test_model, *SMALL)
    assert invoke(*asked, *sets).exit_code == 0
    [line] = parse(out.read_bytes())
    assert [choice["finish_reason"] for choice in line["choices"]] == ["length", "length"]
    assert line["usage"]["completion_tokens"] == 6
    wrong = invoke(*asked, "--set", "temperature=1", "--temperature", 0)
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "cbatch: --set temperature: --temperature gives this option too: leave one of them out\n",
    )
    cut = invoke("ask", "Hi", "-m", test_model, "--set", "max_tokens=1", "--threads", 1)
    assert cut.exit_code == 0


def test_variable_of_the_environment_sets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_RUN_SET", "n=2 temperatur=1")
    done = invoke("run", "in.jsonl", "-o", "-")
    assert done.exit_code == 2
    assert "--set temperatur: unknown option; did you mean temperature?" in done.stderr


FLAGS: dict[str, tuple[tuple[object, ...], object]] = {
    "policy": (("--policy", "priority"), "priority"),
    "quantum": (("--quantum", 8, "--policy", "round_robin"), 8),
    "ageing_s": (("--ageing-s", 2.5, "--policy", "priority"), 2.5),
    "admission": (("--admission", "reserve", "--kv", "unified"), "reserve"),
    "max_queue": (("--max-queue", 3), 3),
    "when_full": (("--when-full", "reject", "--max-queue", 3), "reject"),
    "ttft": (("--ttft", "first"), "first"),
    "prefill_budget": (("--prefill-budget", 64), 64),
    "prefill_chunk": (("--prefill-chunk", 32), 32),
    "itl_ms": (("--itl-ms", 12.5), 12.5),
    "speculate": (("--speculate", "3"), 3),
    "swap_mib": (("--swap-mib", 0), 0),
    "checkpoint_mib": (("--checkpoint-mib", 0), 0),
    "share_prefixes": (("--no-share-prefixes",), False),
}
_OWN_LIBRARY = os.path.dirname(getattr(find_spec("llama_cpp"), "origin", ""))
MORE_FLAGS: dict[str, tuple[tuple[object, ...], object]] = {
    "n_batch": (("--n-batch", 256), 256),
    "n_ubatch": (("--n-ubatch", 64), 64),
    "draft": (("--draft", "d.gguf"), "d.gguf"),
    "cache_mib": (("--cache-mib", 5), 5),
    "cache_type_k": (("--cache-type-k", "q8_0"), "q8_0"),
    "cache_type_v": (("--cache-type-v", "f32"), "f32"),
    "flash_attn": (("--flash-attn", "on"), "on"),
    "memory_mib": (("--memory-mib", 50), 50),
    "cache_media": (("--cache-media",), True),
    "repack": (("--repack", "llama"), "llama"),
    "use_mmap": (("--no-mmap",), False),
    "use_mlock": (("--mlock",), True),
    "offload_kqv": (("--no-offload-kqv",), False),
    "split_mode": (("--split-mode", "layer"), "layer"),
    "main_gpu": (("--main-gpu", 1), 1),
    "tensor_split": (("--tensor-split", "3,1"), (3.0, 1.0)),
    "library": (("--llama-library", _OWN_LIBRARY), _OWN_LIBRARY),
}


def test_every_option_of_scheduling_has_a_flag() -> None:
    assert FLAGS.keys() == {f.name for f in fields(ScheduleOptions)}


@pytest.mark.parametrize(
    "name",
    [
        *FLAGS,
        *[name for name in MORE_FLAGS if name != "library"],
        pytest.param("library", marks=pytest.mark.real),  # which another process tries
    ],
)
def test_flag_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, write_input: Callable[..., Path], name: str
) -> None:
    args, value = {**FLAGS, **MORE_FLAGS}[name]
    given: dict[str, Any] = {}

    def load_noted(*args: object, **settings: Any) -> cbatch.Engine:
        given.update(settings)
        raise ConfigError("seen")

    monkeypatch.setattr("cbatch.files.settings.load", load_noted)
    done: Done = invoke("run", write_input({"prompt": "a"}), "-o", "-", "--quiet", *args)
    assert (done.exit_code, done.stderr) == (2, "cbatch: seen\n")
    del given["replicas"], given["look_ahead"]
    assert getattr(EngineOptions.of(given), name) == value


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--quantum", 8), "quantum=8 needs policy='round_robin'"),
        (("--itl-ms", 5, "--prefill-budget", 5), "not both"),
        (
            ("--speculate", "16"),
            "speculate must be one of off, ngram, job, draft, auto or 1 … 15, not 16",
        ),
        (("--speculate", "draft"), "speculate='draft' needs a draft model"),
        (("--speculate", "2", "--exact"), "exact=True cannot be guaranteed with speculate=2"),
        (("--tensor-split", "a,b"), "tensor_split must be numbers separated by commas"),
    ],
    ids=str,
)
def test_flags_that_contradict_are_refused(args: tuple[object, ...], words: str) -> None:
    done = invoke("run", "in.jsonl", "-o", "-", *args)
    assert done.exit_code == 2
    assert words in done.stderr


def test_chat_template_is_a_name_jinja_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
    (tmp_path / "mine").write_text("{% for m in messages %}{% endfor %}")
    for given in ("mine.jinja", "@mine.jinja", str(tmp_path / "mine.jinja")):
        assert template_of(given) == "{{ messages }}"
    assert template_of("mine") == "{% for m in messages %}{% endfor %}"
    assert template_of(None) is None
    for given in ("chatml", "{{ messages }}", "{% if a %}a/b.c{% endif %}", "x" * 9000):
        assert template_of(given) == given
    for missing in ("other.jinja", "@other", "folder/other", "@"):
        with pytest.raises(ConfigError, match=r"--chat-template: .*: cannot be read"):
            template_of(missing)


def test_chat_template_of_a_file_reaches_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}")
    for text in (str(path), f"@{path}"):
        given = Given({"chat_template": text})
        assert given.engine_settings() == {"chat_template": "{{ messages }}"}
