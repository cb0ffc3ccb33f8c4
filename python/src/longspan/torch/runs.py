"""Runs of the `longspan` command in PyTorch: read a folder that ``longspan train`` made of pairs, or write weights that
it reads. Runs of texts and of labelled texts are read by the command alone (``longspan generate``, ``longspan predict``).

A run folder of pairs holds ``config.json``, ``source_tokenizer.json``, ``target_tokenizer.json`` and ``model.safetensors``.
Names in the weights' file, with ``i`` counting blocks from 0:

============================================================  ========================  =====================================
file                                                          shape                     here
============================================================  ========================  =====================================
``source_embedding.weight``, ``target_embedding.weight``      ``[vocab, d_model]``      the same
``encoder.i.attention.query_key_value.{weight,bias}``         ``[d_model, 3 d_model]``  the same, weight transposed
``encoder.i.attention.output.{weight,bias}``                  ``[d_model, d_model]``    the same, weight transposed
``encoder.i.attention.attention....``                         see below                 see below
``encoder.i.feed_forward.{inner,outer}.{weight,bias}``        ``[in, out]``             the same, weight transposed
``encoder.i.{attention,feed_forward}_norm.{gamma,beta}``      ``[d_model]``             ``...{weight,bias}``
``decoder.i....``, and ``decoder.i.cross_attention...``       as the encoder's
``encoder_norm``, ``decoder_norm`` ``.{gamma,beta}``          ``[d_model]``             ``...{weight,bias}``; pre-norm only
``output.{weight,bias}``                                      ``[d_model, vocab]``      the same, weight transposed
============================================================  ========================  =====================================

What the mechanism of ``attention`` and ``cross_attention`` learns:

==============  =======================================================================================================
shaw            ``relative`` ``[heads, 2R+1, d]``, here ``rel``; a shared one is ``[1, 2R+1, d]`` there, ``[2R+1, d]`` here
fourier         ``a`` ``[heads, d, 1]`` (rotary: ``[heads, d/2, 1]``), ``b``, ``c``, ``beta`` ``[heads, d]`` as far as free
toeplitz        ``bias`` ``[heads, entries]``; a grid's is ``[heads, rows, columns]`` here
aft-full        ``w`` and ``z`` ``[length, rank]``, here ``u`` and ``z``; dense: ``w`` ``[length, length]``
aft-local       ``w`` ``[length, 2 window - 1]``
aft-conv        ``w`` ``[heads, taps]``, ``gamma`` and ``beta`` ``[heads]``; ``query_key_value`` is ``2 d_model + heads`` wide
others          nothing
hedgehog        in every mechanism ``map.queries`` and ``map.keys`` ``[heads, width, d]``, here ``map_queries``, ``map_keys``
==============  =======================================================================================================

A decoder with AFT attends to the encoder's output with Shaw's attention of default options, all others with the mechanism
itself. Mechanisms that do not see the order of tokens (kernelized, aft-simple, softmax) get sines and cosines.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .mechanisms import (
    AftConv,
    AftFull,
    AftLocal,
    AftSimple,
    FourierAttention,
    KernelizedAttention,
    ShawAttention,
    SoftmaxAttention,
    ToeplitzAttention,
)

__all__ = [
    "END",
    "PAD",
    "Run",
    "START",
    "Seq2Seq",
    "Tokenizer",
    "UNKNOWN",
    "load_run",
    "load_weights",
    "save_weights",
]

#: Ids that every tokenizer of the command shares; what it knows itself comes after.
PAD, START, END, UNKNOWN = 0, 1, 2, 3
_SPECIALS = 4


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, as the command does it.

    Parameters
    ----------
    kind : str
        ``"characters"``, ``"words"`` or ``"bytes"``.
    vocabulary : tuple of str
        What stands for the ids from 4 on; `PAD`, `START`, `END` and `UNKNOWN` are 0 to 3. Bytes need none.

    Examples
    --------
    >>> from longspan.torch.runs import Tokenizer
    >>> tokenizer = Tokenizer("characters", ("a", "b"))
    >>> tokenizer.encode("abba?"), len(tokenizer)
    ([4, 5, 5, 4, 3], 6)
    >>> tokenizer.decode([4, 5, 5, 4, 2])
    'abba'

    ``Tokenizer.load`` reads what a run keeps:

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "source_tokenizer.json")
    ...     _ = path.write_text('{"kind": "characters", "vocabulary": ["a", "b"]}')
    ...     Tokenizer.load(path) == tokenizer
    True
    """

    kind: str
    vocabulary: tuple[str, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads a tokenizer of the command.

        Parameters
        ----------
        path : path
            A run's ``source_tokenizer.json`` or ``target_tokenizer.json``.

        Returns
        -------
        Tokenizer
            The same.

        Raises
        ------
        ValueError
            For a ``tokenizer.json`` of another kind.
        """
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        kind = stored.get("kind")
        if kind not in ("characters", "words", "bytes"):
            raise ValueError(f"{path}: kind: expected characters, words or bytes, got {kind!r}; read other tokenizers "
                             "with the package tokenizers, and add 4 to their ids")  # fmt: skip
        return cls(kind, tuple(stored.get("vocabulary", ())))

    def __len__(self) -> int:
        return _SPECIALS + (256 if self.kind == "bytes" else len(self.vocabulary))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start and end.

        Parameters
        ----------
        text : str
            Any.

        Returns
        -------
        list of int
            `UNKNOWN` for what is not in the vocabulary.
        """
        if self.kind == "bytes":
            return [_SPECIALS + byte for byte in text.encode()]
        ids = {entry: id for id, entry in enumerate(self.vocabulary, _SPECIALS)}
        if self.kind == "words":
            return [ids.get(word, UNKNOWN) for word in text.split()]
        return [ids.get(c, ids.get(c.lower(), UNKNOWN)) for c in text]

    def decode(self, ids: list[int]) -> str:
        """The text of ids.

        Parameters
        ----------
        ids : list of int
            Special ones are left out.

        Returns
        -------
        str
            Bytes that are no UTF-8 become replacement characters.
        """
        own = [id - _SPECIALS for id in ids if id >= _SPECIALS]
        if self.kind == "bytes":
            return bytes(own).decode(errors="replace")
        return (" " if self.kind == "words" else "").join(self.vocabulary[id] for id in own)


class _MultiHead(nn.Module):
    def __init__(self, d_model: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.widths = (d_model, heads * attention.key_dim, d_model)
        self.query_key_value = nn.Linear(d_model, sum(self.widths))
        self.output = nn.Linear(d_model, d_model)
        self.attention = attention
        self.heads = heads

    def forward(self, x: Tensor, memory: Tensor | None = None, **mask: Any) -> Tensor:
        if memory is None:
            q, k, v = self.query_key_value(x).split(self.widths, -1)
        else:
            weight, bias = self.query_key_value.weight, self.query_key_value.bias
            of = zip((x, memory, memory), weight.split(self.widths), bias.split(self.widths))
            q, k, v = (F.linear(x, w, b) for x, w, b in of)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out: Tensor = self.output(self.attention(q, k, v, **mask).transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(F.relu(self.inner(x)))
        return out


class _Block(nn.Module):
    def __init__(self, config: dict[str, Any], decoder: bool) -> None:
        super().__init__()
        width, heads = config["d_model"], config["heads"]
        self.attention = _MultiHead(width, heads, _attention(config))
        self.attention_norm = nn.LayerNorm(width)
        if decoder:
            # AFT's queries only gate a mean that all of them share: it cannot select anything from a memory.
            other = {"attention": "shaw"} if config["attention"].startswith("aft-") else {}
            sizes = {"heads": heads, "d_model": width}
            self.cross_attention = _MultiHead(width, heads, _attention({**sizes, **other} if other else config))
            self.cross_attention_norm = nn.LayerNorm(width)
        self.feed_forward = _FeedForward(width, config["d_ff"])
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.get("dropout", 0.0))
        self.norm_first = config.get("norm", "pre") == "pre"

    def _residual(self, x: Tensor, norm: nn.Module, branch: Any) -> Tensor:
        if self.norm_first:
            out: Tensor = x + self.dropout(branch(norm(x)))
        else:
            out = norm(x + self.dropout(branch(x)))
        return out

    def forward(self, x: Tensor, ignored: Tensor | None, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            x = self._residual(x, self.attention_norm, lambda x: self.attention(x, key_padding_mask=ignored))
        else:
            x = self._residual(x, self.attention_norm, lambda x: self.attention(x, is_causal=True))
            x = self._residual(
                x, self.cross_attention_norm, lambda x: self.cross_attention(x, memory, key_padding_mask=ignored)
            )
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


def _kernel(config: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = config.get("attention_options", {}).get("kernel", {})
    return {"feature_map": config.get("feature_map", "elu+1"), **own}


def _kernelized(config: dict[str, Any]) -> dict[str, Any]:
    return _kernel(config)


def _shaw(config: dict[str, Any]) -> dict[str, Any]:
    options = {"radius": config.get("radius", 16), **config.get("attention_options", {}).get("relative", {})}
    return {
        "radius": options["radius"], "shared": options.get("shared", False), "kernelized": options.get("content", True),
        "rel_feature_map": "identity" if options.get("raw", False) else "same", **_kernel(config),
    }  # fmt: skip


def _fourier(config: dict[str, Any]) -> dict[str, Any]:
    options = config.get("attention_options", {})
    kernel = _kernel(config)
    # Fourier's normaliser says whether and by what a row is divided.
    if not kernel.pop("normalize", True):
        raise ValueError("config.json: attention_options: expected kernel.normalize = true for fourier, got false")
    normalizer = options.get("normalizer", "one-plus").replace("-", "_")
    return {"normalizer": normalizer, "wave": "pairs" if options.get("rotary", False) else "each", **kernel}


def _toeplitz(config: dict[str, Any]) -> dict[str, Any]:
    options = dict(config.get("attention_options", {}))
    return {**options.pop("bias", {}), **options}


def _as_they_are(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("attention_options", {}))


def _by_position(config: dict[str, Any]) -> dict[str, Any]:
    # A row for the longest sequence, with the token that it starts with, as the command makes the table.
    positions = max(config.get("max_tokens") or 0, config.get("answer_tokens") or 0) + 1
    return {"length": max(1024, positions), **config.get("attention_options", {})}


#: For each mechanism its module and how the module's options follow from a run's settings.
_MECHANISMS: dict[str, tuple[Callable[..., Attention], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "kernelized": (KernelizedAttention, _kernelized),
    "shaw": (ShawAttention, _shaw),
    "fourier": (FourierAttention, _fourier),
    "toeplitz": (ToeplitzAttention, _toeplitz),
    "aft-full": (AftFull, _by_position),
    "aft-local": (AftLocal, _by_position),
    "aft-simple": (AftSimple, _as_they_are),
    "aft-conv": (AftConv, _as_they_are),
    "softmax": (SoftmaxAttention, _as_they_are),
}


def _attention(config: dict[str, Any]) -> Attention:
    """The mechanism that a run's settings name."""
    name = config["attention"]
    if name not in _MECHANISMS:
        raise ValueError(f"config.json: attention: expected one of {', '.join(_MECHANISMS)}, got {name!r}")
    module, options = _MECHANISMS[name]
    try:
        return module(config["heads"], config["d_model"] // config["heads"], **options(config))
    except TypeError as error:
        raise ValueError(f"config.json: attention_options: {error}") from error


class Seq2Seq(nn.Module):
    """The command's model: a bidirectional encoder, a causal decoder, attention of the decoder to the encoder.

    Parameters
    ----------
    config : dict
        A run's ``config.json``.
    source_vocab, target_vocab : int
        Ids of the two tokenizers.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch.runs import START, Seq2Seq
    >>> config = {"attention": "shaw", "d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    >>> model = Seq2Seq(config, source_vocab=30, target_vocab=40)
    >>> source, target = torch.randint(4, 30, (2, 9)), torch.full((2, 5), START)
    >>> model(source, torch.tensor([9, 7]), target).shape
    torch.Size([2, 5, 40])
    """

    def __init__(self, config: dict[str, Any], source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        width = config["d_model"]
        self.source_embedding = nn.Embedding(source_vocab, width)
        self.target_embedding = nn.Embedding(target_vocab, width)
        self.encoder = nn.ModuleList(_Block(config, False) for _ in range(config["encoder_layers"]))
        self.decoder = nn.ModuleList(_Block(config, True) for _ in range(config["decoder_layers"]))
        if config.get("norm", "pre") == "pre":
            self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.output = nn.Linear(width, target_vocab)
        self.dropout = nn.Dropout(config.get("dropout", 0.0))
        # Where the mechanism does not see the order of tokens the command adds sines and cosines.
        self.sinusoidal = config["attention"] in ("kernelized", "aft-simple", "softmax")

    def _embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        x: Tensor = embedding(tokens)
        if self.sinusoidal:
            column = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
            position = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
            angle = position[:, None] / 1e4 ** (column // 2 * 2 / x.shape[2])
            x = x + torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(x.dtype)
        dropped: Tensor = self.dropout(x)
        return dropped

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Logits of every next target token.

        Parameters
        ----------
        source : Tensor ``[batch, source_tokens]``
            Ids.
        source_lengths : Tensor ``[batch]``
            How many of them count; those after are ignored.
        target : Tensor ``[batch, target_tokens]``
            Ids, which begin with `START`.

        Returns
        -------
        Tensor ``[batch, target_tokens, target_vocab]``
            Logits.
        """
        ignored = torch.arange(source.shape[1], device=source.device) >= source_lengths[:, None]
        memory = self._embed(self.source_embedding, source)
        for block in self.encoder:
            memory = block(memory, ignored)
        memory = self.encoder_norm(memory) if hasattr(self, "encoder_norm") else memory
        x = self._embed(self.target_embedding, target)
        for block in self.decoder:
            x = block(x, ignored, memory)
        x = self.decoder_norm(x) if hasattr(self, "decoder_norm") else x
        logits: Tensor = self.output(x)
        return logits


@dataclass
class Run:
    """A run of the command, as `load_run` reads it.

    Parameters
    ----------
    model : Seq2Seq
        With the run's weights.
    config : dict
        The run's settings.
    source, target : Tokenizer
        Of the run's inputs and outputs.

    Examples
    --------
    >>> from longspan.torch.runs import Run, Seq2Seq, Tokenizer
    >>> letters = Tokenizer("characters", tuple("abc"))
    >>> config = {"attention": "shaw", "d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 1,
    ...           "max_tokens": 8}
    >>> run = Run(Seq2Seq(config, len(letters), len(letters)), config, letters, letters)
    >>> len(run.predict("abc")) <= 8
    True
    """

    model: Seq2Seq
    config: dict[str, Any]
    source: Tokenizer
    target: Tokenizer

    @torch.no_grad()
    def predict(self, text: str) -> str:
        """The likeliest next token, over and over, as ``longspan predict`` without a beam.

        Parameters
        ----------
        text : str
            An input of the run.

        Returns
        -------
        str
            At most ``answer_tokens`` tokens, or ``max_tokens``, as the settings say.
        """
        self.model.eval()
        source = torch.tensor([[*self.source.encode(text), END]])
        target = [START]
        for _ in range(self.config.get("answer_tokens") or self.config["max_tokens"]):
            logits = self.model(source, torch.tensor([source.shape[1]]), torch.tensor([target]))
            # Padding and the start token never follow.
            logits[..., [PAD, START]] = -torch.inf
            token = int(logits[0, -1].argmax())
            if token == END:
                break
            target.append(token)
        return self.target.decode(target)


#: Settings that say that a run is not of pairs: what they name, and the command that reads the run.
_NOT_OF_PAIRS = {
    "text": ("texts, a language model", "generate"),
    "labelled": ("labelled texts, a classifier", "predict"),
    "series": ("series, a model of points", "predict"),
    "synthetic": ("synthetic sequences, a language model", "eval"),
}
#: Settings of blocks that `Seq2Seq` has one form of.
_FORM = {"norm_kind": "layer", "activation": "relu", "gated": False}


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the run in a folder, of pairs.

    Parameters
    ----------
    folder : path
        What ``longspan train --pairs ... --out FOLDER`` wrote.

    Returns
    -------
    Run
        Model, settings and tokenizers.

    Raises
    ------
    FileNotFoundError
        Where a file is missing.
    ValueError
        Where one is damaged or of another model, or the run is of something else than pairs.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from longspan.torch.runs import Seq2Seq, load_run, load_weights, save_weights
    >>> config = {"attention": "shaw", "d_model": 32, "d_ff": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 1,
    ...           "max_tokens": 8}
    >>> letters = json.dumps({"kind": "characters", "vocabulary": ["a", "b"]})
    >>> with TemporaryDirectory() as name:
    ...     folder = Path(name)
    ...     for file, text in (("config", json.dumps(config)), ("source_tokenizer", letters), ("target_tokenizer", letters)):
    ...         _ = (folder / f"{file}.json").write_text(text)
    ...     save_weights(Seq2Seq(config, 6, 6), folder / "model.safetensors")
    ...     run = load_run(folder)
    ...     load_weights(run.model, folder / "model.safetensors")
    >>> isinstance(run.predict("ab"), str)
    True
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'}: expected the settings of a run, got {type(config).__name__}")
    for setting, (kind, command) in _NOT_OF_PAIRS.items():
        if config.get(setting):
            raise ValueError(f"load_run: {folder}: expected a run of pairs, got one of {kind}; read it with "
                             f"`longspan {command} {shlex.quote(str(folder))}`")  # fmt: skip
    for setting, known in _FORM.items():
        if config.get(setting, known) != known:
            raise ValueError(f"load_run: {folder}: expected {setting} = {known!r}, got {config[setting]!r}; answer with "
                             f"`longspan predict {shlex.quote(str(folder))}`")  # fmt: skip
    source = Tokenizer.load(folder / "source_tokenizer.json")
    target = Tokenizer.load(folder / "target_tokenizer.json")
    model = Seq2Seq(config, len(source), len(target))
    load_weights(model, folder / "model.safetensors")
    return Run(model.eval(), config, source, target)


_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "F16": np.dtype("<f2")}


def _file_entry(name: str, tensor: Tensor, module: nn.Module) -> tuple[str, Tensor]:
    """Name and contents in a file of a parameter of ``module``."""
    prefix, _, last = name.rpartition(".")
    if isinstance(module, nn.Linear) and last == "weight":
        return name, tensor.T
    if isinstance(module, nn.LayerNorm):
        return f"{prefix}.{'gamma' if last == 'weight' else 'beta'}", tensor
    if last in ("map_queries", "map_keys"):
        return f"{prefix}.map.{last[4:]}", tensor
    if isinstance(module, ShawAttention):
        return f"{prefix}.relative", tensor if tensor.dim() == 3 else tensor[None]
    if isinstance(module, (ToeplitzAttention, AftConv)) and tensor.dim() == 3:
        return name, tensor.flatten(1)
    if isinstance(module, AftFull) and last == "u":
        return f"{prefix}.w", tensor
    return name, tensor


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Views of a model's parameters as they stand in a file."""
    entries = {}
    for prefix, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            name, view = _file_entry(f"{prefix}.{last}" if prefix else last, parameter.detach(), module)
            entries[name] = view
    return entries


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Reads the command's weights into a model.

    Parameters
    ----------
    model : Module
        A `Seq2Seq`, or any part of one with its own file. Nothing in it changes where something is wrong.
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
    data = path.read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > len(data) - 8:
            raise ValueError("its header is cut short")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        body = memoryview(data)[8 + length :]
        found = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            count = int(np.prod(entry["shape"], dtype=np.int64))
            if not 0 <= start <= end <= len(body) or end - start != count * dtype.itemsize:
                raise ValueError(f"{name} does not lie inside it")
            found[name] = np.frombuffer(body[start:end], dtype).reshape(entry["shape"])
    except (struct.error, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: damaged or no safetensors file: {error}") from error
    parameters = _parameters(model)
    missing, surplus = sorted(parameters.keys() - found.keys()), sorted(found.keys() - parameters.keys())
    if missing or surplus:
        raise ValueError(f"{path}: expected the parameters of this model, got none for {missing[:3]} and {surplus[:3]} "
                         "besides")  # fmt: skip
    for name, view in parameters.items():
        if tuple(view.shape) != found[name].shape:
            raise ValueError(f"{path}: {name}: expected shape {tuple(view.shape)}, got {found[name].shape}")
    for name, view in parameters.items():
        view.copy_(torch.from_numpy(found[name].copy()))


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes weights so that the command reads them in the place of a run's ``model.safetensors``.

    It seals the file with the others of the run, if ``path`` is in the folder of one. As the command does, it replaces the old file
    in one step: whenever the computer stops, one of both is there, whole.

    Parameters
    ----------
    model : Module
        A `Seq2Seq`.
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
    header: dict[str, Any] = {}
    pieces = []
    offset = 0
    for name, view in sorted(_parameters(model).items()):
        numbers = view.cpu().to(torch.float32).contiguous().numpy().astype("<f4")
        header[name] = {"dtype": "F32", "shape": list(numbers.shape), "data_offsets": [offset, offset + numbers.nbytes]}
        offset += numbers.nbytes
        pieces.append(numbers.tobytes())
    text = json.dumps(header).encode()
    # The format wants numbers to begin at whole multiples of 8 bytes.
    text += b" " * (-len(text) % 8)
    path = Path(path)
    whole = b"".join([struct.pack("<Q", len(text)), text, *pieces])
    seal = path.with_name("seal.json")
    if not seal.exists():
        return _replace(path, whole)
    # As the command does: the seal allows the old contents and the new, then the new alone.
    files = json.loads(seal.read_bytes())["files"]
    allowed = [*files.get(path.name, []), hashlib.sha256(whole).hexdigest()]
    _seal(seal, {**files, path.name: allowed})
    _replace(path, whole)
    _seal(seal, {**files, path.name: allowed[-1:]})


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
