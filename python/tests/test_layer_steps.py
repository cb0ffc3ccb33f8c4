"""One token through a layer: all that a module means is kept."""

import pytest
import torch
from agreement import steps
from longspan.torch import KernelizedAttention, MultiheadAttention, TransformerEncoderLayer
from torch import nn


def attention_by_hand(module, x):
    """The last output of causal attention over ``x``, ``[batch, token, feature]``, from what the module's names say."""
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).split(module._widths, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t, heads in zip((q, k, v), module._head_counts))
    return module.out_proj(module.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))[:, -1]


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


CHANGES = {
    "a parametrized bias of projections": lambda m: nn.utils.parametrize.register_parametrization(m, "in_proj_bias", Doubled()),
    "a parametrized output": lambda m: nn.utils.parametrize.register_parametrization(m.out_proj, "weight", Doubled()),
    "a wrapped output": lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj, Doubled())),
    "a hook after the output": lambda m: m.out_proj.register_forward_hook(lambda module, inputs, out: 3 * out),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("learns", [False, True])
def test_what_is_put_into_a_module_counts(change, learns):
    module = MultiheadAttention(12, 3, batch_first=True).eval()
    nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 4, 12)
    CHANGES[change](module)
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(steps(module.step, x)[0][:, -1], attention_by_hand(module, x))


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


def test_a_step_in_training_drops_what_a_call_drops():
    module, x = MultiheadAttention(12, 3, dropout=1.0, batch_first=True, gated_attention=True), torch.randn(2, 12)
    nn.init.normal_(module.out_proj.bias)
    whole, step = module(x[:, None], x[:, None], x[:, None])[0][:, 0], module.step(x)[0]
    assert torch.equal(step, whole) and torch.equal(step, module.out_proj.bias.expand(2, 12))
    assert not torch.equal(module.eval().step(x)[0], step)


def test_autocast():
    module = MultiheadAttention(12, 3).eval()
    x = torch.randn(2, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, state = module.step(x)
        assert out.dtype == torch.bfloat16 and state.dtype == "float32"


def test_errors_of_a_layer():
    layer = TransformerEncoderLayer(12, 3, 16).eval()
    other = TransformerEncoderLayer(12, 3, 16, attention="shaw").eval()
    with torch.no_grad():
        _, state = layer.step(torch.randn(2, 12))
        before = state.clone()
        with pytest.raises(ValueError, match="KernelizedAttention: state: expected batch 3"):
            layer.step(torch.randn(3, 12), state)
        with pytest.raises(ValueError, match="ShawAttention: state: expected a state of shaw"):
            other.step(torch.randn(2, 12), state)
    assert state == before
