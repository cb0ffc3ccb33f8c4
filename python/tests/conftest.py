"""One thread for torch: its waiting threads spin, and on a busy machine of few cores that takes longer than the work. And for a test
the same numbers, whatever ran before it."""

import pytest

try:
    import torch
except ImportError:
    torch = None


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_torch():
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    if torch is not None:
        torch.manual_seed(0)
