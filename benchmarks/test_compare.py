"""The comparison with other code runs, refuses to time what differs, and says ratios."""

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import compare
import mkl_speed
import pytest
import torch

FOLDER = Path(__file__).parent


def run(folder, *more):
    return subprocess.run(
        [sys.executable, folder / "compare.py", "--lengths", "128", "--seconds", "0.05", "--threads", "1", "--eager", *more],
        capture_output=True, text=True, timeout=300, cwd=folder,
    )


def test_ratios(tmp_path):
    done = run(FOLDER, "--rows", "kernelized", "--details", "--json", tmp_path / "times.json")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| kernelized | 128 | ")]
    times = json.loads((tmp_path / "times.json").read_text())
    assert set(times) == {"system", "keeping"}
    names = {entry["name"] for entry in times["keeping"]}
    assert names == {"longspan", "linear"} | ({"jax_linear"} if compare._installed("jax_peers") else set())
    # Both directions once in the summary, and for every opponent once under each allocator in the details.
    assert len(table) == 1 + 4 * (len(names) - 1)
    assert "a call on NumPy arrays" in done.stdout and "| 16,384 |" in done.stdout


@pytest.mark.parametrize("name", compare.ROWS)
def test_every_opponent_computes_the_same(name):
    row = compare.ROWS[name]
    if not row.same and not row.softmax and not any(compare._installed(module) for module, _ in row.elsewhere):
        pytest.skip("the opponent's library is not installed")
    options = compare.parse(["--heads", "2", "--head-dim", "8", "--seconds", "0.001", "--threads", "1", "--eager"])
    torch.set_num_threads(1)
    found = compare.measure(name, 256, options)
    assert {entry["name"] for entry in found} >= {"longspan", *row.same, *row.softmax}
    assert all(seconds is None or seconds > 0 for entry in found for seconds in entry["seconds"])


def test_what_differs_is_not_timed(tmp_path):
    for path in FOLDER.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    peers = tmp_path / "torch_peers.py"
    peers.write_text(peers.read_text().replace("return F.elu(x) + 1", "return F.elu(x) + 2"))
    done = run(tmp_path, "--rows", "kernelized", "--allocator", "system")
    assert done.returncode != 0 and "differ by" in done.stderr and "ms" not in done.stdout


def test_a_slow_opponent_runs_in_the_first_rounds_alone():
    spent = {"longspan": 0.0, "slow": 0.03}
    times = compare._alternate(lambda name: time.sleep(spent[name]), ["longspan", "slow"], 0.05)
    assert len(times["slow"]) == len(times["longspan"]) > sum(t is not None for t in times["slow"]) == compare._LEAST
    found = [dict(row="r", length=1, direction="forward", name=name, seconds=t) for name, t in times.items()]
    ((ratio,),) = compare.ratios(found).values()
    assert ratio.low <= ratio.value <= ratio.high and ratio.value > 5
    assert "[" not in str(ratio), "an interval of four rounds"


def test_interval_holds_the_ratio():
    low, high = compare.interval([2.0, 2.1, 1.9, 2.0], [1.0, 1.0, 1.05, 0.95])
    assert 1.8 < low <= 2.0 <= high < 2.3


def test_mkl_is_told_that_it_runs_on_intels():
    assert ctypes.CDLL(str(mkl_speed.library())).mkl_serv_intel_cpu_true() == 1
    assert set(mkl_speed.environment()) <= {"LD_PRELOAD"}
