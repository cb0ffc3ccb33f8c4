"""The functions of longspan.ops against the definition, and how arrays travel."""

import itertools
import threading

import numpy as np
import pytest
from definition import shaw

import longspan
from longspan import ops

CASES = list(itertools.product([(0, 5), (5, 0), (1, 1), (7, 7), (13, 70), (131, 97)], [0, 2, -3], [False, True]))


def inputs(batch=2, heads=4, kv_heads=2, queries=13, keys=13, head_dim=5, value_dim=3, dtype=np.float64, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    q = draw((batch, heads, queries, head_dim)).astype(dtype)
    k = draw((batch, kv_heads, keys, head_dim)).astype(dtype)
    v = draw((batch, kv_heads, keys, value_dim)).astype(dtype)
    return q, k, v


def close(got, expected, dtype=np.float64, terms=100):
    assert got.shape == expected.shape
    tolerance = 16 * np.finfo(dtype).eps * terms**0.5
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def in_threads(work, arguments):
    """Runs ``work`` with each of these in a thread of its own, all at once."""
    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def streamed(step, q, k, v):
    """What a step gives for tokens one after the other, every other one with an axis of one token, and the last state."""
    state, outputs = None, []
    for t in range(q.shape[2]):
        at = slice(t, t + 1) if t % 2 else t
        out, state = step(q[:, :, at], k[:, :, at], v[:, :, at], state=state)
        outputs.append(out if t % 2 else out[:, :, None])
    return np.concatenate(outputs, 2), state


@pytest.mark.parametrize("feature_map", ["elu+1", "relu", "softplus", "exp"])
@pytest.mark.parametrize("lengths, offset, is_causal", CASES)
def test_kernelized_is_the_definition(lengths, offset, is_causal, feature_map):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1])
    padding = np.random.default_rng(1).random((2, lengths[1])) < 0.3
    for mask in (None, padding, np.ones_like(padding)):
        options = dict(feature_map=feature_map, is_causal=is_causal, offset=offset, key_padding_mask=mask)
        close(ops.kernelized_attention(q, k, v, **options), shaw(q, k, v, **options))


@pytest.mark.parametrize("radius", [0, 1, 3, 20])
@pytest.mark.parametrize("lengths, offset, is_causal", CASES)
def test_shaw_is_the_definition(lengths, offset, is_causal, radius):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1])
    draw = np.random.default_rng(2).standard_normal
    for rel in (draw((4, 2 * radius + 1, 5)), draw((2 * radius + 1, 5))):
        for kernelized in (True, False):
            options = dict(kernelized=kernelized, is_causal=is_causal, offset=offset)
            close(ops.shaw_attention(q, k, v, rel, **options), shaw(q, k, v, rel, **options))


def test_raw_relative_positions_and_no_normaliser():
    q, k, v = inputs()
    rel = np.random.default_rng(3).standard_normal((4, 7, 5))
    options = dict(rel_feature_map="identity", normalize=False, is_causal=True)
    close(ops.shaw_attention(q, k, v, rel, **options), shaw(q, k, v, rel, **options))


@pytest.mark.parametrize("decay", [0.9, [0.5, 1.0]])
def test_decay(decay):
    q, k, v = inputs(queries=150, keys=150)
    options = dict(decay=decay, is_causal=True)
    close(ops.kernelized_attention(q, k, v, **options), shaw(q, k, v, **options))


@pytest.mark.parametrize("algorithm", ["auto", "naive", "chunked"])
def test_algorithms_agree(algorithm):
    q, k, v = inputs(queries=100, keys=100)
    close(ops.kernelized_attention(q, k, v, algorithm=algorithm), shaw(q, k, v))


def test_packed_is_one_after_the_other():
    q, k, v = inputs(batch=1, queries=20, keys=20)
    bounds = [0, 7, 7, 20]
    got = ops.kernelized_attention(q, k, v, cu_seqlens=bounds, is_causal=True)
    pieces = [
        ops.kernelized_attention(*(x[:, :, a:b] for x in (q, k, v)), is_causal=True)
        for a, b in zip(bounds, bounds[1:])
    ]
    close(got, np.concatenate(pieces, 2))
    for other in (np.array(bounds), tuple(bounds), (bounds, np.array(bounds, np.int32))):
        np.testing.assert_array_equal(ops.kernelized_attention(q, k, v, cu_seqlens=other, is_causal=True), got)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_precisions(dtype):
    q, k, v = inputs(dtype=dtype, queries=70, keys=70)
    got = ops.kernelized_attention(q, k, v, is_causal=True)
    assert got.dtype == dtype
    close(got, shaw(q, k, v, is_causal=True), dtype)


def test_bfloat16_of_another_package():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wide = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in inputs(queries=70, keys=70)]
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in wide)
    got, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
    expected = ops.kernelized_attention(*wide, is_causal=True).astype(ml_dtypes.bfloat16)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, expected)
    out, _ = ops.kernelized_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
    assert out.dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="v: expected bfloat16 like q, got float32"):
        ops.kernelized_attention(q, k, wide[2], is_causal=True)
    with pytest.raises(TypeError, match="q: expected float32, float64, float16 or bfloat16"):
        ops.kernelized_attention(*(x.view("V2") for x in (q, k, v)))


def test_contiguous_arrays_are_read_where_they_lie():
    for dtype in (np.float32, np.float64):
        array = np.zeros((2, 3, 4, 5), dtype)
        token_major = np.zeros((2, 4, 3, 5), dtype).transpose(0, 2, 1, 3)
        for walked in (array, token_major, array[:, 1:], array[::2], array[..., 1:3], array[:, :, ::3]):
            assert longspan._native.seen_by_kernels(walked) == (walked.__array_interface__["data"][0], False)
        read_only = array.copy()
        read_only.flags.writeable = False
        assert longspan._native.seen_by_kernels(read_only) == (read_only.__array_interface__["data"][0], False)


def awkward(array):
    """The same numbers in layouts that a caller may come with."""
    yield array.copy("F")
    yield array[:, :, ::-1].copy()[:, :, ::-1]
    yield np.repeat(array, 2, -1)[..., ::2]
    yield np.moveaxis(np.moveaxis(array, -1, 0).copy(), 0, -1)
    yield array.astype(array.dtype.newbyteorder())
    shifted = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    shifted[...] = array
    yield shifted
    read_only = array.copy()
    read_only.flags.writeable = False
    yield read_only
    yield np.asfortranarray(array)[...].view(np.ndarray)


def test_any_layout_gives_the_same():
    q, k, v = inputs(dtype=np.float32)
    expected = ops.kernelized_attention(q, k, v, is_causal=True)
    for which in range(3):
        for layout in awkward((q, k, v)[which]):
            arrays = [q, k, v]
            arrays[which] = layout
            before = layout.copy()
            np.testing.assert_array_equal(ops.kernelized_attention(*arrays, is_causal=True), expected)
            np.testing.assert_array_equal(layout, before)
    repeated = np.broadcast_to(q[:1], q.shape)
    np.testing.assert_array_equal(
        ops.kernelized_attention(repeated, k, v), ops.kernelized_attention(repeated.copy(), k, v)
    )


def test_padding_says_nothing():
    q, k, v = inputs()
    padding = np.zeros((2, 13), bool)
    padding[:, 5:9] = True
    expected = ops.kernelized_attention(q, k, v, key_padding_mask=padding)
    for poison in (np.nan, np.inf, 1e300):
        k[:, :, 5:9] = v[:, :, 5:9] = poison
        np.testing.assert_array_equal(ops.kernelized_attention(q, k, v, key_padding_mask=padding), expected)
    strided = np.zeros((2, 26), bool)[:, ::2]
    strided[...] = padding
    np.testing.assert_array_equal(ops.kernelized_attention(q, k, v, key_padding_mask=strided), expected)
    bytes_of_all_sorts = (padding * np.uint8(7)).view(bool)
    np.testing.assert_array_equal(ops.kernelized_attention(q, k, v, key_padding_mask=bytes_of_all_sorts), expected)


def test_explain_and_mechanisms():
    plan = longspan.explain("shaw", queries=4096, radius=64, is_causal=True)
    assert plan.algorithm == "chunked" and plan.reason
    longer = longspan.explain("shaw", queries=4096, radius=64, is_causal=True, with_backward=True)
    assert all(b["seconds"] > a["seconds"] for a, b in zip(plan.estimates, longer.estimates))
    assert {e["algorithm"] for e in plan.estimates} >= {"chunked", "naive"}
    assert "chunked" in str(plan)
    assert longspan.explain(queries=4096, algorithm="naive").algorithm == "naive"
    assert longspan.explain(queries=2, decay=0.5, is_causal=True).algorithm
    found = longspan.mechanisms()
    for name, info in found.items():
        assert info.name == name and info.algorithms
        assert callable(getattr(ops, info.function)) and "is_causal" in info.options
