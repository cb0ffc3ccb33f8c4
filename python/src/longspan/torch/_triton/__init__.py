"""The mechanisms by Triton, on tensors of a device that it serves: the `cuda` path of the operators (see README.md)."""

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _calls
from ..._calls import Request

#: Feature maps that the kernels have.
MAPS = ("elu+1", "relu", "softplus", "exp", "identity")
_AFT = ("aft-simple", "aft-local", "aft-conv")
#: The widest head, and the widest under ``exp``, whose rows a tile has to hold whole.
WIDEST, WIDEST_EXP = 256, 128
#: The farthest of Shaw's positions that have weights of their own, which a row holds in memory.
WIDEST_RADIUS = 256


def serves(tensor: Tensor) -> bool:
    """Whether tensors like this one are Triton's to serve."""
    return tensor.is_cuda


@functools.lru_cache(maxsize=1)
def _available() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn("longspan: Triton is not installed: CUDA tensors take torch's own operations, which are slower; "
                  "pip install triton", stacklevel=2)  # fmt: skip
    return False


@functools.lru_cache(maxsize=1)
def _triton_version() -> tuple[int, int]:
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def is_exponential(options: str) -> bool:
    """Whether denominators have a second column, of exponents."""
    return bool(_calls.settings(options).get("feature_map") == "exp")


# See `longspan._calls.settings`.
_CONSTANT: tuple[Any, ...] = (_available, _triton_version)
for _function in _CONSTANT:
    _function._dynamo_marked_constant = True


def unsupported(call: Request, tensors: Sequence[Tensor]) -> str | None:
    """What of a call the kernels do not do, in words; ``None`` if they do it all. The one rule by which a call goes to them."""
    if not _available():
        return "a device without Triton"
    if tensors[0].ndim < 3:
        return "queries, keys and values side by side"
    options, (q, k, v, *parameters) = _calls.settings(call.options), tensors
    widest, each_channel = WIDEST, False
    brought = int(options.get("gate") is True)
    if call.mechanism in ("gated", "delta"):
        each_channel = options.get("gate") == "channel"
        options, brought = {"feature_map": "identity", "gate": True}, len(parameters)
        widest = WIDEST // 2 if call.mechanism == "delta" else WIDEST
    elif call.mechanism == "fourier":
        if options.get("axes") or options.get("normalizer") == "literal":
            return "positions that are given" if options.get("axes") else "the literal normaliser"
        widest = WIDEST // 2 if options.get("wave") == "pairs" else WIDEST // 4
    elif call.mechanism == "shaw" and options.get("gate"):
        return "gates beside Shaw's positions"
    elif call.mechanism not in ("kernelized", "shaw", "short-convolution", *_AFT) or options.get("image"):
        return f"the mechanism {call.mechanism}" + " over images" * bool(options.get("image"))
    feature_map, decays = options.get("feature_map", "elu+1"), options.get("decay") is not None
    if feature_map not in MAPS:
        return f"the feature map {feature_map}"
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        return "float64"
    of_ten = q.is_cuda and torch.version.cuda and torch.cuda.get_device_capability(q.device)[0] >= 10
    if of_ten and _triton_version() < (3, 9):
        return "this device by a Triton before 3.9"
    if call.mechanism in _AFT:
        return None
    # Of shapes that do not fit torch's own operations say what was expected.
    if options.get("gate"):
        token = (k.shape[0], v.shape[1], *(k.shape[2:-1] or (1,)))
        own, parameters = parameters[len(parameters) - brought :], parameters[: len(parameters) - brought]
        # `beta`, the last of the delta rule's, has one number a token under any gate.
        shapes = [(*token, k.shape[-1]) if each_channel and x is own[0] else token for x in own]
        if not call.is_causal or call.offset or q.shape[2:] != k.shape[2:] or [tuple(x.shape) for x in own] != shapes:
            return "a mask that is not causal, or gates of another shape"
    if call.mechanism == "short-convolution":
        taps, *bias = parameters
        shape, gates = (k.shape[1], v.shape[-1]), v.shape[-1] if options.get("gated", True) else 0
        fits = taps.shape[0::2] == shape and taps.shape[1] > 0 and all(x.shape == shape for x in bias)
        return None if fits and q.shape[-1] == k.shape[-1] == gates and v.shape[-1] else "taps or gates of another shape"
    if call.mechanism == "fourier":
        width, each = q.shape[-1], 2 if options.get("wave") == "pairs" else 1
        shapes = [(k.shape[1], width // each, 1), *[(q.shape[1], width)] * (len(parameters) - 1)]
        if width % each or [tuple(x.shape) for x in parameters] != shapes:
            return "frequencies or phases of another shape"
    elif feature_map == "exp":
        widest = WIDEST_EXP
    if call.mechanism == "shaw":
        (rel,) = parameters
        if rel.shape[-1] != q.shape[-1] or rel.ndim not in (2, 3) or rel.ndim == 3 and rel.shape[0] != q.shape[1] or rel.shape[-2] % 2 == 0:
            return "a table of positions of another shape"
        if rel.shape[-2] // 2 > WIDEST_RADIUS:
            return f"a radius above {WIDEST_RADIUS}"
    if of_ten and q.shape[1] != k.shape[1]:
        # Triton 3.9 fails to compile the gradients of keys and values.
        return "grouped heads on this device"
    if q.dtype is torch.bfloat16 and (q.shape[-1] % 16 or v.shape[-1] % 16):
        # Products of a warp group that Triton 3.6 compiles for such rows gave wrong gradients on an H200 (docs/gpu.md).
        return "bfloat16 in heads whose width is no multiple of 16"
    # Of one token there is no axis of tokens.
    if not (0 < q.shape[-1] <= widest and 0 < v.shape[-1] <= widest):
        return f"heads wider than {widest}, or of width 0"
    if call.offset > k.shape[2] and call.is_causal and decays:
        return "a decay beyond the last key"
    if not call.is_causal and decays:
        return "a decay with a bidirectional mask"
    return None


def _kernels(call: Request) -> Any:
    """Those of a mechanism. Triton takes long to import, so it is with the first call."""
    module = {"short-convolution": "convolution", "shaw": "shaw", "gated": "gated", "delta": "gated", **dict.fromkeys(_AFT, "aft")}
    return importlib.import_module(f"{__name__}.{module.get(call.mechanism, 'kernelized')}")


def forward(q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[Tensor], call: Request, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, what a backward divides by, and the numbers of the final state."""
    found: tuple[Tensor, Tensor, Tensor | None] = _kernels(call).forward(q, k, v, parameters, call, *rest)
    return found


def backward(*arguments: Any) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of q, k, v and the parameters, and of the initial state's numbers if there were any."""
    found: tuple[list[Tensor], Tensor | None] = _kernels(arguments[7]).backward(*arguments)
    gradients, d_initial = found
    # As a compiler expects; as most are.
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients[:3]] + gradients[3:], d_initial
