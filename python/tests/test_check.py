"""The list of cases that every back end runs: here the kernels in single precision, and torch's own operations as on another device."""

import longspan
import pytest
import torch
from agreement import elsewhere
from longspan.torch import _check
from longspan.torch._check import CASES, examine, exactly


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case):
    exact = exactly(case)
    row = examine(case, "cpu", torch.float32, exact)
    assert row.right and row.by == "the CPU's kernels", row
    with elsewhere():
        for dtype in (torch.float32, torch.float64):
            row = examine(case, "cpu", dtype, exact)
            assert row.right and row.by == "torch's operations", row


@pytest.mark.parametrize("case", [case for case in CASES if case.streams and not (case.padding or case.inputs) and case.keys in (40, 70)], ids=str)
def test_what_is_no_number_reaches_the_same_rows_and_states(case):
    """Of queries, keys, values, and gates."""
    tensors = case.tensors(torch.float64)
    del tensors[3]
    for bad in range(len(tensors) if case.mechanism in ("gated", "delta") else 3):
        given = [x.clone() for x in tensors]
        given[bad][0, 0, 30] = float("nan")
        expected, state = case.attend(*given, output_final_state=True)
        with elsewhere():
            got, numbers = case.attend(*given, output_final_state=True)
        assert torch.equal(got.isfinite().all(-1), expected.isfinite().all(-1))
        assert numbers.numbers.isnan().any() == torch.from_numpy(state.numbers).isnan().any()


def test_the_list_has_every_mechanism():
    names = {"softmax" if name == "softmax-window" else name for name in longspan.mechanisms()}
    assert {case.mechanism for case in CASES} == names | {"depthwise-convolution"}


def test_what_is_wrong_is_an_error_that_names_it(monkeypatch, capsys):
    assert all(row.right for row in longspan.check("cpu", [torch.float64], ["aft-simple"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mechanism and case") and lines[1].startswith("aft-simple: plain ") and "float64" in lines[1]
    right = _check.FUNCTIONS["aft-simple"]

    def wrong(q, *rest, **options):
        # Right in doubles, to which it is compared.
        return right(q if q.dtype is torch.float64 else q + 1e-4, *rest, **options)

    monkeypatch.setitem(_check.FUNCTIONS, "aft-simple", wrong)
    with pytest.raises(RuntimeError, match="check: cpu: expected every case right, got [0-9]+ of [0-9]+ wrong; the first:\naft-simple"):
        longspan.check("cpu", mechanisms=["aft-simple"], echo=False)
    with pytest.raises(ValueError, match="check: mechanisms: expected some of kernelized, .* got aft"):
        longspan.check("cpu", mechanisms=["aft"])
