"""Weights in files as the command writes them, and the seal of a run's folder."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from .aft import AftConv, AftFull
from .gated_norm import GatedRMSNorm
from .mechanisms import ShawAttention, ToeplitzAttention
_Read = TypeVar("_Read")


def _file_entry(name: str, tensor: Tensor, module: nn.Module) -> tuple[str, Tensor]:
    """Name and contents in a file of a parameter of ``module``."""
    prefix, _, last = name.rpartition(".")
    if isinstance(module, nn.Linear) and last == "weight":
        return name, tensor.T
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, GatedRMSNorm)):
        return f"{prefix}.{'gamma' if last == 'weight' else 'beta'}", tensor
    if last in ("map_queries", "map_keys"):
        return f"{prefix}.map.{last[4:]}", tensor
    if isinstance(module, ShawAttention) and last == "rel":
        return f"{prefix}.relative", tensor if tensor.dim() == 3 else tensor[None]
    if isinstance(module, (ToeplitzAttention, AftConv)) and tensor.dim() == 3:
        return name, tensor.flatten(1)
    if isinstance(module, AftFull) and last == "u":
        return f"{prefix}.w", tensor
    return name, tensor


def _parameters(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Views of a model's parameters, or of others in their place by name, as they stand in a file."""
    entries = {}
    for prefix, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            own = f"{prefix}.{last}" if prefix else last
            name, view = _file_entry(own, (parameter if values is None else values[own]).detach(), module)
            entries[name] = view
    return entries


def read_file(path: Path, read: Callable[[Path], _Read]) -> _Read:
    """What ``read`` finds in a file of safetensors."""
    try:
        return read(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or no safetensors file: {error}") from error


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Reads the command's weights into a model.

    Parameters
    ----------
    model : Module
        A `Seq2Seq`, a `SeriesModel`, or any part of one with its own file. Nothing in it changes where something is wrong.
    path : path
        A ``model.safetensors``.

    Raises
    ------
    ValueError
        Where the file is damaged or has other parameters.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import torch
    >>> from longspan.torch import ShawAttention
    >>> from longspan.torch.runs import load_weights, save_weights
    >>> one, other = ShawAttention(4, 8), ShawAttention(4, 8)
    >>> with TemporaryDirectory() as folder:
    ...     save_weights(one, Path(folder, "model.safetensors"))
    ...     load_weights(other, Path(folder, "model.safetensors"))
    >>> torch.equal(one.rel, other.rel)
    True
    """
    path = Path(path)
    found = read_file(path, load_file)
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name}: expected a floating-point type, got {tensor.dtype}")
    parameters = _parameters(model)
    missing, surplus = sorted(parameters.keys() - found.keys()), sorted(found.keys() - parameters.keys())
    if missing or surplus:
        raise ValueError(f"{path}: expected the parameters of this model, got none for {missing[:3]} and {surplus[:3]} "
                         "besides")  # fmt: skip
    for name, view in parameters.items():
        if tuple(view.shape) != tuple(found[name].shape):
            raise ValueError(f"{path}: {name}: expected shape {tuple(view.shape)}, got {tuple(found[name].shape)}")
    for name, view in parameters.items():
        view.copy_(found[name])


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes weights so that the command reads them in the place of a run's ``model.safetensors``.

    It seals the file with the others of the run, if ``path`` is in the folder of one. As the command does, it replaces the old file
    in one step: whenever the computer stops, one of both is there, whole.

    Parameters
    ----------
    model : Module
        A `Seq2Seq` or a `SeriesModel`.
    path : path
        Where to.

    Examples
    --------
    See `load_weights`, its inverse.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from longspan.torch import AftLocal
    >>> from longspan.torch.runs import save_weights
    >>> with TemporaryDirectory() as folder:
    ...     save_weights(AftLocal(4, 8, window=2, length=10), Path(folder, "model.safetensors"))
    ...     [path.name for path in Path(folder).iterdir()]
    ['model.safetensors']
    """
    path = Path(path)
    files = {path.name: weights_file(model)}
    if path.with_name("seal.json").exists():
        store(path.parent, files)
    else:
        _replace(path, files[path.name])


def weights_file(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> bytes:
    """The contents of a ``model.safetensors``: of the model's parameters, or of ``values`` with their names."""
    entries = _parameters(model, values)
    return save({name: view.to("cpu", torch.float32).clone(memory_format=torch.contiguous_format) for name, view in entries.items()})


def store(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a run folder, or one that is to be a run's, and seals them with those that are sealed there."""
    seal = folder / "seal.json"
    sealed = json.loads(seal.read_bytes())["files"] if seal.exists() else {}
    # As the command does: the seal allows the old contents and the new, then the new alone.
    now = {name: [hashlib.sha256(contents).hexdigest()] for name, contents in files.items()}
    if sealed:
        _seal(seal, {**sealed, **{name: [*sealed.get(name, []), *one] for name, one in now.items()}})
    for name, contents in files.items():
        _replace(folder / name, contents)
    _seal(seal, {**sealed, **now})


def _seal(path: Path, files: dict[str, list[str]]) -> None:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    seal = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "files": files}
    _replace(path, (json.dumps(seal, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def _replace(path: Path, contents: bytes) -> None:
    """Writes a file under a temporary name, to the disk, and gives it its name."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
