"""The comparison with other code runs, refuses to time what differs, and says ratios."""

import json
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

from longspan import bench_peers  # noqa: E402

PEERS = '''
import torch.nn.functional as F
def make(name, B, H, L, d):
    def linear(q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2)[..., None]) {0}
    return linear if name == "torch_linear" else F.scaled_dot_product_attention
'''


def run(folder, *more):
    return subprocess.run(
        [sys.executable, "-m", "longspan.bench_peers", "--peers", folder, "--rows", "kernelized", "--lengths", "64",
         "--seconds", "0.05", "--threads", "1", "--eager", *more],
        capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip


def test_ratios(tmp_path):
    (tmp_path / "torch_peers.py").write_text(PEERS.replace("{0}", ""))
    done = run(tmp_path, "--details", "--json", "times.json")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| kernelized | 64 | ")]
    # Two directions, once in the summary and once for each allocator in the details.
    assert len(table) == 6 and all("torch_linear" in line for line in table)
    assert [line.count("[") for line in table] == [2, 2, 1, 1, 1, 1]
    assert "a call on NumPy arrays" in done.stdout
    times = json.loads((tmp_path / "times.json").read_text())
    assert set(times) == {"system", "keeping"}
    assert {entry["name"] for entry in times["keeping"]} == {"longspan", "torch_linear"}


def test_what_differs_is_not_timed(tmp_path):
    (tmp_path / "torch_peers.py").write_text(PEERS.replace("{0}", "+ 1"))
    done = run(tmp_path, "--allocator", "system")
    assert done.returncode != 0 and "differ by" in done.stderr and "ms" not in done.stdout


def test_no_peers(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "no torch_peers.py" in done.stderr


def test_a_slow_opponent_runs_in_the_first_rounds_alone():
    spent = {"longspan": 0.0, "slow": 0.03}
    times = bench_peers._alternate(lambda name: time.sleep(spent[name]), ["longspan", "slow"], 0.05)
    assert len(times["slow"]) == len(times["longspan"]) > sum(t is not None for t in times["slow"]) == bench_peers._LEAST
    found = [dict(row="r", length=1, direction="forward", name=name, seconds=t) for name, t in times.items()]
    ((ratio,),) = bench_peers.ratios(found).values()
    assert ratio.low <= ratio.value <= ratio.high and ratio.value > 5


def test_interval_holds_the_ratio():
    low, high = bench_peers.interval([2.0, 2.1, 1.9, 2.0], [1.0, 1.0, 1.05, 0.95])
    assert 1.8 < low <= 2.0 <= high < 2.3
