"""Runs of the `longspan` command in PyTorch: read a folder that ``longspan train`` made of pairs or of numeric series, or write
weights that it reads. Runs of texts and of labelled texts are read by `longspan.transformers`.

A run folder of pairs holds ``config.json``, ``source_tokenizer.json``, ``target_tokenizer.json`` and ``model.safetensors``; one of
series ``series.json``, a `Scaling`, and ``labels.json`` in the place of the tokenizers. Names in the weights' file, with ``i``
counting blocks from 0:

============================================================  ========================  =====================================
file                                                          shape                     here
============================================================  ========================  =====================================
``source_embedding.weight``, ``target_embedding.weight``      ``[vocab, d_model]``      the same
``encoder.i.attention.query_key_value.{weight,bias}``         ``[d_model, 3 d_model]``  the same, weight transposed
``encoder.i.attention.output.{weight,bias}``                  ``[d_model, d_model]``    the same, weight transposed
``encoder.i.attention.attention....``                         see below                 see below
``encoder.i.feed_forward.{inner,outer}.{weight,bias}``        ``[in, out]``             the same, weight transposed
``encoder.i.{attention,feed_forward}_norm.{gamma,beta}``      ``[d_model]``             ``...{weight,bias}``; RMS: no ``beta``
``decoder.i....``, and ``decoder.i.cross_attention...``       as the encoder's
``encoder_norm``, ``decoder_norm`` ``.{gamma,beta}``          ``[d_model]``             ``...{weight,bias}``; pre-norm only
``output.{weight,bias}``                                      ``[d_model, vocab]``      the same, weight transposed
============================================================  ========================  =====================================

A model of texts has ``embedding.weight``, ``blocks.i....`` as the encoder's, and ``norm``; one of labelled texts ``output``
besides, ``[d_model, labels]``, and ``pooling_query``, ``[d_model]``, where its pooling is attention; one of series is as that of
labelled texts, with ``input.{weight,bias}`` in the place of the embedding, ``[channels, d_model]``, or ``[2 channels, d_model]``
where the scaling is ``masked``, and eight rows more where it has a ``clock``. Gated feed-forward parts have ``inner.weight``
``[d_model, 2 d_ff]``, gated attention ``query_key_value`` ``[d_model, 4 d_model]``, with the gates after the queries, and
``gated_norm.gamma`` ``[d_model]``, here ``gated_norm.weight``.

What the mechanism of ``attention`` and ``cross_attention`` learns:

==============  =======================================================================================================
shaw            ``relative`` ``[heads, 2R+1, d]``, here ``rel``; a shared one is ``[1, 2R+1, d]`` there, ``[2R+1, d]`` here
fourier         ``a`` ``[heads, d, 1]`` (rotary: ``[heads, d/2, 1]``), ``b``, ``c``, ``beta`` ``[heads, d]`` as far as free
toeplitz        ``bias`` ``[heads, entries]``; a grid's is ``[heads, rows, columns]`` here
aft-full        ``w`` and ``z`` ``[length, rank]``, here ``u`` and ``z``; dense: ``w`` ``[length, length]``
aft-local       ``w`` ``[length, 2 window - 1]``
aft-conv        ``w`` ``[heads, taps]``, ``gamma`` and ``beta`` ``[heads]``; ``query_key_value`` is ``2 d_model + heads`` wide
short-conv.     ``taps`` ``[heads, width, d]``
gated, delta    ``rate`` ``[heads]`` and ``bias`` ``[heads, 1]`` or ``[heads, d]`` where there is a gate; behind a convolution
                ``query_taps``, ``key_taps`` and ``value_taps`` ``[heads, width, d]``
others          nothing
hedgehog        in every mechanism ``map.queries`` and ``map.keys`` ``[heads, width, d]``, here ``map_queries``, ``map_keys``
==============  =======================================================================================================

A decoder with AFT, a short convolution, or a state that decays or corrects itself attends to the encoder's output with Shaw's attention of default options, all others with
the mechanism itself. Mechanisms that do not see the order of tokens (kernelized, aft-simple, softmax, softmax-window, gated, delta) get sines and cosines.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import _options
from ._weights import load_weights, save_weights
from .models import Seq2Seq, SeriesModel

__all__ = [
    "END",
    "PAD",
    "Run",
    "START",
    "Scaling",
    "Seq2Seq",
    "SeriesModel",
    "SeriesRun",
    "Tokenizer",
    "UNKNOWN",
    "load_run",
    "load_weights",
    "save_weights",
]

#: Ids that every tokenizer of the command shares; what it knows itself comes after.
PAD, START, END, UNKNOWN = 0, 1, 2, 3
_SPECIALS = 4
#: Points of series that are answered together.
_TOGETHER = 16384
#: Waves that fill the span of a clock.
_WAVES = (0.5, 1.0, 2.0, 4.0)
#: Distances of times, in usual ones, up to which they count as they are.
_NEAR = 1000.0


def read_json(path: Path) -> Any:
    """What a file of a run's folder says."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected the settings of a run, got {type(config).__name__}")
    return config


#: White space as Unicode has it; `str.split` takes the separators U+001C to U+001F for it too.
_SPACE = re.compile("[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+")


def _words(text: str) -> list[str]:
    """The words of a text, as the command splits them."""
    return [word for word in _SPACE.split(text) if word]


@functools.lru_cache(maxsize=8)
def _of_json(contents: str) -> tuple[Any, int | None, int]:
    """The tokenizer of a ``tokenizer.json``, its id of what is not known, and its last id: there may be gaps."""
    from tokenizers import Tokenizer as Json

    tokenizer, model = Json.from_str(contents), json.loads(contents)["model"]
    unknown = model.get("unk_token")
    last = max(tokenizer.get_vocab().values(), default=0)
    return tokenizer, model.get("unk_id") if unknown is None else tokenizer.token_to_id(unknown), last


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, as the command does it.

    Parameters
    ----------
    kind : str
        ``"characters"``, ``"words"``, ``"bytes"`` or ``"json"``, which needs the package ``tokenizers``.
    vocabulary : tuple of str
        What stands for the ids from 4 on; `PAD`, `START`, `END` and `UNKNOWN` are 0 to 3. Bytes need none. Of kind ``"json"`` the contents of
        a ``tokenizer.json``, whose ids are moved up by 4.

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
            A run's ``source_tokenizer.json``, ``target_tokenizer.json`` or ``text_tokenizer.json``.

        Returns
        -------
        Tokenizer
            The same.

        Raises
        ------
        ValueError
            For a file of another kind.
        """
        return tokenizer_of(path, read_json(Path(path)))

    def __len__(self) -> int:
        if self.kind == "json":
            return _SPECIALS + 1 + _of_json(*self.vocabulary)[2]
        return _SPECIALS + (256 if self.kind == "bytes" else len(self.vocabulary))

    @property
    def never(self) -> list[int]:
        """Ids that no answer holds: padding, the start, and what is not known."""
        unknown = _of_json(*self.vocabulary)[1] if self.kind == "json" else None
        return [PAD, START, UNKNOWN, *([] if unknown is None else [_SPECIALS + unknown])]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without start and end.

        Parameters
        ----------
        text : str
            Any.

        Returns
        -------
        list of int
            `UNKNOWN` for what is not in the vocabulary. Letters with marks may be composed or decomposed: a text is read as it stands, or in
            the form of which more is known.
        """
        _options.expect_type("Tokenizer.encode", "text", text, str)
        if self.kind == "bytes":
            return [_SPECIALS + byte for byte in text.encode()]
        if self.kind == "json":
            tokenizer, unknown, _ = _of_json(*self.vocabulary)
            own = tokenizer.encode(text, add_special_tokens=False).ids
            return [UNKNOWN if id == unknown else _SPECIALS + id for id in own]
        ids = {entry: id for id, entry in enumerate(self.vocabulary, _SPECIALS)}

        def read(text: str) -> list[int]:
            if self.kind == "words":
                return [ids.get(word, UNKNOWN) for word in _words(text)]
            return [ids.get(c, ids.get(c.lower(), UNKNOWN)) for c in text]

        forms = () if text.isascii() else (normalize("NFC", text), normalize("NFD", text))
        return min((read(one) for one in (text, *forms)), key=lambda known: known.count(UNKNOWN))

    def decode(self, ids: list[int]) -> str:
        """The text of ids.

        Parameters
        ----------
        ids : list of int
            Special ones are left out, and those beyond the vocabulary.

        Returns
        -------
        str
            Bytes that are no UTF-8 become replacement characters.
        """
        own = [id - _SPECIALS for id in ids if id >= _SPECIALS]
        if self.kind == "bytes":
            return bytes(id for id in own if id < 256).decode(errors="replace")
        if self.kind == "json":
            return str(_of_json(*self.vocabulary)[0].decode(own))
        return (" " if self.kind == "words" else "").join(self.vocabulary[id] for id in own if id < len(self.vocabulary))


def tokenizer_of(place: object, stored: Mapping[str, Any]) -> Tokenizer:
    """What a tokenizer's file says."""
    kind = stored.get("kind") if isinstance(stored, Mapping) else stored
    if kind == "json" and "tokenizer" not in stored:
        raise ValueError(f"{place}: tokenizer: expected the contents of a tokenizer.json, got none")
    if kind not in ("characters", "words", "bytes", "json"):
        raise ValueError(f"{place}: kind: expected characters, words, bytes or json, the tokenizer of a run, got {kind!r}")
    return Tokenizer(kind, (json.dumps(stored["tokenizer"]),) if kind == "json" else tuple(stored.get("vocabulary", ())))


@dataclass
class Run:
    """A run of the command on pairs, as `load_run` reads it.

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
            At most ``answer_tokens`` tokens, or ``max_tokens``, as the settings say; none for a text without any.
        """
        ids, place = self.source.encode(text), self.model.output.weight.device
        if not ids:
            return ""
        self.model.eval()
        source = torch.tensor([[*ids, END]], device=place)
        target, never = [START], self.target.never
        for _ in range(self.config.get("answer_tokens") or self.config["max_tokens"]):
            logits = self.model(source, torch.tensor([source.shape[1]], device=place), torch.tensor([target], device=place))
            logits[..., never] = -torch.inf
            token = int(logits[0, -1].argmax())
            if token == END:
                break
            target.append(token)
        return self.target.decode(target)


def _numbers(where: str, given: Any) -> NDArray[np.float64]:
    """What a person gives as numbers; None is NaN."""
    try:
        return np.asarray(given.detach().cpu().double() if isinstance(given, Tensor) else given, np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: expected an array of numbers, or NaN where one is missing, got what is none: {error}") from error


@dataclass(frozen=True)
class Scaling:
    """What the series that a run learned from are like, its ``series.json``: others are given to the model in the same measure.

    Parameters
    ----------
    names : sequence of str
        Of the channels, where the data had them.
    means, deviations : sequence of float
        Of each channel the mean, which is subtracted, and the standard deviation, by which the rest is divided.
    step : float
        The median distance of neighbouring times, which counts as 1.
    masked : bool
        Whether the model gets a channel beside each that says which values are missing. The mean stands for these.
    clock : dict, optional
        When times begin, ``begin``, and how long they last, ``span``, where they count from a start that series share: then four
        sines and cosines tell the model the time.
    dates : dict, optional
        How the data wrote times, where they were dates, on whose calendar they count: ``Months`` since the year 0, or seconds since 1970.
    known : sequence of bool
        Of a forecast, the channels that are known ahead.

    Examples
    --------
    >>> from longspan.torch.runs import Scaling
    >>> Scaling(["heart", "breath"], means=[70, 15], deviations=[9, 3], step=0.5, masked=True).inputs
    4
    """

    names: Sequence[str]
    means: Sequence[float]
    deviations: Sequence[float]
    step: float
    masked: bool
    clock: Mapping[str, float] | None = None
    dates: Mapping[str, Any] | None = None
    known: Sequence[bool] = ()

    @property
    def inputs(self) -> int:
        """Numbers that the model gets at a point.

        Returns
        -------
        int
            `SeriesModel`'s ``channels``.
        """
        return len(self.means) * (2 if self.masked else 1) + (2 * len(_WAVES) if self.clock else 0)

    def _points(self, where: str, one: Any) -> tuple[Tensor, Tensor]:
        """A series as the model gets it: the numbers of its points, and their times from the first one on."""
        values, times = one, None
        if isinstance(one, Mapping):
            if not {"times", "values"} <= one.keys():
                raise ValueError(f"{where}: expected the keys times and values, got {', '.join(map(str, one)) or 'none'}; give the "
                                 "values alone where points are counted")  # fmt: skip
            values, times = one["values"], one["times"]
        values = _numbers(f"{where}: values", values)
        if np.isnan(values).all():
            raise ValueError(f"{where}: values: expected at least one, got {values.size} and all of them missing; leave the series "
                             "out")  # fmt: skip
        channels, shape = len(self.means), values.shape
        values = values[:, None] if values.ndim == 1 else values
        if values.shape[1:] != (channels,):
            raise ValueError(f"{where}: values: expected shape (points, {channels}), the channels that the run was trained on, got "
                             f"{shape}; give as many")  # fmt: skip
        times = np.arange(len(values), dtype=np.float64) if times is None else _numbers(f"{where}: times", times)
        if times.shape != values.shape[:1]:
            raise ValueError(f"{where}: times: expected shape {values.shape[:1]}, got {times.shape}; give a time to each point")
        for name, wrong in (("times", ~np.isfinite(times)), ("values", np.isinf(values).any(1))):
            if wrong.any():
                raise ValueError(f"{where}: {name}: expected finite numbers, got another at point {wrong.argmax()}; give one, or "
                                 "leave the point out")  # fmt: skip
        # As the command does: points are sorted, and those without any value at the end are left out.
        order = times.argsort(kind="stable")
        values, times = values[order], times[order]
        count = np.flatnonzero(~np.isnan(values).all(1))[-1] + 1
        values, times = values[:count], times[:count]
        missing = np.isnan(values)
        with np.errstate(over="ignore"):
            points = np.where(missing, 0.0, (values - self.means) / self.deviations).astype(np.float32)
            angles = [] if self.clock is None else [2 * np.pi * n * (times - self.clock["begin"]) / self.clock["span"] for n in _WAVES]
            gaps = np.diff(times, prepend=times[:1]) / self.step
            # Of distances beyond a thousand usual ones the logarithm grows, so that float32 keeps the short ones.
            times = np.cumsum(np.where(gaps > _NEAR, _NEAR * (1 + np.log(np.maximum(gaps, _NEAR) / _NEAR)), gaps)).astype(np.float32)
        if not (np.isfinite(points).all() and np.isfinite(times).all()):
            raise ValueError(f"{where}: expected values and times as large as those of training, got some beyond all measure; "
                             "leave the series out")  # fmt: skip
        if self.masked:
            points = np.concatenate([points, missing.astype(np.float32)], 1)
        if angles:
            waves = np.stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)], 1)
            points = np.concatenate([points, waves.astype(np.float32)], 1)
        return torch.from_numpy(points), torch.from_numpy(times)


@dataclass
class SeriesRun:
    """A run of the command on numeric series, as `load_run` reads it.

    A series is a dictionary with ``times``, ``[points]``, and ``values``, ``[points, channels]`` or of one channel ``[points]``, where
    None and NaN are missing; or the values alone, at the times 0, 1, 2, ... Points are sorted by their times.

    Parameters
    ----------
    model : SeriesModel
        With the run's weights.
    config : dict
        The run's settings.
    scaling : Scaling
        How values and times are measured.
    labels : tuple of str
        Those that the run tells, in the order of the model's outputs. Empty where it tells a number.
    mean, deviation : float
        Of a number: what the model's is multiplied by the deviation and added to.

    Examples
    --------
    >>> import torch
    >>> from longspan.torch.runs import Scaling, SeriesModel, SeriesRun
    >>> config = {"attention": "fourier", "d_model": 16, "d_ff": 32, "heads": 2, "layers": 1}
    >>> scaling = Scaling([], means=[3.0], deviations=[2.0], step=1.0, masked=False)
    >>> run = SeriesRun(SeriesModel(config, scaling.inputs, 2), config, scaling, ("calm", "storm"))
    >>> first, second = run.predict([{"times": [0, 0.7, 3.1], "values": [2.5, None, 4.0]}, [1.5, 3.5]])
    >>> sorted(first)
    ['calm', 'storm']

    To learn from series, in the same measure:

    >>> series = [[1.0, 5.0, 1.0, 6.0], [3.0, 3.5, 3.0]]
    >>> optimizer = torch.optim.Adam(run.model.parameters(), 1e-2)
    >>> for _ in range(30):
    ...     loss = torch.nn.functional.cross_entropy(run.model(*run.batch(series)), torch.tensor([1, 0]))
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> [max(answer, key=answer.get) for answer in run.predict(series)]
    ['storm', 'calm']
    """

    model: SeriesModel
    config: dict[str, Any]
    scaling: Scaling
    labels: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    def _points(self, series: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
        if isinstance(series, (Mapping, str)):
            raise TypeError(f"SeriesRun: series: expected a list of series, got one {type(series).__name__}; put it into a list")
        return [self.scaling._points(f"SeriesRun: series[{place}]", one) for place, one in enumerate(series)]

    def _padded(self, points: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.model.input.weight
        values, times = (pad_sequence(list(some), batch_first=True) for some in zip(*points))
        # Half precision would make one of times that are near one another.
        finer = times.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        return values.to(weight), finer, torch.tensor([len(some) for _, some in points], device=weight.device)

    def batch(self, series: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Series as the model takes them: ``run.model(*run.batch(series))`` gives logits, or numbers in their own measure.

        Parameters
        ----------
        series : iterable of dict or array
            As in `predict`, at least one.

        Returns
        -------
        Tensor ``[batch, points, inputs]``, Tensor ``[batch, points]``, Tensor ``[batch]``
            Values, times and lengths.

        Raises
        ------
        TypeError
            As `predict`.
        ValueError
            As `predict`, and without any series.
        """
        points = self._points(series)
        if not points:
            raise ValueError("SeriesRun: series: expected at least one, got none")
        return self._padded(points)

    @torch.no_grad()
    def predict(self, series: Iterable[Any]) -> list[dict[str, float]] | list[float]:
        """What ``longspan predict`` answers.

        Parameters
        ----------
        series : iterable of dict or array
            Of any lengths.

        Returns
        -------
        list of dict, or of float
            For each series the probability of every label, the likeliest first, or the number.

        Raises
        ------
        TypeError
            For what is no list of series, or no numbers.
        ValueError
            For a series without a value, of other channels, whose times or values are not finite, or too large beside those of
            training.
        """
        self.model.eval()
        points = self._points(series)
        rows = torch.zeros(len(points), self.model.output.out_features, dtype=torch.float64)
        # Series of similar length share a batch, so that little is padded.
        order = sorted(range(len(points)), key=lambda place: -len(points[place][1]))
        while order:
            count = max(1, _TOGETHER // len(points[order[0]][1]))
            some, order = order[:count], order[count:]
            rows[some] = self.model(*self._padded([points[place] for place in some])).double().cpu()
        if not self.labels:
            return (self.mean + self.deviation * rows[:, 0]).tolist()
        chances, ids = rows.softmax(-1).sort(descending=True, stable=True)
        return [{self.labels[id]: chance for id, chance in zip(*row)} for row in zip(ids.tolist(), chances.tolist())]


def _finite(*found: Any) -> bool:
    return all(isinstance(one, (int, float)) and math.isfinite(one) for one in found)


def labels_of(path: Path, found: Any) -> list[str] | dict[str, float]:
    """What a ``labels.json`` says: labels in the order of their ids, or the mean and the deviation of numbers."""
    numbers = isinstance(found, dict) and found.keys() == {"mean", "deviation"} and _finite(*found.values())
    labels = isinstance(found, list) and len(found) > 0 and all(isinstance(label, str) for label in found)
    if not numbers and not labels:
        raise ValueError(f"{path}: expected a list of labels, or a mean and a deviation, got something else; the file is damaged: "
                         "restore it or train again")  # fmt: skip
    return found  # type: ignore[no-any-return]


def _scaling(path: Path) -> Scaling:
    try:
        # Simple methods and notes of the command read the others.
        found = Scaling(**{name: one for name, one in read_json(path).items() if name not in ("grid", "lengths")})
        lists = all(isinstance(some, list) and _finite(*some) for some in (found.means, found.deviations))
        whole = lists and len(found.means) == len(found.deviations) > 0 and _finite(found.step) and isinstance(found.masked, bool)
        clock = found.clock
        if clock is not None:
            told = isinstance(clock, dict) and clock.keys() == {"begin", "span"}
            whole = whole and told and _finite(*clock.values()) and clock["span"] > 0
    except (AttributeError, TypeError):
        whole = False
    if not whole or min(*found.deviations, found.step) <= 0:
        raise ValueError(f"{path}: expected names, means and deviations of channels, step and masked, as a run writes them, got "
                         "something else; the file is damaged: restore it or train again")  # fmt: skip
    return found


def _series_run(folder: Path, config: dict[str, Any]) -> SeriesRun:
    scaling = _scaling(folder / "series.json")
    target = labels_of(folder / "labels.json", read_json(folder / "labels.json"))
    labels, moments = (tuple(target), {}) if isinstance(target, list) else ((), target)
    model = SeriesModel(config, scaling.inputs, max(len(labels), 1))
    load_weights(model, folder / "model.safetensors")
    return SeriesRun(model.eval(), config, scaling, labels, **moments)


#: Settings that say that a run is of something else: what they name, and the command that reads the run.
_OF_OTHERS = {
    "text": ("texts, a language model", "generate"),
    "labelled": ("labelled texts, a classifier", "predict"),
    "forecast": ("forecasts, a model of points", "predict"),
    "synthetic": ("synthetic sequences, a language model", "eval"),
}


def load_run(folder: str | os.PathLike[str]) -> Run | SeriesRun:
    """Reads the run in a folder, of pairs or of series.

    Parameters
    ----------
    folder : path
        What ``longspan train --pairs ... --out FOLDER`` wrote, or ``longspan train --series``.

    Returns
    -------
    Run or SeriesRun
        Model and settings; tokenizers of pairs, scaling and labels of series.

    Raises
    ------
    FileNotFoundError
        Where a file is missing.
    ValueError
        Where one is damaged or of another model, or the run is of something else.

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
    config = read_settings(folder / "config.json")
    for setting, (kind, command) in _OF_OTHERS.items():
        if config.get(setting):
            raise ValueError(f"load_run: {folder}: expected a run of pairs or series, got one of {kind}; read it with "
                             f"`longspan {command} {shlex.quote(str(folder))}`")  # fmt: skip
    if config.get("base"):
        raise ValueError(f"load_run: {folder}: expected a whole model, got one that corrects a simple method (base = true); read it with "
                         f"`longspan predict {shlex.quote(str(folder))}`, or train with --set base=false")  # fmt: skip
    if config.get("series"):
        return _series_run(folder, config)
    source = Tokenizer.load(folder / "source_tokenizer.json")
    target = Tokenizer.load(folder / "target_tokenizer.json")
    model = Seq2Seq(config, len(source), len(target))
    load_weights(model, folder / "model.safetensors")
    return Run(model.eval(), config, source, target)
