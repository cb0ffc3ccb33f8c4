"""One kernel for kernelized attention and its gradients: each is a scan over chunks of tokens (see README.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from .features import of_keys, of_queries, slope
from .tiles import NOTHING, exp, inverse, load_rows, store_rows, within

#: As `TOKENS_CARRY` in the kernels' `state.rs`: float32 counts no further than 2**24.
_CARRY = tl.constexpr(1 << 20)


@triton.jit
def _clip(x, high):
    return tl.minimum(tl.maximum(x, 0), high)


@triton.jit
def _place(low, OF_KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BA: tl.constexpr, BX: tl.constexpr):
    """Where a tile of a state ``[D, DV]`` lies, and which of its numbers there are. Its rows here are the values' columns, whichever is cut
    in tiles: so the first factor of the product that makes it is one that was read as it is, which goes to it from shared memory."""
    if OF_KEYS:
        of_value, feature = tl.arange(0, BA)[:, None], (low + tl.arange(0, BX))[None, :]
    else:
        of_value, feature = (low + tl.arange(0, BX))[:, None], tl.arange(0, BA)[None, :]
    return feature * DV + of_value, (feature < D) & (of_value < DV)


@triton.jit
def store_marks(after, before, tokens, reference, count, EXPONENTIAL: tl.constexpr, INITIAL: tl.constexpr):
    """What follows a state's sums: under ``exp`` the exponent that they are relative to, and how many tokens it has seen."""
    mark = tl.arange(0, 32)
    marks = tl.zeros([32], tl.float32)
    if EXPONENTIAL:
        marks = tl.where(mark == 0, tl.where(reference > NOTHING, reference, float("-inf")), 0.0)
    seen = tokens + tl.zeros([], tl.int64)
    if INITIAL:
        seen += tl.load(before + 2).to(tl.int64) + _CARRY * tl.load(before + 3).to(tl.int64)
    marks = tl.where(mark == 2, (seen % _CARRY).to(tl.float32), marks)
    marks = tl.where(mark == 3, (seen // _CARRY).to(tl.float32), marks)
    tl.store(after + mark, marks, mask=mark < count)


@triton.jit
def _gates(log_decay, token, is_key, C: tl.constexpr):
    """Of a chunk, logarithms of what decays up to each row and after it, of all of it, and its gates. Sums of their own, not differences
    of running sums, which lose digits where those are large. A gate of 0 is finite: 0 times minus infinity would be NaN."""
    g = tl.load(log_decay + token, mask=is_key, other=0.0)
    g = tl.where(g < NOTHING, NOTHING, g)
    r = tl.arange(0, C)
    later = r[None, :] > r[:, None]
    return tl.sum(tl.where(later, 0.0, g[None, :]), 1), tl.sum(tl.where(later, g[None, :], 0.0), 1), tl.sum(g, 0), g


@triton.jit
def _between(g, C: tl.constexpr, REVERSE: tl.constexpr):
    """Logarithms of what decays between a key and a row, ``[rows, columns]``: keys are the columns or, in ``REVERSE``, the rows."""
    r = tl.arange(0, C)
    if REVERSE:
        decays = tl.cumsum(tl.where(r[None, :] > r[:, None], g[None, :], 0.0), 1)
    else:
        decays = tl.cumsum(tl.where(r[:, None] > r[None, :], g[:, None], 0.0), 0)
    return decays


@triton.jit
def _of_state(
    a, state, z, delta, clock, age, gamma,
    ROLE: tl.constexpr, NORMALIZE: tl.constexpr, DECAY: tl.constexpr, EXPONENTIAL: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the state before a chunk gives to its rows and, with role ``out``, to their denominators."""
    y = tl.dot(a, state.to(TYPE) if (ROLE == "dq" or ROLE == "dk") else tl.trans(state.to(TYPE)), input_precision=PRECISION)
    total = tl.zeros([a.shape[0]], tl.float32)
    if NORMALIZE:
        if ROLE == "out":
            # As a product like that of the chunk's pairs, z in two parts that have all of its digits: so queries are laid out once.
            part = tl.arange(0, a.shape[0])[:, None]
            high = z.to(TYPE).to(tl.float32)
            parts = tl.where(part == 0, high[None, :], tl.where(part == 1, (z - high)[None, :], 0.0)).to(TYPE)
            total = tl.sum(tl.dot(a, tl.trans(parts), input_precision=PRECISION), 1)
        elif ROLE == "dq":
            # Likewise: the sum of the products of both parts but for the two small ones.
            of_delta, of_z = tl.arange(0, 16)[None, :], tl.arange(0, 16)[:, None]
            high, high_z = delta.to(TYPE).to(tl.float32), z.to(TYPE).to(tl.float32)
            deltas = tl.where(of_delta < 2, -high[:, None], tl.where(of_delta == 2, (high - delta)[:, None], 0.0)).to(TYPE)
            parts = tl.where((of_z == 0) | (of_z == 2), high_z[None, :], tl.where(of_z == 1, (z - high_z)[None, :], 0.0)).to(TYPE)
            y = tl.dot(deltas, parts, acc=y, input_precision=PRECISION)
    if ROLE == "dk":
        # Also of a result that is not divided: the gradient of the final state's sum of keys.
        y += z[None, :]
    if DECAY:
        factor = tl.exp2(gamma * age)
        y, total = y * factor[:, None], total * factor
    if EXPONENTIAL:
        factor = exp(clock)
        y, total = y * factor[:, None], total * factor
    return y, total


@triton.jit
def _scan(
    q, k, v, out, d_out, denominators, delta, to,
    records, initial, initial_exponent, end, end_exponent,
    log_decay, ignored, lengths, bounds,
    queries, keys, offset, first_chunk, kv_heads, segments, record, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t,
    ROLE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    DECAY: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
    CAREFUL: tl.constexpr, C: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See `scan`. Returns whether a sum was not finite, without which ``CAREFUL`` changes nothing."""
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    EXPONENTIAL: tl.constexpr = MAP == "exp"
    EACH: tl.constexpr = 2 if EXPONENTIAL else 1
    # Whether columns of x are those of keys.
    OF_KEYS: tl.constexpr = ROLE == "dq" or ROLE == "dk"
    WIDTH: tl.constexpr = D if OF_KEYS else DV
    TILES: tl.constexpr = (WIDTH + BX - 1) // BX
    BA: tl.constexpr = BV if OF_KEYS else BD
    BZ: tl.constexpr = BX if OF_KEYS else BD
    # Whether the sum of keys is asked for, or, of a gradient, that of rows' deltas.
    KEEP_Z: tl.constexpr = SUMS or END or (NORMALIZE and ROLE != "dv")
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
    k += batch * k_b + kv_head * k_h + k_start * k_t
    v += batch * v_b + kv_head * v_h + v_t * k_start
    gamma = 0.0
    if GATED:
        log_decay += (batch * kv_heads + kv_head) * keys + k_start
        gamma = 1.0
    elif DECAY:
        gamma = tl.load(log_decay + kv_head)
    # The logarithm of what decays from the first token on.
    passed = tl.zeros([], tl.float32)

    r = tl.arange(0, C)
    chunks = tl.cdiv(tl.maximum(tl.maximum(n_keys, n_queries + offset), 0), C) - first_chunk
    of_segment = tl.cdiv(chunks, segments)
    begin = first_chunk + segment * of_segment
    stop = tl.minimum(begin + of_segment, first_chunk + chunks)

    # The state of what comes before: its exponents are relative to `reference`, its decay to the token where the chunk begins, or, in
    # the other direction, ends.
    at, inside = _place(low, OF_KEYS, D, DV, BA, BX)
    z_at = z_low + tl.arange(0, BZ)
    state = tl.zeros([BA, BX] if OF_KEYS else [BX, BA], tl.float32)
    z = tl.zeros([BZ], tl.float32)
    reference = tl.full([], NOTHING, tl.float32)
    whose = sequence * kv_heads + kv_head
    if INITIAL:
        before = initial + whose * record
        state = tl.load(before + at, mask=inside, other=0.0)
        if not GATED:
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
            own_z = tl.zeros([BZ], tl.float32)
            if not GATED:
                own_z = tl.load(before + D * DV + z_at, mask=z_at < D, other=0.0)
            if GATED:
                decays = tl.load(before + D * DV)
                state *= tl.exp2(decays)
                passed += decays
            elif DECAY:
                start = first_chunk + other * of_segment
                ends = tl.minimum(start + of_segment, first_chunk + chunks)
                kept = tl.exp2(gamma * (_clip(ends * C, there) - _clip(start * C, there)).to(tl.float32))
                state, z = state * kept, z * kept
            if EXPONENTIAL:
                exponent = tl.load(before + D * DV + D)
                highest = tl.maximum(reference, exponent)
                kept, joins = exp(reference - highest), exp(exponent - highest)
                state, z, own, own_z, reference = state * kept, z * kept, own * joins, own_z * joins, highest
            state, z = state + own, z + own_z

    for n in range(begin, stop):
        chunk = (begin + stop - 1 - n) if REVERSE else n
        first = chunk * C
        token = first + r
        is_key = within(token, there)
        if IGNORED:
            is_key = is_key & (tl.load(ignored + batch * keys + token, mask=is_key, other=1) == 0)
        is_query = within(token - offset, n_queries)
        near, far = _clip(first, there), _clip(first + C, there)
        since = tl.full([], 1.0, tl.float32)
        up_to, after_it = tl.maximum(token - near, 0).to(tl.float32), tl.maximum(far - token, 0).to(tl.float32)
        gates = tl.zeros([C], tl.float32)
        if GATED:
            up_to, after_it, in_all, gates = _gates(log_decay, token, is_key, C)
            since = tl.exp2(in_all)
            passed += in_all
        elif DECAY:
            since = tl.exp2(gamma * (far - near).to(tl.float32))

        row_q = (batch * kv_heads * GROUP + row_head) * queries + q_start + first - offset
        clock = tl.zeros([C], tl.float32)
        of_row = tl.zeros([C], tl.float32)
        kept = since
        y = tl.zeros([C, BX], tl.float32)
        total = tl.zeros([C], tl.float32)
        if REVERSE and not SUMS:
            # The rows, and what all of them see.
            if ROLE == "dk":
                a = load_rows(v, first, v_t, is_key, 0, DV, C, BV).to(TYPE)
                if EXPONENTIAL:
                    _, clock = of_keys(load_rows(k, first, k_t, is_key, low, D, C, BX).to(tl.float32), MAP, D, BX)
            else:
                a, clock = of_keys(load_rows(k, first, k_t, is_key, 0, D, C, BD).to(tl.float32), MAP, D, BD)
                a = a.to(TYPE)
            y, total = _of_state(a, state, z, of_row, reference + clock, after_it, gamma,
                                 ROLE, NORMALIZE, DECAY, EXPONENTIAL, TYPE, PRECISION)  # fmt: skip

        # The columns, by the heads that read a key. What they add to z comes first, so that few registers are in use at once.
        for g in range(COLUMN_GROUP):
            factor = tl.full([C], 1.0, tl.float32)
            if DECAY:
                factor = tl.exp2(gamma * (up_to if REVERSE else after_it))
            # Rows that are not there have features, but what they would be multiplied with is 0.
            plus = is_key.to(tl.float32)
            if REVERSE:
                q_head = kv_head * GROUP + g
                column_q = (batch * kv_heads * GROUP + q_head) * queries + q_start + first - offset + r
                # Queries before the first key see nothing.
                plus = tl.zeros([C], tl.float32)
                there_s = is_query & (token >= 0)
                weight = inverse(tl.load(denominators + column_q * EACH, mask=there_s, other=1.0))
                g_at = d_out + batch * g_b + q_head * g_h + q_start * g_t
                q_at = q + batch * q_b + q_head * q_h + q_start * q_t
                if EXPONENTIAL:
                    u = tl.load(denominators + column_q * EACH + 1, mask=there_s, other=NOTHING)
                    u = tl.where(u > NOTHING * 0.5, -u, tl.where(u == u, NOTHING, u))
                if NORMALIZE and (KEEP_Z or ROLE == "dk"):
                    plus = -tl.load(delta + column_q, mask=there_s, other=0.0)
                if ROLE == "dk":
                    x = load_rows(q_at, first - offset, q_t, there_s, low, D, C, BX).to(tl.float32)
                    features = of_queries(x, MAP, NORMALIZE, D, BX) * weight[:, None]
                    x = features.to(TYPE)
                    b = load_rows(g_at, first - offset, g_t, there_s, 0, DV, C, BV).to(TYPE)
                else:
                    b = load_rows(q_at, first - offset, q_t, there_s, 0, D, C, BD).to(tl.float32)
                    features = of_queries(b, MAP, NORMALIZE, D, BD) * weight[:, None]
                    b = features.to(TYPE)
                    x = load_rows(g_at, first - offset, g_t, there_s, low, DV, C, BX).to(TYPE)
            else:
                there_s = is_key
                if ROLE == "out":
                    features, u = of_keys(load_rows(k, first, k_t, is_key, 0, D, C, BD).to(tl.float32), MAP, D, BD)
                    b = features.to(TYPE)
                    x = load_rows(v, first, v_t, is_key, low, DV, C, BX).to(TYPE)
                else:
                    features, u = of_keys(load_rows(k, first, k_t, is_key, low, D, C, BX).to(tl.float32), MAP, D, BX)
                    x = features.to(TYPE)
                    b = load_rows(v, first, v_t, is_key, 0, DV, C, BV).to(TYPE)
                if EXPONENTIAL:
                    u = tl.where(is_key, u, NOTHING)
            highest = reference
            if EXPONENTIAL:
                highest = tl.maximum(reference, tl.max(u, 0))
                factor = factor * exp(u - highest)
            added = tl.zeros([BZ], tl.float32)
            if KEEP_Z and (CAUSAL or SUMS):
                added = tl.sum(features * (plus * factor)[:, None], 0)

            seen = (r[:, None] <= r[None, :]) if REVERSE else (r[:, None] >= r[None, :]) & there_s[None, :]
            if not SUMS:
                if EXPONENTIAL and ROLE == "out":
                    own = tl.maximum(tl.max(tl.where(seen, u[None, :], NOTHING), 1), reference) if CAUSAL else reference + clock
                    clock = -own
                if not REVERSE:
                    # The rows, and what all of them see.
                    if ROLE == "out":
                        a = load_rows(q + batch * q_b + row_head * q_h + q_start * q_t, first - offset, q_t, is_query, 0, D, C, BD)
                        a = of_queries(a.to(tl.float32), MAP, NORMALIZE, D, BD).to(TYPE)
                    else:
                        a = load_rows(d_out + batch * g_b + row_head * g_h + q_start * g_t, first - offset, g_t, is_query, 0, DV, C, BV)
                        if EXPONENTIAL:
                            clock = -tl.load(denominators + (row_q + r) * EACH + 1, mask=is_query, other=0.0)
                        if NORMALIZE:
                            y_q = load_rows(out + batch * o_b + row_head * o_h + q_start * o_t, first - offset, o_t, is_query, 0, DV, C, BV)
                            of_row = tl.sum(y_q.to(tl.float32) * a.to(tl.float32), 1)
                            if tile == 0:
                                tl.store(delta + row_q + r, of_row, mask=is_query)
                        a = a.to(TYPE)
                    y, total = _of_state(a, state, z, of_row, reference + clock, up_to, gamma,
                                         ROLE, NORMALIZE, DECAY, EXPONENTIAL, TYPE, PRECISION)  # fmt: skip
                if CAUSAL:
                    # What some see.
                    pairs = tl.dot(a, tl.trans(b), input_precision=PRECISION)
                    if ROLE == "dq" and NORMALIZE:
                        pairs -= of_row[:, None]
                    if ROLE == "dk" and NORMALIZE:
                        pairs += plus[None, :]
                    if GATED:
                        pairs *= tl.exp2(_between(gates, C, REVERSE))
                    elif DECAY:
                        pairs *= tl.exp2(gamma * tl.abs(r[:, None] - r[None, :]).to(tl.float32))
                    if EXPONENTIAL:
                        pairs *= exp(u[None, :] + clock[:, None])
                    pairs = tl.where(seen, pairs, 0.0)
                    if ROLE == "out" and NORMALIZE:
                        total += tl.sum(pairs, 1)
                    if CAREFUL:
                        # 0 times what a row does not see, where that is not finite, is NaN.
                        finite = tl.sum(x.to(tl.float32) * 0.0, 1) == 0.0
                        x_seen = tl.where(finite[:, None], x, 0.0).to(TYPE)
                        y = tl.dot(pairs.to(TYPE), x_seen, acc=y, input_precision=PRECISION)
                        sees = tl.max((seen & (finite[None, :] == 0)).to(tl.int32), 1) > 0
                        y = tl.where(sees[:, None], float("nan"), y)
                    else:
                        y = tl.dot(pairs.to(TYPE), x, acc=y, input_precision=PRECISION)

            if CAUSAL or SUMS:
                # The state after these columns.
                if EXPONENTIAL:
                    kept = kept * exp(reference - highest)
                    reference = highest
                if DECAY or EXPONENTIAL:
                    state, z = state * kept, z * kept
                    if OF_KEYS:
                        x = (x.to(tl.float32) * factor[:, None]).to(TYPE)
                    else:
                        b = (b.to(tl.float32) * factor[:, None]).to(TYPE)
                if OF_KEYS:
                    state = tl.dot(tl.trans(b), x, acc=state, input_precision=PRECISION)
                else:
                    state = tl.dot(tl.trans(x), b, acc=state, input_precision=PRECISION)
                z += added
                kept = tl.full([], 1.0, tl.float32)

        if not SUMS:
            if ROLE == "out":
                at_row = to + batch * to_b + row_head * to_h + q_start * to_t
                bottom = total
                if NORMALIZE:
                    y = y * inverse(total)[:, None]
                elif EXPONENTIAL:
                    y, bottom = y * exp(-clock)[:, None], exp(clock)
                else:
                    # What a backward divides by.
                    y, bottom = y * scale, tl.full([C], 1.0, tl.float32) / scale
                store_rows(y, at_row, first - offset, to_t, is_query, low, DV, C, BX)
                if tile == 0:
                    tl.store(denominators + (row_q + r) * EACH, bottom, mask=is_query)
                    if EXPONENTIAL:
                        tl.store(denominators + (row_q + r) * EACH + 1, -clock, mask=is_query)
            elif ROLE == "dq":
                x_q = load_rows(q + batch * q_b + row_head * q_h + q_start * q_t, first - offset, q_t, is_query, low, D, C, BX)
                x_q = x_q.to(tl.float32)
                weight = inverse(tl.load(denominators + (row_q + r) * EACH, mask=is_query, other=1.0))
                y = y * weight[:, None] * slope(x_q, of_queries(x_q, MAP, NORMALIZE, D, BX), MAP)
                if GATED:
                    # A row grows with all gates up to its own.
                    tl.store(delta + (row_q + r) * TILES + tile, tl.sum(x_q * y, 1), mask=is_query)
                at_row = to + batch * to_b + row_head * to_h + q_start * to_t
                store_rows(y, at_row, first - offset, to_t, is_query, low, D, C, BX)
            else:
                if ROLE == "dk":
                    x_k = load_rows(k, first, k_t, is_key, low, D, C, BX).to(tl.float32)
                    phi_k, _ = of_keys(x_k, MAP, D, BX)
                    y = y * slope(x_k, phi_k, MAP)
                y = tl.where(is_key[:, None], y, 0.0)
                if GATED and ROLE == "dk":
                    row_k = (batch * kv_heads + kv_head) * keys + k_start + token
                    tl.store(delta + row_k * TILES + tile, tl.sum(x_k * y, 1), mask=within(token, n_keys))
                at_row = to + batch * to_b + kv_head * to_h + k_start * to_t
                store_rows(y, at_row, first, to_t, within(token, n_keys), low, WIDTH, C, BX)

    if SUMS or END:
        # The state of the segment, or of the whole sequence; of a gradient, that at its beginning.
        writes = row_head % ROW_GROUP == 0
        if not SUMS:
            writes = writes & (segment == (0 if REVERSE else segments - 1))
        if writes:
            after = records + ((sequence * segments + segment) * kv_heads + kv_head) * record if SUMS else end + whose * record
            if END and REVERSE and EXPONENTIAL:
                kept = exp(reference + tl.load(end_exponent + whose))
                state, z = state * kept, z * kept
            tl.store(after + at, state, mask=inside)
            if GATED:
                # How far all has decayed: of a segment in base 2, of a state in that of e.
                mark = tl.arange(0, 16)
                if END and not REVERSE:
                    passed *= 0.6931471805599453
                    if INITIAL:
                        passed += tl.load(initial + whose * record + D * DV)
                elif not SUMS:
                    passed = tl.zeros([], tl.float32)
                if tile == 0:
                    tl.store(after + D * DV + mark, tl.where(mark == 0, passed, 0.0), mask=mark < record - D * DV)
            elif tile == 0:
                tl.store(after + D * DV + z_at, z, mask=z_at < D)
                if END and not REVERSE:
                    store_marks(after + D * DV + D, initial + whose * record + D * DV + D if INITIAL else initial, there, reference,
                                record - D * DV - D, EXPONENTIAL, INITIAL)  # fmt: skip
                else:
                    mark = tl.arange(0, 32)
                    marks = tl.where(mark == 0, reference if EXPONENTIAL and SUMS else 0.0, 0.0)
                    tl.store(after + D * DV + D + mark, marks, mask=mark < record - D * DV - D)
    return tl.min(tl.min((tl.abs(state) < float("inf")).to(tl.int32), 1), 0) == 0


# A kernel is not compiled again for another length.
@triton.jit(do_not_specialize=["queries", "keys", "offset", "first_chunk", "kv_heads", "segments", "record", "scale"])
def scan(
    q, k, v, out, d_out, denominators, delta, to,
    records, initial, initial_exponent, end, end_exponent,
    log_decay, ignored, lengths, bounds,
    queries, keys, offset, first_chunk, kv_heads, segments, record, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t,
    ROLE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    DECAY: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
    C: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``y_r = sum_s w_rs (a_r b_s) x_s``, for a tile of the columns of ``x``. What they are says ``ROLE``:

    ======= ======== ====== ====== ====== =========
    role    rows     a      b      x      direction
    ======= ======== ====== ====== ====== =========
    out     queries  phi(q) phi(k) v      forward
    dq      queries  d_out  v      phi(k) forward
    dk      keys     v      d_out  phi(q) backward
    dv      keys     phi(k) phi(q) d_out  backward
    ======= ======== ====== ====== ====== =========

    What is not finite in a row of ``x`` shows in the sums over all rows, at the end: then the same again, with care for the rows that do
    not see it.

    With ``GATED`` there is a decay a token and head, ``log_decay`` in base 2, ``[batch, kv_heads, keys]``: roles dq and dk then write row sums of x
    times its gradient, of which the gates' is made, to ``delta``.

    With ``SUMS`` it writes the state of each segment instead, ``sum_s b_s x_s``; who reads them does so of all segments before.
    """
    bad = _scan(
        q, k, v, out, d_out, denominators, delta, to, records, initial, initial_exponent, end, end_exponent, log_decay, ignored,
        lengths, bounds, queries, keys, offset, first_chunk, kv_heads, segments, record, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h,
        v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t, ROLE, SUMS, CAUSAL, MAP, NORMALIZE, DECAY, GATED, INITIAL, END, IGNORED,
        PACKED, GROUP, D, DV, BD, BV, BX, False, C, TYPE, PRECISION,
    )  # fmt: skip
    if CAUSAL and not SUMS:
        if bad:
            _scan(
                q, k, v, out, d_out, denominators, delta, to, records, initial, initial_exponent, end, end_exponent, log_decay, ignored,
                lengths, bounds, queries, keys, offset, first_chunk, kv_heads, segments, record, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h,
                v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t, ROLE, SUMS, CAUSAL, MAP, NORMALIZE, DECAY, GATED, INITIAL, END, IGNORED,
                PACKED, GROUP, D, DV, BD, BV, BX, True, C, TYPE, PRECISION,
            )  # fmt: skip
