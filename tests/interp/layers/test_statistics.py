"""Moments and bounds with the values that pen and paper give."""

from types import SimpleNamespace

import pytest
import torch

from tests.interp.builders import SHAPES, make_layer, monomial, noise
from tests.limits import assert_close
from tnlm.interp import BilinearTensor, bounds, eig, jacobian_kernel, moments, trace_bounds, vocab_bounds
from tnlm.interp.layers.rounding import form_size


def second_moment(m):
    return m.cov + torch.outer(m.mean, m.mean)


@pytest.mark.parametrize("d", [2, 3, 7])
def test_moments_of_monomials(d):
    # f = x0 x1: mean 0, E f^2 = 1 (Gaussian), d / (d + 2) (sphere); f = x0^2: mean 1, E f^2 = 3 and 3 d / (d + 2)
    for b, mean, fourth in [(monomial(0, 1, d), 0.0, 1.0), (monomial(0, 0, d), 1.0, 3.0)]:
        for kind, factor in [("gaussian", 1.0), ("sphere", d / (d + 2))]:
            m = moments(b, kind=kind)
            assert_close(m.mean, torch.tensor([mean]).double(), scale=1)
            assert_close(second_moment(m), torch.tensor([[factor * fourth]], dtype=torch.float64), scale=fourth)


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_in_terms_of_the_gram(shape):
    b = make_layer(*shape)
    m, g = b.traces(), b.gram("out")
    assert_close(moments(b, kind="gaussian").mean, m + b.bias)
    assert_close(moments(b, kind="gaussian").cov, 2 * g)
    unbiased = moments(BilinearTensor(b.w_l, b.w_r, b.w_d))
    assert_close(second_moment(unbiased), b.d_in / (b.d_in + 2) * (2 * g + torch.outer(m, m)))
    assert_close(moments(b).cov, unbiased.cov)


def test_non_central_moments_of_a_square():
    # x ~ N(1, 1): E x^2 = 2, E x^4 = 10
    one = torch.ones(1, dtype=torch.float64)
    m = moments(monomial(0, 0, 1), mean=one, cov=one[None], kind="gaussian")
    assert_close(m.mean, torch.tensor([2.0]).double())
    assert_close(second_moment(m), torch.tensor([[10.0]]).double())


def test_non_central_moments_against_samples():
    b = make_layer(bias=True)
    mean, a = noise(5, seed=1), noise(5, 5, seed=2) / 2
    m = moments(b, mean=mean, cov=a @ a.T, kind="gaussian")
    f = b(mean + noise(200_000, 5, seed=3) @ a.T)
    error = f.std(0) / len(f) ** 0.5
    assert float(((f.mean(0) - m.mean) / error).abs().max()) < 4
    torch.testing.assert_close(torch.cov(f.T), m.cov, rtol=0.05, atol=0.01 * float(m.cov.abs().max()))


def test_moments_under_a_covariance_are_those_of_the_folded_layer():
    b, a = make_layer(), noise(5, 4, seed=2)
    direct, folded = moments(b, cov=a @ a.T, kind="gaussian"), moments(b.fold(a), kind="gaussian")
    assert_close(direct.mean, folded.mean)
    assert_close(direct.cov, folded.cov)


@pytest.mark.parametrize("domain", ["sphere", "ball"])
def test_samples_lie_within_bounds_that_are_attained(domain):
    b, u = make_layer(), noise(4, 3, seed=1)
    r = bounds(b, u, radius2=2.5, domain=domain)
    x = noise(2000, 5, seed=2)
    x = x * (2.5**0.5 / x.norm(dim=1, keepdim=True))
    if domain == "ball":
        x = x * torch.rand(2000, 1, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    values = b(x) @ u.T
    assert bool((values <= r.high + 1e-12).all())
    assert bool((values >= r.low - 1e-12).all())
    size = 2.5 * form_size(b, u)
    assert_close((b(r.argmax) * u).sum(-1), r.high, scale=size)
    assert_close((b(r.argmin) * u).sum(-1), r.low, scale=size)
    if domain == "sphere":
        assert_close(r.argmax.square().sum(-1), torch.full((4,), 2.5).double())


def test_bounds_of_monomials():
    u = torch.ones(1, dtype=torch.float64)
    product, square = bounds(monomial(0, 1, 5), u), bounds(monomial(0, 0, 5), u)
    assert_close((float(product.low), float(product.high)), (-2.5, 2.5))
    assert_close((float(square.low), float(square.high)), (0, 5), scale=5)


def test_the_ball_clips_an_end_through_zero():
    eye = torch.eye(3, dtype=torch.float64)
    b = BilinearTensor(eye, eye, torch.ones(1, 3).double(), torch.tensor([0.5]).double())  # |x|^2 + 1/2
    u = torch.ones(1, dtype=torch.float64)
    sphere, ball = bounds(b, u), bounds(b, u, domain="ball")
    assert_close((float(sphere.low), float(sphere.high)), (3.5, 3.5))
    assert_close((float(ball.low), float(ball.high)), (0.5, 3.5), scale=3.5)
    assert not ball.argmin.any()


def test_brackets_from_trace_and_norm_contain_the_ends():
    b, u = make_layer(4, 7, 9), noise(50, 4, seed=1)
    q = b.interaction(u)
    r = trace_bounds(q.diagonal(dim1=1, dim2=2).sum(-1), q.flatten(1).norm(dim=1), 7)
    ends = eig(b, u, which="min").values
    for low, value, high in [(r.min_low, ends[:, 0], r.min_high), (r.max_low, ends[:, -1], r.max_high)]:
        assert bool((low <= value).all())
        assert bool((value <= high).all())
    # attained when all eigenvalues but one are equal: (3, 1, 1, 1)
    tight = trace_bounds(torch.tensor(6.0).double(), torch.tensor(12.0).double().sqrt(), 4)
    assert_close((float(tight.max_high), float(tight.min_high)), (3, 1), scale=6)
    single = trace_bounds(torch.tensor(-2.0).double(), torch.tensor(2.0).double(), 1)
    assert_close(list(map(float, single)), [-2.0] * 4)


def test_jacobian_kernel():
    b, x, y = make_layer(), noise(5, seed=1), noise(5, seed=2)
    j_x, j_y = (torch.autograd.functional.jacobian(b, z) for z in (x, y))
    assert_close(x @ jacobian_kernel(b) @ y, (j_x * j_y).sum())
    data = noise(40, 5, seed=3)
    expected = sum(j.T @ j for j in (torch.autograd.functional.jacobian(b, z) for z in data)) / 40
    assert_close(jacobian_kernel(b, data.T @ data / 40), expected)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda b, eye: moments(b, kind="uniform"), "kind must be one of 'sphere', 'gaussian', got 'uniform'"),
        (lambda b, eye: moments(b, mean=noise(5)), 'no mean and covariance to choose; pass kind="gaussian"'),
        (lambda b, eye: moments(b, mean=noise(3), kind="gaussian"), r"mean must have shape \(5\), got \(3,\)"),
        (lambda b, eye: moments(b, cov=noise(5, 5), kind="gaussian"), "cov must be symmetric"),
        (
            lambda b, eye: moments(b, cov=-eye, kind="gaussian"),
            "cov must be positive semi-definite, its smallest eigenvalue is -1",
        ),
        (lambda b, eye: moments(b, cov=eye * torch.nan, kind="gaussian"), "cov must be finite"),
        (lambda b, eye: bounds(b, noise(5)), r"u must have shape \(\.\.\., 3\)"),
        (lambda b, eye: bounds(b, noise(3), radius2=-1), "radius2 must be a finite number >= 0, got -1"),
        (lambda b, eye: bounds(b, noise(3), radius2=torch.nan), "radius2 must be a finite number"),
        (lambda b, eye: bounds(b, noise(3), domain="cube"), "domain must be one of 'sphere', 'ball'"),
        (lambda b, eye: trace_bounds(noise(3), noise(4), 5), r"frobenius must have shape \(3\), got \(4,\)"),
        (lambda b, eye: trace_bounds(noise(3), -noise(3).abs(), 5), "frobenius must be norms, at least 0, got -"),
        (lambda b, eye: trace_bounds(noise(3), noise(3).abs(), 0), "d must be an integer at least 1, got 0"),
        (lambda b, eye: trace_bounds(noise(3) + 0j, noise(3) + 0j, 5), "trace must be real"),
        (lambda b, eye: moments(b.w_l), "must be a BilinearTensor, got Tensor"),
        (lambda b, eye: bounds(b.w_l, noise(3)), "must be a BilinearTensor, got Tensor"),
        (lambda b, eye: jacobian_kernel(b.w_l), "must be a BilinearTensor, got Tensor"),
        (lambda b, eye: jacobian_kernel(b, noise(3, 3)), r"second_moment must have shape \(5, 5\)"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    b, eye = make_layer(), torch.eye(5, dtype=torch.float64)
    with pytest.raises(ValueError, match=text):
        call(b, eye)


def exact_forms(b, u):
    """Of every direction the eigenvalues of the form, from a dense float64 sum: the weights as they are stored."""
    w_l, w_r, w_d, u = (t.double() for t in (b.w_l, b.w_r, b.w_d, u))
    q = torch.einsum("no,oh,hi,hj->nij", u, w_d, w_l, w_r)
    return torch.linalg.eigvalsh((q + q.mT) / 2)


@pytest.mark.parametrize("offset, spread", [(0.0, 1.0), (1.0, 1e-4), (1e3, 1e-4), (-1e4, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_hold_through_rounding_and_cancellation(dtype, offset, spread):
    """A spectrum far from zero and narrow: nearly all of its trace and norm cancels."""
    d = 13
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        values = offset + spread * torch.randn(3, d, generator=generator, dtype=torch.float64).clamp(-1, 1)
        # One unit per eigenvector, scaled unequally: output o has the eigenvalues values[o]
        scale = torch.rand(d, 1, generator=generator, dtype=torch.float64) + 0.5
        b = BilinearTensor(*(t.to(dtype) for t in (basis.mT * scale, basis.mT / scale, values)))
        u = torch.eye(3, dtype=dtype)
        exact = exact_forms(b, u)
        # the reference is rounded too: d of its roundings at the scale of the largest eigenvalue
        slack = 8 * d * torch.finfo(torch.float64).eps * exact.abs().amax()
        found = bounds(b, u, radius2=1.0)
        net = SimpleNamespace(mlp=[b], unembed=u, tokens=range(3))
        brackets = vocab_bounds(net, 0, center=False)
        for low, high in [(found.low, found.high), (brackets.low, brackets.high)]:
            assert bool((low.double() <= exact[:, 0] + slack).all())
            assert bool((high.double() >= exact[:, -1] - slack).all())
        width = exact[:, -1] - exact[:, 0]
        ulp = torch.finfo(dtype).eps * (abs(offset) + spread)
        assert bool((found.high.double() - found.low.double() <= width + 4 * ulp + 64 * slack).all())
        # by a float32 Gram as well
        brackets = vocab_bounds(net, 0, center=False, gram=b.gram("out"))
        assert bool((brackets.low.double() <= exact[:, 0] + slack).all())
        assert bool((brackets.high.double() >= exact[:, -1] - slack).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_listed_lies_below_unfound(dtype):
    for seed in range(30):
        b = make_layer(3, 11, 17, seed=seed).to(dtype)
        u = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
        exact = exact_forms(b, u).abs().sort(descending=True).values
        for k in (1, 4, 10):
            assert bool((eig(b, u, k).unfound.double() >= exact[:, k] * (1 - 1e-13)).all())
