"""Longspan in Hugging Face's `transformers`, which is an optional dependency.

Its attention inside other models: `register` makes it known by name, and `StateCache` lets ``generate`` keep states, of a size that
does not grow, in the place of keys and values::

    longspan.transformers.register("longspan")
    model.set_attn_implementation("longspan")
    model.generate(**prompt, cache=longspan.transformers.StateCache())    # before transformers 5.24: past_key_values=

A model's weights were learned with its own attention: one that is to compute with another has to be trained with it.

Models that have linear layers already, such as Qwen3-Next or Mamba-2, keep their mathematics and run on Longspan's kernels::

    longspan.transformers.accelerate(model)

Models of its own, which are those of the command: `LongspanForCausalLM`, `LongspanForSequenceClassification` and
`LongspanForSeq2SeqLM` read the folder that ``longspan train`` wrote and write one that ``longspan predict``, ``generate``, ``eval``
and ``info`` read::

    model = longspan.transformers.LongspanForCausalLM.from_pretrained("runs/novel")
    model.generate(tokens, max_new_tokens=100)
    model.save_pretrained("runs/mine")
"""

from ._accelerate import accelerate
from ._attention import StateCache, register
from ._config import LongspanConfig
from ._models import LongspanForCausalLM, LongspanForSeq2SeqLM, LongspanForSequenceClassification

__all__ = [
    "LongspanConfig",
    "LongspanForCausalLM",
    "LongspanForSeq2SeqLM",
    "LongspanForSequenceClassification",
    "StateCache",
    "accelerate",
    "register",
]
