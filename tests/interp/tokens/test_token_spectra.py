"""Spectra of every token against dense eigendecompositions; resuming; padding."""

from types import SimpleNamespace

import pytest
import torch

from tests.interp.builders import dense, make_layer, noise, on_sphere, shifted, sphere_points
from tests.limits import assert_close, assert_within
from tnlm.interp import BilinearTensor, vocab_bounds, vocab_eigs, vocab_moments


def make_net(d=30, d_hidden=37, d_vocab=43, used=41, dtype=torch.float64, strong=0, domain="space"):
    """Two layers and an unembedding with padding rows; ``strong`` hidden units stand out in each layer."""
    layers = []
    for seed in range(2):
        b = make_layer(d, d, d_hidden, seed=seed) * (1 / d)
        gain = torch.ones(d_hidden).double()
        gain[:strong] = 30
        layers.append(BilinearTensor(b.w_l, b.w_r, b.w_d * gain, b.bias, domain=domain).to(dtype))
    return SimpleNamespace(mlp=layers, unembed=noise(d_vocab, d, seed=9).to(dtype), tokens=range(used))


def forms_of(net, layer, weights=None):
    """Dense form of every centred row of the ids in use, by the definition; on the sphere without its trace."""
    rows = net.unembed[: len(net.tokens)].double()
    w = torch.ones(len(rows)).double() if weights is None else weights.double()
    rows = rows - (w[:, None] * rows).sum(0) / w.sum()
    b = net.mlp[layer].to(torch.float64)
    q = torch.einsum("to,oij->tij", rows, dense(b))
    traces = q.diagonal(dim1=1, dim2=2).sum(-1)
    if b.domain == "sphere":
        q = q - traces[:, None, None] / b.d_in * torch.eye(b.d_in).double()
    return q, traces + rows @ b.bias


def test_wide_layers_by_iteration_agree_with_dense_eigenvalues():
    net = make_net(d=523, d_hidden=31, d_vocab=34, used=32, dtype=torch.float32, strong=6)
    pairs = vocab_eigs(net, 1, k=3, progress=False)
    assert pairs.values.shape == (32, 3)
    forms, _ = forms_of(net, 1)
    exact = torch.linalg.eigvalsh(forms)
    exact = exact.gather(1, exact.abs().argsort(1, descending=True))
    top = exact[:, :1].abs()
    assert_within((pairs.values.double() - exact[:, :3]) / top, 1e-5)  # the iteration stops there
    vectors = pairs.vectors.double()
    true = (forms @ vectors - vectors * pairs.values.double()[:, None]).norm(dim=1)
    assert float((true / top).max()) < 1.1e-5
    assert bool((true <= pairs.residuals.double() + 1e-6 * top).all())
    assert bool((exact[:, 3].abs() <= pairs.unfound.double()).all())


def test_narrow_layers_are_dense_and_exact():
    net = make_net()
    pairs = vocab_eigs(net, 0, k=30, tokens=[5, 40, 2], progress=False)
    forms = forms_of(net, 0)[0][[5, 40, 2]]
    assert_close(pairs.vectors @ torch.diag_embed(pairs.values) @ pairs.vectors.mT, forms)
    assert len(vocab_eigs(net, 0, k=1, progress=False).values) == 41


@pytest.mark.parametrize("domain", ["space", "sphere"])
def test_moments_are_sums_over_the_spectrum(domain):
    net = make_net(domain=domain)
    counts = torch.arange(41)
    for weights in (None, counts):
        forms, means = forms_of(net, 1, weights)
        values = torch.linalg.eigvalsh(forms)
        for gram in (None, net.mlp[1].gram("out")):
            m = vocab_moments(net, 1, gram=gram, block=7, weights=weights)
            assert_close(m.mean, means)
            assert_close(m.frobenius, values.square().sum(1).sqrt())
    x = sphere_points(4096, 30, seed=3)
    added = net.mlp[1](x) @ (net.unembed[7] - counts.double() @ net.unembed[:41] / counts.sum())
    # means of 4,096 samples, five standard errors
    assert abs(float(added.mean() - m.mean[7])) <= 5 * float(added.std()) / 64
    if domain == "sphere":
        assert float(added.std() / m.frobenius[7]) == pytest.approx((60 / 32) ** 0.5, rel=0.1)
    r = vocab_bounds(net, 1, weights=counts)
    assert bool((r.low <= values[:, 0]).all())
    assert bool((r.high >= values[:, -1]).all())


def test_centring_is_over_the_ids_in_use_and_weighs_them():
    net, counts = make_net(domain="sphere"), torch.arange(41)
    for weights in (None, counts):
        values = torch.linalg.eigvalsh(forms_of(net, 0, weights)[0])
        top = values.gather(1, values.abs().argsort(1, descending=True))[:, :2]
        assert_close(vocab_eigs(net, 0, k=2, weights=weights, progress=False).values, top)
    rows = net.unembed[:41]
    assert_close(vocab_moments(net, 0, center=False).mean, rows @ (net.mlp[0].traces() + net.mlp[0].bias))
    # neither padding nor a shift common to all tokens, which softmax does not see, is read
    unembed = net.unembed + noise(30, seed=4)
    unembed[41:] = 100
    moved = SimpleNamespace(mlp=net.mlp, unembed=unembed, tokens=net.tokens)
    scale = 30 * float(vocab_moments(net, 0, center=False).frobenius.max())
    for function in (vocab_moments, vocab_bounds):
        for one, other in zip(function(net, 0), function(moved, 0), strict=True):
            assert_close(one, other, scale=scale)


def test_nothing_moves_under_a_multiple_of_the_identity():
    net = make_net(domain="sphere")
    c = noise(30, seed=6)
    other = SimpleNamespace(mlp=[shifted(b, c) for b in net.mlp], unembed=net.unembed, tokens=net.tokens)
    scale = 30 * float(c.norm() * net.unembed.norm(dim=1).max())
    for function in (vocab_moments, vocab_bounds):
        for one, moved in zip(function(net, 1), function(other, 1), strict=True):
            # norms are roots of differences of squares
            assert_within(one - moved, 1e-6 * scale)
    one, moved = (vocab_eigs(n, 1, k=3, progress=False).values for n in (net, other))
    assert_close(one, moved, scale=scale)


@pytest.mark.parametrize("domain", ["space", "sphere"])
def test_bounds_are_certified_in_float32(domain):
    """A large trace, and rows whose forms have nearly equal eigenvalues: rounding must not bring an end inside."""
    for c in (0.0, 100.0):
        net = make_net(dtype=torch.float32, domain=domain)
        net.mlp = [shifted(b, torch.full((30,), c)) for b in net.mlp]
        r = vocab_bounds(net, 0, center=False)
        q = torch.einsum("to,oij->tij", net.unembed[:41].double(), dense(net.mlp[0].to(torch.float64)))
        if domain == "sphere":
            q = q - q.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(30).double()
        values = torch.linalg.eigvalsh(q)
        assert bool((r.low.double() <= values[:, 0]).all())
        assert bool((r.high.double() >= values[:, -1]).all())


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    net = make_net(d=523, d_hidden=7, d_vocab=19, used=18, dtype=torch.float32)
    whole = vocab_eigs(net, 0, k=2, block=7, progress=False)
    calls = []
    import tnlm.interp.tokens.token_spectra as vocab

    real = vocab.krylov

    def counted(b, rows, *args, **kwargs):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(b, rows, *args, **kwargs)

    monkeypatch.setattr(vocab, "krylov", counted)
    with pytest.raises(KeyboardInterrupt):
        vocab_eigs(net, 0, k=2, block=7, folder=tmp_path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["layer0-000000.safetensors"]
    resumed = vocab_eigs(net, 0, k=2, block=7, folder=tmp_path, progress=False)
    assert calls == [7, 7, 7, 4]
    for one, other in zip(resumed, whole, strict=True):
        assert torch.equal(one, other)
    for change in ({"k": 3}, {"which": "max"}, {"center": False}, {"tokens": range(17)}):
        with pytest.raises(ValueError, match="block of other weights, tokens or settings; pass an empty folder"):
            vocab_eigs(net, 0, **({"k": 2, "block": 7, "folder": tmp_path, "progress": False} | change))
    sphere = SimpleNamespace(mlp=[on_sphere(net.mlp[0])], unembed=net.unembed, tokens=net.tokens)
    with pytest.raises(ValueError, match="other weights"):
        vocab_eigs(sphere, 0, k=2, block=7, folder=tmp_path, progress=False)
    net.mlp[0].w_d[0, 0] += 1
    with pytest.raises(ValueError, match="other weights"):
        vocab_eigs(net, 0, k=2, block=7, folder=tmp_path, progress=False)


@pytest.mark.parametrize("d", [30, 523])
def test_every_option_reaches_the_computation(d):
    net = make_net(d=d, d_hidden=7, d_vocab=17, used=16)
    values = torch.linalg.eigvalsh(forms_of(net, 1)[0])
    options = {"k": 2, "progress": False, "tol": 1e-10}
    top = values.abs().max()  # wide forms are iterated on until residuals, which bound errors, are below 1e-10 of it
    assert_within((vocab_eigs(net, 1, which="max", **options).values - values.flip(1)[:, :2]) / top, 1e-10)
    assert_within((vocab_eigs(net, 1, which="min", **options).values - values[:, :2]) / top, 1e-10)
    if d > 512:
        best, loose, capped, other = (
            vocab_eigs(net, 1, **(options | change)) for change in ({}, {"tol": 0.5}, {"max_steps": 3}, {"seed": 1})
        )
        assert float(loose.residuals.max()) > 10 * float(best.residuals.max())
        assert float(capped.residuals.max()) > 10 * float(best.residuals.max())
        assert not torch.equal(other.vectors, best.vectors)


def test_a_block_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    import safetensors.torch

    net, real = make_net(), safetensors.torch.save_file

    def cut_short(tensors, path, **kwargs):
        real(tensors, path, **kwargs)
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", cut_short)
        with pytest.raises(KeyboardInterrupt):
            vocab_eigs(net, 0, k=2, folder=tmp_path, progress=False)
    resumed = vocab_eigs(net, 0, k=2, folder=tmp_path, progress=False)
    assert torch.equal(resumed.values, vocab_eigs(net, 0, k=2, progress=False).values)


@pytest.mark.user_error
@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_damaged_block_is_named(tmp_path, kept):
    net = make_net()
    vocab_eigs(net, 0, k=2, block=20, folder=tmp_path, progress=False)
    path = sorted(tmp_path.iterdir())[1]
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{path.name} must hold a finished block, but is damaged .*; delete it"):
        vocab_eigs(net, 0, k=2, block=20, folder=tmp_path, progress=False)
    path.unlink()
    vocab_eigs(net, 0, k=2, block=20, folder=tmp_path, progress=False)


def test_progress_goes_to_stderr(capsys):
    vocab_eigs(make_net(), 0, k=1, block=20)
    assert capsys.readouterr().out == ""


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda net, complex_net: vocab_eigs(net, 2, progress=False),
            "layer must be an integer between 0 and 1, got 2",
        ),
        (lambda net, complex_net: vocab_eigs(net, 0, k=31, progress=False), "k must be an integer between 1 and 30"),
        (
            lambda net, complex_net: vocab_eigs(net, 0, tokens=[43], progress=False),
            r"token ids must be in \[0, 41\), got 43",
        ),
        (
            lambda net, complex_net: vocab_eigs(net, 0, max_bytes=99, progress=False),
            "max_bytes=99; pass tokens= or a smaller k",
        ),
        (lambda net, complex_net: vocab_eigs(net, 0, block=0, progress=False), "block must be an integer at least 1"),
        (
            lambda net, complex_net: vocab_eigs(net, 0, tol=torch.nan, progress=False),
            "tol must be a finite number > 0, got nan",
        ),
        (lambda net, complex_net: vocab_moments(net, 0, block=0), "block must be an integer at least 1"),
        (lambda net, complex_net: vocab_moments(net, 0, gram=noise(30, 30)), "gram must be symmetric"),
        (
            lambda net, complex_net: vocab_eigs(net.mlp, 0, progress=False),
            "must be an extracted model, got list without mlp, unembed",
        ),
        (lambda net, complex_net: vocab_moments(net, -1), "layer must be an integer between 0 and 1"),
        (lambda net, complex_net: vocab_moments(net, 0, gram=noise(3, 3)), r"gram must have shape \(30, 30\)"),
        (lambda net, complex_net: vocab_bounds(complex_net, 0), "layer 0 must be real for this analysis"),
        (
            lambda net, complex_net: vocab_moments(
                SimpleNamespace(mlp=net.mlp, unembed=noise(9, 4), tokens=range(9)), 0
            ),
            r"unembed must have shape \(any, 30\), got \(9, 4\)",
        ),
    ],
)
def test_bad_arguments_are_refused(call, text):
    net = make_net()
    complex_net = SimpleNamespace(mlp=[net.mlp[0].to(torch.complex128)], unembed=net.unembed, tokens=net.tokens)
    with pytest.raises(ValueError, match=text):
        call(net, complex_net)
