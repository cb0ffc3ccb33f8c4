"""Attention over long sequences at linear cost, with relative positions.

`longspan.ops` works on NumPy arrays and CPU torch tensors; `longspan.torch` has operators with gradients and modules,
`longspan.fla` flash-linear-attention's functions, `longspan.transformers` attention for models of Hugging Face. They are imported when they are
first used.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from . import ops
from ._native import State, empty_cache, get_num_threads, set_num_threads
from .plans import MechanismInfo, Plan, combine, explain, mechanisms

if TYPE_CHECKING:
    from . import fla as fla
    from . import torch as torch
    from . import transformers as transformers
    from .torch import check as check
else:
    # Found by completion, without the time that importing PyTorch takes.
    def __getattr__(name):
        if name == "check":
            return __getattr__("torch").check
        if name not in ("fla", "torch", "transformers"):
            raise AttributeError(f"module 'longspan' has no attribute {name!r}")
        from importlib import import_module

        try:
            return import_module(f"longspan.{name}")
        except ModuleNotFoundError as error:
            extra = "transformers" if name == "transformers" else "torch"
            raise AttributeError(f"longspan.{name}: needs {error.name}: pip install 'longspan[{extra}]'") from error

    def __dir__():
        return [*globals(), "check", "fla", "torch", "transformers"]


__version__ = version("longspan")

__all__ = [
    "MechanismInfo",
    "Plan",
    "State",
    "combine",
    "empty_cache",
    "explain",
    "get_num_threads",
    "mechanisms",
    "ops",
    "set_num_threads",
]
