"""Every symmetry leaves the predictions of random and of trained models alone; what looks like one does not."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from tests.limits import assert_close
from tests.symmetries import SYMMETRIES, Symmetry, copy_of, kept, permute_heads, turn_residual
from tests.tiny_models import PURE, build_mixed, ids, tiny
from tnlm.config import ModelConfig
from tnlm.transformer import Transformer

# the forward of one model and of the changed one, each through some hundred roundings per layer; weights of the change
# have condition numbers up to about ten
ROUNDINGS = 2**16
CONFIGS = {
    "released": tiny(norm_eps=0.0),
    "no softcap": tiny(norm_eps=0.0, logit_softcap=None, n_layer=2),
    "squared": tiny(norm_eps=0.0, mlp="squared", attention="squared", qk_bias=True),
    "squared, no QK-norm": tiny(norm_eps=0.0, mlp="squared", attention="squared", qk_norm=False, qk_bias=True),
    "rows": tiny(norm_eps=0.0, attention="squared_normalized", mlp="relu2"),
    "softmax": tiny(norm_eps=0.0, attention="softmax", mlp="swiglu", value_residual=False),
    "differential": tiny(norm_eps=0.0, attention="differential", mlp="geglu", mlp_hidden_bias=True),
    "no mixing": tiny(norm_eps=0.0, x0_mixing=False, value_residual=False, qk_norm=False),
    "pure": ModelConfig.pure(**PURE),
    "pure, biases": ModelConfig.pure(**PURE, qk_bias=True, mlp_hidden_bias=True),
    "attention only": tiny(norm_eps=0.0, mlp="none"),
    "MLP only": tiny(norm_eps=0.0, attention="none"),
    "two attention layers": ModelConfig.pure(
        **(PURE | {"n_head": 1, "d_hidden": 0}), mlp="none", x0_mixing=False, value_residual=False
    ),
}


@cache
def random_model(name: str) -> Transformer:
    return build_mixed(CONFIGS[name])


@cache
def trained_model(name: str) -> Transformer:
    """A model trained for some steps to repeat a token after its successor, so that its weights are no noise."""
    torch.manual_seed(0)
    model = Transformer(CONFIGS[name], dtype=torch.float64)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    order = torch.randperm(11)
    for step in range(60):
        start = ids(16, 1, seed=step)
        tokens = order[(start + torch.arange(9)) % 11]
        tokens[:, 4] = start[:, 0]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


CASES = [
    (name, symmetry) for name, config in CONFIGS.items() for symmetry in SYMMETRIES.values() if symmetry.holds(config)
]


def _difference(model: Transformer, symmetry: Symmetry, seed: int = 0) -> float:
    tokens = ids(2, 9)
    before, after = (kept(m, tokens, symmetry.kept) for m in (model, symmetry(model, seed)))
    return float((after - before).abs().max())


@pytest.mark.parametrize(("name", "symmetry"), CASES, ids=[f"{s.id}-{name}" for name, s in CASES])
def test_a_symmetry_changes_weights_and_leaves_predictions_alone(name, symmetry):
    for model in (random_model(name), *([trained_model(name)] if name in ("released", "no softcap", "pure") else [])):
        before = {name: p.clone() for name, p in model.state_dict().items()}
        changed = symmetry(model)
        state = changed.state_dict()
        assert any(p.shape != before[n].shape or not torch.equal(p, before[n]) for n, p in state.items())
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
        tokens = ids(2, 9)
        want, got = (kept(m, tokens, symmetry.kept) for m in (model, changed))
        assert_close(got, want, roundings=ROUNDINGS)
        assert float(want.std()) > 1e-3


@pytest.mark.parametrize("symmetry", [s for s in SYMMETRIES.values() if s.eps], ids=lambda s: s.id)
def test_what_a_symmetry_moves_is_proportional_to_norm_eps(symmetry):
    moved = []
    for eps in (1e-6, 1e-8):
        model = Transformer(replace(CONFIGS["released"], norm_eps=eps), dtype=torch.float64)
        model.load_state_dict(random_model("released").state_dict())
        moved.append(_difference(model, symmetry))
    assert 90 < moved[0] / moved[1] < 110


@pytest.mark.parametrize(
    ("id", "name"), [("U", "released"), ("E", "pure"), ("X", "no mixing"), ("S", "rows"), ("L", "softmax")]
)
def test_a_symmetry_that_does_not_hold_is_refused(id, name):
    with pytest.raises(AssertionError, match=f"{id} does not hold"):
        SYMMETRIES[id](random_model(name))


def _changed(name: str, change) -> float:
    model = random_model(name)
    other = copy_of(model)
    with torch.no_grad():
        change(other)
    tokens = ids(2, 9)
    return float((kept(other, tokens, "logits of text") - kept(model, tokens, "logits of text")).abs().max())


def test_what_is_no_symmetry_moves_predictions():
    generator = torch.Generator().manual_seed(0)
    invertible = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    assert _changed("pure", lambda m: turn_residual(m, invertible)) < 1e-9
    wide = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    assert _changed("released", lambda m: turn_residual(m, wide)) > 1e-3  # norms see the lengths
    assert _changed("released", lambda m: permute_heads(m, 1, [2, 0, 1])) > 1e-3  # in one layer alone
    assert _changed("softmax", lambda m: permute_heads(m, 1, [2, 0, 1])) < 1e-12  # no values of block 0
    assert _changed("released", lambda m: m.unembed.w_u.add_(0.5)) > 1e-3  # softcap
    assert _changed("released", lambda m: m.blocks[1].attn.lamb.mul_(1.5)) > 1e-3
    assert _changed("released", lambda m: m.blocks[0].attn.lamb.mul_(1.5)) < 1e-12


def test_padding_columns_take_part_in_the_softmax_of_all_columns():
    model = random_model("released")
    changed = SYMMETRIES["P"](model)
    tokens = ids(2, 9)
    whole = [kept(m, tokens, "log-probabilities")[..., :11] for m in (model, changed)]
    text = [kept(m, tokens, "logits of text").log_softmax(-1) for m in (model, changed)]
    assert float((whole[0] - whole[1]).abs().max()) > 1e-3
    assert torch.equal(*text)


@pytest.mark.parametrize(
    ("id", "name", "plant"),
    [
        ("R", "released", lambda m: m.blocks[1].mlp.w_d.copy_(m.blocks[1].mlp.w_d.flip(0))),
        ("QR", "pure", lambda m: m.blocks[0].attn.w_k1[:2].neg_()),
        ("L", "released", lambda m: m.blocks[1].attn.w_v.mul_(1 - m.blocks[1].attn.lamb)),
        ("H", "released", lambda m: m.blocks[0].mlp.w_d.copy_(m.blocks[0].mlp.w_d.flip(1))),
        ("S", "released", lambda m: m.blocks[2].mlp.bias.mul_(0.5)),
        ("X", "released", lambda m: m.blocks[1].lambdas.copy_(m.blocks[1].lambdas.flip(0))),
        ("V", "released", lambda m: m.blocks[1].attn.w_o.copy_(m.blocks[1].attn.w_o.flip(1))),
        ("N", "released", lambda m: permute_heads(m, 2, [1, 0, 2])),
        ("Q", "no mixing", lambda m: m.blocks[0].attn.w_k2.mul_(1.1)),
    ],
)
def test_a_planted_fault_in_a_symmetry_shows(id, name, plant):
    symmetry = SYMMETRIES[id]

    def change(model, generator):
        symmetry.change(model, generator)
        plant(model)

    assert _difference(random_model(name), symmetry) < 1e-9
    assert _difference(random_model(name), replace(symmetry, change=change)) > 1e-4


def test_vectors_turn_with_the_residual_stream():
    model, rotation = random_model("released"), SYMMETRIES["R"]
    turned = rotation(model, seed=3)
    vectors = model.embed.w_e.detach()
    assert_close(rotation.turn(vectors, seed=3), turned.embed.w_e.detach(), roundings=64)
    assert torch.equal(SYMMETRIES["H"].turn(vectors), vectors)
