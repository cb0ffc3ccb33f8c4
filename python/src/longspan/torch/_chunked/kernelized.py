"""Kernelized attention with Shaw's or Fourier positions, in O(L) time."""

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, divide, lowest, shifted
from .features import MAPS, elementwise, lift
from .rings import CARRY, OLDEST, SHIFT, ordered, present, rows_at, tokens, values_of

#: Rows at a time: in-chunk weights are CHUNK x (CHUNK + 2 radius).
CHUNK = 128

#: What takes the place of the causal recurrence while `longspan.torch.onnx.export` runs: of queries' and keys' features, values and
#: the decay of each head.
RECURRENCE: ContextVar[Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None] = ContextVar("recurrence", default=None)


def recurrence() -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None:
    return RECURRENCE.get()


# Torch 2.11 can't trace a ContextVar: see `longspan._calls.settings`.
recurrence._dynamo_marked_constant = True  # type: ignore[attr-defined]


def whole(call: Call) -> Call:
    """The same call, where a token whose gate is no number has a value that is none."""
    if call.log_decay is None:
        return call
    lost = call.log_decay.isnan()
    return replace(call, v=call.v.masked_fill(lost[..., None], torch.nan), log_decay=call.log_decay.masked_fill(lost, 0))


def kernelized(call: Call) -> Tensor:
    """Content, relative positions, or both, under one normaliser: the formula of `longspan.ops.shaw_attention`."""
    settings, parameters, (of_queries, of_keys) = call.settings, call.parameters, call.maps
    (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
    content = settings.get("kernelized", True)
    normalize = settings.get("normalize", True)
    whole = settings.get("feature_map", "elu+1")
    name = elementwise(whole)
    phi = MAPS[name]
    table = parameters[0] if parameters else None
    same = settings.get("rel_feature_map", "same") == "same"
    if table is not None and same:
        # A row of the table goes through the map of the keys that its head reads.
        matrix = None if of_keys is None else of_keys.repeat_interleave(call.group, 0)
        table = lift(whole, table if table.ndim == 3 else table[None], matrix)
    rho = phi if same else MAPS["identity"]

    k, v, there = call.without_padding()
    q, features, exponents = call.features(k, normalize)
    # Sums are divided here or, where a call brings exponents, by its caller.
    divided = normalize or (call.exponents is not None and call.divided)
    values, offset, before = torch.cat([v, there.expand(-1, kv_heads, -1, -1)], dim=-1), call.offset, call.sums
    far = None
    if call.initial is not None:
        sums, weights, marks, far, ring, _ = call.initial
        far, level = far[:, :, None], marks[..., :1, None].detach()
        before = (torch.cat([sums.unflatten(-1, (-1, v.shape[3])) if v.shape[3] else sums.new_zeros((*weights.shape, 0)),
                             weights[..., None]], -1), level) if content else None  # fmt: skip
        if ring.shape[-1]:
            # The last values before the first key are keys that have no content.
            past = _past(call, ring, marks, ring.shape[-1] // values.shape[3])
            values = torch.cat([past, values], 2)
            features = torch.cat([features.new_zeros((*past.shape[:3], features.shape[-1])), features], 2)
            exponents = torch.cat([exponents.new_full((*past.shape[:3], 1), -torch.inf), exponents], 2)
            offset, keys = offset + past.shape[2], keys + past.shape[2]
    begin = keys - k.shape[2]
    if call.group != 1:
        features, values = features.repeat_interleave(call.group, 1), values.repeat_interleave(call.group, 1)
        exponents = exponents.repeat_interleave(call.group, 1)
        far = None if far is None else far.repeat_interleave(call.group, 1)
        before = None if before is None else (before[0].repeat_interleave(call.group, 1), before[1].repeat_interleave(call.group, 1))
    rows, of_rows, radius = None, q.new_zeros((1, 1, 1, 1)), 0
    if table is not None:
        table = table if table.ndim == 3 else table[None]
        if name == "exp" and same and divided and table.numel():
            # Of the rows that are seen: under a causal mask none for later tokens, which may be larger.
            seen = table[:, : table.shape[1] // 2 + 1] if call.is_causal else table
            of_rows = seen.amax((1, 2)).detach()[None, :, None, None]
            table = table - of_rows[0]
            table = table.masked_fill(table > 0, 0)
        # A raw table is a factor of the weights as it is.
        rows = rho(table).expand(heads, -1, -1)
        radius = rows.shape[1] // 2
    decay = settings.get("decay")
    if decay is not None and not call.is_causal:
        raise ValueError("decay with a bidirectional mask has no meaning; use a causal mask or leave the decay out")

    recurrent = recurrence()
    if recurrent is not None and call.log_decay is None and call.is_causal and rows is None and call.offset == 0 and queries == keys:
        gamma = None if decay is None else q.new_tensor(decay).repeat_interleave(call.group)[:, None, None]
        of_all = exponents.amax(2, keepdim=True).clamp(min=lowest(q)) if divided else 0
        return divide(recurrent(q, features * (exponents - of_all).exp(), values, gamma), normalize)
    walk: _Bidirectional | _Causal
    if call.is_causal:
        walk = _Causal(features if content else None, exponents, values, rows, of_rows, radius, _fall(call, begin), divided, begin)
        if before is not None:
            walk.state = (before[0], before[1].clamp(min=lowest(q)))
        if far is not None and rows is not None:
            walk.far = (far, of_rows.expand_as(far[..., :1]))
    else:
        # All keys and rows of the table have one exponent in common.
        highest = of_rows
        if divided and keys:
            highest = exponents.amax(2, keepdim=True).clamp(min=lowest(q))
            highest = highest if rows is None else torch.maximum(highest, of_rows)
        rows = None if rows is None else rows * (of_rows - highest).exp()
        walk = _Bidirectional(features * (exponents - highest).exp() if content else None, values, rows, radius)
        if rows is None:
            # All rows read the same state.
            return divide(walk.chunk(q, 0, queries), normalize)
    # Without queries one empty chunk runs, so that autograd still reaches all tensors.
    ranges = [slice(start, min(start + CHUNK, queries)) for start in range(0, max(queries, 1), CHUNK)]
    pieces = [walk.chunk(q[:, :, part], part.start + offset, part.stop + offset) for part in ranges]
    return divide(torch.cat(pieces, dim=2), normalize)


def _clip(token: int, keys: int) -> int:
    return min(max(token, 0), keys)


class _Bidirectional:
    """All keys through one state; relative positions through a band and running sums from both ends."""

    def __init__(self, features: Tensor | None, values: Tensor, rows: Tensor | None, radius: int) -> None:
        self.values, self.rows, self.radius = values, rows, radius
        self.state = None if features is None else features.transpose(-1, -2) @ values
        if rows is not None:
            nothing = values.new_zeros((*values.shape[:2], 1, values.shape[-1]))
            self.before = torch.cat([nothing, values.cumsum(2)], dim=2)
            # Summed from the end, because "total - before" would cancel digits.
            self.after = torch.cat([values.flip(2).cumsum(2).flip(2), nothing], dim=2)

    def chunk(self, q: Tensor, first: int, last: int) -> Tensor:
        """Sums for the queries ``q`` that stand at keys ``first`` to ``last - 1``."""
        keys = self.values.shape[2]
        out = q.new_zeros(()) if self.state is None else q @ self.state
        if self.rows is None:
            return out
        weights = q @ self.rows.transpose(-1, -2)
        near = _clip(first - self.radius + 1, keys)
        far = max(_clip(last - 1 + self.radius, keys), near)
        out = out + weights[..., :1] * self.before[:, :, near : near + 1]
        out = out + weights[..., -1:] * self.after[:, :, far : far + 1]
        band = _band(weights, first, last, near, far, self.radius)
        return out + band @ self.values[:, :, near:far]


def _band(weights: Tensor, first: int, last: int, near: int, far: int, radius: int) -> Tensor:
    """Weights of relative positions between the queries at ``first ..`` and the keys ``near .. far``."""
    rows, count, begin, width = last - first, far - near, near - first + radius, weights.shape[-1]
    # Under a causal mask the weights end at "here"; what comes later is masked by the caller.
    place = torch.arange(count, device=weights.device)[None, :] - torch.arange(rows, device=weights.device)[:, None] + begin
    band = torch.where(place >= width - 1, weights[..., -1:], shifted(weights, begin, count))
    return torch.where(place <= 0, weights[..., :1], band)


class _Constant:
    """Logarithms of what is left of a weight after some tokens, which all take the same, ``rate [1, heads, 1, 1]``."""

    #: Where the tokens of an initial state have fallen to, counted from its next token.
    stored_at = 0

    def __init__(self, rate: Tensor) -> None:
        self.rate = rate

    def _tokens(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self.rate.device)[:, None]

    def over(self, first: int, last: int) -> Tensor:
        """From token ``first`` to ``last``."""
        return self.rate * (last - first)

    def since(self, first: int, last: int) -> Tensor:
        """From token ``first`` to itself and each up to ``last``, that excluded."""
        return self.rate * (self._tokens(first, last) - first)

    def until(self, start: int, stop: int, token: int) -> Tensor:
        """From each of the keys ``start .. stop`` to a ``token``, which is no earlier."""
        return self.rate * (token - self._tokens(start, stop))

    def ages(self, first: int, last: int, start: int, stop: int) -> Tensor:
        """From each of the keys ``start .. stop`` to each of the tokens ``first .. last``; of those that a row does not see yet, nothing."""
        token, key = self._tokens(first, last), self._tokens(start, stop).mT
        return (self.rate * (token - key).clamp(min=0)).masked_fill(key > token, -torch.inf)


class _Gates:
    """The same where each token takes its own, ``g [batch, heads, tokens, 1]``. What lies between two tokens is summed for itself: a
    difference of running sums would lose digits."""

    stored_at = -1

    def __init__(self, g: Tensor) -> None:
        self.g = g

    def over(self, first: int, last: int) -> Tensor:
        return self.g[:, :, first + 1 : last + 1].sum(2, keepdim=True)

    def since(self, first: int, last: int) -> Tensor:
        nothing = self.g.new_zeros((*self.g.shape[:2], 1, 1))
        return torch.cat([nothing, self.g[:, :, first + 1 : last].cumsum(2)], 2)

    def until(self, start: int, stop: int, token: int) -> Tensor:
        nothing = self.g.new_zeros((*self.g.shape[:2], 1, 1))
        sums = torch.cat([self.g[:, :, start + 1 : token + 1].flip(2).cumsum(2).flip(2), nothing], 2)
        return sums[:, :, : stop - start]

    def ages(self, first: int, last: int, start: int, stop: int) -> Tensor:
        begin = min(first, start)
        tokens = torch.arange(begin, last, device=self.g.device)[:, None]
        keys = torch.arange(start, stop, device=self.g.device)[None, :]
        sums = torch.where(tokens > keys, self.g[:, :, begin:last], 0).cumsum(2)
        return sums.masked_fill(tokens < keys, -torch.inf)[:, :, first - begin :]


def _fall(call: Call, begin: int) -> _Constant | _Gates:
    """How the weights of a call fall, whose own keys come after ``begin`` of its initial state."""
    if call.log_decay is not None:
        g = F.pad(call.log_decay, (begin, 0)).repeat_interleave(call.group, 1)
        return _Gates(g[..., None])
    decay = call.settings.get("decay")
    rate = call.q.new_tensor([0.0] * call.k.shape[1] if decay is None else [math.log(gamma) for gamma in decay])
    return _Constant(rate.repeat_interleave(call.group)[None, :, None, None])


def _past(call: Call, ring: Tensor, marks: Tensor, count: int) -> Tensor:
    """The values of an initial state's ring, from the oldest; with gates each times what is left of its weight."""
    if call.log_decay is None:
        return values_of(ring, marks[..., OLDEST, None], count)
    v, weight = _weighed(ring, marks, count)
    return torch.cat([v * weight, weight], -1)


def _weighed(ring: Tensor, marks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A ring's values and what gates have left of their weights, 0 and without a gradient where no token is."""
    rows = ordered(ring, marks[..., OLDEST, None], count)
    weight = rows[..., -1:]
    return rows[..., :-1], present(weight, weight.detach() != 0)


class _Causal:
    """A state of all keys that every row of a chunk sees, and dense weights for those that only some rows see.

    Key ``j`` counts for a row at token ``i`` with the factor ``exp(exponents[j] + what it has fallen by)``, a row of the table with
    ``exp(of_rows + that)``: sums are relative to the largest of those that the row sees, so that no later key, and none that
    has decayed, makes them vanish; or, where nobody divides them, to 1.
    """

    def __init__(
        self, features: Tensor | None, exponents: Tensor, values: Tensor, rows: Tensor | None, of_rows: Tensor, radius: int,
        fall: _Constant | _Gates, divided: bool, begin: int,
    ) -> None:  # fmt: skip
        self.features, self.exponents, self.values, self.rows, self.of_rows = features, exponents, values, rows, of_rows
        self.radius, self.fall, self.divided = radius, fall, divided
        # Keys below these are in the sums of all keys, and of those at least `radius` before, which both start with none, or with
        # those before the call, whose own keys begin here.
        self.taken, self.far_taken = begin, 0
        # The token that decays are counted from.
        self.base = begin + fall.stored_at
        nothing = values.new_zeros((*values.shape[:2], 1, values.shape[-1]))
        none = nothing[..., :1].detach() + (lowest(values) if divided else 0.0)
        # Sums, and the exponents that they are relative to.
        self.far = (nothing, none)
        self.state = (nothing if features is None else nothing.expand(-1, -1, features.shape[-1], -1), none)

    def chunk(self, q: Tensor, first: int, last: int) -> Tensor:
        """Sums for the queries ``q`` that stand at keys ``first`` to ``last - 1``; chunks come in order."""
        keys = self.values.shape[2]
        since = self.fall.since(first, last)
        # Products of the queries, their exponents, and what they weigh.
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        if self.features is not None:
            start = max(_clip(first + 1, keys), self.taken)
            self.state = self._entered(self.state, self.features, self.exponents, self.taken, start, first)
            self.taken, stop = start, max(_clip(last, keys), start)
            state, level = self.state
            own = self.exponents[:, :, start:stop].transpose(-1, -2) + self.fall.ages(first, last, start, stop)
            parts = [(q, level + since, state),
                     (q @ self.features[:, :, start:stop].transpose(-1, -2), own, self.values[:, :, start:stop])]  # fmt: skip
        if self.rows is not None:
            near = max(_clip(first - self.radius + 1, keys), self.far_taken)
            self.far = self._entered(self.far, None, self.of_rows, self.far_taken, near, first)
            self.far_taken, stop = near, max(_clip(last, keys), near)
            far, level = self.far
            weights = q @ self.rows[:, : self.radius + 1].transpose(-1, -2)
            band = _band(weights, first, last, near, stop, self.radius)
            parts += [(weights[..., :1], level + since, far),
                      (band, self.of_rows + self.fall.ages(first, last, near, stop), self.values[:, :, near:stop])]  # fmt: skip
        self.base = first
        highest = since.new_zeros(())
        if self.divided:
            for _, exponents, _ in parts:
                if exponents.shape[-1]:
                    most = exponents.amax(-1, keepdim=True)
                    highest = torch.maximum(highest, most) if highest.dim() else most
        out = q.new_zeros((*q.shape[:3], self.values.shape[-1]))
        for weights, exponents, weighed in parts:
            out = out + (weights * (exponents - highest).exp()) @ weighed
        return out

    def _entered(
        self, sums: tuple[Tensor, Tensor], features: Tensor | None, exponents: Tensor, taken: int, until: int, token: int
    ) -> tuple[Tensor, Tensor]:
        """Sums and their exponent as seen from ``token``, with the keys ``taken .. until``."""
        before, level = sums
        level = level + self.fall.over(self.base, token)
        if until <= taken:
            return before, level
        # Those of a table are the same for all keys.
        own = exponents if exponents.shape[2] == 1 and features is None else exponents[:, :, taken:until]
        own = own + self.fall.until(taken, until, token)
        highest = torch.maximum(level, own.amax(2, keepdim=True)) if self.divided else torch.zeros_like(level)
        values = self.values[:, :, taken:until] * (own - highest).exp()
        added = values.sum(2, keepdim=True) if features is None else features[:, :, taken:until].transpose(-1, -2) @ values
        return before * (level - highest).exp() + added, highest


def _near(at_query: Tensor, at_key: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Positions counted from the one nearest to zero, those of ignored keys 0. Only differences matter to outputs, but gradients of
    frequencies are sums of products with positions, and lose the digits that all of them share."""
    at_key = at_key.masked_fill(~there, 0)
    if at_query.shape[1] == 0:
        return at_query, at_key
    least = torch.cat([at_query, at_key.masked_fill(~there, torch.inf)], 1).amin(1, keepdim=True)
    greatest = torch.cat([at_query, at_key.masked_fill(~there, -torch.inf)], 1).amax(1, keepdim=True)
    origin = (least.clamp(min=0) + greatest.clamp(max=0)).detach()
    return at_query - origin, at_key - origin


@dataclass(frozen=True)
class _Turned:
    """Fourier's features: of queries and keys, turned and not, and the exponents of the keys."""

    left: Tensor
    right: Tensor
    queries: Tensor
    keys: Tensor
    exponents: Tensor


def _turned(call: Call, k: Tensor, there: Tensor) -> _Turned:
    settings = call.settings
    normalizer = settings.get("normalizer", "one_plus")
    queries, keys, exponents = call.features(k, normalizer != "none")
    a, *rest = call.parameters
    # Single precision loses the digits of an angle far from the first token.
    exact = k.dtype if k.device.type == "mps" else torch.float64
    if settings.get("axes"):
        *rest, at_query, at_key = rest
        at_query, at_key = _near(at_query, at_key, there[:, 0] > 0)
    else:
        passed = torch.zeros((), dtype=exact, device=k.device)
        if call.initial is not None:
            passed = tokens(call.initial[2].detach().to(exact))[:, :1, None]
        at_query, at_key = (torch.arange(x.shape[2], dtype=exact, device=k.device)[None, :, None] for x in (call.q, k))
        at_query, at_key = at_query + passed + call.offset, at_key + passed

    def angles(a: Tensor, at: Tensor) -> Tensor:
        angle: Tensor = torch.einsum("hmn,bin->bhim", a.to(exact), at.to(exact)).remainder(2 * math.pi).to(k.dtype)
        return angle

    turn_query, turn_key = angles(a.repeat_interleave(call.group, 0), at_query), angles(a, at_key)
    if settings.get("wave", "each") == "pairs":
        half = queries.shape[-1] // 2

        def turned(x: Tensor, angle: Tensor) -> Tensor:
            first, second = x[..., :half], x[..., half:]
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        return _Turned(turned(queries, turn_query), turned(keys, turn_key), queries, keys, exponents)
    turn_query = turn_query + rest[0][None, :, None]
    scaled = queries if len(rest) < 2 else queries * rest[1][None, :, None]
    lefts = [scaled * turn_query.cos(), scaled * turn_query.sin()]
    rights = [keys * turn_key.cos(), keys * turn_key.sin()]
    if normalizer == "one_plus" or len(rest) > 2:
        beta = rest[2] if len(rest) > 2 else queries.new_ones(())
        if normalizer == "dominant":
            beta = rest[1].abs() + F.softplus(beta)
        lefts.append(queries * (beta[None, :, None] if beta.ndim else beta))
        rights.append(keys)
    return _Turned(torch.cat(lefts, -1), torch.cat(rights, -1), queries, keys, exponents)


def fourier(call: Call) -> Tensor:
    """`longspan.ops.fourier_attention`: kernelized attention over turned features."""
    settings, normalizer = call.settings, call.settings.get("normalizer", "one_plus")
    k, v, there = call.without_padding()
    of = _turned(call, k, there)
    ones = there.expand(-1, k.shape[1], -1, -1)
    plain = {"feature_map": "identity", "normalize": False, "decay": settings.get("decay")}
    sums = weights = None
    if call.initial is not None:
        sums = call.initial[0].unflatten(-1, (of.right.shape[-1], v.shape[3]))
        weights = call.initial[1][..., None]

    def summed(q: Tensor, k: Tensor, v: Tensor, *before: Tensor | None) -> Tensor:
        earlier = None
        if call.initial is not None:
            # The last column is of ones, which nobody asks for here.
            whole = torch.cat([x for x in before if x is not None], -1)
            earlier = F.pad(whole, (0, 1)), call.initial[2][..., :1, None].detach()
        # Where nobody divides the sums they are relative to 1; keys that are ignored have the exponent -inf.
        return kernelized(replace(
            call, q=q, k=k, v=v, parameters=(), maps=(None, None), settings=plain, key_padding_mask=None, initial=None,
            exponents=of.exponents, divided=normalizer != "none", sums=earlier,
        ))  # fmt: skip

    if normalizer == "none":
        return summed(of.left, of.right, v, sums)
    if normalizer == "unrotated":
        return divide(torch.cat([summed(of.left, of.right, v, sums), summed(of.queries, of.keys, ones, weights)], -1))
    both = summed(of.left, of.right, torch.cat([v, ones], -1), sums, weights)
    if normalizer == "literal":
        negative = both[..., -1:] < 0
        # The kernels refuse such a call; here nobody may look at the numbers.
        both = torch.cat([both[..., :-1].masked_fill(negative, torch.nan), both[..., -1:]], -1)
    return divide(both)


def state_after(call: Call, positions: bool = False) -> list[Tensor]:
    """The parts of the state after the last key, of content and Shaw's positions, or of Fourier's ``positions``."""
    k, v, there = call.without_padding()
    settings = call.settings
    count, passed = call.lengths[..., None], k.new_zeros((*k.shape[:2], 4))
    before = call.initial
    if before is not None:
        passed = before[2].detach()
    token = torch.arange(k.shape[2], device=k.device)[:, None]
    # What time leaves of each key at the end, and of what was there before.
    if call.log_decay is None:
        decay = settings.get("decay")
        rate = k.new_tensor([0.0] * k.shape[1] if decay is None else [math.log(gamma) for gamma in decay])[None, :, None, None]
        aged, total = rate * (count[..., None] - token).clamp(min=0), rate * count[..., None]
    else:
        rate = k.new_zeros((1, 1, 1, 1))
        aged = _Gates(call.log_decay[..., None]).until(0, k.shape[2], k.shape[2])
        total = call.log_decay.sum(2)[..., None, None]
    fallen = total.exp()
    values = torch.cat([v, there.expand(-1, k.shape[1], -1, -1)], -1)
    shift = passed[..., SHIFT, None, None]
    parts: list[Tensor] = []
    if settings.get("kernelized", True):
        if positions:
            of = _turned(call, k, there)
            features, exponents = of.right, of.exponents
            weigh = of.keys if settings.get("normalizer", "one_plus") == "unrotated" else of.right
        else:
            _, features, exponents = call.features(k, True)
            weigh = features
        exponential = elementwise(settings.get("feature_map", "elu+1")) == "exp"
        top = torch.zeros_like(shift)
        if exponential:
            shift = torch.full_like(shift, -torch.inf) if before is None else shift
            top = exponents.amax(2, keepdim=True) if k.shape[2] else torch.full_like(shift, -torch.inf)
            top = torch.maximum(shift, top)
        finite = top.clamp(min=lowest(k))
        factor = (exponents - finite + aged).exp()
        sums, weights = features.mT @ (v * factor), (weigh * factor).sum(2)
        if before is not None:
            kept = fallen * (shift.clamp(min=lowest(k)) - finite).exp()
            sums = sums + kept * before[0].unflatten(-1, sums.shape[2:])
            weights = weights + kept[..., 0] * before[1]
        parts, shift = [sums.flatten(2), weights], top
    else:
        parts = [k.new_zeros((*k.shape[:2], 0))] * 2
    far = ring = k.new_zeros((*k.shape[:2], 0))
    if call.parameters and not positions:
        radius = call.parameters[0].shape[-2] // 2
        # Those that the ring holds have not become far.
        gone = values * (aged.exp() * (token < count[..., None] - radius))
        far = gone.sum(2)
        past = values.new_zeros((*values.shape[:2], radius, values.shape[3]))
        if before is not None:
            if radius:
                past = _past(call, before[4], passed, radius)
            back = torch.arange(radius, 0, -1, device=k.device)[:, None]
            left = (total + rate * back).exp() * (back + count[..., None] > radius)
            far = far + fallen[..., 0] * before[3] + (left * past).sum(2)
            if radius and call.log_decay is not None:
                kept, weight = _weighed(before[4], passed, radius)
                past = torch.cat([kept, weight * fallen], -1)
        if call.log_decay is not None:
            values = torch.cat([values[..., :-1], values[..., -1:] * aged.exp()], -1)
        ring = rows_at(torch.cat([past, values], 2), count + torch.arange(radius, device=k.device)).flatten(2)
    number = tokens(passed) + count[..., 0]
    carry = (number / CARRY).floor()
    marks = torch.stack([shift[..., 0, 0], torch.zeros_like(number), number - carry * CARRY, carry], -1)
    gates = k.new_zeros((*k.shape[:2], 0))
    if call.log_decay is not None:
        gates = call.log_decay.sum(2, keepdim=True) + (0 if before is None else before[5])
    return [*parts, marks, far, ring, gates]
