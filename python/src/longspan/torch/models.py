"""The models of the `longspan` command in PyTorch: a language model, a classifier of texts, one of numeric series, and a
sequence-to-sequence transformer.

Each is made from the settings of a run (its ``config.json``, as a dictionary) and the sizes of its vocabularies or channels.
`longspan.torch.runs` reads and writes their weights, and lists the names of these; `longspan.transformers` puts them into models
of Hugging Face's `transformers`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import WITHOUT_ORDER, Attention
from .gated_norm import GatedRMSNorm, before_norm
from ._settings import Settings, attention, expect_sizes, names
from .mechanisms import FourierAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu-tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
}  # fmt: skip
_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": partial(nn.RMSNorm, eps=1e-5)}


def _chosen(settings: Settings, key: str, usual: str, known: dict[str, Any]) -> Any:
    name = settings.get(key, usual)
    if name not in known:
        raise ValueError(f"config.json: {key}: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _norm(settings: Settings) -> nn.Module:
    norm: nn.Module = _chosen(settings, "norm_kind", "layer", _NORMS)(settings["d_model"])
    return norm


def _norm_first(settings: Settings) -> bool:
    return bool(_chosen(settings, "norm", "pre", {"pre": True, "post": False}))


def _last_norm(settings: Settings) -> nn.Module | None:
    """The norm after the last block, which pre-norm blocks need."""
    return _norm(settings) if _norm_first(settings) else None


class Past:
    """What one layer remembers of the tokens before: a state, and how many they were; in a decoder, keys and values of the
    memory."""

    def __init__(self) -> None:
        self.state: Any = None
        self.tokens = 0
        self.memory: tuple[Tensor, Tensor] | None = None


class _MultiHead(nn.Module):
    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        d_model, heads = settings["d_model"], settings["heads"]
        self.gated_norm = GatedRMSNorm(heads, d_model // heads) if settings.get("gated_attention", False) else None
        # Gates stand after the queries.
        self.widths = (d_model if self.gated_norm is None else 2 * d_model, heads * attention.key_dim, d_model)
        self.query_key_value = nn.Linear(d_model, sum(self.widths))
        self.output = nn.Linear(d_model, d_model)
        self.attention = attention
        self.heads = heads

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads

    def _queries(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, and gates if there are any."""
        q, gate = (own, None) if self.gated_norm is None else own.chunk(2, -1)
        return self._split(q), gate

    def forward(
        self, x: Tensor, ignored: Tensor | None = None, is_causal: bool = False, past: Any = None, positions: Tensor | None = None
    ) -> Tensor:
        """Self-attention, after the tokens that ``past`` remembers, or at ``positions`` if the mechanism does not count tokens."""
        own, *others = self.query_key_value(x).split(self.widths, -1)
        q, gate = self._queries(own)
        k, v = (self._split(part) for part in others)
        if gate is not None:
            q, k, v = before_norm(q, k, v)
        if past is None:
            at = positions if isinstance(self.attention, FourierAttention) else None
            out = self.attention(q, k, v, is_causal=is_causal, key_padding_mask=ignored, q_positions=at, k_positions=at)
        elif q.shape[2] == 1 and (ignored is None or not bool(ignored.any())):
            out, past.state = self.attention.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], past.state)
            out = out[:, :, None]
        else:
            out, past.state = self.attention(
                q, k, v, is_causal=True, key_padding_mask=ignored, initial_state=past.state, output_final_state=True
            )
        return self._joined(out, gate)

    def _projected(self, x: Tensor, wanted: slice) -> Sequence[Tensor]:
        """Some of queries, keys and values, without the others where the projection is nothing but its weights."""
        whole = self.query_key_value
        if type(whole) is not nn.Linear or whole._forward_hooks or whole._forward_pre_hooks or "forward" in vars(whole):
            return whole(x).split(self.widths, -1)[wanted]  # type: ignore[no-any-return]
        parts = zip(whole.weight.split(self.widths), whole.bias.split(self.widths))
        return [F.linear(x, *part) for part in list(parts)[wanted]]

    def attend_to(self, memory: Tensor | None, x: Tensor, ignored: Tensor | None = None, past: Any = None) -> Tensor:
        """Attention to a memory, whose keys and values ``past`` keeps from the first call on."""
        if past is None or past.memory is None:
            assert memory is not None
            k, v = (self._split(part) for part in self._projected(memory, slice(1, 3)))
            if past is not None:
                past.memory = k, v
        else:
            k, v = past.memory
        first = 0 if past is None else past.tokens
        q, gate = self._queries(self._projected(x, slice(0, 1))[0])
        if gate is not None:
            q, k, v = before_norm(q, k, v)
        return self._joined(self.attention(q, k, v, offset=first, key_padding_mask=ignored), gate)

    def _joined(self, out: Tensor, gate: Tensor | None) -> Tensor:
        out = out.transpose(1, 2).flatten(2)
        if self.gated_norm is not None:
            out = self.gated_norm(out, gate)
        joined: Tensor = self.output(out)
        return joined


class _FeedForward(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gated = settings.get("gated", False)
        self.inner = nn.Linear(settings["d_model"], settings["d_ff"] * (1 + self.gated))
        self.outer = nn.Linear(settings["d_ff"], settings["d_model"])
        self.activation = _chosen(settings, "activation", "relu", _ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        y, *gate = self.inner(x).chunk(1 + self.gated, -1)
        y = self.activation(y)
        out: Tensor = self.outer(y * gate[0] if gate else y)
        return out


class _Block(nn.Module):
    #: By which name `transformers` sets another.
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(self, settings: Settings, attention: Attention, cross: Attention | None = None) -> None:
        super().__init__()
        self.attention = _MultiHead(settings, attention)
        self.attention_norm = _norm(settings)
        if cross is not None:
            self.cross_attention = _MultiHead(settings, cross)
            self.cross_attention_norm = _norm(settings)
        self.feed_forward = _FeedForward(settings)
        self.feed_forward_norm = _norm(settings)
        self.dropout = nn.Dropout(settings.get("dropout", 0.0))
        self.norm_first = _norm_first(settings)
        #: Whether training keeps what goes into the block alone, and computes the rest again; `transformers` sets it by this name.
        self.gradient_checkpointing = bool(settings.get("recompute", False))

    def _residual(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            out: Tensor = x + self.dropout(branch(norm(x)))
        else:
            out = norm(x + self.dropout(branch(x)))
        return out

    def forward(
        self, x: Tensor, ignored: Tensor | None = None, is_causal: bool = False, past: Any = None, memory: Tensor | None = None,
        memory_ignored: Tensor | None = None, positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        given = (x, ignored, is_causal, past, memory, memory_ignored, positions)
        # A second time would change what a past remembers.
        if self.gradient_checkpointing and self.training and past is None:
            return self._gradient_checkpointing_func(self._forward, *given)  # type: ignore[no-any-return]
        return self._forward(*given)

    def _forward(
        self, x: Tensor, ignored: Tensor | None, is_causal: bool, past: Any, memory: Tensor | None, memory_ignored: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = self._residual(x, self.attention_norm, lambda x: self.attention(x, ignored, is_causal, past, positions))
        if hasattr(self, "cross_attention"):
            attend = self.cross_attention.attend_to
            x = self._residual(x, self.cross_attention_norm, lambda x: attend(memory, x, memory_ignored, past))
        if past is not None:
            past.tokens += x.shape[1]
        return self._residual(x, self.feed_forward_norm, self.feed_forward)


def _blocks(settings: Settings) -> nn.ModuleList:
    """A model's only stack; where there are more blocks than names the list begins anew."""
    listed = names(settings)
    return nn.ModuleList(
        _Block(settings, attention(settings, listed[layer % len(listed)])) for layer in range(settings.get("layers", 4))
    )


def _sees_order(settings: Settings) -> bool:
    return any(name not in WITHOUT_ORDER for name in names(settings))


def _sinusoidal(x: Tensor, position: Tensor) -> Tensor:
    """``x`` with sines and cosines of geometric wavelengths added, for rows at ``position``, ``[batch or 1, tokens]``."""
    # Doubles where there are any.
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    column = torch.arange(x.shape[2], dtype=exact, device=x.device)
    angle = position[..., None].to(exact) / 1e4 ** (column // 2 * 2 / x.shape[2])
    return x + torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(x.dtype)


def counted(x: Tensor, ignored: Tensor | None, first: int = 0) -> Tensor:
    """Positions of the rows of ``x``, of which ignored ones do not count, after the ``first``, ``[batch or 1, tokens]``."""
    if ignored is None:
        return torch.arange(first, first + x.shape[1], device=x.device)[None]
    return first + ((~ignored).cumsum(1) - 1).clamp(min=0)


def _beyond(lengths: Tensor, count: int) -> Tensor:
    """True for those of ``count`` rows that stand beyond a sequence's length, ``[batch, count]``."""
    return torch.arange(count, device=lengths.device) >= lengths[:, None]


def _forgets(settings: Settings) -> Settings:
    """With the decay that the command gives a model of texts where settings give none: heads look back over 8 to 1,024 tokens."""
    heads = settings["heads"]
    step = 7.0 / (max(heads, 2) - 1)
    return {**settings, "usual_decay": [1.0 - 2.0 ** -(3.0 + step * head) for head in range(heads)]}


class LanguageModel(nn.Module):
    """The model of ``longspan train --text`` and ``--synthetic``: causal blocks; the embedding is the output layer as well."""

    def __init__(self, settings: Settings, vocab: int) -> None:
        super().__init__()
        expect_sizes(settings)
        drawn = bool(settings.get("synthetic"))
        if not drawn:
            together = settings.get("backpropagate", 1)
            carried = -(-settings.get("carry", 16) // together) * together
            settings = {**_forgets(settings), "positions": settings.get("segment", 256) * carried}
        else:
            settings = {**settings, "positions": 0}
        width = settings["d_model"]
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = _blocks(settings)
        self.norm = _last_norm(settings)
        self.dropout = nn.Dropout(settings.get("dropout", 0.0))
        self.sinusoidal = (drawn or "softmax" in names(settings)) and not _sees_order(settings)
        #: Why a process needs all of a sequence, if it does.
        self.whole_sequence = "counts positions from the start of the sequence" if self.sinusoidal else None

    def forward(self, tokens: Tensor, ignored: Tensor | None = None, past: Sequence[Any] | None = None) -> Tensor:
        """Rows ``[batch, tokens, d_model]``, of which `logits` makes logits. ``past`` has a `Past` for each block."""
        x = self.embedding(tokens) * self.embedding.weight.shape[1] ** 0.5
        if self.sinusoidal:
            x = _sinusoidal(x, counted(x, ignored, past[0].tokens if past else 0))
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, ignored, True, past[layer] if past else None)
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Of the token after each row, ``[..., vocab]``."""
        return F.linear(x, self.embedding.weight)


class _Pooled(nn.Module):
    """What the models that make one row of a whole sequence have in common: all but what stands before the blocks."""

    #: Why a process needs all of a sequence.
    whole_sequence = "makes one row of a whole sequence"

    def __init__(self, settings: Settings, outputs: int) -> None:
        super().__init__()
        expect_sizes(settings)
        settings = {**settings, "positions": settings.get("max_tokens") or 0}
        width = settings["d_model"]
        self.blocks = _blocks(settings)
        self.norm = _last_norm(settings)
        self.pooling = settings.get("pooling", "mean")
        if self.pooling not in ("mean", "last", "attention"):
            raise ValueError(f"config.json: pooling: expected one of mean, last, attention, got {self.pooling!r}")
        self.pooling_query = nn.Parameter(torch.zeros(width)) if self.pooling == "attention" else None
        self.output = nn.Linear(width, outputs)
        self.dropout = nn.Dropout(settings.get("dropout", 0.0))
        self.causal = settings.get("causal", False)
        self.sinusoidal = not _sees_order(settings)

    def _outputs(self, x: Tensor, ignored: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """Logits of the classes, or the numbers, ``[batch, outputs]``, of what is embedded."""
        if self.sinusoidal:
            x = _sinusoidal(x, counted(x, ignored))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, ignored, self.causal, positions=positions)
        x = x if self.norm is None else self.norm(x)
        counts = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if ignored is None else ~ignored
        if self.pooling_query is not None:
            scores = (x * (self.pooling_query * x.shape[2] ** -0.5)).sum(-1)
            weights = scores.masked_fill(~counts, torch.finfo(scores.dtype).min).softmax(-1)
        elif self.pooling == "last":
            weights = (counts & (counts.flip(1).cumsum(1).flip(1) == 1)).to(x.dtype)
        else:
            weights = counts / counts.sum(1, keepdim=True).clamp(min=1)
        out: Tensor = self.output((x * weights[..., None].to(x.dtype)).sum(1))
        return out


class Classifier(_Pooled):
    """The model of ``longspan train --labelled``: blocks over a whole text, and one row of all of it."""

    def __init__(self, settings: Settings, vocab: int, outputs: int) -> None:
        super().__init__(settings, outputs)
        self.embedding = nn.Embedding(vocab, settings["d_model"])

    def forward(self, tokens: Tensor, ignored: Tensor | None = None) -> Tensor:
        """Logits of the classes, or the numbers, ``[batch, outputs]``."""
        return self._outputs(self.embedding(tokens), ignored)


class SeriesModel(_Pooled):
    """The model of ``longspan train --series``: blocks over points at any times, and one row of all of them.

    The mechanism ``fourier`` sees the times; any other counts points. Let a time of 1 be the usual distance of neighbours, and let
    series begin near 0.

    Parameters
    ----------
    config : dict
        A run's ``config.json``.
    channels : int
        Numbers at each point.
    outputs : int
        Classes, or 1 for a number.

    Examples
    --------
    Which of two series is denser in time:

    >>> import torch
    >>> from longspan.torch.runs import SeriesModel
    >>> _ = torch.manual_seed(0)
    >>> config = {"attention": "fourier", "d_model": 16, "d_ff": 32, "heads": 2, "layers": 1, "pooling": "attention"}
    >>> model = SeriesModel(config, channels=1, outputs=2)
    >>> optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    >>> dense = torch.tensor([0, 1] * 16)
    >>> for _ in range(60):
    ...     times = torch.rand(32, 20).cumsum(1) * torch.where(dense == 1, 0.5, 2.0)[:, None]
    ...     loss = torch.nn.functional.cross_entropy(model(times.sin()[..., None], times), dense)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> loss.item() < 0.3
    True

    What stands beyond a series' length does not matter:

    >>> values, lengths = times.sin()[..., None], torch.full((32,), 12)
    >>> torch.testing.assert_close(model(values, times, lengths), model(values[:, :12], times[:, :12]))
    """

    def __init__(self, config: Settings, channels: int, outputs: int) -> None:
        super().__init__({**config, "axes": 1}, outputs)
        self.input = nn.Linear(channels, config["d_model"])

    def forward(self, values: Tensor, times: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of the classes, or the numbers.

        Parameters
        ----------
        values : Tensor ``[batch, points, channels]``
            Finite, also beyond the lengths.
        times : Tensor ``[batch, points]``
            Likewise.
        lengths : Tensor ``[batch]``, optional
            How many points count, at least 1; those after are ignored. By default all count.

        Returns
        -------
        Tensor ``[batch, outputs]``
            A row for each series.

        Raises
        ------
        ValueError
            For other shapes.
        """
        channels = self.input.in_features
        if values.dim() != 3 or values.shape[2] != channels:
            raise ValueError(f"SeriesModel: values: expected shape (batch, points, {channels}), got {tuple(values.shape)}")
        others = (("times", times, values.shape[:2]), ("lengths", lengths, values.shape[:1]))
        for name, given, shape in others:
            if given is not None and given.shape != shape:
                raise ValueError(f"SeriesModel: {name}: expected shape {tuple(shape)}, as values have, got {tuple(given.shape)}")
        ignored = None if lengths is None else _beyond(lengths, values.shape[1])
        return self._outputs(self.input(values), ignored, times[..., None])


class Seq2Seq(nn.Module):
    """The model of ``longspan train --pairs``: a bidirectional encoder, a causal decoder, attention of the decoder to the encoder.

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

    The source once, and then the target:

    >>> ignored = torch.arange(9) >= torch.tensor([[9], [7]])
    >>> model.decode(model.encode(source, ignored), ignored, target).shape
    torch.Size([2, 5, 40])
    """

    #: Why a process needs all of a sequence.
    whole_sequence = "counts the tokens of whole sources and targets"

    def __init__(self, config: Settings, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        expect_sizes(config)
        # A row for the longest sequence, with the token that it starts with, as the command makes the table.
        settings = {**config, "positions": max(config.get("max_tokens") or 0, config.get("answer_tokens") or 0) + 1}
        width, name = settings["d_model"], settings["attention"]
        self.source_embedding = nn.Embedding(source_vocab, width)
        self.target_embedding = nn.Embedding(target_vocab, width)

        def cross() -> Attention:
            # AFT's queries only gate a mean that all of them share, those of a convolution what stands near, and states that decay take
            # token after token of one sequence: they cannot select anything from a memory. A window is a place in the own sequence.
            alone = name.startswith("aft-") or name in ("short-convolution", "gated", "delta", "gated-delta")
            other = "shaw" if alone else "softmax" if name == "softmax-window" else None
            if other is None:
                return attention(settings, name)
            return attention({"heads": settings["heads"], "d_model": width, "attention": other}, other)

        def blocks(count: int, decoder: bool) -> nn.ModuleList:
            made = (_Block(settings, attention(settings, name), cross() if decoder else None) for _ in range(count))
            return nn.ModuleList(made)

        self.encoder = blocks(config["encoder_layers"], False)
        self.decoder = blocks(config["decoder_layers"], True)
        self.encoder_norm, self.decoder_norm = _last_norm(settings), _last_norm(settings)
        self.output = nn.Linear(width, target_vocab)
        self.dropout = nn.Dropout(settings.get("dropout", 0.0))
        # Where the mechanism does not see the order of tokens the command adds sines and cosines.
        self.sinusoidal = not _sees_order(settings)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, ignored: Tensor | None, first: int = 0) -> Tensor:
        x: Tensor = embedding(tokens)
        if self.sinusoidal:
            x = _sinusoidal(x, counted(x, ignored, first))
        dropped: Tensor = self.dropout(x)
        return dropped

    def encode(self, source: Tensor, ignored: Tensor | None = None) -> Tensor:
        """What the decoder attends to.

        Parameters
        ----------
        source : Tensor ``[batch, source_tokens]``
            Ids.
        ignored : Tensor of bool ``[batch, source_tokens]``, optional
            True where one does not count.

        Returns
        -------
        Tensor ``[batch, source_tokens, d_model]``
            A row for each.
        """
        memory = self._embed(self.source_embedding, source, ignored)
        for block in self.encoder:
            memory = block(memory, ignored)
        return memory if self.encoder_norm is None else self.encoder_norm(memory)

    def decode(
        self, memory: Tensor | None, ignored: Tensor | None, target: Tensor, past: Sequence[Any] | None = None,
        target_ignored: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits of every next target token.

        Parameters
        ----------
        memory, ignored : Tensor
            What `encode` gave, and what of it does not count. None with a ``past`` that knows it.
        target : Tensor ``[batch, target_tokens]``
            Ids, the first of all the start token.
        past : sequence of `Past`, optional
            One for each block of the decoder: the tokens before, and after the first call the memory.
        target_ignored : Tensor of bool ``[batch, target_tokens]``, optional
            True where an id does not count.

        Returns
        -------
        Tensor ``[batch, target_tokens, target_vocab]``
            Logits.
        """
        x = self._embed(self.target_embedding, target, target_ignored, past[0].tokens if past else 0)
        for layer, block in enumerate(self.decoder):
            x = block(x, target_ignored, True, past[layer] if past else None, memory, ignored)
        x = x if self.decoder_norm is None else self.decoder_norm(x)
        logits: Tensor = self.output(x)
        return logits

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Logits of every next target token.

        Parameters
        ----------
        source : Tensor ``[batch, source_tokens]``
            Ids.
        source_lengths : Tensor ``[batch]``
            How many of them count; those after are ignored.
        target : Tensor ``[batch, target_tokens]``
            Ids, which begin with the start token.

        Returns
        -------
        Tensor ``[batch, target_tokens, target_vocab]``
            Logits.
        """
        ignored = _beyond(source_lengths, source.shape[1])
        return self.decode(self.encode(source, ignored), ignored, target)
