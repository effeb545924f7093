"""Edges between components: the exact null, planted reading, and the order of the residual stream."""

from types import SimpleNamespace

import pytest
import torch

from tests.interp.builders import make_head, make_layer, noise
from tests.limits import assert_close
from tnlm.interp import alignment, edges
from tnlm.interp.discovery.edge_table import overlap


def make_net(attention="bilinear", mlp="bilinear", biases=False):
    d = 7
    width = d + biases
    kind = "bilinear" if attention == "none" else attention
    heads = [[make_head(kind, d_in=width, d_out=d, first=l > 0, seed=3 * l + n) for n in range(2)] for l in range(2)]
    return SimpleNamespace(
        config=SimpleNamespace(n_layer=2, n_head=2, attention=attention, mlp=mlp),
        embed=noise(11, d, seed=1),
        unembed=noise(13, d, seed=2),
        mlp=[make_layer(d, d, 9, seed=l) for l in range(2)],
        attention=[SimpleNamespace(head=lambda n, l=l: heads[l][n]) for l in range(2)],
    )


def cell(rows, writer, reader):
    return rows[(rows["writer"] == writer) & (rows["reader"] == reader)].iloc[0]


def test_haar_null_has_mean_one_and_the_stated_deviation():
    w, r = (m.T @ m for m in (noise(3, 4, seed=1), noise(2, 4, seed=2)))
    q, t = torch.linalg.qr(noise(20_000, 4, 4, seed=3))
    q = q * t.diagonal(dim1=1, dim2=2).sign()[:, None]
    values, z = overlap(q @ w @ q.mT, r)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / 20_000**0.5
    assert abs(float(z.mean())) < 4 / 20_000**0.5
    assert float(z.std()) == pytest.approx(1, rel=0.03)


def test_isotropic_and_zero_components_have_no_orientation():
    eye = torch.eye(4).double()
    values, z = overlap(torch.stack([eye, 0 * eye]), noise(4, 4) @ noise(4, 4).T)
    assert_close(values, torch.ones(2).double())
    assert not z.any()


def test_edges_are_normalised_traces_of_writer_and_reader():
    net = make_net()
    rows = edges(net, distance=1)
    head, mlp = net.attention[1].head(0), net.mlp[0]
    query, write = head.read_gram("q", 1), mlp.gram("out")
    want = 7 * (write * query).sum() / (write.trace() * query.trace())
    assert_close(cell(rows, "mlp 0", "head 1.0 query")["value"], float(want))
    circuits = [head.ov(), head.ov("first")]
    written = sum(c.tensor() @ c.tensor().T for c in circuits)
    logits = net.unembed.T @ net.unembed
    want = 7 * (written * logits).sum() / (written.trace() * logits.trace())
    assert_close(cell(rows, "head 1.0", "unembed")["value"], float(want))
    value = head.ov().tensor()
    want = 7 * (net.embed @ value.T).square().sum() / (net.embed.square().sum() * value.square().sum())
    assert_close(cell(rows, "embed", "head 1.0 value")["value"], float(want))
    read = net.mlp[1].gram("in", logits)
    want = 7 * (write * read).sum() / (write.trace() * read.trace())
    assert_close(cell(edges(net, metric="unembed"), "mlp 0", "mlp 1")["value"], float(want))
    assert rows["value"].is_monotonic_decreasing


def test_only_later_components_read():
    rows = edges(make_net())
    pairs = set(zip(rows["writer"], rows["reader"], strict=True))
    assert ("head 0.1", "mlp 0") in pairs
    assert ("mlp 0", "head 1.1 key") in pairs
    assert not {("mlp 0", "mlp 0"), ("mlp 0", "head 0.0 query"), ("head 0.0", "head 0.1 value")} & pairs
    assert ("head 1.0", "head 0.0 value") not in pairs
    # embed and 2 heads + 1 MLP per layer, read by 6 sides + 1 MLP per layer and the logits
    assert len(rows) == (6 * 1 + 1 * 3) + (6 * 4 + 1 * 6) + 7


def test_a_planted_reader_stands_out():
    net = make_net()
    writer = net.attention[0].head(1)
    query = noise(4, 3, seed=8) @ torch.linalg.qr(writer.o)[0].T
    planted = make_head(d_in=7, d_out=7, seed=4, q1=query, q2=query, k1=noise(4, 7), k2=noise(4, 7, seed=1))
    net.attention[1] = SimpleNamespace(head=lambda n: planted)
    rows = edges(net)
    top = rows[rows["reader"] == "head 1.0 query"].iloc[0]
    assert top["writer"] == "head 0.1"
    assert top["value"] > 1.5


@pytest.mark.parametrize("attention", ["softmax", "differential", "squared"])
def test_other_attentions_are_read_through_their_scores(attention):
    net = make_net(attention)
    rows = edges(net, distance=2)
    head = net.attention[1].head(1)
    if attention == "squared":
        gram = head.read_gram("k", 2)
    else:
        forms = [head.qk(branch, 2).tensor() for branch in ((1,) if attention == "softmax" else (1, 2))]
        gram = sum(w.T @ w for w in forms)
    embed = net.embed.T @ net.embed
    want = 7 * (embed * gram).sum() / (embed.trace() * gram.trace())
    assert_close(cell(rows, "embed", "head 1.1 key")["value"], float(want))


def test_parts_that_are_absent_and_heads_with_biases():
    assert len(edges(make_net(mlp="none"))) == 6 * 1 + 6 * 3 + 5
    assert len(edges(make_net(attention="none"))) == 1 + 2 + 3
    net = make_net(biases=True)
    gram = net.attention[0].head(0).read_gram("q")[1:, 1:]
    embed = net.embed.T @ net.embed
    want = 7 * (embed * gram).sum() / (embed.trace() * gram.trace())
    assert_close(cell(edges(net), "embed", "head 0.0 query")["value"], float(want))


def test_alignment_of_a_direction():
    gram = torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0]).double())
    assert_close(alignment(torch.eye(4).double(), gram), torch.tensor([3.0, 1.0, 0.0, 0.0]).double())
    x = noise(20_000, 4)
    values = alignment(x, gram)
    assert abs(float(values.mean()) - 1) < 4 * float(values.std()) / 20_000**0.5


@pytest.mark.user_error
def test_bad_arguments_are_refused():
    eye = torch.eye(4).double()
    for call, text in [
        (lambda: edges(make_net(), null="gaussian"), "null must be one of 'haar', got 'gaussian'"),
        (lambda: edges(make_net(), distance=float("nan")), "distance must be a finite number, got nan"),
        (lambda: edges(make_net().mlp), "net must be an extracted model, got list without config, embed"),
        (lambda: edges(make_net(), metric="logits"), "metric must be one of 'identity', 'unembed'"),
        (lambda: edges(make_net(), max_bytes=100), r"Grams of all writers of shape \(7, 7, 7\) needs 2,744 bytes"),
        (lambda: alignment(noise(3), eye), r"direction must have shape \(\.\.\., 4\), got \(3,\)"),
        (lambda: alignment(noise(4) * torch.nan, eye), "direction must be finite"),
        (lambda: alignment(noise(4), noise(4, 4)), "gram must be symmetric"),
        (lambda: alignment(0 * noise(4), eye), "non-zero direction"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
