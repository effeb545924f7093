"""Eigenpairs, residuals, the certificate, and the four effective ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.interp.builders import SHAPES, dense, gauged, make_layer, noise, on_sphere, shifted
from tests.limits import assert_close, assert_within
from tnlm.interp import (
    BilinearTensor,
    LowRank,
    bounds,
    cp,
    effective_rank,
    eig,
    hosvd,
    inertia,
    top_tokens,
    vocab_bounds,
    vocab_eigs,
    vocab_moments,
)
from tnlm.interp.layers.eigensolver import _orthogonalise, lanczos
from tnlm.interp.layers.rounding import form_size
from tnlm.interp.layers.spectra import _beyond, iteration_pays, krylov, squared_norms


def planted(values, d, seed=0):
    """One output whose form has the given non-zero eigenvalues; returns it and its eigenvectors as columns."""
    v = torch.linalg.qr(noise(d, len(values), seed=seed))[0]
    return BilinearTensor(v.T, v.T, torch.tensor([values], dtype=torch.float64)), v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["full", "krylov"])
def test_full_decomposition_rebuilds_the_output(shape, method):
    b = make_layer(*shape)
    u, x = noise(4, b.d_out, seed=1), noise(11, b.d_in, seed=2)
    pairs = eig(b, u, method=method)
    rebuilt = torch.einsum("nk,bnk->bn", pairs.values, torch.einsum("nik,bi->bnk", pairs.vectors, x).square())
    assert_close(rebuilt, (b(x) - b.bias) @ u.T)
    assert torch.equal(b(-x), b(x))
    assert_close(pairs.vectors.mT @ pairs.vectors, torch.eye(b.d_in).double().expand(4, -1, -1))
    assert_close(pairs.values.sum(-1), u @ b.traces())
    assert_close(float(pairs.residuals.max()), 0.0, scale=float(pairs.values.abs().max()))
    assert torch.equal(pairs.unfound, torch.zeros(4, dtype=torch.float64))
    magnitudes = pairs.values.abs()
    assert bool((magnitudes[:, :-1] >= magnitudes[:, 1:] - 1e-12).all())


def test_a_form_given_unsymmetrically():
    # [[1, 5], [1, 2]]: reading one triangle would give 0.381966, 2.618034
    form = torch.tensor([[1.0, 5.0], [1.0, 2.0]], dtype=torch.float64)
    b = BilinearTensor(torch.eye(2, dtype=torch.float64), form, torch.ones(1, 2, dtype=torch.float64))
    values = eig(b, torch.ones(1, dtype=torch.float64)).values
    assert_close(values, torch.tensor([4.541381265149109, -1.5413812651491097], dtype=torch.float64))


def test_order_and_the_bound_on_what_is_not_listed():
    b, v = planted([3.0, -7.0, 2.0, -1.0], 6)
    u = torch.ones(1, dtype=torch.float64)
    for which, first, rest in [("abs", [-7.0, 3.0], 2.0), ("max", [3.0, 2.0], 7.0), ("min", [-7.0, -1.0], 3.0)]:
        pairs = eig(b, u, 2, which)
        assert_close(pairs.values, torch.tensor(first, dtype=torch.float64))
        assert_close(pairs.unfound, torch.tensor(rest, dtype=torch.float64), scale=form_size(b, u[None])[0])
        at = [3.0, -7.0, 2.0, -1.0].index(first[0])
        assert_close((pairs.vectors[:, 0] @ v[:, at]).abs(), torch.tensor(1.0).double())


def test_spectrum_sees_only_the_function():
    b = make_layer()
    u = noise(2, 3, seed=1)
    one, other = eig(b, u), eig(gauged(b), u)
    assert_close(one.values, other.values)
    assert_within(one.vectors - other.vectors, 1e-8)  # signs are fixed: largest entry positive
    peaks = one.vectors.gather(1, one.vectors.abs().argmax(1, keepdim=True))
    assert bool((peaks > 0).all())


@pytest.mark.parametrize("method", ["full", "krylov"])
def test_degenerate_eigenspace_by_its_projector(method):
    b, v = planted([2.0, 2.0, -1.0], 5)
    pairs = eig(b, torch.ones(1, 1, dtype=torch.float64), 3, method=method)
    assert_close(pairs.values[0], torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64))
    space = pairs.vectors[0, :, :2]
    assert_close(space @ space.T, v[:, :2] @ v[:, :2].T)


def test_krylov_finds_planted_components_and_certifies_them():
    # 64 weak units of noise under 3 strong ones, in float32 at a width where auto takes the iteration
    d, strong = 523, [9.0, -8.0, 7.0]
    b, v = planted(strong, d)
    weak = make_layer(1, d, 64, bias=False, seed=3) * (0.5 / d)
    b = (b + weak).to(torch.float32)
    u = torch.linspace(0.5, 2, 16)[:, None]
    pairs = eig(b, u, 3)
    assert torch.equal(pairs.vectors, eig(b, u, 3, method="krylov").vectors)
    exact = eig(b.to(torch.float64), u.double(), 3, method="full")
    assert_close(pairs.values.double(), exact.values, dtype=torch.float32)
    assert float((pairs.residuals / pairs.values[:, :1].abs()).max()) <= 1e-5
    for n in range(3):
        assert float((pairs.vectors[0, :, n].double() @ v[:, n]).abs()) > 0.99
    assert bool((pairs.unfound.double() >= exact.unfound).all())
    assert bool((pairs.unfound < pairs.values.abs()[:, -1]).all())


def test_a_capped_iteration_returns_honest_residuals():
    b = make_layer(1, 61, 67, bias=False)
    u = torch.ones(1, 1, dtype=torch.float64)
    pairs = eig(b, u, 4, method="krylov", max_steps=9)
    q = b.interaction(u)[0]
    true = (q @ pairs.vectors[0] - pairs.vectors[0] * pairs.values[0]).norm(dim=0)
    assert_close(pairs.residuals[0], true, scale=float(pairs.values.abs().max()))
    assert float(true.max()) > 1e-3
    # nothing converged, so nothing is excluded: the bound is the norm of the whole form
    assert float(pairs.unfound[0]) >= float(torch.linalg.eigvalsh(q).abs().max())


def test_lanczos_results_do_not_depend_on_companions():
    b = make_layer(4, 31, 37, bias=False)
    u = noise(6, 4, seed=1)
    together, alone = eig(b, u, 2, method="krylov"), eig(b, u[3:4], 2, method="krylov")
    assert_close(together.values[3:4], alone.values)
    early = [eig(b, rows, 2, method="krylov", max_steps=5).values[-1] for rows in (u[:4], u[3:4])]
    assert_close(early[0], early[1])
    assert_within(together.vectors[3:4] - alone.vectors, 1e-7)


def test_residuals_are_those_of_the_pairs_that_are_returned():
    b, u = make_layer(1, 61, 67, bias=False), torch.ones(1, 1, dtype=torch.float64)
    estimated = krylov(b, u, squared_norms(b, u), 4, tol=None, max_steps=9)
    recomputed = eig(b, u, 4, method="krylov", max_steps=9)
    assert torch.equal(estimated.values, recomputed.values)
    assert_close(estimated.residuals, recomputed.residuals, scale=float(recomputed.values.abs().max()))
    # rounding shows: no residual of float32 pairs is zero, nor is an estimate below the true one
    small, u = b.to(torch.float32), u.float()
    assert float(eig(small, u).residuals.min()) > 0
    exhausted = krylov(small, u, squared_norms(small, u), 4, tol=1e-9, max_steps=61)
    assert bool((exhausted.residuals >= eig(small, u, 4, method="krylov", tol=1e-9).residuals).all())


def test_the_bound_on_what_is_not_listed_is_that_of_kahan():
    b, _ = planted([5.0, -1.0], 31)
    b = b + make_layer(1, 31, 37, bias=False, seed=3) * 2e-3
    u = torch.ones(1, 1, dtype=torch.float64)
    pairs = eig(b, u, 3, "max", "krylov", tol=10.0, max_steps=3)
    gap = pairs.residuals.square().sum().sqrt()
    found = (pairs.values.abs() - gap).clamp_min(0).square().sum()
    assert float(gap) > 1e-3
    # of squares; the bound itself allows for the worst case of some hundred roundings
    scale = form_size(b, u)[0].square() / pairs.unfound[0]
    assert_close(pairs.unfound[0], (b.norm() ** 2 - found).sqrt(), roundings=2**16, scale=scale)
    # pairs that carry little of the form prove nothing but its norm
    scale = form_size(b, u)[0].square() / b.norm()
    weak = eig(b, u, 1, "min", "krylov", tol=10.0, max_steps=3).unfound[0]
    assert_close(weak, b.norm(), roundings=2**16, scale=scale)
    # of all eigenvalues nothing is left
    assert float(eig(b, u, 31, method="krylov").unfound) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["full", "krylov"])
@pytest.mark.parametrize("which", ["abs", "max", "min"])
@pytest.mark.parametrize("domain", ["space", "sphere"])
def test_unfound_is_certified_in_the_dtype_it_is_computed_in(dtype, method, which, domain):
    """Forms whose rest is at the edge of the dtype, by cancellation, by a large trace, and by equal eigenvalues."""
    cancelling = make_layer(1, 31, 7, bias=False, seed=4) * 30
    layers = [
        planted([5.0, -1.0, 1.0, 1e-7], 31)[0],
        planted([1.0, 1e-5], 31)[0] + cancelling - cancelling,
        planted([3.0, 3.0, 3.0, 3.0, -3.0], 31)[0],
        planted([1.0] * 30 + [1.0 + 1e-6], 31)[0],
        shifted(planted([2.0, -1.0, 1e-6], 31)[0], torch.tensor([100.0]).double()),
    ]
    for b in layers:
        b = replace(b, domain=domain).to(dtype)
        form = dense(b.to(torch.float64))[0]
        if domain == "sphere":
            form = form - form.diagonal().mean() * torch.eye(31).double()
        values = torch.linalg.eigvalsh(form)
        values = values[{"abs": values.abs(), "max": values, "min": -values}[which].argsort(descending=True)]
        for k in (1, 2, 3):
            unfound = float(eig(b, torch.ones(1, dtype=dtype)[None], k, which, method).unfound)
            # the dense float64 reference is itself off by its roundings
            slack = 100 * torch.finfo(torch.float64).eps * float(form_size(b, torch.ones(1, 1)))
            assert unfound >= float(values[k:].abs().max()) - slack


def test_a_wrong_pair_is_not_counted_as_found():
    """Two copies of one vector are one eigenvalue: the second is not taken from what is left."""
    b, v = planted([5.0, -4.0], 31)
    u, norms2 = torch.ones(1, 1).double(), torch.tensor([41.0]).double()
    pairs = torch.tensor([[5.0, 5.0]]).double(), torch.stack([v[:, 0], v[:, 0]], dim=1)[None]
    assert float(_beyond(b, u, norms2, *pairs)) > 4
    right = torch.tensor([[5.0, -4.0]]).double(), v[None]
    assert float(_beyond(b, u, norms2, *right)) < 1e-5


def test_orthogonalised_vectors_are_orthogonal_to_working_precision():
    known = torch.linalg.qr(noise(11, 6))[0].mT[None]
    w = noise(1, 6, seed=1) @ known[0] + 1e-9 * noise(1, 11, seed=2)
    w = _orthogonalise(w, known)
    assert_close(float((known[0] @ w[0]).abs().max()), 0.0, scale=float(w.norm()))


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_an_exhausted_krylov_space_goes_on(scale):
    # a multiple of the identity: every vector spans a space of its own
    b = BilinearTensor(torch.eye(13).double(), torch.eye(13).double(), torch.full((1, 13), scale).double())
    for method in ("full", "krylov"):
        pairs = eig(b, torch.ones(2, 1, dtype=torch.float64), 5, method=method)
        assert_close(pairs.values, torch.full((2, 5), scale).double())
        assert_close(pairs.vectors.mT @ pairs.vectors, torch.eye(5).double().expand(2, -1, -1))
        assert_close(float(pairs.residuals.max()), 0.0, scale=scale or 1.0)
    assert not eig(b * 0, torch.ones(2, 1).double(), 5, method="krylov").unfound.any()
    assert float(effective_rank(b * 0, torch.ones(1).double(), "entropy")) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_squared_norms_from_either_gram(n):
    """An upper bound: above the exact value by no more than its allowance for rounding."""
    b, u = make_layer(3, 5, 7), noise(n, 3, seed=1)
    exact, found = b.interaction(u).square().sum((1, 2)), squared_norms(b, u)
    assert bool((found >= exact).all())
    assert_close(found, exact, scale=form_size(b, u).square())


def test_seeds_tolerance_and_the_method_chosen():
    b, u = make_layer(5, 61, 67, bias=False), noise(5, 5, seed=1)
    capped = [eig(b, u, 2, method="krylov", max_steps=9, seed=seed).values for seed in (0, 0, 1)]
    assert torch.equal(capped[0], capped[1])
    assert not torch.equal(capped[0], capped[2])
    for scale in (1, 1e-6):
        pairs = eig(b * scale, u, 2, method="krylov")
        assert float((pairs.residuals / pairs.values[:, :1].abs()).max()) <= 1e-10
    for one, other in zip(eig(b, u, 2), eig(b, u, 2, method="full"), strict=True):
        assert torch.equal(one, other)  # narrow: dense


def test_the_method_is_chosen_by_the_measured_crossover():
    for d_in, n, k, pays in [(512, 99, 1, False), (513, 16, 16, True), (513, 15, 1, False), (513, 16, 17, False)]:
        assert iteration_pays(d_in, n, k) == pays
    b, u = make_layer(1, 521, 3, bias=False, dtype=torch.float32), torch.ones(16, 1)
    tracked = b.w_d.clone().requires_grad_(True)
    eig(replace(b, w_d=tracked), u, 1).values.sum().backward()  # dense, so there is a gradient
    assert bool(tracked.grad.isfinite().all())


def test_effective_ranks():
    b, _ = planted([2.0, -1.0, 1.0], 6)
    u = torch.ones(1, dtype=torch.float64)
    p = torch.tensor([4, 1, 1], dtype=torch.float64) / 6
    expected = {"participation": 16 / 6, "entropy": float((-(p * p.log()).sum()).exp()), "max": 2.0, "stable": 1.5}
    for kind, value in expected.items():
        assert_close(effective_rank(b, u, kind), torch.tensor(value, dtype=torch.float64))
    assert_close(effective_rank(b, 1e-200 * u, "stable"), torch.tensor(1.5, dtype=torch.float64))
    with pytest.raises(TypeError, match="kind"):
        effective_rank(b, u)


def test_values_and_eigenspaces_have_gradients_where_eigenvalues_coincide():
    """``f = w . P w`` with the projector ``P`` on a double eigenvalue, against differences along the weights."""
    b, _ = planted([2.0, 2.0, -1.0], 5)
    w, u = noise(5, seed=3), torch.ones(1, dtype=torch.float64)
    w_d = b.w_d.clone().requires_grad_(True)
    # moving the third value moves neither the space of the first two nor its projector
    pairs = eig(replace(b, w_d=w_d), u, 3)
    space = pairs.vectors[:, :2]
    ((space @ space.mT @ w) @ w + pairs.values[:2].sum()).backward()
    assert_close(w_d.grad, torch.tensor([[1.0, 1.0, 0.0]]).double())
    # turning a vector of the space towards one outside moves the projector: dP = sum of v dv^T + dv v^T
    w_l = b.w_l.clone().requires_grad_(True)
    space = eig(replace(b, w_l=w_l), u, 3).vectors[:, :2]
    ((space @ space.mT @ w) @ w).backward()
    step, moved = 1e-5, []
    direction = noise(3, 5, seed=4)
    for sign in (1, -1):
        vectors = torch.linalg.eigh(dense(replace(b, w_l=b.w_l + sign * step * direction))[0])[1][:, -2:]
        moved.append((vectors @ vectors.mT @ w) @ w)
    # central differences: third derivatives times step**2, and rounding over step
    assert_within((w_l.grad * direction).sum() - (moved[0] - moved[1]) / (2 * step), 1e-8)


def test_a_gradient_that_does_not_exist_is_refused():
    b, _ = planted([2.0, 2.0, -1.0], 5)
    w_l = b.w_l.clone().requires_grad_(True)
    pairs = eig(replace(b, w_l=w_l), torch.ones(1, dtype=torch.float64), 3)
    loss = pairs.vectors[:, 0] @ noise(5, seed=3)
    with pytest.raises(ValueError, match=r'no gradients; use method="full"'):
        eig(replace(b, w_l=w_l), torch.ones(1).double(), 2, method="krylov")
    with pytest.raises(ValueError, match=r"eigenvectors of equal eigenvalues have no gradient.* v @ v\.mT"):
        loss.backward()


def test_gradients_of_distinct_eigenvalues_are_those_of_differences():
    b = make_layer(2, 4, 5, bias=False)

    def eigenpairs(w_l, w_d):
        pairs = eig(replace(b, w_l=w_l, w_d=w_d), torch.eye(2).double())
        return pairs.values, pairs.vectors

    inputs = [w.clone().requires_grad_(True) for w in (b.w_l, b.w_d)]
    assert torch.autograd.gradcheck(eigenpairs, inputs)
    assert torch.autograd.gradgradcheck(eigenpairs, inputs)


@pytest.mark.parametrize("kind", ["participation", "entropy", "max", "stable"])
def test_gradients_of_ranks_are_finite_at_zero_eigenvalues(kind):
    for values in ([2.0, -1.0, 0.0], [0.0, 0.0, 0.0]):
        diagonal = torch.eye(3, dtype=torch.float64)
        w_d = torch.tensor([values], dtype=torch.float64, requires_grad=True)
        effective_rank(BilinearTensor(diagonal, diagonal, w_d), torch.ones(1).double(), kind).backward()
        assert bool(w_d.grad.isfinite().all())


@pytest.mark.parametrize("method", ["full", "krylov"])
def test_spectra_on_the_sphere_are_those_of_the_traceless_form(method):
    b, u, x = on_sphere(make_layer(3, 31, 37)), noise(2, 3, seed=1), noise(11, 31, seed=2)
    q = torch.einsum("no,oij->nij", u, dense(b))
    q = q - q.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(31).double()
    exact = torch.linalg.eigvalsh(q)
    exact = exact.gather(1, exact.abs().argsort(1, descending=True))
    other = shifted(gauged(b), noise(3, seed=5))
    for layer in (b, other):
        pairs = eig(layer, u, 4, method=method)
        assert_close(pairs.values, exact[:, :4], scale=form_size(layer, u).max())
        assert bool((pairs.unfound >= exact[:, 4].abs()).all())
        every = eig(layer, u, method="full")
        squares = torch.einsum("nik,bi->bnk", every.vectors, x).square()
        rebuilt = torch.einsum("nk,bnk->bn", every.values, squares)
        constant = x.square().sum(1)[:, None] * (u @ layer.shift()) + u @ layer.bias
        assert_close(rebuilt + constant, layer(x) @ u.T, scale=100 * form_size(layer, u).max())
    for kind in ("participation", "entropy", "max", "stable"):
        assert_close(effective_rank(b, u, kind), effective_rank(other, u, kind), scale=31.0 * 31)
    # the form as it is stored, on request
    stored = eig(replace(other, domain="space"), u)
    assert_close(stored.values.sum(-1), u @ other.traces())


def test_inertia_counts_products():
    b, _ = planted([3.0, -7.0, 2.0, 1.0], 7)
    u = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    found = inertia(b, u)
    assert [t.tolist() for t in found] == [[3, 1, 0], [1, 3, 0], [3, 3, 0]]
    # on the sphere the identity is free: 4 of 7 values are 0, so the best shift is 0 or lies among the others
    values = [5.0, 5.0, 5.0, 5.0, 7.0, 2.0, 6.0]
    b, _ = planted(values, 7)
    assert [int(t) for t in inertia(b, u[0])] == [7, 0, 7]
    assert [int(t) for t in inertia(on_sphere(b), u[0])] == [2, 1, 2]
    other = shifted(on_sphere(b), torch.tensor([-3.0]).double())
    assert [int(t) for t in inertia(other, u[0])] == [2, 1, 2]
    noisy = b + make_layer(1, 7, 5, bias=False) * 1e-5
    assert int(inertia(on_sphere(noisy), u[0]).products) == 3
    assert int(inertia(on_sphere(noisy), u[0], tol=1e-2).products) == 2
    assert inertia(b, u[:0]).products.shape == (0,)


def test_eig_of_no_direction_is_empty():
    pairs = eig(make_layer(), noise(0, 3), 2)
    assert [tuple(t.shape) for t in pairs] == [(0, 2), (0, 5, 2), (0, 2), (0,)]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda b, complex_layer: eig(b, noise(5)), r"u must have shape \(\.\.\., 3\), got \(5,\)"),
        (lambda b, complex_layer: eig(b, torch.full((3,), torch.nan).double()), "u must be finite"),
        (lambda b, complex_layer: eig(b, noise(3), 6), "k must be an integer between 1 and 5, got 6"),
        (lambda b, complex_layer: eig(b, noise(3), 2.0), "k must be an integer between 1 and 5, got 2.0"),
        (lambda b, complex_layer: eig(b, noise(3), which="largest"), "which must be one of"),
        (lambda b, complex_layer: eig(b, noise(3), method="lobpcg"), "method must be one of"),
        (
            lambda b, complex_layer: eig(b, noise(3), max_bytes=8),
            "eigenvectors .* more than max_bytes=8; ask for fewer",
        ),
        (lambda b, complex_layer: eig(b, noise(2, 3), 4, method="krylov", max_steps=3), "max_steps must be at least k"),
        (
            lambda b, complex_layer: eig(b, noise(2, 3), 1, method="krylov", max_steps=3.5),
            "max_steps must be an integer at least 1",
        ),
        (
            lambda b, complex_layer: eig(b, noise(2, 3), 1, method="krylov", tol=torch.nan),
            "tol must be a finite number > 0, got nan",
        ),
        (
            lambda b, complex_layer: eig(b, noise(2, 3), 1, method="krylov", tol=0.0),
            "tol must be a finite number > 0, got 0.0",
        ),
        (
            lambda b, complex_layer: eig(b.w_l, noise(3)),
            r"must be a BilinearTensor, got Tensor; tnlm\.interp\.extract\(model\)\.mlp",
        ),
        (lambda b, complex_layer: effective_rank(b.w_l, noise(3), "max"), "must be a BilinearTensor, got Tensor"),
        (
            lambda b, complex_layer: eig(complex_layer, noise(3).to(torch.complex128)),
            "must be real for this analysis, got torch.complex128",
        ),
        (lambda b, complex_layer: effective_rank(b, noise(3), "rank"), "kind must be one of"),
        (lambda b, complex_layer: effective_rank(b, noise(2), "max"), r"u must have shape \(\.\.\., 3\)"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    b = make_layer()
    complex_layer = BilinearTensor(*(w.to(torch.complex128) for w in (b.w_l, b.w_r, b.w_d)))
    with pytest.raises(ValueError, match=text):
        call(b, complex_layer)


def test_lanczos_on_any_operator():
    q = dense(make_layer(2, 13, 17, bias=False))
    values, _, _ = lanczos(
        lambda active: lambda x: (q[active] @ x[:, :, None])[:, :, 0],
        2,
        13,
        1,
        dtype=q.dtype,
        which="max",
        tol=1e-12,
        check_every=3,
    )
    assert_close(values[:, 0], torch.linalg.eigvalsh(q)[:, -1])


@pytest.mark.parametrize("method", ["full", "krylov"])
def test_a_form_that_overflows_is_refused(method):
    """The weights are finite in float32, their products are not: no NaN spectrum with nothing unfound."""
    b = make_layer(3, 37, 41).to(torch.float32)
    large = BilinearTensor(b.w_l * 1e20, b.w_r * 1e20, b.w_d)
    u = torch.eye(3)
    for call in (
        lambda: eig(large, u, 2, method=method),
        lambda: effective_rank(large, u, "entropy"),
        lambda: cp(large, 1, sweeps=1),
        lambda: bounds(large, u),
        lambda: vocab_moments(SimpleNamespace(mlp=[large], unembed=u, tokens=range(3)), 0),
        lambda: vocab_bounds(SimpleNamespace(mlp=[large], unembed=u, tokens=range(3)), 0),
        lambda: vocab_eigs(SimpleNamespace(mlp=[large], unembed=u, tokens=range(3)), 0, k=2, progress=False),
        lambda: LowRank(large.w_l.mT, large.w_r).svd(),
        lambda: top_tokens(LowRank(large.w_l.mT, large.w_r), 2),
    ):
        with pytest.raises(ValueError, match=r"overflows float32, got .* use dtype=float64"):
            call()
    assert bool(eig(large.to(torch.float64), u.double(), 2, method=method).values.isfinite().all())
    assert bool(hosvd(large, 1, 1).error_bound.isfinite())  # in float64, and in factors
