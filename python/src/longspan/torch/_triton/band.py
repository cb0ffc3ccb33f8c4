"""The kernels of Shaw's relative positions: a band of weights beside the diagonal, and sums of all that is farther (see README.md)."""

import triton
import triton.language as tl

from .tiles import NOTHING, exp, inverse, is_key, load_rows, sequence_of, store_rows, within

_SIZES = ["queries", "keys", "offset", "base", "blocks", "kv_heads", "start", "width", "radius", "near", "ahead", "place"]


@triton.jit
def _end(ends, whose, block, blocks, low, DV: tl.constexpr, BLOCK: tl.constexpr):
    """What is farther than the band, as seen from the first token of a block: sums of rows, and of ones."""
    column = low + tl.arange(0, BLOCK)
    at = ends + (whose * (blocks + 1) + tl.minimum(tl.maximum(block, 0), blocks)) * (DV + 1)
    return tl.load(at + column, mask=column < DV, other=0.0), tl.load(at + DV)


@triton.jit(do_not_specialize=_SIZES)
def sum_ends(
    x, w, delta, ends, ignored, bounds, log_decay, queries, keys, offset, base, blocks, kv_heads, width, place, x_b, x_h, x_t,
    OF_KEYS: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Sums over all blocks before each or, in ``REVERSE``, from it on, as seen from its first token: of values, or of the output's gradients times
    the weights at ``place``; beside them sums of ones, or of what the denominators have of the gradients."""
    TILES: tl.constexpr = (DV + BX - 1) // BX
    program = tl.program_id(0)
    low = program % TILES * BX
    kv_head = (program // TILES % kv_heads).to(tl.int64)
    sequence = (program // TILES // kv_heads).to(tl.int64)
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    if IGNORED:
        ignored += batch * keys
    gamma = 0.0
    if DECAY:
        gamma = tl.load(log_decay + kv_head)
    r, column = tl.arange(0, C), low + tl.arange(0, BX)
    ends += (sequence * kv_heads + kv_head) * (blocks + 1) * (DV + 1)
    ages = gamma * (r if REVERSE else C - r).to(tl.float32)
    state, one = tl.zeros([BX], tl.float32), tl.zeros([], tl.float32)
    for n in range(blocks + 1):
        block = blocks - n if REVERSE else n
        tl.store(ends + block * (DV + 1) + column, state, mask=column < DV)
        if low == 0:
            tl.store(ends + block * (DV + 1) + DV, one)
        # Beyond the last block nothing is there, which adds nothing.
        first = (base + (block - 1 if REVERSE else block)) * C
        token = first + r
        state, one = state * tl.exp2(gamma * C), one * tl.exp2(gamma * C)
        for g in range(1 if OF_KEYS else GROUP):
            if OF_KEYS:
                there = is_key(ignored, token, n_keys, IGNORED)
                rows = load_rows(x + batch * x_b + kv_head * x_h + k_start * x_t, first, x_t, there, low, DV, C, BX)
                weights = tl.where(there, tl.exp2(ages), 0.0)
                ones = weights
            else:
                head, row = kv_head * GROUP + g, token - offset
                there = within(row, n_queries)
                rows = load_rows(x + batch * x_b + head * x_h + q_start * x_t, first - offset, x_t, there, low, DV, C, BX)
                place_0 = (batch * kv_heads * GROUP + head) * queries + q_start
                weights = tl.load(w + (place_0 + row) * width + place, mask=there, other=0.0) * tl.exp2(ages)
                ones = tl.zeros([C], tl.float32)
                if delta is not None:
                    ones -= weights * tl.load(delta + place_0 + row, mask=there, other=0.0)
            state += tl.sum(rows.to(tl.float32) * weights[:, None], 0)
            one += tl.sum(ones, 0)


@triton.jit(do_not_specialize=_SIZES)
def band(
    x, w, to, before, after, initial, content, of_content, denominators, levels, ignored, bounds, log_decay,
    queries, keys, offset, base, blocks, kv_heads, start, width, radius, near, ahead, x_b, x_h, x_t, to_b, to_h, to_t, c_b, c_h, c_t,
    OF_KEYS: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr, EXPONENTIAL: tl.constexpr, DECAY: tl.constexpr, IGNORED: tl.constexpr,
    PACKED: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``sum_j w_ij v_j`` with the weights ``w`` of each distance and, where a head's content is given, with its sums, divided once; or, with
    ``OF_KEYS``, the transposed sums over the rows that see a key, the values' gradient."""
    TILES: tl.constexpr = (DV + BX - 1) // BX
    EACH: tl.constexpr = 2 if EXPONENTIAL else 1
    ROW_GROUP: tl.constexpr = 1 if OF_KEYS else GROUP
    program = tl.program_id(0)
    low = program % TILES * BX
    block = program // TILES % blocks
    row_head = (program // TILES // blocks % (kv_heads * ROW_GROUP)).to(tl.int64)
    sequence = (program // TILES // blocks // (kv_heads * ROW_GROUP)).to(tl.int64)
    kv_head = row_head // ROW_GROUP
    whose = sequence * kv_heads + kv_head
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    if IGNORED:
        ignored += batch * keys
    gamma = 0.0
    if DECAY:
        gamma = tl.load(log_decay + kv_head)
    r = tl.arange(0, C)
    first = (base + block) * C
    token = first + r
    there = is_key(ignored, token, n_keys, IGNORED) if OF_KEYS else within(token - offset, n_queries)
    y, total, lost = tl.zeros([C, BX], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.int32)
    for n in range(near + ahead + 1):
        other_first = first + ((n - ahead) if OF_KEYS else (n - near)) * C
        other = other_first + r
        # From a row to a key.
        distance = token[:, None] - other[None, :] if OF_KEYS else other[None, :] - token[:, None]
        place = tl.minimum(tl.maximum(distance + radius, 0), width - 1)
        for g in range(GROUP if OF_KEYS else 1):
            head = row_head * GROUP + g if OF_KEYS else row_head
            is_other = within(other - offset, n_queries) if OF_KEYS else is_key(ignored, other, n_keys, IGNORED)
            seen = there[:, None] & is_other[None, :]
            if CAUSAL:
                seen = seen & (distance <= 0)
            row = r[None, :] if OF_KEYS else r[:, None]
            of_first = (batch * kv_heads * GROUP + head) * queries + q_start + (other_first if OF_KEYS else first) - offset
            weights = tl.load(w + of_first * width + (row * width + place), mask=seen, other=0.0)
            if DECAY:
                weights *= tl.exp2(gamma * tl.maximum(-distance, 0).to(tl.float32))
            if OF_KEYS:
                rows = load_rows(x + batch * x_b + head * x_h + q_start * x_t, other_first - offset, x_t, is_other, low, DV, C, BX)
            else:
                rows = load_rows(x + batch * x_b + kv_head * x_h + k_start * x_t, other_first, x_t, is_other, low, DV, C, BX)
                total += tl.sum(weights, 1)
            # 0 times what a row does not see, where that is not finite, is NaN.
            finite = tl.sum(rows.to(tl.float32) * 0.0, 1) == 0.0
            rows = tl.where(finite[:, None], rows, 0.0)
            y = tl.dot(weights.to(TYPE), rows.to(TYPE), acc=y, input_precision=PRECISION)
            lost = tl.maximum(lost, tl.max((seen & (finite[None, :] == 0)).to(tl.int32), 1))
    y = tl.where((lost > 0)[:, None], float("nan"), y)

    if OF_KEYS:
        end, _ = _end(after, whose, block + 1 + near, blocks, low, DV, BX)
        y += tl.exp2(gamma * ((near + 1) * C - r).to(tl.float32))[:, None] * end[None, :]
        if not CAUSAL:
            end, _ = _end(before, whose, block - ahead, blocks, low, DV, BX)
            y += end[None, :]
        store_rows(tl.where(there[:, None], y, 0.0), to + batch * to_b + row_head * to_h + k_start * to_t, first, to_t, within(token, n_keys),
                   low, DV, C, BX)  # fmt: skip
    else:
        place_0 = (batch * kv_heads * GROUP + row_head) * queries + q_start + token - offset
        weight = tl.load(w + place_0 * width, mask=there, other=0.0)
        end, one = _end(before, whose, block - near, blocks, low, DV, BX)
        left = weight * tl.exp2(gamma * (near * C + r).to(tl.float32))
        y, total = y + left[:, None] * end[None, :], total + left * one
        if initial is not None:
            # What was far before the call, as seen from its first token.
            end, one = _end(initial, whose, 0, 0, low, DV, BX)
            left = weight * tl.exp2(gamma * tl.maximum(token - start, 0).to(tl.float32))
            y, total = y + left[:, None] * end[None, :], total + left * one
        if not CAUSAL:
            end, one = _end(after, whose, block + 1 + ahead, blocks, low, DV, BX)
            right = tl.load(w + place_0 * width + width - 1, mask=there, other=0.0)
            y, total = y + right[:, None] * end[None, :], total + right * one
        level = tl.zeros([C], tl.float32)
        if EXPONENTIAL and NORMALIZE:
            level += tl.load(levels + row_head)
        if content is not None:
            own = load_rows(content + batch * c_b + row_head * c_h + q_start * c_t, first - offset, c_t, there, low, DV, C, BX)
            if NORMALIZE:
                below = tl.load(of_content + place_0 * EACH, mask=there, other=0.0)
                if EXPONENTIAL:
                    exponent = tl.load(of_content + place_0 * EACH + 1, mask=there, other=NOTHING)
                    highest = tl.maximum(exponent, level)
                    kept = exp(level - highest)
                    y, total, below, level = y * kept[:, None], total * kept, below * exp(exponent - highest), highest
                own, total = own * below[:, None], total + below
            y += own
        if NORMALIZE:
            y = y * inverse(total)[:, None]
            if low == 0:
                tl.store(denominators + place_0 * EACH, total, mask=there)
                if EXPONENTIAL:
                    tl.store(denominators + place_0 * EACH + 1, level, mask=there)
        store_rows(y, to + batch * to_b + row_head * to_h + q_start * to_t, first - offset, to_t, there, low, DV, C, BX)


@triton.jit(do_not_specialize=_SIZES)
def weigh_back(
    x, d_out, delta, dw, before, after, initial, ignored, bounds, log_decay,
    queries, keys, offset, base, blocks, kv_heads, start, width, radius, near, ahead, x_b, x_h, x_t, g_b, g_h, g_t,
    CAUSAL: tl.constexpr, DECAY: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights' gradient before the division, ``sum_j (d_out_i v_j - delta_i)`` over the keys at a distance: one, or all beyond an end."""
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks % (kv_heads * GROUP)).to(tl.int64)
    sequence = (program // blocks // (kv_heads * GROUP)).to(tl.int64)
    kv_head = head // GROUP
    whose = sequence * kv_heads + kv_head
    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    if IGNORED:
        ignored += batch * keys
    gamma = 0.0
    if DECAY:
        gamma = tl.load(log_decay + kv_head)
    r = tl.arange(0, C)
    first = (base + block) * C
    token = first + r
    there = within(token - offset, n_queries)
    of_first = (batch * kv_heads * GROUP + head) * queries + q_start + first - offset
    g_at = d_out + batch * g_b + head * g_h + q_start * g_t
    x_at = x + batch * x_b + kv_head * x_h + k_start * x_t
    dw += of_first * width
    of_row = tl.zeros([C], tl.float32)
    if delta is not None:
        of_row = tl.load(delta + of_first + r, mask=there, other=0.0)
    left, right = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for n in range(near + ahead + 1):
        other_first = first + (n - near) * C
        other = other_first + r
        is_other = is_key(ignored, other, n_keys, IGNORED)
        distance = other[None, :] - token[:, None]
        pairs = tl.zeros([C, C], tl.float32) - of_row[:, None]
        for low in range(0, DV, BX):
            a = load_rows(g_at, first - offset, g_t, there, low, DV, C, BX)
            rows = load_rows(x_at, other_first, x_t, is_other, low, DV, C, BX)
            pairs = tl.dot(a.to(TYPE), tl.trans(rows.to(TYPE)), acc=pairs, input_precision=PRECISION)
        if DECAY:
            pairs *= tl.exp2(gamma * tl.maximum(-distance, 0).to(tl.float32))
        place = distance + radius
        seen = there[:, None] & is_other[None, :]
        if CAUSAL:
            seen = seen & (distance <= 0)
        else:
            right += tl.sum(tl.where(seen & (place > 0) & (place >= width - 1), pairs, 0.0), 1)
            seen = seen & ((place <= 0) | (place < width - 1))
        left += tl.sum(tl.where(seen & (place <= 0), pairs, 0.0), 1)
        tl.store(dw + (r[:, None] * width + place), pairs, mask=seen & (place > 0))
    of_left, of_initial = tl.exp2(gamma * (near * C + r).to(tl.float32)), tl.exp2(gamma * tl.maximum(token - start, 0).to(tl.float32))
    for low in range(0, DV, BX):
        a = load_rows(g_at, first - offset, g_t, there, low, DV, C, BX).to(tl.float32)
        # What the denominators have, once.
        ones = tl.where(low == 0, of_row, 0.0)
        end, one = _end(before, whose, block - near, blocks, low, DV, BX)
        left += of_left * (tl.sum(a * end[None, :], 1) - ones * one)
        if initial is not None:
            end, one = _end(initial, whose, 0, 0, low, DV, BX)
            left += of_initial * (tl.sum(a * end[None, :], 1) - ones * one)
        if not CAUSAL:
            end, one = _end(after, whose, block + 1 + ahead, blocks, low, DV, BX)
            right += tl.sum(a * end[None, :], 1) - ones * one
    if width == 1:
        left += right
    elif not CAUSAL:
        tl.store(dw + r * width + width - 1, right, mask=there)
    tl.store(dw + r * width, left, mask=there)
