"""Ablations replace what they name and nothing else; costs are paired by sequence."""

import pytest
import torch

from tests.interp.test_extraction import make
from tests.limits import assert_close
from tnlm.interp.extraction import extract
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.predictions.ablation import ablate, ablation_edits, delta_ce, with_mlp
from tnlm.points import record
from tnlm.text.evaluate import cross_entropy


def test_zero_ablating_an_mlp_equals_a_model_without_it():
    model, tokens = make(), torch.randint(0, 11, (3, 6))
    without = make()
    without.load_state_dict(model.state_dict())
    with torch.no_grad():
        without.blocks[1].mlp.w_d.zero_()
        without.blocks[1].mlp.bias.zero_()
    assert_close(ablate(model, tokens, "blocks.1.hook_mlp_out", "zero"), without(tokens).detach())


def test_one_head_is_replaced_and_the_others_kept():
    model, tokens = make(), torch.randint(0, 11, (3, 6))
    without = make()
    without.load_state_dict(model.state_dict())
    with torch.no_grad():
        without.blocks[1].attn.w_o[:, 10:20].zero_()
    out = ablate(model, tokens, ("blocks.1.attn.hook_z", 1), "zero")
    assert_close(out, without(tokens).detach())
    both = ablate(model, tokens, [("blocks.1.attn.hook_z", 1), ("blocks.1.attn.hook_z", 0)], "zero")
    assert not torch.allclose(both, out)


def test_mean_and_resample_take_values_of_the_reference():
    model, tokens = make(), torch.randint(0, 11, (3, 6))
    reference = torch.randint(0, 11, (4, 6))
    name = "blocks.0.hook_mlp_out"
    value = record(model, reference, [name])[name]
    edits = ablation_edits(extract(model), tokens, name, "mean", reference=reference)
    assert_close(edits[name](torch.zeros(3, 6, 30, dtype=torch.float64))[1, 2], value.mean((0, 1)))
    same = record(model, tokens, [name])[name]
    resampled = ablation_edits(model, tokens, name, "resample", seed=1)[name](same)
    for row in range(3):
        matches = [other for other in range(3) if torch.equal(resampled[row], same[other])]
        assert len(matches) == 1
        assert matches[0] != row
    again = ablation_edits(model, tokens, name, "resample", seed=1)[name](same)
    torch.testing.assert_close(again, resampled, rtol=0, atol=0)


def test_ablating_a_pattern_changes_the_logits_and_leaves_no_hook():
    model, tokens = make(), torch.randint(0, 11, (2, 6))
    before = model(tokens)
    out = ablate(model, tokens, ("blocks.1.attn.hook_pattern", 2), "zero")
    assert (out - before).abs().max() > 1e-3
    assert_close(out, ablate(model, tokens, ("blocks.1.attn.hook_z", 2), "zero"))
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)


def test_delta_ce_is_the_paired_difference_of_cross_entropies():
    model, tokens = make(), torch.randint(0, 11, (5, 8))
    net = extract(model)
    edited = with_mlp(model, {1: net.mlp[1] * 0.5})
    cost = delta_ce(net, edited, tokens, batch_size=2)
    assert_close(cost.base, cross_entropy(model, tokens).loss)
    assert_close(cost.edited, cross_entropy(edited, tokens).loss)
    assert_close(cost.mean, cost.edited - cost.base)
    assert cost.kl > 0
    assert cost.error is not None
    assert cost.error > 0
    nothing = delta_ce(net, {}, tokens)
    assert (nothing.mean, nothing.kl) == (0, 0)
    one = delta_ce(net, ablation_edits(model, tokens[:1, :-1], "blocks.1.hook_mlp_out", "zero"), tokens[:1])
    assert one.error is None


def test_replacing_an_mlp_by_its_own_tensor_changes_nothing_and_shares_the_rest():
    for kind in ("bilinear", "squared"):
        model, tokens = make(kind), torch.randint(0, 11, (2, 6))
        copy = with_mlp(model, {0: extract(model).mlp[0]})
        assert_close(copy(tokens), model(tokens))
        assert copy.unembed.w_u is model.unembed.w_u
        assert copy.blocks[0].mlp is not model.blocks[0].mlp


@pytest.mark.user_error
def test_bad_requests_are_refused():
    model, tokens = make(), torch.randint(0, 11, (2, 6))
    with pytest.raises(ValueError, match=r"no point 'blocks.1.hook_mlp'; close: .*hook_mlp_out"):
        ablate(model, tokens, "blocks.1.hook_mlp", "zero")
    with pytest.raises(ValueError, match=r"head must be in \[0, 3\), got 3"):
        ablate(model, tokens, ("blocks.1.attn.hook_z", 3), "zero")
    with pytest.raises(
        ValueError, match=r"^blocks.1.hook_mlp_out has no head axis, its shape is \(2, 6, 30\); ablate the whole point$"
    ):
        ablate(model, tokens, ("blocks.1.hook_mlp_out", 1), "zero")
    with pytest.raises(ValueError, match=r"^how must be one of 'zero', 'mean', 'resample', got 'noise'$"):
        ablate(model, tokens, "blocks.1.hook_mlp_out", "noise")
    with pytest.raises(ValueError, match="needs another row"):
        ablate(model, tokens[:1], "blocks.1.hook_mlp_out", "resample")
    with pytest.raises(ValueError, match="seq=6 tokens, got 5"):
        ablate(model, tokens, "blocks.1.hook_mlp_out", "resample", reference=tokens[:, :5])
    with pytest.raises(ValueError, match=r"^the model has no MLP at layer 3; layers are 0\.\.2$"):
        with_mlp(model, {3: extract(model).mlp[0]})
    narrow = BilinearTensor(*(torch.randn(s, dtype=torch.float64) for s in ((4, 5), (4, 5), (5, 4))))
    with pytest.raises(ValueError, match="must map d_model=30 to itself, got 5 to 5"):
        with_mlp(model, {0: narrow})
    with pytest.raises(
        ValueError, match=r"tokens must be \(rows, seq \+ 1\) with at least one target each, got \(6,\)"
    ):
        delta_ce(model, {}, tokens[0])
    with pytest.raises(ValueError, match="what must name at least one point, got none"):
        ablate(model, tokens, [])
    with pytest.raises(ValueError, match=r"points, as names or \(name, head\), got \('blocks.1.attn.hook_z', 1.5\)"):
        ablate(model, tokens, ("blocks.1.attn.hook_z", 1.5))
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 11\), got 11 at row 1"):
        delta_ce(model, {}, torch.tensor([[1, 2], [3, 11]]))
    with pytest.raises(ValueError, match="batch_size must be an integer at least 1, got 0"):
        delta_ce(model, {}, tokens, batch_size=0)
    with pytest.raises(ValueError, match="edited must be a model or edits by point, got NoneType"):
        delta_ce(model, None, tokens)
    with pytest.raises(ValueError, match="the layer must be a BilinearTensor, got MLP"):
        with_mlp(model, {0: model.blocks[0].mlp})


def test_results_that_are_not_finite_are_no_results():
    model, tokens, broken = make(), torch.randint(0, 11, (2, 6)), make()
    with torch.no_grad():
        broken.blocks[1].mlp.w_l[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the logits must be finite"):
        ablate(broken, tokens, "blocks.2.hook_mlp_out", "zero")
    with pytest.raises(ValueError, match="logits of the edited model must be finite"):
        delta_ce(model, broken, tokens)
    with pytest.raises(ValueError, match="logits of the model must be finite"):
        delta_ce(broken, model, tokens)
