"""One list of cases for all devices, and what holds a device to the CPU's kernels in doubles by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import ops as _ops
from . import _dispatch
from ._states import TensorState

#: Largest relative errors by type, of outputs and of gradients. bfloat16 has 8 bits, float16 11: of rounding what comes in and goes out.
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-12, torch.float16: 3e-3, torch.bfloat16: 2e-2}


#: Without the types of its overloads: what is given depends on the case.
ops: Any = _ops


def _aft_conv(q: Tensor, k: Tensor, v: Tensor, w: Tensor, *scale: Tensor, **options: Any) -> Any:
    return ops.aft_conv(q, k[..., 0], v, w, **dict(zip(("gamma", "beta"), scale)), **options)


def _streams(options: dict[str, Any]) -> bool:
    return options.get("initial_state") is not None or bool(options.get("output_final_state"))


def _aft_local(q: Tensor, k: Tensor, v: Tensor, w: Tensor, **options: Any) -> Any:
    return ops.aft_local(q, k, v, w if _streams(options) else w[: q.shape[2]], **options)


def _aft_full(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, **options: Any) -> Any:
    if not _streams(options):
        # Tables of positions are of whole sequences.
        first, last = biases[0][: q.shape[2]], biases[-1][: k.shape[2]]
        biases = (first[:, : k.shape[2]],) if len(biases) == 1 else (first, last)
    return ops.aft_full(q, k, v, **dict(zip(("w",) if len(biases) == 1 else ("u", "z"), biases)), **options)


def _fourier(q: Tensor, k: Tensor, v: Tensor, a: Tensor, *each: Tensor, **options: Any) -> Any:
    if a.shape[2] > 1:
        options |= {"q_positions": each[-2], "k_positions": each[-1]}
    return ops.fourier_attention(q, k, v, a, **dict(zip(("b", "c", "beta"), each[:-2] if a.shape[2] > 1 else each)), **options)


def _toeplitz(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> Any:
    if "kind" not in options and not _streams(options):
        # Of a centred table, the distances of a call.
        first = bias.shape[1] // 2 + 1 - q.shape[2] - options["offset"]
        bias = bias[:, first : first + q.shape[2] + k.shape[2] - 1]
    return ops.toeplitz_attention(q, k, v, bias, **options)


def _depthwise_convolution(q: Tensor, k: Tensor, v: Tensor, taps: Tensor, bias: Tensor, **options: Any) -> Any:
    """Between gates, so that queries and keys have a part in it."""
    del options["is_causal"], options["offset"]
    found = ops.depthwise_convolution(k * v, taps, bias, silu=True, **options)
    return (q * found[0], found[1]) if isinstance(found, tuple) else q * found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kernelized": ops.kernelized_attention, "shaw": ops.shaw_attention, "fourier": _fourier, "toeplitz": _toeplitz,
    "softmax": ops.softmax_attention, "short-convolution": ops.short_convolution, "aft-simple": ops.aft_simple,
    "aft-local": _aft_local, "aft-conv": _aft_conv, "aft-full": _aft_full, "gated": ops.gated_attention, "delta": ops.delta_attention,
    "depthwise-convolution": _depthwise_convolution,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call, with its sizes and what is special about its inputs."""

    name: str
    mechanism: str = "kernelized"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 70
    keys: int = 70
    width: int = 16
    value_width: int = 16
    is_causal: bool = True
    offset: int = 0
    padding: str = ""
    packed: tuple[Sequence[int], Sequence[int]] | None = None
    #: What happens to queries, keys and values before the call.
    inputs: str = ""
    #: Pieces that Triton's kernels cut a sequence into.
    segments: int = 1
    #: Shapes of what the mechanism learns, and of gates.
    learned: tuple[tuple[int, ...], ...] = ()
    #: Whether tokens bring decays beside what is learned, to a mechanism that need not have them.
    decays: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.mechanism}: {self.name}"

    @property
    def streams(self) -> bool:
        """Whether the call may begin with a state and leave one."""
        cut = self.packed is not None or self.offset or self.queries != self.keys or not self.is_causal
        # Positions of one call have no others before and after.
        return not cut and self.name != "in the plane"

    def of_token(self, learned: Sequence[Tensor], brought: Sequence[Tensor]) -> list[Tensor]:
        """What is learned, with what other tokens ``brought`` in the place of what those of the call did."""
        if self.mechanism in ("gated", "delta"):
            return list(brought)
        return [*learned[:-1], brought[-1]] if self.decays else list(learned)

    def tensors(self, dtype: torch.dtype = torch.float32, tokens: int | None = None) -> list[Tensor]:
        """Queries, keys, values, the gradient of the output, and what the mechanism learns; or of so many tokens before or after."""
        generator = torch.Generator().manual_seed(self.queries + self.keys + (tokens or 0))
        queries, keys = (self.queries, self.keys) if tokens is None else (tokens, tokens)
        shapes = [(self.heads, queries, self.width), (self.kv_heads, keys, 1 if self.mechanism == "aft-conv" else self.width),
                  (self.kv_heads, keys, self.value_width), (self.heads, queries, self.value_width)]  # fmt: skip
        q, k, v, d_out = (torch.randn(self.batch, *shape, generator=generator) for shape in shapes)
        if self.options.get("feature_map") in ("relu", "identity"):
            # Sums of features of both signs may be close to 0, where no arithmetic has digits.
            q, k = q.abs() + 0.1, k.abs() + 0.1
        if self.inputs == "far":
            k = k + 150 * torch.arange(keys)[:, None].div(40, rounding_mode="floor")
        if self.inputs == "falls":
            k = k + 150 * (torch.arange(keys) < 40)[:, None]
        if self.inputs == "token major":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if self.inputs == "strided":
            v = torch.cat([v, v], -1)[..., ::2]
        if self.mechanism in ("gated", "delta"):
            token = (self.batch, self.kv_heads, keys)
            gates = [-2 * torch.rand(*token, *shape, generator=generator) ** 3 for shape in self.learned]
            if self.inputs == "all 0":
                gates[0].zero_()
            if self.inputs == "strong and none":
                # Of channels one that forgets at once, one that never does, and others that forget now and then.
                gates[0][:] = -50.0 * (torch.arange(keys) % 5 == 1)[:, None]
                gates[0][..., 0], gates[0][..., 1] = -50.0, 0.0
            learned = [torch.rand(token, generator=generator), *gates] if self.mechanism == "delta" else gates
            if self.inputs == "repeats":
                # Reflections of nearly one direction, whose systems have large powers.
                k, learned[0] = k[:, :, :1] + 0.01 * k, torch.full(token, 2.0)
        else:
            learned = [0.5 * torch.randn(shape, generator=generator) for shape in self.learned]
        if self.decays:
            # Where exponents fall, far enough that later rows no longer see the large ones.
            learned.append(-(10 if self.inputs == "falls" else 2) * torch.rand(self.batch, self.kv_heads, keys, generator=generator) ** 3)
        return [x.to(dtype) for x in (q, k, v, d_out, *learned)]

    def mask(self) -> Tensor | None:
        """Which keys are ignored."""
        if not self.padding:
            return None
        ignored = torch.zeros(self.batch, self.keys, dtype=torch.bool)
        if self.padding == "some":
            ignored[:] = torch.rand(self.batch, self.keys, generator=torch.Generator().manual_seed(1)) < 0.4
        if self.padding in ("ends", "all"):
            ignored[0, -9:] = True
            ignored[-1, :7] = True
        if self.padding == "all":
            ignored[0] = True
        return ignored

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, **more: Any) -> Any:
        """The call on these tensors."""
        mask = self.mask()
        options: dict[str, Any] = {**self.options, "is_causal": self.is_causal, "offset": self.offset}
        if mask is not None:
            options["key_padding_mask"] = mask.to(q.device)
        if self.packed is not None:
            options["cu_seqlens"] = self.packed
        if self.decays:
            options["log_decay"], learned = learned[-1], learned[:-1]
        return FUNCTIONS[self.mechanism](q, k, v, *learned, **{**options, **more})


def _form(name: str, *learned: tuple[int, ...], **options: Any) -> Case:
    mechanism, _, form = name.partition(": ")
    # Interpreted, Fourier's kernels take long: a chunk and a part of one.
    tokens = 40 if mechanism == "fourier" else 70
    return Case(form or "plain", mechanism, queries=tokens, keys=tokens, learned=learned, options=options)


_FORMS = [
    _form("kernelized: taylor2", feature_map="taylor2"),
    _form("kernelized: dpfp", feature_map="dpfp:2"),
    _form("kernelized: prf", feature_map="prf:8"),
    _form("shaw: radius 5", (2, 11, 16)),
    _form("shaw: exp", (2, 11, 16), feature_map="exp"),
    _form("shaw: radius 0, shared", (1, 16)),
    _form("shaw: positions alone", (2, 7, 16), kernelized=False),
    _form("shaw: radius 90", (2, 181, 16)),
    _form("fourier", (1, 16, 1), (2, 16)),
    _form("fourier: exp", (1, 16, 1), (2, 16), feature_map="exp"),
    _form("fourier: dominant", (1, 16, 1), (2, 16), (2, 16), (2, 16), normalizer="dominant"),
    _form("fourier: unrotated", (1, 16, 1), (2, 16), (2, 16), normalizer="unrotated", feature_map="exp"),
    _form("fourier: rotary", (1, 8, 1), wave="pairs", normalizer="unrotated"),
    _form("fourier: undivided", (1, 16, 1), (2, 16), (2, 16), (2, 16), normalizer="none", feature_map="exp"),
    _form("toeplitz: clipped", (2, 11), kind="clipped"),
    _form("toeplitz: clipped, exp", (2, 11), kind="clipped", feature_map="exp"),
    _form("toeplitz: clipped, undivided", (2, 11), kind="clipped", normalize=False, bidirectional=False),
    _form("toeplitz: buckets", (2, 8), kind="buckets", max_distance=20),
    _form("toeplitz: buckets of one side", (2, 8), kind="buckets", max_distance=20, bidirectional=False),
    _form("toeplitz: image", (2, 25, 15), kind="grid"),
    _form("toeplitz: table", (2, 179)),
    _form("short-convolution", (1, 4, 16)),
    _form("short-convolution: one tap, without SiLU", (1, 1, 16), silu=False),
    _form("aft-simple"),
    _form("aft-local", (90, 9)),
    _form("aft-conv", (2, 7)),
    _form("aft-conv: normalized", (2, 6), (2,), (2,)),
    _form("aft-full", (90, 90)),
    _form("aft-full: two factors", (90, 3), (90, 3)),
    _form("softmax", capacity=90),
    _form("softmax: window", window=9),
]
_GATE = _form("gated: a gate a head", ())
#: Of calls with as many queries as keys, which see none after themselves.
_CAUSAL = [
    _form("depthwise-convolution", (1, 4, 16), (1, 16)),
    _form("gated: no gate"), _GATE, _form("gated: a gate a channel", (16,), scale=0.5),
    _form("delta: no gate"), _form("delta: a gate a head", ()), _form("delta: a gate a channel", (16,)),
]  # fmt: skip
#: The same of mechanisms that need no gates.
_DECAYS = [
    replace(case, decays=True, name=f"{case.name}, a gate a head") for case in (
        _form("kernelized"), _form("kernelized: exp", feature_map="exp"), _form("kernelized: undivided", normalize=False),
        _form("kernelized: taylor2", feature_map="taylor2"), _form("shaw: radius 5", (2, 11, 16)),
        _form("shaw: exp", (2, 11, 16), feature_map="exp"), _form("shaw: radius 1", (2, 3, 16)),
        _form("shaw: radius 90", (2, 181, 16)), _form("shaw: positions alone", (2, 7, 16), kernelized=False),
        _form("fourier", (1, 16, 1), (2, 16)),
        _form("fourier: rotary", (1, 8, 1), wave="pairs", normalizer="unrotated"),
        _form("fourier: undivided", (1, 16, 1), (2, 16), (2, 16), (2, 16), normalizer="none", feature_map="exp"),
    )
]  # fmt: skip
_PACKED = ([0, 5, 5, 40, 70], [0, 9, 9, 30, 66])


def _varied(case: Case) -> list[Case]:
    """A form under each mask."""
    def way(name: str, **more: Any) -> Case:
        return replace(case, name=name if case.name == "plain" else f"{case.name}, {name}", **more)

    ways = [case, way("padded", batch=2, padding="some"), way("padded at the ends", batch=2, padding="all")]
    ways.append(way("one token", queries=1, keys=1))
    if case in _CAUSAL or case.decays:
        return [*ways, way("packed", packed=(_PACKED[0],) * 2, queries=70, keys=70)]
    if case.mechanism not in ("aft-full",):
        ways.append(way("packed", packed=_PACKED, queries=70, keys=66))
    if case.options.get("kind") != "grid":
        ways += [way("offset 3", offset=3, keys=60), way("offset -5", offset=-5)]
    ways += [way("padded, both directions", batch=2, padding="all", is_causal=False)]
    return [*ways, way("both directions", is_causal=False, queries=50)]


def _kernelized() -> list[Case]:
    """What Triton's kernels have paths for: sizes around a chunk, feature maps, decays, masks, pieces."""
    def of(name: str, feature_map: str = "elu+1", decay: Sequence[float] | None = None, normalize: bool = True, **more: Any) -> Case:
        return Case(name, options={"feature_map": feature_map, "decay": decay, "normalize": normalize}, **more)

    return [
        of("plain"),
        *(of(f"{n} tokens", queries=n, keys=n) for n in (0, 1, 31, 32, 33, 63, 64, 65, 131)),
        of("a batch", batch=2, heads=4, kv_heads=2, queries=40, keys=40),
        of("no power of two", width=20, value_width=12),
        of("narrow", width=1, value_width=3),
        of("heads of 128", queries=150, keys=150, heads=1, width=128, value_width=128),
        of("grouped heads of 64", queries=100, keys=100, heads=4, kv_heads=2, width=64, value_width=96, decay=(0.95, 0.8)),
        of("heads of 32 and 96, decay", queries=100, keys=100, width=32, value_width=96, decay=(0.95,)),
        of("exp, heads of 128", queries=70, heads=1, width=128, value_width=40, feature_map="exp"),
        of("wide", queries=40, keys=40, heads=1, width=130, value_width=200),
        *(of(f"{name}, decay", name, (0.95,)) for name in ("elu+1", "relu", "softplus", "exp", "identity")),
        *(of(f"{name}, undivided", name, normalize=False) for name in ("elu+1", "softplus", "exp", "identity")),
        *(of(f"both directions, {name}", name, is_causal=False, queries=50) for name in ("elu+1", "exp")),
        *(of(f"offset {o}, {name}", name, offset=o, keys=60) for o in (3, -5, 20, -80, 200, 2**40) for name in ("elu+1", "exp")),
        of("offset and decay", offset=13, keys=60, decay=(0.9,)),
        *(of(f"padding, {p}, {name}, {'causal' if c else 'both'}", name, batch=2, padding=p, is_causal=c)
          for p in ("some", "ends", "all") for name in ("elu+1", "exp") for c in (True, False)),
        of("padding and decay", batch=2, padding="ends", decay=(0.9,)),
        *(of(f"packed, {name}, {'causal' if c else 'both'}", name, packed=_PACKED, keys=66, is_causal=c)
          for name in ("elu+1", "exp") for c in (True, False)),
        of("packed, one sequence", packed=([0, 70], [0, 70])),
        *(of(f"segments, {name}, decay {d}", name, d, queries=140, keys=140, segments=3)
          for name in ("elu+1", "exp") for d in (None, (0.9,))),
        of("segments, both directions", is_causal=False, queries=140, keys=130, segments=3),
        of("exponents that rise by 150", "exp", inputs="far", queries=100, keys=100),
        of("exponents that rise by 150, segments", "exp", inputs="far", queries=140, keys=140, segments=3),
        of("token major", inputs="token major", heads=3, kv_heads=3),
        of("strided", inputs="strided"),
    ]  # fmt: skip


CASES = [
    *_kernelized(),
    *(case for form in (*_FORMS, *_CAUSAL, *_DECAYS) for case in _varied(form)),
    replace(_form("shaw: 300 tokens", (2, 11, 16)), queries=300, keys=300),
    replace(_form("shaw: 300 tokens, offset 160", (2, 11, 16)), queries=140, keys=300, offset=160),
    replace(_form("shaw: grouped heads, decay", (4, 81, 20), decay=[0.95, 0.8]), batch=2, heads=4, kv_heads=2, width=20, value_width=70),
    _form("shaw: decay", (2, 11, 16), decay=[0.9]), _form("fourier: decay", (1, 16, 1), (2, 16), decay=[0.9]),
    replace(_GATE, name="a gate a head, segments", queries=140, keys=140, segments=3),
    replace(_GATE, name="a gate a head, grouped heads of 64", batch=2, heads=4, kv_heads=2, queries=100, keys=100, width=64,
            value_width=48),
    replace(_GATE, name="a gate a head, heads of 16 and 80", queries=100, keys=100, value_width=80),
    *(replace(_form(f"{name}: a gate a channel, {inputs}", (16,)), inputs=inputs) for name in ("gated", "delta") for inputs in ("strong and none", "all 0")),
    *(replace(_form(f"{name}: a gate a channel, {n} tokens", (20,)), width=20, value_width=40, queries=n, keys=n, segments=s)
      for name in ("gated", "delta") for n, s in ((15, 1), (16, 1), (17, 1), (80, 3))),
    *(replace(_form(f"{name}: a gate a channel, grouped heads of 64", (64,)), heads=4, kv_heads=2, width=64, value_width=48, queries=40, keys=40)
      for name in ("gated", "delta")),
    replace(_form("delta: a gate a channel, keys that repeat", (16,)), inputs="repeats"),
    *(replace(_form(f"{name}: {n} tokens, keys that rise by 150", *learned), inputs="far", queries=n, keys=n)
      for name, learned in (("aft-simple", ()), ("aft-conv", ((2, 7),))) for n in (16, 17, 257)),
    replace(_form("aft-local: 61 distances, a head of 40, keys that rise by 150", (90, 61)), inputs="far", heads=1, width=40, value_width=40),
    _form("gated: keys of unit length", (), l2_norm=True),
    replace(_form("delta: keys that repeat", ()), inputs="repeats", queries=100, keys=100),
    replace(_form("delta: heads of 64, segments", ()), queries=100, keys=100, width=64, value_width=40, segments=3),
    _form("fourier: in the plane", (1, 16, 2), (2, 16), (1, 40, 2), (1, 40, 2)),
]  # fmt: skip


def error(got: Tensor, expected: Tensor) -> float:
    """Relative to the size of what was expected, or of numbers around 1 if that is less: what cancels has no digits. Infinite where
    a number is missing."""
    got, expected = (x.detach().double().cpu() for x in (got, expected))
    if got.shape != expected.shape or not got.isfinite().all():
        return float("inf")
    return float((got - expected).norm() / max(float(expected.norm()), 0.1 * max(got.numel(), 1) ** 0.5))


def _earlier(case: Case) -> TensorState | None:
    """The state after 7 tokens, by the CPU's kernels."""
    if not case.streams:
        return None
    q, k, v, _, *brought = case.tensors(torch.float32, 7)
    learned = case.of_token(case.tensors()[4:], brought)
    with torch.no_grad():
        return TensorState.of(case.attend(q, k, v, *learned, key_padding_mask=None, output_final_state=True)[1])


def results(
    case: Case, device: str | torch.device, dtype: torch.dtype, first: TensorState | None, drawn: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output and all gradients, of tensors that were ``drawn`` in another type or not; where there is a state after ``first``
    tokens, also those of the call after it, and of a token after that, with the gradient of the first state's numbers."""
    drawn = drawn or dtype
    q, k, v, d_out, *learned = (x.to(device, dtype) for x in case.tensors(drawn))
    inputs = [x.requires_grad_() for x in (q, k, v, *learned)]
    out = case.attend(*inputs)
    loss, found = (out * d_out).sum(), {"out": out}
    names = ["dq", "dk", "dv", *(f"d of parameter {n}" for n in range(len(learned)))]
    if first is not None:
        numbers = first.numbers.to(device, torch.promote_types(torch.float32, dtype)).clone().requires_grad_()
        state = TensorState(first.mechanism, first.options, first.parts, numbers)
        middle, state = case.attend(*inputs, initial_state=state, output_final_state=True)
        *token, _, = (x.to(device, dtype) for x in case.tensors(drawn, 1)[:4])
        gates = [x.to(device, dtype) for x in case.tensors(drawn, 1)[4:]]
        last = case.attend(*token, *case.of_token(inputs[3:], gates), key_padding_mask=None, initial_state=state, output_final_state=True)[0]
        loss = loss + (middle * d_out).sum() + last.sum()
        found |= {"out after a state": middle, "out of a token": last}
        inputs, names = [*inputs, numbers], [*names, "d of the state"]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    return found | {name: torch.zeros_like(x) if g is None else g for name, x, g in zip(names, inputs, gradients)}


def exactly(case: Case, drawn: torch.dtype = torch.float32) -> tuple[TensorState | None, dict[str, Tensor]]:
    """What to compare with: a state to begin with, and the results by the CPU's kernels in doubles."""
    first = _earlier(case)
    return first, results(case, "cpu", torch.float64, first, drawn)


@dataclass(frozen=True)
class Row:
    """What was found of a case."""

    case: Case
    dtype: torch.dtype
    by: str
    #: The largest of the relative errors, and of what.
    error: float
    worst: str
    same_bits: bool

    @property
    def right(self) -> bool:
        tolerance = TOLERANCES[self.dtype] * (20 if self.case.inputs in ("far", "falls") else 1)
        return self.error < tolerance and self.same_bits

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        wrong = "" if self.right else "  WRONG"
        return f"{self.case!s:<64}{name:<9}{self.error:<9.1e}{self.worst:<20}{'yes' if self.same_bits else 'NO':<10}{self.by}{wrong}"


def examine(
    case: Case, device: str | torch.device, dtype: torch.dtype, exact: tuple[TensorState | None, dict[str, Tensor]], times: int = 2
) -> Row:
    """Runs a case on a device, twice if the bits are to be the same."""
    first, expected = exact
    heard: list[str] = []
    token = _dispatch.LISTENER.set(heard.append)
    try:
        got = results(case, device, dtype, first)
    finally:
        _dispatch.LISTENER.reset(token)
    errors = {name: error(got[name], expected[name]) for name in got}
    worst = max(errors, key=lambda name: errors[name])
    same = True
    for _ in range(times - 1):
        again = results(case, device, dtype, first)
        same = same and all(torch.equal(got[name], again[name]) for name in got)
    return Row(case, dtype, ", ".join(dict.fromkeys(heard)), errors[worst], worst, same)


def check(
    device: str | torch.device = "cuda", dtypes: Sequence[torch.dtype] = (), mechanisms: Sequence[str] = (), *, echo: bool = True
) -> list[Row]:
    """Whether a device computes right, as `longspan.check` too: every mechanism on tensors there, beside the CPU's kernels in doubles.

    Outputs, all gradients, states from the CPU and on, a step, and the same bits a second time, for each case of the list that the
    package's own tests run; one line each, which also says by what it ran and what Triton's kernels do not do.

    Parameters
    ----------
    device : torch.device or str
        Where to. ``"cpu"`` checks the kernels in single precision.
    dtypes : sequence of torch.dtype, optional
        float32 without them.
    mechanisms : sequence of str, optional
        Names of `longspan.mechanisms`, to run only theirs.
    echo : bool
        Print a line for each case, as it ends. Triton compiles its kernels meanwhile, for some minutes.

    Returns
    -------
    list
        A row for each case: ``case``, ``dtype``, ``by``, ``error``, ``same_bits``, ``right``.

    Raises
    ------
    RuntimeError
        If a case is wrong; it names the first.

    Examples
    --------
    >>> import longspan
    >>> rows = longspan.check("cpu", mechanisms=["aft-simple"], echo=False)
    >>> rows[0].by, max(row.error for row in rows) < 1e-6
    ("the CPU's kernels", True)
    """
    unknown = set(mechanisms) - set(FUNCTIONS)
    if unknown:
        raise ValueError(f"check: mechanisms: expected some of {', '.join(FUNCTIONS)}, got {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    if echo:
        print(f"{'mechanism and case':<64}{'type':<9}{'error':<9}{'of':<20}{'same bits':<10}by")
    for case in CASES:
        if mechanisms and case.mechanism not in mechanisms:
            continue
        for dtype in dtypes or (torch.float32,):
            rows.append(examine(case, device, dtype, exactly(case, dtype)))
            if echo:
                print(rows[-1], flush=True)
    wrong = [str(row) for row in rows if not row.right]
    if wrong:
        found = "\n".join(wrong[:20])
        raise RuntimeError(f"check: {device}: expected every case right, got {len(wrong)} of {len(rows)} wrong; the first:\n{found}")
    return rows
