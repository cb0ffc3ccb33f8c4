"""
An irregular time series with Fourier positions
===============================================

Measurements rarely come at even intervals. `longspan.ops.fourier_attention` takes the times themselves as positions: the weight of
a pair has learned waves of ``t_i - t_j`` in it, real numbers in any unit, still in linear time. Here a model fills gaps in series
whose points lie at random times. The same model that only counts points shows what the times are worth.
"""

# %%
# Series
# ------
#
# Each is a sum of two waves of its own, measured with some noise at 40 random times. A quarter of the values is hidden; the model is
# told where, and has to say what the waves are there.

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

from longspan.torch import TransformerEncoderLayer

torch.manual_seed(0)


def waves_at(times, period, phase):
    return (2 * math.pi * times / period + phase).sin().sum(-1)


def series(count, points=40):
    """Times ``[count, points, 1]``, what is measured there and what is hidden ``[count, points]``, period and phase of the waves."""
    times = torch.rand(count, points, 1).mul(10).sort(1).values
    waves = torch.rand(count, 1, 2) * 3 + 1.5, torch.rand(count, 1, 2) * 2 * math.pi
    return times, waves_at(times, *waves) + 0.2 * torch.randn(count, points), torch.rand(count, points) < 0.25, waves


# %%
# The model
# ---------
#
# A token is a value, 0 where it is hidden, and whether it is. Attention looks both ways. With ``axes=1`` a position is one number,
# which every call gets as ``positions``; with ``axes=2`` it would be a place on a map. The waves in the weights start with lengths
# from 2 pi to about ``2 pi longest``, in the unit of the positions. The normaliser ``"unrotated"`` lets weights be negative: a point
# half a wave away says what the value here is *not*.


class GapFiller(nn.Module):
    def __init__(self, axes, width=32, layers=3):
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True,
                attention="fourier", axes=axes, longest=3.0, normalizer="unrotated",
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, values, hidden, times):
        x = self.embed(torch.stack([values.masked_fill(hidden, 0.0), hidden.to(values.dtype)], -1))
        for layer in self.layers:
            x = layer(x, positions=times)
        return self.head(x)[..., 0]


def trained(axes, steps=400):
    torch.manual_seed(0)
    model = GapFiller(axes)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        times, values, hidden, waves = series(32)
        # A position is the time in units of a quarter.
        guess = model(values, hidden, times * 4 if axes else None)
        loss = (guess - waves_at(times, *waves))[hidden].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


by_time, by_count = trained(axes=1), trained(axes=None)

# %%
# What the times are worth
# ------------------------
#
# On new series, as a share of the variance of what is hidden. A straight line between the neighbours that are seen is the simplest
# answer.

times, values, hidden, waves = series(500)
truth = waves_at(times, *waves)
with torch.no_grad():
    guesses = {"by time": by_time(values, hidden, times * 4), "by count": by_count(values, hidden, None)}
lines = torch.zeros_like(values)
for row, (t, value, gap) in enumerate(zip(times[..., 0], values, hidden)):
    seen_t, seen = t[~gap], value[~gap]
    after = torch.searchsorted(seen_t, t).clamp(1, len(seen) - 1)
    share = (t - seen_t[after - 1]) / (seen_t[after] - seen_t[after - 1])
    lines[row] = torch.lerp(seen[after - 1], seen[after], share.clamp(0, 1))
guesses["straight lines"] = lines
errors = {}
for name, guess in guesses.items():
    errors[name] = ((guess - truth)[hidden].square().mean() / truth[hidden].var()).item()
    print(f"{name:<14} {errors[name]:.3f}")
assert errors["by time"] < 0.5 * min(errors["by count"], errors["straight lines"])

# %%
# One of these series. Hollow points are the waves where nothing was seen: what both models were asked for.

t, value, gap = times[0, :, 0], values[0], hidden[0]
fine = torch.linspace(0, 10, 500)
figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
axis.plot(fine, waves_at(fine[:, None], *(wave[0] for wave in waves)), color="lightgray", label="waves")
axis.scatter(t[~gap], value[~gap], color="black", s=18, label="seen")
axis.scatter(t[gap], truth[0][gap], facecolors="none", edgecolors="black", s=45, label="hidden")
axis.scatter(t[gap], guesses["by time"][0][gap], color="tab:blue", marker="x", label="by time")
axis.scatter(t[gap], guesses["by count"][0][gap], color="tab:orange", marker="+", label="by count")
axis.set(xlabel="time", ylabel="value")
figure.legend(loc="outside upper center", ncols=5)
plt.show()
