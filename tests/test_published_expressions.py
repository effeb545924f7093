"""Norm, softcap, loss, rotation and value mixing against the published expressions, in float32 at the released sizes.

The expressions are those of ``train_gpt2.py`` of loganriggs/modded-nanogpt at d5ce2de, one line each. Where ours is
another order of the same numbers, the difference is bounded by the roundings of both. Rotary tables are compared bit
for bit in ``test_rotary.py``; Newton-Schulz and the schedule in ``tests/training/optim``, the order of the data in
``tests/training/data/test_stream.py``.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.limits import assert_close
from tests.tiny_models import build, tiny
from tnlm.kernels.cross_entropy import unembedded_cross_entropy
from tnlm.norm import RMSNorm
from tnlm.rotary import rotary_tables, rotate
from tnlm.text.evaluate import token_losses

D_MODEL, D_HEAD, D_VOCAB, SEQ = 1152, 128, 50304, 1024


@pytest.mark.parametrize("size", [1e-4, 1.0, 3e3])
@pytest.mark.parametrize("width", [D_MODEL, D_HEAD])
def test_norm(width, size):
    """``F.rms_norm(x, (x.size(-1),))``: torch adds float32's eps to the mean square, as ours does explicitly.

    Each sums ``width`` squares, in whatever order: a relative error of ``width U`` of the mean, half of it in the
    root, and 4 roundings after it, for each of the two.
    """
    x = size * torch.randn(SEQ, width)
    expected = F.rms_norm(x, (width,))
    assert_close(RMSNorm()(x), expected, roundings=2 * (width / 2 + 4), scale=expected.abs())
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1.1920928955078125e-07).sqrt()
    assert_close(RMSNorm()(x).double(), exact, roundings=width / 2 + 4, scale=exact.abs(), dtype=torch.float32)


def test_softcap_has_the_same_bits():
    """``30 * torch.tanh(logits / 30)``."""
    logits = 40 * torch.randn(2, 7, D_VOCAB)
    assert torch.equal(build(tiny(), torch.float32).softcap(logits), 30 * torch.tanh(logits / 30))


def test_loss():
    """``F.cross_entropy(logits.view(-1, V), target.view(-1))``, evaluated so, and for training without the logits.

    The training loss divides by 30 by multiplying with its reciprocal, one rounding more of each logit, and sums the
    vocabulary in another order. An error ``e`` in every logit moves a loss by at most ``2 e``; a logit is a sum of
    ``D_MODEL`` products, a sum of exponentials has ``D_VOCAB`` terms, in rows that torch adds pairwise in blocks.
    """
    x, w_u = F.rms_norm(torch.randn(5, D_MODEL), (D_MODEL,)), 0.2 * torch.randn(D_VOCAB, D_MODEL)
    targets = torch.randint(50257, (5,))
    logits = 30 * torch.tanh((x @ w_u.mT) / 30)
    published = F.cross_entropy(logits, targets)
    # the five losses may be added in another order
    assert_close(token_losses(logits[None], targets[None]).mean(), published, roundings=5)
    ours = unembedded_cross_entropy(x, w_u, targets, 30.0)
    z = x.double() @ w_u.double().mT
    exact = F.cross_entropy(30 * torch.tanh(z / 30), targets)
    # the terms of a logit are of either sign: partial sums grow as the root of the sum of squares
    terms = float((x.double().square() @ w_u.double().square().mT).sqrt().max()) * math.sqrt(D_MODEL)
    size = 2 * terms + 3 * 30 + math.sqrt(D_VOCAB)
    for found in (ours, published):
        assert_close(found.double(), exact, roundings=1, scale=size, dtype=torch.float32)


@pytest.mark.parametrize("released", [True, False])
def test_rotation(released):
    """``y1 = x1 * cos + x2 * sin``, ``y2 = x1 * (-sin) + x2 * cos``: 2 products and a sum, in either order."""
    x = torch.randn(1, SEQ, 2, D_HEAD)
    cos, sin = rotary_tables(SEQ, D_HEAD, dtype=torch.bfloat16 if released else torch.float32)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    a, b = x.chunk(2, dim=-1)
    expected = torch.cat([a * c + b * s, a * (-s) + b * c], 3).type_as(x)
    scale = torch.cat([(a * c).abs() + (b * s).abs(), (a * s).abs() + (b * c).abs()], 3)
    assert_close(rotate(x, cos, sin), expected, roundings=4, scale=scale)


def test_value_mixing():
    """``v = (1 - lamb) * v + lamb * v1``; ours is ``lerp``, ``v + lamb (v1 - v)``: at most 3 roundings each."""
    model = build(tiny(d_model=1152, n_head=9, d_qk=128, n_ctx=64, d_hidden=8, n_layer=1), torch.float32)
    attn, x, first = model.blocks[0].attn, torch.randn(1, 64, D_MODEL), torch.randn(1, 64, 9, D_HEAD)
    seen = []
    attn.hook_v.register_forward_hook(lambda _, __, v: seen.append(v))
    attn.hook_v_mixed.register_forward_hook(lambda _, __, v: seen.append(v))
    with torch.no_grad():
        attn(x, first, rotary_tables(64, D_HEAD))
    v, mixed = seen
    lamb = attn.lamb.detach()
    expected = (1 - lamb) * v + lamb * first
    scale = (1 + 2 * lamb.abs()) * (v.abs() + first.abs())
    assert_close(mixed, expected, roundings=6, scale=scale)
