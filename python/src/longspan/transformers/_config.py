"""The configuration of Longspan's own models: the settings of a run of the command."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedConfig

from .. import _options
from ..torch import _weights, runs

#: Keys of a run's ``config.json`` with the command's defaults.
SETTINGS: dict[str, Any] = {
    "pairs": None, "text": [], "labelled": None, "series": None, "synthetic": None, "columns": {}, "target": None,
    "forecast": None, "context": None, "clock": None, "missing": "mask", "base": False, "tokens": None, "vocabulary": None, "segment": 256,
    "carry": 16, "backpropagate": 1, "split_sequence": False, "layers": 4, "pooling": "mean", "causal": False,
    "development": None, "held_out": None, "split_version": 2, "source_tokens": None, "target_tokens": None, "max_tokens": 512,
    "answer_tokens": None, "attention": "shaw", "attention_options": {}, "feature_map": "elu+1", "radius": 8, "d_model": 128,
    "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 256, "dropout": 0.0, "norm": "pre", "norm_kind": "layer",
    "activation": "relu", "gated": False, "gated_attention": False, "recompute": False, "seed": 1, "steps": 1, "minutes": None,
    "optimizer": "adamw", "batch_size": 64, "learning_rate": 4e-3, "warmup_steps": 100, "weight_decay": 0.01, "label_smoothing": 0.05,
    "clip_norm": 1.0, "workers": None, "checkpoint_steps": 500, "evaluate": 0,
}  # fmt: skip

#: For each model the settings that say what it learned from, and its tokenizers.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "LongspanForCausalLM": (("text", "synthetic"), ("text",)),
    "LongspanForSequenceClassification": (("labelled",), ("text",)),
    "LongspanForSeq2SeqLM": (("pairs",), ("source", "target")),
}
_DATA = ("pairs", "text", "labelled", "series", "synthetic")
_BYTES = {"kind": "bytes"}


def architecture_of(settings: dict[str, Any]) -> str:
    """The model of a run with these settings."""
    if settings.get("series"):
        raise ValueError("LongspanConfig: series: expected a run of texts, labelled texts or pairs, got one of series; read it with "
                         "`longspan.torch.runs.load_run`")  # fmt: skip
    if str(settings.get("synthetic") or "").split(":")[0].strip() == "compression":
        raise ValueError("LongspanConfig: synthetic: expected a task of a language model, got compression; read it with `longspan eval`")
    if settings.get("base"):
        raise ValueError("LongspanConfig: base: expected a whole model, got one that corrects a simple method; read it with "
                         "`longspan predict`, or train with --set base=false")  # fmt: skip
    for name, (data, _) in KINDS.items():
        if any(settings.get(key) for key in data):
            return name
    # Without any, the command's own pairs.
    return "LongspanForSeq2SeqLM"


class LongspanConfig(PreTrainedConfig):  # type: ignore[misc]
    """The settings of a model, by the names of the command's ``config.json`` (``longspan train --help`` explains them).

    The file is that of a run: the command writes ``model_type`` and ``architectures`` into it, which it does not read, and what the
    folder says elsewhere (sizes of vocabularies, labels) is read from there.

    Parameters
    ----------
    tokenizers
        The contents of ``text_tokenizer.json``, or of ``source_tokenizer.json`` and ``target_tokenizer.json``, by side:
        ``{"text": {"kind": "characters", "vocabulary": ["a", "b"]}}``. Bytes for every side that is not given. The kind
        ``"json"`` needs ``vocab_size`` and ``target_vocab_size`` too.
    vocab_size, target_vocab_size
        Entries of the embeddings, 4 for padding, start, end and unknown included; by default as many as the tokenizers have.
    capacity
        Tokens that a state of softmax attention has room for. The command's grow, so the folder does not hold it.
    target_mean, target_deviation
        With ``problem_type="regression"``: what the model's number is multiplied by, and added to.
    settings
        ``attention``, ``attention_options``, ``feature_map``, ``radius``, ``d_model``, ``heads``, ``layers``, ``encoder_layers``,
        ``decoder_layers``, ``d_ff``, ``dropout``, ``norm``, ``norm_kind``, ``activation``, ``gated``, ``gated_attention``, ``pooling``,
        ``causal``, ... with the command's defaults; ``hidden_size``, ``num_attention_heads`` and ``num_hidden_layers`` stand for ``d_model``,
        ``heads`` and ``layers``. Others are those of `transformers.PreTrainedConfig`, such as ``id2label``.

    Raises
    ------
    ValueError
        By `from_pretrained`, where the folder is no run, is one of series, or is damaged; by the models, for a mechanism or a
        form that is not known.

    Examples
    --------
    >>> from longspan.transformers import LongspanConfig
    >>> config = LongspanConfig(attention="shaw", radius=4, d_model=32, heads=2, layers=2)
    >>> config.vocab_size, config.hidden_size
    (260, 32)
    """

    model_type = "longspan"
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "heads", "num_hidden_layers": "layers"}
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self, tokenizers: dict[str, Any] | None = None, vocab_size: int | None = None, target_vocab_size: int | None = None,
        capacity: int = 4096, target_mean: float = 0.0, target_deviation: float = 1.0, **settings: Any,
    ) -> None:  # fmt: skip
        for alias, name in self.attribute_map.items():
            if alias in settings:
                settings[name] = settings.pop(alias)
        own = {name: settings.pop(name, usual) for name, usual in SETTINGS.items()}
        for name, value in own.items():
            setattr(self, name, value.copy() if isinstance(value, (dict, list)) else value)
        self.tokenizers = dict(tokenizers or {})
        for side in self.tokenizers:
            if side not in ("text", "source", "target"):
                raise ValueError(f"LongspanConfig: tokenizers: expected text, or source and target, got {side!r}")
        first = self.tokenizers.get("source" if "source" in self.tokenizers else "text", _BYTES)
        self.vocab_size = _size("vocab_size", vocab_size, first)
        self.target_vocab_size = _size("target_vocab_size", target_vocab_size, self.tokenizers.get("target", _BYTES))
        self.capacity = capacity
        self.target_mean, self.target_deviation = target_mean, target_deviation
        self.pad_token_id, self.bos_token_id, self.eos_token_id = runs.PAD, runs.START, runs.END
        self.decoder_start_token_id = runs.START
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "is_encoder_decoder"):
            settings.pop(name, None)
        super().__init__(**settings)
        given = self.architectures or []
        self.is_encoder_decoder = "LongspanForSeq2SeqLM" in given

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as the command knows them."""
        return {name: getattr(self, name) for name in SETTINGS}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """The configuration of a run's folder, or of one that `save_pretrained` wrote.

        Raises ``ValueError`` where it is neither.
        """
        folder = Path(pretrained_model_name_or_path)
        return cls.from_dict(_read(folder / "config.json", runs.read_settings), name_or_path=str(folder), **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `transformers.PreTrainedConfig.from_dict`; ``name_or_path`` names the folder that says the rest."""
        folder = Path(kwargs.get("name_or_path") or "")
        if kwargs.get("name_or_path") and (folder / "model.safetensors").is_file():
            config_dict = {**config_dict, **_of_folder(folder, config_dict)}
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes the folder's files but for the weights, as the command would."""
        if push_to_hub:
            raise ValueError("LongspanConfig.save_pretrained: push_to_hub: expected False, got True; upload the folder yourself")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        _weights.store(folder, self.files((self.architectures or ["LongspanForCausalLM"])[0]))

    def files(self, architecture: str) -> dict[str, bytes]:
        """The files of a run's folder that say what its model is, by name."""
        data, sides = KINDS[architecture]
        settings = self.settings
        chosen = next((key for key in data if settings[key]), None)
        for key in _DATA:
            if key not in data:
                settings[key] = SETTINGS[key]
        if chosen is None and architecture_of(settings) != architecture:
            # What it learned from, the command does not know.
            settings[data[0]] = ["-"] if data[0] == "text" else "-"
        if architecture == "LongspanForSequenceClassification":
            settings["target"] = "number" if self.problem_type == "regression" else "label"
        stored: dict[str, Any] = {"config.json": {"model_type": self.model_type, "architectures": [architecture], **settings}}
        if not settings["synthetic"]:
            for side, size in zip(sides, (self.vocab_size, self.target_vocab_size)):
                tokenizer = self.tokenizers.get(side, _BYTES)
                if side in self.tokenizers or size == _size(side, None, _BYTES):
                    stored[f"{side}_tokenizer.json"] = tokenizer
        if architecture == "LongspanForSequenceClassification":
            stored["labels.json"] = [self.id2label[label] for label in range(self.num_labels)]
            if self.problem_type == "regression":
                stored["labels.json"] = {"mean": self.target_mean, "deviation": self.target_deviation}
        return {name: (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode() for name, value in stored.items()}


def never(config: LongspanConfig, side: str) -> list[int]:
    """Tokens that the command never gives as an answer."""
    return runs.tokenizer_of("LongspanConfig: tokenizers", config.tokenizers.get(side, _BYTES)).never


def _size(name: str, given: int | None, tokenizer: dict[str, Any]) -> int:
    """Entries of an embedding."""
    if given is not None:
        _options.expect_integer("LongspanConfig", name, given, 1, _options.MOST)
        return given
    return len(runs.tokenizer_of(f"LongspanConfig: {name}", tokenizer))


def _read(path: Path, read: Callable[[Path], Any] = runs.read_json) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: expected a file of a folder that `longspan train` or save_pretrained wrote, got none")
    return read(path)


def _of_folder(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the other files of a run's folder say."""
    architecture = architecture_of(settings)
    found: dict[str, Any] = {"architectures": [architecture]}
    sides = KINDS[architecture][1]
    shapes = _shapes(folder / "model.safetensors")
    try:
        found["vocab_size"] = shapes["embedding.weight" if sides == ("text",) else "source_embedding.weight"][0]
        if "target" in sides:
            found["target_vocab_size"] = shapes["target_embedding.weight"][0]
    except KeyError as error:
        path = folder / "model.safetensors"
        raise ValueError(f"{path}: expected the weights of a {architecture}, got none for {error}") from error
    stored = {side: folder / f"{side}_tokenizer.json" for side in sides}
    found["tokenizers"] = {side: _read(path) for side, path in stored.items() if path.exists()}
    if architecture == "LongspanForSequenceClassification":
        labels = runs.labels_of(folder / "labels.json", _read(folder / "labels.json"))
        if isinstance(labels, dict):
            found.update(num_labels=1, problem_type="regression", target_mean=labels["mean"], target_deviation=labels["deviation"])
        else:
            found.update(id2label=dict(enumerate(labels)), label2id={label: place for place, label in enumerate(labels)})
    return found


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a file of weights."""
    with _weights.read_file(path, lambda path: safe_open(path, "pt")) as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}
