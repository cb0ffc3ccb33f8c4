"""Decays that tokens bring to kernelized attention, with positions of every kind."""

from functools import partial

import definition
import numpy as np
import pytest

import longspan
from longspan import ops

random = np.random.default_rng(3)
B, H, KV, L, D = 2, 4, 2, 40, 6
Q, K, V = (random.standard_normal((B, heads, L, D)) for heads in (H, KV, KV))
REL, A, PHASES = random.standard_normal((H, 7, D)), random.standard_normal((KV, D, 1)), random.standard_normal((H, D))
G = -2 * random.random((B, KV, L)) ** 3
G[0, 0, 7], G[0, 0, 8] = -50.0, 0.0
WAYS = {
    "kernelized": (ops.kernelized_attention, ops.kernelized_attention_step, ()),
    "shaw": (ops.shaw_attention, ops.shaw_attention_step, (REL,)),
    "fourier": (ops.fourier_attention, ops.fourier_attention_step, (A, PHASES)),
}
SUMS = {"kernelized": {}, "shaw": {"radius": 3}, "fourier": {"parameters": [A]}}
EVERY = pytest.mark.parametrize("name", WAYS)


def weights(name):
    """Of all pairs, without decays, ``[B, H, L, L]``."""
    each = np.broadcast_to(np.eye(L), (B, KV, L, L))
    if name == "fourier":
        return definition.fourier(Q, K, each, A, PHASES, beta=np.ones((H, D)), normalizer="none")
    return definition.shaw(Q, K, each, REL if name == "shaw" else None, normalize=False)


@EVERY
def test_it_is_the_definition(name):
    attend, _, learned = WAYS[name]
    sums = np.zeros((B, KV, L, L))
    for i in range(L):
        for j in range(i):
            sums[:, :, i, j] = G[:, :, j + 1 : i + 1].sum(-1)
    w = np.tril(weights(name) * np.exp(sums).repeat(H // KV, 1))
    expected = w / w.sum(-1, keepdims=True) @ V.repeat(H // KV, 1)
    for dtype, close in ((np.float64, 1e-12), (np.float32, 2e-5)):
        q, k, v, g, *others = (x.astype(dtype) for x in (Q, K, V, G, *learned))
        assert np.abs(attend(q, k, v, *others, log_decay=g, is_causal=True) - expected).max() < close


@EVERY
def test_states_steps_and_sums_of_states(name):
    attend, step, learned = WAYS[name]
    call = partial(attend, is_causal=True)
    whole, last = call(Q, K, V, *learned, log_decay=G, output_final_state=True)
    part = lambda a, b: [x[:, :, a:b].copy() for x in (Q, K, V)]  # noqa: E731
    first, state = call(*part(0, 15), *learned, log_decay=G[:, :, :15].copy(), output_final_state=True)
    later = call(*part(15, L), *learned, log_decay=G[:, :, 15:].copy(), output_final_state=True)[1]
    both = longspan.combine(name, state, later, gate=True, **SUMS[name])
    token = [x[:, :, 0].copy() for x in (Q, K, V)]
    following = [step(*token, *learned, state=x, log_decay=G[:, :, 0].copy())[0] for x in (both, last)]
    assert np.abs(following[0] - following[1]).max() < 1e-12
    rows = [first]
    for t in range(15, L):
        token = [x[:, :, t].copy() for x in (Q, K, V)]
        out, state = step(*token, *learned, state=state, log_decay=G[:, :, t].copy())
        rows.append(out[:, :, None])
    assert np.abs(np.concatenate(rows, 2) - whole).max() < 1e-12


@EVERY
def test_gradients_through_sums_of_states_and_compiled(name):
    """Those of one call are held to the kernels in doubles by the list of cases."""
    torch = pytest.importorskip("torch")
    attend, _, learned = WAYS[name]
    tensors, g = [torch.tensor(x, requires_grad=True) for x in (Q, K, V, *learned)], torch.tensor(G, requires_grad=True)
    states = []
    for part in (slice(0, 15), slice(15, L)):
        pieces = [x[:, :, part] for x in tensors[:3]]
        states.append(attend(*pieces, *tensors[3:], log_decay=g[:, :, part], is_causal=True, output_final_state=True)[1])
    more = {"parameters": tensors[3:4]} if name == "fourier" else SUMS[name]
    both = longspan.combine(name, *states, gate=True, **more)
    last = attend(*tensors, log_decay=g, is_causal=True, output_final_state=True)[1]
    weigh = torch.randn_like(both.numbers).masked_fill(both.numbers.abs() == 0, 0)
    of_sum, of_whole = (torch.autograd.grad((x.numbers * weigh).sum(), g)[0] for x in (both, last))
    assert (of_sum - of_whole).abs().max() < 1e-10
    compiled = torch.compile(lambda *x: attend(*x[:-1], log_decay=x[-1], is_causal=True), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors, g), attend(*tensors, log_decay=g, is_causal=True))


def test_what_makes_no_sense_is_refused():
    call = partial(ops.kernelized_attention, Q, K, V, is_causal=True)
    for options, words in (
        ({"log_decay": -G}, "log_decay: expected numbers that are at most 0"),
        ({"log_decay": G[:, :, :-1].copy()}, "log_decay: expected shape"),
        ({"log_decay": G[..., None]}, "log_decay: expected shape"),
        ({"log_decay": G, "decay": 0.9}, "log_decay: expected None beside a decay"),
        ({"log_decay": G, "is_causal": False}, "bidirectional"),
        ({"log_decay": G, "offset": 1}, "no offset"),
        ({"log_decay": G, "algorithm": "naive"}, "naive"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**options)
    _, state = call(output_final_state=True)
    with pytest.raises(ValueError, match="initial_state"):
        call(log_decay=G, initial_state=state)


@pytest.mark.parametrize("name, options", [("KernelizedAttention", {}), ("ShawAttention", {"radius": 3}), ("FourierAttention", {}),
                                           ("FourierAttention", {"wave": "pairs", "normalizer": "unrotated"})])  # fmt: skip
def test_layers_learn_their_gates(name, options):
    torch = pytest.importorskip("torch")
    import longspan.torch as layers

    torch.manual_seed(0)
    attention = getattr(layers, name)(H, D, num_kv_heads=KV, gate=True, dtype=torch.float64, **options)
    assert attention.sees_order and attention.key_dim == D + 1
    q, v = torch.tensor(Q), torch.tensor(V)
    k = torch.cat([torch.tensor(K), torch.randn(B, KV, L, 1, dtype=torch.float64)], -1).requires_grad_()
    out, last = attention(q, k, v, is_causal=True, output_final_state=True)
    out.square().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in (k, attention.rate, attention.bias)) and k.grad[..., -1].abs().max() > 0
    with torch.no_grad():
        first, state = attention(q[:, :, :15], k[:, :, :15], v[:, :, :15], is_causal=True, output_final_state=True)
        later = attention(q[:, :, 15:], k[:, :, 15:], v[:, :, 15:], is_causal=True, output_final_state=True)[1]
        both = attention.combine(state, later)
        rows = [first]
        for t in range(15, L):
            row, state = attention.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
            rows.append(row[:, :, None])
        assert (torch.cat(rows, 2) - out).abs().max() < 1e-12
        token = [x[:, :, 0] for x in (q, k, v)]
        assert (attention.step(*token, both)[0] - attention.step(*token, state)[0]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="key_dim = 7"):
        attention(q, torch.tensor(K), v, is_causal=True)
    with pytest.raises(ValueError, match="gate: expected False beside a decay"):
        getattr(layers, name)(H, D, gate=True, decay=0.9, **options)
    encoder = layers.TransformerEncoderLayer(24, 4, 32, attention=name.removesuffix("Attention").lower(), gate=True, batch_first=True, **options)
    x = torch.randn(2, 30, 24)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(30)
    before = encoder.eval()(x, src_mask=causal, is_causal=True)
    assert torch.equal(encoder(torch.cat([x[:, :20], torch.randn(2, 10, 24)], 1), src_mask=causal, is_causal=True)[:, :20], before[:, :20])
