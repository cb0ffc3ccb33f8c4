"""What layers take beyond torch's arguments: states, packed sequences, shared heads, positions; and torch's masks."""

import pytest
import torch
from agreement import steps
from longspan import ops
from longspan.torch import FourierAttention, MultiheadAttention, TransformerEncoderLayer
from longspan.torch.multi_head import _is_causal
from torch import nn

ATTENTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"feature_map": "hedgehog"}, {"decay": 0.9}, {"attention": "shaw", "radius": 3}, {"attention": "fourier"},
     {"attention": "toeplitz", "radius": 3}, {"attention": "aft-full", "length": 16, "rank": 2},
     {"attention": "aft-local", "length": 16, "window": 2}, {"attention": "aft-simple"},
     {"attention": "short-convolution", "width": 3}, {"attention": "gated"}, {"attention": "gated-delta", "gate": "channel"},
     {"attention": "aft-conv", "taps": 3}, {"attention": "softmax"}, {"gated_attention": True},
     {"attention": "aft-conv", "taps": 3, "gated_attention": True}],
    ids=str,
)  # fmt: skip


def encoder(**options):
    return TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True, **options).eval()


@ATTENTIONS
@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
def test_a_prompt_then_tokens(options, num_kv_heads):
    layer = encoder(num_kv_heads=num_kv_heads, **options)
    x = torch.randn(2, 9, 12)
    with torch.no_grad():
        whole = layer(x, is_causal=True)
        prompt, state = layer(x[:, :6], is_causal=True, output_final_state=True)
        torch.testing.assert_close(prompt, whole[:, :6])
        more, after = layer(x[:, 6:8], is_causal=True, initial_state=state.clone(), output_final_state=True)
        torch.testing.assert_close(more, whole[:, 6:8])
        torch.testing.assert_close(layer.step(x[:, 8], after)[0], whole[:, 8])
        torch.testing.assert_close(layer.step(x[:, 6], state)[0], whole[:, 6])


@ATTENTIONS
def test_shared_heads_are_repeated_ones(options):
    """A module with fewer key/value heads is one with all of them in which groups have the same projections."""
    if options.get("decay"):
        options = {}
    shared = MultiheadAttention(12, 4, batch_first=True, num_kv_heads=2, **options)
    full = MultiheadAttention(12, 4, batch_first=True, **options)
    assert shared.num_kv_heads == 2 and full.num_kv_heads == 4
    state = {}
    for name, theirs in full.state_dict().items():
        ours = shared.state_dict()[name]
        if name.startswith("in_proj"):
            parts = list(ours.split(shared._widths))
            parts[1:] = [part.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1) for part in parts[1:]]
            ours = torch.cat(parts)
        elif ours.shape != theirs.shape:
            ours = ours.repeat_interleave(2, 0)
        state[name] = ours
    full.load_state_dict(state)
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(shared(x, x, x, is_causal=True)[0], full(x, x, x, is_causal=True)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences(batch_first):
    layer = TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=batch_first, attention="shaw", radius=2)
    x = torch.randn(1, 9, 12)
    swap = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    got = swap(layer(swap(x), is_causal=True, cu_seqlens=torch.tensor([0, 4, 9])))
    expected = torch.cat([swap(layer(swap(x[:, a:b]), is_causal=True)) for a, b in ((0, 4), (4, 9))], 1)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("wave", ["each", "pairs"])
def test_positions(wave):
    layer = encoder(attention="fourier", axes=2, wave=wave, feature_map="softplus", num_kv_heads=2) if wave == "each" else None
    layer = layer or TransformerEncoderLayer(
        16, 4, 16, dropout=0.0, batch_first=True, attention="fourier", axes=2, wave=wave, normalizer="unrotated"
    ).eval()  # fmt: skip
    attention = layer.self_attn.attention
    # Each angle turns along one axis, and every axis has some.
    assert ((attention.a != 0).sum(-1) == 1).all() and (attention.a != 0).any(1).all()
    width = layer.self_attn.embed_dim
    x, positions = torch.randn(2, 6, width), torch.randn(2, 6, 2)
    whole = layer(x, is_causal=True, positions=positions)
    assert not torch.allclose(whole, layer(x, is_causal=True, positions=positions * 2))
    torch.testing.assert_close(whole, layer(x, is_causal=True, positions=positions + 3.0), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        _, state = layer(x[:, :5], is_causal=True, positions=positions[:, :5], output_final_state=True)
        torch.testing.assert_close(layer.step(x[:, 5], state, positions=positions[:, 5:])[0], whole[:, 5])
    with pytest.raises(ValueError, match="FourierAttention: q_positions: expected positions of 2 axes with axes=2, got None"):
        layer(x)
    with pytest.raises(ValueError, match="FourierAttention: q_positions: expected None with axes=None, got a tensor"):
        FourierAttention(2, 4)(*[torch.zeros(1, 2, 3, 4)] * 3, q_positions=positions, k_positions=positions)
    with pytest.raises(ValueError, match="KernelizedAttention: q_positions: expected None, because the mechanism counts"):
        encoder()(torch.randn(2, 6, 12), positions=positions)


def test_masks_of_pairs():
    module = MultiheadAttention(12, 4, batch_first=True)
    x = torch.randn(2, 5, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    expected = module(x, x, x, is_causal=True)[0]
    for mask in (causal, causal == -torch.inf):
        torch.testing.assert_close(module(x, x, x, attn_mask=mask)[0], expected)
    none = torch.zeros(5, 5, dtype=torch.bool)
    torch.testing.assert_close(module(x, x, x, attn_mask=none)[0], module(x, x, x)[0])
    keys = none.clone()
    keys[:, 3:] = True
    padding = torch.tensor([[True] + 4 * [False], 5 * [False]])
    both = padding | keys[:1]
    torch.testing.assert_close(
        module(x, x, x, attn_mask=keys, key_padding_mask=padding)[0], module(x, x, x, key_padding_mask=both)[0]
    )
    torch.testing.assert_close(module(x[0], x[0], x[0], attn_mask=causal)[0], expected[0])
    y = x.transpose(0, 1)
    token_first = MultiheadAttention(12, 4)
    token_first.load_state_dict(module.state_dict())
    torch.testing.assert_close(token_first(y, y, y, attn_mask=causal)[0], expected.transpose(0, 1))
    torch.testing.assert_close(token_first(y, y, y, attn_mask=keys)[0], module(x, x, x, attn_mask=keys)[0].transpose(0, 1))
    for shape in ((5, 9), (9, 5), (1, 1), (1, 4), (4, 1), (0, 3), (3, 0), (0, 0)):
        mask = torch.ones(shape, dtype=torch.bool).triu(1)
        assert _is_causal(mask)
        for place in range(mask.numel()):
            other = mask.clone()
            other.view(-1)[place].logical_not_()
            assert not _is_causal(other)
        # As many hidden in each row, but others.
        assert not mask.any() or not _is_causal(mask.flip(1)) or shape[1] == 1
    for wrong, message in (
        (torch.ones(5, 5, dtype=torch.bool).triu(2), "is_causal=True and offset=keys - queries.*got another one"),
        (torch.eye(5, dtype=torch.bool), "got another one"),
        (causal[:4], r"of shape \(5, 5\), got shape \(4, 5\)"),
        (causal.expand(8, 5, 5), r"got shape \(8, 5, 5\)"),
        (causal + 1, "expected only 0 and -inf"),
    ):
        with pytest.raises(ValueError, match=f"MultiheadAttention: attn_mask: .*{message}"):
            module(x, x, x, attn_mask=wrong)
    with pytest.raises(TypeError, match="attn_mask: expected bool"):
        module(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int))


def test_step_of_a_quantised_layer():
    x = torch.randn(2, 4, 12)
    quantized = torch.ao.quantization.quantize_dynamic(encoder(), {nn.Linear}, torch.qint8)
    assert not isinstance(quantized.self_attn.out_proj, nn.Linear)
    with torch.no_grad():
        # Numbers of a quantised layer depend on the range of those beside them.
        torch.testing.assert_close(steps(quantized.step, x)[0], quantized(x, is_causal=True), rtol=0.1, atol=0.1)


def test_a_module_of_the_user():
    class Plain(nn.Module):
        def __init__(self, num_heads, head_dim, device=None, dtype=None):
            super().__init__()

        def forward(self, q, k, v, *, is_causal, offset, key_padding_mask):
            return ops.aft_simple(q, k, v, is_causal=is_causal)

    x = torch.randn(2, 4, 12)
    assert MultiheadAttention(12, 4, batch_first=True, attention=Plain)(x, x, x, is_causal=True)[0].shape == x.shape
