"""Kernelized and gated attention and Fourier positions on tensors of a device: sizes, configurations and launches of `scan`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
import torch.nn.functional as F
from torch import Tensor

from ... import _calls
from ..._calls import Request
from .channels import CHUNK, within_chunks
from .scan import CARRY, scan
from .step import step
from .tiles import NOTHING

INTERPRETED = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False

#: Numbers of a state's tile. On an H100 half of the heads' columns with four warps, twice on a multiprocessor, was the fastest of
#: eight shapes for every role (docs/gpu.md).
_STATE = 128 * 64
#: Warps of a program for the pairs of a chunk.
INNER_WARPS = 4
#: Of a turn.
_QUARTER = math.pi / 2


@dataclass(frozen=True)
class Tiles:
    """How a scan is cut."""

    chunk: int
    columns: int
    warps: int
    stages: int


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def tiles(
    role: str, dtype: torch.dtype, d: int, dv: int, exponential: bool = False, hip: bool = torch.version.hip is not None, by_channel: bool = False
) -> Tiles:  # fmt: skip
    """The configuration for a role and widths."""
    of_keys = role in ("dq", "dk")
    a, x = (padded(dv), padded(d)) if of_keys else (padded(d), padded(dv))
    half = dtype is torch.bfloat16
    columns = max(16, min(x, _STATE // a, 64))
    chunk, warps = 64 if half else 32, 4 if half or a <= 64 else 8
    if by_channel:
        # The widest that spill no registers; of float32 a few in the loop's preamble.
        return Tiles(CHUNK, 32 if half else 16, 8, 1)
    if a > 128 and not half:
        # With more, ptxas gives up on registers.
        chunk, columns = 16, 16
    if exponential and of_keys:
        # A row counts from its largest number.
        columns = x
    # For values' gradients a third stage leaves two programs on a multiprocessor, which it does not for the others. AMD's have no memory for it.
    return Tiles(chunk, columns, 8 if a * columns > _STATE else warps, 1 if not half else 3 if role == "dv" and not hip else 2)


def tiles_turned(role: str, dtype: torch.dtype, wide: int, dv: int, hip: bool = torch.version.hip is not None) -> Tiles:
    """The same where features are Fourier's: shorter, because their rows are wide, and without a pipeline of loads, which lie apart."""
    t = tiles(role, dtype, wide, dv, hip=hip)
    return replace(t, chunk=max(16, t.chunk // 2) if wide > 128 else t.chunk, stages=1)


@dataclass(frozen=True)
class Settings:
    """What a call asks for, of its options."""

    feature_map: str
    normalize: bool
    decay: tuple[float, ...] | None
    scale: float = 1.0
    #: Whether a state has the keys' sums.
    keys: bool = True
    #: Whether no row sees its own token.
    strict: bool = False
    #: Fourier's `wave`, the blocks of its features, and how many of them values are weighed by: the first.
    turn: str = ""
    blocks: int = 1
    summed: int = 1

    @classmethod
    def of(cls, call: Request, d: int) -> Settings:
        given = _calls.settings(call.options)
        if call.mechanism == "gated":
            scale = given.get("scale")
            return cls("identity", False, None, d**-0.5 if scale is None else scale, False, given.get("strict", False))
        plain = cls(given.get("feature_map", "elu+1"), given.get("normalize", True), given.get("decay"))
        if call.mechanism != "fourier":
            return plain
        turn, normalizer = given.get("wave", "each"), given.get("normalizer", "one_plus")
        summed = 3 if turn == "each" and normalizer != "unrotated" else 2
        blocks = summed if normalizer != "unrotated" else 4 if turn == "pairs" else 3
        return replace(plain, normalize=normalizer != "none", turn=turn, blocks=blocks, summed=summed)

    def block(self, d: int) -> int:
        """Features of a block."""
        return d // 2 if self.turn == "pairs" else d

    @property
    def parts(self) -> int:
        """Of a tile's columns, of which each block has one."""
        return 1 << (self.blocks - 1).bit_length()

    def wide(self, d: int) -> int:
        """Columns of a tile of whole rows."""
        return max(16, self.parts << max(self.block(d) - 1, 0).bit_length())


def waves(call: Request, settings: Settings, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Fourier's frequencies ``[kv_heads, M]``, in quarters of a turn, and for queries phases, likewise, and scales of turned and of unturned
    blocks, ``[heads, 3, M]``, of what it learns."""
    a, *free = (x.double() for x in parameters)
    frequencies, normalizer = a[..., 0] / _QUARTER, _calls.settings(call.options).get("normalizer", "one_plus")
    if not free:
        return [frequencies]
    one = torch.ones_like(free[0])
    b, c, beta = [*free, one, one][:3]
    if normalizer == "dominant":
        beta = c.abs() + F.softplus(beta)
    return [frequencies, torch.stack([b / _QUARTER, c, beta], 1)]


class Launch:
    """The scans of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None,
        packed: tuple[list[int], list[int]] | None, initial: Tensor | None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = (laid_out(x) for x in (q, k, v))
        self.batch, self.heads, self.queries, self.d = q.shape
        _, self.kv_heads, self.keys, self.dv = v.shape
        self.settings = settings = Settings.of(call, self.d)
        self.causal = call.is_causal
        # Farther away nothing changes but for a decay, which `unsupported` refuses there.
        self.offset = max(-self.queries, min(call.offset, self.keys)) if call.is_causal else 0
        self.exponential = settings.feature_map == "exp"
        self.decay = None if settings.decay is None else _logarithms(settings.decay, q.device)
        self.gated = (_calls.settings(call.options).get("gate") or "none") != "none"
        self.by_channel = self.gated and parameters[-1].ndim == 4
        self.learned = parameters[: len(parameters) - self.gated]
        if self.gated:
            # Of each token, in base 2.
            self.decay = (parameters[-1].float() * math.log2(math.e)).contiguous()
            if self.by_channel:
                ignored = torch.zeros_like(self.decay[:, :1, :, :1], dtype=torch.bool) if key_padding_mask is None else key_padding_mask[:, None, :, None]
                self.decay = self.decay.clamp(min=NOTHING.value).masked_fill(ignored, 0)
        #: Features of the sums and of the keys' sums.
        self.features = settings.summed * settings.block(self.d)
        self.divisors = 0 if not settings.keys else self.d if settings.blocks > settings.summed else self.features
        self.waves: list[Tensor | None] = [None, None]
        self.before_call = None
        if settings.turn:
            tables = [x.contiguous() for x in waves(call, settings, self.learned)]
            self.waves = [tables[0], tables[1] if len(tables) > 1 else None]
            if initial is not None:
                marks = initial[:, 0, self.features * self.dv + self.divisors :]
                self.before_call = (marks[:, 2].double() + CARRY * marks[:, 3].double()).contiguous()
        self.ignored = self.lengths = None
        if key_padding_mask is not None:
            self.ignored = key_padding_mask.contiguous().view(torch.uint8)
            place = torch.arange(1, self.keys + 1, device=q.device)
            self.lengths = (~key_padding_mask * place).amax(1) if self.keys else place.new_zeros(self.batch)
        self.sequences, longest = self.batch, max(self.queries + self.offset, self.keys)
        self.bounds = None
        if packed is not None:
            queries, keys = packed
            self.bounds = torch.tensor([queries, keys], dtype=torch.int64).T.contiguous().to(q.device, non_blocking=True)
            self.sequences = len(queries) - 1
            longest = max((max(b - a + self.offset, d - c) for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])), default=0)
        self.longest = longest
        #: Numbers of a head's sums, and of its state: sums, keys' sums, marks, filled up to whole cache lines as on the CPU, gates.
        self.sums = self.features * self.dv + self.divisors
        gates = self.d if self.by_channel else int(self.gated)
        self.record = -(-(self.sums + (4 if settings.keys else 0) + gates) // 16) * 16
        self.gates = slice(self.record - 1, None) if settings.keys else slice(self.sums, self.sums + gates)

    def highest(self, initial: Tensor | None) -> Tensor:
        """The exponent of the final state under ``exp``: the largest number of all keys, or what stands for none."""
        k = self.k.float()
        if self.ignored is not None:
            k = k.masked_fill(self.ignored.bool()[:, None, :, None], -torch.inf)
        own = k.flatten(2).amax(2) if self.keys else k.new_full(k.shape[:2], -torch.inf)
        return (own if initial is None else torch.maximum(own, initial)).clamp(min=NOTHING.value)

    def segments(self, chunk: int, units: int) -> int:
        """Pieces of a sequence that run side by side, where heads are too few for the device."""
        if not self.causal:
            wanted = -(-_programs(self.q.device) // max(units, 1))
        else:
            # A second pass over keys and values: only if it fills a device that is more than half empty.
            wanted = _programs(self.q.device) // max(units, 1)
        # At least 4 chunks each, because a segment begins by adding up the states of those before.
        return max(1, min(wanted, self.longest // (4 * chunk), 32))

    def scan(
        self, role: str, to: Tensor | None, denominators: Tensor | None = None, delta: Tensor | None = None,
        out: Tensor | None = None, d_out: Tensor | None = None, initial: Tensor | None = None,
        initial_exponent: Tensor | None = None, end: Tensor | None = None, end_exponent: Tensor | None = None,
        row_sums: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """One role. Gives sums for Fourier's gradients, ``[sequences, heads, segments, 3, blocks, M]``, where there are some: of the angles',
        of the same times positions, and of the scales'."""
        t = self.tiles(role)
        reverse, of_keys = role in ("dk", "dv"), role in ("dq", "dk")
        rows, count = self.kv_heads if reverse else self.heads, self.tiles_of(role)
        segments = self.segments(t.chunk, self.sequences * rows * count)
        records = of_waves = None
        if segments > 1 or not self.causal:
            records = self._sums("dv" if reverse else "out", segments, t.chunk, denominators, delta, d_out)
        if of_keys and self.settings.turn:
            of_waves = self.q.new_zeros((self.sequences, rows, segments, 3, self.settings.blocks, self.settings.block(self.d)), dtype=torch.float64)
        self._launch(role, False, t, segments, rows * count, records, to, denominators, delta, out, d_out,
                     initial, initial_exponent, end, end_exponent, row_sums, self.inner(role, d_out), of_waves)  # fmt: skip
        return of_waves

    def inner(self, role: str, d_out: Tensor | None) -> Tensor | None:
        """What pairs within the chunks of a scan give, where each channel has a gate."""
        if not self.by_channel:
            return None
        if role == "dv":
            # The same pairs.
            role = "out"
        heads, chunks = self.kv_heads if role == "dk" else self.heads, -(-self.longest // CHUNK)
        to = self.q.new_empty((self.batch, heads, self.keys, CHUNK if role == "out" else self.d), dtype=torch.float32)
        if self.sequences * heads * chunks:
            within_chunks[(self.sequences * heads * chunks,)](
                self.q, self.k, self.v, d_out, to, self.decay, self.ignored, self.bounds, self.keys, self.kv_heads, chunks,
                *[x for tensor in (self.q, self.k, self.v, d_out) for x in _strides(tensor)],
                ROLE=role, STRICT=self.settings.strict, IGNORED=self.ignored is not None, PACKED=self.bounds is not None,
                GROUP=self.heads // self.kv_heads, D=self.d, DV=self.dv, BD=min(padded(self.d), 64), BV=min(padded(self.dv), 64), C=CHUNK,
                PRECISION=arithmetic(torch.float32)[1], num_warps=INNER_WARPS, num_stages=1,
            )  # fmt: skip
        return to

    def tiles(self, role: str) -> Tiles:
        if self.settings.turn:
            return tiles_turned(role, self.q.dtype, self.settings.wide(self.d), self.dv)
        return tiles(role, self.q.dtype, self.d, self.dv, self.exponential, by_channel=self.by_channel)

    def tiles_of(self, role: str) -> int:
        """How many tiles have all columns of a role."""
        columns = self.tiles(role).columns
        if role in ("dq", "dk"):
            return -(-self.settings.block(self.d) // (columns // self.settings.parts))
        return -(-self.dv // columns)

    def _sums(
        self, role: str, segments: int, chunk: int, denominators: Tensor | None, delta: Tensor | None, d_out: Tensor | None
    ) -> Tensor:
        """The state of each segment."""
        records = torch.empty((self.sequences, segments, self.kv_heads, self.record), dtype=torch.float32, device=self.q.device)
        own = self.tiles(role)
        t = Tiles(chunk, own.columns, own.warps, own.stages)
        programs = self.kv_heads * self.tiles_of(role)
        self._launch(role, True, t, segments, programs, records, None, denominators, delta, None, d_out, None, None, None, None, None, None, None)
        return records

    def _launch(
        self, role: str, sums: bool, t: Tiles, segments: int, programs: int, records: Tensor | None, to: Tensor | None,
        denominators: Tensor | None, delta: Tensor | None, out: Tensor | None, d_out: Tensor | None, initial: Tensor | None,
        initial_exponent: Tensor | None, end: Tensor | None, end_exponent: Tensor | None, row_sums: Tensor | None, inner: Tensor | None, of_waves: Tensor | None,
    ) -> None:  # fmt: skip
        grid = self.sequences * segments * programs
        if grid == 0:
            return
        settings = self.settings
        kind, precision = arithmetic(self.q.dtype)
        strides = [x for tensor in (self.q, self.k, self.v, out, d_out, to) for x in _strides(tensor)]
        scan[(grid,)](
            self.q, self.k, self.v, out, d_out, denominators, delta, to,
            records, initial, initial_exponent, end, end_exponent,
            self.decay, self.ignored, self.lengths, self.bounds, row_sums, inner, *self.waves, self.before_call, of_waves,
            self.queries, self.keys, self.offset, min(self.offset, 0) // t.chunk, self.kv_heads, segments, self.record, settings.scale,
            *strides,
            ROLE=role, SUMS=sums, CAUSAL=self.causal, MAP=settings.feature_map, TURN=settings.turn, BLOCKS=settings.blocks,
            SUMMED=settings.summed, KEYS=settings.keys, STRICT=settings.strict, NORMALIZE=settings.normalize,
            DECAY=self.decay is not None, GATED=self.gated, CHANNEL=self.by_channel, INITIAL=initial is not None, END=end is not None, IGNORED=self.ignored is not None,
            PACKED=self.bounds is not None, GROUP=self.heads // max(self.kv_heads, 1), D=self.d, DV=self.dv,
            BD=settings.wide(self.d), BV=padded(self.dv), BX=t.columns, C=t.chunk, TYPE=kind, PRECISION=precision,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip

    def row_sums(self, role: str) -> Tensor | None:
        """Where a scan puts features times their gradients: of each, or sums over the columns of its tiles. Those of rows that are divided
        are 0."""
        if not self.gated or (role == "dq" and self.settings.normalize):
            return None
        rows = (self.batch, self.heads, self.queries) if role == "dq" else (self.batch, self.kv_heads, self.keys)
        return self.q.new_zeros((*rows, self.d if self.by_channel else self.tiles_of(role)), dtype=torch.float32)

    def of_gates(
        self, of_queries: Tensor | None, of_keys: Tensor, initial: Tensor | None, d_initial: Tensor | None, d_final: Tensor | None,
        packed: tuple[list[int], list[int]] | None,
    ) -> Tensor:  # fmt: skip
        """The gradient of the gates: a row grows with all up to its own and a key shrinks with them, so it is the sum of what follows, or
        what the whole begins with less the sum of what comes before."""
        grown = -self._of_each_gate(of_keys)
        if of_queries is not None:
            grown = grown + self._of_each_gate(of_queries).unflatten(1, (self.kv_heads, -1)).sum(2)
        # What each gate decays: all, or of a channel its row.
        before = grown.new_zeros(grown.shape[:3])
        if initial is not None and d_initial is not None:
            before = (initial * d_initial)[..., : self.sums].unflatten(-1, (before.shape[2], -1)).sum(-1)
        if d_final is None:
            bounds = [0, self.keys] if packed is None else packed[1]
            # Each sequence of a packed call by itself.
            parts = [_following(grown[..., a:b], before) for a, b in zip(bounds, bounds[1:])]
            d_g = torch.cat(parts, -1) if parts else grown
        else:
            d_g = before[..., None] - (grown.cumsum(-1) - grown) + d_final[..., self.gates, None]
            if d_initial is not None:
                d_initial[..., self.gates] = d_final[..., self.gates]
        d_g = d_g.mT if self.by_channel else d_g[:, :, 0]
        # An ignored token has no gate.
        ignored = None if self.ignored is None else self.ignored.bool()[:, None]
        return d_g if ignored is None else d_g.masked_fill(ignored[..., None] if self.by_channel else ignored, 0)

    def _of_each_gate(self, row_sums: Tensor) -> Tensor:
        """Of a scan's, ``[batch, heads, gates, tokens]``."""
        return row_sums.mT if self.by_channel else row_sums.sum(-1)[:, :, None]

    def of_waves(self, call: Request, of_queries: Tensor, of_keys: Tensor) -> list[Tensor]:
        """Gradients of Fourier's parameters, from sums that the scans leave of a sequence, head, segment and feature."""
        of_queries, of_keys = of_queries.sum((0, 2)), of_keys.sum((0, 2))
        turned = of_queries[:, :, :2].sum(2)
        d_a = of_keys[:, 1, :2].sum(1) + turned[:, 1].unflatten(0, (self.kv_heads, -1)).sum(1)
        # Inside of an operator autograd records nothing; this does.
        found: Any = torch.func.vjp(lambda *learned: tuple(waves(call, self.settings, learned)), *self.learned)
        tables, back = found
        of_tables = [_QUARTER * d_a]
        if len(tables) > 1:
            unturned = of_queries[:, 2, 2] if self.settings.blocks > 2 else torch.zeros_like(turned[:, 0])
            of_tables.append(torch.stack([_QUARTER * turned[:, 0], turned[:, 2], unturned], 1))
        return [x.contiguous() for x in back(tuple(of_tables))]

    def step(self, out: Tensor, denominators: Tensor, initial: Tensor | None, end: Tensor) -> None:
        """One token: output, denominators and the state after it."""
        # 16 KB of a state each: programs enough that few heads fill a device.
        columns = max(16, min(padded(self.dv), 4096 // padded(self.d)))
        grid = self.batch * self.kv_heads * -(-self.dv // columns)
        if grid:
            step[(grid,)](
                self.q, self.k, self.v, out, denominators, initial, end, self.decay, self.kv_heads, self.record,
                *[stride for x in (self.q, self.k, self.v, out) for stride in x.stride()[:2]],
                MAP=self.settings.feature_map, NORMALIZE=self.settings.normalize, DECAY=self.decay is not None,
                INITIAL=initial is not None, GROUP=self.heads // max(self.kv_heads, 1), D=self.d, DV=self.dv,
                BD=padded(self.d), BX=columns, num_warps=4,
            )  # fmt: skip


def _following(x: Tensor, whole: Tensor) -> Tensor:
    """Of each number the sum from it on. What the sum of all lacks of the ``whole``, which is rounding, is taken from them by their sizes."""
    sums, sizes = (y.flip(-1).cumsum(-1).flip(-1) for y in (x, x.abs()))
    lacking = whole[..., None] - sums[..., :1]
    return sums + lacking * (sizes / sizes[..., :1].clamp(min=torch.finfo(sizes.dtype).tiny))


def arithmetic(dtype: torch.dtype) -> tuple[Any, str]:
    """The type of products' factors, and how those of float32 are taken. float16 goes by TF32, whose mantissa is as long: sums
    over a long sequence exceed its largest number."""
    if INTERPRETED:
        # Products of bfloat16 are wrong there.
        return tl.float32, "ieee"
    if dtype is torch.bfloat16:
        return tl.bfloat16, "tf32"
    if torch.version.hip:
        return tl.float32, "ieee"
    return tl.float32, "tf32" if dtype is torch.float16 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@functools.lru_cache(maxsize=64)
def _logarithms(decay: tuple[float, ...], device: torch.device) -> Tensor:
    """In base 2, copied to a device once: a graph of a device's work cannot hold such a copy."""
    return torch.tensor([math.log2(gamma) for gamma in decay], dtype=torch.float32, device=device)


def laid_out(x: Tensor) -> Tensor:
    """With neighbours in the last axis, and the rows of a chunk within 2**31 numbers of each other. Rows begin at multiples of 16 numbers if
    their width is one: kernels of others were wrong on a device (see `unsupported`)."""
    aligned = x.shape[3] % 16 or not (x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:3]))
    return x if aligned and x.stride(3) == 1 and 0 <= x.stride(2) < 1 << 23 else x.contiguous()


def _strides(x: Tensor | None) -> Sequence[int]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _programs(device: torch.device) -> int:
    """Programs that run at once: two on each multiprocessor, for their registers."""
    return 8 if device.type == "cpu" else 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _exponents(numbers: Tensor, launch: Launch) -> Tensor:
    """The exponents that a state's numbers are relative to."""
    return numbers[:, :, launch.sums].contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, key_padding_mask: Tensor | None = None,
    packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None, with_state: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Output, as queries or of another type, denominators, and the numbers of the final state."""
    launch = Launch(q, k, v, parameters, call, key_padding_mask, packed, initial)
    out = q.new_empty((launch.batch, launch.queries, launch.heads, launch.dv), dtype=dtype).transpose(1, 2)
    each = 2 if launch.exponential else 1
    denominators = torch.empty((*q.shape[:3], each), dtype=torch.float32, device=q.device)
    end = first = last = None
    if with_state:
        end = torch.zeros((launch.batch, launch.kv_heads, launch.record), dtype=torch.float32, device=q.device)
    if initial is not None:
        initial = initial.contiguous()
    plain = launch.settings.keys and not parameters and key_padding_mask is None
    if plain and end is not None and launch.queries == launch.keys == 1 and launch.offset == 0:
        launch.step(out, denominators, initial, end)
        return out, denominators, end
    if launch.exponential:
        first = None if initial is None else _exponents(initial, launch)
        last = None if end is None else launch.highest(first)
    launch.scan("out", out, denominators, initial=initial, initial_exponent=first, end=end, end_exponent=last)
    return out, denominators, end


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], out: Tensor, denominators: Tensor, call: Request,
    key_padding_mask: Tensor | None = None, packed: tuple[list[int], list[int]] | None = None, initial: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, laid out token by token, of the parameters, and of the initial state's numbers if there were any."""
    launch = Launch(q, k, v, parameters, call, key_padding_mask, packed, initial)
    d_out, out = laid_out(d_out), laid_out(out)
    dq, dk, dv = (x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))
    delta = None
    if launch.settings.normalize:
        delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    d_initial = first = last = None
    if initial is not None:
        initial = initial.contiguous()
        d_initial = torch.zeros_like(initial)
        first = _exponents(initial, launch) if launch.exponential else None
    if d_final is not None:
        d_final = d_final.contiguous()
        if launch.exponential:
            last = -launch.highest(first)
    of_queries, of_keys = launch.row_sums("dq"), launch.row_sums("dk")
    waves_q = launch.scan("dq", dq, denominators, delta, out, d_out, initial, first, row_sums=of_queries)
    waves_k = launch.scan("dk", dk, denominators, delta, out, d_out, d_final, last, row_sums=of_keys)
    launch.scan("dv", dv, denominators, delta, out, d_out, d_final, last, d_initial, first)
    gradients = [dq, dk, dv]
    if waves_q is not None and waves_k is not None:
        gradients += launch.of_waves(call, waves_q, waves_k)
    if of_keys is not None:
        gradients.append(launch.of_gates(of_queries, of_keys, initial, d_initial, d_final, packed).to(parameters[-1].dtype))
    return gradients, d_initial
