"""Gates that come with the keys: modules beside the operators that are given the same gates, behind a convolution too."""

import pytest
import torch
from agreement import elsewhere, same_gradients
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
    "convolved sum": lambda **place: GatedAttention(4, 6, gate="none", convolution=1, **place),
    "convolved gated": lambda **place: GatedAttention(4, 6, l2_norm=False, convolution=3, num_kv_heads=2, **place),
    "convolved delta": lambda **place: DeltaAttention(4, 6, convolution=2, **place),
    "convolved kda": lambda **place: GatedDeltaAttention(4, 6, gate="channel", convolution=4, num_kv_heads=2, **place),
}
CONVOLVED = [name for name in MODULES if name.startswith("convolved")]


def inputs(module, tokens=70):
    torch.manual_seed(1)
    shapes = (4, 6), (module.num_kv_heads, module.key_dim), (module.num_kv_heads, 6)
    return [torch.randn(2, heads, tokens, width, dtype=torch.float64, requires_grad=True) for heads, width in shapes]


def convolved(x, taps, ignored=None):
    """``SiLU(sum_s taps_s x_{t - s})``, of each head's own taps."""
    x = x if ignored is None else x.masked_fill(ignored[:, None, :, None], 0)
    count = x.shape[2]
    return F.silu(sum(taps[:, s, None] * F.pad(x, (0, 0, s, 0))[:, :, :count] for s in range(taps.shape[1])))


def behind(module, q, k, v, ignored=None):
    """Queries, keys and values behind the module's convolutions."""
    if module.convolution is None:
        return q, k, v
    k, gates = k[..., :6], k[..., 6:]
    q, k, v = (convolved(x, taps, ignored) for x, taps in ((q, module.query_taps), (k, module.key_taps), (v, module.value_taps)))
    return q, torch.cat([k, gates], -1), v


def by_hand(module, q, k, v, **call):
    """The formulas of the modules' page."""
    x, rest = k[..., :6], k[..., 6:]
    log_decay = None
    if module.gate != "none":
        numbers = 6 if module.gate == "channel" else 1
        log_decay = -module.rate.exp()[:, None, None] * F.softplus(rest[..., :numbers] + module.bias[:, None])
        log_decay = log_decay if module.gate == "channel" else log_decay[..., 0]
    if module.beta_max is None:
        l2_norm = "l2_norm\": true" in module._options
        return ops.gated_attention(q, x, v, log_decay, l2_norm=l2_norm, scale=1.0 if l2_norm else None, **call)
    return ops.delta_attention(q, x, v, module.beta_max * rest[..., -1].sigmoid(), log_decay, scale=1.0, **call)


@pytest.mark.parametrize("name", MODULES)
def test_gates_are_made_of_keys_in_both_directions(name):
    module = MODULES[name](dtype=torch.float64)
    q, k, v = inputs(module)
    ignored = torch.zeros(2, 70, dtype=torch.bool)
    ignored[0, 50:] = ignored[1, 3] = True
    causal = module(q, k, v, is_causal=True, key_padding_mask=ignored)
    seen = behind(module, q, k, v, ignored)
    expected = by_hand(module, *seen, key_padding_mask=ignored)
    torch.testing.assert_close(causal, expected)
    both = module(q, k, v, key_padding_mask=ignored)
    turned = by_hand(module, *(x.flip(2) for x in seen), key_padding_mask=ignored.flip(1)).flip(2)
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


@pytest.mark.parametrize("name", ["gated delta", *CONVOLVED])
def test_packed_sequences_are_apart(name):
    module = MODULES[name](dtype=torch.float64)
    q, k, v = (x[:1] for x in inputs(module))
    for is_causal in (False, True):
        alone = torch.cat([module(*(x[:, :, a:b] for x in (q, k, v)), is_causal=is_causal) for a, b in ((0, 30), (30, 70))], 2)
        bounds = [0, 30, 30, 70]
        for given in (bounds, (bounds, bounds), torch.tensor(bounds), (torch.tensor(bounds),) * 2):
            torch.testing.assert_close(module(q, k, v, is_causal=is_causal, cu_seqlens=given), alone)


@pytest.mark.parametrize("name", CONVOLVED)
def test_gradients_flow_through_states_of_a_convolution(name):
    """And are the same in torch's own operations, as on other devices. A state ends at the last token that is not ignored."""
    module = MODULES[name](dtype=torch.float64)
    tensors = inputs(module, 9)
    ignored = torch.zeros(2, 9, dtype=torch.bool)
    ignored[0, 1:3] = ignored[1, :2] = ignored[1, 5] = True

    def whole():
        return module(*tensors, is_causal=True, key_padding_mask=ignored)

    def pieces(state=None):
        outs = []
        for part in (slice(0, 4), slice(4, 4), slice(4, 8)):
            out, state = module(*(x[:, :, part] for x in tensors), is_causal=True, key_padding_mask=ignored[:, part],
                                initial_state=state, output_final_state=True)  # fmt: skip
            outs.append(out)
        out, state = module.step(*(x[:, :, 8] for x in tensors), state)
        return torch.cat([*outs, out[:, :, None]], 2), state

    got, after = pieces()
    wanted = [*tensors, *module.parameters()]
    torch.testing.assert_close(got, whole())
    same_gradients(got, whole(), wanted, weights=torch.randn_like(got))
    with elsewhere() as calls:
        there, after_there = pieces()
    assert calls
    same_gradients(there, whole(), wanted, weights=torch.randn_like(got))
    torch.testing.assert_close(after_there.numbers, after.numbers)
    with torch.no_grad():
        # The kernels' steps from no state, and what goes on from one of theirs.
        state = None
        for t in range(4):
            _, state = module.step(*(x[:, :, t] for x in tensors), state)
        _, expected = module(*(x[:, :, :4] for x in tensors), is_causal=True, output_final_state=True)
    torch.testing.assert_close(torch.from_numpy(state.numbers), torch.from_numpy(expected.numbers))
    assert (state.options, state.parts) == (after.options, list(after.parts))


def test_what_a_convolution_refuses():
    module = MODULES["convolved gated"]()
    q, k, v = (x.detach().float() for x in inputs(module, 5))
    _, state = module(q, k, v, is_causal=True, output_final_state=True)
    for one in (state, state.detach()):
        with pytest.raises(ValueError, match="sum of two states behind a convolution"):
            module.combine(one, state.detach())
    other = GatedAttention(4, 6, l2_norm=False, convolution=4, num_kv_heads=2)
    for call in (other, other.step):
        with pytest.raises(ValueError, match="state"):
            token = (x[:, :, 0] if call == other.step else x for x in (q, k, v))
            call(*token, **({"state": state} if call == other.step else {"is_causal": True, "initial_state": state}))
    with pytest.raises(ValueError, match="convolution: expected an integer from 1 to 64, got 0"):
        DeltaAttention(2, 4, convolution=0)
    with pytest.raises(TypeError, match="query_taps: expected torch.float64 like q|taps: expected torch.float64 like q"):
        module(q.double(), k.double(), v.double(), is_causal=True)


def test_a_compiled_convolution_keeps_its_gradients():
    module = MODULES["convolved kda"]()
    tensors = [x.detach().float().requires_grad_() for x in inputs(module, 12)]
    compiled = torch.compile(lambda *x: module(*x, is_causal=True), backend="aot_eager", fullgraph=True)
    same_gradients(compiled(*tensors), module(*tensors, is_causal=True), [*tensors, *module.parameters()])


def test_multi_head_attention_projects_gates():
    torch.manual_seed(0)
    attention = MultiheadAttention(24, 4, attention="gated-delta", gate="channel", convolution=4, batch_first=True)
    x = torch.randn(2, 9, 24)
    out, _ = attention(x, x, x)
    out.sum().backward()
    assert all(attention.get_parameter(f"attention.{name}").grad.abs().min() > 0 for name in ("rate", "query_taps", "value_taps"))


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
