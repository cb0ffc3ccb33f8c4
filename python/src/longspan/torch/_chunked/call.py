"""A call as the formulations take it, and what several of them do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from .features import MAPS, elementwise, lift

#: Numbers that a chunk of pairs may take.
_PAIRS = 1 << 24
#: Rows that share their keys at least, on the CPU and where each launch costs more than some pairs that no row sees.
_SHARED, _SHARED_ON_A_DEVICE = 64, 512


@dataclass(frozen=True)
class Call:
    """The arguments of `chunked_attention`, in float32 or float64, with the options of the mechanism."""

    q: Tensor
    k: Tensor
    v: Tensor
    #: What the mechanism learns but for its feature map.
    parameters: Sequence[Tensor]
    #: What the feature map of queries and of keys learns.
    maps: tuple[Tensor | None, Tensor | None]
    settings: dict[str, Any]
    is_causal: bool = False
    offset: int = 0
    key_padding_mask: Tensor | None = None
    #: The parts of the state before the first token, ``[batch, kv_heads, numbers]`` each.
    initial: Sequence[Tensor] | None = None
    #: Logarithms of factors of the keys' features, of a call whose sums the caller takes apart.
    exponents: Tensor | None = None
    #: Of such a call: whether its caller divides the sums, and the sums before the first key with their exponent.
    divided: bool = True
    sums: tuple[Tensor, Tensor] | None = None
    #: Of kernelized attention whose tokens bring decays: their logarithms, ``[batch, kv_heads, keys]``, 0 where a key is ignored.
    log_decay: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @property
    def lengths(self) -> Tensor:
        """Tokens up to the last one that is not ignored, where a state ends, ``[batch, 1]``."""
        keys, mask = self.k.shape[2], self.key_padding_mask
        if mask is None or not keys:
            return torch.full((self.k.shape[0], 1), keys, device=self.k.device)
        return (~mask * torch.arange(1, keys + 1, device=mask.device)).amax(1, keepdim=True)

    def apart(self) -> tuple[Call, Tensor | None]:
        """The same call without keys and values that are no numbers, and the rows that see one, ``[batch, heads, queries, 1]``; none
        where all rows see all keys. A weight of 0 times what is no number is none either, so it must not stay for rows that do not see it."""
        window = self.settings.get("window")
        if not (self.is_causal or window is not None) or self.k.shape[2] == 0 or self.q.shape[2] == 0:
            return self, None
        k, v, _ = self.without_padding()
        lost = ~v.isfinite().all(-1)
        if self.settings.get("kernelized", True):
            lost = lost | ~k.isfinite().all(-1)
        before = torch.cat([lost.new_zeros((*lost.shape[:2], 1), dtype=torch.long), lost.cumsum(2)], 2)
        token = torch.arange(self.q.shape[2], device=k.device) + self.offset
        keys = k.shape[2]
        last = (token + (1 if self.is_causal else int(window or 0))).clamp(0, keys)
        first = torch.zeros_like(last) if window is None else (token - window + 1).clamp(0, keys)
        rows = (before[:, :, last] > before[:, :, first]).repeat_interleave(self.group, 1)[..., None]
        return replace(self, k=k.masked_fill(lost[..., None], 0), v=v.masked_fill(lost[..., None], 0)), rows

    def without_padding(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values with zeros where a key is ignored, and 1 for each key that is there, ``[batch, 1, keys, 1]``."""
        k, v, mask = self.k, self.v, self.key_padding_mask
        if mask is None:
            return k, v, k.new_ones((k.shape[0], 1, k.shape[2], 1))
        ignored = mask[:, None, :, None]
        # Selected, not multiplied: 0 times a NaN in the padding would be NaN.
        return k.masked_fill(ignored, 0), v.masked_fill(ignored, 0), (~ignored).to(k.dtype)

    def features(self, k: Tensor, divided: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the queries, those of the keys ``k`` times ``exp(-exponents)``, and these exponents, ``[batch, heads, keys, 1]``: each
        key's own, since one for all would make the smaller ones vanish; -inf where a key is ignored."""
        whole = self.settings.get("feature_map", "elu+1")
        name = elementwise(whole)
        q, k = lift(whole, self.q, self.maps[0]), lift(whole, k, self.maps[1])
        exponents = k.new_zeros((*k.shape[:3], 1)) if self.exponents is None else self.exponents
        if name == "exp" and k.shape[-1]:
            if divided:
                # Cancels in the division; without it the exponentials overflow.
                q = q - q.amax(dim=-1, keepdim=True).detach()
            exponents = k.amax(dim=-1, keepdim=True).detach()
            k = k - exponents
        features = MAPS[name](k)
        if self.key_padding_mask is not None:
            ignored = self.key_padding_mask[:, None, :, None]
            features, exponents = features.masked_fill(ignored, 0), exponents.masked_fill(ignored, -torch.inf)
        return MAPS[name](q), features, exponents

    def pieces(self, numbers: int, back: int | None = None, ahead: int | None = None, shared: bool = True) -> list[tuple[slice, slice]]:
        """A few rows at a time, and the keys that they may see: all, or those up to ``back`` before and ``ahead`` after a row, so many
        ``numbers`` for each pair; rows of a piece share their keys or have each its own. Without queries no rows once, so that autograd still
        reaches all tensors."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        ahead = 0 if self.is_causal else ahead
        reach = keys if back is None or ahead is None else min(keys, back + ahead + 1)
        step = max(1, _PAIRS // max(1, self.q.shape[0] * self.q.shape[1] * numbers * max(reach, 1)))
        if shared and back is not None and ahead is not None:
            # Rows that share their keys: as many as they reach, or a few more.
            step = min(step, max(reach, _SHARED if self.q.is_cpu else _SHARED_ON_A_DEVICE))
        found = []
        for start in range(0, max(queries, 1), step):
            stop = min(start + step, queries)
            first = 0 if back is None else min(max(start + self.offset - back, 0), keys)
            last = keys if ahead is None else min(max(stop + self.offset + ahead, first), keys)
            found.append((slice(start, stop), slice(first, last)))
        return found

    def distance(self, rows: slice, keys: slice) -> Tensor:
        """``j - (i + offset)``, ``[rows, keys]``."""
        token = torch.arange(rows.start, rows.stop, device=self.q.device) + self.offset
        return torch.arange(keys.start, keys.stop, device=self.q.device)[None, :] - token[:, None]


def by_rows(pieces: list[tuple[slice, slice]], piece: Callable[[slice, slice], Tensor]) -> Tensor:
    """``piece(rows, keys)`` of all of them. Autograd keeps no weights of pairs: the backward computes them again."""
    return torch.cat([recomputed(piece, rows, seen) for rows, seen in pieces], 2)


#: What says whether a transform of torch.func is at work; where a version of torch lacks it, nobody knows.
interpreter = getattr(torch._C._functorch, "peek_interpreter_stack", None)


def shifted(x: Tensor, first: int, count: int) -> Tensor:
    """``x[..., i, j - i + first]`` for ``j`` below ``count``, 0 where ``x`` has no such column. Not by `gather`, whose gradient a device sums in
    another order each time."""
    rows = x.shape[-2]
    left = max(rows - 1 - first, 0)
    x = F.pad(x, (left, max(count + first - x.shape[-1], 0) + 1))
    # In rows that are shorter by 1, each begins one column later.
    shorter = x.shape[-1] - 1
    found: Tensor = x.flatten(-2)[..., : rows * shorter].unflatten(-1, (rows, shorter))[..., first + left : first + left + count]
    return found


def autocasts(kind: str) -> bool:
    """Whether autocast knows a kind of device."""
    return torch.amp.is_autocast_available(kind)


# Torch 2.11 can't trace it: see `longspan._calls.settings`.
autocasts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, computed again in the backward where autograd would keep its steps."""
    forward = getattr(forward_ad, "_current_level", -1) >= 0
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or interpreter is None or interpreter() is not None or forward:
        # torch.func takes no hooks of saved tensors, nor does forward mode of torch 2.11; a compiler decides itself.
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def divide(sums: Tensor, normalize: bool = True) -> Tensor:
    """Numerators over the denominators in the last column; 0 where there is nothing to divide by."""
    if not normalize:
        return sums[..., :-1]
    denominators = sums[..., -1:]
    nothing = denominators.abs() < torch.finfo(sums.dtype).tiny
    return torch.where(nothing, 0, sums[..., :-1] / torch.where(nothing, 1, denominators))


def exponentials(scores: Tensor, seen: Tensor) -> Tensor:
    """Those of ``scores[:, :, :, keys, ...]``, relative to a row's largest; 0 where a key is not seen."""
    scores = scores.masked_fill(~seen, -torch.inf)
    # The largest of a row cancels; a row that sees nothing has none.
    highest = scores.detach().amax(3, keepdim=True) if scores.shape[3] else scores.new_zeros(())
    return (scores - highest.nan_to_num(neginf=0.0)).exp()


def lowest(like: Tensor) -> float:
    """An exponent below all others, finite so that what has none is 0."""
    return torch.finfo(like.dtype).min / 4
