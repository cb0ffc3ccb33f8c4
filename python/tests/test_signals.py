"""Ctrl-C ends a long call at once, as an ordinary KeyboardInterrupt, on whatever threads it runs."""

import signal
import threading
import time

import numpy as np
import pytest

import longspan
from longspan import ops

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals that a test can send")

#: Tokens for which attention over all pairs takes many seconds.
LONG = 60_000


def qkv(tokens, heads):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, heads, tokens, 64), dtype=np.float32) for _ in range(3))


@pytest.fixture(autouse=True)
def heard():
    """Programs that a shell starts in the background ignore Ctrl-C; here it interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=[0, 1, 3])
def threads(request):
    longspan.set_num_threads(request.param)
    yield
    longspan.set_num_threads(0)


def seconds_to_the_interrupt(call):
    """How long after a signal ``call`` is over."""
    sent = []

    def send():
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(0.4, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        return time.monotonic() - sent[0]
    finally:
        timer.join()


def softmax():
    return lambda q, k, v: ops.softmax_attention(q, k, v, is_causal=True), LONG, 3


def naive():
    return lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=True, algorithm="naive"), LONG, 3


def tiled():
    bias = np.zeros((3, 2 * LONG - 1), np.float32)
    return lambda q, k, v: ops.toeplitz_attention(q, k, v, bias, algorithm="tiled"), LONG, 3


def aft():
    w = np.zeros((12_000, 12_000), np.float32)
    return lambda q, k, v: ops.aft_full(q, k, v, w), len(w), 32


@pytest.mark.parametrize("kind", [softmax, naive, tiled, aft])
def test_a_call_ends_and_the_next_one_is_as_ever(kind, threads):
    call, tokens, heads = kind()
    arrays = qkv(tokens, heads)
    small = qkv(100, 2)
    before = ops.softmax_attention(*small)
    assert seconds_to_the_interrupt(lambda: call(*arrays)) < 1
    np.testing.assert_array_equal(ops.softmax_attention(*small), before)


@pytest.mark.parametrize("mechanism", ["softmax", "kernelized"])
def test_a_backward_ends(mechanism, threads):
    torch = pytest.importorskip("torch")

    def run(tokens, heads):
        q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv(tokens, heads))
        if mechanism == "softmax":
            out = ops.softmax_attention(q, k, v, is_causal=True)
        else:
            out = ops.kernelized_attention(q, k, v, is_causal=True, algorithm="naive")
        return q, out, torch.ones_like(out)

    # Torch imports half of itself in the first backward, and an interrupted import is never made good.
    _, out, d_out = run(100, 1)
    out.backward(d_out)
    q, out, d_out = run(20_000, 4)
    assert seconds_to_the_interrupt(lambda: out.backward(d_out)) < 1
    assert q.grad is None


def test_a_handler_that_raises_nothing_changes_nothing():
    arrays = qkv(14_000, 3)
    seen = []

    def handler(number, frame):
        seen.append(ops.softmax_attention(*qkv(2_000, 3)).shape)

    before = signal.signal(signal.SIGINT, handler)
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        interrupted = ops.softmax_attention(*arrays)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert seen == [(1, 3, 2_000, 64)]
    np.testing.assert_array_equal(interrupted, ops.softmax_attention(*arrays))


def test_another_thread_is_left_alone():
    arrays = qkv(12_000, 3)
    results = []
    thread = threading.Thread(target=lambda: results.append(ops.softmax_attention(*arrays)))

    def start_and_wait():
        thread.start()
        time.sleep(60)

    assert seconds_to_the_interrupt(start_and_wait) < 1
    thread.join()
    np.testing.assert_array_equal(results[0], ops.softmax_attention(*arrays))
