"""Shaw's relative positions."""

from typing import Any

from .. import _calls, _options
from .._route import attend, step


def shaw_options(
    operation: str, k: Any, rel: Any, kernelized: bool, feature_map: str, rel_feature_map: str, decay: Any, normalize: bool,
    algorithm: str, log_decay: Any = None, **more: Any,
) -> str:  # fmt: skip
    _options.expect_type(operation, "kernelized", kernelized, bool)
    if rel_feature_map not in ("same", "identity"):
        raise ValueError(f"{operation}: rel_feature_map: expected 'same' or 'identity', got {rel_feature_map!r}")
    shape = getattr(rel, "shape", None)
    if shape is None:
        raise TypeError(f"{operation}: rel: expected an array like q, got {type(rel).__name__}")
    if len(shape) not in (2, 3) or shape[-2] % 2 != 1:
        raise ValueError(
            f"{operation}: rel: expected shape (heads, 2R+1, head_dim) or (2R+1, head_dim), got shape {tuple(shape)}"
        )
    return _options.kernel(
        operation, k, feature_map, decay, normalize, algorithm, log_decay, kernelized=kernelized, rel_feature_map=rel_feature_map,
        **more,
    )  # fmt: skip


def shaw_attention(
    q, k, v, rel, *, kernelized=True, feature_map="elu+1", maps=None, rel_feature_map="same", is_causal=False, offset=0,
    key_padding_mask=None, cu_seqlens=None, decay=None, log_decay=None, normalize=True, initial_state=None,
    output_final_state=False, algorithm="auto",
):  # fmt: skip
    """Kernelized attention with Shaw's relative positions, in linear time.

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = phi(q_i) . (phi(k_j) + rho(rel[clip(j - i - offset, -R, R) + R]))``.

    Parameters
    ----------
    q, k, v : array ``[B, H, Lq, d]``, ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Queries, keys and values.
    rel : array ``[H, 2R + 1, d]`` or ``[2R + 1, d]``
        A vector for each distance, of each head or of all: row 0 stands for "R or more before", row R for "here", row 2R for "R or
        more after". With ``rel_feature_map="identity"`` rows have as many numbers as ``phi`` has features.
    kernelized : bool
        False leaves ``phi(k_j)`` out.
    feature_map : str
        ``phi``; see `kernelized_attention`.
    maps : pair of arrays, optional
        What ``feature_map="hedgehog"`` learns.
    rel_feature_map : str
        ``rho``: ``"same"`` as ``feature_map``, or ``"identity"``.
    is_causal, offset, key_padding_mask, cu_seqlens, decay, log_decay, normalize, initial_state, output_final_state, algorithm
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, dv]``, or ``(array, State)``

    Notes
    -----
    O(L (2R + 1) (d + dv)) time beside that of `kernelized_attention`: all keys farther than R share one running sum.

    References
    ----------
    Shaw et al., *Self-attention with relative position representations*, 2018 (arXiv:1803.02155).

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> random = np.random.default_rng(0)
    >>> q, k, v = random.standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> rel = random.standard_normal((2, 2 * 16 + 1, 8), np.float32)
    >>> out = ops.shaw_attention(q, k, v, rel, is_causal=True)

    The definition, in quadratic time:

    >>> phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    >>> i, j = np.ogrid[:100, :100]
    >>> of_pair = phi(k)[:, :, None] + phi(rel)[:, np.clip(j - i, -16, 16) + 16]
    >>> w = np.tril(np.einsum("bhid,bhijd->bhij", phi(q), of_pair))
    >>> np.allclose(out, w / w.sum(-1, keepdims=True) @ v, atol=1e-4)
    True
    """
    operation = "shaw_attention"
    options = shaw_options(
        operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, algorithm, log_decay
    )  # fmt: skip
    return attend(
        operation, "shaw", options, q, k, v, (rel, *_options.maps(operation, feature_map, maps), *_options.gates(log_decay)),
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def shaw_attention_step(
    q, k, v, rel, state=None, *, kernelized=True, feature_map="elu+1", maps=None, rel_feature_map="same", decay=None,
    log_decay=None, normalize=True,
):  # fmt: skip
    """One token of `shaw_attention` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. ``log_decay`` is that
    of the token, ``[B, Hkv]``."""
    operation = "shaw_attention_step"
    options = shaw_options(operation, k, rel, kernelized, feature_map, rel_feature_map, decay, normalize, "auto", log_decay)
    parameters = (rel, *_options.maps(operation, feature_map, maps), *_options.gates(log_decay))
    return step(operation, "shaw", options, q, k, v, parameters, state)


_calls.declare(
    "shaw", shaw_attention, lambda q, offset, rel, *_: {"radius": rel.shape[-2] // 2, "shared": rel.ndim == 2}, radius=16
)
