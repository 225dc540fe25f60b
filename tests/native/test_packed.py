"""Products of packed weights, and attention beside them: right for every shape, and the same in any company."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from itertools import product as product_of
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbatch.backend.bindings import llama_cpp
from cbatch.backend.load import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Floats = NDArray[np.float32]

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "q4_K": 12, "q5_K": 13, "q6_K": 14}
N_IN, N_OUT = 512, 96
ROWS = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 23, 24, 25, 40)

pytestmark = pytest.mark.skipif(bool(packed.why_unfit()), reason=packed.why_unfit() or "-")


class InitParams(ctypes.Structure):
    _fields_ = (
        ("n_bytes", ctypes.c_size_t),
        ("memory", ctypes.c_void_p),
        ("has_no_data", ctypes.c_bool),
    )


def ggml(name: str, result: Any, *kinds: Any) -> Any:
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = result, kinds
    return function


ptr, i32, i64, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


@contextmanager
def graph() -> Iterator[tuple[Any, Any]]:
    """A context of tensors without data, and a backend that computes."""
    context = ggml("ggml_init", ptr, InitParams)(InitParams(1 << 22, None, True))
    backend = ggml("ggml_backend_cpu_init", ptr)()
    ggml("ggml_backend_cpu_set_n_threads", None, ptr, i32)(backend, 2)
    try:
        yield context, backend
    finally:
        ggml("ggml_backend_free", None, ptr)(backend)
        ggml("ggml_free", None, ptr)(context)


def packed_type() -> Any:
    registry = ggml("ggml_backend_cpu_reg", ptr)()
    get = ggml("ggml_backend_reg_get_proc_address", ptr, ptr, ctypes.c_char_p)
    address = get(registry, b"ggml_backend_dev_get_extra_bufts")
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ptr), ptr)(address)(
        ggml("ggml_backend_reg_dev_get", ptr, ptr, size)(registry, 0)
    )
    assert ggml("ggml_backend_buft_name", ctypes.c_char_p, ptr)(types[0]) == b"CBATCH_PACKED"
    return types[0]


def product(weights: bytes, type: int, inputs: Floats, n_in: int, n_out: int) -> Floats:
    """Compute (rows, n_out) of packed weights and (rows, n_in) inputs."""
    tensor = ggml("ggml_new_tensor_2d", ptr, ptr, i32, i64, i64)
    allocate = ggml("ggml_backend_alloc_ctx_tensors_from_buft", ptr, ptr, ptr)
    free = ggml("ggml_backend_buffer_free", None, ptr)
    write = ggml("ggml_backend_tensor_set", None, ptr, ptr, size, size)
    with graph() as (of_weights, _), graph() as (context, backend):
        w = tensor(of_weights, type, n_in, n_out)
        kept = allocate(of_weights, packed_type())
        write(w, ctypes.c_char_p(weights), 0, len(weights))
        x = tensor(context, 0, n_in, len(inputs))
        y = ggml("ggml_mul_mat", ptr, ptr, ptr, ptr)(context, w, x)
        nodes = ggml("ggml_new_graph", ptr, ptr)(context)
        ggml("ggml_build_forward_expand", None, ptr, ptr)(nodes, y)
        used = allocate(context, ggml("ggml_backend_get_default_buffer_type", ptr, ptr)(backend))
        write(x, inputs.ctypes.data, 0, inputs.nbytes)
        assert ggml("ggml_backend_graph_compute", i32, ptr, ptr)(backend, nodes) == 0
        out = np.empty((len(inputs), n_out), np.float32)
        ggml("ggml_backend_tensor_get", None, ptr, ptr, size, size)(
            y, out.ctypes.data, 0, out.nbytes
        )
        free(used)
        free(kept)
    return out


def quantised(weights: Floats, type: int) -> bytes:
    quantise = ggml("ggml_quantize_chunk", size, i32, ptr, ptr, i64, i64, i64, ptr)
    out = ctypes.create_string_buffer(weights.nbytes)
    n = quantise(type, weights.ctypes.data, out, 0, *weights.shape, None)
    return out.raw[:n]


def values_of(data: bytes, type: int) -> Floats:
    gguf = pytest.importorskip("gguf")
    blocks = np.frombuffer(data, np.uint8).reshape(N_OUT, -1)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type))
    return np.asarray(values, np.float32)


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_product_is_that_of_the_values_with_the_same_bits_in_any_company(name: str) -> None:
    type = TYPES[name]
    data, inputs = quantised(drawn(N_OUT, N_IN), type), drawn(max(ROWS), N_IN)
    right = inputs.astype(np.float64) @ values_of(data, type).T
    whole = product(data, type, inputs, N_IN, N_OUT)
    # inputs of quantised weights have 8 bits
    limit = 1e-6 if type < 2 else 0.01
    assert np.linalg.norm(whole - right) <= limit * np.linalg.norm(right)
    for rows in (*(slice(n) for n in ROWS), *(slice(i, i + 1) for i in (5, 17, 39))):
        assert np.array_equal(product(data, type, inputs[rows], N_IN, N_OUT), whole[rows])


@pytest.mark.parametrize("name", TYPES)
def test_inputs_of_every_size_are_computed(name: str) -> None:
    """Nothing overflows: largest and smallest values, zeros, values that are not finite."""
    type = TYPES[name]
    data = quantised(np.full((N_OUT, N_IN), 3.0, np.float32), type)
    inputs = np.zeros((8, N_IN), np.float32)
    inputs[1], inputs[2], inputs[3] = 127.0, -127.0, 1e-30
    inputs[4, 7], inputs[6, 9], inputs[7] = np.nan, np.inf, 1e-45
    inputs[5, ::2], inputs[5, 1::2] = 1e4, -1e4
    found = product(data, type, inputs, N_IN, N_OUT)
    assert np.array_equal(found[0], np.zeros(N_OUT))
    assert np.allclose(found[[1, 2]], np.array([[3.0], [-3.0]]) * 127 * N_IN, rtol=0.01)
    assert np.allclose(found[3], 0.0, atol=1e-6)
    assert np.isnan(found[4]).all()
    assert not np.isfinite(found[6]).any()
    assert np.allclose(found[7], 0.0, atol=1e-6)
    assert np.allclose(found[5], 0.0, atol=0.01 * 3e4 * N_IN)


# ---- attention ----

N_CELLS = 144


def attended(
    queries: Floats, keys: Floats, values: Floats, mask: Floats, *, n_threads: int = 2
) -> Floats:
    """Compute (streams, tokens, heads, n_value) of queries (streams, tokens, heads, n_key).

    Args:
        queries: they reach attention through a product of packed weights, which are those of identity.
        keys: (streams, heads, cells, n_key), as `values`; all in 16 bits, and `mask` (streams, tokens, cells) too.
    """
    n_streams, n_tokens, n_heads, n_key = queries.shape
    n_kv, n_cells, n_value = keys.shape[1], keys.shape[2], values.shape[-1]
    tensor = ggml("ggml_new_tensor_4d", ptr, ptr, i32, i64, i64, i64, i64)
    allocate = ggml("ggml_backend_alloc_ctx_tensors_from_buft", ptr, ptr, ptr)
    write = ggml("ggml_backend_tensor_set", None, ptr, ptr, size, size)
    n_all = n_heads * n_key
    with graph() as (of_weights, _), graph() as (context, backend):
        ggml("ggml_backend_cpu_set_n_threads", None, ptr, i32)(backend, n_threads)
        w = tensor(of_weights, TYPES["f32"], n_all, n_all, 1, 1)
        kept = allocate(of_weights, packed_type())
        same = np.eye(n_all, dtype=np.float32)
        write(w, same.ctypes.data, 0, same.nbytes)
        x = tensor(context, 0, n_all, n_tokens, n_streams, 1)
        y = ggml("ggml_mul_mat", ptr, ptr, ptr, ptr)(context, w, x)
        y = ggml("ggml_reshape_4d", ptr, ptr, ptr, i64, i64, i64, i64)(
            context, y, n_key, n_heads, n_tokens, n_streams
        )
        q = ggml("ggml_permute", ptr, ptr, ptr, i32, i32, i32, i32)(context, y, 0, 2, 1, 3)
        k = tensor(context, 1, n_key, n_cells, n_kv, n_streams)
        v = tensor(context, 1, n_value, n_cells, n_kv, n_streams)
        m = tensor(context, 1, n_cells, n_tokens, 1, n_streams)
        f = ctypes.c_float
        out = ggml("ggml_flash_attn_ext", ptr, ptr, ptr, ptr, ptr, ptr, f, f, f)(
            context, q, k, v, m, 0.125, 0.0, 0.0
        )
        nodes = ggml("ggml_new_graph", ptr, ptr)(context)
        ggml("ggml_build_forward_expand", None, ptr, ptr)(nodes, out)
        used = allocate(context, ggml("ggml_backend_get_default_buffer_type", ptr, ptr)(backend))
        arrays: list[NDArray[Any]] = [np.ascontiguousarray(queries)]
        arrays += [np.ascontiguousarray(a, np.float16) for a in (keys, values, mask)]
        for to, array in zip((x, k, v, m), arrays, strict=True):
            write(to, array.ctypes.data, 0, array.nbytes)
        assert ggml("ggml_backend_graph_compute", i32, ptr, ptr)(backend, nodes) == 0
        found = np.empty((n_streams, n_tokens, n_heads, n_value), np.float32)
        ggml("ggml_backend_tensor_get", None, ptr, ptr, size, size)(
            out, found.ctypes.data, 0, found.nbytes
        )
        for buffer in (used, kept):
            ggml("ggml_backend_buffer_free", None, ptr)(buffer)
    return found


def right_attention(queries: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
    n_per_kv = queries.shape[2] // keys.shape[1]
    k, v = (np.repeat(a.astype(np.float64), n_per_kv, axis=1) for a in (keys, values))
    scores = np.einsum("sthd,shcd->stch", queries, k) * 0.125 + mask[..., None]
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("stch,shcd->sthd", weights, v), np.float32)


def masked(n_streams: int, n_tokens: int) -> Floats:
    """Each token sees some cells, in places of its own."""
    seen = np.random.default_rng(n_tokens).random((n_streams, n_tokens, N_CELLS)) < 0.4
    seen[:, :, 64:80] = False  # a part that nobody sees
    seen[..., 3] = True
    return np.where(seen, 0.0, -np.inf).astype(np.float32)


SIZES = [
    (1, 1, 64, 64),
    (2, 1, 32, 32),
    (6, 2, 128, 128),
    (14, 1, 48, 80),
    (14, 2, 64, 64),
    (4, 4, 96, 16),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n_streams", "n_tokens"), [(5, 1), (1, 16), (2, 3)])
def test_attention_is_softmax_of_the_scores_whoever_is_beside_a_row(
    sizes: tuple[int, ...], n_streams: int, n_tokens: int
) -> None:
    n_heads, n_kv, n_key, n_value = sizes
    queries = drawn(n_streams, n_tokens, n_heads, n_key) * 3
    keys = drawn(n_streams, n_kv, N_CELLS, n_key).astype(np.float16).astype(np.float32)
    values = drawn(n_streams, n_kv, N_CELLS, n_value).astype(np.float16).astype(np.float32)
    mask = masked(n_streams, n_tokens)
    right = right_attention(queries, keys, values, mask)
    hidden: NDArray[np.bool_] = (mask == -np.inf).all(axis=1)  # what nobody sees is not read
    keys = np.where(hidden[:, None, :, None], np.nan, keys)
    values = np.where(hidden[:, None, :, None], np.nan, values)
    for n_threads in (1, 2):
        found = attended(queries, keys, values, mask, n_threads=n_threads)
        assert np.abs(found - right).max() < 1e-5
    for s, t in product_of(range(n_streams), range(n_tokens)):
        one = queries[s : s + 1, t : t + 1], keys[s : s + 1], values[s : s + 1]
        alone = attended(*one, mask[s : s + 1, t : t + 1])
        assert np.array_equal(alone[0, 0], found[s, t])


@pytest.mark.parametrize(("n_heads", "n_kv"), [(1, 1), (4, 2), (7, 1)])
@pytest.mark.parametrize(
    "sees",
    [
        pytest.param(lambda _row, cell: cell >= 0, id="all"),
        pytest.param(lambda row, cell: cell <= row, id="causal"),
        pytest.param(lambda row, cell: (cell <= row) & (cell > row - 5), id="window"),
        pytest.param(lambda row, cell: abs(cell - row) < 5, id="both sides"),
        pytest.param(lambda row, cell: (cell + row) % 3 > 0, id="odd"),
    ],
)
def test_attention_of_texts_is_that_of_each_alone(
    n_heads: int,
    n_kv: int,
    sees: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
) -> None:
    """Tokens that see the same cells, or the first of another's, are computed together, never with another text's."""
    lengths = (10, 3, 1, 70, 6, 13)
    text_of = np.repeat(np.arange(len(lengths)), lengths)
    n = len(text_of)
    queries, keys, values = (drawn(1, n, n_heads, 64), *(drawn(1, n_kv, n, 64) for _ in range(2)))
    keys, values = (a.astype(np.float16).astype(np.float32) for a in (keys, values))
    seen = (text_of == text_of[:, None]) & sees(np.arange(n)[:, None], np.arange(n))
    mask = np.where(seen, 0.0, -np.inf).astype(np.float32)[None]
    whole = attended(queries, keys, values, mask)
    assert np.abs(whole - right_attention(queries, keys, values, mask)).max() < 1e-5
    for i in range(len(lengths)):
        own = text_of == i
        alone = attended(
            queries[:, own], keys[:, :, own], values[:, :, own], mask[:, own][:, :, own]
        )
        assert np.array_equal(alone, whole[:, own])


@pytest.mark.parametrize("n_threads", [1, 2])
def test_attention_of_a_prompt_does_not_depend_on_its_cuts(n_threads: int) -> None:
    """Two sequences of 500 tokens after 40 others, each in cells of its own."""
    n, n_cells = 500, 768
    queries, keys, values = (drawn(2, n, 6, 64), *(drawn(2, 2, n_cells, 64) for _ in range(2)))
    seen = np.arange(n)[:, None] + 40 >= np.arange(n_cells)
    mask = np.broadcast_to(np.where(seen, 0.0, -np.inf).astype(np.float32), (2, n, n_cells))
    whole = attended(queries, keys, values, mask, n_threads=n_threads)
    for cuts in ([64, 128], [1, 7, 70, 199], [*range(0, n, 13)][1:]):
        parts = [
            attended(q, keys, values, m, n_threads=n_threads)
            for q, m in zip(
                np.split(queries, cuts, axis=1), np.split(mask, cuts, axis=1), strict=True
            )
        ]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "n_rows"), [(1, 1, 1), (8, 1, 2), (6, 2, 3), (14, 2, 1), (14, 2, 3)]
)
def test_attention_of_few_rows_does_not_depend_on_threads(
    n_heads: int, n_kv: int, n_rows: int
) -> None:
    """Threads share the cells of a row where rows are few."""
    dice = np.random.default_rng(n_heads)
    for n_cells, share in ((512, 1.0), (1300, 0.5), (1300, 0.1), (4096, 0.9)):
        sizes = (1, n_rows, n_heads, 64), (1, n_kv, n_cells, 64), (1, n_kv, n_cells, 64)
        queries, keys, values = (
            dice.standard_normal(s).astype(np.float16).astype(np.float32) for s in sizes
        )
        seen = dice.random((1, n_rows, n_cells)) < share
        seen[..., 0] = True
        mask = np.where(seen, 0.0, -np.inf).astype(np.float32)
        alone = attended(queries, keys, values, mask, n_threads=1)
        assert np.abs(alone - right_attention(queries, keys, values, mask)).max() < 1e-5
        for n_threads in (2, 3, 5, 8):
            found = attended(queries, keys, values, mask, n_threads=n_threads)
            assert np.array_equal(found, alone)


def test_attention_does_not_depend_on_where_cells_lie() -> None:
    n_seen = 70
    queries, keys, values = drawn(1, 1, 6, 64), drawn(1, 2, n_seen, 64), drawn(1, 2, n_seen, 64)
    found = []
    for seed in range(5):
        places = np.sort(np.random.default_rng(seed).permutation(N_CELLS)[:n_seen])
        mask = np.full((1, 1, N_CELLS), -np.inf, np.float32)
        k, v = (np.zeros((1, 2, N_CELLS, 64), np.float32) for _ in range(2))
        mask[..., places], k[:, :, places], v[:, :, places] = 0.0, keys, values
        found.append(attended(queries, k, v, mask))
    assert all(np.array_equal(one, found[0]) for one in found)


def test_attention_to_what_is_broken_is_broken() -> None:
    queries, mask = drawn(1, 2, 2, 64), np.zeros((1, 2, N_CELLS), np.float32)
    keys, values = drawn(1, 1, N_CELLS, 64), drawn(1, 1, N_CELLS, 64)
    mask[0, 1, 7] = -np.inf
    values[0, 0, 7] = np.nan
    found = attended(queries, keys, values, mask)
    assert np.isnan(found[0, 0]).all()
    assert np.isfinite(found[0, 1]).all()
    keys[0, 0, 9, 5] = np.nan
    assert np.isnan(attended(queries, keys, values, mask)).all()
