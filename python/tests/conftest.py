"""One thread for torch: its waiting threads spin, and on a busy machine of few cores that takes longer than the work."""

import pytest

try:
    import torch
except ImportError:
    torch = None


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_torch():
    if torch is not None:
        torch.set_num_threads(1)
