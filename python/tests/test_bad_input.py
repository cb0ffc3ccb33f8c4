"""Wrong calls: a Python exception of the fitting type that names argument, expected and got. Never an abort or a hang."""

import inspect
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_mechanisms import called
from test_ops import in_threads, inputs

import longspan
from longspan import ops

Q, K, V = inputs(dtype=np.float32)
REL = np.zeros((4, 7, 5), np.float32)

def attend(q=Q, k=K, v=V, **options):
    return ops.kernelized_attention(q, k, v, **options)


def zeros(*shape):
    return np.zeros(shape, np.float32)


WRONG = [
    (TypeError, "q: expected", lambda: attend([1.0], K, V)),
    (TypeError, "k: expected a numpy.ndarray or a torch.Tensor, all of one kind, got builtins.NoneType", lambda: attend(Q, None, V)),
    (TypeError, "q: expected float32, float64, float16 or bfloat16, got int64", lambda: attend(Q.astype(int), K, V)),
    (TypeError, "q: expected float32, float64, float16 or bfloat16, got object", lambda: attend(Q.astype(object), K, V)),
    (TypeError, "q: expected float32, float64, float16 or bfloat16, got complex", lambda: attend(Q + 1j, K, V)),
    (TypeError, "v: expected float32 like q, got float64", lambda: attend(Q, K, V.astype(float))),
    (TypeError, "k: expected float16 like q", lambda: attend(Q.astype(np.float16), K, V)),
    (ValueError, r"q: expected four axes.*got shape \(13, 5\)", lambda: attend(Q[0, 0], K, V)),
    (ValueError, r"q: expected four axes.*got shape \(\)", lambda: attend(np.ones((), np.float32), K, V)),
    (ValueError, r"k: expected shape \(2, 2, 13, 5\), got shape \(2, 2, 13, 4\)", lambda: attend(Q, K[..., 1:], V)),
    (ValueError, r"v: expected shape \(2, 2, 13, 3\), got shape \(2, 2, 12, 3\)", lambda: attend(Q, K, V[:, :, 1:])),
    (ValueError, r"k: expected shape \(1, 2", lambda: attend(Q[:1], K, V)),
    (ValueError, "q: expected a number of query heads.*got 3", lambda: attend(Q[:, :3], K, V)),
    (ValueError, "unknown feature map", lambda: attend(feature_map='no"pe\n')),
    (TypeError, "feature_map: expected str", lambda: attend(feature_map=["elu+1"])),
    (ValueError, "normalizer: expected unrotated, literal or none with wave='pairs', got 'one_plus'",
     lambda: ops.fourier_attention(Q, K, V, zeros(2, 2, 1), wave="pairs")),
    (ValueError, r"bias: expected shape \(heads, Lq \+ Lk - 1 = 25\), got shape \(4, 7\)",
     lambda: ops.toeplitz_attention(Q, K, V, zeros(4, 7))),
    (ValueError, "bias: expected entries for the distances -12 to 0, or a clipped bias, got a table from -3 to 3",
     lambda: ops.toeplitz_attention(Q, K, V, zeros(4, 7), is_causal=True, output_final_state=True)),
    (ValueError, r"short_convolution: taps: expected shape \(kv_heads, width, head_dim\), got shape \(2, 5\)",
     lambda: ops.short_convolution(Q, K, K, zeros(2, 5))),
    (ValueError, "width: expected between 1 and 64, got 65", lambda: ops.short_convolution(Q, K, K, zeros(2, 65, 5))),
    (ValueError, "unknown algorithm", lambda: attend(algorithm="magic")),
    (TypeError, "normalize: expected bool", lambda: attend(normalize="yes")),
    (TypeError, "is_causal", lambda: attend(is_causal="yes")),
    (TypeError, "offset: expected an integer", lambda: attend(offset=0.5)),
    (TypeError, "offset: expected an integer", lambda: attend(offset=1 << 70)),
    (ValueError, "offset: expected between", lambda: attend(offset=(1 << 63) - 1)),
    (TypeError, "key_padding_mask: expected bool", lambda: attend(key_padding_mask=np.zeros((2, 13)))),
    (ValueError, r"key_padding_mask: expected shape \(2, 13\)", lambda: attend(key_padding_mask=np.zeros((2, 12), bool))),
    (TypeError, "key_padding_mask: expected a numpy.ndarray", lambda: attend(key_padding_mask=[[True]])),
    (ValueError, "batch: expected 1", lambda: attend(cu_seqlens=[0, 13])),
    (ValueError, "cu_seqlens: expected ascending from 0 to 13", lambda: attend(Q[:1], K[:1], V[:1], cu_seqlens=[0, 9])),
    (ValueError, "cu_seqlens: expected ascending", lambda: attend(Q[:1], K[:1], V[:1], cu_seqlens=[0, 9, 3, 13])),
    (ValueError, "cu_seqlens: expected ascending", lambda: attend(Q[:1], K[:1], V[:1], cu_seqlens=[])),
    (ValueError, "cu_seqlens: expected numbers from 0", lambda: attend(Q[:1], K[:1], V[:1], cu_seqlens=[0, -2, 13])),
    (TypeError, "cu_seqlens: expected integers", lambda: attend(cu_seqlens=3)),
    (TypeError, "cu_seqlens: expected integers", lambda: attend(cu_seqlens=[0, 1.5])),
    (ValueError, "cu_seqlens: expected None beside a key_padding_mask",
     lambda: attend(cu_seqlens=[0, 13], key_padding_mask=np.zeros((2, 13), bool))),
    (ValueError, "decay with a bidirectional mask", lambda: attend(decay=0.9)),
    (ValueError, "decay: expected", lambda: attend(decay=0.0, is_causal=True)),
    (ValueError, "decay: expected", lambda: attend(decay=float("nan"), is_causal=True)),
    (ValueError, "decay: expected", lambda: attend(decay=[0.5] * 3, is_causal=True)),
    (TypeError, "decay: expected a number", lambda: attend(decay="0.9", is_causal=True)),
    (TypeError, "decay: expected a number", lambda: attend(decay=object(), is_causal=True)),
    (TypeError, "initial_state: expected", lambda: attend(initial_state=1)),
    (ValueError, "rel: expected shape", lambda: ops.shaw_attention(Q, K, V, REL[:, 1:])),
    (ValueError, r"rel: expected shape \(4, 7, 5\)", lambda: ops.shaw_attention(Q, K, V, REL[:3])),
    (TypeError, "rel: expected an array", lambda: ops.shaw_attention(Q, K, V, 3)),
    (TypeError, "rel: expected float32 like q", lambda: ops.shaw_attention(Q, K, V, REL.astype(float))),
    (ValueError, "rel_feature_map: expected 'same' or 'identity', got 'other'", lambda: ops.shaw_attention(Q, K, V, REL, rel_feature_map="other")),
    (ValueError, "q: expected three axes", lambda: ops.kernelized_attention_step(Q[0, 0], K[:, :, 0], V[:, :, 0])),
    (ValueError, "q: expected one token", lambda: ops.kernelized_attention_step(Q, K, V)),
    (ValueError, "unknown mechanism", lambda: longspan.explain("magic")),
    (ValueError, "queries: expected an integer from 0 to .*, got -1", lambda: longspan.explain(queries=-1)),
    (TypeError, "queries: expected an integer", lambda: longspan.explain(queries=1.5)),
    (ValueError, r"explain: magic: expected an option of kernelized \(.*, got an unknown field", lambda: longspan.explain(magic=1)),
    (ValueError, "explain: wave: expected one of each, pairs, got \"x\"", lambda: longspan.explain("fourier", wave="x")),
    (ValueError, "explain: kind: expected one of table, clipped, buckets, grid, got \"x\"", lambda: longspan.explain("toeplitz", kind="x")),
    (ValueError, "explain: normalize: invalid type: null, expected a boolean", lambda: longspan.explain(normalize=None)),
    (ValueError, "threads: expected 0 to 4096", lambda: longspan.set_num_threads(10**6)),
    (ValueError, "threads: expected an integer from 0 on, got -1", lambda: longspan.set_num_threads(-1)),
]  # fmt: skip


def state_of(function=ops.kernelized_attention, *more, q=Q, k=K, v=V, **options):
    return function(q, k, v, *more, is_causal=True, output_final_state=True, **options)[1]


STATE = state_of()
NARROW = K[..., :3]
OTHER = ops.aft_simple(V, V, V, is_causal=True, output_final_state=True)[1]
TOKEN = (Q[:, :, 0], K[:, :, 0], V[:, :, 0])
WRONG += [
    (TypeError, "kernelized_attention: is_causal: expected bool, got 1", lambda: attend(is_causal=1)),
    (TypeError, "is_causal: expected bool, got None", lambda: attend(is_causal=None)),
    (TypeError, "output_final_state: expected bool, got 1", lambda: attend(output_final_state=1)),
    (ValueError, r"cu_seqlens: expected numbers from 0 to 2\*\*63 - 1", lambda: attend(cu_seqlens=[0, 2**70])),
    (ValueError, "kernelized_attention: initial_state: expected a state of kernelized, .* got a state of aft-simple",
     lambda: attend(is_causal=True, initial_state=OTHER)),
    (ValueError, "kernelized_attention_step: state: expected a state of kernelized, .* got a state of aft-simple",
     lambda: ops.kernelized_attention_step(*TOKEN, OTHER)),
    (ValueError, "initial_state: expected a state of kernelized, batch 1, key/value heads 2, .* got a state of kernelized, batch 2",
     lambda: attend(Q[:1], K[:1], V[:1], is_causal=True, initial_state=STATE)),
    (ValueError, "state: expected batch 1 and 2 key/value heads, got batch 2",
     lambda: ops.kernelized_attention_step(*(x[:1] for x in TOKEN), STATE)),
    (ValueError, "initial_state: expected a state of kernelized",
     lambda: attend(Q[..., :3], NARROW, V, is_causal=True, initial_state=STATE)),
    (ValueError, "combine: later: expected a state of kernelized, .* got a state of aft-simple",
     lambda: longspan.combine("kernelized", STATE, OTHER)),
    (TypeError, "combine: later: expected a longspan.State, got int", lambda: longspan.combine("kernelized", STATE, 3)),
    (ValueError, "combine: radius: expected a value, got none", lambda: longspan.combine("shaw", STATE, STATE)),
    (ValueError, "State.select: indices: expected an integer from 0 on, got -1", lambda: STATE.select([-1])),
    (ValueError, "State.select: indices: expected an integer from 0 on, got 1180591620717411303424", lambda: STATE.select([2**70])),
    (ValueError, "State.select: indices: expected less than 2, got 5", lambda: STATE.select(np.array([0, 5]))),
    (TypeError, "State.select: indices: expected an integer from 0 on, got 1.5", lambda: STATE.select([1.5])),
    (TypeError, "State.select: indices: expected a list of integers, got 3", lambda: STATE.select(3)),
    (TypeError, "State.select: indices: expected an integer from 0 on, got True", lambda: STATE.select(np.array([True, False]))),
    (TypeError, "set_num_threads: threads: expected an integer from 0 on, got True", lambda: longspan.set_num_threads(True)),
    (TypeError, "offset: expected an integer that fits 64 bits, got True", lambda: attend(offset=True)),
    (TypeError, "State.select: indices: expected a list of integers, got 'ab'", lambda: STATE.select("ab")),
    (ValueError, "State: batch: expected an integer from 0 on, got -1",
     lambda: longspan.State("kernelized", "1.0", -1, 2, [1] * 6, Q)),
    (TypeError, "State: kv_heads: expected an integer from 0 on, got 'a'",
     lambda: longspan.State("kernelized", "1.0", 1, "a", [1] * 6, Q)),
    (ValueError, "State: numbers: expected 12 for a state of kernelized, batch 1",
     lambda: longspan.State("kernelized", "1.0", 1, 2, [1] * 6, Q)),
    (TypeError, "set_num_threads: threads: expected an integer from 0 on, got 'a'", lambda: longspan.set_num_threads("a")),
    (ValueError, "set_num_threads: threads: expected an integer from 0 on, got 1180591", lambda: longspan.set_num_threads(2**70)),
    (ValueError, "explain: radius: invalid value: integer `-1`, expected an integer from 0 on",
     lambda: longspan.explain("shaw", radius=-1)),
    (TypeError, "explain: is_causal: expected bool, got 1", lambda: longspan.explain(is_causal=1)),
    (ValueError, "explain: offset: expected an integer from", lambda: longspan.explain(offset=2**70)),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, call", WRONG, ids=[message[:40] for _, message, _ in WRONG])
def test_wrong_calls(kind, message, call):
    with pytest.raises(kind, match=message) as raised:
        call()
    text = str(raised.value)
    assert not any(rust in text for rust in ("usize", "Vec<", "StateShape", "Some(", "{ ", "f32")), text


def test_a_result_that_fits_no_memory_is_a_memory_error():
    wide = np.broadcast_to(np.float32(1), (1, 1, 1 << 46, 1))
    with pytest.raises(MemoryError):
        ops.kernelized_attention(wide, wide[:, :, :4], wide[:, :, :4])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_arrays_are_legal(shape):
    q = np.ones(shape, np.float32)
    for is_causal in (False, True):
        assert ops.kernelized_attention(q, q, q, is_causal=is_causal).shape == shape
        rel = np.ones((shape[1], 3, shape[3]), np.float32)
        assert ops.shaw_attention(q, q, q, rel, is_causal=is_causal).shape == shape


def long_inputs(seed=0):
    return inputs(queries=700, keys=700, head_dim=16, value_dim=16, dtype=np.float32, seed=seed)


def test_many_threads_at_once():
    expected = [ops.kernelized_attention(*long_inputs(seed), is_causal=True) for seed in range(4)]
    failures = []

    def work(seed):
        for _ in range(5):
            if not np.array_equal(ops.kernelized_attention(*long_inputs(seed), is_causal=True), expected[seed]):
                failures.append(seed)

    in_threads(work, [i % 4 for i in range(12)])
    assert not failures


def test_more_threads_than_may_have_pools():
    expected = ops.kernelized_attention(Q, K, V)
    for _ in range(300):
        results = []
        in_threads(lambda _: results.append(ops.kernelized_attention(Q, K, V)), [0])
        np.testing.assert_array_equal(results[0], expected)


def test_the_interpreter_runs_on_meanwhile():
    arrays = inputs(batch=1, queries=1 << 17, keys=1 << 17, head_dim=32, value_dim=32, dtype=np.float32)
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    ops.kernelized_attention(*arrays, is_causal=True)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(start < t < end for t in ticks) >= 3, f"{end - start:.3f} s without a turn for another thread"


def test_the_bits_do_not_depend_on_threads():
    before = longspan.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 0):
            longspan.set_num_threads(threads)
            assert longspan.get_num_threads() == threads or threads == 0
            results.append(ops.kernelized_attention(*long_inputs(), is_causal=True))
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)
    finally:
        longspan.set_num_threads(before)


def in_child(_):
    return [ops.kernelized_attention(*long_inputs(), is_causal=True), ops.kernelized_attention(Q, K, V)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_computes():
    expected = in_child(0)
    children = []
    # From another thread too: the child has that thread only.
    for fork_in_thread in (False, True):

        def start():
            with multiprocessing.get_context("fork").Pool(2) as pool:
                children.append(pool.map_async(in_child, range(4)).get(60))

        if fork_in_thread:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join(90)
            assert not thread.is_alive()
        else:
            start()
    assert len(children) == 2
    for results in children:
        for result in results:
            for got, wanted in zip(result, expected):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_the_middle_of_a_call():
    arrays = inputs(batch=1, queries=1 << 16, keys=1 << 16, head_dim=32, value_dim=32, dtype=np.float32)
    busy = threading.Thread(target=lambda: [ops.kernelized_attention(*arrays, is_causal=True) for _ in range(4)])
    busy.start()
    expected = in_child(0)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            same = all(np.array_equal(a, b) for a, b in zip(in_child(0), expected))
            os._exit(0 if same else 1)
        deadline = time.monotonic() + 60
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.01)
        assert status == 0
    busy.join()


def test_one_state_in_two_threads_is_an_error_or_right():
    q, k, v = (x[:, :, 0] for x in inputs(batch=64, head_dim=64, value_dim=64))
    _, state = ops.kernelized_attention_step(q, k, v)
    outcomes = []

    def work(_):
        for _ in range(50):
            try:
                ops.kernelized_attention_step(q, k, v, state)
                outcomes.append("done")
            except RuntimeError as error:
                outcomes.append(str(error))

    in_threads(work, range(3))
    assert "done" in outcomes
    assert all(o == "done" or "no other thread is using" in o for o in outcomes)


def test_exit_while_threads_run(tmp_path):
    code = (
        "import threading, numpy as np; from longspan import ops\n"
        "x = np.ones((1, 4, 1 << 15, 16), np.float32)\n"
        "threading.Thread(target=lambda: [ops.kernelized_attention(x, x, x, is_causal=True) for _ in range(100)],"
        " daemon=True).start()\n"
        "ops.kernelized_attention(x, x, x)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, cwd=tmp_path).returncode == 0


def test_fuzz():
    """Random calls, right and wrong: nothing but an answer of the right shape, TypeError or ValueError."""
    seed = int(os.environ.get("LONGSPAN_FUZZ_SEED", "0"))
    calls = int(os.environ.get("LONGSPAN_FUZZ_CALLS", "4000"))
    draw = random.Random(seed)
    names = ("kernelized", "shaw", "fourier", "toeplitz", "aft-full", "aft-local", "aft-simple", "aft-conv", "softmax",
             "short-convolution", "gated", "delta")  # fmt: skip
    counts = {name: {"answer": 0, "error": 0} for name in names}

    def size():
        return draw.choice([0, 1, 1, 2, 2, 3, 4, 5, 8, 17, 65])

    def array(*shape):
        if draw.random() < 0.02:
            return draw.choice([None, 3, "q", [1.0], np.array(2.0), object()])
        shape = [size() if draw.random() < 0.02 else n for n in shape]
        dtype = draw.choice([np.float32] * 30 + [np.float64, np.int32, ">f4", np.float16, "c8"])
        base = np.random.default_rng(draw.randrange(100)).standard_normal([2 * n for n in shape])
        if draw.random() < 0.05:
            base[base > 1] = draw.choice([np.nan, np.inf, -np.inf, 1e30])
        with np.errstate(all="ignore"):
            base = base.astype(dtype)
        view = base[tuple(slice(None, None, draw.choice([2, 2, 2, -2])) for _ in shape)]
        return draw.choice([np.ascontiguousarray, lambda x: x, np.asfortranarray])(view)

    def gate(*shape, most=None):
        """Logarithms of decays, or numbers up to ``most``; some that are neither."""
        given = array(*shape)
        if draw.random() < 0.1 or getattr(given, "dtype", None) != np.float32:
            return given
        return -abs(given) if most is None else np.minimum(abs(given), np.float32(most))

    def function(name, batch, heads, kv_heads, queries, keys, dim):
        """The function of a mechanism, and its parameters of the right shapes or almost."""
        if name == "shaw":
            return ops.shaw_attention, [array(*draw.choice([(heads, 2 * size() + 1, dim), (2 * size() + 1, dim)]))], {}
        if name == "fourier":
            # "x" is no name; most draws are to be answered.
            more = {"normalizer": draw.choice(["one_plus", "dominant", "unrotated", "none"] * 3 + ["literal", "x"]),
                    "wave": draw.choice(["each"] * 8 + ["pairs", "x"])}  # fmt: skip
            count = {"dominant": 3, "none": 3, "unrotated": 2, "literal": 2}.get(more["normalizer"], 1)
            pairs = more["wave"] == "pairs"
            axes = draw.choice([1, 1, 2])
            if axes == 2 or draw.random() < 0.2:
                more |= {"q_positions": array(batch, queries, axes), "k_positions": array(batch, keys, axes)}
            angles = array(kv_heads, dim // 2 if pairs else dim, axes)
            return ops.fourier_attention, [angles, *(array(heads, dim) for _ in range(0 if pairs else count))], more
        if name == "toeplitz":
            kind, shape = draw.choice([
                ("table", [max(queries + keys - 1, 0)]), ("clipped", [2 * size() + 1]), ("buckets", [2 * size()]),
                ("grid", [2 * size() + 1, 2 * size() + 1]), ("x", [3]),
            ])  # fmt: skip
            return ops.toeplitz_attention, [array(heads, *shape)], {"kind": kind, "max_distance": draw.choice([128, 3, 0])}
        if name == "aft-full":
            if draw.random() < 0.5:
                return ops.aft_full, [array(queries, keys)], {}
            rank = size()
            return ops.aft_full, [], {"u": array(queries, rank), "z": array(keys, rank)}
        if name == "aft-local":
            return ops.aft_local, [array(queries, 2 * size() + 1)], {}
        if name == "aft-conv":
            more = {"gamma": array(heads), "beta": array(heads)} if draw.random() < 0.5 else {}
            return ops.aft_conv, [array(heads, size())], more
        if name == "short-convolution":
            more = {"silu": draw.choice([True, False, "x"])} if draw.random() < 0.3 else {}
            return ops.short_convolution, [array(kv_heads, draw.choice([1, 4, 4, 65]), dim)], more
        if name == "softmax":
            more = {"scale": draw.choice([None, 0.5, -1.0, float("nan"), "x"]), "capacity": draw.choice([4096, 0, -1, "x"])}
            return ops.softmax_attention, [], more if draw.random() < 0.3 else {}
        if name in ("gated", "delta"):
            log_decay = gate(batch, kv_heads, keys, *draw.choice([(), (dim,)])) if draw.random() < 0.8 else None
            if name == "gated":
                return ops.gated_attention, [log_decay], {}
            return ops.delta_attention, [gate(batch, kv_heads, keys, most=2.0), log_decay], {}
        return {"kernelized": ops.kernelized_attention, "aft-simple": ops.aft_simple}[name], [], {}

    for index in range(calls):
        name = draw.choice(names)
        batch, kv_heads, queries, keys, dim, value_dim = size(), size(), size(), size(), size(), size()
        if batch * kv_heads * (queries + keys) * (dim + value_dim) > 100_000:
            continue
        if name.startswith(("aft", "short")) and draw.random() < 0.95:
            value_dim = dim
        heads = kv_heads * draw.choice([1, 1, 2])
        if name in ("gated", "delta") and draw.random() < 0.95:
            keys = queries
        q, k, v = array(batch, heads, queries, dim), array(batch, kv_heads, keys, dim), array(batch, kv_heads, keys, value_dim)
        if name == "aft-conv":
            k = array(batch, kv_heads, keys)
        call, parameters, options = function(name, batch, heads, kv_heads, queries, keys, dim)
        maybe = {
            "feature_map": ["elu+1", "relu", "softplus", "exp", "identity", "nope", None],
            "is_causal": [True, False, None],
            "offset": [0, 1, -3, keys - queries, 10**9, -(2**63), 2**64, "a"],
            "key_padding_mask": [np.zeros((batch, keys), bool), np.ones((batch, keys), bool), np.zeros(3)],
            "cu_seqlens": [[0, keys], [0, keys // 2, keys], ([0, queries], [0, keys]), [3, 1], "x", 7],
            "decay": [0.5, [0.9] * kv_heads, 2.0, "x", -1],
            "normalize": [True, False, 1],
            "algorithm": ["auto", "naive", "chunked", "tiled", "fft", "x"],
            "output_final_state": [True, False],
            "initial_state": [None, 3],
        }
        for option, values in maybe.items():
            known = option in inspect.signature(call).parameters
            if draw.random() < (0.1 if known else 0.01):
                options[option] = draw.choice(values)
        try:
            out = call(q, k, v, *parameters, **options)
            out = out[0] if options.get("output_final_state") else out
            # Heads of values may share those of queries and keys.
            sharing = v.shape[1] // k.shape[1] if name in ("gated", "delta") and k.shape[1] else 1
            assert out.shape == (q.shape[0], q.shape[1] * sharing, q.shape[2], v.shape[3]), f"call {index} of seed {seed}: {name}"
            counts[name]["answer"] += 1
        except (TypeError, ValueError) as error:
            assert str(error), f"call {index} of seed {seed}: {name}"
            counts[name]["error"] += 1
    assert all(min(both.values()) > calls // 200 for both in counts.values()), counts


def test_fuzzed_states():
    """Numbers of a state may come from anywhere: an answer or a ValueError, whatever they are."""
    draw = np.random.default_rng(int(os.environ.get("LONGSPAN_FUZZ_SEED", "0")))
    q, k, v = inputs(kv_heads=4, head_dim=4, value_dim=4, queries=6, keys=6)
    token = [x[:, :, 0] for x in (q, k, v)]
    answers = errors = 0
    for name in ("kernelized", "shaw", "toeplitz", "aft_local", "aft_full", "softmax"):
        whole, step = called(name, is_causal=True), called(name, "_step")
        _, state = whole(q, k, v, output_final_state=True)
        for _ in range(60):
            numbers = state.numbers
            places = draw.integers(0, numbers.size, draw.integers(1, 4))
            numbers.reshape(-1)[places] = draw.choice([np.nan, np.inf, -np.inf, -1.0, 0.5, 1e300, 2.0**53, 7.0], len(places))
            broken = longspan.State(state.mechanism, state.options, state.batch, state.kv_heads, state.parts, numbers)
            try:
                with np.errstate(all="ignore"):
                    whole(q, k, v, initial_state=broken, output_final_state=True)
                    step(*token, state=broken)
                answers += 1
            except ValueError as error:
                assert str(error), name
                errors += 1
    assert answers and errors


@pytest.mark.parametrize("feature_map", ["elu+1", "exp", "prf"])
def test_heads_without_features_are_refused(feature_map):
    q, v = zeros(1, 1, 3, 0), zeros(1, 1, 3, 2)
    calls = [lambda: ops.kernelized_attention(q, q, v, feature_map=feature_map),
             lambda: ops.kernelized_attention_step(q[:, :, 0], q[:, :, 0], v[:, :, 0], feature_map=feature_map)]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="q: expected heads of 1 feature or more, got 0"):
            call()
    assert ops.kernelized_attention(zeros(1, 1, 3, 2), zeros(1, 1, 3, 2), q).shape == (1, 1, 3, 0)
