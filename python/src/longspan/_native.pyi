"""The compiled half: see `longspan.ops` for what to call."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .plans import Estimate

@final
class State:
    def __new__(
        cls, mechanism: str, options: str, batch: int, kv_heads: int, parts: Sequence[int],
        numbers: NDArray[np.floating[Any]] | bytes, dtype: str | None = None,
    ) -> State: ...  # fmt: skip
    @staticmethod
    def from_numbers(
        mechanism: str, options: str, batch: int, kv_heads: int, parts: Sequence[int], numbers: NDArray[np.floating[Any]]
    ) -> State: ...
    @property
    def mechanism(self) -> str: ...
    @property
    def options(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def parts(self) -> list[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def numbers(self) -> NDArray[np.floating[Any]]: ...
    @property
    def nbytes(self) -> int: ...
    def clone(self) -> State: ...
    def select(self, indices: Any) -> State: ...
    def __copy__(self) -> State: ...
    def __deepcopy__(self, memo: Any) -> State: ...

@final
class Mechanism:
    def __new__(cls, name: str, options: str, operation: str | None = None) -> Mechanism: ...
    def forward(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], parameters: tuple[NDArray[Any], ...], is_causal: bool,
        offset: int, key_padding_mask: NDArray[np.bool_] | None = None,
        cu_seqlens: tuple[Sequence[int], Sequence[int]] | None = None, initial_state: State | None = None,
        final_state: bool = False, denominators: bool = False, token_major: bool = False,
    ) -> tuple[NDArray[Any], NDArray[Any] | None, State | None]: ...  # fmt: skip
    def backward(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], parameters: tuple[NDArray[Any], ...], is_causal: bool,
        offset: int, key_padding_mask: NDArray[np.bool_] | None, cu_seqlens: tuple[Sequence[int], Sequence[int]] | None,
        out: NDArray[Any], denominators: NDArray[Any], d_out: NDArray[Any], initial_state: State | None = None,
        d_final_state: State | None = None, *, token_major: Sequence[bool],
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], list[NDArray[Any]], State | None]: ...  # fmt: skip
    def step(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], parameters: tuple[NDArray[Any], ...], state: State | None = None,
    ) -> tuple[NDArray[Any], State]: ...  # fmt: skip
    def empty_state(self, sizes: Sequence[int]) -> State: ...
    def combine(self, earlier: State, later: State, parameters: tuple[NDArray[Any], ...]) -> State: ...
    def kernel_seconds(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], parameters: tuple[NDArray[Any], ...], is_causal: bool,
        repeats: int,
    ) -> list[float]: ...  # fmt: skip
    def parameter_shapes(self, sizes: Sequence[int]) -> list[tuple[str, list[int]]]: ...
    def plan(
        self, sizes: Sequence[int], is_causal: bool, offset: int, with_backward: bool
    ) -> tuple[str, str, list[Estimate]]: ...

def encoder_layer_step(
    mechanism: Mechanism, x: NDArray[Any], weights: tuple[NDArray[Any] | None, ...], parameters: tuple[NDArray[Any], ...],
    heads: tuple[int, int], epsilons: tuple[float, float], activation: str, norm_first: bool, state: State | None = None,
) -> tuple[NDArray[Any], State]: ...  # fmt: skip
def mechanisms() -> list[tuple[str, str, list[str]]]: ...
def random_rows(feature_map: str, head_dim: int) -> NDArray[np.float64] | None: ...
def set_num_threads(threads: int) -> None: ...
def get_num_threads() -> int: ...
def use_openmp_of(library: str, get_num_threads: Callable[[], int]) -> bool: ...
def seen_by_kernels(array: NDArray[Any]) -> tuple[int, bool]: ...
