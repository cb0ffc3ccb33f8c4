"""Longspan beside what a PyTorch user would pick or write instead: ``python -m longspan.bench_peers --peers FOLDER``.

``FOLDER`` holds ``torch_peers.py``, a module with ``make(name, B, H, L, d) -> f(q, k, v)``. Each row measures ours and every
opponent in alternation, in one process, and prints the ratio of medians, the opponent's time over ours, with a bootstrapped
95 % interval. Fresh memory costs page faults, which weigh most at length; ``--both-allocators`` repeats everything under an
allocator that never gives memory back. No time is printed for a row in which the two do not compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What keeps glibc's allocator from giving memory back.
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}

#: Row: our function, what it learns, opponents that compute the same, opponents that compute softmax attention instead.
ROWS: dict[str, tuple[str, list[str], list[str]]] = {
    "kernelized": ("kernelized", ["torch_linear"], ["sdpa"]),
    "kernelized causal": ("kernelized", ["torch_chunk64_causal", "torch_chunk128_causal"], ["sdpa_causal"]),
    "shaw 16 causal": ("shaw16", ["torch_rpe_band16_causal"], []),
    "shaw 64 causal": ("shaw64", ["torch_rpe_band64_causal"], []),
    "fourier causal": ("fourier", ["torch_fourier_causal"], []),
    "toeplitz": ("toeplitz", ["toeplitz_dense"], []),
    "toeplitz causal": ("toeplitz", ["toeplitz_dense_causal"], []),
    "aft-simple": ("aft-simple", ["aft_simple"], []),
    "aft-simple causal": ("aft-simple", ["aft_simple_causal"], []),
    "aft-local 64 causal": ("aft-local", ["aft_local64_causal"], []),
    "aft-conv 33 causal": ("aft-conv", ["aft_conv_causal"], []),
}


def learned(function: Callable[..., Any]) -> list[Any]:
    """The learned tensors that a peer's function closes over, in the order of their names."""
    import torch

    function = getattr(function, "_torchdynamo_orig_callable", function)
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    cells = zip(names, getattr(function, "__closure__", None) or ())
    contents = (cell.cell_contents for _, cell in sorted(cells))
    return [held for held in contents if isinstance(held, torch.Tensor) and held.requires_grad]


def ours(kind: str, peer: Callable[..., Any], heads: int, length: int, causal: bool) -> tuple[Callable[..., Any], list[Any]]:
    """Our function with the parameters of the peer's, and those parameters."""
    from . import ops

    parameters = [p.detach().clone().requires_grad_() for p in learned(peer)]
    if kind == "kernelized":
        return lambda q, k, v: ops.kernelized_attention(q, k, v, is_causal=causal), []
    if kind.startswith("shaw"):
        (rel,) = parameters
        return lambda q, k, v: ops.shaw_attention(q, k, v, rel, is_causal=causal), parameters
    if kind == "fourier":
        a, b = parameters
        a, b = (p.detach().reshape(heads, -1).requires_grad_() for p in (a, b))
        return lambda q, k, v: ops.fourier_attention(q, k, v, a[..., None], b, is_causal=causal), [a, b]
    if kind == "toeplitz":
        bias = parameters[0].detach().log().requires_grad_()
        return lambda q, k, v: ops.toeplitz_attention(q, k, v, bias, is_causal=causal), [bias]
    if kind == "aft-simple":
        return lambda q, k, v: ops.aft_simple(q, k, v, is_causal=causal), []
    if kind == "aft-local":
        import torch

        window = 64
        distance = torch.arange(length)[:, None] + torch.arange(-window + 1, window)[None]
        inside = (distance >= 0) & (distance < length)
        w = parameters[0].detach()
        w = torch.where(inside, w.gather(1, distance.clamp(0, length - 1)), 0).requires_grad_()
        return lambda q, k, v: ops.aft_local(q, k, v, w, is_causal=causal), [w]
    # The opponent's convolution has a key for each channel; ours has one a head and is compared with all channels alike.
    w = parameters[0].detach().requires_grad_()
    return lambda q, k, v: ops.aft_conv(q, k[..., 0], v, w, is_causal=causal), [w]


def measure(row: str, length: int, heads: int, head_dim: int, seconds: float, compiled: bool) -> list[dict[str, Any]]:
    """Times of one row: one entry for ours and one for each opponent."""
    import torch
    import torch_peers

    kind, same, others = ROWS[row]
    causal = row.endswith("causal")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3))
    if kind == "aft-conv":
        k = k[..., :1].expand(k.shape).contiguous()
    names = same + ([f"compiled:{name}" for name in same] if compiled else []) + others
    peers = {name: torch_peers.make(name, 1, heads, length, head_dim) for name in names}
    own, parameters = ours(kind, peers[same[0]], heads, length, causal)
    candidates = {"longspan": own, **peers}

    with torch.no_grad():
        expected = own(q, k, v).reshape(1, heads, length, head_dim)
        for name in same:
            got = peers[name](q, k, v)
            if got.dim() == 3:
                got = got.unflatten(-1, (heads, head_dim)).transpose(1, 2)
            difference = (got - expected).abs().max() / expected.abs().max()
            if not difference < 1e-2:
                raise SystemExit(f"{row}, L={length}: {name} and Longspan differ by {difference:.1e}; nothing is measured")

    wrt = {name: learned(f) for name, f in peers.items() if not name.startswith("compiled:")}
    wrt = {name: wrt.get(name.removeprefix("compiled:"), []) for name in peers}
    wrt["longspan"] = parameters
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]

    def forward(name: str) -> None:
        with torch.no_grad():
            candidates[name](q, k, v)

    def both(name: str) -> None:
        loss = candidates[name](*inputs)
        loss.backward(torch.ones_like(loss))
        for tensor in (*inputs, *wrt[name]):
            tensor.grad = None

    found = []
    for direction, run in (("forward", forward), ("forward + backward", both)):
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for name in candidates:
            run(name)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times["longspan"]) < 5:
            # A new order each round, so that nobody always comes after the same one.
            for name in random.sample(list(candidates), len(candidates)):
                start = time.perf_counter()
                run(name)
                times[name].append(time.perf_counter() - start)
        for name, list_of_times in times.items():
            found.append({"row": row, "length": length, "direction": direction, "name": name, "seconds": list_of_times})
    return found


def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def interval(theirs: list[float], mine: list[float], draws: int = 1000) -> tuple[float, float]:
    """95 % of the ratio of medians, resampling rounds: what disturbs a round disturbs both."""
    rounds = len(mine)
    draw = random.Random(0)
    ratios = []
    for _ in range(draws):
        chosen = [draw.randrange(rounds) for _ in range(rounds)]
        ratios.append(median([theirs[i] for i in chosen]) / median([mine[i] for i in chosen]))
    ratios.sort()
    return ratios[draws // 40], ratios[-draws // 40]


def table(found: list[dict[str, Any]]) -> str:
    lines = []
    for entry in found:
        if entry["name"] == "longspan":
            mine = entry["seconds"]
            lines.append(f"{entry['row']}, L={entry['length']}, {entry['direction']}: longspan {median(mine) * 1e3:.2f} ms")
        else:
            low, high = interval(entry["seconds"], mine)
            ratio = median(entry["seconds"]) / median(mine)
            lines.append(f"    {entry['name']:<34} {median(entry['seconds']) * 1e3:9.2f} ms   {ratio:6.2f} x "
                         f"[{low:.2f}, {high:.2f}]")  # fmt: skip
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("longspan.bench_peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--peers", type=Path, required=True, help="the folder of torch_peers.py")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row, length and direction")
    parser.add_argument("--compiled", action="store_true", help="torch.compile in front of the opponents as well")
    parser.add_argument("--both-allocators", action="store_true", help="again with an allocator that keeps its memory")
    parser.add_argument("--json", type=Path, help="all times, in this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.peers / "torch_peers.py").exists():
        print(f"longspan.bench_peers: --peers: no torch_peers.py in {options.peers}", file=sys.stderr)
        return 2
    if options.both_allocators:
        given = [a for a in (sys.argv[1:] if arguments is None else arguments) if a != "--both-allocators"]
        for name, changes in (("the system's allocator", {}), ("an allocator that keeps its memory", KEEPING)):
            print(f"== {name}", flush=True)
            done = subprocess.run([sys.executable, "-m", "longspan.bench_peers", *given], env={**os.environ, **changes})
            if done.returncode:
                return done.returncode
        return 0
    sys.path.insert(0, str(options.peers))
    import torch

    from . import set_num_threads

    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    everything = []
    for row in options.rows:
        for length in options.lengths:
            found = measure(row, length, options.heads, options.head_dim, options.seconds, options.compiled)
            print(table(found), flush=True)
            everything += found
    if options.json:
        options.json.write_text(json.dumps(everything))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
