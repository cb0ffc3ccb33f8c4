"""Linear attention."""

from .. import _calls, _options
from .._route import attend, step


def kernelized_attention(
    q, k, v, *, feature_map="elu+1", maps=None, is_causal=False, offset=0, key_padding_mask=None, cu_seqlens=None, decay=None,
    log_decay=None, normalize=True, initial_state=None, output_final_state=False, algorithm="auto",
):  # fmt: skip
    """Kernelized attention, without positions, in linear time.

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = phi(q_i) . phi(k_j)``.

    Parameters
    ----------
    q, k, v : array ``[B, H, Lq, d]``, ``[B, Hkv, Lk, d]``, ``[B, Hkv, Lk, dv]``
        Queries, keys and values.
    feature_map : str
        ``phi``. Of each number by itself: ``"elu+1"``, ``"relu"``, ``"softplus"``, ``"exp"``, ``"identity"``. Of a row of ``d``
        numbers to ``m`` features:

        - ``"prf"``: positive random features, ``"prf:128:seed=7"`` for 128 of them drawn from the seed 7; ``"nprf"`` the same of
          rows of length 1.
        - ``"dpfp:2"``: products of neighbours among ``[relu(x), relu(-x)]``, 2 d of them for each of 2 neighbours.
        - ``"taylor2"``: so that the weight is ``1 + s + s**2 / 2`` with ``s = q . k / sqrt(d)``.
        - ``"hedgehog"``: softmax of ``[W x, -W x]``, ``"hedgehog:exp"`` their exponentials; ``"hedgehog:32"`` where ``W`` has
          another width than ``d``.
    maps : pair of arrays ``[H, width, d]``, ``[Hkv, width, d]``, optional
        ``W`` of ``"hedgehog"`` for queries and for keys; other maps learn nothing.
    is_causal, offset, key_padding_mask, cu_seqlens, decay, log_decay, normalize, initial_state, output_final_state, algorithm
        As everywhere in `longspan.ops`.

    Returns
    -------
    array ``[B, H, Lq, dv]``, or ``(array, State)``

    Notes
    -----
    O(L m dv) time; O(m dv) memory beside inputs and outputs.

    ``"elu+1"`` and ``"softplus"`` are ``exp(x)`` far below 0. In float32 a row whose largest weight falls below about ``exp(-87)``
    gives 0, as with ``q`` and ``k`` at -44 and less; ``"exp"``, which keeps a common exponent, and float64 do not.

    References
    ----------
    Katharopoulos et al., *Transformers are RNNs*, 2020 (arXiv:2006.16236). Decay: Sun et al., *Retentive network*, 2023; one
    that tokens bring: Dao and Gu, *Transformers are SSDs*, 2024, there without feature map and normaliser.
    ``prf``: Choromanski et al., *Rethinking attention with Performers*, 2021. ``nprf``: Luo et al., 2021. ``dpfp``: Schlag et al.,
    *Linear transformers are secretly fast weight programmers*, 2021. ``taylor2``: Arora et al.,
    *Simple linear attention language models*, 2024. ``hedgehog``: Zhang et al., *The hedgehog and the porcupine*, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from longspan import ops
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 8), np.float32)
    >>> out = ops.kernelized_attention(q, k, v, is_causal=True)

    The definition, in quadratic time:

    >>> phi = lambda x: np.where(x > 0, x + 1, np.exp(x))
    >>> w = np.tril(phi(q) @ phi(k).swapaxes(2, 3))
    >>> np.allclose(out, w / w.sum(-1, keepdims=True) @ v, atol=1e-4)
    True
    """
    operation = "kernelized_attention"
    options = _options.kernel(operation, k, feature_map, decay, normalize, algorithm, log_decay)
    parameters = _options.maps(operation, feature_map, maps) + _options.gates(log_decay)
    return attend(
        operation, "kernelized", options, q, k, v, parameters,
        is_causal, offset, key_padding_mask, cu_seqlens, initial_state, output_final_state,
    )  # fmt: skip


def kernelized_attention_step(
    q, k, v, state=None, *, feature_map="elu+1", maps=None, decay=None, log_decay=None, normalize=True
):  # fmt: skip
    """One token of `kernelized_attention` under ``is_causal=True``: ``(output [B, H, dv], state)``; see `longspan.ops`. ``log_decay``
    is that of the token, ``[B, Hkv]``."""
    operation = "kernelized_attention_step"
    options = _options.kernel(operation, k, feature_map, decay, normalize, "auto", log_decay)
    parameters = _options.maps(operation, feature_map, maps) + _options.gates(log_decay)
    return step(operation, "kernelized", options, q, k, v, parameters, state)


_calls.declare("kernelized", kernelized_attention)
