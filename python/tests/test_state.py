"""Streaming: whole = chunk after chunk = token by token, and states as values."""

import copy
import multiprocessing
import pickle
from functools import partial

import numpy as np
import pytest
from test_mechanisms import draw
from test_ops import close, inputs

import longspan
from longspan import State, ops

REL = np.random.default_rng(5).standard_normal((4, 7, 5))


kernelized, kernelized_step = partial(ops.kernelized_attention, is_causal=True), ops.kernelized_attention_step
shaw, shaw_step = partial(ops.shaw_attention, rel=REL, is_causal=True), partial(ops.shaw_attention_step, rel=REL)
BOTH = pytest.mark.parametrize("whole, step", [(kernelized, kernelized_step), (shaw, shaw_step)])


@BOTH
def test_a_state_is_a_value(whole, step):
    q, k, v = inputs(queries=9, keys=9)
    _, state = whole(q, k, v, output_final_state=True)
    token = [x[:, :, 0] for x in (q, k, v)]
    others = [state.clone(), copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.select([0, 1])]
    before = state.numbers
    np.testing.assert_array_equal(state.select([1, 1, 0]).numbers, before[[1, 1, 0]])
    expected, _ = step(*token, state=state)
    assert not np.array_equal(state.numbers, before)
    for other in others:
        np.testing.assert_array_equal(other.numbers, before)
        np.testing.assert_array_equal(step(*token, state=other)[0], expected)
        assert other == state
    assert state.nbytes == state.numbers.nbytes and state.dtype == "float64" and state.batch == 2
    assert "batch 2" in repr(state)


def test_wrong_states_are_refused():
    q, k, v = inputs(queries=9, keys=9)
    token = [x[:, :, 0] for x in (q, k, v)]
    _, state = kernelized(q, k, v, output_final_state=True)
    with pytest.raises(TypeError, match="state: expected a longspan.State, got int"):
        ops.kernelized_attention_step(*token, 3)
    with pytest.raises(TypeError, match="state: expected a state of float32 like q, got float64"):
        ops.kernelized_attention_step(*(x.astype(np.float32) for x in token), state)
    with pytest.raises(ValueError, match="state: expected"):
        ops.shaw_attention_step(*token, REL, state)
    with pytest.raises(ValueError, match="initial state"):
        ops.kernelized_attention(q, k, v, initial_state=state)
    with pytest.raises(ValueError, match="final state"):
        ops.kernelized_attention(q, k, v, output_final_state=True)
    good = (state.mechanism, state.options, state.batch, state.kv_heads, state.parts, state.numbers)
    assert State(*good) == state
    for place, wrong in ((0, "nobody"), (1, "x"), (2, 3), (4, [1, 2]), (4, [2**63, 2**63, 0, 0, 0, 0]), (5, np.zeros(3))):
        bad = list(good)
        bad[place] = wrong
        with pytest.raises(ValueError):
            State(*bad)
    with pytest.raises(TypeError):
        State(*good[:5], [1.0])


def test_a_state_with_a_broken_ring_is_refused():
    q, k, v = inputs(queries=9, keys=9)
    _, state = shaw(q, k, v, output_final_state=True)
    numbers = state.numbers
    numbers[..., sum(state.parts[:2]) + 1] = 1e9
    broken = State(state.mechanism, state.options, state.batch, state.kv_heads, state.parts, numbers)
    with pytest.raises(ValueError, match="ring"):
        ops.shaw_attention_step(*(x[:, :, 0] for x in (q, k, v)), REL, broken)


#: What is called, and what `longspan.combine` is told, with which parameters.
SUMS = {
    "kernelized": (ops.kernelized_attention, {}),
    "kernelized, decay": (partial(ops.kernelized_attention, decay=[0.5, 0.9]), {"decay": [0.5, 0.9]}),
    "kernelized, exp": (partial(ops.kernelized_attention, feature_map="exp"), {"feature_map": "exp"}),
    "shaw": (partial(ops.shaw_attention, rel=REL), {"radius": 3}),
    "fourier": (partial(ops.fourier_attention, a=draw(4, 5, 1), b=draw(4, 5)), {"parameters": [draw(4, 5, 1)]}),
    "toeplitz": (partial(ops.toeplitz_attention, bias=draw(4, 119)), {"shape": [119]}),
    "short-convolution": (partial(ops.short_convolution, taps=draw(4, 4, 5)), {"width": 4}),
    "aft-simple": (ops.aft_simple, {}),
    "aft-conv": (lambda q, k, v, **o: ops.aft_conv(q, k[..., 0], v, draw(4, 5), **o), {"taps": 5}),
    "softmax": (partial(ops.softmax_attention, capacity=99), {"capacity": 99}),
}


@pytest.mark.parametrize("name", SUMS)
def test_stretches_computed_apart_add_up(name):
    call, options = SUMS[name]
    mechanism = name.split(",")[0]
    kv_heads = 2 if mechanism in ("kernelized", "shaw") else 4
    q, k, v = inputs(queries=50, keys=50, kv_heads=kv_heads, head_dim=5, value_dim=5)
    _, whole = call(q, k, v, is_causal=True, output_final_state=True)
    cuts = [0, 7, 7, 31, 50]
    pieces = [call(*(x[:, :, a:b] for x in (q, k, v)), is_causal=True, output_final_state=True)[1]
              for a, b in zip(cuts, cuts[1:])]  # fmt: skip
    together = pieces[0]
    for piece in pieces[1:]:
        together = longspan.combine(mechanism, together, piece, **options)
    other = longspan.combine(
        mechanism, longspan.combine(mechanism, *pieces[:2], **options), longspan.combine(mechanism, *pieces[2:], **options),
        **options,
    )  # fmt: skip
    # What they say, not how they are stored: a ring may begin elsewhere.
    after = inputs(queries=9, keys=9, kv_heads=kv_heads, head_dim=5, value_dim=5, seed=3)
    expected = call(*after, is_causal=True, initial_state=whole)
    close(call(*after, is_causal=True, initial_state=together), expected, terms=1e4)
    close(call(*after, is_causal=True, initial_state=other), expected, terms=1e4)


def test_states_that_do_not_add_up():
    q, k, v = inputs(queries=9, keys=9)
    _, state = kernelized(q, k, v, output_final_state=True)
    _, other = shaw(q, k, v, output_final_state=True)
    _, single = kernelized(*(x.astype(np.float32) for x in (q, k, v)), output_final_state=True)
    with pytest.raises(ValueError, match="state"):
        longspan.combine("kernelized", state, other)
    with pytest.raises(ValueError, match="state"):
        longspan.combine("kernelized", state, state.select([0]))
    with pytest.raises(TypeError, match="later: expected a state of float64 like earlier, got float32"):
        longspan.combine("kernelized", state, single)
    with pytest.raises(TypeError, match="earlier: expected a longspan.State, got int"):
        longspan.combine("kernelized", 3, state)
    with pytest.raises(ValueError, match="unknown mechanism"):
        longspan.combine("nobody", state, state)
    angles, phases = draw(2, 5, 1), draw(4, 5)
    _, counted = ops.fourier_attention(q, k, v, angles, phases, is_causal=True, output_final_state=True)
    with pytest.raises(ValueError, match=r"a: expected shape \[2, 5, 1\]"):
        longspan.combine("fourier", counted, counted)
    with pytest.raises(TypeError, match="parameters: expected float64 like the states, got float32"):
        longspan.combine("fourier", counted, counted, parameters=[angles.astype(np.float32)])


def stream_on(state, tokens):
    """In another process: what comes after the tokens of ``state``, and the state after that."""
    outputs = []
    for token in tokens:
        out, state = shaw_step(*token, state=state)
        outputs.append(out)
    return outputs, state


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_state_is_sent_to_another_process_and_back(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    q, k, v = inputs(queries=20, keys=20)
    expected, end = shaw(q, k, v, output_final_state=True)
    _, state = shaw(*(x[:, :, :8] for x in (q, k, v)), output_final_state=True)
    tokens = [tuple(x[:, :, t] for x in (q, k, v)) for t in range(8, 20)]
    with multiprocessing.get_context(method).Pool(1) as pool:
        outputs, last = pool.apply_async(stream_on, (state, tokens)).get(120)
    close(np.stack(outputs, 2), expected[:, :, 8:])
    token = [x[:, :, 0] for x in (q, k, v)]
    close(shaw_step(*token, state=last)[0], shaw_step(*token, state=end)[0])


def test_a_state_made_with_other_options_is_refused():
    q, k, v = (x[:, :, :8] for x in inputs(queries=9, keys=9))
    _, plain = kernelized(q, k, v, output_final_state=True)
    _, fading = kernelized(q, k, v, output_final_state=True, decay=0.5)
    assert plain.options != fading.options
    for options in ({"decay": 0.5}, {"feature_map": "relu"}):
        with pytest.raises(ValueError, match="made with the same options"):
            kernelized(q, k, v, initial_state=plain, **options)
    with pytest.raises(ValueError, match="made with the same options"):
        longspan.combine("kernelized", fading, fading)
    with pytest.raises(ValueError, match="made with the same options"):
        longspan.combine("kernelized", fading, plain, decay=0.5)


def test_a_state_without_memory_is_an_error():
    # In float32 a state counts no further than 2**24 tokens.
    with pytest.raises(ValueError, match="softmax_attention_step: capacity: expected at most 16777216"):
        ops.softmax_attention_step(*[np.zeros((1, 1, 8), np.float32)] * 3, capacity=2**31)
    token = np.zeros((1, 1, 8))
    with pytest.raises(MemoryError, match="softmax_attention_step: state: no memory for"):
        ops.softmax_attention_step(token, token, token, capacity=2**31)
    _, state = ops.softmax_attention_step(token, token, token, capacity=2**20)
    before = state.numbers
    with pytest.raises(MemoryError, match="State.select"):
        state.select([0] * 100_000)
    assert np.array_equal(state.numbers, before)
