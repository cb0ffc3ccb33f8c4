"""The package's annotations hold, its stubs say what there is, and a type checker finds out what a call returns."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mypy")
pytest.importorskip("basedpyright")

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"

CALLS = """
import numpy as np
import torch
from numpy.typing import NDArray
from typing import Any
from typing_extensions import assert_type
from torch import nn
import longspan.torch
from longspan import ops

x: NDArray[np.float32] = np.zeros((1, 1, 3, 2), np.float32)
t = torch.zeros(1, 1, 3, 2)
assert_type(ops.kernelized_attention(t, t, t, is_causal=True), torch.Tensor)
assert_type(ops.aft_simple(t, t, t, is_causal=True, output_final_state=True), tuple[torch.Tensor, longspan.State])
out, state = ops.shaw_attention(x, x, x, x[0], is_causal=True, output_final_state=True)
ops.shaw_attention_step(x[:, :, 0], x[:, :, 0], x[:, :, 0], x[0], state)
assert_type(longspan.explain("shaw", radius=3).algorithm, str)
encoder = longspan.torch.TransformerEncoderLayer(12, 3, 16, batch_first=True)
nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
nn.TransformerDecoder(longspan.torch.TransformerDecoderLayer(12, 3, 16), 2)
assert_type(encoder.self_attn, longspan.torch.MultiheadAttention)
assert_type(encoder.step(torch.zeros(2, 12))[0], torch.Tensor)
assert_type(longspan.torch.TransformerDecoderLayer(12, 3).step(t[0, :, 0], t[0], position=3)[0], torch.Tensor)
tensors = longspan.torch.TensorState.of(state)
assert_type(tensors.numbers, torch.Tensor)
assert_type(tensors.detach(), longspan.State)
assert_type(longspan.combine("shaw", tensors, state, radius=16), longspan.torch.TensorState)
"""
WRONG = """
import torch
from longspan import ops
t = torch.zeros(1, 1, 3, 2)
ops.kernelized_attention(t, t, t, is_causl=True)
ops.kernelized_attention(t, t, t).no_such_method()
"""


def check(*arguments, cwd):
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd)


def test_the_package(tmp_path):
    done = check("mypy", "--config-file", SETTINGS, "-p", "longspan", cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_stub_of_operators_is_what_their_signatures_make():
    spec = importlib.util.spec_from_file_location("stubs", Path(__file__).parents[1] / "stubs.py")
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    assert stubs.STUB.read_text(encoding="utf-8") == stubs.stub(), "run: python stubs.py"


def test_stubs_say_what_there_is(tmp_path):
    done = check("mypy.stubtest", "longspan.ops", "longspan._native", "--mypy-config-file", SETTINGS, cwd=tmp_path)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("error") and "disjoint base" not in line
             and "_native.__all__" not in line]  # fmt: skip
    assert not wrong, done.stdout
    assert "checked 10 modules" in done.stdout or done.returncode == 0, done.stdout + done.stderr


# basedpyright is pyright with the node that it runs on: pyright itself fetches one from elsewhere. What torch imports of others takes mypy longest.
@pytest.mark.parametrize("checker", [["mypy", "--config-file", "mypy.ini"], ["basedpyright", "--pythonpath", sys.executable]], ids=lambda c: c[0])
def test_calls(checker, tmp_path):
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-transformers.*,triton.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
    # Pyright's own rules, not those that basedpyright adds.
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    for text, good in ((CALLS, True), (WRONG, False)):
        (tmp_path / "calls.py").write_text(text)
        done = check(*checker, "calls.py", cwd=tmp_path)
        assert (done.returncode == 0) == good, done.stdout
    assert "calls.py:5:" in done.stdout and "no_such_method" in done.stdout
