"""What callers bring at the edges: views, integers of NumPy, axes too many, masks beside offsets."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from longspan import ops  # noqa: E402
from longspan.torch import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer  # noqa: E402
from longspan.torch.runs import Tokenizer  # noqa: E402


@pytest.mark.parametrize("place", [0, 1, 2])
def test_views_that_stand_for_their_negative_keep_their_sign(place: int) -> None:
    tensors = [torch.randn(1, 1, 4, 2) for _ in range(3)]
    view = torch.randn(1, 1, 4, 2, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    tensors[place] = view
    plain = [tensor.clone() for tensor in tensors]
    assert torch.equal(ops.kernelized_attention(*tensors), ops.kernelized_attention(*plain))
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    gradients = [torch.autograd.grad(ops.kernelized_attention(q, q, q), q, d)[0] for d in (view, view.clone())]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("offset", [-3, 2])
def test_offsets_may_be_integers_of_numpy_or_torch(offset: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 1, 2, 20, 8)).astype("f4")
    bias = random.standard_normal((2, 39)).astype("f4")
    expected = ops.toeplitz_attention(q, k, v, bias, is_causal=True, offset=offset)
    for other in (np.int64(offset), torch.tensor(offset)):
        np.testing.assert_array_equal(ops.toeplitz_attention(q, k, v, bias, is_causal=True, offset=other), expected)


def test_a_step_takes_no_axis_of_tokens() -> None:
    encoder = TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    decoder = TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 5, 16)
    with pytest.raises(ValueError, match=r"token: expected shape \(batch, d_model\), got shape \(3, 1, 16\)"):
        encoder.step(x[:, :1])
    with pytest.raises(ValueError, match=r"token: expected shape \(batch, d_model\)"):
        decoder.step(x[:, :1], x)
    assert encoder.step(x[:, 0])[0].shape == (3, 16)


def test_a_mask_beside_an_offset_is_refused() -> None:
    attention = MultiheadAttention(16, 2, batch_first=True)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 7, 16)
    mask = torch.tensor([[False, True, True, True, True, True, True]])
    attention(q, k, k, attn_mask=mask)
    with pytest.raises(ValueError, match="attn_mask: expected None beside an offset"):
        attention(q, k, k, attn_mask=mask, offset=6)


def test_words_are_those_of_the_command() -> None:
    tokenizer = Tokenizer("words", ("red\x1fapple", "7"))
    assert tokenizer.encode("red\x1fapple\u3000 7\n") == [4, 5]
