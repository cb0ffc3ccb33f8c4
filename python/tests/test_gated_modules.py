"""Gates that come with the keys: modules beside the operators that are given the same gates."""

import pytest
import torch
from longspan import ops
from longspan.torch import DeltaAttention, GatedAttention, GatedDeltaAttention, MultiheadAttention
from torch.nn import functional as F

MODULES = {
    "gated": lambda **place: GatedAttention(4, 6, num_kv_heads=2, **place),
    "gla": lambda **place: GatedAttention(4, 6, gate="channel", l2_norm=False, **place),
    "sum": lambda **place: GatedAttention(4, 6, gate="none", **place),
    "delta": lambda **place: DeltaAttention(4, 6, beta_max=2.0, **place),
    "gated delta": lambda **place: GatedDeltaAttention(4, 6, **place),
    "kda": lambda **place: GatedDeltaAttention(4, 6, gate="channel", num_kv_heads=2, **place),
}


def inputs(module, tokens=70):
    torch.manual_seed(1)
    shapes = (4, 6), (module.num_kv_heads, module.key_dim), (module.num_kv_heads, 6)
    return [torch.randn(2, heads, tokens, width, dtype=torch.float64, requires_grad=True) for heads, width in shapes]


def by_hand(module, q, k, v, **call):
    """The formulas of the modules' page."""
    x, rest = k[..., :6], k[..., 6:]
    log_decay = None
    if module.gate != "none":
        numbers = 6 if module.gate == "channel" else 1
        log_decay = -module.rate.exp()[:, None, None] * F.softplus(rest[..., :numbers] + module.bias[:, None])
        log_decay = log_decay if module.gate == "channel" else log_decay[..., 0]
    if module.beta_max is None:
        l2_norm = "true" in module._options
        return ops.gated_attention(q, x, v, log_decay, l2_norm=l2_norm, scale=1.0 if l2_norm else None, **call)
    return ops.delta_attention(q, x, v, module.beta_max * rest[..., -1].sigmoid(), log_decay, scale=1.0, **call)


@pytest.mark.parametrize("name", MODULES)
def test_gates_are_made_of_keys_in_both_directions(name):
    module = MODULES[name](dtype=torch.float64)
    q, k, v = inputs(module)
    ignored = torch.zeros(2, 70, dtype=torch.bool)
    ignored[0, 50:] = ignored[1, 3] = True
    causal = module(q, k, v, is_causal=True, key_padding_mask=ignored)
    expected = by_hand(module, q, k, v, key_padding_mask=ignored)
    torch.testing.assert_close(causal, expected)
    both = module(q, k, v, key_padding_mask=ignored)
    turned = by_hand(module, q.flip(2), k.flip(2), v.flip(2), key_padding_mask=ignored.flip(1)).flip(2)
    torch.testing.assert_close(both, expected + turned)
    wanted = [q, k, v, *module.parameters()]
    weights = torch.randn_like(both)
    own, theirs = (torch.autograd.grad((out * weights).sum(), wanted) for out in (both, expected + turned))
    for got, right in zip(own, theirs):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", MODULES)
def test_pieces_and_steps_are_the_whole(name):
    module = MODULES[name](dtype=torch.float64)
    with torch.no_grad():
        q, k, v = inputs(module)
        whole = module(q, k, v, is_causal=True)
        first, state = module(q[:, :, :40], k[:, :, :40], v[:, :, :40], is_causal=True, output_final_state=True)
        rows = [first]
        for t in range(40, 70):
            out, state = module.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
            rows.append(out[:, :, None])
    torch.testing.assert_close(torch.cat(rows, 2), whole)


def test_packed_sequences_are_apart_in_both_directions():
    module = MODULES["gated delta"](dtype=torch.float64)
    q, k, v = (x[:1] for x in inputs(module))
    alone = torch.cat([module(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 30), (30, 70))], 2)
    bounds = [0, 30, 30, 70]
    for given in (bounds, (bounds, bounds), torch.tensor(bounds), (torch.tensor(bounds),) * 2):
        torch.testing.assert_close(module(q, k, v, cu_seqlens=given), alone)


def test_multi_head_attention_projects_gates():
    torch.manual_seed(0)
    attention = MultiheadAttention(24, 4, attention="gated-delta", gate="channel", batch_first=True)
    x = torch.randn(2, 9, 24)
    out, _ = attention(x, x, x)
    out.sum().backward()
    assert attention.attention.rate.grad.abs().min() > 0


def test_wrong_options_and_keys_are_refused():
    with pytest.raises(ValueError, match="GatedDeltaAttention: gate: expected one of head, channel, got 'none'"):
        GatedDeltaAttention(2, 4, gate="none")
    with pytest.raises(ValueError, match="DeltaAttention: beta_max: expected a number above 0"):
        DeltaAttention(2, 4, beta_max=3.0)
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="k: expected keys of key_dim = 5 numbers, got 4"):
        DeltaAttention(2, 4)(x, x, x)
    module = GatedAttention(2, 4)
    k = torch.zeros(1, 2, 3, 5)
    with pytest.raises(ValueError, match="is_causal=True beside states"):
        module(x, k, x, output_final_state=True)
