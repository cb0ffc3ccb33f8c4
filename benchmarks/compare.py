"""Longspan beside what a PyTorch, JAX or ONNX Runtime user would write or pick instead.

``python benchmarks/compare.py`` prints the whole comparison as Markdown. Opponents whose library is not installed are left
out.

Each row measures ours and every opponent in alternation, in one process, in a new order each round, and gives ratios of
medians, the opponent's time over ours, with bootstrapped 95 % intervals. An opponent that takes far longer than the others
runs in the first rounds alone. Fresh memory costs page faults, which weigh most at length: everything is measured with the
system's allocator and again, in another process, with one that never gives memory back, and the lower ratio counts. Before a
row is timed its functions must give the same numbers. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mkl_speed

#: Environments of the two allocators; the second keeps glibc's from giving memory back.
ALLOCATORS: dict[str, dict[str, str]] = {
    "system": {},
    "keeping": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "67108864",
    },
}


@dataclass(frozen=True)
class Row:
    """One mechanism and mask."""

    #: Our function, for `ours`.
    kind: str
    is_causal: bool
    #: Opponents in PyTorch that compute the same.
    same: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)
    #: Opponents that compute softmax attention instead, with a table row of their own.
    softmax: tuple[str, ...] = ()
    #: Opponents outside PyTorch that compute the same, by the module that knows them.
    elsewhere: tuple[tuple[str, str], ...] = ()
    #: Whether to put torch.compile in front of the opponents as well.
    compiled: bool = True
    #: Whether the opponents have a backward.
    backward: bool = True
    #: Lengths at which only the forward call is measured.
    forward_only: tuple[int, ...] = ()


_UNDIVIDED = (1024, 4096, 16384)
ROWS: dict[str, Row] = {
    "kernelized, masked": Row(
        "kernelized", True, ("chunk64_causal", "chunk128_causal"), (1024, 4096, 16384),
        elsewhere=(("jax_peers", "jax_scan64_causal"), ("jax_peers", "jax_chunk64_causal")),
    ),
    "kernelized": Row("kernelized", False, ("linear",), (4096, 16384), elsewhere=(("jax_peers", "jax_linear"),)),
    "no feature map, undivided, masked": Row(
        "undivided", True, lengths=_UNDIVIDED, backward=False,
        elsewhere=(("onnx_peers", "onnxruntime_linear"),),
    ),
    "no feature map, undivided, decay, masked": Row(
        "decay", True, lengths=_UNDIVIDED, backward=False,
        elsewhere=(("onnx_peers", "onnxruntime_gated"),),
    ),
    "softmax attention, masked": Row(
        "kernelized", True, (), (256, 1024, 4096, 16384), softmax=("sdpa_causal",),
        forward_only=(16384,),
    ),
    "softmax in a window of 512, masked": Row(
        "window", True, ("sdpa_window512", "blocks_window512", "flex_window512"), (4096, 16384), backward=False,
    ),
    "softmax in a window of 512, masked, with gradients": Row(
        "window", True, ("sdpa_window512", "blocks_window512"), (4096, 16384), forward_only=(16384,),
    ),
    "Shaw, radius 16, masked": Row("shaw", True, ("shaw16_causal",)),
    "Shaw, radius 64, masked": Row("shaw", True, ("shaw64_causal",)),
    "Fourier, masked": Row("fourier", True, ("fourier_causal",)),
    "Toeplitz": Row("toeplitz", False, ("toeplitz",), compiled=False),
    "Toeplitz, masked": Row("toeplitz", True, ("toeplitz_causal",), compiled=False),
    "AFT-simple, masked": Row("aft-simple", True, ("aft_simple_causal",)),
    "AFT-conv, 33 taps, masked": Row("aft-conv", True, ("aft_conv_causal",)),
    "AFT-local, window 64, masked": Row("aft-local", True, ("aft_local64_causal",)),
    "AFT-full": Row("aft-full", False, ("aft_full",), compiled=False),
    "AFT-full, masked": Row("aft-full", True, ("aft_full_causal",), compiled=False),
}  # fmt: skip

#: Times of one function: which, and seconds by round.
Times = dict[str, Any]


def learned(function: Callable[..., Any]) -> list[Any]:
    """The learned tensors that a peer's function closes over, in the order of their names."""
    import torch

    function = getattr(function, "_torchdynamo_orig_callable", function)
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    cells = zip(names, getattr(function, "__closure__", None) or ())
    contents = (cell.cell_contents for _, cell in sorted(cells, key=lambda pair: pair[0]))
    return [held for held in contents if isinstance(held, torch.Tensor) and held.requires_grad]


def ours(
    kind: str, parameters: Sequence[Any], heads: int, length: int, is_causal: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """Our function with the parameters of a peer's, and those parameters."""
    import torch

    from longspan import ops

    own = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    if kind == "kernelized":
        return lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=is_causal), []
    if kind in ("undivided", "decay"):
        from onnx_peers import DECAY

        options = {"feature_map": "identity", "normalize": False, "is_causal": is_causal}
        decay = DECAY if kind == "decay" else None
        return lambda q, k, v: ops.kernelized_attention(q, k, v, decay=decay, **options), []
    if kind == "window":
        return lambda q, k, v: ops.softmax_attention(q, k, v, window=512, is_causal=is_causal), []
    if kind == "shaw":
        (rel,) = own
        return lambda q, k, v: ops.shaw_attention(q, k, v, rel, is_causal=is_causal), own
    if kind == "fourier":
        a, b = (parameter.detach().reshape(heads, -1).requires_grad_() for parameter in own)
        return lambda q, k, v: ops.fourier_attention(q, k, v, a[..., None], b, is_causal=is_causal), [a, b]
    if kind == "toeplitz":
        bias = own[0].detach().log().requires_grad_()
        return lambda q, k, v: ops.toeplitz_attention(q, k, v, bias, is_causal=is_causal), [bias]
    if kind == "aft-simple":
        return lambda q, k, v: ops.aft_simple(q, k, v, is_causal=is_causal), []
    (w,) = own
    if kind == "aft-full":
        return lambda q, k, v: ops.aft_full(q, k, v, w, is_causal=is_causal), own
    if kind == "aft-local":
        return lambda q, k, v: ops.aft_local(q, k, v, w, is_causal=is_causal), own
    return lambda q, k, v: ops.aft_conv(q, k[..., 0], v, w, is_causal=is_causal), own


def _installed(module: str) -> bool:
    """Whether the library of these opponents is there."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def measure(name: str, length: int, options: argparse.Namespace) -> list[Times]:
    """Times of one row at one length: ours and every opponent's, in each direction."""
    import torch
    import torch_peers

    row = ROWS[name]
    heads, head_dim = options.heads, options.head_dim
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    q, k, v = (torch.randn(1, heads, length, head_dim, generator=generator).to(dtype) for _ in range(3))
    compiled = [f"compiled:{peer}" for peer in row.same] if row.compiled and not options.eager else []
    names = [*row.same, *compiled, *row.softmax]
    peers = {peer: torch_peers.make(peer, heads, length, head_dim) for peer in names}
    elsewhere = {
        peer: importlib.import_module(module).Peer(peer, q, k, v, options.threads)
        for module, peer in row.elsewhere
        if options.dtype == "float32" and _installed(module)
    }
    if not peers and not elsewhere:
        why = f"{row.elsewhere[0][0]} finds no library" if options.dtype == "float32" else "its opponents compute in float32 alone"
        print(f"{name}: left out, because {why}", file=sys.stderr)
        return []
    parameters = learned(peers[row.same[0]]) if row.same else []
    if parameters and options.dtype != "float32":
        print(f"{name}: left out, because its opponents learn in float32", file=sys.stderr)
        return []
    own, own_parameters = ours(row.kind, parameters, heads, length, row.is_causal)
    in_torch = {"longspan": own, **peers}

    with torch.no_grad():
        expected = own(q, k, v)
        for peer in (*row.same, *elsewhere):
            got = torch.from_numpy(elsewhere[peer].output()) if peer in elsewhere else peers[peer](q, k, v)
            if got.dim() == 3:
                got = got.unflatten(-1, (heads, head_dim)).transpose(1, 2)
            difference = (got - expected).abs().max() / expected.abs().max()
            # Opponents round sums and weights to bfloat16.
            if not difference < {"float32": 1e-2, "bfloat16": 5e-2}[options.dtype]:
                raise SystemExit(f"{name}, L={length}: {peer} and Longspan differ by {difference:.1e}; nothing is measured")
        del expected

    wrt = {peer: learned(function) for peer, function in peers.items()}
    wrt["longspan"] = own_parameters
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    ones: dict[Any, Any] = {}

    def run(candidate: str, backward: bool) -> None:
        if candidate in elsewhere:
            elsewhere[candidate].run(backward)
        elif not backward:
            with torch.no_grad():
                in_torch[candidate](q, k, v)
        else:
            out = in_torch[candidate](*inputs)
            if out.shape not in ones:
                ones[out.shape] = torch.ones(out.shape, dtype=dtype)
            out.backward(ones[out.shape])
            for tensor in (*inputs, *wrt[candidate]):
                tensor.grad = None

    found: list[Times] = []
    for direction in ("forward",) if length in row.forward_only or not row.backward else ("forward", "forward + backward"):
        backward = direction != "forward"
        times = _alternate(lambda candidate: run(candidate, backward), [*in_torch, *elsewhere], options.seconds)
        for candidate, seconds in times.items():
            found.append({"row": name, "length": length, "direction": direction, "name": candidate, "seconds": seconds})
    return found


#: Rounds that every function runs in, however slow; and those that are not slow.
_LEAST = 4
_ROUNDS = 12

#: Seconds of rest between two functions.
_SETTLING = 2e-3


def _alternate(run: Callable[[str], None], candidates: list[str], seconds: float) -> dict[str, list[float | None]]:
    """Times of each candidate by round, ``None`` where it did not run."""
    warm = {}
    for candidate in candidates:
        start = time.perf_counter()
        run(candidate)
        warm[candidate] = time.perf_counter() - start
        if warm[candidate] < seconds:
            # The first time also compiles.
            start = time.perf_counter()
            run(candidate)
            warm[candidate] = time.perf_counter() - start
    slow = {candidate for candidate in candidates if warm[candidate] > seconds / 4}
    times: dict[str, list[float | None]] = {candidate: [] for candidate in candidates}
    shuffle = random.Random(0)
    rounds = 0
    end = None
    while rounds < _LEAST or end is None or time.perf_counter() < end or rounds < _ROUNDS:
        if rounds == _LEAST:
            end = time.perf_counter() + seconds
        # A new order each round, so that nobody always comes after the same one.
        for candidate in shuffle.sample(candidates, len(candidates)):
            if rounds >= _LEAST and candidate in slow and candidate != "longspan":
                times[candidate].append(None)
                continue
            # The previous function's threads still spin for a while.
            time.sleep(_SETTLING)
            start = time.perf_counter()
            run(candidate)
            times[candidate].append(time.perf_counter() - start)
        rounds += 1
    return times


def median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def interval(theirs: Sequence[float], mine: Sequence[float], draws: int = 1000) -> tuple[float, float]:
    """95 % of the ratio of medians, resampling rounds: what disturbs a round disturbs both."""
    rounds = len(mine)
    draw = random.Random(0)
    ratios = []
    for _ in range(draws):
        chosen = [draw.randrange(rounds) for _ in range(rounds)]
        ratios.append(median([theirs[i] for i in chosen]) / median([mine[i] for i in chosen]))
    ratios.sort()
    return ratios[draws // 40], ratios[-draws // 40]


@dataclass(frozen=True)
class Ratio:
    """An opponent's time over ours in the rounds that it ran in."""

    name: str
    ours: float
    theirs: float
    low: float
    high: float
    rounds: int

    @property
    def value(self) -> float:
        return self.theirs / self.ours

    def __str__(self) -> str:
        # Of few rounds an interval says nothing.
        return f"{self.value:.2f}" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.rounds >= _ROUNDS else "")


def ratios(found: Sequence[Times]) -> dict[tuple[str, int, str], list[Ratio]]:
    """For each row, length and direction its opponents, the fastest first."""
    mine = {(e["row"], e["length"], e["direction"]): e["seconds"] for e in found if e["name"] == "longspan"}
    table: dict[tuple[str, int, str], list[Ratio]] = {place: [] for place in mine}
    for entry in found:
        place = (entry["row"], entry["length"], entry["direction"])
        if entry["name"] == "longspan":
            continue
        pairs = [(a, b) for a, b in zip(entry["seconds"], mine[place]) if a is not None]
        theirs, own = [a for a, _ in pairs], [b for _, b in pairs]
        low, high = interval(theirs, own)
        table[place].append(Ratio(entry["name"], median(own), median(theirs), low, high, len(own)))
    return {place: sorted(row, key=lambda ratio: ratio.value) for place, row in table.items()}


_TITLES = {"system": "the system's allocator", "keeping": "an allocator that keeps its memory"}


def summary(found: dict[str, Sequence[Times]]) -> str:
    """The fastest opponent of each row, under the allocator that is worse for us: one table of those that compute the same, one of
    softmax attention, which is another computation."""
    by_allocator = [ratios(times) for times in found.values()]
    least = {place: min((table[place][0] for table in by_allocator), key=lambda ratio: ratio.value) for place in by_allocator[0]}
    tables = []
    for title, other in (("", False), ("Beside softmax attention, which is another computation:\n\n", True)):
        lines = []
        for row, length in dict.fromkeys((row, length) for row, length, _ in least if bool(ROWS[row].softmax) == other):
            cells = [row, f"{length:,}"]
            for direction in ("forward", "forward + backward"):
                best = least.get((row, length, direction))
                cells += [f"{best.ours * 1e3:.3g}", f"`{best.name}`", str(best)] if best else [""] * 3
            lines.append(f"| {' | '.join(cells)} |")
        if lines:
            head = "| row | L | forward, ms | fastest opponent | its time over ours | with backward, ms | fastest opponent | its time over ours |"
            tables.append(title + "\n".join([head, "|" + "---|" * 8, *lines]))
    return "\n\n".join(tables)


def details(found: Sequence[Times]) -> str:
    """Every opponent of every row."""
    lines = ["| row | L | direction | opponent | its ms | ours, ms | ratio [95 %] | rounds |", "|" + "---|" * 8]
    for place, row in ratios(found).items():
        for ratio in row:
            lines.append(
                f"| {place[0]} | {place[1]} | {place[2]} | {ratio.name} | {ratio.theirs * 1e3:.2f} | {ratio.ours * 1e3:.2f} "
                f"| {ratio} | {ratio.rounds} |"
            )
    return "\n".join(lines)


def overhead(heads: int, head_dim: int, length: int = 64, calls: int = 2000) -> str:
    """What a whole call costs over its kernel at a length where that shows."""
    import numpy as np
    import torch

    from longspan import _calls, _options, ops

    draw = np.random.default_rng(0).standard_normal
    arrays = [draw((1, heads, length, head_dim), dtype=np.float32) for _ in range(3)]
    tensors = [torch.from_numpy(array) for array in arrays]
    q, k, v = arrays
    q_tensor, k_tensor, v_tensor = tensors
    one_q, one_k, one_v = (array[:, :, 0].copy() for array in arrays)
    of_q, of_k, of_v = (torch.from_numpy(array) for array in (one_q, one_k, one_v))
    _, state = ops.kernelized_attention_step(one_q, one_k, one_v)
    options = _options.kernel("overhead", arrays[1], "elu+1", None, True, "auto")
    native = _calls.mechanism("kernelized", options, "overhead", ())

    def whole(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times) * 1e6

    kernel, numpy, torch_, step, tensor_step = [], [], [], [], []
    for _ in range(5):
        kernel.append(median(native.kernel_seconds((q, k, v, (), True, 0, None, None), calls)) * 1e6)
        numpy.append(whole(lambda: ops.kernelized_attention(q, k, v, is_causal=True)))
        torch_.append(whole(lambda: ops.kernelized_attention(q_tensor, k_tensor, v_tensor, is_causal=True)))
        step.append(whole(lambda: ops.kernelized_attention_step(one_q, one_k, one_v, state)))
        tensor_step.append(whole(lambda: ops.kernelized_attention_step(of_q, of_k, of_v, state)))
    lines = [
        f"| kernelized, masked, L={length}, H={heads}, d={head_dim} | µs | over the kernel, µs |",
        "|---|---|---|",
        f"| the kernel itself | {median(kernel):.1f} | |",
    ]
    for name, times in (("a call on NumPy arrays", numpy), ("a call on torch tensors", torch_)):
        over = median([a - b for a, b in zip(times, kernel)])
        lines.append(f"| {name} | {median(times):.1f} | {over:.1f} |")
    for name, times in (("arrays", step), ("tensors", tensor_step)):
        lines.append(f"| one token through `kernelized_attention_step`, {name} | {median(times):.1f} | |")
    return "\n".join(lines)


def decoding(heads: int, head_dim: int, lengths: Sequence[int] = (1024, 4096, 16384), tokens: int = 200, compiled: bool = True) -> str:
    """A token after so many: ours, the same sums in PyTorch, and softmax attention over a cache of keys and values."""
    import torch
    import torch_peers

    from longspan import ops

    recurrent = torch.compile(torch_peers.recurrent_step, dynamic=False) if compiled else torch_peers.recurrent_step
    lines = ["| a token after | ours, µs | running sums in PyTorch | softmax over a cache | its state / the cache, MB |", "|" + "---|" * 5]
    for length in lengths:
        q, k, v = torch.randn(3, 1, heads, length, head_dim).unbind()
        q1, k1, v1 = torch.randn(3, 1, heads, head_dim).unbind()
        _, state = ops.kernelized_attention(q, k, v, is_causal=True, output_final_state=True)
        features = torch_peers.phi(k)
        sums, keys = features.transpose(-1, -2) @ v, features.sum(-2)
        cache = torch.stack([torch.cat([x, x[:, :, -1:]], 2) for x in (k, v)])
        steps: dict[str, Callable[[], Any]] = {
            "longspan": lambda: ops.kernelized_attention_step(q1, k1, v1, state),
            "recurrent": lambda: recurrent(q1, k1, v1, sums, keys),
            "softmax": lambda: torch_peers.sdpa_step(q1, k1, v1, cache),
        }

        def run(name: str) -> None:
            for _ in range(tokens):
                steps[name]()

        with torch.no_grad():
            expected = recurrent(q1, k1, v1, sums, keys)[0]
            got = ops.kernelized_attention_step(q1, k1, v1, state.clone())[0]
            if not (got - expected).abs().max() < 1e-3 * expected.abs().max():
                raise SystemExit(f"a token after {length}: Longspan and running sums in PyTorch differ; nothing is measured")
            times = _alternate(run, list(steps), seconds=0.2)
        ours, sums_time, softmax = (median([t for t in times[name] if t is not None]) / tokens * 1e6 for name in steps)
        bytes_ = 4 * (sums.numel() + keys.numel()), 4 * cache.numel()
        cells = [f"{ours:.3g}", f"{sums_time:.3g}, {sums_time / ours:.1f} ×", f"{softmax:.3g}, {softmax / ours:.1f} ×"]
        lines.append(f"| {length:,} | {' | '.join(cells)} | {bytes_[0] / 1e6:.2g} / {bytes_[1] / 1e6:.3g} |")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=" | ".join(ROWS))
    parser.add_argument("--lengths", nargs="+", type=int, help="instead of each row's own")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: rows in PyTorch that learn nothing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row, length and direction")
    parser.add_argument("--eager", action="store_true", help="without torch.compile in front of the opponents")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="one of the two instead of both")
    parser.add_argument("--details", action="store_true", help="every opponent, not the fastest alone")
    parser.add_argument("--overhead", action="store_true", help="what a short call costs over its kernel and a token, and no more")
    parser.add_argument("--json", type=Path, help="all times, in this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measure_all(options: argparse.Namespace) -> list[Times]:
    import torch

    found: list[Times] = []
    for name in options.rows:
        for length in options.lengths or ROWS[name].lengths:
            start = time.perf_counter()
            found += measure(name, length, options)
            # Each row compiles for its own sizes.
            torch.compiler.reset()
            print(f"{options.allocator}: {name}, L={length}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def environment(allocator: str) -> dict[str, str]:
    """That of a process that measures with this allocator."""
    return {**os.environ, **ALLOCATORS[allocator], **mkl_speed.environment()}


def _in_child(allocator: str, options: argparse.Namespace, folder: str) -> list[Times]:
    """Measures in a process of its own, whose allocator the environment sets."""
    times = Path(folder, f"{allocator}.json")
    command = [sys.executable, __file__, "--child", "--allocator", allocator,
               "--heads", options.heads, "--head-dim", options.head_dim, "--dtype", options.dtype, "--threads", options.threads,
               "--seconds", options.seconds, "--json", times, "--rows", *options.rows]  # fmt: skip
    command += ["--eager"] if options.eager else []
    command += ["--lengths", *options.lengths] if options.lengths else []
    done = subprocess.run([str(part) for part in command], env=environment(allocator), stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: list[Times] = json.loads(times.read_text())
    return found


def _short(options: argparse.Namespace) -> str:
    """What short calls and tokens cost."""
    return f"{overhead(options.heads, options.head_dim)}\n\n{decoding(options.heads, options.head_dim, compiled=not options.eager)}"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    import torch

    from longspan import set_num_threads

    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    if options.child:
        options.json.write_text(json.dumps(_measure_all(options)))
        return 0
    if options.overhead:
        print(_short(options))
        return 0
    allocators = [options.allocator] if options.allocator else list(ALLOCATORS)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Sequence[Times]] = {
            allocator: _in_child(allocator, options, folder) for allocator in allocators
        }
    print(f"B=1, H={options.heads}, d={options.head_dim}, {options.dtype}, {options.threads} threads; medians of alternating rounds\n")
    print(summary(found))
    if options.details:
        for allocator, times in found.items():
            print(f"\nWith {_TITLES[allocator]}:\n\n{details(times)}")
    print(f"\n{_short(options)}")
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
