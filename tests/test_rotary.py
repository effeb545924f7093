"""Rotary tables and rotation: sign, halves, rounding, and dependence on the distance alone."""

import hashlib
import math

import pytest
import torch

from tests.limits import assert_close
from tnlm.rotary import rotary_tables, rotate


def test_tables_by_hand():
    cos, sin = rotary_tables(4, 6, base=100.0)
    for position in range(4):
        for f in range(3):
            angle = position * 100 ** (-2 * f / 6)
            assert_close(cos[position, f], torch.tensor(math.cos(angle)), roundings=4, scale=1 + angle)
            assert_close(sin[position, f], torch.tensor(math.sin(angle)), roundings=4, scale=1 + angle)


def test_rotation_turns_halves_by_minus_the_angle():
    """[a | b] -> [a cos + b sin | -a sin + b cos]: the released sign, over halves and not over neighbours."""
    x = torch.tensor([1.0, 10.0, 0.0, 0.0]).view(1, 1, 1, 4).repeat(1, 2, 1, 1)
    cos, sin = rotary_tables(2, 4)
    out = rotate(x, cos, sin)[0, 1, 0]
    second = 10000**-0.5
    expected = [math.cos(1), 10 * math.cos(second), -math.sin(1), -10 * math.sin(second)]
    assert_close(out, torch.tensor(expected))


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
    cos, sin = (t.double() for t in rotary_tables(40, 8))
    q, k = (rotate(x.expand(1, 40, 3, 8), cos, sin)[0] for x in (q, k))
    scores = torch.einsum("ihd,jhd->hij", q, k)
    assert_close(scores[:, 7, 4], scores[:, 33, 30], dtype=torch.float32)  # the tables are float32
    assert not torch.allclose(scores[:, 7, 4], scores[:, 4, 7], rtol=1e-2)


def test_rotation_keeps_norms():
    x = torch.randn(2, 5, 3, 8)
    assert_close(rotate(x, *rotary_tables(5, 8)).norm(dim=-1), x.norm(dim=-1))


def test_angles_are_formed_in_float32_and_then_rounded():
    """Angles formed in bf16 would be wrong by 1.97 in a cosine; rounding the table costs 0.002."""
    exact, _ = rotary_tables(1024, 64)
    rounded, _ = rotary_tables(1024, 64, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())
    assert 1e-3 < (rounded.float() - exact).abs().max() < 0.00196


@pytest.mark.parametrize(
    "table, digest",
    [
        (0, "387af56a9a3d1f353fbca556e98faceac36941b12c9ace5f4c72cb1ad58fab84"),
        (1, "e37480dda0cd435761a58cf6e275f744ba330c614afefdfdf387c5a0b2c275a8"),
    ],
    ids=["cos", "sin"],
)
def test_tables_of_the_released_size_have_the_bits_of_the_public_code(table, digest):
    """sha256 of the recorded (1024, 64) tables in bf16. The same angles in another order move 65 entries."""
    rounded = rotary_tables(1024, 128, dtype=torch.bfloat16)[table]
    assert hashlib.sha256(rounded.view(torch.uint8).numpy().tobytes()).hexdigest() == digest


def test_compiled_tables_have_the_same_bits():
    eager = rotary_tables(1024, 128, dtype=torch.bfloat16)
    # the operator itself: a checker of annotations, if one is on, does not trace
    tables, place = torch.ops.tnlm.rotary_tables, torch.device("cpu")
    compiled = torch.compile(lambda: tables(1024, 128, 10000.0, torch.bfloat16, place, 0))()
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_rounded_tables_act_in_the_dtype_of_the_activations():
    x = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    cos, sin = rotary_tables(3, 4, dtype=torch.bfloat16)
    out = rotate(x, cos, sin)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, rotate(x, cos.double(), sin.double()), rtol=0, atol=0)
    assert rotate(x.bfloat16(), *rotary_tables(3, 4)).dtype == torch.bfloat16


def test_start_shifts_positions():
    cos, sin = rotary_tables(9, 6)
    late_cos, late_sin = rotary_tables(4, 6, start=5)
    assert torch.equal(late_cos, cos[5:])
    assert torch.equal(late_sin, sin[5:])
