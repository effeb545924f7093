"""Blockwise top-k against sorting the whole matrix, and the table of a path against dense products."""

import sys

import pytest
import torch

from tests.interp.builders import noise
from tests.interp.test_extraction import make
from tests.limits import assert_close
from tests.symmetries import SYMMETRIES
from tnlm.interp import LowRank, extract, path_table, top_tokens
from tnlm.interp.tokens.tables import distinct_tokens

KEYS = {"max": lambda v: -v, "min": lambda v: v, "abs": lambda v: -abs(v)}


def brute(w, ids, k, which, keep_self, by):
    pairs = [(s, t, float(w[t, s])) for s in ids for t in ids if keep_self or s != t]
    pairs.sort(key=lambda p: KEYS[which](p[2]))
    if by == "all":
        return pairs[:k]
    return [p for s in ids for p in [p for p in pairs if p[0] == s][:k]]


@pytest.mark.parametrize("which", ["max", "min", "abs"])
@pytest.mark.parametrize("by", ["source", "all"])
@pytest.mark.parametrize("block", [2**24, 20])
def test_ranking_is_that_of_the_sorted_matrix(monkeypatch, which, by, block):
    monkeypatch.setattr("tnlm.interp.ranking._BLOCK", block)
    factors = LowRank(noise(11, 3), noise(3, 11, seed=1))
    ids = [0, 2, 3, 5, 7, 8, 9]
    for keep_self in (False, True):
        want = brute(factors.tensor(), ids, 4, which, keep_self, by)
        for matrix in (factors, factors.tensor()):
            got = top_tokens(matrix, 4, tokens=ids, by=by, which=which, keep_self=keep_self)
            rows = [tuple(r) for r in got.itertuples(index=False)]
            assert [r[:2] for r in rows] == [r[:2] for r in want]
            assert [r[2] for r in rows] == pytest.approx([r[2] for r in want])


def test_asking_for_more_than_there_is():
    w = noise(5, 5)
    assert len(top_tokens(w, 99, by="all")) == 20
    assert len(top_tokens(w, 99)) == 20
    assert len(top_tokens(w, 3, tokens=torch.tensor([], dtype=torch.long))) == 0


def test_without_pandas_the_table_is_a_list(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    w = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    assert top_tokens(w, 1) == [(0, 1, 1.0), (1, 0, 2.0)]
    assert top_tokens(w, 1)[0]._fields == ("source", "target", "value")


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda w: top_tokens(noise(5, 4), 1), r"matrix must be square, one row and column per token id, got \(5, 4\)"),
        (lambda w: top_tokens(LowRank(noise(5, 2), noise(2, 4)), 1), "matrix must be square"),
        (lambda w: top_tokens(w * torch.nan, 1), "matrix must be finite"),
        (lambda w: top_tokens(noise(5, 5, dtype=torch.complex128), 1), "matrix must be real to be ranked"),
        (lambda w: top_tokens(w, 0), "k must be an integer at least 1"),
        (lambda w: top_tokens(w, 1, by="target"), "by must be one of 'source', 'all'"),
        (lambda w: top_tokens(w, 1, which="top"), "which must be one of"),
        (lambda w: top_tokens(w, 1, tokens=[1, -1]), r"token ids must be in \[0, 5\), got -1 at position 1"),
        (lambda w: top_tokens(w, 1, tokens=[1, 2, 1]), "token ids must differ, got 1 repeated"),
        (lambda w: top_tokens(w, 1, tokens=[1.0]), "tokens must be a vector of integer ids"),
        (lambda w: top_tokens(w, 1, tokens=torch.ones(5, dtype=torch.bool)), "tokens must be a vector of integer ids"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    w = noise(5, 5)
    with pytest.raises(ValueError, match=text):
        call(w)


def dense_path(model, layer, path, weights=None):
    """The table ``[target, source]`` of all ids in use by loops over tokens, its targets centred."""
    c, blocks = model.config, model.blocks
    n = c.d_vocab_used
    share = torch.ones(n, dtype=torch.float64) / n if weights is None else weights.double() / weights.sum()
    w_u = model.unembed.w_u.detach()[:n]
    w_u = w_u - share @ w_u

    def rms(x):
        return x / (x @ x / c.d_model + c.norm_eps).sqrt()

    def bare(token, layer):
        x0 = rms(model.embed.w_e[token])
        x = x0
        for block in blocks[: layer + 1]:
            x = block.lambdas[0] * x + block.lambdas[1] * x0
        return x

    columns = []
    for token in range(n):
        x = rms(bare(token, layer))
        if path == "direct":
            written = bare(token, c.n_layer - 1)
        elif path == "mlp":
            mlp = blocks[layer].mlp
            trace = mlp.w_d @ (mlp.w_l * mlp.w_r).sum(1)
            written = mlp.w_d @ ((mlp.w_l @ x) * (mlp.w_r @ x)) - trace * (x @ x) / c.d_model
        else:
            rows = slice(path * c.d_head, (path + 1) * c.d_head)
            mix = blocks[layer].attn.lamb if layer else 0.0
            value = (1 - mix) * blocks[layer].attn.w_v[rows] @ x
            value = value + mix * blocks[0].attn.w_v[rows] @ rms(bare(token, 0))
            written = blocks[layer].attn.w_o[:, rows] @ value
        for later in blocks[layer + 1 :] if path != "direct" else ():
            written = written * later.lambdas[0]
        columns.append(w_u @ written.detach())
    return torch.stack(columns, 1)


def assert_path_table(path, layer=1, weights=None):
    net = extract(make(d_vocab_used=9))
    dense = dense_path(net.model, layer, path, weights)
    ids = range(9) if weights is None else [t for t in range(9) if weights[t]]
    rows = path_table(net, layer, path, top=2, keep_self=True, weights=weights).to_dict("records")
    assert [row["source"] for row in rows] == [s for s in ids for _ in range(2)]
    for source in ids:
        best = sorted(ids, key=lambda t: -float(dense[t, source]))[:2]
        found = [row for row in rows if row["source"] == source]
        assert [row["target"] for row in found] == best
        assert_close([row["value"] for row in found], [float(dense[t, source]) for t in best])


@pytest.mark.parametrize("path", [1, "mlp", "direct"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_path_tables_are_dense_products_without_padding(path, layer):
    assert_path_table(path, layer)


@pytest.mark.parametrize("path", [1, "mlp", "direct"])
def test_counted_tokens_weigh_the_mean_and_those_that_never_occur_are_left_out(path):
    assert_path_table(path, weights=torch.tensor([5, 0, 1, 0, 9, 2, 2, 1, 7]))


def test_parallel_and_dead_rows_are_one_token_and_padding_is_none():
    model = make(d_vocab_used=9)
    with torch.no_grad():
        used = model.unembed.w_u[:9]
        used[[3, 6, 7, 8]] = torch.tensor([1.0, 2, 3, 4]).double()[:, None] * -used[[0, 1, 2, 4, 5]].sum(0) / 10
        model.unembed.w_u += torch.randn(30, dtype=torch.float64)  # what all rows share hides that four are parallel
        model.unembed.w_u[9:] *= 1e3
    net = extract(model)
    ids = distinct_tokens(net)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert distinct_tokens(net, torch.tensor([1, 1, 1, 0, 1, 1, 2, 0, 0])).tolist() == [0, 1, 2, 4, 5, 6]
    table = path_table(net, 1, 0, top=100, by="all", which="abs")
    assert set(table.source) | set(table.target) <= set(ids.tolist())


@pytest.mark.parametrize("path", [1, "mlp", "direct"])
@pytest.mark.parametrize("id", ["R", "E", "P", "U", "Q", "QR", "V", "L", "H", "S"])
def test_path_tables_do_not_move_under_symmetries(id, path):
    model = make(norm_eps=0.0, d_vocab_used=9, logit_softcap=None)
    before, after = (path_table(extract(m), 1, path, top=3) for m in (model, SYMMETRIES[id](model)))
    assert before[["source", "target"]].equals(after[["source", "target"]])
    assert_close(after.value.tolist(), before.value.tolist(), roundings=2**20)
