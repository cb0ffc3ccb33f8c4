"""One kernel for kernelized attention and its gradients: each is a scan over chunks of tokens (see README.md)."""

import triton
import triton.language as tl

from .channels import channel_sums
from .features import blocks, key_features, of_keys, of_queries, query_features, slope, turned, turned_back
from .tiles import NOTHING, exp, inverse, load_rows, sequence_of, store_rows, within

#: As `TOKENS_CARRY` in the kernels' `state.rs`: float32 counts no further than 2**24.
CARRY = 1 << 20
_CARRY = tl.constexpr(CARRY)
#: What takes logarithms from base 2 to that of e.
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _clip(x, high):
    return tl.minimum(tl.maximum(x, 0), high)


@triton.jit
def _place(
    low, OF_KEYS: tl.constexpr, SUMMED: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, BA: tl.constexpr, BX: tl.constexpr
):  # fmt: skip
    """Where a tile of a state ``[SUMMED * M, DV]`` lies, and which of its numbers there are. Its rows here are the values' columns, whichever is cut
    in tiles: so the first factor of the product that makes it is one that was read as it is, which goes to it from shared memory."""
    if OF_KEYS:
        of_value = tl.arange(0, BA)[:, None]
        block, column = blocks(low, W, BX)
    else:
        of_value = (low + tl.arange(0, BX))[:, None]
        block, column = blocks(0, W, BA)
    return (block * M + column)[None, :] * DV + of_value, ((block < SUMMED) & (column < M))[None, :] & (of_value < DV)


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
def gate_sums(log_decay, token, is_key, C: tl.constexpr):
    """Of a chunk, logarithms of what decays up to each row and after it, of all of it, and its gates. Sums of their own, not differences
    of running sums, which lose digits where those are large. A gate of 0 is finite: 0 times minus infinity would be NaN."""
    g = tl.load(log_decay + token, mask=is_key, other=0.0)
    g = tl.where(g < NOTHING, NOTHING, g)
    r = tl.arange(0, C)
    later = r[None, :] > r[:, None]
    return tl.sum(tl.where(later, 0.0, g[None, :]), 1), tl.sum(tl.where(later, g[None, :], 0.0), 1), tl.sum(g, 0), g


@triton.jit
def between_pairs(g, C: tl.constexpr, REVERSE: tl.constexpr):
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
    ROLE: tl.constexpr, NORMALIZE: tl.constexpr, DECAY: tl.constexpr, CHANNEL: tl.constexpr, EXPONENTIAL: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the state before a chunk gives to its rows and, with role ``out``, to their denominators."""
    if CHANNEL and (ROLE == "out" or ROLE == "dv"):
        a = (a.to(tl.float32) * tl.exp2(age)).to(TYPE)
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
    if EXPONENTIAL:
        # In one sum: either may be out of range by itself.
        factor = exp(clock + gamma * age * _LN2 if DECAY else clock)
        y, total = y * factor[:, None], total * factor
    elif CHANNEL:
        if ROLE == "dq" or ROLE == "dk":
            y *= tl.exp2(age)
    elif DECAY:
        factor = tl.exp2(gamma * age)
        y, total = y * factor[:, None], total * factor
    return y, total


@triton.jit
def _scan(
    q, k, v, out, d_out, denominators, delta, to,
    records, initial, initial_exponent, end, end_exponent,
    log_decay, ignored, lengths, bounds, row_sums, inner, frequencies, waves, before_call, of_waves,
    queries, keys, offset, first_chunk, kv_heads, segments, record, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t,
    ROLE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr,
    SUMMED: tl.constexpr, KEYS: tl.constexpr, STRICT: tl.constexpr, NORMALIZE: tl.constexpr, DECAY: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr, INITIAL: tl.constexpr,
    END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
    CAREFUL: tl.constexpr, C: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See `scan`. Returns whether a sum was not finite, without which ``CAREFUL`` changes nothing."""
    REVERSE: tl.constexpr = ROLE == "dk" or ROLE == "dv"
    EXPONENTIAL: tl.constexpr = MAP == "exp"
    EACH: tl.constexpr = 2 if EXPONENTIAL else 1
    # Whether columns of x are those of keys.
    OF_KEYS: tl.constexpr = ROLE == "dq" or ROLE == "dk"
    # Features are blocks of M; of a tile's or a whole row's columns each has an equal part, PARTS at most.
    M: tl.constexpr = D // 2 if TURN == "pairs" else D
    PARTS: tl.constexpr = BLOCKS if BLOCKS < 3 else 4
    W: tl.constexpr = (BX if OF_KEYS else BD) // PARTS
    ROW: tl.constexpr = BD // PARTS * (2 if TURN == "pairs" else 1)
    # Whether the first blocks are what values are weighed by, and those after them what rows are divided by.
    UNROTATED: tl.constexpr = BLOCKS > SUMMED
    F: tl.constexpr = SUMMED * M
    MARKS: tl.constexpr = F * DV + (D if UNROTATED else F)
    WIDTH: tl.constexpr = M if OF_KEYS else DV
    STEP: tl.constexpr = W if OF_KEYS else BX
    TILES: tl.constexpr = (WIDTH + STEP - 1) // STEP
    BA: tl.constexpr = BV if OF_KEYS else BD
    BZ: tl.constexpr = BX if OF_KEYS else BD
    # Whether the sum of keys is asked for, or, of a gradient, that of rows' deltas.
    KEEP_Z: tl.constexpr = KEYS and (SUMS or END or (NORMALIZE and ROLE != "dv"))
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
    low = tile * STEP
    z_low = low if OF_KEYS else 0

    batch, q_start, k_start, n_queries, n_keys = sequence_of(bounds, sequence, queries, keys, PACKED)
    # Keys after the last that is not ignored are no part of the sequence.
    there = n_keys
    if IGNORED:
        there = tl.load(lengths + sequence).to(tl.int32)
    k += batch * k_b + kv_head * k_h + k_start * k_t
    v += batch * v_b + kv_head * v_h + v_t * k_start
    gamma = 0.0
    if GATED:
        log_decay += ((batch * kv_heads + kv_head) * keys + k_start) * (D if CHANNEL else 1)
        gamma = 1.0
    elif DECAY:
        gamma = tl.load(log_decay + kv_head)
    # The logarithm of what decays from the first token on.
    passed = tl.zeros([BZ] if CHANNEL else [], tl.float32)

    r = tl.arange(0, C)
    chunks = tl.cdiv(tl.maximum(tl.maximum(n_keys, n_queries + offset), 0), C) - first_chunk
    of_segment = tl.cdiv(chunks, segments)
    begin = first_chunk + segment * of_segment
    stop = tl.minimum(begin + of_segment, first_chunk + chunks)

    # The state of what comes before: its exponents are relative to `reference`, its decay to the token where the chunk begins, or, in
    # the other direction, ends.
    at, inside = _place(low, OF_KEYS, SUMMED, M, DV, W, BA, BX)
    z_block, z_column = blocks(z_low, W, BZ)
    is_divisor = z_block >= (SUMMED if UNROTATED else 0)
    z_at = F * DV + (z_block - (SUMMED if UNROTATED else 0)) * M + z_column
    z_inside = is_divisor & (z_block < BLOCKS) & (z_column < M)
    # A gate a channel lies where others have the keys' sums.
    gate_at = z_at if CHANNEL else record - 1 if KEYS else F * DV
    gate_inside = z_inside if CHANNEL else tl.full([], 1, tl.int1)
    state = tl.zeros([BA, BX] if OF_KEYS else [BX, BA], tl.float32)
    z = tl.zeros([BZ], tl.float32)
    reference = tl.full([], NOTHING, tl.float32)
    whose = sequence * kv_heads + kv_head
    if INITIAL:
        before = initial + whose * record
        state = tl.load(before + at, mask=inside, other=0.0)
        if KEYS:
            z = tl.load(before + z_at, mask=z_inside, other=0.0)
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
            if KEYS:
                own_z = tl.load(before + z_at, mask=z_inside, other=0.0)
            decays = 0.0
            if GATED:
                decays = tl.load(before + gate_at, mask=gate_inside, other=0.0)
                passed += decays
            elif DECAY:
                start = first_chunk + other * of_segment
                ends = tl.minimum(start + of_segment, first_chunk + chunks)
                decays = gamma * (_clip(ends * C, there) - _clip(start * C, there)).to(tl.float32)
            if DECAY and EXPONENTIAL:
                reference += decays * _LN2
            elif DECAY:
                kept = tl.exp2(decays)
                state, z = state * (kept[None, :] if CHANNEL else kept), z * kept
            if EXPONENTIAL:
                exponent = tl.load(before + MARKS)
                highest = tl.maximum(reference, exponent)
                kept, joins = exp(reference - highest), exp(exponent - highest)
                state, z, own, own_z, reference = state * kept, z * kept, own * joins, own_z * joins, highest
            state, z = state + own, z + own_z

    position = 0.0
    if TURN != "":
        frequencies += kv_head * M
        if before_call is not None:
            position = tl.load(before_call + batch)
        # Of the angles' gradients, the same times positions, and the scales'.
        of_angles, of_moments, of_scales = tl.zeros([BX], tl.float64), tl.zeros([BX], tl.float64), tl.zeros([BX], tl.float64)

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
        fallen = tl.zeros([], tl.float32)
        up_to, after_it = tl.maximum(token - near, 0).to(tl.float32), tl.maximum(far - token, 0).to(tl.float32)
        gates = tl.zeros([C], tl.float32)
        if CHANNEL:
            up_to, fallen = channel_sums(log_decay, first, n_keys, z_low, False, D, C, BZ)
            after_it, fallen = channel_sums(log_decay, first, n_keys, z_low, True, D, C, BZ)
            passed += fallen
        elif GATED:
            up_to, after_it, fallen, gates = gate_sums(log_decay, token, is_key, C)
            passed += fallen
        elif DECAY:
            fallen = gamma * (far - near).to(tl.float32)
        if EXPONENTIAL:
            # Decays are a part of exponents: what has decayed is no measure for what comes after it.
            fallen *= _LN2
        elif DECAY:
            since = tl.exp2(fallen)
        place_0 = position + first.to(tl.float64) if TURN != "" else 0.0

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
                    _, clock = key_features(k, first, k_t, is_key, low, place_0, frequencies, MAP, TURN, BLOCKS, ROW, W, D, C, BX)
            else:
                a, clock = key_features(k, first, k_t, is_key, 0, place_0, frequencies, MAP, TURN, BLOCKS, ROW, W, D, C, BD)
                a = a.to(TYPE)
            y, total = _of_state(a, state, z, of_row, reference + clock, after_it, gamma,
                                 ROLE, NORMALIZE, DECAY, CHANNEL, EXPONENTIAL, TYPE, PRECISION)  # fmt: skip

        # The columns, by the heads that read a key. What they add to z comes first, so that few registers are in use at once.
        for g in range(COLUMN_GROUP):
            factor = tl.full([C], 1.0, tl.float32)
            if CHANNEL:
                factor = tl.exp2(up_to if REVERSE else after_it)
            elif DECAY and not EXPONENTIAL:
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
                    features = query_features(q_at, first - offset, q_t, there_s, low, place_0, frequencies, waves, q_head,
                                              MAP, NORMALIZE, TURN, BLOCKS, ROW, W, D, C, BX) * weight[:, None]  # fmt: skip
                    x = features.to(TYPE)
                    b = load_rows(g_at, first - offset, g_t, there_s, 0, DV, C, BV).to(TYPE)
                else:
                    features = query_features(q_at, first - offset, q_t, there_s, 0, place_0, frequencies, waves, q_head,
                                              MAP, NORMALIZE, TURN, BLOCKS, ROW, W, D, C, BD) * weight[:, None]  # fmt: skip
                    b = features.to(TYPE)
                    x = load_rows(g_at, first - offset, g_t, there_s, low, DV, C, BX).to(TYPE)
            else:
                there_s = is_key
                if ROLE == "out":
                    features, u = key_features(k, first, k_t, is_key, 0, place_0, frequencies, MAP, TURN, BLOCKS, ROW, W, D, C, BD)
                    b = features.to(TYPE)
                    x = load_rows(v, first, v_t, is_key, low, DV, C, BX).to(TYPE)
                else:
                    features, u = key_features(k, first, k_t, is_key, low, place_0, frequencies, MAP, TURN, BLOCKS, ROW, W, D, C, BX)
                    x = features.to(TYPE)
                    b = load_rows(v, first, v_t, is_key, 0, DV, C, BV).to(TYPE)
                if EXPONENTIAL:
                    u = tl.where(is_key, u, NOTHING)
            if UNROTATED:
                divisors = tl.where(is_divisor[None, :], features, 0.0)
                turns = (features - divisors).to(TYPE)
                if OF_KEYS:
                    x = turns
                else:
                    b = turns
                features = divisors
            highest = reference
            if EXPONENTIAL:
                left = u + gamma * (up_to if REVERSE else after_it) * _LN2 if DECAY else u
                highest = tl.maximum(reference + fallen, tl.max(left, 0))
                factor = exp(left - highest)
            added = tl.zeros([BZ], tl.float32)
            if KEEP_Z and (CAUSAL or SUMS):
                added = tl.sum(features * (plus * factor)[:, None], 0)

            seen = (r[:, None] <= r[None, :]) if REVERSE else (r[:, None] >= r[None, :]) & there_s[None, :]
            if STRICT:
                seen = seen & (r[:, None] != r[None, :])
            if not SUMS:
                between = tl.zeros([C, C], tl.float32)
                if CAUSAL and GATED and not CHANNEL:
                    between = between_pairs(gates, C, REVERSE)
                elif CAUSAL and DECAY:
                    between = gamma * tl.abs(r[:, None] - r[None, :]).to(tl.float32)
                if EXPONENTIAL and CAUSAL:
                    between = u[None, :] + between * _LN2
                if EXPONENTIAL and ROLE == "out":
                    own = reference + clock
                    if CAUSAL:
                        own = tl.maximum(tl.max(tl.where(seen, between, NOTHING), 1), reference + gamma * up_to * _LN2 if DECAY else reference)
                    clock = -own
                if not REVERSE:
                    # The rows, and what all of them see.
                    if ROLE == "out":
                        a = query_features(q + batch * q_b + row_head * q_h + q_start * q_t, first - offset, q_t, is_query, 0, place_0,
                                           frequencies, waves, row_head, MAP, NORMALIZE, TURN, BLOCKS, ROW, W, D, C, BD).to(TYPE)  # fmt: skip
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
                                         ROLE, NORMALIZE, DECAY, CHANNEL, EXPONENTIAL, TYPE, PRECISION)  # fmt: skip
                if CAUSAL and not (CHANNEL and OF_KEYS):
                    # What some see.
                    if CHANNEL:
                        query = column_q if REVERSE else row_q + r
                        pairs = tl.load(inner + query[:, None] * C + r[None, :], mask=(there_s if REVERSE else is_query)[:, None], other=0.0)
                        if REVERSE:
                            pairs = tl.trans(pairs) * scale
                    else:
                        pairs = tl.dot(a, tl.trans(b), input_precision=PRECISION)
                    if OF_KEYS and NORMALIZE:
                        # By way of what rows are divided by.
                        dividing = plus[None, :] if REVERSE else -of_row[:, None]
                        if not UNROTATED:
                            pairs += dividing
                    elif ROLE == "out" and UNROTATED:
                        dividing = tl.dot(a, tl.trans(divisors.to(TYPE)), input_precision=PRECISION)
                    if EXPONENTIAL or (DECAY and not CHANNEL):
                        weights = exp(between + clock[:, None]) if EXPONENTIAL else tl.exp2(between)
                        pairs *= weights
                        if UNROTATED and ROLE != "dv":
                            dividing = dividing * weights
                    pairs = tl.where(seen, pairs, 0.0)
                    if UNROTATED and ROLE == "out":
                        total += tl.sum(tl.where(seen, dividing, 0.0), 1)
                    elif UNROTATED and OF_KEYS:
                        y = tl.dot(tl.where(seen, dividing, 0.0).to(TYPE), divisors.to(TYPE), acc=y, input_precision=PRECISION)
                    elif ROLE == "out" and NORMALIZE:
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
                    kept = exp(reference + fallen - highest)
                    reference, fallen = highest, tl.zeros([], tl.float32)
                if CHANNEL:
                    state *= kept[None, :]
                    if OF_KEYS:
                        x = (x.to(tl.float32) * factor).to(TYPE)
                    else:
                        b = (b.to(tl.float32) * factor).to(TYPE)
                elif DECAY or EXPONENTIAL:
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
                kept = tl.full([BZ] if CHANNEL else [], 1.0, tl.float32)

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
            else:
                x_at, row_0, x_t, valid, there_x = k, first, k_t, is_key, within(token, n_keys)
                at_row = to + batch * to_b + kv_head * to_h + k_start * to_t
                row = (batch * kv_heads + kv_head) * keys + k_start + token
                if ROLE == "dq":
                    x_at, row_0, x_t = q + batch * q_b + row_head * q_h + q_start * q_t, first - offset, q_t
                    valid, there_x, row = is_query, is_query, row_q + r
                    at_row = to + batch * to_b + row_head * to_h + q_start * to_t
                    y = y * inverse(tl.load(denominators + row * EACH, mask=is_query, other=1.0))[:, None]
                if CHANNEL and OF_KEYS:
                    column = row[:, None] * D + z_column[None, :]
                    of_column = there_x[:, None] & z_inside[None, :]
                    y += tl.load(inner + column, mask=of_column, other=0.0) * scale
                DIVIDED: tl.constexpr = NORMALIZE or ROLE == "dk"
                if OF_KEYS and TURN == "":
                    x_r = load_rows(x_at, row_0, x_t, valid, low, D, C, BX).to(tl.float32)
                    phi = of_queries(x_r, MAP, DIVIDED, D, BX)
                    dx = y * slope(x_r, phi, MAP)
                elif OF_KEYS:
                    phi, _, x_r, phi_x, y_r, phi_y, t, s, scales = turned(
                        x_at, row_0, x_t, valid, low, place_0, frequencies, waves if ROLE == "dq" else None, row_head,
                        MAP, DIVIDED, TURN, BLOCKS, ROW, W, D, C, BX,
                    )  # fmt: skip
                    dx, dy, angles, moments, of_scale = turned_back(y, valid, x_r, phi_x, y_r, phi_y, t, s, scales, MAP, TURN, W, C, BX)
                    of_angles, of_scales = of_angles + angles, of_scales + of_scale
                    of_moments += moments + angles * place_0
                    if TURN == "pairs":
                        store_rows(tl.where(valid[:, None], dy, 0.0), at_row + M, row_0, to_t, there_x, low, M, C, W)
                else:
                    dx = y
                if CHANNEL and OF_KEYS:
                    tl.store(row_sums + column, tl.where(valid[:, None], phi * y, 0.0), mask=of_column)
                elif GATED and (ROLE == "dk" or (ROLE == "dq" and not NORMALIZE)):
                    # A row grows with all gates up to its own; what is divided does not. A key shrinks with them.
                    tl.store(row_sums + row * TILES + tile, tl.sum(tl.where(valid[:, None], phi * y, 0.0), 1), mask=there_x)
                store_rows(tl.where(valid[:, None], dx, 0.0), at_row, row_0, to_t, there_x, low, WIDTH, C, STEP)

    if TURN != "" and OF_KEYS and not SUMS:
        z_sum = of_waves + ((sequence * kv_heads * ROW_GROUP + row_head) * segments + segment) * (3 * BLOCKS * M)
        z_sum += z_block * M + z_column
        of_feature = (z_block < BLOCKS) & (z_column < M)
        tl.store(z_sum, of_angles, mask=of_feature)
        tl.store(z_sum + BLOCKS * M, of_moments, mask=of_feature)
        tl.store(z_sum + 2 * BLOCKS * M, of_scales, mask=of_feature)

    if SUMS or END:
        # The state of the segment, or of the whole sequence; of a gradient, that at its beginning.
        writes = row_head % ROW_GROUP == 0
        if not SUMS:
            writes = writes & (segment == (0 if REVERSE else segments - 1))
        if writes:
            after = records + ((sequence * segments + segment) * kv_heads + kv_head) * record if SUMS else end + whose * record
            if END and EXPONENTIAL:
                # From the exponent that a backward finds, too.
                own = tl.load(end_exponent + whose)
                kept = exp(reference + own) if REVERSE else exp(reference - own)
                state, z, reference = state * kept, z * kept, own
            tl.store(after + at, state, mask=inside)
            if GATED:
                # How far all has decayed: of a segment in base 2, of a state in that of e.
                if END and not REVERSE:
                    passed *= _LN2
                    if INITIAL:
                        passed += tl.load(initial + whose * record + gate_at, mask=gate_inside, other=0.0)
                elif not SUMS:
                    passed = tl.zeros([BZ] if CHANNEL else [], tl.float32)
                filling = tl.arange(0, 16)
                if CHANNEL:
                    tl.store(after + gate_at, passed, mask=gate_inside)
                elif tile == 0:
                    tl.store(after + gate_at + filling, tl.where(filling == 0, passed, 0.0), mask=filling < record - gate_at)
            if KEYS and tile == 0:
                count = record - MARKS - (1 if GATED else 0)
                tl.store(after + z_at, z, mask=z_inside)
                if END and not REVERSE:
                    store_marks(after + MARKS, initial + whose * record + MARKS if INITIAL else initial, there, reference, count,
                                EXPONENTIAL, INITIAL)  # fmt: skip
                else:
                    mark = tl.arange(0, 32)
                    marks = tl.where(mark == 0, reference if EXPONENTIAL and SUMS else 0.0, 0.0)
                    tl.store(after + MARKS + mark, marks, mask=mark < count)
    return tl.min(tl.min((tl.abs(state) < float("inf")).to(tl.int32), 1), 0) == 0


# A kernel is not compiled again for another length.
@triton.jit(do_not_specialize=["queries", "keys", "offset", "first_chunk", "kv_heads", "segments", "record", "scale"])
def scan(
    q, k, v, out, d_out, denominators, delta, to,
    records, initial, initial_exponent, end, end_exponent,
    log_decay, ignored, lengths, bounds, row_sums, inner, frequencies, waves, before_call, of_waves,
    queries, keys, offset, first_chunk, kv_heads, segments, record, scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t,
    ROLE: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, MAP: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr,
    SUMMED: tl.constexpr, KEYS: tl.constexpr, STRICT: tl.constexpr, NORMALIZE: tl.constexpr, DECAY: tl.constexpr, GATED: tl.constexpr, CHANNEL: tl.constexpr, INITIAL: tl.constexpr,
    END: tl.constexpr, IGNORED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr,
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

    With ``CHANNEL`` it is one a channel too, ``[batch, kv_heads, keys, D]``, finite and 0 where a key is ignored; the same roles write that product itself,
    and what pairs within a chunk give comes from ``inner`` (see `within_chunks`).

    With ``STRICT`` no row sees its own token.

    With ``SUMS`` it writes the state of each segment instead, ``sum_s b_s x_s``; who reads them does so of all segments before.
    """
    bad = _scan(
        q, k, v, out, d_out, denominators, delta, to, records, initial, initial_exponent, end, end_exponent, log_decay, ignored,
        lengths, bounds, row_sums, inner, frequencies, waves, before_call, of_waves, queries, keys, offset, first_chunk, kv_heads, segments,
        record, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t, ROLE, SUMS, CAUSAL,
        MAP, TURN, BLOCKS, SUMMED, KEYS, STRICT, NORMALIZE, DECAY, GATED, CHANNEL, INITIAL, END, IGNORED, PACKED, GROUP, D, DV, BD, BV, BX, False, C,
        TYPE, PRECISION,
    )  # fmt: skip
    if CAUSAL and not SUMS:
        if bad:
            _scan(
                q, k, v, out, d_out, denominators, delta, to, records, initial, initial_exponent, end, end_exponent, log_decay, ignored,
                lengths, bounds, row_sums, inner, frequencies, waves, before_call, of_waves, queries, keys, offset, first_chunk, kv_heads, segments,
                record, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, to_b, to_h, to_t, ROLE, SUMS, CAUSAL,
                MAP, TURN, BLOCKS, SUMMED, KEYS, STRICT, NORMALIZE, DECAY, GATED, CHANNEL, INITIAL, END, IGNORED, PACKED, GROUP, D, DV, BD, BV, BX, True, C,
                TYPE, PRECISION,
            )  # fmt: skip
