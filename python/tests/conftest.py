"""One thread for torch: its waiting threads spin, and on a busy machine of few cores that takes longer than the work. And for a test
the same numbers, whatever ran before it. Files that import what is not installed are left out."""

import importlib.util
import re
from pathlib import Path

import pytest

try:
    import torch
except ImportError:
    torch = None

LACKING = [name for name in ("torch", "transformers", "triton") if importlib.util.find_spec(name) is None]
if torch is not None and not torch.distributed.is_available():
    LACKING += ["distributed", "test_torch_context_parallel"]
# Of the imports that a file begins with; what is imported further down, a test asks for itself.
HEADS = {path.name: path.read_text(encoding="utf-8").split("\n\n\n")[0] for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = [file for file, head in HEADS.items() if re.search(rf"(?m)^(import|from) .*\b({'|'.join(LACKING) or '$^'})\b", head)]


def pytest_report_header():
    return f"left out without {', '.join(LACKING)}: {', '.join(sorted(collect_ignore))}" if collect_ignore else None


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_torch():
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    if torch is not None:
        torch.manual_seed(0)
