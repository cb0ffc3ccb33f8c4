"""Elementwise feature maps and their slopes, on tiles of float32, and Fourier's turned features. Columns beyond the head's width are 0."""

import triton
import triton.language as tl

from .tiles import NOTHING, exp, load_rows


@triton.jit
def _within(x, D: tl.constexpr, BLOCK: tl.constexpr, other: tl.constexpr):
    if D != BLOCK:
        x = tl.where((tl.arange(0, BLOCK) < D)[None, :], x, other)
    return x


@triton.jit
def _mapped(x, MAP: tl.constexpr):
    if MAP == "elu+1":
        # Infinite where x is large, which is not taken.
        x = tl.where(x > 0, x + 1, exp(x))
    elif MAP == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif MAP == "softplus":
        # log(1 + u) with all digits where u is small: u / ((1 + u) - 1) undoes the rounding of the sum.
        u = exp(-tl.abs(x))
        log = tl.where(1.0 + u == 1.0, u, tl.log(1.0 + u) * (u / tl.where(1.0 + u == 1.0, 1.0, (1.0 + u) - 1.0)))
        x = tl.where(x > 0, x, 0.0) + tl.where(x == x, log, x)
    elif MAP == "exp":
        x = exp(x)
    return x


@triton.jit
def slope(x, phi, MAP: tl.constexpr):
    """The derivative at ``x``, where the map is ``phi``."""
    if MAP == "elu+1":
        x = tl.where(x > 0, 1.0, phi)
    elif MAP == "relu":
        x = tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    elif MAP == "softplus":
        x = 1.0 / (1.0 + exp(-x))
    elif MAP == "exp":
        x = phi
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit
def of_keys(x, MAP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Features of keys and, for ``exp``, the exponent that each row is relative to: its largest number."""
    exponent = tl.zeros([x.shape[0]], tl.float32)
    if MAP == "exp":
        exponent = tl.maximum(tl.max(_within(x, D, BLOCK, float("-inf")), 1), NOTHING)
        x = x - exponent[:, None]
    return _within(_mapped(x, MAP), D, BLOCK, 0.0), exponent


@triton.jit
def of_queries(x, MAP: tl.constexpr, NORMALIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Features of queries; those of ``exp`` relative to the row's largest, which cancels in the division."""
    if MAP == "exp" and NORMALIZE:
        largest = tl.max(_within(x, D, BLOCK, float("-inf")), 1)
        x = x - tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    return _within(_mapped(x, MAP), D, BLOCK, 0.0)


@triton.jit
def blocks(low, W: tl.constexpr, BLOCK: tl.constexpr):
    """Of a tile's columns, their block and their place in it. Turned features are blocks of one width, of which a tile holds as many columns
    of each: in the order of `turned`."""
    n = tl.arange(0, BLOCK)
    return n // W, low + n % W


@triton.jit
def _wave(angle, block):
    """Cosines and sines of angles in quarters of a turn, in doubles, the second block's a quarter behind the first's. What is beyond the nearest
    quarter goes through Chebyshev's polynomials, right to 1e-7: a device's own functions take care of large angles, which takes minutes to compile
    in tiles like these."""
    whole = tl.floor(angle + 0.5)
    x = (angle - whole).to(tl.float32)
    u = x * x
    sine = x * 1.5707963267948966 + x * u * (-0.6459640199313157 + u * (0.07968703471440146 + u * -0.004621980682178388))
    cosine = 1.0 + u * (-1.2337005493749849 + u * (0.2536694104171556 + u * (-0.02086152899322607 + u * 0.0009067416464157357)))
    quarter = (whole.to(tl.int64).to(tl.int32) - block) & 3
    odd = (quarter & 1) == 1
    t, s = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -t, t), tl.where(quarter >= 2, -s, s)


@triton.jit
def turned(
    start, first, stride, valid, low, position, frequencies, waves, head,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fourier's features ``scale (phi t - psi s)`` of rows from ``position`` on, and what they consist of. With the angle ``p``, blocks
    are (t, s) = (cos p, sin p), (sin p, -cos p), (1, 0), (0, -1); ``psi`` is the other half of a pair. Also the exponents of rows, and x and y that
    phi and psi are of. Queries have ``waves``: phases, in quarters of a turn as the frequencies, and the scales of turned and of unturned blocks."""
    M: tl.constexpr = D // 2 if TURN == "pairs" else D
    block, column = blocks(low, W, BLOCK)
    there = (column < M) & (block < BLOCKS)
    at = start + first.to(tl.int64) * stride + tl.arange(0, C)[:, None] * stride + column[None, :]
    mask = valid[:, None] & there[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    exponent = tl.zeros([C], tl.float32)
    if MAP == "exp" and NORMALIZE:
        row = load_rows(start, first, stride, valid, 0, D, C, ROW).to(tl.float32)
        exponent = tl.maximum(tl.max(_within(row, D, ROW, float("-inf")), 1), NOTHING)
        x -= exponent[:, None]
    phi = tl.where(there[None, :], _mapped(x, MAP), 0.0)
    y, psi = x, tl.zeros([C, BLOCK], tl.float32)
    if TURN == "pairs":
        y = tl.load(at + M, mask=mask, other=0.0).to(tl.float32) - exponent[:, None]
        psi = tl.where(there[None, :], _mapped(y, MAP), 0.0)
    # In doubles: an angle far from the first token has no digits in float32.
    angle = (position + tl.arange(0, C).to(tl.float64))[:, None] * tl.load(frequencies + column, mask=there, other=0.0)[None, :]
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if waves is not None:
        own = waves + head * (3 * M) + column
        angle += tl.load(own, mask=there, other=0.0)[None, :]
        scale = tl.load(own + tl.where(block < 2, M, 2 * M), mask=there, other=0.0).to(tl.float32)
    t, s = _wave(angle, block[None, :])
    unturned, first_half = (block >= 2)[None, :], (block == 2)[None, :].to(tl.float32)
    t, s = tl.where(unturned, first_half, t), tl.where(unturned, first_half - 1.0, s)
    return scale[None, :] * (phi * t - psi * s), exponent, x, phi, y, psi, t, s, scale


@triton.jit
def key_features(
    k, first, stride, valid, low, position, frequencies,
    MAP: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Those of a tile of columns of keys, and the exponents of rows."""
    if TURN == "":
        features, exponent = of_keys(load_rows(k, first, stride, valid, low, D, C, BLOCK).to(tl.float32), MAP, D, BLOCK)
    else:
        features, exponent, _, _, _, _, _, _, _ = turned(
            k, first, stride, valid, low, position, frequencies, None, 0, MAP, True, TURN, BLOCKS, ROW, W, D, C, BLOCK
        )  # fmt: skip
    return features, exponent


@triton.jit
def query_features(
    q, first, stride, valid, low, position, frequencies, waves, head,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if TURN == "":
        features = of_queries(load_rows(q, first, stride, valid, low, D, C, BLOCK).to(tl.float32), MAP, NORMALIZE, D, BLOCK)
    else:
        features, _, _, _, _, _, _, _, _ = turned(
            q, first, stride, valid, low, position, frequencies, waves, head, MAP, NORMALIZE, TURN, BLOCKS, ROW, W, D, C, BLOCK
        )  # fmt: skip
    return features


@triton.jit
def turned_back(
    d, valid, x, phi, y, psi, t, s, scale,
    MAP: tl.constexpr, TURN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the gradient of turned features, that of x and of y, and sums over rows: of the angle's gradient, the same times the row's place, and
    the scales' gradient."""
    block, _ = blocks(0, W, BLOCK)
    d = tl.where(valid[:, None], d, 0.0)
    of_scale = tl.sum(d * (phi * t - psi * s), 0)
    d *= scale[None, :]
    of_angle = tl.where((block < 2)[None, :], -d * (phi * s + psi * t), 0.0)
    moment = tl.sum(of_angle * tl.arange(0, C).to(tl.float32)[:, None], 0)
    dx = tl.sum(tl.reshape(d * t * slope(x, phi, MAP), [C, BLOCK // W, W]), 1)
    dy = dx
    if TURN == "pairs":
        dy = tl.sum(tl.reshape(-d * s * slope(y, psi, MAP), [C, BLOCK // W, W]), 1)
    return dx, dy, tl.sum(of_angle, 0).to(tl.float64), moment.to(tl.float64), of_scale.to(tl.float64)
