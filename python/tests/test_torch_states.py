"""Gradients through states: of a loss over later tokens with respect to earlier ones, and to a state itself."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import longspan
import pytest
import torch
from agreement import draw, elsewhere, leaves, same_gradients, steps
from longspan import _calls, ops
from longspan.torch import (
    AftSimple,
    FourierAttention,
    KernelizedAttention,
    ShortConvolution,
    TensorState,
    ToeplitzAttention,
)

LENGTH = 12


def inputs(batch=2, length=LENGTH):
    return [draw(batch, 2, length, 4, seed=seed) for seed in (1, 2, 3)]


def of_keys(q, k, v, w, step=False, **options):
    """AFT-conv, of whose keys each is one number."""
    return (ops.aft_conv_step if step else ops.aft_conv)(q, k[..., 0], v, w, **options)


def between_gates(q, k, v, taps, bias, step=False, is_causal=True, **options):
    """A convolution of values alone, gated here so that queries and keys have gradients, too."""
    found = (ops.depthwise_convolution_step if step else ops.depthwise_convolution)(k * v, taps, bias, silu=True, **options)
    return (q * found[0], found[1]) if isinstance(found, tuple) else q * found


CASES = {
    "kernelized": (ops.kernelized_attention, []),
    "kernelized, decay": (partial(ops.kernelized_attention, decay=[0.5, 0.9]), []),
    "kernelized, exp": (partial(ops.kernelized_attention, feature_map="exp"), []),
    "shaw": (ops.shaw_attention, [draw(2, 7, 4)]),
    "shaw, positions alone": (partial(ops.shaw_attention, kernelized=False), [draw(2, 7, 4)]),
    "fourier": (ops.fourier_attention, [draw(2, 4, 1), draw(2, 4)]),
    "fourier, dominant": (partial(ops.fourier_attention, normalizer="dominant"),
                          [draw(2, 4, 1), draw(2, 4), draw(2, 4, seed=7), draw(2, 4, seed=8)]),
    "rotary": (partial(ops.fourier_attention, wave="pairs", normalizer="unrotated"), [draw(2, 2, 1)]),
    "softmax": (partial(ops.softmax_attention, capacity=64), []),
    "softmax, window": (partial(ops.softmax_attention, window=8), []),
    "toeplitz": (partial(ops.toeplitz_attention, kind="clipped"), [draw(2, 7)]),
    "toeplitz, exp": (partial(ops.toeplitz_attention, kind="clipped", feature_map="exp"), [draw(2, 7)]),
    "toeplitz, radius 0": (partial(ops.toeplitz_attention, kind="clipped"), [draw(2, 1)]),
    "toeplitz, table": (ops.toeplitz_attention, [draw(2, 2 * LENGTH - 1)]),
    "toeplitz, buckets": (partial(ops.toeplitz_attention, kind="buckets", max_distance=7), [draw(2, 6)]),
    "short-convolution": (ops.short_convolution, [draw(2, 4, 4)]),
    "depthwise-convolution": (between_gates, [draw(2, 4, 4), draw(2, 4)]),
    "aft-simple": (ops.aft_simple, []),
    "aft-local": (ops.aft_local, [draw(LENGTH, 5)]),
    "aft-full": (ops.aft_full, [draw(LENGTH, LENGTH)]),
    "aft-conv": (of_keys, [draw(2, 4)]),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", CASES)


def in_pieces(function, tensors, cuts):
    q, k, v, *parameters = tensors
    state, pieces = None, []
    for a, b in zip([0, *cuts], [*cuts, LENGTH]):
        part = [t[:, :, a:b] for t in (q, k, v)]
        out, state = function(*part, *parameters, is_causal=True, initial_state=state, output_final_state=True)
        # torch's own operations know that no token leaves nothing.
        assert isinstance(state, TensorState) and (state.numbers.requires_grad or a == b)
        pieces.append(out)
    return torch.cat(pieces, 2), state


@EVERY
@pytest.mark.parametrize("path", [nullcontext, elsewhere])
@pytest.mark.parametrize("cuts", [[5], [1, 2, 9], [0, LENGTH]], ids=str)
def test_chunk_after_chunk_has_the_gradients_of_the_whole(name, cuts, path):
    with path():
        chunk_after_chunk(name, cuts)


def chunk_after_chunk(name, cuts):
    function, parameters = CASES[name]
    tensors = leaves(*inputs(), *parameters)
    whole, end = function(*tensors, is_causal=True, output_final_state=True)
    pieces, last = in_pieces(function, tensors, cuts)
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)
    weights = draw(*whole.shape, seed=9)
    # Only the later half, so that all that earlier keys and values get comes through the state.
    weights[:, :, : LENGTH // 2] = 0
    (of_values,) = torch.autograd.grad((whole * weights).sum(), tensors[2], retain_graph=True)
    # Not the first: a short convolution no longer sees it.
    assert of_values[:, :, LENGTH // 2 - 2].abs().sum() > 0
    same_gradients(pieces, whole, tensors, weights=weights, allow_unused=True, rtol=1e-8, atol=1e-8)


def test_gradcheck_of_a_learned_state():
    """Every number of a kernelized state is a sum that a gradient has a meaning for, but for the marks at its end."""
    q, k, v = (t[:, :, :3].clone().requires_grad_() for t in inputs())
    _, state = ops.kernelized_attention(*inputs(), is_causal=True, output_final_state=True)
    sums = sum(state.parts[:2])
    numbers = torch.from_numpy(state.numbers)
    learned = numbers[..., :sums].clone().requires_grad_()

    def call(learned, q, k, v):
        whole = torch.cat([learned, numbers[..., sums:]], -1)
        start = TensorState(state.mechanism, state.options, tuple(state.parts), whole)
        out, end = ops.kernelized_attention(q, k, v, is_causal=True, initial_state=start, output_final_state=True)
        return out, end.numbers[..., :sums]

    assert torch.autograd.gradcheck(call, (learned, q, k, v))


def test_states_without_gradients_are_plain():
    tensors = inputs()
    _, state = ops.kernelized_attention(*tensors, is_causal=True, output_final_state=True)
    assert isinstance(state, longspan.State)
    learning = leaves(*tensors)
    with torch.no_grad():
        _, state = ops.kernelized_attention(*learning, is_causal=True, output_final_state=True)
    assert isinstance(state, longspan.State)
    # A plain state goes into a call that learns, as a constant.
    out, end = ops.kernelized_attention(*learning, is_causal=True, initial_state=state, output_final_state=True)
    out.sum().backward()
    assert all(t.grad is not None for t in learning)
    assert end.detach() == ops.kernelized_attention(
        *tensors, is_causal=True, initial_state=state, output_final_state=True
    )[1]
    # And one with a gradient into one that does not, and into NumPy's.
    with torch.no_grad():
        torch.testing.assert_close(ops.kernelized_attention(*learning, is_causal=True, initial_state=end),
                                   ops.kernelized_attention(*tensors, is_causal=True, initial_state=end.detach()))
    ops.kernelized_attention(*(t.numpy() for t in tensors), is_causal=True, initial_state=end)


def test_a_state_with_a_gradient_is_a_value():
    tensors = leaves(*inputs())
    _, state = ops.kernelized_attention(*tensors, is_causal=True, output_final_state=True)
    assert (state.batch, state.kv_heads, state.mechanism) == (2, 2, "kernelized")
    for other in (state.clone(), state.select([0, 1])):
        (gradient,) = torch.autograd.grad(other.numbers.sum(), tensors[2], retain_graph=True)
        assert gradient.abs().sum() > 0
    assert state.select([1]).detach() == state.detach().select([1])
    assert pickle.loads(pickle.dumps(state.detach())) == state.detach()
    leaf = TensorState.of(state.detach())
    assert copy.deepcopy(leaf).detach() == leaf.detach() == pickle.loads(pickle.dumps(leaf)).detach()


def test_states_are_selected_by_tensors_and_loaded_as_weights(tmp_path):
    tensors = inputs()
    _, state = ops.kernelized_attention(*tensors, is_causal=True, output_final_state=True)
    learned = TensorState.of(state)
    for indices in ([1, 0, 1], torch.tensor([1, 0, 1]), torch.tensor([1, 0, 1], dtype=torch.int32)):
        assert state.select(indices) == learned.select(indices).detach() == state.select([1, 0, 1])
    assert learned.select([]).batch == state.select([]).batch == 0
    for wrong, kind in ([-1], ValueError), ([2], ValueError), ([0.5], TypeError), (3, TypeError):
        for each in (state, learned):
            with pytest.raises(kind, match="State.select: indices: expected"):
                each.select(wrong)
    path = tmp_path / "states.pt"
    torch.save({"plain": state, "learned": learned}, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["plain"] == state == loaded["learned"].detach()
    with pytest.raises(TypeError, match="KernelizedAttention.combine: later: expected a longspan.State, got int"):
        KernelizedAttention(2, 4).combine(state, 1)


def test_truncated_backpropagation_through_a_module():
    module = KernelizedAttention(2, 4)
    state = None
    q, k, v = (t.float().requires_grad_() for t in inputs())
    for a in range(0, LENGTH, 4):
        part = [t[:, :, a : a + 4] for t in (q, k, v)]
        out, state = module(*part, is_causal=True, initial_state=state, output_final_state=True)
        assert out.requires_grad
        state = state.detach()
    expected = module(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected[:, :, -4:])


def test_half_precision_and_autocast():
    q, k, v = (t.bfloat16().requires_grad_() for t in inputs())
    out, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
    assert out.dtype == torch.bfloat16 and state.numbers.dtype == torch.float32
    state.numbers.sum().backward()
    assert k.grad.dtype == torch.bfloat16 and k.grad.isfinite().all()
    rel = draw(2, 7, 4).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, state = ops.shaw_attention(q, k, v, rel, is_causal=True, output_final_state=True)
        assert out.dtype == torch.float32
        with torch.no_grad():
            token = (t[:, :, 0] for t in (q, k, v))
            assert ops.shaw_attention_step(*token, rel, state)[0].dtype == torch.float32
    out.sum().backward()
    assert rel.grad.abs().sum() > 0


WRONG = [
    (TypeError, "initial_state: expected a longspan.State, got Tensor", lambda q, k, v, s: dict(initial_state=q)),
    (ValueError, "cu_seqlens: expected None with a state", lambda q, k, v, s: dict(initial_state=s, cu_seqlens=[0, 12])),
    (ValueError, "final state", lambda q, k, v, s: dict(output_final_state=True, is_causal=False)),
    (ValueError, "state", lambda q, k, v, s: dict(initial_state=s.select([0]))),
    (TypeError, "initial_state: expected a state of float64 like q, got float32", lambda q, k, v, s: dict(
        initial_state=TensorState(s.mechanism, s.options, s.parts, s.numbers.float()))),
    # Fourier's positions, counted in it, were those of other tokens from 2,049 on.
    *((TypeError, f"TensorState: numbers: expected float32 or float64, got {kind}", lambda q, k, v, s, kind=kind: dict(initial_state=s.to(kind)))
      for kind in (torch.float16, torch.bfloat16)),
    (ValueError, "state", lambda q, k, v, s: dict(initial_state=TensorState("shaw", s.options, s.parts, s.numbers))),
    (ValueError, "numbers", lambda q, k, v, s: dict(initial_state=TensorState(s.mechanism, s.options, s.parts, s.numbers[..., 1:]))),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, options", WRONG, ids=[message[:40] for _, message, _ in WRONG])
def test_wrong_calls(kind, message, options):
    q, k, v = (t.requires_grad_() for t in inputs())
    _, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
    with pytest.raises(kind, match=message):
        ops.kernelized_attention(q, k, v, **{"is_causal": True, **options(q, k, v, state)})


def step_of(function):
    """The step of a call, with its options."""
    of, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    return partial(of, step=True) if of in (of_keys, between_gates) else partial(getattr(ops, f"{of.__name__}_step"), **options)


@EVERY
@pytest.mark.parametrize("with_axis", [False, True], ids=["", "with an axis of one token"])
def test_steps_have_the_gradients_of_the_whole(name, with_axis):
    function, parameters = CASES[name]
    step = step_of(function)
    tensors = leaves(*inputs(), *parameters)
    expected, _ = function(*tensors, is_causal=True, output_final_state=True)
    q, k, v, *rest = tensors
    state, pieces = None, []
    for token in range(LENGTH):
        at = slice(token, token + 1) if with_axis else token
        before = state
        out, state = step(q[:, :, at], k[:, :, at], v[:, :, at], *rest, state=before)
        assert isinstance(state, TensorState) and state is not before
        pieces.append(out if with_axis else out[:, :, None])
    pieces = torch.cat(pieces, 2)
    torch.testing.assert_close(pieces, expected, rtol=1e-9, atol=1e-9)
    weights = draw(*expected.shape, seed=9)
    weights[:, :, : LENGTH // 2] = 0
    same_gradients(pieces, expected, tensors, weights=weights, rtol=1e-8, atol=1e-8)


def test_steps_without_gradients_change_their_state():
    q, k, v = (t[:, :, 0].clone().requires_grad_() for t in inputs())
    with torch.no_grad():
        _, state = ops.kernelized_attention_step(q, k, v)
        before = state.clone()
        out, after = ops.kernelized_attention_step(q, k, v, state)
    assert after is state and state != before and not out.requires_grad
    # A plain state is a constant of a step that learns, which leaves it alone.
    before = state.clone()
    _, learned = ops.kernelized_attention_step(q, k, v, state)
    assert isinstance(learned, TensorState) and state == before


def test_wrong_tokens():
    q, k, v = (t[:, :, :1].clone().requires_grad_() for t in inputs())
    for tokens, kind, message in (
        ((q[:, :, 0], None, v[:, :, 0]), TypeError, "k: expected a torch.Tensor like q, got NoneType"),
        ((q[:, :, 0], k, v[:, :, 0]), ValueError, "k: expected three axes"),
        ((q, None, v), ValueError, "k: expected one token"),
        ((q, k[:, :, 0], v), ValueError, "k: expected one token"),
    ):
        with pytest.raises(kind, match=f"kernelized_attention_step: {message}"):
            ops.kernelized_attention_step(*tokens)


def test_layers_step_with_gradients():
    from longspan.torch import TransformerDecoderLayer, TransformerEncoderLayer

    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    for make, more in ((TransformerEncoderLayer, ()), (TransformerDecoderLayer, (memory,))):
        layer = make(8, 2, 16, batch_first=True, attention="shaw", radius=2).eval()
        whole = layer(x, *more, **{"tgt_is_causal" if more else "is_causal": True})
        whole[:, -1].square().sum().backward()
        expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        steps(layer.step, x, *more)[0][:, -1].square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_a_decay_that_would_learn_is_refused():
    q, k, v = inputs()
    for decay in (torch.tensor(0.9, requires_grad=True), torch.tensor([0.5, 0.9], requires_grad=True),
                  [torch.tensor(0.5, requires_grad=True), 0.9]):  # fmt: skip
        for call in (
            lambda: ops.kernelized_attention(q, k, v, decay=decay, is_causal=True),
            lambda: ops.kernelized_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], decay=decay),
            lambda: KernelizedAttention(2, 4, decay=decay),
        ):
            with pytest.raises(ValueError, match="decay: expected constants, got a tensor that requires a gradient"):
                call()
        with torch.no_grad():
            ops.kernelized_attention(q, k, v, decay=decay, is_causal=True)
    attend = lambda decay: ops.kernelized_attention(q, k, v, decay=decay, is_causal=True).sum()  # noqa: E731
    for differentiate in (torch.func.grad(attend), lambda d: torch.func.jvp(attend, (d,), (d,))):
        with pytest.raises(ValueError, match="decay: expected constants"):
            differentiate(torch.tensor([0.5, 0.9], dtype=torch.float64))


#: Without those whose states have no sum with gradients, and what only differs in its gates.
COMBINED = [name for name in CASES if name not in ("softmax, window", "depthwise-convolution")]


@pytest.mark.parametrize("cuts", [(5, 9), (1, 2), (4, 6), (0, 6)])
@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("padded", [False, True], ids=["", "with ignored keys"])
def test_gradients_through_combine(name, cuts, padded):
    """Two stretches taken in apart, added up, and then a third: outputs and gradients of the whole."""
    function, parameters = CASES[name]
    ignored = torch.zeros(2, LENGTH, dtype=torch.bool)
    # Not the last of a stretch: a state ends at the last key that counts.
    ignored[0, 2] = ignored[1, 7] = padded
    mechanism = "fourier" if name == "rotary" else name.split(",")[0]
    options = {**getattr(function, "keywords", {}), **dict(_calls.shaped(mechanism, parameters))}
    options |= {"by_position": True} if mechanism == "aft-local" else {}
    first, second = cuts

    def state(q, k, v, *parameters, a, b):
        part = [t[:, :, a:b] for t in (q, k, v)]
        return function(*part, *parameters, is_causal=True, output_final_state=True, key_padding_mask=ignored[:, a:b])[1]

    apart = leaves(*inputs(), *parameters)
    if mechanism == "fourier":
        options = {**options, "parameters": apart[3:4]}
    together = longspan.combine(mechanism, state(*apart, a=0, b=first), state(*apart, a=first, b=second), **options)
    assert isinstance(together, TensorState)
    last = [t[:, :, second:] for t in apart[:3]]
    out = function(*last, *apart[3:], is_causal=True, initial_state=together, key_padding_mask=ignored[:, second:])
    whole = leaves(*inputs(), *parameters)
    expected = function(*whole, is_causal=True, key_padding_mask=ignored)[:, :, second:]
    torch.testing.assert_close(out, expected)
    same_gradients(out, expected, apart, of_expected=whole, weights=torch.randn_like(out))


@pytest.mark.parametrize("module", [ShortConvolution(2, 4), ToeplitzAttention(2, 4, radius=2), AftSimple(2, 4), FourierAttention(2, 4)], ids=str)
def test_modules_combine_states_with_gradients(module):
    x, later = (draw(1, 2, 5, 4, seed=seed).float().requires_grad_() for seed in (0, 1))
    whole = torch.cat([x, later], 2)
    parts = [module(t, t, t, is_causal=True, output_final_state=True)[1] for t in (x, later)]
    token = draw(1, 2, 1, 4).float()
    got, expected = (module(token, token, token, is_causal=True, initial_state=state) for state in (
        module.combine(*parts), module(whole, whole, whole, is_causal=True, output_final_state=True)[1]))  # fmt: skip
    torch.testing.assert_close(got, expected)
    same_gradients(got, expected, (x, later), rtol=1e-4, atol=1e-5)


def test_what_combine_refuses_of_tensors():
    q, k, v = (draw(1, 2, 5, 4).requires_grad_() for _ in range(3))
    _, learned = ops.kernelized_attention(q, k, v, decay=0.5, is_causal=True, output_final_state=True)
    with pytest.raises(ValueError, match="combine: earlier"):
        longspan.combine("kernelized", learned, learned)
    plain = learned.detach()
    _, ring = ops.softmax_attention(q, k, v, window=4, is_causal=True, output_final_state=True)
    with pytest.raises(ValueError, match="combine: earlier: expected a longspan.State, because states of a window have no sum"):
        longspan.combine("softmax", ring, ring, window=4)
    module = KernelizedAttention(2, 4, decay=0.5)
    assert module.combine(learned, plain).detach() == module.combine(learned.detach(), plain)
