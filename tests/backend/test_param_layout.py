"""Structures of the bindings become those of the library, or the library is refused."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest

from cbatch.backend.param_layout import fit_structures

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="sizes are seen on x86-64 alone"
)
_LIB = vars(llama_cpp.llama_cpp)["_lib"]
_MODEL = llama_cpp.llama_model_params


def _fields(kind: Any) -> list[Any]:
    return list(vars(kind)["_fields_"])


def _bindings(*without: str, model: Any = _MODEL) -> Any:
    """Bindings that do not know some fields of contexts, which the library has."""
    fields = [f for f in _fields(llama_cpp.llama_context_params) if f[0] not in without]
    kind = type("llama_context_params", (ctypes.Structure,), {"_fields_": fields})
    name = "llama_context_default_params"
    function = ctypes.CFUNCTYPE(kind)((name, _LIB))
    init = ctypes.CFUNCTYPE(None, kind)(lambda params: None)
    return SimpleNamespace(
        _lib=_LIB,
        llama_context_params=kind,
        llama_model_params=model,
        llama_context_default_params=function,
        llama_init_from_model=init,
        llama_log_callback=llama_cpp.llama_log_callback,
    )


def test_structures_of_the_installed_library_stay() -> None:
    bindings = _bindings()
    kind = bindings.llama_context_params
    assert fit_structures(bindings) == ""
    assert bindings.llama_context_params is kind


@pytest.mark.parametrize("field", ["abort_callback", "ctx_other"])
def test_field_that_bindings_do_not_know_keeps_its_default(field: str) -> None:
    """One before the flags, and one at the end."""
    bindings = _bindings(field)
    assert fit_structures(bindings) == ""
    made = bindings.llama_context_default_params()
    assert ctypes.sizeof(made) == ctypes.sizeof(llama_cpp.llama_context_params)
    assert (made.offload_kqv, made.swa_full, made.kv_unified, made.n_ctx) == (
        True,
        True,
        False,
        512,
    )
    assert bindings.llama_context_params is type(made)
    assert bindings.llama_init_from_model.argtypes[0] is type(made)


@pytest.mark.parametrize(
    "fields", [("n_ctx",), ("n_batch", "n_threads"), ("cb_eval_user_data", "type_k")]
)
def test_fields_that_moved_elsewhere_are_refused(fields: tuple[str, ...]) -> None:
    assert "llama_context_params" in fit_structures(_bindings(*fields))


def test_refusal_names_both_sizes() -> None:
    fields = ("n_batch", "n_threads", "cb_eval_user_data")
    n_known, n_there = (
        ctypes.sizeof(k.llama_context_params) for k in (_bindings(*fields), llama_cpp)
    )
    assert fit_structures(_bindings(*fields)) == (
        f"llama_context_params, which has {n_known} bytes in llama-cpp-python, has its fields elsewhere in the "
        f"library, where it has {n_there} bytes"
    )


@pytest.mark.parametrize("is_longer", [True, False])
def test_library_with_fewer_fields_or_in_another_order_is_refused(is_longer: bool) -> None:
    fields = _fields(_MODEL)
    names = [name for name, *_ in fields]
    i, j = names.index("split_mode"), names.index("main_gpu")
    if is_longer:
        fields.append(("later", ctypes.c_void_p))
    else:
        fields[i], fields[j] = fields[j], fields[i]
    kind = type("llama_model_params", (ctypes.Structure,), {"_fields_": fields})
    assert "llama_model_params" in fit_structures(_bindings(model=kind))
