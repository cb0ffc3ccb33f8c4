"""Shaw's relative positions on tensors of a device: sizes and launches of the band's kernels, beside the scans of kernelized attention."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _calls
from ..._calls import Request
from .._chunked.call import Call
from .._chunked.features import MAPS
from .._chunked.kernelized import state_after
from .._chunked.rings import OLDEST, values_of
from . import kernelized
from .band import band, sum_ends, weigh_back
from .kernelized import Launch, arithmetic, laid_out, padded

#: Columns of a program.
_COLUMNS = 64
#: Warps of a program; of one that reads the weights transposed, which takes more registers for addresses.
WARPS, WARPS_BACK = 4, 8


def chunk(dtype: torch.dtype) -> int:
    """Tokens of a block."""
    return 64 if dtype is torch.bfloat16 else 32


def _weights(q: Tensor, rel: Tensor, call: Request) -> tuple[Tensor, Tensor]:
    """What a row weighs each distance with, ``[batch, heads, queries, distances]``, under a causal mask those up to "here"; of exponential
    features relative to a number of each head, which is given too."""
    settings = _calls.settings(call.options)
    name, same = settings.get("feature_map", "elu+1"), settings.get("rel_feature_map", "same") == "same"
    q, rel = q.float(), rel.float()
    rel = (rel if rel.ndim == 3 else rel[None]).expand(q.shape[1], -1, -1)
    if call.is_causal:
        rel = rel[:, : rel.shape[1] // 2 + 1]
    levels = rel.new_zeros(rel.shape[0])
    if name == "exp" and settings.get("normalize", True):
        q = q - q.amax(-1, keepdim=True).detach()
        if same:
            levels = rel.amax((1, 2)).detach()
            rel = rel - levels[:, None, None]
    # Autocast would take the product in half precision.
    with torch.autocast(q.device.type, enabled=False):
        return MAPS[name](q) @ (MAPS[name](rel) if same else rel).mT, levels


class _Shaw:
    """The launches of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None,
        packed: tuple[list[int], list[int]] | None, initial: Tensor | None,
    ) -> None:  # fmt: skip
        settings = _calls.settings(call.options)
        self.call, self.rel, self.normalize = call, parameters[0], settings.get("normalize", True)
        self.radius, self.mask = self.rel.shape[-2] // 2, key_padding_mask
        self.content = self.call._replace(mechanism="kernelized") if settings.get("kernelized", True) else None
        self.chunk = chunk(q.dtype)
        #: Blocks of the band before a row's own.
        self.near = -(-max(self.radius - 1, 0) // self.chunk)
        self.ahead = 0 if call.is_causal else self.near
        # What a ring holds are keys before the call's own, which begin where a block does.
        self.start = 0 if initial is None else -(-self.radius // self.chunk) * self.chunk
        features = k.shape[3] if self.content else 0
        self.sums = features * v.shape[3] + features
        self.wide = v.shape[3] + 1
        numbers = self.sums + 4 + (self.radius + 1) * self.wide
        # A state: sums of content, marks, what fills whole cache lines, what is far, the ring.
        self.filling = -numbers % 16
        values, mask = self.with_ring(v, initial)
        self.of = of = Launch(q, values, values, (), call._replace(mechanism="kernelized"), mask, packed, None)
        self.offset = max(-of.queries - self.radius, min(call.offset + self.start, of.keys + self.radius))
        if packed is None:
            longest = max(of.queries + self.offset, of.keys)
        else:
            longest = max((max(b - a + self.offset, d - c) for a, b, c, d in zip(packed[0], packed[0][1:], packed[1], packed[1][1:])), default=0)
        self.base = min(self.offset, 0) // self.chunk
        self.blocks = max(-(-longest // self.chunk) - self.base, 1)
        self.far = None if initial is None else self.parts(initial)[1].contiguous()

    def parts(self, numbers: Tensor) -> list[Tensor]:
        """Of a state: marks, what is far, the ring."""
        each = numbers[..., self.sums :].split([4, self.filling, self.wide, self.radius * self.wide], -1)
        return [each[0], *each[2:]]

    def with_ring(self, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Values after those of a state's ring, and which of them are ignored."""
        if not self.start or initial is None:
            return v, self.mask
        marks, _, ring = self.parts(initial)
        past = values_of(ring, marks[..., OLDEST, None], self.radius)
        past = F.pad(past, (0, 0, self.start - self.radius, 0))
        mask = v.new_zeros((v.shape[0], v.shape[2]), dtype=torch.bool) if self.mask is None else self.mask
        return torch.cat([past[..., :-1].to(v.dtype), v], 2), torch.cat([past[:, 0, :, -1] == 0, mask], 1)

    def state_after(self, q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> list[Tensor]:
        """Of the state after the last key: marks, what is far, the ring."""
        settings = {**_calls.settings(self.call.options), "kernelized": False}
        before = None
        if initial is not None:
            marks, far, ring = self.parts(initial)
            before = [marks[..., :0], marks[..., :0], marks, far, ring, marks[..., :0]]
        call = Call(q, k, v.float(), [self.rel], (None, None), settings, True, 0, self.mask, before)
        return state_after(call)[2:5]

    def launch(self, kernel: Any, programs: int, *tensors: Tensor | None, numbers: Sequence[int], strided: Sequence[Tensor | None], warps: int = WARPS,
               **constants: Any) -> None:  # fmt: skip
        of = self.of
        strides = [n for x in strided for n in ((0, 0, 0) if x is None else x.stride()[:3])]
        if programs:
            kernel[(programs,)](
                *tensors, of.ignored, of.bounds, of.decay, of.queries, of.keys, self.offset, self.base, self.blocks, of.kv_heads, *numbers, *strides,
                **constants, DECAY=of.decay is not None, IGNORED=of.ignored is not None, PACKED=of.bounds is not None,
                GROUP=of.heads // max(of.kv_heads, 1), DV=of.dv, C=self.chunk, num_warps=warps, num_stages=1,
            )  # fmt: skip

    @property
    def columns(self) -> tuple[int, int]:
        """Of a tile, and how many tiles there are."""
        columns = min(_COLUMNS, padded(self.of.dv))
        return columns, -(-self.of.dv // columns)

    def ends(self, x: Tensor, reverse: bool, w: Tensor | None = None, delta: Tensor | None = None) -> Tensor | None:
        """Sums of what is farther than the band, on the left of it or the right: of values, or of the output's gradients by their weights."""
        if self.call.is_causal and reverse == (w is None):
            return None
        columns, tiles = self.columns
        width = 1 if w is None else w.shape[3]
        place = 0 if reverse else width - 1
        found = x.new_empty((self.of.sequences, self.of.kv_heads, self.blocks + 1, self.of.dv + 1), dtype=torch.float32)
        self.launch(sum_ends, self.of.sequences * self.of.kv_heads * tiles, x, w, delta, found, numbers=(width, place), strided=(x,),
                    OF_KEYS=w is None, REVERSE=reverse, BX=columns)  # fmt: skip
        return found

    def run(
        self, x: Tensor, w: Tensor, to: Tensor, before: Tensor | None, after: Tensor | None, of_keys: bool = False, content: Tensor | None = None,
        of_content: Tensor | None = None, denominators: Tensor | None = None, levels: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The band, with what is farther on both sides."""
        columns, tiles = self.columns
        kind, precision = arithmetic(x.dtype)
        heads = self.of.kv_heads if of_keys else self.of.heads
        self.launch(
            band, self.of.sequences * heads * self.blocks * tiles, x, w, to, before, after, self.far, content, of_content, denominators, levels,
            numbers=(self.start, w.shape[3], self.radius, self.near, self.ahead), strided=(x, to, content), OF_KEYS=of_keys,
            CAUSAL=self.call.is_causal, NORMALIZE=self.normalize, EXPONENTIAL=self.of.exponential, BX=columns, TYPE=kind, PRECISION=precision,
            warps=WARPS_BACK if of_keys else WARPS,
        )  # fmt: skip

    def weigh_back(self, d_out: Tensor, delta: Tensor | None, w: Tensor) -> Tensor:
        """The gradient of weights that are not divided."""
        dw = torch.zeros_like(w)
        kind, precision = arithmetic(d_out.dtype)
        self.launch(
            weigh_back, self.of.sequences * self.of.heads * self.blocks, self.of.v, d_out, delta, dw, self.ends(self.of.v, False),
            self.ends(self.of.v, True), self.far, numbers=(self.start, w.shape[3], self.radius, self.near, self.ahead), strided=(self.of.v, d_out),
            CAUSAL=self.call.is_causal, BX=self.columns[0], TYPE=kind, PRECISION=precision,
        )  # fmt: skip
        return dw

    def of_content(self, numbers: Tensor | None) -> Tensor | None:
        """A state of content alone, of one with positions."""
        return None if numbers is None else F.pad(numbers[..., : self.sums + 4], (0, -(self.sums + 4) % 16))


def forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None = None,
    packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None, with_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, denominators, and the numbers of the final state."""
    s = _Shaw(q, k, v, parameters, call, key_padding_mask, packed, initial)
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)
    content = of_content = end = None
    if s.content:
        content, of_content, end = kernelized.forward(
            q, k, v, (), s.content, key_padding_mask, packed, s.of_content(initial), with_state, dtype=torch.float32
        )  # fmt: skip
    denominators = of_content
    if denominators is None or s.normalize:
        denominators = q.new_ones((*q.shape[:3], 2 if s.of.exponential else 1), dtype=torch.float32)
    w, levels = _weights(q, s.rel, call)
    s.run(s.of.v, w, out, s.ends(s.of.v, False), s.ends(s.of.v, True), False, content, of_content, denominators, levels)
    if not with_state:
        return out, denominators, None
    marks, far, ring = s.state_after(q, k, v, initial)
    if end is not None:
        marks = torch.cat([end[..., : s.sums + 1], marks[..., 1:]], -1)
    return out, denominators, torch.cat([F.pad(marks, (0, s.filling)), far, ring], -1)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], out: Tensor, denominators: Tensor, call: Request,
    key_padding_mask: Tensor | None = None, packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, the table of positions, and of the initial state's numbers if there were any."""
    s = _Shaw(q, k, v, parameters, call, key_padding_mask, packed, initial)
    d_out = laid_out(d_out)
    if s.content:
        gradients, d_content = kernelized.backward(
            d_out, q, k, v, (), out, denominators, s.content, key_padding_mask, packed, s.of_content(initial), s.of_content(d_final)
        )  # fmt: skip
    else:
        gradients, d_content = [x.new_zeros((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v)], None
    delta = (d_out.float() * out.float()).sum(-1) if s.normalize else None
    # Outside of the kernels' sums autograd goes from weights to queries and the table, and from rings and what is far to values.
    tensors = [x for x in (q, v, s.rel, initial) if x is not None]

    def around(q: Tensor, v: Tensor, rel: Tensor, before: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        w, levels = _weights(q, rel, call)
        state = [] if d_final is None else s.state_after(q, k, v, before)[1:]
        return (w, s.with_ring(v, before)[0], *state), levels

    found: Any = torch.func.vjp(around, *tensors, has_aux=True)
    (w, *_), back, levels = found
    factors = None
    if s.normalize:
        below = denominators[..., :1]
        nothing = below.abs() < torch.finfo(torch.float32).tiny
        factors = torch.where(nothing, 0, 1 / torch.where(nothing, 1, below))
        if s.of.exponential:
            factors = factors * (levels[:, None, None] - denominators[..., 1:]).exp()
    dw = s.weigh_back(d_out, delta, w)
    if factors is not None:
        dw, w = dw * factors, w * factors
    d_values = s.of.v.new_empty((q.shape[0], s.of.keys, s.of.kv_heads, s.of.dv)).transpose(1, 2)
    ends = s.ends(d_out, True, w, delta)
    s.run(d_out, w, d_values, s.ends(d_out, False, w, delta), ends, True)
    found = back((dw, d_values, *([] if d_final is None else s.parts(d_final)[1:])))
    gradients[0].add_(found[0])
    gradients[2].add_(found[1])
    gradients.append(found[2])
    if initial is None:
        return gradients, None
    d_initial = found[3]
    assert ends is not None
    d_initial[..., s.sums + 4 + s.filling :][..., : s.of.dv + 1] += ends[:, :, s.start // s.chunk]
    if d_content is not None:
        d_initial[..., : s.sums] += d_content[..., : s.sums]
    return gradients, d_initial
