"""The linear layers of `transformers`' models on the kernels of `longspan.fla`."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .. import fla


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Any:  # fmt: skip
    shape = value.shape
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = fla.sequences("chunk_gated_delta_rule", seq_idx, shape[:2])
        query, key, value, g, beta = (tensor.flatten(0, 1)[None] for tensor in (query, key, value, g, beta))
    out, state = fla.chunk_gated_delta_rule(query, key, value, g, beta, None, initial_state, output_final_state,
                                            use_qk_l2norm_in_kernel, cu_seqlens)  # fmt: skip
    return out.view(shape), state


def _mamba2_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Any:  # fmt: skip
    # As their own: half-precision outputs come in float32, and are rounded by the caller.
    return fla.mamba_chunk_scan_combined(
        hidden_states.float(), dt, A, B, C, chunk_size, D, None, dt_bias, initial_states, seq_idx if cu_seqlens is None else None,
        cu_seqlens, dt_softplus, dt_limit, return_final_states,
    )  # fmt: skip


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
) -> Any:  # fmt: skip
    if cu_seqlens is not None:
        places = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)[None]
        seq_idx = torch.searchsorted(cu_seqlens.to(places), places, right=True)
    if seq_idx is not None and (before := hidden_states.shape[2] - seq_idx.shape[1]) > 0:
        # A cache puts the latest tokens before, of one sequence, or zeros before a first call of fewer tokens than it keeps.
        if bool(hidden_states[..., :before].any()) and bool((seq_idx[:, 1:] != seq_idx[:, :-1]).any()):
            raise ValueError("accelerate: cache: expected none beside packed sequences that go on, of which it keeps the last one's latest "
                             "tokens alone, got one; give use_cache=False, or each sequence its own row")  # fmt: skip
        seq_idx = torch.cat([seq_idx[:, :1].expand(-1, before), seq_idx], 1)
    if activation in (None, "silu", "swish"):
        return fla.causal_conv1d_fn(hidden_states, weight, bias, seq_idx, activation=activation)
    return ACT2FN[activation](fla.causal_conv1d_fn(hidden_states, weight, bias, seq_idx))


def _in_parts() -> None:
    """What their fused layer returns where it cannot run, before it refuses packed sequences: the layer goes on in parts."""


#: Their functions and ours, which take the same arguments by name, and what tells packed sequences apart.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "recurrent_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _in_parts,
    "causal_conv1d_fn": _convolution,
}


def accelerate(model: nn.Module) -> list[str]:
    """Runs a model's gated linear layers on Longspan's kernels while its tensors are on the CPU, in training and in generation.

    Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-hybrid), Kimi delta attention (Kimi Linear, Ling) and Mamba-2 (Mamba-2, Falcon-H1, Bamba,
    Granite-hybrid, Nemotron-H, Zamba2), and the short convolutions of these and of LFM2. The functions are replaced where the model's own modules find them, so all models of the
    same kind in this process are changed with it. Tensors on other devices go to the functions that were there before.

    Parameters
    ----------
    model : Module
        A model of `transformers`, 5.17 or later.

    Returns
    -------
    list of str
        Names of the layers that were changed; none is no error.

    Examples
    --------
    >>> from transformers import Mamba2Config, Mamba2ForCausalLM
    >>> import longspan.transformers
    >>> config = Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2, vocab_size=64)
    >>> longspan.transformers.accelerate(Mamba2ForCausalLM(config))
    ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    changed = []
    for name, layer in model.named_modules():
        own = [function for kind in type(layer).__mro__ for function in _own(kind)]
        for theirs, ours in own:
            _replace(theirs, ours)
        if own:
            changed.append(name)
    return changed


def _own(layer: type) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The functions that a layer's class, without those that it inherits from, finds in its module, each with ours."""
    found = getattr(sys.modules.get(layer.__module__), "__dict__", {})
    used = _names_used(layer)
    return [(found[name], ours) for name, ours in _FUNCTIONS.items() if name in used and name in found]


@functools.cache
def _names_used(layer: type) -> set[str]:
    """Global names in the methods of a layer's class, also of those that decorators wrap."""
    names: set[str] = set()
    for method in vars(layer).values():
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        names.update(getattr(code, "co_names", ()))
    return names


def _replace(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Rebinds a function in every module that has it."""
    if hasattr(theirs, "_longspan"):
        return

    known = inspect.signature(ours).parameters
    names = list(inspect.signature(theirs).parameters)

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None or first.device.type != "cpu":
            return theirs(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("cu_seqlens") is None:
            # The name of those who call models.
            given["cu_seqlens"] = given.get("cu_seq_lens_q")
        return ours(**{name: value for name, value in given.items() if name in known})

    function._longspan = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        for name in [name for name, value in list(held.items()) if value is theirs]:
            setattr(module, name, function)
