"""Longspan's own models for `transformers`: those of the command, with its folders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from ..torch import _settings, _weights, models, runs
from ._attention import StateCache
from ._config import LongspanConfig, never

#: Arguments of `transformers` about files elsewhere, which a folder has no use for.
_OF_HUBS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "use_safetensors", "weights_only",
            "trust_remote_code", "low_cpu_mem_usage", "code_revision", "adapter_kwargs", "subfolder", "_from_auto", "_from_pipeline")  # fmt: skip
#: What `transformers` calls a cache: ``cache`` from 5.24 on, which warns of the name before.
_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
#: What a call may say that changes nothing here.
_WITHOUT_EFFECT = ("return_dict", "cache_position", "use_cache")


def _refuse(model: Any, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise TypeError(f"{type(model).__name__}: {name}: expected None, because the model has no use for it, got "
                            f"{type(value).__name__}")  # fmt: skip


def _ignored(model: Any, name: str, mask: Tensor | None, tokens: Tensor, past: Any = None, left: bool = False) -> Tensor | None:
    """True where a token does not count; ``left`` if such tokens may stand before others."""
    if mask is None:
        return None
    shape = (tokens.shape[0], tokens.shape[1] + (past[0].tokens if past else 0))
    if tuple(mask.shape) != shape:
        raise ValueError(f"{type(model).__name__}: {name}: expected shape {shape}, 1 or True where a token counts, those that a cache "
                         f"holds included, got {tuple(mask.shape)}")  # fmt: skip
    counts = mask.bool()
    if not left and bool((~counts[:, :-1] & counts[:, 1:]).any()):
        raise ValueError(f"{type(model).__name__}: {name}: expected ignored tokens at the end alone, because the model counts "
                         "positions from the first, got some before others; pad on the right")  # fmt: skip
    counts = counts[:, counts.shape[1] - tokens.shape[1] :]
    # What a compiler traces cannot depend on the mask's numbers.
    return None if not torch.compiler.is_compiling() and bool(counts.all()) else ~counts


def _cross_entropy(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    """Over the labels that are not -100: their mean, or their sum over ``count``, of which there are more in other calls."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().to(logits.device), reduction="sum")
    return total / ((labels != -100).sum().clamp(min=1) if count is None else count)


class _Longspan(PreTrainedModel):  # type: ignore[misc]
    """What the three have in common: the folder."""

    config_class = LongspanConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    model: Any

    def __init__(self, config: LongspanConfig, make: Callable[..., torch.nn.Module], *sizes: int) -> None:
        super().__init__(config)
        self.config.architectures = [type(self).__name__]
        self.model = make({**config.settings, "capacity": config.capacity}, *sizes)
        self.post_init()

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refused: a vocabulary is that of the run's tokenizers, which the command reads, too."""
        raise NotImplementedError(f"{type(self).__name__}.resize_token_embeddings: expected the vocabulary of the run's tokenizers, got "
                                  "another size; make a new model with vocab_size in its LongspanConfig")  # fmt: skip

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The modules draw their own."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, config: LongspanConfig | None = None,
        dtype: torch.dtype | str | None = None, device_map: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Reads the folder of a run that ``longspan train`` made, or one that `save_pretrained` wrote.

        Parameters
        ----------
        pretrained_model_name_or_path
            The folder.
        config
            Its configuration, if it has been read already.
        dtype
            That of the parameters; float32, that of the file, by default.
        device_map
            The device of all parameters, by itself or as ``{"": device}``; ``"auto"`` is a GPU where there is one.
        kwargs
            Settings to change, such as ``dropout``.

        Returns
        -------
        The model in evaluation.

        Raises
        ------
        ValueError
            Where the folder is no run, is one of another model, or a file in it is damaged.
        TypeError
            For arguments that are not known.
        """
        folder = Path(pretrained_model_name_or_path)
        places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
        if len(places) != 1:
            raise ValueError(f"{cls.__name__}.from_pretrained: device_map: expected one device for all of the model, got {device_map}")
        device = ("cuda" if torch.cuda.is_available() else "cpu") if places[0] == "auto" else places[0]
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_HUBS}
        dtype = kwargs.pop("torch_dtype", dtype)
        if config is None:
            config, kwargs = LongspanConfig.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
        if kwargs:
            raise TypeError(f"{cls.__name__}.from_pretrained: expected settings of LongspanConfig, got {', '.join(kwargs)}")
        (architecture,) = config.architectures or [cls.__name__]
        if architecture != cls.__name__:
            raise ValueError(f"{cls.__name__}.from_pretrained: {folder}: expected a folder of a {cls.__name__}, got one of a "
                             f"{architecture}")  # fmt: skip
        model: Any = cls(config)  # type: ignore[call-arg]
        _weights.load_weights(model.model, folder / "model.safetensors")
        if (folder / "generation_config.json").exists() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        dtype = None if dtype == "auto" else dtype
        return model.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype).eval()

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Writes a folder that `from_pretrained`, ``longspan predict``, ``generate`` and ``info`` read. Weights are float32.

        Parameters
        ----------
        save_directory
            The folder, which is made where there is none. Each file is replaced as a whole.
        is_main_process
            False where another process writes.
        state_dict
            Parameters to write in the place of the model's own.
        push_to_hub
            False: upload the folder yourself.
        kwargs
            Those of `transformers` about the form of the files, which have no effect.

        Raises
        ------
        ValueError
            Where the folder holds a training run, whose ``--resume`` would put other weights in the place of these.

        Notes
        -----
        The command needs the tokenizers of the model's `LongspanConfig`.
        """
        if push_to_hub:
            raise ValueError(f"{type(self).__name__}.save_pretrained: push_to_hub: expected False, got True; upload the folder "
                             "yourself")  # fmt: skip
        if not is_main_process:
            return
        folder = Path(save_directory)
        if (folder / "checkpoint.safetensors").exists():
            raise ValueError(f"{type(self).__name__}.save_pretrained: save_directory: expected a folder without a training run, "
                             f"got {folder}, which has a checkpoint; choose another folder")  # fmt: skip
        values = None
        if state_dict is not None:
            values = {name.removeprefix("model."): value for name, value in state_dict.items()}
        files = self.config.files(type(self).__name__)
        if self.can_generate():
            files["generation_config.json"] = self.generation_config.to_json_string().encode()
        folder.mkdir(parents=True, exist_ok=True)
        _weights.store(folder, {**files, "model.safetensors": _weights.weights_file(self.model, values)})


class _Generating(_Longspan, GenerationMixin):  # type: ignore[misc]
    # No token can be taken back from a state.
    _is_stateful = True

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any) -> None:
        if model_kwargs.get(_CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[_CACHE] = StateCache()

    def _past(self, given: tuple[Any, Any], wanted: bool | None, blocks: Any) -> tuple[dict[str, StateCache], Any]:
        """The cache, by either name or new where one is wanted, by the name that outputs have for it, and what it remembers for
        each block."""
        cache = given[0] if given[1] is None else given[1]
        if cache is None and not wanted:
            return {}, None
        cache = StateCache() if cache is None else cache
        if not isinstance(cache, StateCache):
            raise TypeError(f"{type(self).__name__}: cache: expected a StateCache, got {type(cache).__name__}")
        return {_CACHE: cache}, cache.first(len(blocks))


class LongspanForCausalLM(_Generating):
    r"""The language model of ``longspan train --text``: causal blocks with linear attention, whose output layer is the embedding.

    .. math:: p(x_{t+1} \mid x_{1..t}) = \mathrm{softmax}(E\, h_t)

    A text begins with the id 1, as the command's do; 0 is padding, 2 the end, 3 unknown, and a tokenizer's own ids follow.
    ``generate`` keeps a `StateCache`, whose size does not grow, and a token takes a time that does not depend on how many came
    before; with softmax attention the time grows, and the cache ends at ``config.capacity`` tokens.

    Parameters
    ----------
    config
        A `LongspanConfig`.

    Examples
    --------
    >>> import torch
    >>> from longspan.transformers import LongspanConfig, LongspanForCausalLM
    >>> model = LongspanForCausalLM(LongspanConfig(d_model=16, heads=2, layers=1, d_ff=32)).eval()
    >>> model.generate(torch.tensor([[1, 70, 80]]), max_new_tokens=5, min_new_tokens=5, do_sample=False).shape
    torch.Size([1, 8])
    """

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config, models.LanguageModel, config.vocab_size)
        self.generation_config = GenerationConfig(
            bos_token_id=runs.START, eos_token_id=runs.END, pad_token_id=runs.PAD,
            suppress_tokens=never(config, "text"),
        )  # fmt: skip

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: StateCache | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, num_items_in_batch: Any = None,
        cache: StateCache | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """Logits ``[batch, tokens, vocab]`` of every next token.

        Parameters
        ----------
        input_ids
            ``[batch, tokens]``.
        attention_mask
            ``[batch, tokens]``, those before included, 1 or True where a token counts. Ignored tokens may stand before others,
            except where the model knows absolute positions (``aft-full``, ``aft-local``).
        cache, past_key_values
            The states of the tokens before, which take these in; of both names `transformers` uses the first from 5.24 on.
        labels
            ``[batch, tokens]``: the same ids, each of which is learned from those before it; -100 is not learned.
        use_cache
            Whether to begin a cache.
        logits_to_keep
            Of so many tokens at the end only, or of those at these places; 0 for all.
        num_items_in_batch
            What the loss's sum is divided by, instead of the number of labels.

        Returns
        -------
        A ``CausalLMOutputWithPast``.
        """
        _refuse(self, others)
        if labels is not None and any(block.attention.attention.over is not None for block in self.model.blocks):
            # The last token of a stretch is learned from what stands on the next rank, and ranks hold different numbers of labels.
            raise ValueError(f"{type(self).__name__}: labels: expected None over several processes, got some; shift all labels by one token "
                             "before you cut them, and give the sum of their cross-entropy to longspan.torch.distributed.mean_loss")  # fmt: skip
        absolute = self.model.sinusoidal or not set(_settings.BY_POSITION).isdisjoint(_settings.names(self.config.settings))
        kept, past = self._past((past_key_values, cache), use_cache, self.model.blocks)
        ignored = _ignored(self, "attention_mask", attention_mask, input_ids, past, left=not absolute)
        rows = self.model(input_ids, ignored, past)
        logits = self.model.logits(rows[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)])
        loss = None
        if labels is not None:
            loss = _cross_entropy(self.model.logits(rows[:, :-1]), labels[:, 1:], num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)


class LongspanForSequenceClassification(_Longspan):
    """The model of ``longspan train --labelled``: blocks over a whole text, one row of all of it, and logits of its labels; or,
    with ``problem_type="regression"``, a number.

    The command's texts end with the id 2. Labels are those of ``config.id2label``.

    Parameters
    ----------
    config
        A `LongspanConfig`, with ``num_labels`` or ``id2label``.

    Examples
    --------
    >>> import torch
    >>> from longspan.transformers import LongspanConfig, LongspanForSequenceClassification
    >>> config = LongspanConfig(d_model=16, heads=2, layers=1, d_ff=32, num_labels=3)
    >>> model = LongspanForSequenceClassification(config).eval()
    >>> model(torch.tensor([[70, 80, 2]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: LongspanConfig) -> None:
        least = {None: 2, "single_label_classification": 2, "regression": 1}.get(config.problem_type)
        if least is None or config.num_labels < least or (least == 1 and config.num_labels > 1):
            raise ValueError(f"{type(self).__name__}: problem_type: expected regression with num_labels=1, single_label_classification with "
                             f"more, got {config.problem_type!r} with num_labels={config.num_labels}")  # fmt: skip
        if sorted(config.id2label) != list(range(config.num_labels)):
            raise ValueError(f"{type(self).__name__}: id2label: expected labels of the ids from 0 to {config.num_labels - 1}, got ids "
                             f"{list(config.id2label)}")  # fmt: skip
        super().__init__(config, models.Classifier, config.vocab_size, config.num_labels)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        num_items_in_batch: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        """Logits ``[batch, labels]``; of a regression the number itself, ``[batch, 1]``.

        Parameters
        ----------
        input_ids
            ``[batch, tokens]``.
        attention_mask
            ``[batch, tokens]``, 1 or True where a token counts; ignored ones at the end.
        labels
            ``[batch]``: ids of labels, for the cross-entropy, or numbers, for the mean squared error in units of
            ``target_deviation``.
        num_items_in_batch
            What the loss's sum is divided by, instead of the number of labels.

        Returns
        -------
        A ``SequenceClassifierOutput``.
        """
        _refuse(self, others)
        out = self.model(input_ids, _ignored(self, "attention_mask", attention_mask, input_ids))
        loss = None
        if self.config.problem_type == "regression":
            mean, deviation = self.config.target_mean, self.config.target_deviation
            if labels is not None:
                errors = (out.flatten() - (labels.flatten().to(out) - mean) / deviation) ** 2
                loss = errors.sum() / (labels.numel() if num_items_in_batch is None else num_items_in_batch)
            out = mean + deviation * out
        elif labels is not None:
            loss = _cross_entropy(out, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=out)


class _Encoder:
    """What ``generate`` calls before the first token."""

    def __init__(self, model: LongspanForSeq2SeqLM) -> None:
        self._model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        return BaseModelOutput(last_hidden_state=self._model._encode(input_ids, attention_mask)[0])

    __call__ = forward


class LongspanForSeq2SeqLM(_Generating):
    """The model of ``longspan train --pairs``: an encoder of the source, and a causal decoder that attends to it.

    The command's sources end with the id 2, targets begin with 1. ``generate`` encodes the source once, keeps its keys and values
    for each block of the decoder, and states of the answer so far, which do not grow; a beam selects among them.

    Parameters
    ----------
    config
        A `LongspanConfig`.

    Examples
    --------
    >>> import torch
    >>> from longspan.transformers import LongspanConfig, LongspanForSeq2SeqLM
    >>> config = LongspanConfig(d_model=16, heads=2, encoder_layers=1, decoder_layers=1, d_ff=32)
    >>> model = LongspanForSeq2SeqLM(config).eval()
    >>> model.generate(torch.tensor([[70, 80, 2]]), max_new_tokens=5, min_new_tokens=5, num_beams=2).shape
    torch.Size([1, 6])
    >>> model.prepare_decoder_input_ids_from_labels(torch.tensor([[70, 80, 2]]))
    tensor([[ 1, 70, 80]])
    """

    _input_embed_layer = "source_embedding"

    def __init__(self, config: LongspanConfig) -> None:
        config.is_encoder_decoder = True
        super().__init__(config, models.Seq2Seq, config.vocab_size, config.target_vocab_size)
        self.generation_config = GenerationConfig(
            bos_token_id=runs.START, eos_token_id=runs.END, pad_token_id=runs.PAD, decoder_start_token_id=runs.START,
            suppress_tokens=never(config, "target"), max_new_tokens=config.answer_tokens or config.max_tokens,
        )  # fmt: skip

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        return _Encoder(self)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels after a start token, less the last: what ``forward`` and the collators of `transformers` make of them.

        Parameters
        ----------
        labels
            ``[batch, target_tokens]``; -100 becomes padding.

        Returns
        -------
        Tensor ``[batch, target_tokens]``
            Ids.
        """
        return F.pad(labels[:, :-1].masked_fill(labels[:, :-1] == -100, runs.PAD), (1, 0), value=runs.START)

    def _encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ignored = _ignored(self, "attention_mask", attention_mask, input_ids)
        return self.model.encode(input_ids, ignored), ignored

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None, encoder_outputs: Any = None, past_key_values: StateCache | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, num_items_in_batch: Any = None,
        cache: StateCache | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """Logits ``[batch, target_tokens, target_vocab]`` of every next target token.

        Parameters
        ----------
        input_ids, attention_mask
            Of the source, ``[batch, source_tokens]``; 1 or True where a token counts, ignored ones at the end.
        decoder_input_ids, decoder_attention_mask
            Of the target, ``[batch, target_tokens]``, from the start token on; by default made of ``labels``.
        encoder_outputs
            What the encoder gave, instead of ``input_ids``.
        cache, past_key_values
            By either name, what the decoder remembers of the tokens before, and of the source.
        labels
            ``[batch, target_tokens]``: the target without its start; -100 is not learned.
        use_cache, num_items_in_batch
            As in `LongspanForCausalLM.forward`.

        Returns
        -------
        A ``Seq2SeqLMOutput``.

        Raises
        ------
        ValueError
            Without a source or a target.
        """
        _refuse(self, others)
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("LongspanForSeq2SeqLM: decoder_input_ids: expected ids or labels, got None")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is not None:
            memory = encoder_outputs[0]
            ignored = _ignored(self, "attention_mask", attention_mask, memory[..., 0])
        elif input_ids is not None:
            memory, ignored = self._encode(input_ids, attention_mask)
        else:
            raise ValueError("LongspanForSeq2SeqLM: input_ids: expected ids or encoder_outputs, got None")
        kept, past = self._past((past_key_values, cache), use_cache, self.model.decoder)
        target_ignored = _ignored(self, "decoder_attention_mask", decoder_attention_mask, decoder_input_ids, past)
        logits = self.model.decode(memory, ignored, decoder_input_ids, past, target_ignored)
        loss = None if labels is None else _cross_entropy(logits, labels, num_items_in_batch)
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=memory, **kept)


AutoConfig.register("longspan", LongspanConfig, exist_ok=True)
# By this list the Trainer knows that labels are to be shifted before it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["longspan"] = "LongspanForCausalLM"
AutoModelForCausalLM.register(LongspanConfig, LongspanForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LongspanConfig, LongspanForSequenceClassification, exist_ok=True)
AutoModelForSeq2SeqLM.register(LongspanConfig, LongspanForSeq2SeqLM, exist_ok=True)
