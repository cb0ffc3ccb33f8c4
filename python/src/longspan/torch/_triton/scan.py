"""One kernel for kernelized attention and its gradients: each is a scan over chunks of tokens (see README.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from .features import mapped, slope
from .tiles import NOTHING, inverse, load_rows, store_rows

#: As `TOKENS_CARRY` in the kernels' `state.rs`: float32 counts no further than 2**24.
_CARRY = tl.constexpr(1 << 20)


@triton.jit
def _clip(x, high):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, 0), high)


@triton.jit
def _place(low, TRANSPOSED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BA: tl.constexpr, BX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a tile of a state ``[D, DV]``, or of its transpose, lies, and which of its numbers there are."""
    a, x = tl.arange(0, BA)[:, None], (low + tl.arange(0, BX))[None, :]
    if TRANSPOSED:
        at, there = x * DV + a, (a < DV) & (x < D)
    else:
        at, there = a * DV + x, (a < D) & (x < DV)
    return at, there


@triton.jit
def scan(  # type: ignore[no-untyped-def]
    a, b, x, source, to, denominators, exponents, delta,
    records, initial, initial_exponent, end, end_exponent,
    log_decay, ignored, lengths, bounds,
    queries, keys, offset, first_chunk, kv_heads, segments, record,
    a_b, a_h, a_t, b_b, b_h, b_t, x_b, x_h, x_t, s_b, s_h, s_t, to_b, to_h, to_t,
    ROLE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    DECAY: tl.constexpr, INITIAL: tl.constexpr, END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
    C: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``y_r = sum_s w_rs (a_r b_s) x_s``, for a tile of the columns of ``x``. What they are says ``ROLE``:

    ======= ======== ========== ========== ========== =========
    role    rows     a          b          x          direction
    ======= ======== ========== ========== ========== =========
    out     queries  phi(q)     phi(k)     v          forward
    dq      queries  d_out      v          phi(k)     forward
    dk      keys     v          d_out      phi(q) / D backward
    dv      keys     phi(k)     phi(q) / D d_out      backward
    ======= ======== ========== ========== ========== =========

    With ``SUMS`` it writes the state of each segment instead, ``sum_s b_s x_s``; who reads them does so of all segments before.
    """
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    EXPONENTIAL: tl.constexpr = MAP == "exp"
    EACH: tl.constexpr = 2 if EXPONENTIAL else 1
    # Whether columns of x are those of keys, and a state is read transposed.
    OF_KEYS: tl.constexpr = ROLE == "dq" or ROLE == "dk"
    WIDTH: tl.constexpr = D if OF_KEYS else DV
    TILES: tl.constexpr = (WIDTH + BX - 1) // BX
    A: tl.constexpr = DV if OF_KEYS else D
    BA: tl.constexpr = BV if OF_KEYS else BD
    BZ: tl.constexpr = BX if OF_KEYS else BD
    # Denominators are one more column of the state: 16, because a product has no fewer.
    TOTALS: tl.constexpr = ROLE == "out" and not SUMS
    ROW_GROUP: tl.constexpr = 1 if (REVERSE or SUMS) else GROUP
    COLUMN_GROUP: tl.constexpr = GROUP if REVERSE else 1

    place = tl.program_id(0)
    tile = place % TILES
    place = place // TILES
    segment = place % segments
    place = place // segments
    row_head = (place % (kv_heads * ROW_GROUP)).to(tl.int64)
    sequence = (place // (kv_heads * ROW_GROUP)).to(tl.int64)
    kv_head = row_head // ROW_GROUP
    low = tile * BX
    z_low = low if OF_KEYS else 0

    batch, q_start, k_start = sequence, sequence * 0, sequence * 0
    n_queries, n_keys = queries, keys
    if PACKED:
        batch = sequence * 0
        q_start, k_start = tl.load(bounds + 2 * sequence), tl.load(bounds + 2 * sequence + 1)
        n_queries = (tl.load(bounds + 2 * sequence + 2) - q_start).to(tl.int32)
        n_keys = (tl.load(bounds + 2 * sequence + 3) - k_start).to(tl.int32)
    # Keys after the last that is not ignored are no part of the sequence.
    there = n_keys
    if IGNORED:
        there = tl.load(lengths + sequence).to(tl.int32)
    row_start, column_start = (k_start, q_start) if REVERSE else (q_start, k_start)
    gamma = 0.0
    if DECAY:
        gamma = tl.load(log_decay + kv_head)

    r = tl.arange(0, C)
    chunks = tl.cdiv(tl.maximum(tl.maximum(n_keys, n_queries + offset), 0), C) - first_chunk
    of_segment = tl.cdiv(chunks, segments)
    begin = first_chunk + segment * of_segment
    stop = tl.minimum(begin + of_segment, first_chunk + chunks)

    # The state of what comes before: its exponents are relative to `reference`, its decay to the token where the chunk begins, or, in
    # the other direction, ends.
    at, inside = _place(low, OF_KEYS, D, DV, BA, BX)
    z_at = z_low + tl.arange(0, BZ)
    state = tl.zeros([BA, BX], tl.float32)
    z = tl.zeros([BZ], tl.float32)
    reference = tl.full([], NOTHING, tl.float32)
    whose = sequence * kv_heads + kv_head
    if INITIAL:
        before = initial + whose * record
        state = tl.load(before + at, mask=inside, other=0.0)
        z = tl.load(before + D * DV + z_at, mask=z_at < D, other=0.0)
        if EXPONENTIAL:
            reference = tl.maximum(tl.load(initial_exponent + whose), NOTHING)
    if not SUMS and records is not None:
        earlier = segments
        if CAUSAL:
            earlier = (segments - 1 - segment) if REVERSE else segment
        for n in range(earlier):
            other = (segments - 1 - n) if REVERSE else n
            before = records + ((sequence * segments + other) * kv_heads + kv_head) * record
            own = tl.load(before + at, mask=inside, other=0.0)
            own_z = tl.load(before + D * DV + z_at, mask=z_at < D, other=0.0)
            if DECAY:
                start = first_chunk + other * of_segment
                ends = tl.minimum(start + of_segment, first_chunk + chunks)
                kept = tl.exp2(gamma * (_clip(ends * C, there) - _clip(start * C, there)).to(tl.float32))
                state, z = state * kept, z * kept
            if EXPONENTIAL:
                exponent = tl.load(before + D * DV + D)
                highest = tl.maximum(reference, exponent)
                kept, joins = tl.exp(reference - highest), tl.exp(exponent - highest)
                state, z, own, own_z, reference = state * kept, z * kept, own * joins, own_z * joins, highest
            state, z = state + own, z + own_z
    totals = tl.zeros([BD, 16], tl.float32)
    if TOTALS:
        totals += z[:, None]

    for n in range(begin, stop):
        chunk = (begin + stop - 1 - n) if REVERSE else n
        first = chunk * C
        token = first + r
        is_key = (token >= 0) & (token < there)
        if IGNORED:
            is_key = is_key & (tl.load(ignored + batch * keys + token, mask=is_key, other=1) == 0)
        is_query = (token >= offset) & (token < n_queries + offset)
        near, far = _clip(first, there), _clip(first + C, there)
        kept = tl.full([], 1.0, tl.float32)
        if DECAY:
            kept = tl.exp2(gamma * (far - near).to(tl.float32))
        if REVERSE:
            # Queries before the first key see nothing.
            is_row, is_column, first_row, first_column = is_key, is_query & (token >= 0), first, first - offset
        else:
            is_row, is_column, first_row, first_column = is_query, is_key, first - offset, first

        # The rows, and what all of them see. `clock` is minus the exponent that a row's weights are relative to.
        of_query = (batch * kv_heads * GROUP + row_head) * queries + q_start + first - offset + r
        clock = tl.zeros([C], tl.float32)
        minus = tl.zeros([C], tl.float32)
        y = tl.zeros([C, BX], tl.float32)
        total = tl.zeros([C], tl.float32)
        if not SUMS:
            a_r = load_rows(a + batch * a_b + row_head * a_h + row_start * a_t, first_row, a_t, is_row, 0, A, C, BA).to(TYPE)
            y = tl.dot(a_r, state.to(TYPE), input_precision=PRECISION)
            if TOTALS and NORMALIZE:
                total = tl.max(tl.dot(a_r, totals.to(TYPE), input_precision=PRECISION), 1)
            if ROLE == "dq" and NORMALIZE:
                minus = -tl.load(delta + of_query, mask=is_row, other=0.0)
                y += minus[:, None] * z[None, :]
            if ROLE == "dk" and NORMALIZE:
                y += z[None, :]
            if EXPONENTIAL:
                if REVERSE:
                    clock = tl.load(exponents + (batch * kv_heads + kv_head) * keys + k_start + token, mask=is_row, other=NOTHING)
                elif ROLE == "dq":
                    clock = -tl.load(denominators + of_query * EACH + 1, mask=is_row, other=0.0)

        # The columns, by the heads that read a key.
        for g in range(COLUMN_GROUP):
            column_head = (kv_head * GROUP + g) if REVERSE else kv_head
            b_s = load_rows(b + batch * b_b + column_head * b_h + column_start * b_t, first_column, b_t, is_column, 0, A, C, BA)
            x_s = load_rows(x + batch * x_b + column_head * x_h + column_start * x_t, first_column, x_t, is_column, low, WIDTH, C, BX)
            b_s, x_s = b_s.to(TYPE), x_s.to(TYPE)
            plus = tl.full([C], 1.0, tl.float32)
            u = tl.full([C], NOTHING, tl.float32)
            if REVERSE:
                by_query = (batch * kv_heads * GROUP + column_head) * queries + q_start + first - offset + r
                if NORMALIZE:
                    plus = -tl.load(delta + by_query, mask=is_column, other=0.0)
                if EXPONENTIAL:
                    u = tl.load(denominators + by_query * EACH + 1, mask=is_column, other=NOTHING)
                    u = tl.where(u > NOTHING * 0.5, -u, tl.where(u == u, NOTHING, u))
            elif EXPONENTIAL:
                u = tl.load(exponents + (batch * kv_heads + kv_head) * keys + k_start + token, mask=is_column, other=NOTHING)

            seen = (r[:, None] <= r[None, :]) if REVERSE else (r[:, None] >= r[None, :])
            if not SUMS:
                if EXPONENTIAL and ROLE == "out":
                    highest = tl.zeros([C], tl.float32) + reference
                    if CAUSAL:
                        highest = tl.maximum(highest, tl.max(tl.where(seen, u[None, :], NOTHING), 1))
                    clock = -highest
                if (DECAY or EXPONENTIAL) and (COLUMN_GROUP == 1 or g == 0):
                    since = tl.zeros([C], tl.float32)
                    if DECAY:
                        since = gamma * tl.maximum((far - token) if REVERSE else (token - near), 0).to(tl.float32)
                    since = tl.exp2(since)
                    if EXPONENTIAL:
                        since *= tl.exp(reference + clock)
                    y, total = y * since[:, None], total * since
                if CAUSAL:
                    # What some rows see.
                    pairs = tl.dot(a_r, tl.trans(b_s), input_precision=PRECISION)
                    if ROLE == "dq" and NORMALIZE:
                        pairs += minus[:, None]
                    if ROLE == "dk" and NORMALIZE:
                        pairs += plus[None, :]
                    if DECAY:
                        pairs *= tl.exp2(gamma * tl.abs(r[:, None] - r[None, :]).to(tl.float32))
                    if EXPONENTIAL:
                        pairs *= tl.exp(u[None, :] + clock[:, None])
                    pairs = tl.where(seen, pairs, 0.0)
                    if TOTALS and NORMALIZE:
                        total += tl.sum(pairs, 1)
                    so_far = y
                    y = tl.dot(pairs.to(TYPE), x_s, acc=so_far, input_precision=PRECISION)
                    if tl.max(tl.max((y != y).to(tl.int32), 1), 0) > 0:
                        # 0 times what a row does not see, where that is not finite, is NaN.
                        finite = tl.sum(x_s.to(tl.float32) * 0.0, 1) == 0.0
                        of_finite = tl.where(finite[:, None], x_s, 0.0).to(TYPE)
                        y = tl.dot(pairs.to(TYPE), of_finite, acc=so_far, input_precision=PRECISION)
                        sees = tl.max((seen & (finite[None, :] == 0)).to(tl.int32), 1) > 0
                        y = tl.where(sees[:, None], float("nan"), y)

            if CAUSAL or SUMS:
                # The state after these columns.
                factor = tl.full([C], 1.0, tl.float32)
                if DECAY:
                    factor = tl.exp2(gamma * tl.maximum((token - near) if REVERSE else (far - token), 0).to(tl.float32))
                if EXPONENTIAL:
                    highest = tl.maximum(reference, tl.max(u, 0))
                    factor *= tl.exp(u - highest)
                    kept = kept * tl.exp(reference - highest)
                    reference = highest
                if DECAY or EXPONENTIAL:
                    state, z = state * kept, z * kept
                    x_s = (x_s.to(tl.float32) * factor[:, None]).to(TYPE)
                state = tl.dot(tl.trans(b_s), x_s, acc=state, input_precision=PRECISION)
                if TOTALS:
                    if DECAY or EXPONENTIAL:
                        totals = totals * kept
                    weighs = tl.zeros([C, 16], tl.float32) + factor[:, None]
                    totals = tl.dot(tl.trans(b_s), weighs.to(TYPE), acc=totals, input_precision=PRECISION)
                elif OF_KEYS:
                    z += tl.sum(x_s.to(tl.float32) * plus[:, None], 0)
                elif SUMS or END:
                    z += tl.sum(b_s.to(tl.float32) * (plus * factor)[:, None], 0)
                kept = tl.full([], 1.0, tl.float32)

        if not SUMS:
            at_row = to + batch * to_b + row_head * to_h + row_start * to_t
            if ROLE == "out":
                bottom = total
                if NORMALIZE:
                    y = y * inverse(total)[:, None]
                elif EXPONENTIAL:
                    y, bottom = y * tl.exp(-clock)[:, None], tl.exp(clock)
                else:
                    bottom = total + 1.0
                if tile == 0:
                    tl.store(denominators + of_query * EACH, bottom, mask=is_row)
                    if EXPONENTIAL:
                        tl.store(denominators + of_query * EACH + 1, -clock, mask=is_row)
            if OF_KEYS:
                own = load_rows(source + batch * s_b + row_head * s_h + row_start * s_t, first_row, s_t, is_row, low, D, C, BX)
                own = own.to(tl.float32)
                phi, exponent = mapped(own, MAP, NORMALIZE or ROLE == "dk", D, BX)
                y = y * slope(own, phi, MAP)
            if ROLE == "dq":
                y = y * inverse(tl.load(denominators + of_query * EACH, mask=is_row, other=1.0))[:, None]
            if REVERSE:
                # Rows of ignored keys are 0, and so are those after the last that is not.
                y, is_row = tl.where(is_key[:, None], y, 0.0), (token >= 0) & (token < n_keys)
            store_rows(y, at_row, first_row, to_t, is_row, low, WIDTH, C, BX)

    if TOTALS:
        z = tl.max(totals, 1)
    if SUMS or END:
        # The state of the segment, or of the whole sequence; of a gradient, that at its beginning.
        writes = row_head % ROW_GROUP == 0
        if not SUMS:
            writes = writes & (segment == (0 if REVERSE else segments - 1))
        if writes:
            after = records + ((sequence * segments + segment) * kv_heads + kv_head) * record if SUMS else end + whose * record
            if END and REVERSE and EXPONENTIAL:
                kept = tl.exp(reference + tl.load(end_exponent + whose))
                state, z = state * kept, z * kept
            tl.store(after + at, state, mask=inside)
            if tile == 0:
                tl.store(after + D * DV + z_at, z, mask=z_at < D)
                mark = tl.arange(0, 32)
                marks = tl.zeros([32], tl.float32)
                if EXPONENTIAL and SUMS:
                    marks = tl.where(mark == 0, reference, 0.0)
                if END and not REVERSE:
                    if EXPONENTIAL:
                        marks = tl.where(mark == 0, tl.where(reference > NOTHING, reference, float("-inf")), 0.0)
                    tokens = there + tl.zeros([], tl.int64)
                    if INITIAL:
                        counted = initial + whose * record + D * DV + D
                        tokens += tl.load(counted + 2).to(tl.int64) + _CARRY * tl.load(counted + 3).to(tl.int64)
                    marks = tl.where(mark == 2, (tokens % _CARRY).to(tl.float32), marks)
                    marks = tl.where(mark == 3, (tokens // _CARRY).to(tl.float32), marks)
                tl.store(after + D * DV + D + mark, marks, mask=mark < record - D * DV - D)
