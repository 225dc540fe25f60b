"""Options: what is refused, under which name, and who wins when several speak."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch.engine_options import EngineOptions, ScheduleOptions
from cbatch.errors import CBatchError, ConfigError, RequestError, UnsupportedOptionError
from cbatch.options import GREEDY, MAX_SEED, DryBreakers, Grammar, RunOptions, Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", "8"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("prompt_logprobs_start", -1),
        ("echo", 1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 0.0),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("stop", {"a"}),
        ("stop", "half \ud83d"),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("include_stop", 1),
        ("ignore_eos", "yes"),
        ("typical_p", 1.1),
        ("top_n_sigma", -1.5),
        ("top_n_sigma", math.inf),
        ("xtc_probability", -0.1),
        ("xtc_threshold", math.nan),
        ("repeat_penalty", 0),
        ("repeat_penalty", math.inf),
        ("repeat_last_n", -1),
        ("repeat_last_n", 2**20 + 1),
        ("repeat_last_n", 64.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", "high"),
        ("dry_multiplier", -0.5),
        ("dry_base", math.nan),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", 2**21),
        ("dry_sequence_breakers", 3),
        ("dry_sequence_breakers", ["x"] * 65),
        ("dry_sequence_breakers", ["é" * 21]),
        ("dry_sequence_breakers", ["half \ud83d"]),
        ("logit_bias", [[1, 2.0]]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**31: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"yes": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 20_000}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: False}),
        ("logit_bias", {1: 1.0, "1": 2.0}),
        ("logit_bias", dict.fromkeys(range(4097), 1.0)),
        ("stop", ["x"] * 257),
        ("stop", ["x" * 2048, "é" * 1024 + "x"]),
    ],
)
def test_wrong_value_is_refused_by_the_option_s_name(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        RunOptions(**options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("temperature", 0),
        ("temperature", 2.5),
        ("top_k", 0),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("top_n_sigma", -1),
        ("xtc_threshold", 1),
        ("repeat_penalty", 0.01),
        ("repeat_last_n", 2**20),
        ("dry_base", 0),
        ("logit_bias", dict.fromkeys(range(4096), -math.inf)),
        ("stop", ("x" * 16,) * 256),
    ],
)
def test_value_on_the_edge_is_taken_as_it_is(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    assert getattr(RunOptions(**options), name) == value


def test_unknown_option_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(UnsupportedOptionError, match="did you mean max_tokens") as caught:
        RunOptions.of({"max_token": 3})
    assert caught.value.option == "max_token"
    for kind in (RequestError, ConfigError, CBatchError, ValueError):
        assert isinstance(caught.value, kind)


def test_max_completion_tokens_is_max_tokens() -> None:
    options = RunOptions(max_completion_tokens=7)
    assert (options.max_tokens, options.max_completion_tokens) == (7, None)
    assert options == RunOptions(max_tokens=7)


def test_both_names_of_the_cap_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_completion_tokens"):
        RunOptions(max_tokens=3, max_completion_tokens=3)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a", ("a",)), (["a", "", "b"], ("a", "b")), ("", ()), ([], ()), (None, None)],
)
def test_stop_is_settled_without_empty_strings(
    given: str | list[str] | None, kept: tuple[str, ...] | None
) -> None:
    assert RunOptions(stop=given).stop == kept


def test_list_changed_later_does_not_change_the_options() -> None:
    stops, ids = ["a"], [1]
    options = RunOptions(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(2)
    assert (options.stop, options.stop_token_ids) == (("a",), (1,))
    assert hash(options) == hash(RunOptions(stop="a", stop_token_ids=(1,)))


def test_stop_tokens_that_are_given_again_and_again_count_once() -> None:
    assert RunOptions(stop_token_ids=[3, 1, 3] * 1000).stop_token_ids == (3, 1)


def test_options_are_frozen() -> None:
    options = RunOptions()
    with pytest.raises(FrozenInstanceError):
        options.seed = 1  # type: ignore[misc]


def test_options_survive_pickle_and_copy() -> None:
    options = RunOptions(max_tokens=3, stop="a", seed=5)
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options


@pytest.mark.parametrize("value", ["max_tokens=3", 3, [("max_tokens", 3)]])
def test_what_is_no_options_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=type(value).__name__):
        RunOptions.of(value)


def test_options_of_options_mappings_and_nothing() -> None:
    options = RunOptions(seed=1)
    assert RunOptions.of(options) is options
    assert RunOptions.of({"seed": 1}) == options
    assert RunOptions.of(None) == RunOptions()


def test_nearest_that_says_something_wins() -> None:
    engine = RunOptions(max_tokens=1, temperature=0.1, seed=1, stop="engine")
    run = RunOptions(temperature=0.2, seed=2)
    item = RunOptions(seed=3)
    merged = item.over(run.over(engine))
    assert merged == RunOptions(max_tokens=1, temperature=0.2, seed=3, stop="engine")
    assert item.over(run).over(engine) == merged


def test_zero_false_and_empty_are_something_said() -> None:
    far = RunOptions(temperature=0.9, ignore_eos=True, stop="x", top_k=9, seed=9)
    near = RunOptions(temperature=0, ignore_eos=False, stop=[], top_k=0, seed=0)
    assert near.over(far) == near


@pytest.mark.parametrize("far", [{"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}])
def test_logprobs_are_turned_off_with_their_alternatives(far: dict[str, Any]) -> None:
    merged = RunOptions(logprobs=False).over(RunOptions(**far))
    assert (merged.logprobs, merged.top_logprobs, merged.n_logprobs) == (False, None, None)
    assert RunOptions(logprobs=True).over(RunOptions(**far)).top_logprobs == 3


def test_either_name_of_the_cap_overrides_the_other() -> None:
    near, far = RunOptions(max_completion_tokens=3), RunOptions(max_tokens=9)
    assert near.over(far).max_tokens == 3
    assert far.over(near).max_tokens == 9


def test_nothing_said_leaves_the_other_as_it_is() -> None:
    far = RunOptions(seed=4)
    assert RunOptions().over(far) is far


def test_sampling_takes_options_then_the_model_then_llama_cpp() -> None:
    sampling = RunOptions(top_k=7).sampling({"top_k": 20, "temperature": 0.6}, seed=11)
    assert sampling == Sampling(temperature=0.6, top_k=7, top_p=0.95, min_p=0.05, seed=11)
    assert RunOptions().sampling({}, 0) == Sampling(0.8, 40, 0.95, 0.05, 0)
    assert RunOptions(temperature=0).sampling({"temperature": 0.6}, 0) == GREEDY


def test_logit_bias_takes_ids_as_json_has_them() -> None:
    given: dict[Any, float] = {"7": -100, 3: -math.inf}
    options = RunOptions(logit_bias=given)
    given["8"] = 1.0
    assert options.logit_bias == {7: -100.0, 3: -math.inf}
    assert options.sampling({}, 0).logit_bias == ((3, -math.inf), (7, -100.0))


def test_breakers_are_looked_for_only_where_dry_is_on() -> None:
    for off in (
        {},
        {"dry_multiplier": 1, "dry_base": 0.9},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"dry_multiplier": 1, "dry_sequence_breakers": []},
    ):
        options = RunOptions.of(off)
        assert options.dry_breakers(options.sampling({}, 0)) is None
    on = RunOptions(dry_multiplier=1)
    assert on.dry_breakers(on.sampling({}, 0)) == DryBreakers(("\n", ":", '"', "*"))
    own = RunOptions(dry_multiplier=1, dry_sequence_breakers=["x"])
    assert own.dry_breakers(own.sampling({}, 0)) == DryBreakers(("x",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parallel", 0),
        ("parallel", 257),
        ("parallel", True),
        ("n_ctx", 0),
        ("ctx_per_seq", -5),
        ("n_batch", 15),
        ("n_batch", None),
        ("n_ubatch", 0),
        ("n_threads", 0),
        ("n_gpu_layers", -2),
        ("kv", "paged"),
        ("flash_attn", True),
        ("exact", 1),
        ("repack", "always"),
        ("use_mmap", None),
        ("memory_mib", 0),
        ("cache_type_k", "q2_k"),
        ("cache_type_v", None),
        ("offload_kqv", 1),
        ("split_mode", "column"),
        ("main_gpu", -1),
        ("tensor_split", 1.0),
        ("tensor_split", []),
        ("tensor_split", "12"),
        ("tensor_split", [1, -1]),
        ("tensor_split", [1, math.nan]),
        ("tensor_split", [1, None]),
        ("tensor_split", [0, 0.0]),
        ("rpc_servers", "host:1"),
        ("rpc_servers", []),
        ("rpc_servers", ["host"]),
        ("rpc_servers", [":1"]),
        ("rpc_servers", ["host:0"]),
        ("rpc_servers", ["host:65536"]),
        ("rpc_servers", ["host:²"]),
        ("rpc_servers", ["::1:50052"]),
        ("rpc_servers", [50052]),
        ("rpc_servers", ["host:1"] * 17),
        ("rope_scaling", "dynamic"),
        ("rope_freq_base", 0),
        ("rope_freq_scale", 0.0),
        ("yarn_ext_factor", -1.0),
        ("yarn_attn_factor", math.inf),
        ("yarn_beta_fast", "32"),
        ("yarn_beta_slow", -0.5),
        ("yarn_orig_ctx", 0),
        ("adapters", "lora.gguf"),
        ("adapters", ["lora.gguf"]),
        ("adapters", {"": "lora.gguf"}),
        ("adapters", {None: "lora.gguf"}),
        ("adapters", {1: "lora.gguf"}),
        ("adapters", {"a": 1}),
        ("adapters", {"a": ""}),
        ("adapters", {"a": None}),
        ("cache_dir", 1),
        ("cache_dir", ""),
        ("cache_mib", 0),
        ("cache_mib", None),
        pytest.param("parallel", 10**5000, id="parallel-digits"),
        pytest.param("rope_freq_base", 10**5000, id="rope_freq_base-digits"),
        ("rpc_servers", ["host:" + "9" * 5000]),
        ("cache_dir", "a\0b"),
        ("cache_dir", "\ud800"),
        ("adapters", {"a": "\0"}),
    ],
)
def test_wrong_engine_value_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineOptions.of({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "lifo"), ("policy", None), ("quantum", 0), ("quantum", 1.5), ("ageing_s", 0), ("ageing_s", -1),
        ("admission", "hope"), ("max_queue", -1), ("max_queue", 2.5), ("when_full", "drop"), ("prefill_budget", 0),
        ("prefill_chunk", 0), ("prefill_chunk", True), ("itl_ms", 0), ("itl_ms", float("nan")), ("swap_mib", -1),
        ("swap_mib", None), ("checkpoint_mib", -1), ("checkpoint_mib", 0.5),
    ],
)  # fmt: skip
def test_wrong_value_of_the_schedule_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineOptions.of({name: value})
    with pytest.raises(ConfigError, match=name):
        ScheduleOptions(**{name: value})  # type: ignore[arg-type]


def test_long_value_is_cut_in_its_error() -> None:
    with pytest.raises(ConfigError, match="…") as caught:
        EngineOptions.of({"kv": "x" * 100_000})
    assert len(str(caught.value)) < 200


def test_path_of_bytes_that_are_no_text_is_a_path() -> None:
    assert EngineOptions.of({"cache_dir": "\udcff"}).cache_dir == "\udcff"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_ctx": 4096, "ctx_per_seq": 256}, "not both"),
        ({"n_ctx": 31, "parallel": 16}, "fewer slots"),
        ({"exact": True, "kv": "unified"}, "partitioned"),
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "cache_type_v='q8_0' needs flash"),
        ({"split_mode": "tensor", "flash_attn": "off"}, "split_mode='tensor' needs flash"),
        ({"split_mode": "none", "tensor_split": [1, 2]}, "uses one"),
        ({"rope_scaling": "none", "rope_freq_scale": 0.5}, "no effect with rope_scaling='none'"),
        (
            {"rope_scaling": "linear", "yarn_orig_ctx": 4},
            "yarn_orig_ctx=4 needs rope_scaling='yarn'",
        ),
        ({"rope_scaling": "linear", "yarn_beta_slow": 1}, "yarn_beta_slow=1.0 needs"),
        ({"n_batch": 15}, "n_batch=15 is less than parallel=16"),
        ({"n_ctx": 31}, "each of 16 slots"),
        ({"n_batch": 7, "parallel": 8}, "n_batch=7 is less than parallel=8"),
        ({"quantum": 8}, "quantum=8.*round_robin"),
        ({"quantum": 8, "policy": "priority"}, "quantum=8.*round_robin.*priority"),
        ({"ageing_s": 2.0}, "ageing_s=2.0.*priority"),
        ({"ageing_s": 2.0, "policy": "shortest"}, "ageing_s=2.0.*priority.*shortest"),
        ({"when_full": "wait"}, "when_full='wait'.*max_queue"),
        ({"when_full": "reject"}, "when_full='reject'.*max_queue"),
        ({"itl_ms": 50, "prefill_budget": 64}, "itl_ms=50.*prefill_budget=64"),
        ({"prefill_chunk": 513, "n_batch": 512}, "prefill_chunk=513.*n_batch=512"),
        ({"prefill_budget": 513, "n_batch": 512}, "prefill_budget=513.*n_batch=512"),
        ({"exact": True, "admission": "optimistic"}, "exact=True.*admission='optimistic'"),
        ({"exact": True, "admission": "optimistic", "kv": "unified"}, "exact=True.*kv='unified'"),
        ({"admission": "optimistic"}, "admission='optimistic'.*kv='unified'.*auto"),
        (
            {"admission": "optimistic", "kv": "partitioned"},
            "admission='optimistic'.*kv='unified'.*partitioned",
        ),
        ({"exact": True, "prefill_chunk": 64}, "exact=True.*prefill_chunk=64"),
    ],
)
def test_engine_values_at_odds_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineOptions.of(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"exact": True, "flash_attn": "on"},
        {"exact": True, "cache_type_v": "q5_1"},
        {"cache_type_k": "q8_0", "flash_attn": "off"},
        {"split_mode": "tensor", "exact": True},
        {"rope_freq_scale": 0.5},
        {"rope_scaling": "yarn", "rope_freq_scale": 0.5, "yarn_ext_factor": 0, "yarn_orig_ctx": 1},
        {"yarn_beta_fast": 32},
        {"tensor_split": (0, 1), "split_mode": "row", "main_gpu": 0},
        {"rpc_servers": ["gpu-1.local:50052", "10.0.0.2:65535"]},
        {"adapters": {"red": "red.gguf", "blue": Path("blue.gguf")}, "cache_dir": Path("cache")},
        {"adapters": {}},
        {"parallel": None},
        {"quantum": 8, "policy": "round_robin"},
        {"ageing_s": 2.0, "policy": "priority"},
        {"when_full": "reject", "max_queue": 0},
        {"itl_ms": 50, "prefill_chunk": 64},
        {"prefill_chunk": 512, "prefill_budget": 512, "n_batch": 512},
        {"n_batch": 8, "parallel": 8},
        {"exact": True, "admission": "reserve"},
        {"admission": "optimistic", "kv": "unified"},
    ],
    ids=str,
)
def test_engine_values_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    EngineOptions.of(settings)


def test_lists_and_mappings_of_the_engine_are_copied() -> None:
    split, servers, adapters = [1, 2], ["a:1"], {"red": "red.gguf"}
    options = EngineOptions(tensor_split=split, rpc_servers=servers, adapters=adapters)
    split.append(3)
    servers.append("b:2")
    adapters["blue"] = "blue.gguf"
    assert (options.tensor_split, options.rpc_servers) == ((1.0, 2.0), ("a:1",))
    assert options.adapters == {"red": "red.gguf"}
    assert EngineOptions.of({"adapters": options.adapters}).adapters == options.adapters


def test_slots_are_those_that_were_said_or_sixteen() -> None:
    assert (EngineOptions().parallel, EngineOptions().n_slots) == (None, 16)
    assert EngineOptions(parallel=3).n_slots == 3


def test_unknown_engine_option_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        EngineOptions.of({"n_parallel": 4})
    assert caught.value.option == "n_parallel"


SCHEMA = {"type": "object", "properties": {"ü": {"type": "number"}}}
TEXT = '{"type":"object","properties":{"ü":{"type":"number"}}}'


@pytest.mark.parametrize(
    ("said", "grammar"),
    [
        ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"json_schema": json.dumps(SCHEMA, indent=2)}, Grammar("json_schema", TEXT)),
        ({"json_schema": MappingProxyType(SCHEMA)}, Grammar("json_schema", TEXT)),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar("json_schema", '{"type":"object"}'),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", TEXT[:-1] + ',"additionalProperties":false}'),
        ),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"grammar": '# a\nroot ::= "a"'}, Grammar("gbnf", '# a\nroot ::= "a"')),
        ({"grammar": 'start ::= "a"'}, Grammar("gbnf", 'start ::= "a"')),
        ({}, None),
    ],
)
def test_structure_is_what_one_option_says(said: dict[str, Any], grammar: Grammar | None) -> None:
    options = RunOptions(**said)
    assert options.structure == grammar
    assert hash(options) == hash(RunOptions(**said))
    assert RunOptions(max_tokens=1).over(options).structure == grammar


def test_nearest_structure_wins_as_a_whole() -> None:
    far = RunOptions(json_schema=SCHEMA, seed=1)
    assert RunOptions(regex="a").over(far).structure == Grammar("regex", "a")
    assert RunOptions(response_format={"type": "text"}).over(far).structure is None
    assert RunOptions(regex="a").over(far).seed == 1
    labels = RunOptions(choice=["a", "b"], choice_probs=True)
    assert RunOptions(regex="a").over(labels) == RunOptions(regex="a")
    assert RunOptions(choice=["c"]).over(labels) == RunOptions(choice=["c"], choice_probs=True)


CYCLE: dict[str, Any] = {}
CYCLE["a"] = CYCLE
BUSHY_CYCLE: dict[str, object] = {}
BUSHY_CYCLE |= {"a": BUSHY_CYCLE, "b": BUSHY_CYCLE}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"json_schema": SCHEMA, "regex": "a"}, "json_schema and regex"),
        ({"grammar": "start: A", "response_format": {"type": "text"}}, "give one"),
        ({"json_schema": "["}, "not JSON"),
        ({"json_schema": "[]"}, "JSON object"),
        ({"json_schema": 5}, "mapping or JSON text"),
        ({"json_schema": True}, "mapping or JSON text"),
        ({"json_schema": {"a": math.nan}}, "written as JSON"),
        ({"json_schema": '{"a": NaN}'}, "NaN"),
        ({"json_schema": CYCLE}, "nested more than 128"),
        ({"json_schema": BUSHY_CYCLE}, "nested more than 128"),
        ({"json_schema": "[" * 100_000}, "nested more than 128"),
        ({"json_schema": {"a": {1}}}, "set"),
        ({"json_schema": {"a": "\ud800"}}, "surrogate"),
        ({"json_schema": " " * 2**20 + "{}"}, "1 … 1048576"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"response_format": {}}, "None"),
        ({"response_format": "json"}, "not JSON"),
        ({"response_format": {"type": "json_schema"}}, "needs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "needs"),
        ({"response_format": {"type": "text", "schema": {}}}, "'schema'"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1},
                }
            },
            "strict",
        ),
        ({"regex": ""}, "1 … "),
        ({"regex": 5}, "string"),
        ({"grammar": "a" * 2**21}, "1 … 1048576"),
        ({"grammar": "\ud800"}, "surrogate"),
    ],
)
def test_wrong_structure_is_refused_with_the_reason(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RunOptions(**said)
    assert len(str(caught.value)) < 300


def test_suppressed_tokens_are_banned_whatever_the_caller_asks_for() -> None:
    sampling = RunOptions(logit_bias={7: 5.0, 3: 1.0}).sampling({}, 0, banned=(7, 9))
    assert sampling.logit_bias == ((3, 1.0), (7, -math.inf), (9, -math.inf))


@pytest.mark.parametrize(
    ("said", "n_top"),
    [
        ({}, None),
        ({"prompt_logprobs": 0}, 0),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": False}, None),
        ({"echo": True, "best_of": 2}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": True, "prompt_logprobs": 2}, 2),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 2}, 5),
    ],
)
def test_prompt_is_scored_for_its_logprobs_or_echoed_ones(
    said: dict[str, Any], n_top: int | None
) -> None:
    assert RunOptions(**said).n_prompt_logprobs == n_top


def test_no_tokens_are_for_the_prompt_alone() -> None:
    assert RunOptions(max_tokens=0, echo=True).max_tokens == 0
    both = RunOptions(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(ConfigError, match=r"max_tokens must be 1 … .*echo"):
        RunOptions(max_tokens=0, echo=False)
    with pytest.raises(ConfigError, match="max_tokens"):
        RunOptions(max_tokens=False, echo=True)
    assert RunOptions(echo=False).over(both).max_tokens == 0


@given(st.text("a- \t\n:=", max_size=12))
def test_grammar_with_a_rule_of_gbnf_is_gbnf(grammar: str) -> None:
    is_gbnf = re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE)
    structure = RunOptions(grammar=grammar or "a").structure
    assert structure == Grammar("gbnf" if is_gbnf else "lark", grammar or "a")


@pytest.mark.parametrize("text", [" \n", "a", "a\n", "a ", "\n"])
def test_kind_of_the_longest_grammar_is_found(text: str) -> None:
    """A search that looks at each pair of places would not end."""
    structure = RunOptions(grammar=text * (2**20 // len(text))).structure
    assert structure is not None
    assert structure.kind == "lark"
