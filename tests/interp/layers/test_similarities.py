"""Similarities with known values, chance levels against random rotations, matching of heads."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.interp.builders import (
    dense,
    gauged,
    make_head,
    make_layer,
    monomial,
    noise,
    on_sphere,
    shifted,
    sphere_points,
)
from tests.limits import assert_at_most, assert_close
from tnlm.interp import BilinearTensor, compose, haar_null, match_heads, similarity
from tnlm.network import Network


def square(w_d=1.0):
    one = torch.ones(1, 1, dtype=torch.float64)
    return BilinearTensor(one, one, w_d * one)


def stacked(a, b):
    """One layer with the outputs of both."""
    w_d = torch.block_diag(a.w_d, b.w_d)
    return BilinearTensor(torch.cat([a.w_l, b.w_l]), torch.cat([a.w_r, b.w_r]), w_d)


# x0^2 x1^2 in three variables, as (x0^2)(x1^2) and as (x0 x1)(x0 x1)
SQUARES = [stacked(monomial(0, 0, 3), monomial(1, 1, 3)), monomial(0, 1, 2)]
PRODUCT = [monomial(0, 1, 3), square()]


def two_layer_dense(layers):
    lower, upper = dense(layers[0]), dense(layers[1])
    t = torch.einsum("oab,aij,bkl->oijkl", upper, lower, lower)
    return sum(t.permute(0, *(1 + p for p in order)) for order in itertools.permutations(range(4))) / 24


def make_stack(seed, sizes=(5, 4, 3), hidden=(6, 7)):
    shapes = zip(sizes[1:], sizes, hidden, strict=False)
    return [make_layer(*shape, bias=False, seed=seed + n) for n, shape in enumerate(shapes)]


def test_one_function_built_two_ways_is_one_function():
    assert_close(float(similarity(SQUARES, PRODUCT).value), 1)
    assert_close(float(similarity(SQUARES, PRODUCT, "tree").value), 0)
    for kind in ("complex", "gaussian", "sphere"):
        assert_close(float(similarity(SQUARES, PRODUCT, kind, samples=50).value), 1)
    stack = make_stack(1)
    upper = stack[1]
    swapped = [stack[0], BilinearTensor(upper.w_r, upper.w_l, upper.w_d)]
    for kind in ("sym", "complex"):
        found = similarity(stack, swapped, kind, samples=50 if kind == "complex" else None)
        assert_close(float(found.value), 1)


def test_two_layers_by_pairings_agree_with_all_leg_orders():
    a, b = make_stack(1), make_stack(5, sizes=(5, 2, 3))
    t, s = two_layer_dense(a), two_layer_dense(b)
    assert_close(similarity(a, b).value, (t * s).sum() / t.norm() / s.norm(), scale=1)  # a cosine
    with pytest.raises(ValueError, match=r'table of crossed legs of shape \(4, 2, 25\) needs .*use kind="complex"'):
        similarity(a, b, max_bytes=1000)


def test_complex_moments_count_leg_orders():
    # E |x0^2 x1^2|^2 = 2! 2! = 4, against 4! |S|^2 with |S|^2 = 1/6
    assert_close(24 * two_layer_dense(PRODUCT).square().sum(), torch.tensor(4.0).double())
    a, b = make_stack(1), make_stack(5)
    exact, sampled = similarity(a, b), similarity(a, b, "complex", samples=20_000)
    assert abs(float(sampled.value - exact.value)) < 4 * float(sampled.error)
    assert 0 < float(sampled.error) < 0.02


@pytest.mark.parametrize("kind", ["gaussian", "sphere", "complex"])
@pytest.mark.parametrize("residual", [False, True])
def test_closed_forms_of_one_layer_agree_with_sampling(kind, residual):
    a, b = make_layer(5, 5, 7, seed=1), make_layer(5, 5, 6, seed=2)
    b = a + 2 * b
    exact = similarity(a, b, kind, residual=residual)
    sampled = similarity(a, b, kind, samples=20_000, residual=residual)
    assert float(exact.error) == 0
    assert abs(float(sampled.value - exact.value)) < 4 * float(sampled.error)


def test_closed_forms_have_the_right_terms():
    a, b = make_layer(5, 5, 7, seed=1), make_layer(5, 5, 6, seed=2)
    dot, m_a, m_b = (dense(a) * dense(b)).sum(), a.traces(), b.traces()

    def cosine(product):
        return product(a, b) / (product(a, a) * product(b, b)).sqrt()

    def terms(x, y):
        return (dense(x) * dense(y)).sum(), x.traces(), y.traces(), x.bias, y.bias

    def gaussian(x, y):
        s, m, n, p, q = terms(x, y)
        return 2 * s + m @ n + 5 + p @ n + m @ q + p @ q

    def sphere(x, y):
        s, m, n, p, q = terms(x, y)
        return 5 / 7 * (2 * s + m @ n) + 5 + p @ n + m @ q + p @ q

    def complex_gaussian(x, y):
        s, _, _, p, q = terms(x, y)
        return 2 * s + 5 + p @ q

    for kind, product in (("gaussian", gaussian), ("sphere", sphere), ("complex", complex_gaussian)):
        assert_close(similarity(a, b, kind, residual=True).value, cosine(product))
    # pure quadratic layers: sphere and Gaussian agree; leaving out the trace term would give the tensor cosine
    pure = [BilinearTensor(x.w_l, x.w_r, x.w_d) for x in (a, b)]
    assert_close(similarity(*pure, "sphere").value, similarity(*pure, "gaussian").value)
    assert_close(similarity(*pure).value, dot / a.norm() / b.norm())
    assert abs(float(similarity(*pure, "gaussian").value - similarity(*pure).value)) > 0.01
    assert float(m_a @ m_b) != 0


def test_sixth_moments():
    # x ~ N(1, 1): E x^3 = 4 and E x^6 = 76, so the cosine of (1 + z)^3 with 1 is 4 / sqrt(76)
    cube = similarity(lambda z: (1 + z) ** 3, torch.ones_like, "gaussian", samples=40_000, d_in=1)
    assert abs(float(cube.value) - 4 / 76**0.5) < 4 * float(cube.error) < 0.05
    # f = x0^2 x1 against x1: E f^2 = 3 and 3 d^2 / ((d + 2)(d + 4)), E f x1 = 1 and d / (d + 2)
    for kind, want in (("gaussian", 3**-0.5), ("sphere", math.sqrt((3 + 4) / (3 * (3 + 2))))):
        found = similarity(lambda x: x[:, :1] ** 2 * x[:, 1:2], lambda x: x[:, 1:2], kind, samples=20_000, d_in=3)
        assert abs(float(found.value) - want) < 4 * float(found.error) < 0.1


def test_the_sphere_has_its_radius():
    # 1 + x0^2 against 1 on |x|^2 = 3: means 1 and 2, E (1 + x0^2)^2 = 1 + 2 + 9 / 5
    found = similarity(
        lambda x: 1 + x[:, :1] ** 2, lambda x: torch.ones_like(x[:, :1]), "sphere", samples=20_000, d_in=3
    )
    assert abs(float(found.value) - 2 / 4.8**0.5) < 4 * float(found.error) < 0.02


def test_degrees_mix_under_a_real_gaussian_and_not_under_a_complex_one():
    # E x . x|x|^2 = d (d + 2) = 15 at d = 3, E |x|^2 = 3, E |x|^6 = 105
    maps = (lambda x: x, lambda x: x * (x * x).sum(1, keepdim=True))
    real = similarity(*maps, "gaussian", samples=20_000, d_in=3)
    assert abs(float(real.value) - 15 / math.sqrt(3 * 105)) < 4 * float(real.error)
    other = similarity(*maps, "complex", samples=20_000, d_in=3)
    assert abs(float(other.value)) < 4 * float(other.error)


@pytest.mark.parametrize("kind", ["sym", "gaussian", "sphere", "complex", "tree"])
def test_per_layer_similarity_is_gauge_free(kind):
    a, b = make_stack(1), make_stack(5)
    one = similarity(a, b, kind, per_layer=True)
    other = similarity([gauged(x) for x in a], [gauged(x, seed=3) for x in b], kind, per_layer=True)
    assert_close(one.value, other.value)
    assert one.value.shape == one.error.shape == (2,)
    assert_close(one.value[0], similarity(a[0], b[0], kind).value)
    assert_close(similarity(a, a, kind, per_layer=True).value, torch.ones(2).double())


def test_similarity_of_large_float32_layers_does_not_overflow():
    a = make_layer(dtype=torch.float32) * 1e14
    assert_close(float(similarity(a, a).value), 1, dtype=torch.float32)
    assert_close(float(similarity(a, -a).value), -1, dtype=torch.float32)


def test_sampling_is_deterministic_and_leaves_the_global_generator_alone():
    a, b = make_stack(1), make_stack(5)
    state = torch.get_rng_state()
    values = [similarity(a, b, "gaussian", samples=20, seed=seed).value for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert values[0] == values[1] != values[2]


def test_tree_is_the_inner_product_of_symmetrised_layers(monkeypatch):
    a, b = make_stack(1), make_stack(5)
    t, s = (torch.einsum("oab,aij,bkl->oijkl", dense(x[1]), dense(x[0]), dense(x[0])) for x in (a, b))
    assert_close(similarity(a, b, "tree").value, (t * s).sum() / t.norm() / s.norm())
    shared = [b[0], a[1]]  # one object above two different layers: its kernel is not symmetric there
    monkeypatch.setattr("tnlm.interp.layers.grams._HERMITIAN_ROWS", 2)
    s = torch.einsum("oab,aij,bkl->oijkl", *(dense(x) for x in (a[1], b[0], b[0])))
    assert_close(similarity(a, shared, "tree").value, (t * s).sum() / t.norm() / s.norm())


@pytest.mark.parametrize("d", [2, 3])
def test_haar_null_against_random_rotations(d):
    a, b = make_layer(2, d, 3, seed=1), make_layer(2, d, 4, seed=2)
    null = haar_null(a, b)
    q, r = torch.linalg.qr(noise(20_000, d, d, seed=3))
    q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    values = torch.einsum("oij,nik,njl,okl->n", dense(a), q, q, dense(b))
    assert abs(float(values.mean() - null.mean)) < 4 * float(values.std()) / 20_000**0.5
    torch.testing.assert_close(values.var(), null.variance, rtol=0.06, atol=0)
    assert_close(null.z, (a.inner(b) - null.mean) / null.variance.sqrt())


def test_chance_is_of_the_part_that_the_sphere_fixes():
    a, b = (on_sphere(make_layer(2, 3, 4, seed=seed)) for seed in (1, 2))
    null, other = haar_null(a, b), haar_null(shifted(a, noise(2, seed=5)), shifted(b, noise(2, seed=6)))
    assert_close(torch.stack(other), torch.stack(null), scale=100.0)
    traceless = [dense(x) - torch.einsum("oii,jk->ojk", dense(x), torch.eye(3).double()) / 3 for x in (a, b)]
    assert_close(null.z * null.variance.sqrt(), (traceless[0] * traceless[1]).sum(), scale=100.0)
    assert_close(null.mean, torch.zeros(()).double(), scale=100.0)
    assert abs(float(haar_null(*(replace(x, domain="space") for x in (a, b))).mean)) > 0.1


@pytest.mark.parametrize("domain", ["space", "sphere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_weights_have_the_chance_and_the_cosine_of_large_ones(domain, dtype):
    a, b = (replace(make_layer(2, 3, 4, seed=seed), domain=domain).to(dtype) for seed in (1, 2))
    small = [replace(x, w_l=x.w_l * 2.0**-70, w_r=x.w_r * 2.0**-66, w_d=x.w_d * 2.0**-60) for x in (a, b)]
    null, tiny = haar_null(a, b), haar_null(*small)
    assert_close(tiny.z, null.z, dtype=dtype)
    assert float(tiny.z) != 0
    assert_close(tiny.variance * 2.0**784, null.variance, dtype=dtype)
    assert_close(similarity(*small).value, similarity(a, b).value, scale=1.0, dtype=dtype)


def test_without_a_rotation_there_is_no_distance_from_chance():
    line = make_layer(2, 1, 3, seed=1)
    assert float(haar_null(line, make_layer(2, 1, 4, seed=2)).z) == 0
    assert float(haar_null(line, line * 0).z) == 0


def test_layers_that_are_equal_on_the_sphere_are_one():
    a = on_sphere(make_layer(3, 4, 5, seed=1))
    b = on_sphere(make_layer(3, 4, 5, seed=2))
    moved = shifted(a, noise(3, seed=3))
    for kind in ("sym", "gaussian", "sphere", "complex", "tree"):
        assert_close(float(similarity(a, moved, kind).value), 1)
        assert_close(similarity(moved, b, kind).value, similarity(a, b, kind).value, scale=10.0)
    x = sphere_points(20_000, 4)
    y, z = a(x), b(x)
    want = (y * z).sum() / y.norm() / z.norm()
    assert abs(float(similarity(moved, b, "sphere").value - want)) < 0.02


def test_a_network_is_a_map():
    lower, upper = make_stack(1)
    network = compose(lower, upper)
    seeds = {"samples": 50, "seed": 4}
    assert_close(float(similarity(network, [lower, upper], "complex", **seeds).value), 1)
    a, b = ([network, make_stack(5)], [[lower, upper], make_stack(5)])
    assert_close(similarity(*a, "gaussian", **seeds).value, similarity(*b, "gaussian", **seeds).value, scale=1.0)
    same = similarity(network, network, "complex", d_in=5, samples=50)
    assert_close(float(same.value), 1)
    assert same.basis == similarity(upper, upper).basis == "coordinates as given"


def test_heads_are_matched_across_order_gauge_and_noise():
    heads = [make_head(seed=seed) for seed in (1, 2, 3, 4)]
    order = [2, 0, 3, 1]
    others = [heads[n].fix_gauge() for n in order]
    found = match_heads(heads, others, distances=(0, 1, 5))
    assert found.pairs == [(n, order.index(n)) for n in range(4)]
    matched = torch.stack([found.similarity[pair] for pair in found.pairs])
    assert_close(matched, torch.ones(4).double())
    assert_at_most(found.similarity.abs(), 1.0)
    # the sign of a head shows
    flipped = make_head(seed=1, o=-heads[0].o)
    assert_close(match_heads([heads[0]], [flipped]).similarity, -torch.ones(1, 1).double())
    assert match_heads(heads[:1], others).pairs == [(0, 1)]


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda a, b: similarity(a, b, "cosine"), "kind must be one of"),
        (lambda a, b: similarity(a, b, "complex", samples=1), "samples must be an integer at least 2"),
        (lambda a, b: similarity(a, b, per_layer=True, kind="sum"), "kind must be one of"),
        (lambda a, b: similarity(a, b[:1], per_layer=True), "two stacks of the same number of layers"),
        (lambda a, b: similarity(a, 3), "a map must be a layer, .*, got int"),
        (lambda a, b: similarity([a[0], a[0]], b), "a layer of d_out=4 cannot feed one of d_in=5"),
        (
            lambda a, b: similarity(Network([("x", "i"), ("y", "i")], ""), b, "complex"),
            r"a Network must have one input \(batch, d_in\) to be compared, got x \(i\), y \(i\)",
        ),
        (lambda a, b: similarity([], b), "at least one BilinearTensor"),
        (lambda a, b: similarity(a * 2, b), "a layer of d_out=3 cannot feed one of d_in=5"),
        (lambda a, b: similarity(a, b, residual=True), 'kind="sym" has a closed form only.*use kind="complex"'),
        (lambda a, b: similarity(lambda x: x, lambda x: x, "complex"), "d_in must be given to sample two functions"),
        (lambda a, b: similarity(a[0], a[0] * 0), "a map that is zero has no similarity"),
        (
            lambda a, b: similarity(lambda x: x / 0, a[0], "gaussian"),
            "a map gave NaN or infinite values|same output width",
        ),
        (lambda a, b: similarity(a[0], make_layer(4, 3, 2)), "same shape to be compared"),
        (lambda a, b: similarity(a[0], lambda x: x, "gaussian"), "same output width, got 4 and 5"),
        (lambda a, b: similarity(a[0], b[0], "gaussian", residual=True), "a residual needs d_in == d_out, got 5 and 4"),
        (lambda a, b: match_heads([], [make_head()]), "needs heads and distances, got 0 and 1 heads"),
        (lambda a, b: match_heads([make_head()], [make_head("softmax")]), "needs a polynomial pattern"),
        (lambda a, b: match_heads([make_head()], [make_head(o=torch.zeros(5, 3).double())]), "a head of b is zero"),
        (lambda a, b: haar_null(a[0], a[1]), "same shape to be compared"),
        (lambda a, b: haar_null(a, a), "must be a BilinearTensor, got list"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    a, b = make_stack(1), make_stack(5)
    with pytest.raises(ValueError, match=text):
        call(a, b)
