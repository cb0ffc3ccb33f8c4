"""What a JAX user would write instead: jitted, on JAX's own copies of the tensors."""

import jax
import jax.numpy as jnp
import numpy as np


def phi(x):
    return jax.nn.elu(x) + 1


def linear(q, k, v):
    q, k = phi(q), phi(k)
    return (q @ (k.swapaxes(-1, -2) @ v)) / (q @ k.sum(-2)[..., None] + 1e-6)


def scan64_causal(q, k, v):
    """A loop over chunks of 64 that carries the sums."""
    q, k = phi(q), phi(k)
    batch, heads, length, width = q.shape
    chunk = min(length, 64)
    lower = jnp.tril(jnp.ones((chunk, chunk), q.dtype))
    values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
    chunks = [jnp.moveaxis(x.reshape(batch, heads, -1, chunk, x.shape[-1]), 2, 0) for x in (q, k, values)]

    def step(state, tokens):
        q, k, v = tokens
        out = ((q @ k.swapaxes(-1, -2)) * lower) @ v + q @ state
        return state + k.swapaxes(-1, -2) @ v, out

    start = jnp.zeros((batch, heads, width, values.shape[-1]), q.dtype)
    _, out = jax.lax.scan(step, start, tuple(chunks))
    out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, length, -1)
    return out[..., :-1] / (out[..., -1:] + 1e-6)


def chunk64_causal(q, k, v):
    """All chunks of 64 at once, with running sums between them."""
    q, k = phi(q), phi(k)
    batch, heads, length, _ = q.shape
    q, k, v = (x.reshape(batch, heads, -1, min(length, 64), x.shape[-1]) for x in (q, k, v))
    outer = k.swapaxes(-1, -2) @ v
    before = outer.cumsum(2) - outer
    sums = k.sum(-2)
    sums_before = sums.cumsum(2) - sums
    weights = jnp.tril(q @ k.swapaxes(-1, -2))
    denominator = weights.sum(-1, keepdims=True) + q @ sums_before[..., None]
    return ((weights @ v + q @ before) / (denominator + 1e-6)).reshape(batch, heads, length, -1)


_FUNCTIONS = {"jax_linear": linear, "jax_scan64_causal": scan64_causal, "jax_chunk64_causal": chunk64_causal}


class Peer:
    def __init__(self, name, q, k, v, threads):
        function = _FUNCTIONS[name]

        def both(q, k, v, d_out):
            out, pull_back = jax.vjp(function, q, k, v)
            return out, *pull_back(d_out)

        self._forward, self._both = jax.jit(function), jax.jit(both)
        self._tensors = [jnp.asarray(x.numpy()) for x in (q, k, v)]
        self._ones = jnp.ones(v.shape, jnp.float32)

    def run(self, backward):
        result = self._both(*self._tensors, self._ones) if backward else self._forward(*self._tensors)
        return jax.block_until_ready(result)

    def output(self):
        """``[batch, head, token, feature]``."""
        return np.array(self.run(False))
