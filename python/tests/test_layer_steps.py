"""One token through a layer: few calls around its products, and all that a module means is kept."""

import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from longspan.torch import KernelizedAttention, MultiheadAttention, TransformerEncoderLayer  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def calls_of(function):
    """Calls of Python's functions, the same on a fast machine and a slow one."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("make, most", [(MultiheadAttention, 28), (TransformerEncoderLayer, 56)])
def test_a_step_is_few_calls(make, most):
    layer = make(12, 3, batch_first=True).eval()
    x = torch.randn(1, 12)
    with torch.no_grad():
        _, state = layer.step(x)
        assert calls_of(lambda: layer.step(x, state)) <= most


def attention_by_hand(module, x):
    """The last output of causal attention over ``x``, ``[batch, token, feature]``, from what the module's names say."""
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).split(module._widths, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t, heads in zip((q, k, v), module._head_counts))
    return module.out_proj(module.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))[:, -1]


def last_step(module, x):
    state = None
    for token in x.unbind(1):
        out, state = module.step(token, state)
    return out


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def with_plain_weight(module):
    weight = module.out_proj.weight.detach() + 1
    del module.out_proj.weight
    module.out_proj.weight = weight


CHANGES = {
    "nothing": lambda m: None,
    "a parametrized bias of projections": lambda m: nn.utils.parametrize.register_parametrization(m, "in_proj_bias", Doubled()),
    "a parametrized weight of projections": lambda m: nn.utils.parametrize.register_parametrization(m, "in_proj_weight", Doubled()),
    "a parametrized output": lambda m: nn.utils.parametrize.register_parametrization(m.out_proj, "weight", Doubled()),
    "a wrapped output": lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj, Doubled())),
    "an output of a subclass": lambda m: setattr(m, "out_proj", Halved(12, 12)),
    "an output whose weight is no parameter": with_plain_weight,
    "an output with another forward": lambda m: setattr(m.out_proj, "forward", lambda x: x + 1),
    "a hook after the output": lambda m: m.out_proj.register_forward_hook(lambda module, inputs, out: 3 * out),
    "a hook before the output": lambda m: m.out_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("learns", [False, True])
def test_what_is_put_into_a_module_counts(change, learns):
    module = MultiheadAttention(12, 3, batch_first=True).eval()
    nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 4, 12)
    CHANGES[change](module)
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(last_step(module, x), attention_by_hand(module, x))


def test_hooks_of_all_modules_see_a_step():
    layer = TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, out: seen.append(type(module)))
    try:
        with torch.no_grad():
            layer.step(torch.randn(2, 12))
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 2 + 1 and seen.count(nn.LayerNorm) == 2


@pytest.mark.parametrize("inside", ["a class", "an instance"])
def test_a_step_of_the_users_own_is_called(inside):
    class Own(KernelizedAttention):
        def step(self, q, k, v, state=None, **more):
            out, state = KernelizedAttention.step(self, q, k, v, state, **more)
            return out + 1, state

    module = MultiheadAttention(12, 3, attention=Own if inside == "a class" else "kernelized").eval()
    if inside == "an instance":
        of_class = module.attention.step
        module.attention.step = lambda q, k, v, state, **more: (of_class(q, k, v, state)[0] + 1, state)
    plain = MultiheadAttention(12, 3).eval()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 12)
    with torch.no_grad():
        difference = module.step(x)[0] - plain.step(x)[0]
    torch.testing.assert_close(difference, plain.out_proj.weight.sum(1).detach().expand(2, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_types_and_frozen_modules(dtype):
    module = MultiheadAttention(12, 3, attention="shaw", radius=2, num_kv_heads=1, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, 12, dtype=dtype)
    with torch.no_grad():
        expected, _ = module.step(x)
    out, state = module.step(x)
    assert torch.equal(module.step(x[:, None])[0], out), "an axis of one token"
    assert out.dtype == dtype and not out.requires_grad and torch.equal(out, expected)
    with pytest.raises(TypeError, match="ShawAttention: state: expected a longspan.State, got int"):
        module.step(x, 3)
    # An input that requires a gradient gets one, through the state as well.
    token = torch.randn(2, 12, dtype=dtype, requires_grad=True)
    _, state = module.step(token)
    module.step(x, state)[0].sum().backward()
    assert token.grad.abs().sum() > 0


def test_autocast_and_positions():
    module = MultiheadAttention(12, 3).eval()
    x = torch.randn(2, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, state = module.step(x)
        assert out.dtype == torch.bfloat16 and state.dtype == "float32"
    module = MultiheadAttention(12, 3, attention="fourier", axes=2).eval()
    with torch.no_grad(), pytest.raises(ValueError, match="q_positions: expected positions of 2 axes with axes=2, got None"):
        module.step(x)
