"""Degrees and coefficients of polynomial maps, read off values."""

import pytest
import torch

from tests.interp.builders import make_layer, noise
from tests.limits import assert_close
from tnlm.interp import degrees, polynomial_coefficients


def test_degrees_of_two_residual_layers():
    f1, f2 = make_layer(5, 5, 7, bias=False, seed=1), make_layer(5, 5, 6, bias=False, seed=2)
    x = noise(3, 5, seed=3)

    def network(x):
        r = x + f1(x)
        return r + f2(r)

    parts = degrees(network, x, 4)
    assert parts.shape == (5, 3, 5)
    assert not parts.is_complex()
    scale = float(parts.abs().max())  # all are interpolated from the same values
    assert_close(parts.sum(0), network(x))
    assert_close(parts[4], f2(f1(x)))
    assert_close(parts[1], x, scale=scale)
    assert_close(parts[2], f1(x) + f2(x), scale=scale)
    assert_close(parts[0], torch.zeros_like(x), scale=scale)
    assert_close(degrees(network, x, 6)[5:], torch.zeros(2, 3, 5).double(), scale=scale)


def test_degrees_of_complex_inputs_and_float32():
    b = make_layer(seed=1)
    z = noise(2, 5, dtype=torch.complex128)
    parts = degrees(b, z, 2)
    assert_close(parts[2] + parts[0], b(z))
    assert_close(parts[0], b.bias.to(z).expand(2, 3))
    single = degrees(b.to(torch.float32), noise(2, 5).float(), 2)
    assert single.dtype == torch.float32


def test_degrees_refuses_what_is_no_polynomial():
    f, x = make_layer(), noise(5)
    with pytest.raises(
        ValueError, match=r"no polynomial of degree \[1\]: off the nodes .*hold the norms of the run fixed"
    ):
        degrees(f, noise(5), 1)
    with pytest.raises(ValueError, match=r"no polynomial of degree \[6\]: off the nodes they differ by \S+ at scale "):
        degrees(lambda x: x / (x * x).mean().sqrt(), noise(5), 6)
    with pytest.raises(
        ValueError, match=f"^a real polynomial has real parts, got an imaginary residue of {x.abs().max():.3g}$"
    ):
        degrees(lambda x: 1j * x, x, 1)


def test_coefficients_are_paths():
    f1, f2, x = make_layer(5, 5, 7, bias=False, seed=1), make_layer(5, 5, 6, bias=False, seed=2), noise(5, seed=3)

    def scaled(g):
        r = x.to(g) + g[0] * f1(x)
        return r + g[1] * f2(r)

    paths = polynomial_coefficients(scaled, [2, 1])
    assert paths.shape == (3, 2, 5)
    assert_close(paths.sum((0, 1)).real, scaled(torch.ones(2).to(torch.complex128)).real)
    assert_close(paths[2, 1].real, f2(f1(x)))
    assert_close(paths[0, 0].real, x)
    assert_close(paths[1, 0].real, f1(x))
    assert_close(paths[0, 1].real, f2(x))
    assert_close(paths[2, 0], torch.zeros(5).to(paths), scale=float(paths.abs().max()))
    with pytest.raises(ValueError, match=r"no polynomial of degree \[1, 1\]"):
        polynomial_coefficients(scaled, [1, 1])


@pytest.mark.user_error
def test_bad_arguments_are_refused():
    for call, text in [
        (lambda: degrees(torch.square, noise(5) * torch.nan, 2), "x must be finite"),
        (lambda: degrees(torch.square, noise(5), -1), "n must be an integer at least 0"),
        (lambda: degrees(lambda x: x * torch.nan, noise(5), 2), "no polynomial"),
        (lambda: polynomial_coefficients(torch.sum, []), "at least one variable, got none"),
        (lambda: polynomial_coefficients(torch.sum, [1.5]), "degree must be an integer"),
        (
            lambda: polynomial_coefficients(torch.sum, [1], dtype=torch.float64),
            "dtype must be complex, got torch.float64",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
