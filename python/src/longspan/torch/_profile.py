"""Names of the kernels in torch's profiler."""

from collections.abc import Callable
from typing import Any

import torch

_enabled = getattr(torch.autograd, "_profiler_enabled", lambda: False)


def named(mechanism: str, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, with a name for it where a profiler is at work."""
    if not _enabled():
        return call

    def recorded(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(f"longspan::{mechanism} {part}"):
            return call(*arguments, **options)

    return recorded
