"""A whole language model beside the same in PyTorch: one training step of one sequence.

4 pre-norm blocks of width 256 with 4 heads, GELU and an inner width of 1,024, over 256 symbols, with AdamW: `longspan-bench --model`
measures it on Burn, this file in PyTorch with softmax attention (SDPA), as it is and compiled, and with Longspan's operators. All take
turns, and everything runs again with an allocator that keeps its memory; of each opponent the lower ratio counts.

    cargo build --release
    python benchmarks/model.py            # --command PATH, --lengths, --rounds, --threads
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from compare import ALLOCATORS, environment

WIDTH, HEADS, INNER, LAYERS, SYMBOLS = 256, 4, 1024, 4, 256


def build(attention: str):
    """The model with this attention: `sdpa`, or one of Longspan's."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from longspan.torch import KernelizedAttention, ShawAttention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.project, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.inner, self.outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
            if attention == "kernelized":
                self.attention = KernelizedAttention(HEADS, WIDTH // HEADS)
            elif attention == "shaw":
                self.attention = ShawAttention(HEADS, WIDTH // HEADS)

        def forward(self, x):
            q, k, v = self.project(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
            attend = F.scaled_dot_product_attention if attention == "sdpa" else self.attention
            heads = attend(q, k, v, is_causal=True)
            x = x + self.output(heads.transpose(1, 2).flatten(2))
            return x + self.outer(F.gelu(self.inner(self.between(x))))

    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)
    )


def torch_step(attention: str, length: int, compiled: bool) -> Callable[[], None]:
    import torch
    import torch.nn.functional as F

    model = build(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = (torch.arange(length) ** 2 % SYMBOLS)[None]
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        logits = run(tokens)
        F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()

    return step


def ours(command: Path, attention: str, length: int, threads: int) -> float:
    """Seconds of a step of the command's model."""
    arguments = ["--model", "--json", "--mechanisms", attention, "--seconds", "2"]
    arguments += ["--min-length", str(length), "--max-length", str(length), "--threads", str(threads)]
    done = subprocess.run([str(command), *arguments], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["rows"][0]["step"])


def measure(options: argparse.Namespace, length: int) -> dict[str, float]:
    """Medians of seconds for a step, all candidates by turns."""
    steps = {
        "torch, SDPA": torch_step("sdpa", length, False),
        "torch, SDPA compiled": torch_step("sdpa", length, True),
        "torch, our kernelized": torch_step("kernelized", length, False),
        "torch, our shaw": torch_step("shaw", length, False),
    }
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            while True:
                before = time.perf_counter()
                step()
                times.setdefault(name, []).append(time.perf_counter() - before)
                if time.perf_counter() - started > 2:
                    break
        for attention in ("kernelized", "shaw"):
            times.setdefault(f"longspan, {attention}", []).append(ours(options.command, attention, length, options.threads))
    return {name: statistics.median(found) for name, found in times.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", type=Path, default=Path(__file__).parent.parent / "target/release/longspan-bench")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.child:
        import torch

        from longspan import set_num_threads

        torch.set_num_threads(options.threads)
        set_num_threads(options.threads)
        print(json.dumps({length: measure(options, length) for length in options.lengths}))
        return 0
    found: list[dict[str, dict[str, float]]] = []
    for allocator in ALLOCATORS:
        arguments = [sys.executable, __file__, "--child", "--command", options.command, "--rounds", options.rounds]
        arguments += ["--threads", options.threads, "--lengths", *options.lengths]
        done = subprocess.run(
            [str(part) for part in arguments], env=environment(allocator), stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            return done.returncode
        found.append(json.loads(done.stdout.splitlines()[-1]))
    names = list(next(iter(found[0].values())))
    print(f"Tokens a second of training steps, the better of two allocators; {options.threads} threads\n")
    print("| tokens | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for length in found[0]:
        best = [min(times[length][name] for times in found) for name in names]
        print(f"| {length} | " + " | ".join(f"{int(length) / seconds:,.0f}" for seconds in best) + " |")
    print("\nRatios, theirs to ours; the lower of two allocators:\n")
    for length in found[0]:
        for mine in ("kernelized", "shaw"):
            own = f"longspan, {mine}"
            parts = [
                f"{name} {min(times[length][name] / times[length][own] for times in found):.2f}"
                for name in names
                if not name.startswith("longspan")
            ]
            print(f"- {length}, {mine}: " + ", ".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
