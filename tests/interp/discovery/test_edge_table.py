"""Edges between components: tables by loops over tokens, the exact nulls, planted circuits, every symmetry."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import tnlm
from tests.interp.builders import noise
from tests.limits import assert_close
from tests.symmetries import SYMMETRIES
from tests.tiny_models import PURE, build, build_mixed, tiny
from tnlm import interp
from tnlm.config import ModelConfig
from tnlm.interp import alignment, edges
from tnlm.interp.discovery.edge_table import overlap, same_token

TRAINED = Path(__file__).resolve().parents[3].parent / "shared" / "golden" / "trained_induction"
COUNTS = torch.tensor([5, 1, 0, 2, 9, 4, 0, 3, 7, 1, 6])
CONFIGS = {
    "released": tiny(norm_eps=0.0),
    "no softcap": tiny(norm_eps=0.0, logit_softcap=None, n_layer=2),
    "squared": tiny(norm_eps=0.0, mlp="squared", attention="squared", qk_bias=True, n_layer=2),
    "softmax": tiny(norm_eps=0.0, mlp="none", attention="softmax", n_layer=2),
    "differential": tiny(norm_eps=0.0, mlp="none", attention="differential", n_layer=2),
    "rows": tiny(norm_eps=0.0, mlp="none", attention="squared_normalized", n_layer=2),
    "no mixing": tiny(norm_eps=0.0, x0_mixing=False, value_residual=False, qk_norm=False, n_layer=2),
    "pure": ModelConfig.pure(**PURE),
    "MLP only": tiny(norm_eps=0.0, attention="none"),
}
MIXED = ModelConfig.pure(**PURE, x0_mixing=True, value_residual=True)
CASES = [(name, s) for name, c in CONFIGS.items() for s in SYMMETRIES.values() if s.holds(c)]


@cache
def model(name):
    return build_mixed(CONFIGS[name])


@cache
def table_of(name, weighted=False):
    return edges(interp.extract(model(name)), token_weights=COUNTS if weighted else None)


def cell(rows, writer, reader):
    found = rows[(rows["writer"] == writer) & (rows["reader"] == reader)]
    assert len(found) == 1
    return found.iloc[0]


def cosine_by_loops(table, weights):
    """Weighted correlation of a table with the identity after its two margins are taken out, pair by pair."""
    p = [float(w) / float(sum(weights)) for w in weights]
    n = range(len(p))

    def rest(entry):
        rows = [sum(p[j] * entry(i, j) for j in n) for i in n]
        columns = [sum(p[i] * entry(i, j) for i in n) for j in n]
        mean = sum(p[i] * rows[i] for i in n)
        return [[entry(i, j) - rows[i] - columns[j] + mean for j in n] for i in n]

    def dot(a, b):
        return sum(p[i] * p[j] * a[i][j] * b[i][j] for i in n for j in n)

    t, same = rest(lambda i, j: float(table[i][j])), rest(lambda i, j: float(i == j))
    return dot(t, same) / math.sqrt(dot(t, t) * dot(same, same))


def rms(x):
    return x / x.square().mean().sqrt()


@cache
def released_by_hand():
    """Writes of some components of the released model on each token alone, and its parameters."""
    p = {name: value.detach() for name, value in model("released").named_parameters()}
    reach = [1.0]  # of x0 in the stream of every layer
    for layer in range(3):
        a, b = p[f"blocks.{layer}.lambdas"].tolist()
        reach.append(a * reach[-1] + b)
    x0 = [rms(row) for row in p["embed.w_e"][:11]]
    x = [[rms(reach[layer + 1] * row) for row in x0] for layer in range(3)]
    rows, writes = slice(10, 20), {}  # head 1
    w_v, w_v0, w_o = p["blocks.1.attn.w_v"][rows], p["blocks.0.attn.w_v"][rows], p["blocks.1.attn.w_o"][:, rows]
    lamb = float(p["blocks.1.attn.lamb"])
    writes["head 1.1"] = [w_o @ ((1 - lamb) * w_v @ x[1][t] + lamb * w_v0 @ x[0][t]) for t in range(11)]
    mlp = {name: p[f"blocks.0.mlp.{name}"] for name in ("w_l", "w_r", "w_d", "bias")}
    writes["mlp 0"] = [mlp["w_d"] @ ((mlp["w_l"] @ y) * (mlp["w_r"] @ y)) + mlp["bias"] for y in x[0]]
    return p, x, writes


def turned(y, position, config):
    a, b = y[: len(y) // 2], y[len(y) // 2 :]
    # published tables hold float32 frequencies
    frequencies = torch.tensor([1 / config.rotary_base ** (2 * f / config.d_qk) for f in range(len(a))])
    angle = frequencies.double() * position
    return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("writer", ["head 1.1", "mlp 0"])
def test_every_side_against_loops_over_pairs_of_tokens(writer, weighted):
    p, x, writes = released_by_hand()
    config, weights = CONFIGS["released"], COUNTS if weighted else torch.ones(11)
    kept = [t for t in range(11) if weights[t]]
    factor = float(p["blocks.2.lambdas"][0]) * (float(p["blocks.1.lambdas"][0]) if writer == "mlp 0" else 1)
    read = [rms(factor * writes[writer][t]) for t in kept]
    others = [x[2][t] for t in kept]
    n, rows = len(kept), slice(8, 12)  # queries and keys of head 2

    def pattern(query, key, distance=3):
        value = 1.0
        for branch in "12":
            q = rms(p[f"blocks.2.attn.w_q{branch}"][rows] @ query)
            k = rms(p[f"blocks.2.attn.w_k{branch}"][rows] @ key)
            value *= float(turned(q, 7 + distance, config) @ turned(k, 7, config))
        return value

    u = p["unembed.w_u"]
    w_v, w_o = p["blocks.2.attn.w_v"][20:30], p["blocks.2.attn.w_o"][:, 20:30]
    mlp = {name: p[f"blocks.2.mlp.{name}"] for name in ("w_l", "w_r", "w_d", "bias")}
    heads = {
        "head 2.2 query": [[pattern(read[j], others[i]) for j in range(n)] for i in range(n)],
        "head 2.2 key": [[pattern(others[i], read[j]) for j in range(n)] for i in range(n)],
        "head 2.2 value": [[float(u[kept[i]] @ (w_o @ (w_v @ read[j]))) for j in range(n)] for i in range(n)],
        "unembed": [[float(u[kept[i]] @ read[j]) for j in range(n)] for i in range(n)],
        "mlp 2": [
            [float(u[kept[i]] @ (mlp["w_d"] @ ((mlp["w_l"] @ y) * (mlp["w_r"] @ y)) + mlp["bias"])) for y in read]
            for i in range(n)
        ],
    }
    found = edges(interp.extract(model("released")), distance=3, token_weights=weights if weighted else None)
    share = [float(weights[t]) / float(weights.sum()) for t in kept]
    for reader, table in heads.items():
        row = cell(found, writer, reader)
        want = cosine_by_loops(table, [weights[t] for t in kept])
        assert_close(row["value"], want, scale=1.0)
        assert_close(row["z"], want * (1 / sum(s * s for s in share) - 1), scale=11.0)
    first = cell(found, "embed", "head 2.2 first value")
    w_v0 = p["blocks.0.attn.w_v"][20:30]
    table = [[float(u[i] @ (w_o @ (w_v0 @ x[0][j]))) for j in kept] for i in kept]
    lamb_sign = math.copysign(1.0, float(p["blocks.2.attn.lamb"]))
    assert_close(first["value"], lamb_sign * cosine_by_loops(table, [weights[t] for t in kept]), scale=1.0)


@pytest.mark.parametrize("kind", ["softmax", "differential"])
def test_softmax_heads_are_read_through_their_scores(kind):
    net = interp.extract(model(kind))
    head, x = net.attention[0].head(1), net.x0[:11]
    mix = float(net.scalars.differential[0]) if kind == "differential" else 0.0
    scores = [head.token_table(x, n, "q") @ head.token_table(x, n, "k").T for n in (1, 2)[: 1 + (kind != "softmax")]]
    table = scores[0] - mix * scores[-1]
    assert kind == "softmax" or abs(mix) > 1e-3
    want = cosine_by_loops(table.tolist(), torch.ones(11))
    assert_close(cell(table_of(kind), "embed", "head 0.1 key")["value"], want, scale=1.0)


def test_without_norms_a_layer_reads_the_embedding_as_often_as_it_was_mixed_in():
    p = {name: value.detach() for name, value in build(MIXED).named_parameters()}
    once = p["blocks.0.lambdas"].sum()
    twice = p["blocks.1.lambdas"][0] * once + p["blocks.1.lambdas"][1]
    assert abs(float(twice / once) - 1) > 0.1
    x0, u, rows = p["embed.w_e"][:11], p["unembed.w_u"][:11], slice(4, 8)  # head 1
    own, first = (x0 @ p[f"blocks.{layer}.attn.w_v"][rows].T for layer in (1, 0))
    lamb = p["blocks.1.attn.lamb"]
    written = ((1 - lamb) * twice * own + lamb * once * first) @ p["blocks.1.attn.w_o"][:, rows].T
    row = cell(edges(interp.extract(build(MIXED))), "head 1.1", "unembed")
    assert_close(row["value"], cosine_by_loops(u @ written.T, torch.ones(11)), scale=1.0)


def test_a_branch_that_reads_nothing_leaves_the_overlap_to_the_other():
    built, rows = build(CONFIGS["differential"]), slice(4, 8)  # head 1
    attn = built.blocks[0].attn
    with torch.no_grad():
        attn.w_q2[rows] = 0
    form = (attn.w_q1[rows].T @ attn.w_k1[rows]).detach()
    reads = form.T @ form
    x = torch.stack([rms(row) for row in built.embed.w_e.detach()[:11]])
    written = (x - x.mean(0)).T @ (x - x.mean(0))
    want = 30 * (written * reads).sum() / (written.trace() * reads.trace())
    assert_close(cell(edges(interp.extract(built)), "embed", "head 0.1 key")["overlap"], float(want), scale=30.0)


def test_overlap_is_of_the_variation_between_tokens_and_of_centred_logits():
    p, _, writes = released_by_hand()
    net = interp.extract(model("released"))
    share = COUNTS.double() / COUNTS.sum()
    read = torch.stack([rms(w) for w in writes["mlp 0"]])
    written = sum(s * torch.outer(r, r) for s, r in zip(share, read - share @ read, strict=True))
    u = p["unembed.w_u"][:11]
    logits = sum(s * torch.outer(r, r) for s, r in zip(share, u - share @ u, strict=True))

    def want(reader):
        return float(30 * (written * reader).sum() / (written.trace() * reader.trace()))

    rows = table_of("released", weighted=True)
    assert_close(cell(rows, "mlp 0", "unembed")["overlap"], want(logits), scale=30.0)
    ov = net.attention[1].head(2).ov().tensor()
    assert_close(cell(rows, "mlp 0", "head 1.2 value")["overlap"], want(ov.T @ logits @ ov), scale=30.0)
    s = replace(net.mlp[2].canonical(), bias=None).tensor()
    assert_close(
        cell(rows, "mlp 0", "mlp 2")["overlap"], want(torch.einsum("oij,op,pkj->ik", s, logits, s)), scale=30.0
    )
    a = net.attention[2].head(1).pattern_tensor()
    assert_close(cell(rows, "mlp 0", "head 2.1 key")["overlap"], want(torch.einsum("ijkl,ijml->km", a, a)), scale=30.0)


@pytest.mark.parametrize(("name", "symmetry"), CASES, ids=[f"{s.id}-{name}" for name, s in CASES])
def test_no_symmetry_moves_an_edge(name, symmetry):
    index = ["writer", "reader"]
    changed = edges(interp.extract(symmetry(model(name)))).set_index(index)
    rows = table_of(name).set_index(index)
    if symmetry.id == "N":  # the same rows under other names of heads
        assert float((changed.loc[rows.index] - rows).abs().max().max()) > 0.1
        got, want = (torch.tensor(r.to_numpy()).sort(0).values for r in (changed, rows))
    else:
        got, want = (torch.tensor(r.loc[rows.index].to_numpy()) for r in (changed, rows))
    # weights of the change have condition numbers up to about 100, models without norms cancel as much
    assert_close(got, want, roundings=2**20, scale=100.0)


def test_uniform_z_is_that_of_all_permutations():
    table = noise(5, 5)
    value, z = same_token(table, torch.full((5,), 0.2, dtype=torch.float64))
    match = interp.match(table)
    assert_close(z, match.z, scale=4.0)
    assert_close(value, match.z / 4, scale=1.0)
    assert_close(same_token(torch.eye(4).double(), torch.full((4,), 0.25, dtype=torch.float64)), (1.0, 3.0))
    # tokens without weight are not there
    part = same_token(table[:3, :3], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert_close(same_token(table, torch.tensor([1, 1, 1, 0, 0]).double() / 3), part, scale=4.0)
    assert same_token(torch.arange(5.0)[:, None] + torch.arange(5.0), torch.full((5,), 0.2)) == (0.0, 0.0)


def test_haar_null_has_mean_one_and_the_stated_deviation():
    w, r = (m.T @ m for m in (noise(3, 4, seed=1), noise(2, 4, seed=2)))
    q, t = torch.linalg.qr(noise(20_000, 4, 4, seed=3))
    q = q * t.diagonal(dim1=1, dim2=2).sign()[:, None]
    values, z = overlap(q @ w @ q.mT, r)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / 20_000**0.5
    assert abs(float(z.mean())) < 4 / 20_000**0.5
    assert float(z.std()) == pytest.approx(1, rel=0.03)
    small = overlap(1e-30 * w[None].float(), 1e-35 * r.float())
    assert_close(torch.stack(small), torch.stack(overlap(w[None], r)), dtype=torch.float32, scale=4.0)


def test_isotropic_and_zero_components_have_no_orientation():
    eye = torch.eye(4).double()
    values, z = overlap(torch.stack([eye, 0 * eye]), noise(4, 4) @ noise(4, 4).T)
    assert_close(values, torch.ones(2).double())
    assert not z.any()


def test_only_later_components_read():
    rows = table_of("no mixing")
    pairs = set(zip(rows["writer"], rows["reader"], strict=True))
    assert ("head 0.1", "mlp 0") in pairs
    assert ("mlp 0", "head 1.1 key") in pairs
    assert not {("mlp 0", "mlp 0"), ("mlp 0", "head 0.0 query"), ("head 0.0", "head 0.1 value")} & pairs
    # embed and 3 heads + 1 MLP per layer, read by 9 sides + 1 MLP per layer and the logits
    assert len(rows) == (9 * 1 + 1 * 4) + (9 * 5 + 1 * 8) + 9
    assert len(table_of("MLP only")) == 1 + 2 + 3 + 4
    assert len(table_of("softmax")) == 9 * 1 + (9 * 4 + 3 * 1) + 7  # and the values of block 0, of the embedding alone
    assert rows["z"].abs().is_monotonic_decreasing


def planted():
    """Head 0.2 writes a code of the token; head 1.1 asks for the code of its own token on the key side."""
    config = ModelConfig.pure(
        d_vocab=13, d_vocab_used=11, n_layer=2, n_head=3, d_model=30, d_qk=10, n_ctx=17, d_hidden=0, mlp="none"
    )
    built = build(config)
    code = noise(10, 11, seed=5)
    with torch.no_grad():
        first, second = (b.attn for b in built.blocks)
        x = built.embed.w_e[:11]
        rows, reading = slice(20, 30), slice(10, 20)
        basis = torch.linalg.qr(noise(30, 30, seed=6))[0]
        first.w_v[rows] = code @ torch.linalg.pinv(x.T)
        first.w_o[:, rows] = basis[:, :10]
        for name in ("q1", "q2"):
            getattr(second, f"w_{name}")[reading] = code @ torch.linalg.pinv(x.T)
        for name in ("k1", "k2"):
            getattr(second, f"w_{name}")[reading] = basis[:, :10].T
    return built


def test_a_planted_composition_stands_out():
    rows = edges(interp.extract(planted()))
    heads = rows[rows["writer"].str.startswith("head") & rows["reader"].str.startswith("head 1")]
    top = heads.iloc[0]
    assert (top["writer"], top["reader"]) == ("head 0.2", "head 1.1 key")
    assert top["value"] > 0.6
    assert top["overlap"] > 2  # the key side reads the 10 dimensions of 30 that head 0.2 writes, and no others
    assert top["overlap_z"] > 3
    assert cell(rows, "head 0.1", "head 1.1 key")["overlap"] < 1.5


def test_the_circuit_of_a_trained_induction_model_leads_the_table():
    if not TRAINED.exists():
        pytest.skip("the trained induction model lies beside the repository, in ../shared/golden")
    net = interp.extract(tnlm.load(TRAINED, dtype=torch.float64))
    rows = edges(net)
    assert tuple(rows.iloc[0][["writer", "reader"]]) == ("head 0.0", "head 1.0 key")
    x = net.x0
    table = interp.pattern_table(net.attention[1].head(0), x, (net.attention[0].head(0).ov() @ x.mT).mT)
    assert_close(rows.iloc[0]["z"], interp.match(table).z)
    assert rows.iloc[0]["z"] < -20
    assert abs(cell(rows, "embed", "head 1.0 key")["z"]) < 2  # not the bare token


def test_tokens_are_drawn_by_weight_and_parallel_ones_count_once():
    built = build(CONFIGS["no mixing"])
    with torch.no_grad():
        built.unembed.w_u[[2, 6]] = built.unembed.w_u[[0]]
    net = interp.extract(built)
    weights = torch.ones(11)
    weights[[2, 6]] = 0
    index = ["writer", "reader"]
    whole, part = (edges(net, token_weights=w).set_index(index) for w in (None, weights))
    # the mean row is taken before the copies go: of the patterns, which see no unembedding, nothing moves
    rows = whole.index[whole.index.get_level_values(1).str.endswith(("query", "key"))]
    assert_close(torch.tensor(whole.loc[rows].to_numpy()), torch.tensor(part.loc[rows].to_numpy()), scale=100.0)
    few = edges(net, token_weights=COUNTS, samples=6, seed=1)
    assert_close(float((few["z"] / few["value"]).max()), 5.0)
    assert not few.equals(edges(net, token_weights=COUNTS, samples=6, seed=2))
    lone = torch.zeros(11)
    lone[[0, 3, 4]] = torch.tensor([1.0, 2.0, 3.0])
    drawn = edges(net, token_weights=lone, samples=2, seed=3).set_index(index)
    wanted = [torch.zeros(11).index_fill(0, torch.tensor(pair), 1.0) for pair in ([0, 3], [0, 4], [3, 4])]
    tables = [edges(net, token_weights=w).set_index(index) for w in wanted]
    assert any(float((t.loc[drawn.index] - drawn).abs().max().max()) < 1e-6 for t in tables)


def test_alignment_of_a_direction():
    gram = torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0]).double())
    assert_close(alignment(torch.eye(4).double(), gram), torch.tensor([3.0, 1.0, 0.0, 0.0]).double())
    x = noise(20_000, 4)
    values = alignment(x, gram)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / 20_000**0.5


NET = interp.extract(model("no mixing"))
EYE = torch.eye(4).double()


@pytest.mark.user_error
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: edges(NET, distance=float("nan")), "distance must be a finite number, got nan"),
        (lambda: edges([NET]), "net must be an extracted model, got list without config"),
        (lambda: edges(NET, samples=1), "samples must be an integer at least 2"),
        (lambda: edges(NET, token_weights=torch.ones(13)), r"one number per token, shape \(11,\), got \(13,\)"),
        (lambda: edges(NET, token_weights=torch.eye(11)[0]), "at least 2 tokens must differ and have a weight, got 1"),
        (lambda: edges(NET, max_bytes=100), r"Grams of all writers of shape \(9, 30, 30\) needs 64,800 bytes"),
        (lambda: edges(interp.extract(build(tiny(mlp="swiglu")))), "swiglu MLP is not polynomial"),
        (lambda: alignment(noise(3), EYE), r"direction must have shape \(\.\.\., 4\), got \(3,\)"),
        (lambda: alignment(noise(4) * torch.nan, EYE), "direction must be finite"),
        (lambda: alignment(noise(4), noise(4, 4)), "gram must be symmetric"),
        (lambda: alignment(0 * noise(4), EYE), "non-zero direction"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
