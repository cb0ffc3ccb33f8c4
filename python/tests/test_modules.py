"""Modules and layers: drop-ins that compute what they say, learn, compile and stream."""

import copy
from contextlib import nullcontext

import longspan
import pytest
import torch
from agreement import learned, padding, steps
from longspan import _calls, ops
from longspan.torch import (
    GatedRMSNorm,
    KernelizedAttention,
    MultiheadAttention,
    ShawAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from torch import nn

ATTENTIONS = pytest.mark.parametrize("options", [{}, {"attention": "shaw", "radius": 3}], ids=["kernelized", "shaw"])


def by_hand(module, x, **options):
    """What the module should compute, from its parameters."""
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    if hasattr(module.attention, "rel"):
        out = ops.shaw_attention(q, k, v, module.attention.rel, **options)
    else:
        out = ops.kernelized_attention(q, k, v, **options)
    return module.out_proj(out.transpose(1, 2).flatten(2))


@ATTENTIONS
@pytest.mark.parametrize("is_causal", [False, True])
def test_multi_head_attention(options, is_causal):
    module = MultiheadAttention(12, 3, batch_first=True, **options)
    x = torch.randn(2, 7, 12)
    mask = padding(2, 7, 1, slice(4, None))
    expected = by_hand(module, x, is_causal=is_causal, key_padding_mask=mask)
    for key_padding_mask in (mask, torch.zeros(2, 7).masked_fill(mask, -torch.inf)):
        out, weights = module(x, x, x, key_padding_mask=key_padding_mask, is_causal=is_causal)
        assert weights is None
        torch.testing.assert_close(out, expected)
    with torch.no_grad():
        torch.testing.assert_close(module(x, x, x, key_padding_mask=mask, is_causal=is_causal)[0], expected)
    # The same weights with tokens first, and without a batch.
    token_first = MultiheadAttention(12, 3, **options)
    token_first.load_state_dict(module.state_dict())
    y = x.transpose(0, 1)
    out = token_first(y, y, y, key_padding_mask=mask, is_causal=is_causal)[0]
    torch.testing.assert_close(out.transpose(0, 1), expected)
    single = module(x[0], x[0], x[0], is_causal=is_causal)[0]
    torch.testing.assert_close(single, by_hand(module, x[:1], is_causal=is_causal)[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_gated_attention_is_its_definition(batch_first, crossed):
    module = MultiheadAttention(12, 3, batch_first=batch_first, gated_attention=True)
    nn.init.normal_(module.gated_norm.weight)
    nn.init.normal_(module.gate_proj.bias)
    plain = MultiheadAttention(12, 3, batch_first=True)
    plain.load_state_dict(module.state_dict(), strict=False)
    plain.out_proj = nn.Identity()
    x = torch.randn(2, 7, 12)
    memory = torch.randn(2, 5, 12) if crossed else x
    heads = plain(x, memory, memory, is_causal=not crossed)[0].unflatten(-1, (3, 4))
    normal = (heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    gate = module.gate_proj(x)
    expected = module.out_proj(normal * module.gated_norm.weight * gate * torch.sigmoid(gate))
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    query = turn(x)
    key = turn(memory) if crossed else query
    got = turn(module(query, key, key, is_causal=not crossed)[0])
    torch.testing.assert_close(got, expected)
    assert module(query[0], key[0], key[0])[0].shape == query[0].shape
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters() if "proj" not in name or "gate" in name}
    module.zero_grad()
    got.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name])


@pytest.mark.parametrize("options", [{}, {"attention": "fourier"}, {"num_kv_heads": 1, "attention": "shaw", "radius": 2}], ids=str)
@pytest.mark.parametrize("learns", [False, True])
def test_gated_layers_step(options, learns):
    encoder = TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True, gated_attention=True, **options).eval()
    decoder = TransformerDecoderLayer(12, 3, 16, 0.0, batch_first=True, gated_attention=True, **options).eval()
    x, memory = torch.randn(2, 6, 12), torch.randn(2, 4, 12)
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(steps(encoder.step, x)[0], encoder(x, is_causal=True))
        torch.testing.assert_close(steps(decoder.step, x, memory)[0], decoder(x, memory, tgt_is_causal=True))
    assert decoder.multihead_attn.gated_attention and isinstance(decoder.self_attn.gated_norm, GatedRMSNorm)


def test_gated_norms_of_wrong_sizes():
    with pytest.raises(ValueError, match="GatedRMSNorm: head_dim: expected an integer from 1 on, got 0"):
        GatedRMSNorm(2, 0)
    norm = GatedRMSNorm(2, 3)
    with pytest.raises(ValueError, match=r"GatedRMSNorm: x: expected rows of num_heads \* head_dim = 6 numbers, got shape \(4, 5\)"):
        norm(torch.zeros(4, 5), torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"GatedRMSNorm: gate: expected shape \(4, 6\), as x, got \(1, 6\)"):
        norm(torch.zeros(4, 6), torch.zeros(1, 6))


def test_weights_of_torch_load():
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    ours = MultiheadAttention(12, 3, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    theirs = nn.TransformerEncoderLayer(12, 3)
    TransformerEncoderLayer(12, 3).load_state_dict(theirs.state_dict())
    theirs = nn.TransformerDecoderLayer(12, 3)
    TransformerDecoderLayer(12, 3).load_state_dict(theirs.state_dict())


def test_cross_attention_of_other_widths():
    module = MultiheadAttention(12, 3, kdim=5, vdim=7, bias=False, batch_first=True)
    out, _ = module(torch.randn(2, 4, 12), torch.randn(2, 9, 5), torch.randn(2, 9, 7))
    assert out.shape == (2, 4, 12)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    same = MultiheadAttention(12, 3, batch_first=True)
    assert same(torch.randn(2, 4, 12), x := torch.randn(2, 9, 12), x)[0].shape == (2, 4, 12)


def test_projections_reach_the_kernels_without_a_copy(monkeypatch):
    seen = []
    forward = longspan._native.Mechanism.forward

    class Watched:
        def __init__(self, native):
            self.native = native

        def forward(self, call, *rest):
            seen.extend(longspan._native.seen_by_kernels(x)[1] for x in call[:3])
            return forward(self.native, call, *rest)

    modules = [MultiheadAttention(12, 3, batch_first=batch_first) for batch_first in (True, False)]
    cached = _calls.cached
    monkeypatch.setattr(_calls, "cached", lambda *arguments: Watched(cached(*arguments)))
    for module in modules:
        x = torch.randn(2, 7, 12)
        module(x, x, x)
        with torch.no_grad():
            module(x, x, x)
    assert len(seen) == 12 and not any(seen)


@pytest.mark.parametrize("attention", ["kernelized", "shaw", "toeplitz"])
def test_gated_heads_beyond_float16_are_normed(attention):
    layer = TransformerEncoderLayer(64, 4, 128, batch_first=True, attention=attention, gated_attention=True, normalize=False,
                                    dtype=torch.float16).eval()  # fmt: skip
    x = (torch.randn(1, 3000, 64) * 12).half()
    with torch.no_grad():
        out, state = layer(x, is_causal=True, output_final_state=True)
        step, _ = layer.step(x[:, 0], state)
        layer.float()
        exact, state = layer(x.float(), is_causal=True, output_final_state=True)
        heads = layer.self_attn.attention(*(torch.ones(1, 4, 3000, 16) * 12 for _ in range(3)), is_causal=True)
        assert heads.abs().max() > 65504
        torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(step.float(), layer.step(x[:, 0].float(), state)[0], rtol=1e-2, atol=2e-2)


@ATTENTIONS
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_in_torchs_encoder(options, training, norm_first):
    layer = TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True, norm_first=norm_first, **options)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(2, 7, 12)
    mask = padding(2, 7, 1, slice(4, None))
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    with torch.set_grad_enabled(training):
        out = encoder(x, mask=causal, src_key_padding_mask=mask)
        expected = x
        for layer in encoder.layers:
            expected = layer(expected, src_key_padding_mask=mask, is_causal=True)
        torch.testing.assert_close(out, expected)
        poisoned = x.clone()
        poisoned[1, 4:] = torch.nan
        torch.testing.assert_close(encoder(poisoned, mask=causal, src_key_padding_mask=mask)[1, :4], out[1, :4])
        later = x.clone()
        later[:, 5:] += 1
        torch.testing.assert_close(encoder(later, mask=causal)[:, :5], encoder(x, mask=causal)[:, :5])


def test_in_torchs_decoder():
    layer = TransformerDecoderLayer(12, 3, 16, dropout=0.0, batch_first=True, attention="shaw", radius=2)
    decoder = nn.TransformerDecoder(layer, 2)
    tgt, memory = torch.randn(2, 5, 12), torch.randn(2, 8, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    mask = padding(2, 8, 0, slice(3, None))
    out = decoder(tgt, memory, tgt_mask=causal, memory_key_padding_mask=mask)
    out.sum().backward()
    assert all(p.grad is not None for p in decoder.parameters())
    other = memory.clone()
    other[0, 3:] = 7
    torch.testing.assert_close(decoder(tgt, other, tgt_mask=causal, memory_key_padding_mask=mask), out)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_token_by_token(batch_first):
    layer = TransformerDecoderLayer(12, 3, 16, batch_first=batch_first, attention="shaw", radius=2).eval()
    tgt, memory = torch.randn(2, 5, 12), torch.randn(2, 8, 12)
    mask = padding(2, 8, 0, slice(3, None))
    swap = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    with torch.no_grad():
        options = {"tgt_is_causal": True, "memory_key_padding_mask": mask}
        whole = swap(layer(swap(tgt), swap(memory), **options))
        prompt, state = layer(swap(tgt[:, :3]), swap(memory), **options, output_final_state=True)
        rest = layer(swap(tgt[:, 3:]), swap(memory), **options, initial_state=state.clone())
        torch.testing.assert_close(torch.cat([swap(prompt), swap(rest)], 1), whole)
        torch.testing.assert_close(layer.step(tgt[:, 3], swap(memory), state, mask)[0], whole[:, 3])
    torch.testing.assert_close(steps(layer.step, tgt, swap(memory), memory_key_padding_mask=mask)[0], whole)


def test_a_model_learns_and_streams():
    """The README's example in small: a masked model with Shaw positions learns to repeat what stood four tokens ago."""
    torch.manual_seed(1)
    embed = nn.Embedding(8, 32)
    layer = TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, attention="shaw", radius=6)
    head = nn.Linear(32, 8)
    parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]

    def loss():
        tokens = torch.randint(8, (16, 40))
        logits = head(layer(embed(tokens), is_causal=True))
        return nn.functional.cross_entropy(logits[:, 4:].flatten(0, 1), tokens[:, :-4].flatten())

    losses = learned(parameters, loss, 150)
    assert losses[-1] < 0.3 * losses[0], losses[::25]
    layer.eval()
    with torch.no_grad():
        x = embed(torch.randint(8, (16, 40)))
        torch.testing.assert_close(head(steps(layer.step, x)[0]), head(layer(x, is_causal=True)), rtol=1e-4, atol=1e-4)


def test_modules_compile_and_copy():
    layer = TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True, attention="shaw", radius=2)
    x = torch.randn(2, 7, 12)
    mask = padding(2, 7, 1, slice(4, None))
    expected = layer(x, src_key_padding_mask=mask, is_causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(x, src_key_padding_mask=mask, is_causal=True)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert layer.self_attn.attention.rel.grad.abs().sum() > 0
    compiled = torch.compile(layer.self_attn, fullgraph=True, backend="aot_eager")
    for ignored in (-torch.inf, torch.finfo().min):
        numbers = torch.zeros(2, 7).masked_fill(mask, ignored)
        with nullcontext() if ignored == -torch.inf else pytest.raises(RuntimeError, match="expected only 0 and -inf among its numbers"):
            torch.testing.assert_close(compiled(x, x, x, numbers)[0], layer.self_attn(x, x, x, mask)[0])
    torch.testing.assert_close(copy.deepcopy(layer)(x, src_key_padding_mask=mask, is_causal=True), expected)


def test_autocast_trains():
    layer = TransformerEncoderLayer(12, 3, 16, batch_first=True, attention="shaw", radius=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(2, 7, 12), is_causal=True)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_modules_on_another_device():
    layer = TransformerEncoderLayer(12, 3, 16, batch_first=True, attention="shaw", radius=2, device="meta")
    assert layer(torch.empty(2, 7, 12, device="meta"), is_causal=True).shape == (2, 7, 12)


WRONG = [
    (ValueError, "num_heads: expected a divisor", lambda: MultiheadAttention(10, 3)),
    (ValueError, "num_kv_heads: expected a divisor of num_heads = 4, got 3", lambda: MultiheadAttention(12, 4, num_kv_heads=3)),
    (ValueError, "num_kv_heads: expected an integer from 1 to .*, got 0", lambda: MultiheadAttention(12, 4, num_kv_heads=0)),
    (ValueError, "dropout", lambda: MultiheadAttention(12, 3, 2.0)),
    (ValueError, "add_bias_kv", lambda: MultiheadAttention(12, 3, add_bias_kv=True)),
    (ValueError, "unknown attention 'magic'; known are kernelized", lambda: MultiheadAttention(12, 3, attention="magic")),
    (TypeError, "radius", lambda: MultiheadAttention(12, 3, radius=3)),
    (ValueError, "unknown feature map", lambda: KernelizedAttention(3, 4, feature_map="magic")),
    (ValueError, "decay", lambda: KernelizedAttention(3, 4, decay=2.0)),
    (ValueError, "radius: expected an integer", lambda: ShawAttention(3, 4, radius=-1)),
    (ValueError, "head_dim: expected an integer", lambda: KernelizedAttention(3, 0)),
    (ValueError, "activation", lambda: TransformerEncoderLayer(12, 3, activation="magic")),
    (ValueError, "need_weights", lambda: MultiheadAttention(12, 3)(*[torch.zeros(2, 2, 12)] * 3, need_weights=True)),
    (ValueError, "attn_mask", lambda: MultiheadAttention(12, 3)(*[torch.zeros(2, 2, 12)] * 3, attn_mask=torch.eye(2))),
    (ValueError, "query: expected three axes", lambda: MultiheadAttention(12, 3)(*[torch.zeros(12)] * 3)),
    (ValueError, "key_padding_mask: expected only 0", lambda: MultiheadAttention(12, 3, batch_first=True)(
        *[torch.zeros(2, 2, 12)] * 3, key_padding_mask=torch.ones(2, 2))),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, call", WRONG, ids=[message[:40] for _, message, _ in WRONG])
def test_wrong_calls(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
