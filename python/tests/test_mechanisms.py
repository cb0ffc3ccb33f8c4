"""Fourier and Toeplitz positions and AFT against their definitions, with gradients, step by step, and on other devices."""

from functools import partial

import definition
import numpy as np
import pytest
from test_ops import close, inputs, streamed

from longspan import ops

RNG = np.random.default_rng(11)
MASKS = [dict(is_causal=False), dict(is_causal=True), dict(is_causal=True, offset=2), dict(is_causal=True, offset=-3)]


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def fourier_case(normalizer, wave="each", positions=False):
    axes = 2 if positions else 1
    a = draw(2, 2 if wave == "pairs" else 4, axes)
    each = {"b": draw(4, 4)} if wave == "each" else {}
    if wave == "each":
        each |= {name: 0.3 * draw(4, 4) + 1 for name in {"one_plus": [], "dominant": ["c", "beta"], "unrotated": ["c"],
                                                         "none": ["c", "beta"]}[normalizer]}  # fmt: skip
    return a, each, {"normalizer": normalizer, "wave": wave}


FOURIER = [("one_plus", "each"), ("dominant", "each"), ("unrotated", "each"), ("none", "each"),
           ("unrotated", "pairs"), ("none", "pairs")]  # fmt: skip


@pytest.mark.parametrize("lengths", [(9, 9), (70, 130), (0, 4)])
@pytest.mark.parametrize("normalizer, wave", FOURIER)
def test_fourier_is_the_definition(normalizer, wave, lengths):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1], head_dim=4)
    padding = np.random.default_rng(1).random((2, lengths[1])) < 0.3
    for options in MASKS:
        for given in (False, True):
            a, each, how = fourier_case(normalizer, wave, given)
            how |= options
            if given:
                how |= {"q_positions": draw(2, lengths[0], 2), "k_positions": draw(2, lengths[1], 2)}
            for mask in (None, padding):
                got = ops.fourier_attention(q, k, v, a, **each, **how, key_padding_mask=mask)
                close(got, definition.fourier(q, k, v, a, **each, **how, key_padding_mask=mask), terms=1e6)


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", [(9, 9), (70, 130), (130, 70)])
def test_toeplitz_is_the_definition(lengths, options):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1])
    bias = draw(4, sum(lengths) - 1)
    for how in ({}, {"normalize": False}, {"feature_map": "exp"}):
        close(ops.toeplitz_attention(q, k, v, bias, **how, **options), definition.toeplitz(q, k, v, bias, **how, **options), terms=1e4)


def test_toeplitz_kinds_are_tables_of_all_distances():
    q, k, v = inputs(queries=12, keys=12)
    distance = np.arange(-11, 12)
    clipped = draw(4, 7)
    whole = clipped[:, np.clip(distance, -3, 3) + 3]
    close(ops.toeplitz_attention(q, k, v, clipped, kind="clipped"), definition.toeplitz(q, k, v, whole))
    # T5's: exact up to a quarter of the buckets, then by octaves, after the query in the second half.
    buckets = draw(4, 16)
    back = np.abs(distance)
    octaves = np.log(np.maximum(back, 4) / 4) / np.log(9 / 4)
    index = np.where(back < 4, back, np.minimum(4 + (octaves * 4).astype(int), 7)) + np.where(distance > 0, 8, 0)
    got = ops.toeplitz_attention(q, k, v, buckets, kind="buckets", max_distance=9)
    close(got, definition.toeplitz(q, k, v, buckets[:, index]))
    # An image of 3 rows and 4 columns, by looking at every pair.
    grid = draw(4, 5, 7)
    row, column = np.divmod(np.arange(12), 4)
    pairs = grid[:, row[None] - row[:, None] + 2, column[None] - column[:, None] + 3]
    weights = (definition.FEATURE_MAPS["elu+1"](q) @ definition.FEATURE_MAPS["elu+1"](k.repeat(2, 1)).swapaxes(-1, -2))
    expected = definition.weighted(weights * np.exp(pairs), v.repeat(2, 1))
    close(ops.toeplitz_attention(q, k, v, grid, kind="grid"), expected)


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", [(9, 9), (70, 130), (130, 70)])
def test_short_convolution_is_the_definition(lengths, options):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1], kv_heads=2, value_dim=5)
    padding = np.random.default_rng(1).random((2, lengths[1])) < 0.3
    for width, silu, mask in [(1, True, None), (4, True, padding), (7, False, None)]:
        how = dict(options, key_padding_mask=mask, silu=silu)
        taps = draw(2, width, 5)
        close(ops.short_convolution(q, k, v, taps, **how), definition.short_convolution(q, k, v, taps, **how))


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("lengths", [(9, 9), (70, 130), (130, 70)])
def test_aft_is_the_definition(lengths, options):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1], kv_heads=4, value_dim=5)
    padding = np.random.default_rng(1).random((2, lengths[1])) < 0.3
    for mask in (None, padding):
        how = dict(options, key_padding_mask=mask)
        close(ops.aft_simple(q, k, v, **how), definition.aft(q, k, v, **how))
        for window in (1, 2, 7):
            w = draw(lengths[0], 2 * window - 1)
            close(ops.aft_local(q, k, v, w, **how), definition.aft(q, k, v, w, **how))
        for taps in (1, 4, 5):
            w = draw(4, taps)
            biases = definition.conv_biases(w, *lengths, options["is_causal"], options.get("offset", 0))
            key = k[..., :1]
            close(ops.aft_conv(q, key[..., 0], v, w, **how), definition.aft(q, key, v, biases, **how))


@pytest.mark.parametrize("options", [*MASKS, dict(is_causal=True, offset=-40), dict(is_causal=True, offset=10**15)])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 21), (21, 9), (3, 0)])
def test_full_biases_and_softmax(lengths, options):
    q, k, v = inputs(queries=lengths[0], keys=lengths[1], kv_heads=4, value_dim=5)
    w = draw(*lengths)
    close(ops.aft_full(q, k, v, w, **options), definition.aft(q, k, v, w[None], **options))
    u, z = draw(lengths[0], 2), draw(lengths[1], 2)
    close(ops.aft_full(q, k, v, u=u, z=z, **options), definition.aft(q, k, v, (u @ z.T)[None], **options))
    for scale in (None, 0.3):
        scores = np.exp((5**-0.5 if scale is None else scale) * q @ k.swapaxes(-1, -2))
        seen = definition.visible(*lengths, options["is_causal"], options.get("offset", 0), None, 2)
        expected = definition.weighted(np.where(seen, scores, 0), v)
        close(ops.softmax_attention(q, k, v, scale=scale, **options), expected)
        near = np.abs(np.arange(lengths[1]) - np.arange(lengths[0])[:, None] - options.get("offset", 0)) < 4
        expected = definition.weighted(np.where(seen & near, scores, 0), v)
        close(ops.softmax_attention(q, k, v, scale=scale, window=4, **options), expected)


def test_aft_conv_as_published():
    q, k, v = inputs(kv_heads=4, value_dim=5)
    w, gamma, beta = draw(4, 5), draw(4), draw(4) + 1
    taps = gamma[:, None] * (w - w.mean(1, keepdims=True)) / w.std(1, keepdims=True) + beta[:, None]
    close(ops.aft_conv(q, k[..., 0], v, w, gamma=gamma, beta=beta), ops.aft_conv(q, k[..., 0], v, taps))


def test_aft_conv_over_an_image():
    q, k, v = inputs(queries=12, keys=12, kv_heads=4, value_dim=5)
    row, column = np.divmod(np.arange(12), 4)
    padding = np.random.default_rng(1).random((2, 12)) < 0.3
    for rows, taps in ((1, 1), (2, 3), (3, 5), (7, 2)):
        w = draw(4, rows, taps)
        down = row[None] - row[:, None] + (rows - 1) // 2
        right = column[None] - column[:, None] + (taps - 1) // 2
        inside = (down >= 0) & (down < rows) & (right >= 0) & (right < taps)
        biases = np.where(inside, w[:, down.clip(0, rows - 1), right.clip(0, taps - 1)], 0)
        for mask in (None, padding):
            got = ops.aft_conv(q, k[..., 0], v, w, image=(3, 4), key_padding_mask=mask)
            close(got, definition.aft(q, k[..., :1], v, biases, key_padding_mask=mask))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("maps", [None, "hedgehog"])
def test_fourier_steps_at_given_positions(maps, kv_heads):
    """Positions belong to every head, what a map learns to one: neither is cut as the other."""
    q, k, v = inputs(queries=9, keys=9, kv_heads=kv_heads)
    width = q.shape[3]
    places = np.random.default_rng(2).normal(size=(2, 2, 9, 2))
    features = 2 * width if maps else width
    learned = draw(kv_heads, features, 2), draw(4, features)
    options = {"feature_map": maps, "maps": (draw(4, width, width), draw(kv_heads, width, width))} if maps else {}
    at = {"q_positions": places[0], "k_positions": places[1]}
    whole = ops.fourier_attention(q, k, v, *learned, is_causal=True, **at, **options)
    state = None
    for t in range(9):
        here = {name: x[:, t : t + 1] for name, x in at.items()}
        out, state = ops.fourier_attention_step(*(x[:, :, t] for x in (q, k, v)), *learned, state=state, **here, **options)
        close(out, whole[:, :, t])
    with pytest.raises(ValueError, match="k_positions"):
        ops.fourier_attention_step(*(x[:, :, 0] for x in (q, k, v)), *learned, q_positions=places[0][:, :1], **options)


#: The names of what is called over all tokens, and of its step, and what the mechanism learns or is told.
STREAMS = {
    "kernelized": ("kernelized_attention", {}),
    "shaw": ("shaw_attention", {"rel": draw(4, 7, 4)}),
    "fourier": ("fourier_attention", {"a": draw(4, 4, 1), "b": draw(4, 4)}),
    "toeplitz": ("toeplitz_attention", {"bias": draw(4, 59)}),
    "toeplitz, clipped": ("toeplitz_attention", {"bias": draw(4, 7), "kind": "clipped"}),
    "aft_full": ("aft_full", {"w": draw(30, 30)}),
    "aft_full of two factors": ("aft_full", {"u": draw(30, 2), "z": draw(30, 2) + 1}),
    "short_convolution": ("short_convolution", {"taps": draw(4, 4, 4)}),
    "depthwise_convolution": ("depthwise_convolution", {"taps": draw(4, 4, 4), "bias": draw(4, 4)}),
    "aft_simple": ("aft_simple", {}),
    "aft_local": ("aft_local", {"w": draw(30, 7)}),
    "softmax": ("softmax_attention", {"capacity": 64}),
    "softmax in a window": ("softmax_attention", {"window": 5}),
    "aft_conv": ("aft_conv", {"w": draw(4, 5)}),
}


def called(name, suffix="", **options):
    """A function of queries, keys and values, whatever the operator takes of them."""
    function, learned = getattr(ops, STREAMS[name][0] + suffix), STREAMS[name][1]
    if name == "depthwise_convolution":
        options.pop("is_causal", None)
        return lambda q, k, v, **more: function(v, **learned, **options, **more)
    if name == "aft_conv":
        return lambda q, k, v, **more: function(q, k[..., 0], v, **learned, **options, **more)
    return partial(function, **learned, **options)


@pytest.mark.parametrize("name", STREAMS)
def test_token_by_token_and_chunk_after_chunk(name):
    whole, step = called(name, is_causal=True), called(name, "_step")
    q, k, v = inputs(queries=30, keys=30, kv_heads=4, head_dim=4, value_dim=4)
    expected, end = whole(q, k, v, output_final_state=True)
    out, state = streamed(step, q, k, v)
    close(out, expected, terms=1e4)
    assert state.mechanism == end.mechanism and state.parts == end.parts
    pieces, state = [], None
    for a, b in ((0, 13), (13, 14), (14, 30)):
        out, state = whole(*(x[:, :, a:b] for x in (q, k, v)), initial_state=state, output_final_state=True)
        pieces.append(out)
    close(np.concatenate(pieces, 2), expected, terms=1e4)
    token = [x[:, :, 0] for x in (q, k, v)]
    # A table by position or distance ends with the sequence.
    if name != "toeplitz" and not name.startswith(("aft_full", "aft_local")):
        close(step(*token, state=state)[0], step(*token, state=end)[0], terms=1e4)


Q, K, V = inputs(kv_heads=4, head_dim=4, value_dim=4)
WRONG = [
    ("c: expected None", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1), draw(4, 4), draw(4, 4))),
    ("b: expected an array", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1))),
    ("normalizer: expected one of", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1), normalizer="x")),
    ("wave: expected", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1), wave="x")),
    ("k_positions: expected both", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1), draw(4, 4), q_positions=Q)),
    (r"a: expected shape \(4, 4, 1\)", lambda: ops.fourier_attention(Q, K, V, draw(4, 3, 1), draw(4, 4))),
    ("normaliser", lambda: ops.fourier_attention(Q, K, V, draw(4, 4, 1), draw(4, 4), 9 * draw(4, 4), normalizer="literal")),
    ("bias: expected shape .* Lq", lambda: ops.toeplitz_attention(Q, K, V, draw(4, 24))),
    ("bias: expected shape", lambda: ops.toeplitz_attention(Q, K, V, draw(24))),
    ("bias: expected shape", lambda: ops.toeplitz_attention_step(Q[:, :, 0], K[:, :, 0], V[:, :, 0], draw(4, 24))),
    ("w: expected shape", lambda: ops.aft_local(Q, K, V, draw(13, 4))),
    (r"w: expected shape \(13, 5\)", lambda: ops.aft_local(Q, K, V, draw(12, 5))),
    ("k: expected shape", lambda: ops.aft_conv(Q, K, V, draw(4, 5))),
    ("w: expected w, or both u and z", lambda: ops.aft_full(Q, K, V, draw(13, 13), u=draw(13, 2))),
    ("u, z: expected 13 and 13 rows", lambda: ops.aft_full(Q, K, V, u=draw(13, 2), z=draw(12, 2))),
    ("w: expected shape", lambda: ops.aft_full(Q, K, V, draw(13, 12), output_final_state=True, is_causal=True)),
    ("kind: expected one of", lambda: ops.toeplitz_attention(Q, K, V, draw(4, 25), kind="x")),
    (r"bias: expected shape \(heads, 2R", lambda: ops.toeplitz_attention(Q, K, V, draw(4, 4), kind="clipped")),
    (r"bias: expected shape .*height", lambda: ops.toeplitz_attention(Q, K, V, draw(4, 4), kind="grid")),
    ("max_distance: expected", lambda: ops.toeplitz_attention(Q, K, V, draw(4, 4), kind="buckets", max_distance=0)),
    (r"w: expected shape \(13, 13\)", lambda: ops.aft_full(Q, K, V, draw(13, 12))),
    ("scale: expected a finite", lambda: ops.softmax_attention(Q, K, V, scale=float("nan"))),
    ("window: expected an integer from 1 to", lambda: ops.softmax_attention(Q, K, V, window=0)),
    ("image|places", lambda: ops.aft_conv(Q, K[..., 0], V, draw(4, 3, 3), image=(3, 4))),
    ("image: expected an integer from 1 to", lambda: ops.aft_conv(Q, K[..., 0], V, draw(4, 3, 3), image=(13, 0))),
    ("w: expected shape", lambda: ops.aft_conv(Q, K[..., 0], V, draw(4, 3), image=(13, 1))),
    ("beta: expected both", lambda: ops.aft_conv(Q, K[..., 0], V, draw(4, 5), gamma=draw(4))),
    ("value_dim: expected", lambda: ops.aft_simple(Q, K, V[..., 1:])),
]


@pytest.mark.parametrize("message, call", WRONG, ids=[message for message, _ in WRONG])
def test_wrong_calls(message, call):
    with pytest.raises(ValueError, match=message):
        call()
