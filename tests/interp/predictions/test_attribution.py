"""Shares of a logit among writers sum to it, and are the form's coefficients."""

import itertools
import math

import pytest
import torch

from tests.interp.predictions.known import PROMPT, TARGET, known_model
from tests.interp.test_extraction import make
from tests.limits import assert_close
from tests.symmetries import SYMMETRIES
from tnlm.interp.extraction import extract
from tnlm.interp.predictions.attribution import attribute

KINDS = [
    ("bilinear", "bilinear"),
    ("squared", "squared"),
    ("bilinear", "softmax"),
    ("bilinear", "none"),
    ("none", "bilinear"),
]


@pytest.mark.parametrize("mlp, attention", KINDS)
@pytest.mark.parametrize("method", ["pairs", "shapley"])
def test_shares_sum_to_the_logit(mlp, attention, method):
    model, tokens = make(mlp, attention), torch.randint(0, 11, (7,))
    shares = attribute(model, tokens, 4, method)
    expected = model.pre_softcap(tokens[None])[0, -1, 4]
    assert_close(shares.values.sum(), expected.detach())
    assert len(shares.names) == len(shares.values)


@pytest.mark.parametrize("changes", [{"final_norm": False}, {"mlp_hidden_bias": True}])
def test_shares_without_final_norm_or_with_hidden_biases(changes):
    model, tokens = make(**changes), torch.randint(0, 11, (7,))
    expected = model.pre_softcap(tokens[None])[0, -1, 4].detach()
    shares = attribute(model, tokens, 4).values
    assert_close(shares.sum(), expected, scale=shares.abs().sum())


def test_unexpanded_mlps_are_writers_with_a_direct_path():
    model, tokens = make("swiglu", "softmax"), torch.randint(0, 11, (7,))
    shares = attribute(model, tokens, 4)
    assert_close(shares.values.sum(), model.pre_softcap(tokens[None])[0, -1, 4].detach())
    one = attribute(make(), tokens, 4, layers=[2])
    mlp0 = one.names.index("L0.MLP")
    assert one.values[0, mlp0] != 0
    assert one.values[0, one.names.index("L2.MLP")] == 0


def test_shapley_equals_the_average_over_orders():
    model = make("bilinear", "none", pure=True)
    tokens = torch.randint(0, 11, (3,))
    pairs = attribute(model, tokens, 4).values
    shares = attribute(model, tokens, 4, "shapley").values
    players = range(1, len(pairs))

    def worth(members):
        kept = torch.tensor([0, *members])
        return pairs[kept][:, kept].sum()

    average = torch.zeros(len(pairs), dtype=pairs.dtype)
    for order in itertools.permutations(players):
        for i, player in enumerate(order):
            average[player] += worth(order[: i + 1]) - worth(order[:i])
    average /= math.factorial(len(players))
    average[0] = worth(())
    assert_close(shares, average)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda model: attribute(model, torch.tensor([1]), 2, layers=[3]),
            "every one of layers must be an integer between 0 and 2, got 3",
        ),
        (lambda model: attribute(model, torch.tensor([1]), 11), "target must be a token id"),
        (lambda model: attribute(model, torch.tensor([1]), 1.5), r"target must be a token id in \[0, 11\), got 1.5"),
        (lambda model: attribute(model, [1], 1), r"tokens must be text or a torch tensor \(seq,\), got list"),
        (lambda model: attribute(model, torch.tensor([[1], [2]]), 1), "one prompt"),
        (lambda model: attribute(model, torch.tensor([1]), 1, "ig"), "method must be one of"),
        (
            lambda model: attribute(extract(make("swiglu")), torch.tensor([1]), 1, layers=[0]),
            "swiglu MLP is not polynomial",
        ),
    ],
)
def test_bad_requests_are_refused(call, text):
    model = make()
    with pytest.raises(ValueError, match=text):
        call(model)


def test_every_pair_of_the_known_model():
    """Every entry of the known model's matrix of pairs, by name; the others are 0."""
    found = attribute(known_model(), PROMPT, TARGET)
    heads = [f"H{n}" for n in range(3)]
    parts = [f"L{layer}.{part}" for layer in range(2) for part in (*heads, "MLP")]
    assert found.names == ("constant", "embed", *parts)
    entries = {
        (found.names[i], found.names[j]): float(found.values[i, j])
        for i, j in (found.values.abs() > 1e-6).nonzero().tolist()
        if i <= j
    }
    expected = {("constant", "embed"): 0.25, ("embed", "embed"): -6.0, ("constant", "L1.H2"): -1.5}
    assert entries.keys() == expected.keys()
    assert_close(entries, {pair: expected[pair] for pair in entries}, dtype=torch.float32)


def test_every_shapley_share_of_the_known_model():
    """Every Shapley share of the known model, by name."""
    found = attribute(known_model(), PROMPT, TARGET, "shapley")
    shares = {name: float(value) for name, value in zip(found.names, found.values, strict=True) if abs(value) > 1e-6}
    assert shares.keys() == {"embed", "L1.H2"}
    assert_close([shares["embed"], shares["L1.H2"]], [-5.5, -3.0], dtype=torch.float32)


@pytest.mark.parametrize("id", ["R", "E", "P", "Q", "QR", "V", "L", "X", "H", "S"])
def test_shares_do_not_move_under_symmetries(id):
    model, tokens = make(norm_eps=0.0, d_vocab_used=9), torch.randint(0, 9, (6,))
    for method in ("pairs", "shapley"):
        before, after = (attribute(m, tokens, 4, method) for m in (model, SYMMETRIES[id](model)))
        assert after.names == before.names
        assert_close(after.values, before.values, scale=before.values.abs().sum(), roundings=2**20)
