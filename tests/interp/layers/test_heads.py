"""A head's forms against an explicit forward, its trace formulas against dense tensors."""

import math

import pytest
import torch

from tests.interp.builders import make_head, noise
from tests.limits import assert_close
from tnlm.interp import BilinearHead
from tnlm.rotary import rotary_tables, rotate

MAPS = ("q1", "k1", "q2", "k2")


def turn(y, position, angles):
    """Rotation of the halves of ``y (..., d_qk)``, written out as 2 x 2 matrices."""
    c, s = (angles * position).cos(), (angles * position).sin()
    a, b = y.chunk(2, dim=-1)
    return torch.cat([a * c + b * s, -a * s + b * c], dim=-1)


def pattern(head, x, y, s, u):
    """Pattern value of the query input ``x`` at position ``s`` and the key input ``y`` at position ``u``."""
    value = 1
    for q, k in ((head.q1, head.k1), (head.q2, head.k2) if head.q2 is not None else (head.q1, head.k1)):
        value = value * (turn(q @ x, s, head.rotary) @ turn(k @ y, u, head.rotary)) / head.d_qk
    return value


@pytest.mark.parametrize("attention", ["bilinear", "squared"])
@pytest.mark.parametrize("sign", [1, -1])
def test_pattern_tensor_is_the_pattern_and_depends_on_distance_alone(attention, sign):
    head = make_head(attention)
    head = make_head(attention, rotary=sign * head.rotary)
    x, y = noise(7, seed=1), noise(7, seed=2)
    for s, u in [(0, 0), (4, 4), (3, 1), (7, 5), (6, 0)]:
        want = pattern(head, x, y, s, u)
        scale = float(head.pattern_tensor(s - u).norm() * x.norm() ** 2 * y.norm() ** 2)
        assert_close(torch.einsum("ijkl,i,j,k,l->", head.pattern_tensor(s - u), x, x, y, y), want, scale=scale)
        forms = [x @ (head.qk(branch, s - u) @ y) for branch in (1, 2)]
        assert_close(forms[0] * forms[1], want, scale=scale)
    other = make_head(attention, rotary=-head.rotary)
    assert abs(float(pattern(other, x, y, 3, 1) - pattern(head, x, y, 3, 1))) > 1e-3
    a = head.pattern_tensor(2)
    assert torch.equal(a, a.transpose(0, 1))
    assert torch.equal(a, a.transpose(2, 3))


def test_rotation_is_that_of_the_model():
    cos, sin = rotary_tables(6, 4, base=100.0)
    head = make_head(rotary=100.0 ** (-torch.arange(0, 4, 2).double() / 4))
    x = noise(1, 6, 1, 7)
    q, k = (rotate(x @ w.mT, cos.double(), sin.double())[0, :, 0] for w in (head.q1, head.k1))
    assert_close(x[0, 5, 0] @ (head.qk(1, 3) @ x[0, 2, 0]), q[5] @ k[2] / 4, dtype=torch.float32)


def test_one_head_over_causal_positions_with_both_value_circuits():
    head = make_head()
    x, x0 = noise(5, 7, seed=1), noise(5, 7, seed=2)
    values = 0.7 * x @ head.v.T + 0.3 * x0 @ head.v0.T
    for s in range(5):
        want = sum(pattern(head, x[s], x[u], s, u) * head.o @ values[u] for u in range(s + 1))
        got = 0
        for u in range(s + 1):
            score = torch.einsum("ijkl,i,j,k,l->", head.pattern_tensor(s - u), x[s], x[s], x[u], x[u])
            got = got + score * (head.ov("layer") @ x[u] + head.ov("first") @ x0[u])
        assert_close(got, want)


@pytest.mark.parametrize("attention", ["bilinear", "squared"])
@pytest.mark.parametrize("distance", [0, 3])
def test_trace_formulas_are_those_of_the_dense_tensor(attention, distance):
    one, other = make_head(attention), make_head("bilinear", d_qk=6, seed=1)
    a, b = one.pattern_tensor(distance), other.pattern_tensor(distance)
    assert_close(one.norm(distance), a.norm())
    assert_close(one.inner(other, distance), (a * b).sum())
    assert_close(one.read_gram("q", distance), torch.einsum("ijkl,mjkl->im", a, a))
    assert_close(one.read_gram("k", distance), torch.einsum("ijkl,ijml->km", a, a))
    assert_close(one.read_gram("q", distance).trace(), one.norm(distance) ** 2)


def test_trace_formulas_of_complex_factors():
    one, other = (
        BilinearHead(
            **{
                n: noise(4, 5, seed=10 * seed + i, dtype=torch.complex128)
                for i, n in enumerate(("q1", "k1", "q2", "k2"))
            },
            v=noise(3, 5, dtype=torch.complex128),
            o=noise(2, 3, dtype=torch.complex128),
            rotary=torch.tensor([1.0, 0.3]).double(),
        )
        for seed in (1, 2)
    )
    a, b = one.pattern_tensor(2), other.pattern_tensor(2)
    assert_close(one.inner(other, 2), (a * b.conj()).sum())
    for side, equation in (("q", "ijkl,mjkl->im"), ("k", "ijkl,ijml->km")):
        assert_close(one.read_gram(side, 2), torch.einsum(equation, a, a.conj()))


def gauge_twin(head, seed=5):
    """The same function under every gauge that a head without QK norm has."""
    half = head.d_qk // 2
    scale, angle = noise(2, half, seed=seed).exp(), noise(2, half, seed=seed + 1)

    def commuting(w, n, factor):
        c, s = angle[n].cos()[:, None], angle[n].sin()[:, None]
        a, b = w.chunk(2)
        return torch.cat([c * a + s * b, c * b - s * a]) * factor.repeat(2)[:, None]

    branches = [
        (commuting(q, n, scale[n]), commuting(k, n, 1 / scale[n]))
        for n, (q, k) in enumerate(((head.q1, head.k1), (head.q2, head.k2)))
    ]
    (q2, k2), (q1, k1) = [(-2.5 * branches[0][0], branches[0][1]), (branches[1][0], -branches[1][1] / 2.5)]
    m = noise(3, 3, seed=seed + 2)
    inverse = torch.linalg.inv(m)
    changes = {"v": inverse @ head.v, "o": head.o @ m} | ({"v0": inverse @ head.v0} if head.v0 is not None else {})
    return make_head(q1=q1, k1=k1, q2=q2, k2=k2, first=head.v0 is not None, **changes)


@pytest.mark.parametrize("first", [True, False])
def test_gauge_changes_no_quantity_and_fix_gauge_no_function(first):
    head = make_head(first=first)
    twin = gauge_twin(head)
    for distance in (0, 2):
        assert_close(twin.pattern_tensor(distance), head.pattern_tensor(distance))
        assert_close(head.fix_gauge().pattern_tensor(distance), head.pattern_tensor(distance))
        assert_close(twin.read_gram("k", distance), head.read_gram("k", distance))
    one, other = head.fix_gauge(), twin.fix_gauge()
    for name in ("q1", "k1", "q2", "k2", "v", "o") + (("v0",) if first else ()):
        assert_close(getattr(one, name), getattr(other, name))
    for source in ("layer", "first")[: 2 if first else 1]:
        assert_close(one.ov(source).tensor(), head.ov(source).tensor())


def test_fix_gauge_under_qk_norm_only_turns():
    head = make_head(qk_norm=True)
    fixed = head.fix_gauge()
    x = noise(6, 7)
    for branch in (1, 2):
        scores = [h.token_table(x, branch, "q", 3) @ h.token_table(x, branch, "k", 1).T for h in (head, fixed)]
        swapped = head.token_table(x, 3 - branch, "q", 3) @ head.token_table(x, 3 - branch, "k", 1).T
        assert_close(
            min(float((scores[1].abs() - s.abs()).abs().max()) for s in (scores[0], swapped)),
            0.0,
            scale=float(scores[1].abs().max()),
        )
    squared = make_head("squared")
    assert_close(squared.fix_gauge().pattern_tensor(2), squared.pattern_tensor(2))


def test_token_scores_are_the_pattern_and_bounded_under_qk_norm():
    x = noise(11, 7, seed=3)
    head = make_head(qk_norm=True, norm_eps=1e-6)
    norm = lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    q1, k1, q2, k2 = (norm(x @ w.T) for w in (head.q1, head.k1, head.q2, head.k2))
    turned = [turn(k, -2, head.rotary) for k in (k1, k2)]
    full = (q1 @ turned[0].T) * (q2 @ turned[1].T) / 16
    assert float(full.abs().max()) <= 1
    ids = [0, 3, 4, 8]
    found = head.token_scores(x, distance=2, top=3, tokens=ids)
    assert len(found) == len(ids) * 3
    for query, key, value in found.itertuples(index=False):
        assert_close(value, float(full[query, key]), scale=1)
        assert key in ids
    best = {q: max(ids, key=lambda k, q=q: abs(float(full[q, k]))) for q in ids}
    assert best == dict(found.groupby("query", sort=False)["key"].first())
    top = head.token_scores(x, distance=2, top=1, by="all", which="min")
    assert_close(top["value"][0], float(full.min()), scale=1)
    plain = make_head().token_scores(x, top=11)
    largest = max(abs(float(pattern(make_head(), a, b, 0, 0))) for a in x for b in x)
    assert_close(plain["value"].abs().max(), largest)


def test_softmax_kinds_expose_their_forms_and_refuse_the_pattern():
    for kind, reason in [
        ("softmax", "softmax is not polynomial"),
        ("differential", "difference of two softmaxes"),
        ("squared_normalized", "divided by its sum; the numerator"),
    ]:
        head = make_head(kind)
        assert not head.polynomial
        assert head.qk(1, 2).shape == (7, 7)
        assert head.ov().shape == (5, 7)
        for what, call in [
            ("pattern_tensor", head.pattern_tensor),
            ("norm|inner", head.norm),
            ("inner", lambda head=head: make_head().inner(head)),
            ("read_gram", head.read_gram),
            ("token_scores", lambda head=head: head.token_scores(noise(11, 7))),
        ]:
            with pytest.raises(
                ValueError, match=rf"({what}) needs a polynomial pattern, got attention='{kind}': .*{reason}"
            ):
                call()
    with pytest.raises(ValueError, match="has one branch, got branch=2"):
        make_head("softmax").qk(2)


def test_layer_zero_has_one_value_circuit():
    head = make_head(first=False)
    assert_close(head.ov().tensor(), head.o @ head.v)
    with pytest.raises(ValueError, match=r'no values of layer 0; its one circuit is ov\("layer"\)'):
        head.ov("first")


def test_pattern_tensor_over_the_budget_is_refused():
    head = make_head(d_in=1152)
    need = 1152**4 * 8
    with pytest.raises(ValueError, match=rf"pattern tensor of shape .* needs {need:,} bytes"):
        head.pattern_tensor()
    assert math.isfinite(float(head.norm()))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, text",
    [
        ({"q1": noise(3, 7)}, r"d_qk must be even .* got q1 of shape \(3, 7\)"),
        ({"k1": noise(4, 1)}, r"k1 must have shape \(4, 7\), got \(4, 1\)"),
        ({"q2": None}, "q2 must be given for attention='bilinear', got None"),
        ({"attention": "squared", "q2": noise(4, 7)}, r"q2 must be None for attention='squared', got \(4, 7\)"),
        ({"attention": "linear"}, "attention must be one of"),
        ({"k2": noise(4, 7) * torch.nan}, "k2 must be finite"),
        ({"v": noise(3, 6)}, r"v must have shape \(any, 7\)"),
        ({"v0": noise(2, 7)}, r"v0 must have shape \(3, 7\)"),
        ({"v0": None}, "value_mix=0.3 needs v0"),
        ({"o": noise(5, 2)}, r"o must have shape \(any, 3\)"),
        ({"rotary": noise(4)}, r"rotary must have shape \(2\)"),
        ({"value_mix": math.nan}, "value_mix must be a finite number, got nan"),
        ({"norm_eps": -1e-6}, "norm_eps must be a finite number >= 0, got -1e-06"),
    ],
)
def test_bad_heads_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        make_head(**changes)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda head: head.qk(1, math.inf), "a position or distance must be a finite number, got -inf"),
        (
            lambda head: head.token_table(noise(11, 7), 1, "k", math.nan),
            "a position or distance must be a finite number",
        ),
        (lambda head: head.qk(3), "branch must be one of 1, 2, got 3"),
        (lambda head: head.ov("embed"), "source must be one of 'layer', 'first'"),
        (lambda head: head.read_gram("v"), "side must be one of 'q', 'k'"),
        (lambda head: head.inner(make_head(d_in=6)), "same d_in to be compared, got 7 and 6"),
        (lambda head: head.token_scores(noise(11, 6)), r"x must have shape \(any, 7\)"),
        (
            lambda head: head.token_scores(noise(11, 7), tokens=[3, 11]),
            r"token ids must be in \[0, 11\), got 11 at position 1",
        ),
        (lambda head: head.token_scores(noise(11, 7), top=0), "top must be an integer at least 1"),
        (lambda head: head.token_table(noise(4, 7) * torch.nan), "x must be finite"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(make_head())
