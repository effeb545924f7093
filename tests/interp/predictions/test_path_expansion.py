"""Path coefficients sum to the logit and are what the layers compose to."""

import pytest
import torch

from tests.interp.test_extraction import make
from tests.limits import assert_close
from tnlm.interp.predictions.path_expansion import paths


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize(
    ("branches", "shape"),
    [
        (["blocks.2.hook_mlp_out"], (2,)),
        (["blocks.2.hook_attn_out", "blocks.2.hook_mlp_out"], (3, 2)),
        (["blocks.1.hook_mlp_out"], (11,)),
    ],
)
def test_coefficients_sum_to_the_logit(pure, branches, shape):
    model, tokens = make(pure=pure), torch.randint(0, 11, (5,))
    found = paths(model, tokens, 3, branches)
    expected = model.pre_softcap(tokens[None])[0, -1, 3].detach()
    assert_close(found.values.sum(), expected, scale=float(found.values.abs().sum()))
    assert found.values.shape == shape


def test_degree_two_part_of_an_attention_branch_is_the_mlp_reading_it_twice():
    model, tokens = make(pure=True, x0_mixing=False), torch.randint(0, 11, (5,))
    found = paths(model, tokens, 3, ["blocks.2.hook_attn_out"]).values
    from tnlm.points import record

    attn = record(model, tokens[None], ["blocks.2.hook_attn_out"])["blocks.2.hook_attn_out"][0, -1]
    mlp = model.blocks[2].mlp
    twice = model.unembed.w_u[3] @ (mlp(attn) - mlp.bias)
    assert_close(found[2], twice.detach(), scale=float(found.abs().max()))


def test_embedding_branch_splits_a_one_layer_model_by_degree():
    model, tokens = make(pure=True, n_layer=1, mlp_bias=False), torch.randint(0, 11, (4,))
    found = paths(model, tokens, 3, ["hook_embed"]).values
    assert len(found) == 11
    scaled = make(pure=True, n_layer=1, mlp_bias=False)
    scaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        scaled.embed.w_e.mul_(0.5)
    powers = 0.5 ** torch.arange(11, dtype=torch.float64)
    expected = scaled.pre_softcap(tokens[None])[0, -1, 3].detach()
    assert_close((found * powers).sum(), expected)


@pytest.mark.user_error
def test_bad_branches_are_refused():
    model, tokens = make(), torch.randint(0, 11, (4,))
    with pytest.raises(ValueError, match="need 101 forwards, more than max_forwards=100"):
        paths(model, tokens, 3, ["blocks.0.hook_mlp_out"], max_forwards=100)
    with pytest.raises(ValueError, match=r"branches are hook_embed, blocks\.l\.hook_attn_out"):
        paths(model, tokens, 3, ["blocks.0.attn.hook_z"])
    with pytest.raises(ValueError, match="branches must differ"):
        paths(model, tokens, 3, ["blocks.2.hook_mlp_out"] * 2)
    with pytest.raises(ValueError, match=r"target must be a token id in \[0, 11\), got 11"):
        paths(model, tokens, 11, ["blocks.2.hook_mlp_out"])
    with pytest.raises(ValueError, match="paths need polynomial layers"):
        paths(make("swiglu"), tokens, 3, ["blocks.2.hook_mlp_out"])
