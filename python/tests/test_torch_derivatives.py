"""Second derivatives, forward mode and batches of gradients: those of the definition, or an error, and never silently zero."""

import pytest
import torch
from agreement import draw, elsewhere, same_gradients
from longspan import ops
from longspan.torch import TensorState, TransformerEncoderLayer
from test_torch_mechanisms import CASES
from test_torch_states import CASES as STATES
from test_torch_states import inputs
from torch.autograd import forward_ad, functional, gradcheck, gradgradcheck

EVERY = pytest.mark.parametrize("name", CASES)


def small(name):
    """A function of q, k, v and what the mechanism learns."""
    function, parameters = CASES[name]
    return (lambda *tensors: function(*tensors, is_causal=True)), [t.clone() for t in (*inputs(), *parameters)]


def of_q(name="kernelized"):
    """A scalar function of the queries alone."""
    k, v = inputs()[1:]
    if name == "kernelized":
        return lambda q: ops.kernelized_attention(q, k, v, is_causal=True).square().sum()
    rel = torch.linspace(-1, 1, 2 * 5 * 4, dtype=torch.float64).view(2, 5, 4)
    return lambda q: ops.shaw_attention(q, k, v, rel, is_causal=True).square().sum()


@EVERY
def test_gradients_of_gradients(name):
    function, tensors = small(name)
    tensors = [t.requires_grad_() for t in tensors]
    assert gradgradcheck(function, tensors, fast_mode=True)


def test_gradients_of_gradients_of_a_tensor_that_is_given_thrice():
    x = inputs()[0].requires_grad_()
    assert gradgradcheck(lambda x: ops.kernelized_attention(x, x, x, is_causal=True), (x,), fast_mode=True)


@pytest.mark.parametrize("name", ["aft-simple", "aft-local", "toeplitz", "softmax"])
def test_torchs_own_operations_keep_no_weights_of_pairs(name):
    function, parameters = CASES[name]

    def kept(length):
        count = 0

        def keep(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        tensors = [t.requires_grad_() for t in inputs(1, length)]
        learned = [draw(length, 5)] if name == "aft-local" else parameters
        with elsewhere(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = function(*tensors, *learned, is_causal=True)
        same_gradients(out, function(*tensors, *learned, is_causal=True), tensors)
        return count

    short, long = kept(32), kept(128)
    assert long < 5 * short


@EVERY
def test_forward_mode_and_batched_gradients(name):
    function, tensors = small(name)
    tensors = [t.requires_grad_() for t in tensors]
    assert gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
                     fast_mode=True)  # fmt: skip


@pytest.mark.parametrize("name", ["kernelized", "shaw"])
def test_hessians_agree_with_differences(name):
    f, q = of_q(name), inputs()[0]
    direction = torch.ones_like(q)
    step = 1e-5
    slope = [torch.func.grad(f)(q + sign * step * direction) for sign in (1, -1)]
    expected = (slope[0] - slope[1]) / (2 * step)
    assert expected.abs().max() > 1e-3
    x = q.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    found = {
        "hvp": functional.hvp(f, q, direction)[1],
        "vhp": functional.vhp(f, q, direction)[1],
        "double backward": torch.autograd.grad((g * direction).sum() + (x**2).sum(), x)[0] - 2 * x,
        "jvp of grad": torch.func.jvp(torch.func.grad(f), (q,), (direction,))[1],
        "hessian": torch.einsum("abcdefgh->abcd", torch.func.hessian(f)(q)),
        "vectorized hessian": torch.einsum("abcdefgh->abcd", functional.hessian(f, q, vectorize=True)),
        "forward over reverse": torch.einsum("abcdefgh->abcd", torch.func.jacfwd(torch.func.jacrev(f))(q)),
    }
    for way, got in found.items():
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, msg=lambda m, way=way: f"{way}: {m}")


def test_torch_func():
    q, k, v = inputs()
    rows = torch.stack([q, q + 1, q.flip(2)])
    mask = torch.zeros(2, q.shape[2], dtype=torch.bool)
    mask[0, 3:] = True

    def attend(q, mask=mask):
        return ops.kernelized_attention(q, k, v, key_padding_mask=mask)

    torch.testing.assert_close(torch.func.vmap(attend)(rows), torch.stack([attend(row) for row in rows]))
    masks = torch.stack([mask, ~mask, mask])
    torch.testing.assert_close(
        torch.func.vmap(attend)(rows, masks), torch.stack([attend(row, mask) for row, mask in zip(rows, masks)])
    )
    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend(x).square().sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda q: attend(q).square().sum())(q), expected)
    each = torch.func.vmap(torch.func.grad(lambda q: attend(q).square().sum()))(rows)
    torch.testing.assert_close(each[0], expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attend(forward_ad.make_dual(q, torch.ones_like(q)))).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(attend, (q,), (torch.ones_like(q),))[1])


def test_gradients_of_each_example_of_a_layer():
    layer = TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, attention="shaw", radius=2).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],), {"is_causal": True}).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for row, one in enumerate(x):
        layer.zero_grad()
        layer(one[None], is_causal=True).square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(each[name][row], p.grad)


def test_under_autocast_and_other_modes():
    """What goes through the operator rather than through the quick way."""
    k, v = (t.float() for t in inputs()[1:])
    x = inputs()[0].float().requires_grad_()

    def second(mode):
        with mode:
            out = ops.kernelized_attention(x, k, v, is_causal=True)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    expected = second(torch.enable_grad())
    assert expected.abs().max() > 0
    torch.testing.assert_close(second(torch.autocast("cpu", torch.bfloat16)), expected)


def test_a_compiled_function_refuses():
    f = torch.compile(of_q(), backend="aot_eager", fullgraph=True)
    x = inputs()[0].requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad((g**2).sum() + (x**2).sum(), x)


@pytest.mark.parametrize("name", STATES)
def test_gradients_of_gradients_through_states(name):
    function, parameters = STATES[name]
    q, k, v = (x[:, :, :4] for x in inputs())
    _, state = function(q, k, v, *parameters, is_causal=True, output_final_state=True)
    state = TensorState.of(state)
    # Places, counts and exponents are constants, and so is what is not finite.
    fixed = state.numbers.clone()

    def attend(moved, *tensors):
        before = TensorState(state.mechanism, state.options, state.parts, fixed + 0.1 * moved)
        out, after = function(*tensors, is_causal=True, initial_state=before, output_final_state=True)
        token = [x[:, :, :1] for x in tensors[:3]]
        return (out.square().sum() + function(*token, *tensors[3:], is_causal=True, initial_state=after).sum())[None]

    moved = torch.zeros_like(fixed)
    tensors = [x.clone().requires_grad_() for x in (q, k, v, *parameters)]
    assert gradgradcheck(lambda *x: attend(moved, *x), tensors, fast_mode=True)


def test_transforms_of_calls_with_states():
    q, k, v = inputs()
    _, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
    state = TensorState.of(state)

    def attend(q, numbers=state.numbers):
        before = TensorState(state.mechanism, state.options, state.parts, numbers)
        out, after = ops.kernelized_attention(q, k, v, is_causal=True, initial_state=before, output_final_state=True)
        last, _ = ops.kernelized_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], after)
        return torch.cat([out, last[:, :, None]], 2)

    x, numbers = q.clone().requires_grad_(), state.numbers.clone().requires_grad_()
    expected = attend(x, numbers)
    wanted = torch.autograd.grad(expected.square().sum(), (x, numbers))
    got = torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1))(q, state.numbers)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.func.vmap(attend)(q[None])[0], expected)
    tangent = torch.func.jvp(attend, (q, state.numbers), (q, state.numbers))[1]
    with forward_ad.dual_level():
        dual = attend(forward_ad.make_dual(q, q), forward_ad.make_dual(state.numbers, state.numbers))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    torch.testing.assert_close((tangent * expected).sum() * 2, sum((a * b).sum() for a, b in zip(wanted, (q, state.numbers))))

    def after(k):
        return ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)[1].numbers

    # Of a loss of the state alone, in a batch of gradients.
    one_by_one, at_once = (torch.autograd.functional.jacobian(after, k, vectorize=batched) for batched in (False, True))
    torch.testing.assert_close(at_once, one_by_one)
