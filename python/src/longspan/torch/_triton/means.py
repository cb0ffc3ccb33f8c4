"""The kernels of the attention-free transformer: means of values under a running maximum (see README.md)."""

import triton
import triton.language as tl

from .tiles import NOTHING, exp, inverse, load_rows, sequence_of, store_rows, within

_SIZES = ["queries", "keys", "offset", "kv_heads", "count", "blocks", "back", "ahead", "shift"]


@triton.jit
def _place(count, heads, D: tl.constexpr, BX: tl.constexpr):
    """Of a program: the tile of columns and that of tokens, of ``count``, the head and the sequence."""
    TILES: tl.constexpr = (D + BX - 1) // BX
    program = tl.program_id(0)
    others = program // TILES // count
    return program % TILES, program // TILES % count, (others % heads).to(tl.int64), (others // heads).to(tl.int64)


@triton.jit
def _nothing(R: tl.constexpr, BX: tl.constexpr):
    """Means of no items: the exponent that the sums of values and of weights are relative to, and these."""
    zero = tl.zeros([R, BX], tl.float32)
    return zero + NOTHING, zero, zero


@triton.jit
def _joined(mean, items, bias, seen):
    """Means ``[rows, columns]`` and the items ``[items, columns]`` that they see. Keys and biases are added apart, relative to the largest: 10,000.3 has
    no digits of 0.3."""
    x, n, d = mean
    own_x, own_n, own_d = items
    seen, bias = seen[:, :, None], bias[:, :, None]
    highest = tl.maximum(x, tl.max(tl.where(seen, own_x[None, :, :] + bias, NOTHING), 1))
    # 0 times what a row does not see, where that is not finite, is NaN.
    weights = tl.where(seen, exp((own_x[None, :, :] - highest[:, None, :]) + bias), 0.0)
    kept = exp(x - highest)
    n = n * kept + tl.sum(tl.where(seen, weights * own_n[None, :, :], 0.0), 1)
    d = d * kept + tl.sum(tl.where(seen, weights * own_d[None, :, :], 0.0), 1)
    return highest, n, d


@triton.jit
def _load(at, there, D: tl.constexpr):
    """Means from memory, whose three numbers lie ``D`` apart."""
    return tl.load(at, mask=there, other=NOTHING), tl.load(at + D, mask=there, other=0.0), tl.load(at + 2 * D, mask=there, other=0.0)


@triton.jit
def _store(mean, at, there, D: tl.constexpr):
    x, n, d = mean
    tl.store(at, x, mask=there)
    tl.store(at + D, n, mask=there)
    tl.store(at + 2 * D, d, mask=there)


@triton.jit
def _items(
    x, v, first, there, low, x_t, v_t, OF_ROWS: tl.constexpr, ONE_KEY: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BX: tl.constexpr
):  # fmt: skip
    """Keys and their values, or what rows are in the backward, of the tokens ``first ..``, ``[tokens, columns]`` each."""
    column = low + tl.arange(0, BX)[None, :]
    if OF_ROWS:
        at = x + (first + tl.arange(0, C)).to(tl.int64)[:, None] * x_t + column
        items = _load(at, there[:, None] & (column < D), D)
    else:
        value = load_rows(v, first, v_t, there, low, D, C, BX).to(tl.float32)
        # A head may have one key for all of its columns.
        key = load_rows(x, first, x_t, there, low * (1 - ONE_KEY), 1 if ONE_KEY else D, C, 1 if ONE_KEY else BX).to(tl.float32)
        key = tl.broadcast_to(key, value.shape)
        items = key, tl.where(key == float("-inf"), 0.0, value), tl.zeros_like(value) + 1.0
    return items


@triton.jit(do_not_specialize=_SIZES)
def sum_blocks(
    x, v, sums, bounds, queries, keys, kv_heads, blocks, x_b, x_h, x_t, v_b, v_h, v_t,
    OF_ROWS: tl.constexpr, ONE_KEY: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """The mean of each block of keys, or of rows of all heads that read them."""
    tile, block, kv_head, sequence = _place(blocks, kv_heads, D, BX)
    low = tile * BX
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    start, tokens = (q_start, n_queries) if OF_ROWS else (k_start, n_keys)
    there, column = within(block * R + tl.arange(0, R), tokens), low + tl.arange(0, BX)[None, :]
    mean = _nothing(1, BX)
    for g in range(GROUP if OF_ROWS else 1):
        head = kv_head * GROUP + g if OF_ROWS else kv_head
        x_at, v_at = x + batch * x_b + head * x_h + start * x_t, v + batch * v_b + kv_head * v_h + start * v_t
        items = _items(x_at, v_at, block * R, there, low, x_t, v_t, OF_ROWS, ONE_KEY, D, R, BX)
        mean = _joined(mean, items, tl.zeros([1, R], tl.float32), there[None, :])
    _store(mean, sums + ((sequence * kv_heads + kv_head) * blocks + block) * 3 * D + column, column < D, D)


@triton.jit(do_not_specialize=_SIZES)
def scan_blocks(sums, initial, ends, blocks, REVERSE: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BX: tl.constexpr):
    """Means of all blocks before each, and of all; or in ``REVERSE`` of each and all after it."""
    tile, _, whose, _ = _place(1, 1 << 30, D, BX)
    column, r = tile * BX + tl.arange(0, BX)[None, :], tl.arange(0, R)
    there = column < D
    mean = _nothing(1, BX)
    if initial is not None:
        mean = _load(initial + whose * 3 * D + column, there, D)
    for first in range(0, blocks + 1, R):
        place = blocks - 1 - first - r if REVERSE else first + r
        items = _load(sums + (whose * blocks + place)[:, None] * 3 * D + column, there & within(place, blocks)[:, None], D)
        rows = _joined(_nothing(R, BX), mean, tl.zeros([R, 1], tl.float32), tl.zeros([R, 1], tl.float32) == 0)
        rows = _joined(rows, items, tl.zeros([R, R], tl.float32), r[:, None] > r[None, :])
        mean = _joined(mean, items, tl.zeros([1, R], tl.float32), tl.zeros([1, R], tl.float32) == 0)
        place = place + 1 if REVERSE else place
        _store(rows, ends + (whose * (blocks + 1) + place)[:, None] * 3 * D + column, there & within(place, blocks + 1)[:, None], D)


@triton.jit(do_not_specialize=_SIZES)
def collect(
    x, v, before, after, w, own, d_out, to, beside, final, lengths, bounds,
    queries, keys, offset, kv_heads, count, blocks, back, ahead, shift,
    x_b, x_h, x_t, v_b, v_h, v_t, w_b, w_h, w_t, own_b, own_h, own_t, g_b, g_h, g_t, to_b, to_h, to_t, beside_b, beside_h, beside_t,
    ROLE: tl.constexpr, CAUSAL: tl.constexpr, ONE_KEY: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """A tile of tokens, for each of which joins the means before and after it and what is near, with its bias. Role ``out``: queries, for outputs;
    ``dq``: for their gradients and, ``beside``, what rows are to the keys that they see; ``dk``: keys, for gradients of values and, ``beside``,
    of keys."""
    OF_ROWS: tl.constexpr = ROLE == "dk"
    ROW_GROUP: tl.constexpr = 1 if OF_ROWS else GROUP
    tile, tokens_tile, own_head, sequence = _place(count, kv_heads * ROW_GROUP, D, BX)
    low, first, kv_head = tile * BX, tokens_tile * R - shift, own_head // ROW_GROUP
    whose = sequence * kv_heads + kv_head
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    start, tokens, others_start, others = (k_start, n_keys, q_start, n_queries) if OF_ROWS else (q_start, n_queries, k_start, n_keys)
    column, r, none = low + tl.arange(0, BX)[None, :], tl.arange(0, R), tl.zeros([R, 1], tl.float32)
    there = within(first + r, tokens)
    # Where the tile stands among the others, and which of them are near.
    center, nearest, farthest = (first - offset, ahead, back) if OF_ROWS else (first + offset, back, ahead)
    begin = tl.minimum(tl.maximum(center - nearest, 0), others)
    end = tl.minimum(tl.maximum(center + R + farthest, begin), others)
    mean = _nothing(R, BX)
    if before is not None:
        begin = begin // R * R
        mean = _joined(mean, _load(before + (whose * (blocks + 1) + begin // R) * 3 * D + column, column < D, D), none, there[:, None])
    if after is not None:
        block = (end + R - 1) // R
        end = tl.minimum(block * R, others)
        mean = _joined(mean, _load(after + (whose * (blocks + 1) + block) * 3 * D + column, column < D, D), none, there[:, None])
    for g in range(GROUP if OF_ROWS else 1):
        head = kv_head * GROUP + g if OF_ROWS else own_head
        x_at = x + batch * x_b + (head if OF_ROWS else kv_head) * x_h + others_start * x_t
        v_at = v + batch * v_b + kv_head * v_h + others_start * v_t
        for n in range(begin, end, C):
            other = n + tl.arange(0, C)
            items = _items(x_at, v_at, n + tl.zeros([], tl.int32), other < end, low, x_t, v_t, OF_ROWS, ONE_KEY, D, C, BX)
            # From a row to a key.
            distance = (center + r)[:, None] - other[None, :] if OF_ROWS else other[None, :] - (center + r)[:, None]
            seen = there[:, None] & (other < end)[None, :]
            if CAUSAL:
                seen = seen & (distance <= 0)
            bias = tl.zeros([R, C], tl.float32)
            if w is not None:
                row = q_start + (other[None, :] if OF_ROWS else (first + r)[:, None])
                at = w + batch * w_b + head * w_h + row * w_t + (distance + back)
                bias += tl.load(at, mask=seen & within(distance + back, back + ahead + 1), other=0.0)
            mean = _joined(mean, items, bias, seen)

    to += batch * to_b + own_head * to_h + start * to_t
    own += batch * own_b + own_head * own_h + start * own_t
    if OF_ROWS:
        if final is not None:
            # One row more, which sees what no bias reaches any longer.
            of_final = there & (first + r < tl.load(lengths + sequence))
            mean = _joined(mean, _load(final + whose * 3 * D + column, column < D, D), none, of_final[:, None])
        exponent, of_values, of_weights = mean
        v += batch * v_b + kv_head * v_h + k_start * v_t
        key, value, _ = _items(own, v, first, there, low, own_t, v_t, False, ONE_KEY, D, R, BX)
        factor, ignored = exp(key + exponent), key == float("-inf")
        store_rows(tl.where(ignored, 0.0, of_values * factor), to, first, to_t, there, low, D, R, BX)
        of_key = tl.where(ignored, 0.0, (value * of_values - of_weights) * factor)
        store_rows(of_key, beside + batch * beside_b + own_head * beside_h + start * beside_t, first, beside_t, there, low, D, R, BX)
    else:
        exponent, total, weight = mean
        query = load_rows(own, first, own_t, there, low, D, R, BX).to(tl.float32)
        below, gate = inverse(weight), 1.0 / (1.0 + exp(-query))
        y = total * below * gate
        if ROLE == "out":
            store_rows(y, to, first, to_t, there, low, D, R, BX)
        else:
            of_out = load_rows(d_out + batch * g_b + own_head * g_h + start * g_t, first, g_t, there, low, D, R, BX).to(tl.float32)
            store_rows(of_out * y / (1.0 + exp(query)), to, first, to_t, there, low, D, R, BX)
            # Of a row that sees nothing no key has anything.
            item = tl.where(weight == 0.0, NOTHING, -exponent), of_out * gate * below, of_out * y * below
            at = beside + batch * beside_b + own_head * beside_h + (start + first + r)[:, None] * beside_t + column
            _store(item, at, there[:, None] & (column < D), D)


@triton.jit(do_not_specialize=_SIZES)
def weigh_back(
    items, k, v, w, dw, bounds, queries, keys, offset, kv_heads, count, back, ahead,
    x_b, x_h, x_t, k_b, k_h, k_t, v_b, v_h, v_t, w_b, w_h, w_t, dw_b, dw_h, dw_t,
    ONE_KEY: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """A tile of columns' part in the gradients of the biases of a tile of rows."""
    tile, block, head, sequence = _place(count, kv_heads * GROUP, D, BX)
    low, first, kv_head = tile * BX, block * R, head // GROUP
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    column, r = low + tl.arange(0, BX)[None, :], tl.arange(0, R)
    there, row = within(first + r, n_queries), q_start + first + r
    x, n, d = _load(items + batch * x_b + head * x_h + row[:, None] * x_t + column, there[:, None] & (column < D), D)
    k += batch * k_b + kv_head * k_h + k_start * k_t
    v += batch * v_b + kv_head * v_h + k_start * v_t
    w += batch * w_b + head * w_h
    dw += tile.to(tl.int64) * dw_b + (batch * kv_heads * GROUP + head) * dw_h
    begin = tl.maximum(first + offset - back, 0)
    for at in range(begin, tl.minimum(first + offset + R + ahead, n_keys), C):
        other = at + tl.arange(0, C)
        key, value, _ = _items(k, v, at + tl.zeros([], tl.int32), other < n_keys, low, k_t, v_t, False, ONE_KEY, D, C, BX)
        tap = other[None, :] - (first + offset + r)[:, None] + back
        seen = there[:, None] & (other < n_keys)[None, :] & within(tap, back + ahead + 1)
        bias = tl.load(w + row[:, None] * w_t + tap, mask=seen, other=0.0)
        factor = exp((key[None, :, :] + x[:, None, :]) + bias[:, :, None])
        parts = tl.where((key == float("-inf"))[None, :, :], 0.0, factor * (n[:, None, :] * value[None, :, :] - d[:, None, :]))
        tl.store(dw + row[:, None] * dw_t + tap, tl.sum(parts, 2), mask=seen)
