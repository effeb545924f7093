"""Cross-entropy some rows at a time, against the logits of all rows in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.limits import assert_at_most, assert_close
from tnlm.kernels import cross_entropy
from tnlm.kernels.cross_entropy import unembedded_cross_entropy

CAPS = pytest.mark.parametrize("cap", [None, 2.0, 30.0])


def formula(x, w_u, targets, cap):
    z = x @ w_u.mT
    z = z if cap is None else cap * torch.tanh(z / cap)
    return F.cross_entropy(z.flatten(0, -2), targets.flatten())


def operands(*, rows=(2, 5), d_model=7, d_vocab=11, dtype=torch.float64):
    x, w_u = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((*rows, d_model), (d_vocab, d_model)))
    return x.requires_grad_(), w_u.requires_grad_(), torch.randint(0, d_vocab, rows)


@pytest.fixture(params=[3, 4, 10, 128], ids=lambda size: f"{size} rows at a time")
def _parts(request, monkeypatch):
    """10 rows in parts that do and do not divide them."""
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", request.param)
    monkeypatch.setattr(cross_entropy, "LOGITS", {"cpu": 1})


@CAPS
@pytest.mark.usefixtures("_parts")
def test_loss_and_gradients(cap):
    x, w_u, targets = operands()
    loss, want = (f(x, w_u, targets, cap) for f in (unembedded_cross_entropy, formula))
    assert_close(loss, want)
    grads, expected = (torch.autograd.grad(3 * value, (x, w_u)) for value in (loss, want))
    assert_close(grads, expected)


@CAPS
def test_second_derivatives(cap):
    x, w_u, targets = operands(rows=(1, 3), d_model=2, d_vocab=3)
    assert torch.autograd.gradcheck(lambda x, w: unembedded_cross_entropy(x, w, targets, cap), (x, w_u))
    assert torch.autograd.gradgradcheck(lambda x, w: unembedded_cross_entropy(x, w, targets, cap), (x, w_u))


@CAPS
def test_float32_rounds_no_worse_than_the_formula(cap):
    x, w_u, targets = operands(rows=(3, 50), d_model=40, d_vocab=101, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (x, w_u)]
    exact = torch.autograd.grad(formula(*wide, targets, cap), wide)
    ours, theirs = (torch.autograd.grad(f(x, w_u, targets, cap), (x, w_u)) for f in (unembedded_cross_entropy, formula))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_at_most(
            (a.double() - c).norm(), 2 * (b.double() - c).norm(), scale=c.norm(), roundings=16, dtype=x.dtype
        )


@pytest.mark.parametrize("cap", [None, 500.0])
def test_large_logits_do_not_overflow(cap):
    x, w_u, targets = operands(dtype=torch.float32)
    with torch.no_grad():
        x.mul_(400)
    loss = unembedded_cross_entropy(x, w_u, targets, cap)
    want = formula(x, w_u, targets, cap)
    assert_close(loss, want)
    assert_close(
        torch.autograd.grad(loss, x)[0], torch.autograd.grad(want, x)[0], scale=float(want.detach())
    )  # exp of rounded logits


def test_a_second_backward_is_not_scaled_twice():
    x, w_u, targets = operands()
    loss = 5 * unembedded_cross_entropy(x, w_u, targets, 30.0)
    first = torch.autograd.grad(loss, (x, w_u), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, w_u))))


@pytest.mark.parametrize("frozen", ["x", "w_u", "both"])
def test_what_takes_no_gradient_gets_none(frozen):
    x, w_u, targets = operands()
    want = torch.autograd.grad(formula(x, w_u, targets, 30.0), (x, w_u))
    x.requires_grad_(frozen == "w_u")
    w_u.requires_grad_(frozen == "x")
    loss = unembedded_cross_entropy(x, w_u, targets, 30.0)
    assert_close(loss, formula(x, w_u, targets, 30.0))
    assert loss.requires_grad == (frozen != "both")
    for t, g in zip((x, w_u), want, strict=True):
        if t.requires_grad:
            assert_close(torch.autograd.grad(loss, t, create_graph=True)[0], g)


def test_targets_that_are_views_and_nan():
    x, w_u, _ = operands()
    targets = torch.randint(0, 11, (2, 6))[:, 1:]
    assert_close(unembedded_cross_entropy(x, w_u, targets, 2.0), formula(x, w_u, targets, 2.0))
    with torch.no_grad():
        x[1, 2, 3] = float("nan")
    assert unembedded_cross_entropy(x, w_u, targets, 2.0).isnan()


def test_a_target_beyond_the_vocabulary_is_an_error():
    x, w_u, targets = operands()
    targets[1, 2] = 11
    with pytest.raises(RuntimeError, match="out of bounds"):
        unembedded_cross_entropy(x, w_u, targets, 2.0)


def test_operands_that_depend_on_each_other_are_not_counted_twice():
    w_u, targets = operands()[1], torch.randint(0, 11, (4,))
    found = []
    for loss in (unembedded_cross_entropy, formula):
        (first,) = torch.autograd.grad(loss(w_u[:4].sin(), w_u, targets, 2.0), w_u, create_graph=True)
        found.append((first, torch.autograd.grad(first.square().sum(), w_u)[0]))
    assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing(use_reentrant):
    x, w_u, targets = operands()
    loss = checkpoint(unembedded_cross_entropy, x, w_u, targets, 2.0, use_reentrant=use_reentrant)
    want = torch.autograd.grad(formula(x, w_u, targets, 2.0), (x, w_u))
    loss.backward()
    assert_close((x.grad, w_u.grad), want)


def test_gradients_are_formed_only_where_they_are_wanted(monkeypatch):
    formed = []
    addmm_ = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, *a: formed.append(self.shape) or addmm_(self, *a))
    x, w_u, targets = operands()
    unembedded_cross_entropy(x, w_u.detach(), targets, 2.0)
    with torch.no_grad():
        unembedded_cross_entropy(x, w_u, targets, 2.0)
    assert not formed
    unembedded_cross_entropy(x, w_u, targets, 2.0)
    assert formed == [(11, 7)]
