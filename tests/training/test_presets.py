"""Presets: sizes against the published parameter counts."""

import subprocess
import sys

import pytest

from tnlm.training.config import TrainConfig
from tnlm.training.presets import PRESETS, preset


# Parameters of the published settings with one query-key pair and with two; two of them are recorded in public logs.
@pytest.mark.parametrize(
    "name, one_pair, two_pairs",
    [
        ("tiny", 6_424_082, 7_210_514),
        ("debug-relu2", 30_475_794, 31_262_226),
        ("small", 190_522_404, 204_678_180),
        ("small-relu2", 162_210_852, 176_366_628),
        ("medium", 498_127_158, 545_902_902),
        ("medium-relu2", 522_019_900, 587_555_900),
        ("large", 1_060_540_488, 1_173_786_696),
        ("large-relu2", 1_031_350_606, 1_175_333_198),
    ],
)
def test_parameter_counts_are_the_published_ones(name, one_pair, two_pairs):
    assert preset(name, attention="softmax").model.n_params == one_pair
    assert preset(name, attention="bilinear").model.n_params == two_pairs


def test_matched_attention_has_the_parameters_and_flops_of_softmax():
    softmax, matched = preset("medium", attention="softmax"), preset("medium", matched=True)
    assert matched.model.d_qk == 64
    assert matched.model.n_params == softmax.model.n_params
    assert matched.model.flops_per_token() == softmax.model.flops_per_token() == pytest.approx(2.896e9, rel=1e-3)
    assert preset("medium").model.flops_per_token() / softmax.model.flops_per_token() == pytest.approx(1.143, abs=1e-3)
    with pytest.raises(ValueError, match="two query-key pairs, got attention='softmax'"):
        softmax.matched()


def test_the_comparison_has_the_published_batch_and_schedule():
    medium = preset("medium")
    assert medium.tokens_per_step == 524_288
    assert medium.tokens_per_step * medium.steps == 5_099_225_088
    assert (medium.warmup_steps, medium.warmdown_steps) == (0, 3704)
    assert (medium.val_every, medium.val_tokens) == (125, 10_485_760)
    assert (medium.lr_embed, medium.lr_head, medium.lr_matrix, medium.lr_scalar) == (0.3, 0.002, 0.02, 0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_carry_their_name_and_survive_json(name):
    config = preset(name)
    assert config.preset == name
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", ["nano-pure", "nano-attention-only"])
def test_pure_presets_are_polynomials(name):
    assert preset(name).model.polynomial
    assert not preset("nano").model.polynomial


def test_presets_import_no_torch():
    code = "import sys, tnlm.training.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
