"""Spectra of every token against dense eigendecompositions; resuming; padding."""

from types import SimpleNamespace

import pytest
import torch

from tests.interp.builders import make_layer, noise
from tests.limits import assert_close, assert_within
from tnlm.interp import BilinearTensor, vocab_bounds, vocab_eigs, vocab_moments


def make_net(d=30, d_hidden=37, d_vocab=43, used=41, dtype=torch.float64, strong=0):
    """Two layers and an unembedding with padding rows; ``strong`` hidden units stand out in each layer."""
    layers = []
    for seed in range(2):
        b = make_layer(d, d, d_hidden, seed=seed) * (1 / d)
        gain = torch.ones(d_hidden).double()
        gain[:strong] = 30
        layers.append(BilinearTensor(b.w_l, b.w_r, b.w_d * gain, b.bias).to(dtype))
    return SimpleNamespace(mlp=layers, unembed=noise(d_vocab, d, seed=9).to(dtype), tokens=range(used))


def test_wide_layers_by_iteration_agree_with_dense_eigenvalues():
    net = make_net(d=523, d_hidden=31, d_vocab=34, used=32, dtype=torch.float32, strong=6)
    pairs = vocab_eigs(net, 1, k=3, progress=False)
    assert pairs.values.shape == (32, 3)
    forms = net.mlp[1].interaction(net.unembed[:32]).double()
    exact = torch.linalg.eigvalsh(forms)
    exact = exact.gather(1, exact.abs().argsort(1, descending=True))
    top = exact[:, :1].abs()
    assert_within((pairs.values.double() - exact[:, :3]) / top, 1e-5)  # the iteration stops there
    vectors = pairs.vectors.double()
    true = (forms @ vectors - vectors * pairs.values.double()[:, None]).norm(dim=1)
    assert float((true / top).max()) < 1.1e-5
    assert bool((true <= pairs.residuals.double() + 1e-6 * top).all())
    assert bool((exact[:, 3].abs() <= pairs.unfound.double() * (1 + 1e-6)).all())


def test_narrow_layers_are_dense_and_exact():
    net = make_net()
    pairs = vocab_eigs(net, 0, k=30, tokens=[5, 40, 2], progress=False)
    forms = net.mlp[0].interaction(net.unembed[[5, 40, 2]])
    assert_close(pairs.vectors @ torch.diag_embed(pairs.values) @ pairs.vectors.mT, forms)
    assert len(vocab_eigs(net, 0, k=1, progress=False).values) == 41


def test_moments_are_sums_over_the_spectrum():
    net = make_net()
    values = torch.linalg.eigvalsh(net.mlp[1].interaction(net.unembed))
    for gram in (None, net.mlp[1].gram("out")):
        m = vocab_moments(net, 1, gram=gram, block=7)
        assert_close(m.trace, values.sum(1))
        assert_close(m.frobenius, values.square().sum(1).sqrt())
    r = vocab_bounds(net, 1)
    assert bool((r.low <= values[:, 0]).all())
    assert bool((r.high >= values[:, -1]).all())


def test_centring_is_over_the_vocabulary_and_leaves_padding_out():
    net = make_net()
    mean = net.unembed[:41].mean(0)
    shifted = SimpleNamespace(mlp=net.mlp, unembed=net.unembed - mean, tokens=net.tokens)
    assert_close(vocab_moments(net, 0, center=True).trace, vocab_moments(shifted, 0).trace)
    assert_close(
        vocab_eigs(net, 0, k=2, center=True, progress=False).values,
        vocab_eigs(shifted, 0, k=2, progress=False).values,
    )
    for one, other in zip(vocab_bounds(net, 0, center=True), vocab_bounds(shifted, 0), strict=True):
        assert_close(one, other)
    # a shift common to all tokens is what softmax cannot see
    moved = SimpleNamespace(mlp=net.mlp, unembed=net.unembed + noise(30, seed=4), tokens=net.tokens)
    assert_close(vocab_moments(moved, 0, center=True).frobenius, vocab_moments(net, 0, center=True).frobenius)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    net = make_net(d=523, d_hidden=7, d_vocab=11, used=10, dtype=torch.float32)
    whole = vocab_eigs(net, 0, k=2, block=4, progress=False)
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
        vocab_eigs(net, 0, k=2, block=4, folder=tmp_path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["layer0-000000.safetensors"]
    resumed = vocab_eigs(net, 0, k=2, block=4, folder=tmp_path, progress=False)
    assert calls == [4, 4, 4, 2]
    for one, other in zip(resumed, whole, strict=True):
        assert torch.equal(one, other)
    for change in ({"k": 3}, {"which": "max"}, {"center": True}, {"tokens": range(9)}):
        with pytest.raises(ValueError, match="block of other weights, tokens or settings; pass an empty folder"):
            vocab_eigs(net, 0, **({"k": 2, "block": 4, "folder": tmp_path, "progress": False} | change))
    net.mlp[0].w_d[0, 0] += 1
    with pytest.raises(ValueError, match="other weights"):
        vocab_eigs(net, 0, k=2, block=4, folder=tmp_path, progress=False)


@pytest.mark.parametrize("d", [30, 523])
def test_every_option_reaches_the_computation(d):
    net = make_net(d=d, d_hidden=7, d_vocab=5, used=4)
    values = torch.linalg.eigvalsh(net.mlp[1].interaction(net.unembed[:4]))
    options = {"k": 2, "progress": False}
    top = values.abs().max()  # wide forms are iterated on until residuals are below 1e-10 of it
    assert_within((vocab_eigs(net, 1, which="max", **options).values - values.flip(1)[:, :2]) / top, 1e-10)
    assert_within((vocab_eigs(net, 1, which="min", **options).values - values[:, :2]) / top, 1e-10)
    if d > 512:
        best, loose, capped, other = (
            vocab_eigs(net, 1, **options, **change) for change in ({}, {"tol": 0.5}, {"max_steps": 3}, {"seed": 1})
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
def test_bad_arguments_are_refused():
    net = make_net()
    complex_net = SimpleNamespace(mlp=[net.mlp[0].to(torch.complex128)], unembed=net.unembed, tokens=net.tokens)
    for call, text in [
        (lambda: vocab_eigs(net, 2, progress=False), "layer must be an integer between 0 and 1, got 2"),
        (lambda: vocab_eigs(net, 0, k=31, progress=False), "k must be an integer between 1 and 30"),
        (lambda: vocab_eigs(net, 0, tokens=[43], progress=False), r"token ids must be in \[0, 43\), got 43"),
        (
            lambda: vocab_eigs(net, 0, max_bytes=99, progress=False),
            "max_bytes=99; pass tokens= or a smaller k",
        ),
        (lambda: vocab_eigs(net, 0, block=0, progress=False), "block must be an integer at least 1"),
        (lambda: vocab_eigs(net, 0, tol=torch.nan, progress=False), "tol must be a finite number > 0, got nan"),
        (lambda: vocab_moments(net, 0, block=0), "block must be an integer at least 1"),
        (lambda: vocab_moments(net, 0, gram=noise(30, 30)), "gram must be symmetric"),
        (
            lambda: vocab_eigs(net.mlp, 0, progress=False),
            "must be an extracted model, got list without mlp, unembed",
        ),
        (lambda: vocab_moments(net, -1), "layer must be an integer between 0 and 1"),
        (lambda: vocab_moments(net, 0, gram=noise(3, 3)), r"gram must have shape \(30, 30\)"),
        (lambda: vocab_bounds(complex_net, 0), "layer 0 must be real for this analysis"),
        (
            lambda: vocab_moments(SimpleNamespace(mlp=net.mlp, unembed=noise(9, 4), tokens=range(9)), 0),
            r"unembed must have shape \(any, 30\), got \(9, 4\)",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
