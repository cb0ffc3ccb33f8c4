"""Kernels beside PyTorch run on its threads, with the same bits. In processes of their own: the threads of a process are for good."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

BEGIN = """
import os, sys, time, torch
from pathlib import Path
import longspan, longspan.torch
from longspan import ops

torch.set_num_threads(3)
torch.manual_seed(0)
q, k, v = (torch.randn(2, 3, 700, 32, requires_grad=True) for _ in range(3))

def call():
    out = ops.kernelized_attention(q, k, v, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

def same(results):
    return all(torch.equal(a, b) for a, b in zip(results, expected))

def name(task):
    try:
        return (task / "comm").read_text()
    except OSError:  # It has ended.
        return ""

def threads(wanted, own):
    # A thread names itself when it first runs, which may be after the call that it was started for.
    for _ in range(1000):
        found = sum(name(task).startswith("longspan-") == own for task in Path("/proc/self/task").iterdir())
        if found >= wanted:
            break
        time.sleep(0.01)
    return found

before = threads(0, own=False) if sys.platform == "linux" else None
with torch.no_grad():
    ops.kernelized_attention(q, k, v, is_causal=True)
if before:
    # The first call runs on torch's threads, and so starts them.
    assert threads(before + 2, own=False) == before + 2 and not threads(0, own=True)
expected = call()
"""


def run(code: str) -> None:
    script = textwrap.dedent(BEGIN) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_torch_says_how_many_until_the_user_does():
    run("""
        assert longspan.get_num_threads() == 3
        torch.set_num_threads(2)
        assert longspan.get_num_threads() == 2
        assert same(call())
        longspan.set_num_threads(2)
        assert same(call())
        longspan.set_num_threads(4)
        assert longspan.get_num_threads() == 4
        assert same(call()) and threads(4, own=True) >= 4
        longspan.set_num_threads(0)
        assert longspan.get_num_threads() == 2
    """)


def test_bits_in_any_thread():
    run("""
        import threading
        results = []
        threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(results) == 4 and all(map(same, results))
        torch.set_num_threads(1)
        assert same(call())
    """)


def test_bits_beside_threads_that_spin():
    # Torch's threads get a core late here, and calls go to others in between.
    run("""
        import subprocess
        spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
        try:
            assert all(same(call()) for _ in range(50))
        finally:
            for process in spin: process.kill()
    """)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on this system")
def test_a_fork_starts_threads_of_its_own():
    run("""
        import signal
        child = os.fork()
        if child == 0:
            signal.alarm(100)
            with torch.no_grad():
                # Torch's own operations would wait for threads that are not there; kernels do not.
                out = ops.kernelized_attention(q, k, v, is_causal=True)
            assert sys.platform != "linux" or threads(3, own=True) == 3
            # As torch's data loader does in its workers.
            torch.set_num_threads(1)
            assert longspan.get_num_threads() == 1
            os._exit(0 if out.numpy().tobytes() == expected[0].numpy().tobytes() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_a_new_thread_uses_as_many_threads_as_torch_was_told():
    code = (
        "import threading, torch, longspan, longspan.torch\n"
        "torch.set_num_threads(1)\n"
        "thread = threading.Thread(target=lambda: print(longspan.get_num_threads(), torch.get_num_threads()))\n"
        "thread.start(); thread.join()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("environment, count", [
    ({"LONGSPAN_NUM_THREADS": "3"}, 3), ({"LONGSPAN_NUM_THREADS": "3", "RAYON_NUM_THREADS": "5"}, 3), ({"RAYON_NUM_THREADS": "5"}, 5),
    ({"LONGSPAN_NUM_THREADS": "none", "RAYON_NUM_THREADS": "5"}, 5),
])  # fmt: skip
def test_the_environment_names_a_number_of_threads(environment: dict[str, str], count: int) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("LONGSPAN_NUM_THREADS", "RAYON_NUM_THREADS")}
    code = "import longspan, sys; sys.exit(longspan.get_num_threads())"
    assert subprocess.run([sys.executable, "-c", code], env={**kept, **environment}).returncode == count
