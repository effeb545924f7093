"""Presets: sizes against the published parameter counts, and what a configuration refuses."""

import subprocess
import sys

import pytest

from tnlm.training.presets import PRESETS, TrainConfig, load_config, preset


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


def test_sizes_follow_the_model_fields_that_they_depend_on():
    nano = preset("nano")
    wide = nano.with_model(d_model=192).model
    assert (wide.d_hidden, wide.d_qk) == (768, 48)
    assert preset("nano", matched=True).with_model(d_model=192).model.d_qk == 24
    assert nano.with_model(mlp="none").model.d_hidden == 0
    assert nano.with_model(d_model=192, d_hidden=100).model.d_hidden == 100
    assert nano.val_tokens == 16_384
    assert nano.with_model(n_ctx=96).val_tokens == 16_320
    assert nano.with_model(n_ctx=20_000).val_tokens == 20_000


def test_default_folder_tells_runs_apart():
    folders = {preset("nano", attention=a).replace(seed=s).folder for a in ("bilinear", "softmax") for s in (0, 1)}
    assert len(folders) == 4
    assert str(preset("nano").folder) == "runs/nano-bilinear-bilinear-s0"


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 10.0}, "steps must be an integer >= 1, got 10.0"),
        ({"batch": 10, "micro_batch": 4}, r"batch=10, micro_batch=4 \(remainder 2\)"),
        ({"val_tokens": 1000}, "multiple of the sequence length 128, got 1000; the nearest below is 896"),
        ({"lr_head": float("nan")}, "lr_head must be a number >= 0, got nan"),
        ({"warmdown": 1.5}, r"warmdown must be a number in \[0, 1\], got 1.5"),
        ({"warmup_steps": 200}, "warm-up and warm-down must fit into the run"),
        ({"recipe": "exact"}, "recipe must be one of replication, replication-exact; got 'exact'"),
        ({"recipe": "replication-exact", "shuffle": True}, "published order"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        preset("nano").replace(**changes)


@pytest.mark.user_error
def test_config_files_are_read_strictly(tmp_path):
    nano = preset("nano")
    with pytest.raises(ValueError, match=r"my\.json does not fit TrainConfig: missing none; unexpected lr_embde"):
        nano.updated({"lr_embde": 0.1}, source="my.json")
    with pytest.raises(ValueError, match=r"my\.json, model does not fit ModelConfig.*d_mdoel"):
        nano.updated({"model": {"d_mdoel": 4}}, source="my.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        load_config(tmp_path / "list.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="unknown preset 'nanoo'; known: nano"):
        preset("nanoo")


def test_a_config_file_may_hold_some_fields():
    nano = preset("nano")
    changed = nano.updated({"steps": 7, "model": {"logit_softcap": None}})
    assert (changed.steps, changed.model.logit_softcap, changed.model.d_model) == (7, None, 128)


def test_presets_import_no_torch():
    code = "import sys, tnlm.training.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
