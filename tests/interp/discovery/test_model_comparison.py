"""Two models compared by tokens: against dense tensors over tokens, under every symmetry, with other widths."""

from functools import cache

import pytest
import torch

from tests.limits import assert_at_most, assert_close
from tests.symmetries import SYMMETRIES
from tests.tiny_models import PURE, build, build_mixed, tiny
from tnlm import interp
from tnlm.config import ModelConfig
from tnlm.interp import match_heads, similarity

COUNTS = torch.tensor([5, 1, 0, 2, 9, 4, 0, 3, 7, 1, 6])
CONFIGS = {
    "released": tiny(norm_eps=0.0, n_layer=2),
    "no softcap": tiny(norm_eps=0.0, logit_softcap=None, n_layer=2),
    "squared": tiny(norm_eps=0.0, mlp="squared", attention="squared", qk_bias=True, n_layer=2),
    "no QK-norm": tiny(norm_eps=0.0, attention="squared", qk_norm=False, qk_bias=True, n_layer=2),
    "softmax": tiny(norm_eps=0.0, attention="softmax", n_layer=2),
    "swiglu": tiny(norm_eps=0.0, mlp="swiglu", n_layer=2),
    "no mixing": tiny(norm_eps=0.0, x0_mixing=False, value_residual=False, qk_norm=False, n_layer=2),
    "pure": ModelConfig.pure(**PURE),
    "pure, biases": ModelConfig.pure(**PURE, qk_bias=True, mlp_hidden_bias=True),
}
TURNED = ("released", "squared", "no QK-norm", "pure, biases")
CASES = [(name, s) for name in TURNED for s in SYMMETRIES.values() if s.holds(CONFIGS[name])]
CASES.append(("no softcap", SYMMETRIES["U"]))
# bases change by matrices of condition numbers up to about 100, and models without norms cancel as much
ROUNDINGS = 2**20


@cache
def model(name, seed=0):
    return build_mixed(CONFIGS[name], seed)


@cache
def unrelated(name, distances):
    found = similarity(model(name, 7), model(name), distances=distances, permutations=1)
    return found.value, found.chance


def shares(weights):
    p = torch.ones(11) if weights is None else weights
    return p.double() / p.sum()


def rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def mlp_over_tokens(m, layer, p):
    """Dense ``[target, token, token]`` of the traceless form, each axis by the root of its weight."""
    mlp = m.blocks[layer].mlp
    w_l, w_r, w_d = (w.detach() for w in (mlp.w_l, mlp.w_r, mlp.w_d))
    form = torch.einsum("oh,hi,hj->oij", w_d, w_l, w_r)
    form = (form + form.mT) / 2
    d = form.shape[1]
    form = form - torch.einsum("oii,jk->ojk", form, torch.eye(d).double()) / d
    x, u = rms(m.embed.w_e.detach()[:11]), m.unembed.w_u.detach()[:11]
    t = torch.einsum("vo,oij,ai,bj->vab", u - p @ u, form, x, x)
    return torch.einsum("vab,v,a,b->vab", t, *[p.sqrt()] * 3)


def head_over_tokens(m, layer, n, p, distance):
    """Dense pattern ``[query, query, key, key]`` and values ``[path, target, token]``, as above."""
    config, attn, first = m.config, m.blocks[layer].attn, m.blocks[0].attn
    x = rms(m.embed.w_e.detach()[:11])
    half = config.d_qk // 2
    frequencies = torch.tensor([1 / config.rotary_base ** (2 * f / config.d_qk) for f in range(half)]).double()
    scores = []
    for branch in "12":
        q, k = (
            rms(x @ getattr(attn, f"w_{side}{branch}").detach()[n * config.d_qk : (n + 1) * config.d_qk].T)
            for side in "qk"
        )
        angle = (distance * frequencies)[None]
        a, b = q[:, :half], q[:, half:]
        q = torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], 1)
        scores.append(q @ k.T)
    pattern = torch.einsum("ac,bd->abcd", *scores)
    pattern = pattern + pattern.transpose(0, 1)
    pattern = (pattern + pattern.transpose(2, 3)) / 4
    pattern = torch.einsum("abcd,a,b,c,d->abcd", pattern, *[p.sqrt()] * 4)
    rows = slice(n * config.d_head, (n + 1) * config.d_head)
    lamb = float(attn.lamb.detach()) if layer else 0.0
    maps = [(1 - lamb) * attn.w_v.detach()[rows]] + ([lamb * first.w_v.detach()[rows]] if layer else [])
    u = m.unembed.w_u.detach()[:11]
    values = torch.stack([(u - p @ u) @ attn.w_o.detach()[:, rows] @ w @ x.T for w in maps])
    return pattern, torch.einsum("pvt,v,t->pvt", values, p.sqrt(), p.sqrt())


def head_inner(a, b):
    """Inner product of lists ``[(pattern, values) per distance]`` of two heads."""
    return sum((x[0] * y[0]).sum() for x, y in zip(a, b, strict=True)) * (a[0][1] * b[0][1]).sum()


def cosine(ab, aa, bb):
    return ab / (aa * bb).sqrt()


@pytest.mark.parametrize("weights", [None, COUNTS], ids=["equal", "counts"])
def test_every_layer_against_dense_tensors_over_tokens(weights):
    a, b, p, distances = model("released"), model("released", 7), shares(weights), (0, 3)
    found = similarity(a, b, token_weights=weights, distances=distances)
    assert found.parts == ("attention 0", "mlp 0", "attention 1", "mlp 1")
    assert found.basis == "tokens"
    want = []
    for layer in range(2):
        heads = [
            [[head_over_tokens(m, layer, n, p, distance) for distance in distances] for n in range(3)] for m in (a, b)
        ]
        tables = [
            torch.stack([torch.stack([head_inner(x, y) for y in heads[j]]) for x in heads[i]])
            for i, j in ((0, 1), (0, 0), (1, 1))
        ]
        want.append(cosine(*[t.sum() for t in tables]))
        matched = match_heads(*[interp.extract(m).attention[layer] for m in (a, b)], distances, token_weights=weights)
        assert_close(
            matched.similarity,
            tables[0] / tables[1].diagonal().sqrt()[:, None] / tables[2].diagonal().sqrt(),
            scale=1.0,
        )
        assert matched.basis == "tokens"
        x, y = (mlp_over_tokens(m, layer, p) for m in (a, b))
        want.append(cosine((x * y).sum(), x.square().sum(), y.square().sum()))
    assert_close(found.value, torch.stack(want), scale=1.0)
    assert torch.equal(found.error, torch.zeros(4).double())


def test_chance_is_the_value_with_tokens_renamed():
    a, b = model("released"), model("released", 7)
    found = similarity(a, b, seed=3, permutations=2)
    assert found.chance.shape == (2, 4)
    renamed = build(CONFIGS["released"], seed=7)
    renamed.load_state_dict(b.state_dict())
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for w in (renamed.embed.w_e, renamed.unembed.w_u):
            w[:11] = w[order]
    assert_close(found.chance[0], similarity(a, renamed, permutations=0).value, scale=1.0)
    weighted = {"token_weights": 1.0 + torch.arange(11), "seed": 3}
    one, other = similarity(a, b, **weighted, permutations=1), similarity(a, renamed, **weighted, permutations=0)
    assert_close(one.chance[0], other.value, scale=1.0)
    assert similarity(a, b, permutations=0).chance is None
    assert float((found.chance[0] - found.chance[1]).abs().min()) > 0


@pytest.mark.parametrize(("name", "symmetry"), CASES, ids=[f"{s.id}-{name}" for name, s in CASES])
def test_models_that_differ_by_a_symmetry_are_one(name, symmetry):
    a, changed, distances = model(name), symmetry(model(name)), (0, 2)
    same = similarity(a, changed, distances=distances, token_weights=COUNTS, permutations=0).value
    assert_close(same, torch.ones_like(same), roundings=ROUNDINGS)
    after = similarity(model(name, 7), changed, distances=distances, permutations=1)
    value, chance = unrelated(name, distances)
    assert_close(after.value, value, roundings=ROUNDINGS, scale=1.0)
    assert_close(after.chance, chance, roundings=ROUNDINGS, scale=1.0)
    assert float(value.abs().max()) < 0.7  # another seed is no copy
    for layer in range(2):
        matched = match_heads(*[interp.extract(m).attention[layer] for m in (a, changed)], distances)
        values = torch.stack([matched.similarity[pair] for pair in matched.pairs])
        assert_close(values, torch.ones(3).double(), roundings=ROUNDINGS)
        assert ([pair[1] for pair in matched.pairs] == [0, 1, 2]) == (symmetry.id != "N")


def test_two_layers_of_rotated_models_are_unrelated_in_their_coordinates():
    a = model("released")
    nets = [interp.extract(m) for m in (a, SYMMETRIES["R"](a))]
    assert abs(float(similarity(*[net.mlp[0] for net in nets]).value)) < 0.3
    lists = [[net.attention[0].head(n) for n in range(3)] for net in nets]
    raw = match_heads(*lists)
    assert raw.basis == "coordinates as given"
    assert float(raw.similarity.abs().max()) < 0.3


def test_models_of_other_widths_and_kinds_are_compared_in_what_both_have():
    a = model("released")
    wide = build(tiny(norm_eps=0.0, n_layer=2, n_head=2, d_model=44, d_hidden=9, d_qk=6), seed=3)
    found = similarity(a, wide)
    assert found.parts == ("attention 0", "mlp 0", "attention 1", "mlp 1")
    assert_at_most(found.value.abs(), 1.0)
    assert_close(similarity(wide, a).value, found.value, scale=1.0)
    assert match_heads(*[interp.extract(m).attention[1] for m in (a, wide)]).similarity.shape == (3, 2)
    assert similarity(a, model("softmax")).parts == ("mlp 0", "mlp 1")
    assert similarity(model("swiglu"), a).parts == ("attention 0", "attention 1")
    assert_close(similarity(interp.extract(a), a, permutations=0).value, torch.ones(4).double())


def test_float32_models_keep_their_precision():
    a, b = model("released"), model("released", 7)
    single = [interp.extract(m, dtype=torch.float32) for m in (a, b)]
    assert_close(
        similarity(*single, permutations=0).value,
        similarity(a, b, permutations=0).value,
        dtype=torch.float32,
        scale=1.0,
    )
    copy = build(CONFIGS["released"], torch.float32)
    with torch.no_grad():
        for block in copy.blocks:
            for w in (block.mlp.w_l, block.mlp.w_r, block.mlp.w_d, block.mlp.bias):
                w.mul_(1e-20)
    values = similarity(copy, copy, permutations=0).value
    assert_close(values, torch.ones(4).double(), dtype=torch.float32)


def test_fewer_tokens_are_drawn_by_weight():
    a, b = model("released"), model("released", 7)
    one, other = (similarity(a, b, samples=6, seed=seed, permutations=0).value for seed in (1, 2))
    assert float((one - other).abs().max()) > 1e-3
    weights = torch.zeros(11)
    weights[[1, 4, 8]] = torch.tensor([1.0, 2.0, 3.0])
    drawn = similarity(a, b, samples=3, token_weights=weights, permutations=0).value
    assert_close(drawn, similarity(a, b, token_weights=weights, permutations=0).value, scale=1.0)


@pytest.mark.user_error
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a: similarity(a, interp.extract(a).mlp[0]), "a model is compared with a model"),
        (lambda a: similarity(a, a, "sphere"), 'with kind="sym" and without residual'),
        (lambda a: similarity(a, a, residual=True), 'with kind="sym" and without residual'),
        (lambda a: similarity(a, build(tiny(n_layer=3))), "same n_layer, got 2 and 3"),
        (lambda a: similarity(a, build(tiny(n_layer=2, d_vocab_used=12))), r"same d_vocab_used, got \[11, 12\]"),
        (lambda a: similarity(a, a, distances=()), "at least one distance"),
        (lambda a: similarity(a, a, permutations=-1), "permutations must be an integer at least 0"),
        (lambda a: similarity(a, a, samples=1), "samples must be an integer at least 2"),
        (lambda a: similarity(a, a, token_weights=torch.ones(13)), r"one number per token, shape \(11,\)"),
        (lambda a: similarity(model("softmax"), model("swiglu")), "got softmax with bilinear and bilinear with swiglu"),
        (
            lambda a: match_heads(interp.extract(a).attention[0], [interp.extract(a).attention[0].head(0)]),
            "one of each",
        ),
        (lambda a: match_heads(*[interp.extract(model("softmax")).attention[0]] * 2), "needs a polynomial pattern"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(model("released"))
