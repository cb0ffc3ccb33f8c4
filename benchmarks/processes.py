"""Training over processes: what two cost and gain here, and what that predicts of 8, 64 and 512 hosts.

    cargo build --release -p longspan-cli --features mpi
    python benchmarks/processes.py            # --rounds, --lengths, --latency, --bandwidth, --command PATH, --without torch

A language model of bytes learns a text: 1 process of 2 threads, and 2 processes of 1 thread, by turns. MPI's own monitoring counts
the bytes of a step, for `torchrun` the loopback device. Then 1, 2 and 4 processes are held against the model of docs/distributed.md,
which needs the time of one process, the bytes of a step, and a network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEADS, LAYERS, INNER, RADIUS = 256, 4, 4, 1024, 16
HEAD = WIDTH // HEADS
#: Numbers of one head's state: docs/distributed.md.
STATE = math.ceil((HEAD * (HEAD + 1) + 4 + (RADIUS + 1) * (HEAD + 1)) / 16) * 16
SETTINGS = {
    "d_model": WIDTH, "heads": HEADS, "layers": LAYERS, "d_ff": INNER, "radius": RADIUS, "dropout": 0, "evaluate": 1,
    "checkpoint_steps": 1000000, "carry": 1,
}  # fmt: skip
EXAMPLE = Path(__file__).parent.parent / "python" / "examples" / "one_text.py"


@dataclass(frozen=True)
class Work:
    """A step: so many tokens, as one sequence whose stretches the processes share, or as sequences of which each takes some."""

    tokens: int
    split: bool

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens, {'one sequence' if self.split else '8 sequences'}"

    @property
    def batch(self) -> int:
        return 1 if self.split else 8

    def command(self, command: str, text: Path, out: Path, processes: int, threads: int, steps: int, *mpi: str) -> list[str]:
        settings = {**SETTINGS, "batch_size": self.batch, "segment": self.tokens // self.batch, "workers": threads}
        line = [command, "train", "--text", str(text), "--tokens", "bytes", "--steps", str(steps), "--out", str(out)]
        line += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if processes == 1:
            return line
        return ["mpirun", "--oversubscribe", *mpi, "-n", str(processes), *line, *(["--split-sequence"] if self.split else [])]

    def sent(self, processes: int, weights: int) -> int:
        """Bytes that all processes send in a step, without the words that announce it: some 40 for each rank but the first."""
        # The pieces of gradients that others add up, and their sums: from all to all.
        shared = 2 * processes * (processes - 1) * 4 * math.ceil(weights / processes)
        states = 2 * LAYERS * self.batch * HEADS * STATE * 4 * processes * (processes - 1) if self.split else 0
        return shared + states


def run(line: list[str], threads: int) -> subprocess.CompletedProcess:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = {**os.environ, **root, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stderr}")
    return done


def seconds(arguments, work: Work, text: Path, processes: int, threads: int, steps: int = 4) -> tuple[float, int]:
    """The median step of a run after its first one, and the number of weights."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = run(work.command(arguments.command, text, out, processes, threads, steps), threads)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        at = [line["seconds"] for line in lines if "loss" in line]
        weights = int(re.search(r"(\d+) parameters", done.stderr)[1])
    return statistics.median(b - a for a, b in zip(at, at[1:])), weights


def mpi_bytes(arguments, work: Work, text: Path, processes: int) -> float:
    """Bytes of a step that MPI says all processes sent: those of a run of 4 steps beyond those of one of 2."""
    counted = []
    for steps in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            options = {"pml_monitoring_enable": 1, "pml_monitoring_enable_output": 3, "pml_monitoring_filename": f"{folder}/sent"}
            mpi = [part for key, value in options.items() for part in ("--mca", key, str(value))]
            run(work.command(arguments.command, text, Path(folder) / "run", processes, 1, steps, *mpi), 1)
            lines = [line for path in Path(folder).glob("sent*") for line in path.read_text().splitlines()]
            # Point to point messages, those within collectives included: `E rank rank bytes bytes …`.
            counted.append(sum(int(line.split("\t")[3].split()[0]) for line in lines if line[:1] in "EI"))
    return (counted[1] - counted[0]) / 2


def torch_step(text: Path, tokens: int, processes: int, threads: int, steps: int = 4) -> tuple[float, float]:
    """The median step of the example after its first one, and bytes of a step over the loopback device."""
    start = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    line = [*start, str(EXAMPLE), str(text), "--tokens", str(tokens), "--steps", str(steps), "--width", str(WIDTH)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    at, sent = [], []
    with subprocess.Popen([*line, "--layers", str(LAYERS)], env=env, stdout=subprocess.PIPE, text=True) as process:
        for said in process.stdout:
            if said.startswith("step"):
                at.append(time.perf_counter())
                loopback = [each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each]
                sent.append(int(loopback[0].split(":")[1].split()[0]))
    if process.returncode:
        sys.exit(f"{' '.join(line)} failed")
    return statistics.median(b - a for a, b in zip(at, at[1:])), (sent[-1] - sent[0]) / (len(sent) - 1)


def predict(work: Work, hosts: int, compute: float, weights: int, latency: float, bandwidth: float) -> float:
    """Seconds of a step that takes `compute` in one process: docs/distributed.md."""
    others = hosts - 1
    if not others:
        return compute
    # Rank 0 speaks to each other one and hears it; pieces of gradients go from all to all, and so do their sums.
    time = 4 * others * latency + 2 * 4 * weights * others / hosts / bandwidth
    if work.split:
        time += 2 * LAYERS * others * (latency + work.batch * HEADS * STATE * 4 / bandwidth)
    return compute / hosts + time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="target/release/longspan")
    parser.add_argument("--lengths", default="4096,65536")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=20e-6, help="of the planned network, in seconds")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="of the planned network, in bytes a second")
    parser.add_argument("--here", default="5e-5,2e9", help="latency and bandwidth between processes of this machine")
    parser.add_argument("--without", choices=["torch", "mpi"])
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(bytes(random.Random(0).choices(b"abcdefgh ", k=3_000_000)))
        if arguments.without != "torch":
            for length in lengths:
                print_torch(arguments, text, length)
        if arguments.without != "mpi":
            for split in (False, True):
                print_bytes(arguments, text, split)
                for length in lengths:
                    print_mpi(arguments, text, Work(length, split))


def ratio(turns: list[tuple[float, ...]], one: int = 0, two: int = 1) -> str:
    """The median over turns of how many times as fast the second was as the first, with the least and the most."""
    found = sorted(turn[one] / turn[two] for turn in turns)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def print_torch(arguments, text: Path, length: int) -> None:
    turns = [(torch_step(text, length, 1, 2), torch_step(text, length, 2, 1)) for _ in range(arguments.rounds)]
    rate = length / statistics.median(one[0] for one, _ in turns)
    print(f"torchrun, {length:,} tokens: 1 process of 2 threads {rate:,.0f} tokens a second, 2 of 1 thread "
          f"{ratio([(one[0], two[0]) for one, two in turns])} x as many")  # fmt: skip
    # Of each layer the states of both ranks, forward and backward, and 88 bytes before; of the weights what a ring sends.
    states = 2 * LAYERS * (2 * 4 * HEADS * STATE + 88)
    weights = LAYERS * (12 * WIDTH * WIDTH + 13 * WIDTH + HEADS * (2 * RADIUS + 1) * HEAD) + 258 * WIDTH
    print(f"  {turns[-1][1][1]:,.0f} bytes a step over the loopback device, headers included; {states + 2 * 4 * weights:,} by the "
          f"formula, of which {states:,} are states")  # fmt: skip


def print_mpi(arguments, text: Path, work: Work) -> None:
    turns = [
        tuple(seconds(arguments, work, text, *how)[0] for how in ((1, 2), (2, 1), (1, 1))) for _ in range(arguments.rounds)
    ]
    both, two, one = (statistics.median(turn[which] for turn in turns) for which in range(3))
    print(f"mpirun, {work.name}: 1 process of 2 threads {work.tokens / both:,.0f} tokens a second, 2 of 1 thread {ratio(turns)} x as many")
    four, weights = seconds(arguments, work, text, 4, 1)
    latency, bandwidth = (float(number) for number in arguments.here.split(","))
    for processes, measured in ((1, one), (2, two), (4, four)):
        # Processes beyond the cores take turns.
        compute = one * max(1, processes / (os.cpu_count() or 1))
        expected = predict(work, processes, compute, weights, latency, bandwidth)
        print(f"  {processes} here: {measured:.3f} s a step, {expected:.3f} s predicted")
    times = {hosts: predict(work, hosts, one, weights, arguments.latency, arguments.bandwidth) for hosts in (1 << n for n in range(12))}
    for hosts in (8, 64, 512):
        print(f"  {hosts} hosts: {times[hosts]:.4f} s a step, {one / times[hosts]:.1f} x one")
    stops = next(hosts for hosts in times if times[hosts] < 1.1 * times.get(2 * hosts, math.inf))
    print(f"  stops paying at {stops} hosts: twice as many make a step less than a tenth faster")


def print_bytes(arguments, text: Path, split: bool) -> None:
    work = Work(1024, split)
    weights = seconds(arguments, work, text, 1, 1, 2)[1]
    for processes in (2, 4):
        counted, formula = mpi_bytes(arguments, work, text, processes), work.sent(processes, weights)
        print(f"mpirun, {'split' if split else 'shared'}, {processes} processes: {counted:,.0f} bytes a step of any length, "
              f"{formula:,} by the formula")  # fmt: skip


if __name__ == "__main__":
    main()
