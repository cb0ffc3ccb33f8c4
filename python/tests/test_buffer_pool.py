"""Buffers of results return to the pool when their arrays are gone, and never before."""

import gc
import os

import numpy as np
import pytest
from test_ops import in_threads

import longspan
from longspan import ops

RNG = np.random.default_rng(0)
SHAPE = (1, 2, 600, 32)


def inputs(dtype=np.float32):
    return [RNG.normal(size=SHAPE).astype(dtype) for _ in range(3)]


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_buffer_returns_to_the_pool(dtype):
    q, k, v = inputs(dtype)
    # What else is garbage must not come back in between.
    gc.collect()
    out = ops.kernelized_attention(q, k, v)
    expected, at = out.copy(), address(out)
    assert at % 64 == 0 and out.flags.c_contiguous and out.flags.aligned and out.flags.writeable and out.dtype == dtype
    del out
    again = ops.kernelized_attention(q, k, v)
    assert address(again) == at
    np.testing.assert_array_equal(again, expected)


def test_buffers_in_use_are_left_alone():
    calls = [inputs() for _ in range(6)]
    kept = [ops.kernelized_attention(*call, is_causal=True) for call in calls]
    copies = [out.copy() for out in kept]
    # A part of a result keeps all of its memory.
    rows = kept[2][0, 1, 300:]
    del kept[2], kept[0]
    gc.collect()
    for call in calls:
        ops.kernelized_attention(*call, is_causal=False)
    more = [ops.kernelized_attention(*call, is_causal=False) for call in calls]
    np.testing.assert_array_equal(rows, copies[2][0, 1, 300:])
    for out, copy in zip(kept, [copies[n] for n in (1, 3, 4, 5)]):
        np.testing.assert_array_equal(out, copy)
    results = kept + more + [rows]
    for n, out in enumerate(results):
        assert not any(np.shares_memory(out, other) for other in results[n + 1 :])


def test_threads_get_buffers_of_their_own():
    calls = [inputs() for _ in range(4)]
    expected = [ops.kernelized_attention(*call, is_causal=True).copy() for call in calls]
    wrong = []

    def run(n):
        for _ in range(50):
            out = ops.kernelized_attention(*calls[n], is_causal=True)
            if not np.array_equal(out, expected[n]):
                wrong.append(n)

    in_threads(run, range(4))
    assert not wrong


def test_a_tensor_keeps_its_buffer():
    torch = pytest.importorskip("torch")
    pytest.importorskip("longspan.torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs())
    gradients = torch.autograd.grad(ops.kernelized_attention(q, k, v).square().sum(), (q, k, v))
    copies = [g.clone() for g in gradients]
    for _ in range(5):
        torch.autograd.grad(ops.kernelized_attention(v, q, k).square().sum(), (q, k, v))
    assert all(torch.equal(g, copy) for g, copy in zip(gradients, copies))
    assert len({g.data_ptr() for g in gradients}) == 3


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read in /proc")
def test_an_emptied_pool_gives_its_memory_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    q = np.ones((1, 8, 20_000, 64), np.float32)
    out = ops.kernelized_attention(q, q, q)
    size = out.nbytes
    copy = out[0, 0, :3].copy()
    del out
    before = resident()
    longspan.empty_cache()
    assert resident() < before - size / 2
    np.testing.assert_array_equal(ops.kernelized_attention(q, q, q)[0, 0, :3], copy)
