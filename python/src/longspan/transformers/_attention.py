"""Longspan's attention inside models of Hugging Face's `transformers`, and the cache that holds its states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .. import ops
from ..torch.models import Past

_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "kernelized": (ops.kernelized_attention, ops.kernelized_attention_step),
    "softmax": (ops.softmax_attention, ops.softmax_attention_step),
}

#: The types of masks that say which keys count, by what the model's pattern is, which its modules need not know: causal or not.
_CAUSAL = {torch.int8: True, torch.uint8: False}

#: What some models ask of an attention beside a mask, and linear attention has no meaning for.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def register(name: str = "longspan", mechanism: str = "kernelized", **options: Any) -> None:
    """Makes an attention known to `transformers` by a name.

    Parameters
    ----------
    name : str
        What ``attn_implementation`` and ``set_attn_implementation`` call it from now on.
    mechanism : str
        ``"kernelized"``, linear attention, or ``"softmax"``, the exact one with the model's scale.
    **options
        Those of `longspan.ops.kernelized_attention` (``feature_map``, ``decay`` ...) or `longspan.ops.softmax_attention`.

    Raises
    ------
    ValueError
        For another mechanism. When the model runs: for masks that are neither causal nor bidirectional with ignored keys, such as
        sliding windows and packed sequences.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from longspan.transformers import register
    >>> register("longspan-decayed", decay=0.99)
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    ...     attn_implementation="longspan-decayed",
    ... )
    >>> LlamaForCausalLM(config)(torch.randint(1, 64, (1, 16))).logits.shape
    torch.Size([1, 16, 64])
    """
    if mechanism not in _FUNCTIONS:
        raise ValueError(f"register: mechanism: expected one of {', '.join(_FUNCTIONS)}, got {mechanism!r}")
    whole, step = _FUNCTIONS[mechanism]
    known = inspect.signature(step).parameters
    for option in options:
        if option not in known or option in ("q", "k", "v", "state", "scale"):
            raise TypeError(f"register: {option}: expected an option of {step.__name__}, got another name")

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        for asked in _REFUSED:
            if others.get(asked) is not None:
                kind = type(others[asked]).__name__
                raise ValueError(f"{name}: {asked}: expected None, as the weights are never formed and sequences not packed here, got {kind}")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"{name}: attention_mask: expected shape (batch, tokens), 1 or True where a token counts, "
                             f"got shape {tuple(attention_mask.shape)}")  # fmt: skip
        chosen = {**options, "scale": scaling} if mechanism == "softmax" else options
        causal, ignored = getattr(module, "is_causal", True) if is_causal is None else is_causal, None
        if attention_mask is not None:
            causal = _CAUSAL.get(attention_mask.dtype, causal)
            # One without keys ignores none. Others have the tokens before, which a state remembers.
            if attention_mask.shape[1]:
                ignored = ~attention_mask[:, attention_mask.shape[1] - key.shape[2] :].bool()
        layer: _StateLayer | None = getattr(key, "_longspan_layer", None)
        if layer is not None:
            if layer.owner.pending is not layer:
                raise ValueError(f"{name}: cache: expected one attention to the keys that a StateCache returned, whose state takes each once, "
                                 "got another; use transformers.DynamicCache()")  # fmt: skip
            layer.owner.pending = None
            if layer.state is not None and layer.state.batch != query.shape[0]:
                raise ValueError(f"{name}: cache: expected states of as many sequences as the batch, {query.shape[0]}, got "
                                 f"{layer.state.batch}; for more continuations of each, cache.batch_repeat_interleave(n)")  # fmt: skip
        if layer is None:
            offset = key.shape[2] - query.shape[2] if causal else 0
            out = whole(query, key, value, is_causal=causal, offset=offset, key_padding_mask=ignored, **chosen)
        elif not causal:
            raise ValueError(f"{name}: cache: expected None or another cache for attention that is not causal, "
                             "got a StateCache")  # fmt: skip
        elif query.shape[2] == 1 and (ignored is None or not bool(ignored.any())):
            out, layer.state = step(query, key, value, state=layer.state, **chosen)
        else:
            out, layer.state = whole(
                query, key, value, is_causal=True, key_padding_mask=ignored, initial_state=layer.state,
                output_final_state=True, **chosen,
            )  # fmt: skip
        out = torch.nn.functional.dropout(out, dropout, dropout > 0)
        return out.transpose(1, 2).contiguous(), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: Any = None, kv_offset: Any = 0, *args: Any,
        mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        if mask_function not in (causal_mask_function, bidirectional_mask_function):
            raise ValueError(f"{name}: attention_mask: expected a causal mask, or none, and ignored tokens, got another pattern "
                             "(for sliding windows and packed sequences call longspan.ops, whose softmax_attention has a window and "
                             "whose functions take cu_seqlens; a compiled or exported model has to be given an attention_mask, as "
                             "transformers takes its sequences for packed ones without)")  # fmt: skip
        if q_offset is not None and mask_function is causal_mask_function and int(q_offset) + q_length < kv_length + int(kv_offset):
            raise ValueError(f"{name}: cache: expected a cache of the tokens so far, got one with {kv_length} places of which "
                             f"{int(q_offset) + q_length} are written (a StaticCache); give longspan.transformers.StateCache() or "
                             "transformers.DynamicCache()")  # fmt: skip
        if attention_mask is not None and tuple(attention_mask.shape) != (batch_size, kv_length):
            raise ValueError(f"{name}: attention_mask: expected shape {(batch_size, kv_length)}, tokens that a cache holds included, "
                             f"got {tuple(attention_mask.shape)}")  # fmt: skip
        # What a compiler traces cannot depend on the mask's numbers.
        if attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())):
            attention_mask = torch.ones(batch_size, 0, device=None if attention_mask is None else attention_mask.device)
        return attention_mask.bool().to(torch.int8 if mask_function is causal_mask_function else torch.uint8)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


class _StateLayer(CacheLayerMixin, Past):  # type: ignore[misc]
    """One layer's state, and how many tokens it has taken in; in a decoder, keys and values of what the encoder gave."""

    supports_early_init = False

    def __init__(self, owner: StateCache) -> None:
        super().__init__()
        Past.__init__(self)
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, Tensor]:
        """The new tokens' own keys and values; the attention finds the state by the former."""
        if self.owner.pending is not None:
            raise ValueError("StateCache: attention: expected one of longspan.transformers.register, which takes up the state of each "
                             "layer, got another, or keys that are not those that the cache returned; call "
                             "model.set_attn_implementation, or use transformers.DynamicCache()")  # fmt: skip
        self.owner.pending = self
        self.lazy_initialization(key_states, value_states)
        self.tokens += key_states.shape[2]
        keys: Any = key_states.view_as(key_states)
        keys._longspan_layer = self
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        Past.__init__(self)

    def offload(self) -> None:
        """A state is small, and stays where its tokens are."""

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("StateCache.crop: tokens_to_remove: expected 0, because a state forgets no token, "
                             f"got {tokens_to_remove}")  # fmt: skip

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)
        if self.memory is not None:
            keys, values = self.memory
            self.memory = keys.index_select(0, indices), values.index_select(0, indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            place = None if self.memory is None else self.memory[0].device
            self.batch_select_indices(torch.arange(self.state.batch, device=place).repeat_interleave(repeats))


class StateCache(Cache):  # type: ignore[misc]
    """A cache of states for an attention that `register` made known: what ``generate`` keeps of a text does not grow with it.

    Give it as ``cache``, before transformers 5.24 as ``past_key_values``. Beam search works; what would have to take tokens back, such as
    assisted decoding, does not.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from longspan.transformers import StateCache, register
    >>> register("longspan")
    >>> config = LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    ...     attn_implementation="longspan",
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> def bytes_after(tokens):
    ...     cache = StateCache()
    ...     _ = model.generate(torch.ones(1, 4, dtype=torch.long), cache=cache, max_new_tokens=tokens)
    ...     return cache.nbytes
    >>> bytes_after(2) == bytes_after(40)
    True
    """

    def __init__(self) -> None:
        # No lambda: it could not be pickled, and layers of a copy would belong to the original.
        super().__init__(layer_class_to_replicate=functools.partial(_StateLayer, self))
        #: The layer whose new keys an attention has still to take up.
        self.pending: _StateLayer | None = None

    def get_conv_state(self, *_: Any, **__: Any) -> Any:
        """Refused: what models with linear layers of their own ask for first."""
        raise ValueError("StateCache: model: expected attention in every layer, got a model with linear layers, whose states it has no place "
                         "for; use transformers.DynamicCache(config=model.config)")  # fmt: skip

    def first(self, count: int) -> list[_StateLayer]:
        """Of so many layers what they remember."""
        self.layers.extend(_StateLayer(self) for _ in range(len(self.layers), count))
        layers: list[_StateLayer] = self.layers[:count]
        return layers

    @property
    def nbytes(self) -> int:
        """Bytes that all states take."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)
