"""What holds kernelized attention on a device to its definition: one list of cases for the torch formulation, Triton's interpreter
and a real device."""

from dataclasses import dataclass, field

import numpy as np
import torch

import definition


@dataclass(frozen=True)
class Case:
    """A call, with its sizes and what is special about its inputs."""

    name: str
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 70
    keys: int = 70
    width: int = 16
    value_width: int = 16
    feature_map: str = "elu+1"
    is_causal: bool = True
    offset: int = 0
    decay: tuple = None
    normalize: bool = True
    padding: str = ""
    packed: tuple = None
    #: What happens to queries, keys and values before the call.
    inputs: str = ""
    segments: int = field(default=1)

    def __str__(self):
        return self.name

    def tensors(self, device="cpu", dtype=torch.float32):
        """Queries, keys, values and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.queries + self.keys)
        shapes = [(self.heads, self.queries, self.width), (self.kv_heads, self.keys, self.width),
                  (self.kv_heads, self.keys, self.value_width), (self.heads, self.queries, self.value_width)]  # fmt: skip
        q, k, v, d_out = (torch.randn(self.batch, *shape, generator=generator) for shape in shapes)
        if self.feature_map in ("relu", "identity"):
            # Sums of features of both signs may be close to 0, where no arithmetic has digits.
            q, k = q.abs() + 0.1, k.abs() + 0.1
        if self.inputs == "far":
            k = k + 150 * torch.arange(self.keys)[:, None].div(40, rounding_mode="floor")
        if self.inputs == "token major":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if self.inputs == "strided":
            v = torch.cat([v, v], -1)[..., ::2]
        return [x.to(device, dtype) for x in (q, k, v, d_out)]

    def mask(self, device="cpu"):
        """Which keys are ignored."""
        if not self.padding:
            return None
        ignored = torch.zeros(self.batch, self.keys, dtype=torch.bool)
        if self.padding == "some":
            ignored[:] = torch.rand(self.batch, self.keys, generator=torch.Generator().manual_seed(1)) < 0.4
        if self.padding in ("ends", "all"):
            ignored[0, -9:] = True
            ignored[-1, :7] = True
        if self.padding == "all":
            ignored[0] = True
        return ignored.to(device)

    def options(self):
        decay = None if self.decay is None else list(self.decay)
        return {"feature_map": self.feature_map, "decay": decay, "normalize": self.normalize}

    def expected(self, q, k, v):
        """The definition, in doubles, of arrays or of differentiable tensors."""
        if self.packed is not None:
            queries, keys = self.packed
            pieces = [self._whole(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], None)
                      for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])]  # fmt: skip
            return torch.cat(pieces, 2)
        return self._whole(q, k, v, self.mask())

    def _whole(self, q, k, v, mask):
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        keys = k
        if self.feature_map == "exp" and self.normalize:
            # Exact all the same: what cancels is left out, row by row, so that doubles do not overflow.
            scores = _log_scores(q, keys)
        else:
            scores = _FEATURES[self.feature_map](q) @ _FEATURES[self.feature_map](keys).mT
        age = torch.arange(q.shape[2])[:, None] + self.offset - torch.arange(k.shape[2])
        seen = torch.from_numpy(definition.visible(q.shape[2], k.shape[2], self.is_causal, self.offset, None, self.batch))
        if mask is not None:
            seen = seen & ~mask[:, None, None]
        if self.feature_map == "exp" and self.normalize:
            scores = scores.masked_fill(~seen, -torch.inf)
            highest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0) if scores.shape[-1] else 0
            scores = (scores - highest).exp()
        if self.decay is not None:
            gamma = torch.tensor(self.decay, dtype=q.dtype).repeat_interleave(group)[:, None, None]
            scores = scores * gamma ** age.clamp(min=0)
        scores = scores.masked_fill(~seen, 0)
        if not self.normalize:
            return scores @ v
        total = scores.sum(-1, keepdim=True)
        return torch.where(total == 0, 0, scores @ v / torch.where(total == 0, 1, total))


def _log_scores(q, k):
    return torch.logsumexp(q[:, :, :, None] + k[:, :, None], -1)


_FEATURES = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": torch.relu,
    "softplus": torch.nn.functional.softplus,
    "exp": torch.exp,
    "identity": lambda x: x,
}

CASES = [
    Case("plain"),
    *(Case(f"{n} tokens", queries=n, keys=n) for n in (0, 1, 31, 32, 33, 63, 64, 65, 131)),
    Case("a batch", batch=2, heads=4, kv_heads=2, queries=40, keys=40),
    Case("no power of two", width=20, value_width=12),
    Case("narrow", width=1, value_width=3),
    Case("heads of 128", queries=150, keys=150, heads=1, width=128, value_width=128),
    Case("grouped heads of 64", queries=100, keys=100, heads=4, kv_heads=2, width=64, value_width=96, decay=(0.95, 0.8)),
    Case("exp, heads of 128", queries=70, heads=1, width=128, value_width=40, feature_map="exp"),
    Case("wide", queries=40, keys=40, heads=1, width=130, value_width=200),
    *(Case(f"{name}, decay", feature_map=name, decay=(0.95,)) for name in ("elu+1", "relu", "softplus", "exp", "identity")),
    *(Case(f"{name}, undivided", feature_map=name, normalize=False) for name in ("elu+1", "softplus", "exp", "identity")),
    *(Case(f"both directions, {name}", feature_map=name, is_causal=False, queries=50) for name in ("elu+1", "exp")),
    *(Case(f"offset {o}, {name}", feature_map=name, offset=o, keys=60) for o in (3, -5, 20, -80, 200, 2**40) for name in ("elu+1", "exp")),
    Case("offset and decay", offset=13, keys=60, decay=(0.9,)),
    *(Case(f"padding, {p}, {name}, {'causal' if c else 'both'}", batch=2, padding=p, feature_map=name, is_causal=c)
      for p in ("some", "ends", "all") for name in ("elu+1", "exp") for c in (True, False)),
    Case("padding and decay", batch=2, padding="ends", decay=(0.9,)),
    *(Case(f"packed, {name}, {'causal' if c else 'both'}", packed=([0, 5, 5, 40, 70], [0, 9, 9, 30, 66]), keys=66, feature_map=name, is_causal=c)
      for name in ("elu+1", "exp") for c in (True, False)),
    Case("packed, one sequence", packed=([0, 70], [0, 70])),
    *(Case(f"segments, {name}, decay {d}", feature_map=name, decay=d, queries=200, keys=200, segments=6)
      for name in ("elu+1", "exp") for d in (None, (0.9,))),
    Case("segments, both directions", is_causal=False, queries=200, keys=180, segments=6),
    Case("exponents that rise by 150", feature_map="exp", inputs="far", queries=100, keys=100),
    Case("exponents that rise by 150, segments", feature_map="exp", inputs="far", queries=300, keys=300, segments=6),
    Case("token major", inputs="token major", heads=3, kv_heads=3),
    Case("strided", inputs="strided"),
]  # fmt: skip


def error(got, expected):
    """Relative to the size of what was expected, or of numbers around 1 if that is less: what cancels has no digits. Infinite where
    a number is missing."""
    got, expected = (np.asarray(x.detach().double().cpu()) for x in (got, expected))
    assert got.shape == expected.shape
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 0.1 * max(got.size, 1) ** 0.5))
