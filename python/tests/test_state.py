"""Streaming: whole = chunk after chunk = token by token, and states as values."""

import copy
import pickle

import numpy as np
import pytest
from test_ops import close, inputs

from longspan import State, ops

REL = np.random.default_rng(5).standard_normal((4, 7, 5))


def kernelized(q, k, v, **options):
    return ops.kernelized_attention(q, k, v, is_causal=True, **options)


def kernelized_step(q, k, v, state=None):
    return ops.kernelized_attention_step(q, k, v, state)


def shaw(q, k, v, **options):
    return ops.shaw_attention(q, k, v, REL, is_causal=True, **options)


def shaw_step(q, k, v, state=None):
    return ops.shaw_attention_step(q, k, v, REL, state)


BOTH = pytest.mark.parametrize("whole, step", [(kernelized, kernelized_step), (shaw, shaw_step)])


@BOTH
def test_token_by_token_is_the_whole(whole, step):
    q, k, v = inputs(queries=30, keys=30)
    expected = whole(q, k, v)
    state = None
    for t in range(30):
        token = [x[:, :, t] for x in (q, k, v)]
        if t % 2:
            out, state = step(*token, state)
        else:
            out, state = step(*(x[:, :, None] for x in token), state)
            assert out.shape == (2, 4, 1, 3)
            out = out[:, :, 0]
        close(out, expected[:, :, t])


@BOTH
def test_chunk_after_chunk_is_the_whole(whole, step):
    q, k, v = inputs(queries=90, keys=90)
    expected, end = whole(q, k, v, output_final_state=True)
    state, pieces = None, []
    for a, b in ((0, 40), (40, 41), (41, 90)):
        part = [x[:, :, a:b] for x in (q, k, v)]
        out, state = whole(*part, initial_state=state, output_final_state=True)
        pieces.append(out)
    close(np.concatenate(pieces, 2), expected)
    close(state.numbers, end.numbers)
    token = [x[:, :, 0] for x in (q, k, v)]
    close(step(*token, state)[0], step(*token, end)[0])


@BOTH
def test_a_state_is_a_value(whole, step):
    q, k, v = inputs(queries=9, keys=9)
    _, state = whole(q, k, v, output_final_state=True)
    token = [x[:, :, 0] for x in (q, k, v)]
    others = [state.clone(), copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.select([0, 1])]
    before = state.numbers
    expected, _ = step(*token, state)
    assert not np.array_equal(state.numbers, before)
    for other in others:
        np.testing.assert_array_equal(other.numbers, before)
        np.testing.assert_array_equal(step(*token, other)[0], expected)
        assert other == state
    assert state.nbytes == state.numbers.nbytes and state.dtype == "float64" and state.batch == 2
    assert "batch 2" in repr(state)


def test_beam_search_selects_entries():
    q, k, v = inputs(queries=9, keys=9)
    _, state = kernelized(q, k, v, output_final_state=True)
    beams = state.select([1, 1, 0])
    np.testing.assert_array_equal(beams.numbers, state.numbers[[1, 1, 0]])
    with pytest.raises(ValueError, match="batch index: expected less than 2, got 2"):
        state.select([2])


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
    with pytest.raises(ValueError, match="state: expected batch 1"):
        ops.kernelized_attention_step(*(x[:1] for x in token), state)
    with pytest.raises(ValueError, match="initial state"):
        ops.kernelized_attention(q, k, v, initial_state=state)
    with pytest.raises(ValueError, match="final state"):
        ops.kernelized_attention(q, k, v, output_final_state=True)
    good = (state.mechanism, state.batch, state.kv_heads, state.parts, state.numbers)
    assert State.from_numbers(*good) == state
    for place, wrong in ((0, "nobody"), (1, 3), (3, [1, 2]), (3, [2**63, 2**63, 0, 0, 0, 0]), (4, np.zeros(3))):
        bad = list(good)
        bad[place] = wrong
        with pytest.raises(ValueError):
            State.from_numbers(*bad)
    with pytest.raises(TypeError):
        State.from_numbers(*good[:4], [1.0])


def test_a_state_with_a_broken_ring_is_refused():
    q, k, v = inputs(queries=9, keys=9)
    _, state = shaw(q, k, v, output_final_state=True)
    numbers = state.numbers
    numbers[..., sum(state.parts[:2]) + 1] = 1e9
    broken = State.from_numbers(state.mechanism, state.batch, state.kv_heads, state.parts, numbers)
    with pytest.raises(ValueError, match="ring"):
        ops.shaw_attention_step(*(x[:, :, 0] for x in (q, k, v)), REL, broken)
