"""The algebra of a layer on its factors against dense float64 einsums."""

from dataclasses import replace

import pytest
import torch

from tests.interp.builders import SHAPES, dense, gauged, make_layer, monomial, noise
from tests.interp.test_extraction import make as make_model
from tests.limits import assert_close
from tnlm.interp import BilinearTensor, extract


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_reproduces_the_layer_and_is_symmetric(shape):
    b = make_layer(*shape)
    x = noise(11, b.d_in, seed=1)
    t, lifted = b.tensor(), torch.cat([torch.ones(11, 1, dtype=x.dtype), x], dim=1)
    assert_close(torch.einsum("oij,bi,bj->bo", t, lifted, lifted), b(x))
    assert torch.equal(t, t.mT)
    assert_close(t[:, 1:, 1:], dense(b))
    assert not t[:, 0, 1:].any()
    plain = replace(b, bias=None).tensor()
    assert_close(plain, dense(b))
    assert plain.shape == b.shape


@pytest.mark.parametrize("bias", [True, False])
def test_the_tensor_is_that_of_the_model(bias):
    model = make_model(mlp_bias=bias, d_qk=4)
    mlp = model.blocks[1].mlp
    assert_close(extract(model).mlp[1].tensor(), mlp.tensor().detach())
    assert mlp.tensor().shape == (30, 30 + bias, 30 + bias)


def test_tensor_of_a_form_given_unsymmetrically():
    # x^T [[1, 5], [1, 2]] x = 9 at x = (1, 1); one triangle alone would give 5
    form = torch.tensor([[1.0, 5.0], [1.0, 2.0]], dtype=torch.float64)
    b = BilinearTensor(torch.eye(2, dtype=torch.float64), form, torch.ones(1, 2, dtype=torch.float64))
    x = torch.ones(2, dtype=torch.float64)
    assert float(b(x)) == 9
    assert torch.equal(b.tensor()[0], torch.tensor([[1.0, 3.0], [3.0, 2.0]], dtype=torch.float64))
    assert float(x @ b.interaction(torch.ones(1, dtype=torch.float64)) @ x) == 9


@pytest.mark.parametrize("shape", SHAPES)
def test_symmetrize_is_the_same_function_with_coefficient_a_quarter(shape):
    b = make_layer(*shape)
    s = b.symmetrize()
    x = noise(11, b.d_in, seed=1)
    assert_close(s(x), b(x))
    assert s.w_l is s.w_r
    assert s.d_hidden == 2 * b.d_hidden


def test_fold_project_and_augment():
    b = make_layer(5, 5, 7)
    x, m, p = noise(11, 3, seed=1), noise(5, 3, seed=2), noise(2, 5, seed=3)
    assert_close(b.fold(m)(x), b(x @ m.T))
    assert_close(b.project(p)(x @ m.T), b(x @ m.T) @ p.T)
    x = noise(11, 5, seed=4)
    lifted = torch.cat([torch.ones(11, 1, dtype=x.dtype), x], dim=1)
    a = b.augment()
    assert_close(a(lifted), torch.cat([lifted[:, :1], x + b(x)], dim=1))
    assert (a.d_hidden, a.bias) == (7 + 1 + 5, None)
    rectangular = make_layer(3, 5, 7)
    assert_close(rectangular.augment(residual=False)(lifted)[:, 1:], rectangular(x))


def test_sum_difference_and_multiple():
    a, b = make_layer(seed=1), make_layer(d_hidden=2, bias=False, seed=2)
    x = noise(11, 5, seed=3)
    assert_close((a + b)(x), a(x) + b(x))
    assert_close((a - b)(x), a(x) - b(x))
    assert_close((-2.5 * a)(x), -2.5 * a(x))
    assert_close(a.to(torch.float32)(x.float()), a(x).float())


def test_interaction_and_apply_agree_with_the_dense_tensor():
    b = make_layer()
    u, x = noise(2, 4, 3, seed=1), noise(2, 4, 5, 6, seed=2)
    q = torch.einsum("abo,oij->abij", u, dense(b))
    assert_close(b.interaction(u), q)
    assert_close(b.apply(u, x), q @ x)
    assert b.interaction(u[:0]).shape == (0, 4, 5, 5)
    assert_close(b.traces(), dense(b).diagonal(dim1=1, dim2=2).sum(-1))


@pytest.mark.parametrize("shape", SHAPES)
def test_grams_are_those_of_the_dense_tensor(shape):
    b, t = make_layer(*shape), dense(make_layer(*shape))
    w_u, a = noise(11, b.d_out, seed=1), noise(13, b.d_in, seed=2)
    out_metric, in_metric = w_u.T @ w_u, a.T @ a
    for got, want in [
        (b.gram("out"), torch.einsum("oij,pij->op", t, t)),
        (b.gram("in"), torch.einsum("oij,okj->ik", t, t)),
        (b.gram("out", in_metric), torch.einsum("oij,ik,jl,pkl->op", t, in_metric, in_metric, t)),
        # what the logits read is the sum of every token's squared form
        (b.gram("in", out_metric), b.interaction(w_u).matrix_power(2).sum(0)),
    ]:
        assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "limits",
    [
        {"grams._BLOCK": 23, "bilinear._BLOCK": 23},
        {"grams._HERMITIAN_ROWS": 2},
        {"grams._HERMITIAN_ROWS": 3},
    ],
)
def test_blocks_of_hidden_units_change_nothing(monkeypatch, dtype, limits):
    a, b = make_layer(d_hidden=7, seed=1, dtype=dtype), make_layer(d_hidden=11, seed=2, dtype=dtype)
    metric = noise(5, 4, dtype=dtype) @ noise(5, 4, dtype=dtype).mH

    def results():
        products = (a.inner(b), a.inner(a), a.inner(a, "gaussian"), a.inner(BilinearTensor(a.w_l, a.w_r, a.w_d)))
        return (*products, a.gram("out"), a.gram("out", metric), a.gram("in"), b.interaction(noise(4, 3, dtype=dtype)))

    whole = results()
    for name, value in limits.items():
        monkeypatch.setattr(f"tnlm.interp.layers.{name}", value)
    for one, other in zip(whole, results(), strict=True):
        assert_close(one, other)
    assert_close(a.inner(a), a.inner(a * 1))
    assert a.inner(a).dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_that_of_the_symmetric_part(shape):
    b = make_layer(*shape)
    squared = b.norm() ** 2
    for other in (dense(b).square().sum(), b.gram("out").trace(), b.gram("in").trace(), b.inner(b)):
        assert_close(squared, other)
    raw = torch.einsum("oh,hi,hj->oij", b.w_d, b.w_l, b.w_r).square().sum()
    assert raw >= squared * (1 - 1e-12)
    if b.d_in > 1:
        assert raw > 1.01 * squared


def test_inner_products_of_large_float32_layers():
    # <S, S> is about 1e31 here: the product of two of them would pass the float32 maximum
    small, large = make_layer(), make_layer(dtype=torch.float32) * 1e14
    assert_close(large.norm(), 1e14 * make_layer(dtype=torch.float32).to(torch.float64).norm(), dtype=torch.float32)
    assert large.norm().dtype == small.norm().dtype == torch.float64


def test_inner_products_see_only_the_function():
    a, b = make_layer(seed=1), make_layer(d_hidden=11, seed=2)
    assert_close(a.inner(b), (dense(a) * dense(b)).sum())
    for kind in ("sym", "gaussian", "sphere"):
        assert_close(gauged(a).inner(gauged(b, seed=3), kind), a.inner(b, kind))
    mixed = noise(7, 7, seed=5)
    scrambled = BilinearTensor(mixed @ a.w_l, mixed @ a.w_r, a.w_d @ torch.linalg.inv(mixed), a.bias)
    assert abs(float(scrambled.inner(b) / a.inner(b)) - 1) > 0.1


def test_functional_inner_products_have_their_trace_term():
    a, b = make_layer(seed=1), make_layer(seed=2)
    m_a, m_b = a.traces(), b.traces()
    quadratic = 2 * (dense(a) * dense(b)).sum() + m_a @ m_b
    rest = m_a @ b.bias + a.bias @ m_b + a.bias @ b.bias
    assert_close(a.inner(b, "gaussian"), quadratic + rest)
    assert_close(a.inner(b, "sphere"), 5 / 7 * quadratic + rest)
    # a constant has second moment 1; lifted to a Gaussian leg it would be 3
    constant = BilinearTensor(
        *(torch.zeros(s, dtype=torch.float64) for s in ((1, 2), (1, 2), (1, 1))), torch.ones(1).double()
    )
    assert float(constant.inner(constant, "gaussian")) == float(constant.inner(constant, "sphere")) == 1


def test_complex_layers():
    b = BilinearTensor(*(noise(*s, seed=n, dtype=torch.complex128) for n, s in enumerate([(7, 5), (7, 5), (3, 7)])))
    t = dense(b)
    assert_close(b.norm() ** 2, t.abs().square().sum())
    assert_close(b.gram("out"), torch.einsum("oij,pij->op", t, t.conj()))
    assert_close(b.gram("in"), torch.einsum("oij,okj->ik", t, t.conj()))
    x = noise(4, 5, dtype=torch.complex128)
    assert_close(make_layer()(x), torch.einsum("oij,bi,bj->bo", dense(make_layer()).to(x), x, x) + make_layer().bias)


def test_gradients_reach_the_factors():
    factors = [w.requires_grad_() for w in (noise(4, 3), noise(4, 3, seed=1), noise(2, 4, seed=2))]
    assert torch.autograd.gradcheck(lambda *w: BilinearTensor(*w).inner(BilinearTensor(*w)), factors)
    assert torch.autograd.gradcheck(lambda *w: BilinearTensor(*w).norm(), factors)


def test_dense_results_over_the_budget_are_refused_before_allocating():
    d, h = 2**15, 1
    b = BilinearTensor(torch.zeros(h, d), torch.zeros(h, d), torch.zeros(2**15, h))
    with pytest.raises(
        ValueError, match=r"dense tensor of shape \(32768, 32768, 32768\) needs 140,737,488,355,328 bytes"
    ):
        b.tensor()
    with pytest.raises(ValueError, match=r"interaction matrices .* more than max_bytes=64; use fewer directions"):
        make_layer().interaction(noise(2, 3), max_bytes=64)
    assert make_layer().tensor(max_bytes=3 * 6 * 6 * 8).shape == (3, 6, 6)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "factors, text",
    [
        (lambda l, r, d: (l, noise(7, 1), d), r"w_r must have shape \(7, 5\), got \(7, 1\)"),
        (lambda l, r, d: (l, r, noise(3, 1)), r"w_d must have shape \(any, 7\), got \(3, 1\)"),
        (lambda l, r, d: (l, r, d, noise(1)), r"bias must have shape \(3\), got \(1,\)"),
        (lambda l, r, d: (l[0], r, d), r"w_l must have shape \(any, any\), got \(5,\)"),
        (
            lambda l, r, d: (l.index_fill(1, torch.tensor(3), torch.nan), r, d),
            "w_l must be finite, got 7 NaN or infinite of 35 entries",
        ),
        (lambda l, r, d: (l, r, d, torch.full((3,), torch.inf, dtype=torch.float64)), "bias must be finite, got 3"),
        (lambda l, r, d: (l, r.float(), d), "w_r must be torch.float64 on cpu like the weights, got torch.float32"),
        (
            lambda l, r, d: (l.half(), r.half(), d.half()),
            r"w_l must be float32, float64 or complex, got torch.float16; .*\.float\(\)",
        ),
        (lambda l, r, d: ([1.0], r, d), "w_l must be a tensor, got list"),
    ],
)
def test_bad_factors_are_refused(factors, text):
    with pytest.raises(ValueError, match=text):
        BilinearTensor(*factors(noise(7, 5), noise(7, 5), noise(3, 7)))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda b: b(noise(2, 1)), r"x must have shape \(\.\.\., 5\), got \(2, 1\)"),
        (lambda b: b(torch.full((5,), torch.nan).double()), "x must be finite"),
        (lambda b: b.interaction(noise(5)), r"u must have shape \(\.\.\., 3\)"),
        (lambda b: b.interaction(noise(3).float()), "u must be torch.float64"),
        (lambda b: b.apply(noise(2, 3), noise(5, 1)), r"x must have shape \(2, 5, any\)"),
        (lambda b: b.fold(noise(3, 5)), r"m must have shape \(5, any\)"),
        (lambda b: b.project(noise(3, 5)), r"m must have shape \(any, 3\)"),
        (lambda b: b.gram("both"), "mode must be one of 'out', 'in', got 'both'"),
        (lambda b: b.gram("in", noise(5, 5)), r"metric must have shape \(3, 3\)"),
        (lambda b: b.gram("in", noise(3, 3)), r"metric must be symmetric.*pass \(m \+ m.mT\) / 2"),
        (lambda b: b.inner(monomial(0, 1, 5)), r"same shape to be compared, got \(3, 5, 5\) and \(1, 5, 5\)"),
        (lambda b: b.inner(b.to(torch.float32)), "w_l of the other layer must be torch.float64"),
        (lambda b: b.inner(b, "cosine"), "kind must be one of 'sym', 'gaussian', 'sphere', got 'cosine'"),
        (lambda b: b + monomial(0, 1, 5), "same shape to be added"),
        (lambda b: b * noise(3), r"multiplied by one number, got shape \(3,\)"),
        (lambda b: b.inner(b.w_l), "must be a BilinearTensor, got Tensor"),
        (lambda b: b.augment(), "a residual needs d_in == d_out, got d_in=5, d_out=3; pass residual=False"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    b = make_layer()
    with pytest.raises(ValueError, match=text):
        call(b)


@pytest.mark.user_error
def test_traces_and_applied_forms_that_overflow_are_refused():
    """1e13 cubed is 1e39, past the largest float32."""
    b = BilinearTensor(*(torch.full(shape, 1e13) for shape in ((5, 6), (5, 6), (4, 5))))
    with pytest.raises(ValueError, match="the trace overflows float32, got 4 NaN or infinite of 4 entries"):
        b.traces()
    with pytest.raises(ValueError, match="the form applied to x overflows float32"):
        b.apply(torch.ones(4), torch.ones(6, 1))
