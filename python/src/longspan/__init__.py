"""Attention over long sequences at linear cost, with relative positions.

`longspan.ops` works on NumPy arrays and CPU torch tensors; `longspan.torch` has operators with gradients and modules.
"""

from importlib.metadata import version

from . import ops
from ._native import State, get_num_threads, set_num_threads
from .plans import MechanismInfo, Plan, combine, explain, mechanisms

__version__ = version("longspan")

__all__ = [
    "MechanismInfo",
    "Plan",
    "State",
    "combine",
    "explain",
    "get_num_threads",
    "mechanisms",
    "ops",
    "set_num_threads",
]
