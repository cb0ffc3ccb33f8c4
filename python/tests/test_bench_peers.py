"""The comparison with other code runs, refuses to time what differs, and says ratios."""

import json
import subprocess
import sys

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
         "--seconds", "0.05", "--threads", "1", *more],
        capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip


def test_ratios(tmp_path):
    (tmp_path / "torch_peers.py").write_text(PEERS.replace("{0}", ""))
    done = run(tmp_path, "--both-allocators", "--json", "times.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kernelized, L=64, forward + backward: longspan") == 2
    assert "torch_linear" in done.stdout and "sdpa" in done.stdout and " x [" in done.stdout
    times = json.loads((tmp_path / "times.json").read_text())
    assert {entry["name"] for entry in times} == {"longspan", "torch_linear", "sdpa"}


def test_what_differs_is_not_timed(tmp_path):
    (tmp_path / "torch_peers.py").write_text(PEERS.replace("{0}", "+ 1"))
    done = run(tmp_path)
    assert done.returncode != 0 and "differ by" in done.stderr and "ms" not in done.stdout


def test_no_peers(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "no torch_peers.py" in done.stderr


def test_interval_holds_the_ratio():
    low, high = bench_peers.interval([2.0, 2.1, 1.9, 2.0], [1.0, 1.0, 1.05, 0.95])
    assert 1.8 < low <= 2.0 <= high < 2.3
