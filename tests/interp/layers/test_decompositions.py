"""HOSVD, CP, truncation and gauge: reconstruction, bounds, and structure that was planted."""

import itertools

import pytest
import torch

from tests.interp.builders import SHAPES, dense, gauged, make_layer, noise, on_sphere, shifted, sphere_points
from tests.interp.test_extraction import make as make_model
from tests.limits import assert_at_most, assert_close, assert_within, limit
from tnlm.interp import BilinearTensor, cp, eig, extract, fix_gauge, hosvd, remove, truncate, with_mlp
from tnlm.interp.layers.rounding import form_size


@pytest.mark.parametrize("shape", SHAPES)
def test_hosvd_at_full_rank_is_the_layer(shape):
    b = make_layer(*shape)
    tucker = hosvd(b, b.d_out, b.d_in)
    assert_close(dense(tucker.reconstruct()), dense(b))
    for basis in (tucker.out, tucker.inp):
        assert_close(basis.T @ basis, torch.eye(basis.shape[1]).double())
    unfolding = torch.linalg.svdvals(dense(b).flatten(1)).square()
    assert_close(tucker.spectrum_out[: len(unfolding)], unfolding)
    assert 0 < float(tucker.error_bound) < 1e-12 * size_of(b)
    x = noise(11, b.d_in, seed=1)
    assert_close(tucker.reconstruct()(x), b(x), scale=float(form_size(b, torch.eye(b.d_out).double()).max()) * 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [(31, 37), (31, 30), (3, 37), (3, 5), (1, 1)])
def test_the_error_bound_holds_in_the_dtype_it_is_computed_in(dtype, ranks):
    """Planted low rank far from the origin of float32: what rounding adds is inside the bound, and not far outside."""
    core, out, inp = make_layer(3, 5, 97), noise(31, 3, seed=1), noise(37, 5, seed=2)
    b = core.fold(inp.mT.contiguous()).project(out)
    cancelling = make_layer(31, 37, 11, seed=3) * 100
    b = (b + cancelling - cancelling).to(dtype)
    tucker = hosvd(b, *ranks)
    wide, rebuilt = (layer.to(torch.float64) for layer in (b, tucker.reconstruct()))
    error, u = float((dense(wide) - dense(rebuilt)).norm()), torch.finfo(dtype).eps / 2
    assert error <= float(tucker.error_bound)
    if ranks[0] >= 3 and ranks[1] >= 5:  # nothing but rounding: of the result and, in float64, of squares
        assert float(tucker.error_bound) <= (100 * u + 1e-5) * size_of(wide)


def size_of(b):
    """``sum_h |d_h| |l_h| |r_h|``, the scale of all rounding."""
    return float((b.w_d.norm(dim=0) * b.w_l.norm(dim=1) * b.w_r.norm(dim=1)).sum())


def test_a_model_edited_by_a_full_hosvd_keeps_its_biases():
    model = make_model()
    layers = {n: hosvd(layer, 30, 30).reconstruct() for n, layer in enumerate(extract(model).mlp)}
    tokens = torch.randint(0, 11, (2, 7))
    want = model.pre_softcap(tokens).detach()
    assert float(model.blocks[0].mlp.bias.detach().abs().max()) > 0.1
    # the trace is in the bias, so inputs shorter than the sphere by norm_eps see a difference of that order
    assert_within((with_mlp(model, layers).pre_softcap(tokens).detach() - want) / want.abs().max(), 1e-5)


def test_truncated_hosvd_obeys_its_bound():
    b = make_layer(4, 6, 9)
    for rank_out, rank_in in [(2, 6), (4, 3), (2, 3), (1, 1)]:
        tucker = hosvd(b, rank_out, rank_in)
        assert tucker.core.shape == (rank_out, rank_in, rank_in)
        error = float((dense(b) - dense(tucker.reconstruct())).norm())
        assert error > 0
        assert_at_most(error, float(tucker.error_bound))  # equal when one projection alone discards something
    # one projection alone discards exactly the discarded eigenvalues
    error = float((dense(b) - dense(hosvd(b, 2, 6).reconstruct())).norm())
    # of squares; the bound itself allows for the worst case of some hundred roundings
    allowance = limit(torch.float64, 4096) * size_of(b) ** 2 / error
    assert_within(hosvd(b, 2, 6).error_bound - error, allowance)


def test_leading_columns_are_the_decomposition_of_lower_rank():
    b, x = on_sphere(make_layer(4, 6, 9)), noise(11, 6, seed=2)
    whole = hosvd(b, 4, 6)
    for ranks in [(2, 6), (4, 3), (1, 1)]:
        assert_close(whole.reconstruct(*ranks)(x), hosvd(b, *ranks).reconstruct()(x), scale=size_of(b) * 60)


def test_on_the_sphere_decompositions_are_of_the_traceless_part():
    b, u, x = on_sphere(make_layer(4, 6, 9)), noise(4, seed=1), sphere_points(11, 6, seed=2)
    other = shifted(gauged(b), noise(4, seed=3))
    traceless = dense(b) - dense(b).diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(6).double()
    scale = 60 * size_of(other)
    for k in range(7):
        cut = truncate(other, u, k)
        assert cut.domain == "sphere"
        assert_close(truncate(b, u, k)(x), cut(x), scale=scale)
        values, vectors = torch.linalg.eigh(torch.einsum("o,oij->ij", u, traceless))
        kept = values.abs().argsort(descending=True)[:k]
        constant = torch.einsum("oii,o->", dense(b), u) + u @ b.bias
        assert_close(cut(x) @ u, (x @ vectors[:, kept]).square() @ values[kept] + constant, scale=scale)
    one, two = hosvd(b, 3, 4), hosvd(other, 3, 4)
    assert_close(one.spectrum_out, torch.linalg.svdvals(traceless.flatten(1)).square(), scale=scale**2)
    assert_close(two.spectrum_in, one.spectrum_in, scale=scale**2)
    assert_close(two.reconstruct()(x), one.reconstruct()(x), scale=scale, roundings=2**20)  # of near vectors
    assert_close(hosvd(other, 4, 6).reconstruct()(x), b(x), scale=scale)


def test_hosvd_recovers_planted_subspaces():
    core = make_layer(2, 3, 5)
    out, inp = (torch.linalg.qr(noise(*s, seed=4))[0] for s in ((7, 2), (11, 3)))
    b = core.fold(inp.T.contiguous()).project(out)
    tucker = hosvd(b, 2, 3)
    assert_close(tucker.out @ tucker.out.T, out @ out.T)
    assert_close(tucker.inp @ tucker.inp.T, inp @ inp.T)
    assert_close(dense(tucker.reconstruct()), dense(b))
    assert_close(tucker.spectrum_in[3:], torch.zeros(8).double(), scale=float(tucker.spectrum_in[0]))


def test_cp_recovers_a_planted_layer_under_any_gauge():
    b = make_layer(12, 13, 9, seed=2)
    fit = cp(gauged(b), 9, seed=1)
    assert_within(dense(fit) - dense(b), 1e-6)  # the sweeps stop once they gain less
    want = fix_gauge(b)
    for got, expected in ((fit.w_l, want.w_l), (fit.w_r, want.w_r), (fit.w_d, want.w_d)):
        assert_within(got - expected, 1e-5)
    assert_close(fit.bias, b.bias)


def test_cp_error_is_the_explicit_error_and_does_not_rise():
    b = make_layer(4, 6, 9)
    history = {}
    fit = cp(b, 4, sweeps=40, restarts=2, callback=lambda r, s, e: history.setdefault(r, []).append(e))
    for errors in history.values():
        assert len(errors) > 5
        assert all(later <= earlier + 1e-7 for earlier, later in itertools.pairwise(errors))
    explicit = float((dense(b) - dense(fit)).norm() / b.norm())
    assert_within(
        explicit - min(errors[-1] for errors in history.values()), 1e-7
    )  # the root of a difference near 1e-14
    assert float((b - fit).norm() / b.norm()) == pytest.approx(explicit)
    assert fit.d_hidden == 4


def test_cp_does_not_depend_on_the_gauge_of_its_target():
    b = make_layer(3, 5, 6)
    one, other = (cp(layer, 3, sweeps=60, restarts=1) for layer in (b, gauged(b)))
    assert_within(dense(one) - dense(other), 1e-6)


def test_cp_of_nothing_is_nothing():
    assert not cp(make_layer() * 0, 2).w_d.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_fix_gauge_is_the_same_function_and_the_same_numbers_for_every_gauge(shape):
    b = make_layer(*shape)
    one, other = fix_gauge(b), fix_gauge(gauged(b, seed=3))
    assert_close(dense(one), dense(b))
    for w, v in ((one.w_l, other.w_l), (one.w_r, other.w_r), (one.w_d, other.w_d)):
        assert_close(w, v)
    assert_close(one.w_l.norm(dim=1), torch.ones(b.d_hidden).double())


def test_fix_gauge_puts_dead_units_last():
    b = make_layer()
    w_l = b.w_l.clone()
    w_l[2] = 0
    dead = BilinearTensor(w_l, b.w_r, b.w_d)
    fixed = fix_gauge(dead)
    assert_close(dense(fixed), dense(dead))
    assert not fixed.w_d[:, -1].any()


@pytest.mark.parametrize("k", [0, 2, 5])
def test_truncate_leaves_the_leading_components_of_one_direction(k):
    b, u, x = make_layer(), noise(3, seed=1), noise(11, 5, seed=2)
    pairs = eig(b, u, k or None)
    cut = truncate(b, u, k)
    kept = ((x @ pairs.vectors).square() * pairs.values)[:, :k].sum(1)
    size = form_size(b, u[None]) * x.square().sum(1)  # what cancels at k = 0
    assert_close(cut(x) @ u, kept + b.bias @ u, scale=size)
    across = torch.linalg.qr(torch.stack([u, noise(3, seed=3)], dim=1))[0][:, 1]
    assert_close(cut(x) @ across, b(x) @ across)
    assert cut.d_hidden == 7 + 5 - k


def test_remove_lowers_the_output_by_the_predicted_amount():
    b, u, x = make_layer(), noise(3, seed=1), noise(11, 5, seed=2)
    pairs = eig(b, u, 1)
    edited = remove(b, u, pairs.values, pairs.vectors)
    assert_close((b(x) - edited(x)) @ u, pairs.values * (x @ pairs.vectors[:, 0]).square())


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda b: hosvd(b, 4, 2), "rank_out must be an integer between 1 and 3, got 4"),
        (lambda b: hosvd(b, 2, 0), "rank_in must be an integer between 1 and 5, got 0"),
        (lambda b: cp(b, 0), "rank must be an integer at least 1, got 0"),
        (lambda b: cp(b, 2, sweeps=0), "sweeps must be an integer at least 1"),
        (lambda b: cp(b, 2, restarts=0), "restarts must be an integer at least 1"),
        (lambda b: cp(b, 2, ridge=-1.0), "ridge must be a finite number >= 0, got -1.0"),
        (lambda b: cp(b, 2, ridge=float("nan")), "ridge must be a finite number >= 0, got nan"),
        (lambda b: cp(b, 2, tol=float("nan")), "tol must be a finite number >= 0, got nan"),
        (lambda b: truncate(b, noise(5), 2), r"u must have shape \(3\)"),
        (lambda b: truncate(b, noise(3), 6), "k must be an integer between 0 and 5, got 6"),
        (lambda b: remove(b, noise(3), noise(2), noise(5, 3)), r"vectors must have shape \(5, 2\), got \(5, 3\)"),
        (lambda b: remove(b, 0 * noise(3), noise(2), noise(5, 2)), "u must not be zero"),
        (lambda b: remove(b, noise(3), noise(2) * torch.nan, noise(5, 2)), "values must be finite"),
        (lambda b: hosvd(None, 1, 1), r"must be a BilinearTensor, got NoneType; tnlm\.interp\.extract\(model\)\.mlp"),
        (lambda b: truncate(b.w_l, noise(3), 2), "must be a BilinearTensor, got Tensor"),
        (lambda b: fix_gauge(b.w_l), "must be a BilinearTensor, got Tensor"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    b = make_layer()
    with pytest.raises(ValueError, match=text):
        call(b)
