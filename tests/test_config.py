"""ModelConfig: what it refuses, what it counts, and that a file and a model agree with it."""

import json
import math

import pytest

import tnlm
from tests.limits import assert_close
from tests.tiny_models import ATTENTIONS, MLPS, tiny
from tnlm.config import METADATA_KEYS, ModelConfig, published_size

SMALL = {"d_vocab": 11, "n_layer": 2, "n_head": 3, "d_model": 30, "d_hidden": 7, "n_ctx": 13}


@pytest.mark.parametrize("attention", ["softmax", "squared", "squared_normalized"])
@pytest.mark.parametrize("mlp", ["bilinear", "swiglu"])
def test_published_counts_with_one_pair(mlp, attention):
    assert published_size("medium", mlp=mlp, attention=attention).n_params == 498_127_158
    assert published_size("small", mlp=mlp, attention=attention).n_params == 190_522_404
    assert published_size("large", mlp=mlp, attention=attention).n_params == 1_060_540_488


@pytest.mark.parametrize("mlp", ["bilinear", "swiglu"])
def test_published_counts_with_two_pairs(mlp):
    assert published_size("medium", mlp=mlp).n_params == 545_902_902
    assert published_size("small", mlp=mlp).n_params == 204_678_180
    assert published_size("large", mlp=mlp).n_params == 1_173_786_696


@pytest.mark.parametrize(
    "name, changes, count",
    [
        ("medium-relu2", {}, 522_019_900),
        ("medium-relu2", {"attention": "bilinear"}, 587_555_900),
        ("large-relu2", {}, 1_031_350_606),
        ("large-relu2", {"attention": "bilinear"}, 1_175_333_198),
        ("small", {"mlp": "relu2", "attention": "softmax"}, 162_210_852),
        ("small", {"mlp": "squared", "attention": "bilinear"}, 176_366_628),
        ("debug", {"mlp": "relu2", "attention": "softmax"}, 30_475_794),
        ("debug", {"mlp": "relu2", "attention": "bilinear"}, 31_262_226),
    ],
)
def test_published_counts_of_the_relu2_family(name, changes, count):
    assert published_size(name, **changes).n_params == count


def test_differential_attention_has_one_scalar_more_per_layer():
    assert published_size("medium", attention="differential").n_params == 545_902_902 + 18


def test_half_width_queries_make_bilinear_as_large_and_as_costly_as_softmax():
    bilinear = published_size("medium", d_qk=64)
    softmax = published_size("medium", attention="softmax")
    assert bilinear.n_params == softmax.n_params
    assert bilinear.flops_per_token() == softmax.flops_per_token()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("mlp", MLPS)
def test_counts_agree_with_the_modules(mlp, attention):
    for changes in (
        {},
        {"mlp_bias": False, "qk_bias": True, "x0_mixing": False, "value_residual": False},
        {"mlp_hidden_bias": True, "final_norm": False},
    ):
        config = tiny(mlp=mlp, attention=attention, **changes)
        model = tnlm.Transformer(config, device="meta")
        assert config.n_params == sum(p.numel() for p in model.parameters())
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.w_e"]
        assert config.n_matmul_params == sum(p.numel() for p in matrices)


def test_flops_of_one_token():
    config = ModelConfig.pure(**SMALL)
    weights = 11 * 30 + 2 * (6 * 900 + 3 * 30 * 7)
    assert config.flops_per_token() == 6 * weights + 6 * 13 * 2 * 3 * (2 * 10 + 10)
    assert config.flops_per_token(5) == 6 * weights + 6 * 5 * 2 * 3 * (2 * 10 + 10)


@pytest.mark.parametrize(
    "kinds, share",
    [
        ({}, 1),
        ({"mlp": "swiglu"}, (6 * 1152**2 + 3) / (18 * 1152**2 + 1152 + 3)),
        ({"attention": "softmax"}, (12 * 1152**2 + 1152 + 2) / (16 * 1152**2 + 1152 + 3)),
        ({"mlp": "relu2", "attention": "softmax"}, 2 / (12 * 1152**2 + 1152 + 3)),
        ({"n_layer": 0}, 1),
    ],
)
def test_polynomial_share_of_the_blocks(kinds, share):
    assert_close(ModelConfig.released(**kinds).polynomial_share, share, scale=1)


def test_published_counts_of_the_blocks_alone():
    assert published_size("medium").n_block_params == 430_002_486
    assert published_size("medium", attention="softmax").n_block_params == 382_226_742


def test_released_defaults():
    config = ModelConfig.released()
    assert (config.n_layer, config.n_head, config.d_model, config.d_hidden, config.d_head) == (18, 9, 1152, 4608, 128)
    assert (config.d_vocab, config.d_vocab_used, config.n_ctx, config.logit_softcap) == (50304, 50257, 1024, 30.0)
    assert config.norm_eps == 1.1920929e-07
    assert not config.polynomial
    assert config.layers_polynomial


def test_pure_is_polynomial():
    assert ModelConfig.pure(**SMALL).polynomial
    assert ModelConfig.pure(**SMALL, attention="squared").n_qk == 1


@pytest.mark.user_error
@pytest.mark.parametrize("change", [{"mlp": "swiglu"}, {"attention": "softmax"}, {"qk_norm": True}, {"norm": "rms"}])
def test_pure_refuses_what_is_not_polynomial(change):
    with pytest.raises(ValueError, match=r"a pure model must be polynomial: .*; here [^;]*(polynomial|root)"):
        ModelConfig.pure(**SMALL, **change)


def test_reasons_why_a_model_is_not_polynomial():
    pure, released = ModelConfig.pure(**SMALL), ModelConfig.released(mlp="swiglu", attention="softmax")
    assert pure.why_not_polynomial() == ()
    assert pure.replace(logit_softcap=7.5).why_not_polynomial() == (
        "the softcap of the logits is a tanh (logit_softcap=7.5)",
    )
    mlp = "the swiglu MLP is not polynomial: silu is not a polynomial"
    attention = "the softmax attention is not polynomial: softmax is not a polynomial"
    assert released.why_not_polynomial("mlp") == (mlp,)
    assert released.why_not_polynomial("attention") == (attention,)
    assert released.why_not_polynomial("layers") == (mlp, attention)
    assert released.why_not_polynomial()[2:] == (
        'RMS norms divide by a root (norm="rms")',
        "QK-norm divides by a root (qk_norm=True)",
        "the softcap of the logits is a tanh (logit_softcap=30)",
    )
    without = ModelConfig.pure(**SMALL, attention="none").replace(qk_norm=True)
    assert without.why_not_polynomial() == ()  # there are no queries


@pytest.mark.user_error
def test_reasons_of_an_unknown_part_are_refused():
    with pytest.raises(ValueError, match="part must be one of mlp, attention, layers, model, got 'head'"):
        ModelConfig.pure(**SMALL).why_not_polynomial("head")


@pytest.mark.user_error
@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_head": 0}, "n_head must be an integer >= 1, got 0"),
        ({"n_head": -1}, "n_head must be an integer >= 1, got -1"),
        ({"n_head": "8"}, "n_head must be an integer >= 1, got '8'"),
        ({"n_head": 3.0}, r"n_head must be an integer >= 1, got 3\.0"),
        ({"n_head": None}, "n_head must be an integer >= 1, got None"),
        ({"n_head": True}, "n_head must be an integer >= 1, got True"),
        ({"n_head": 4}, r"multiple of n_head, got d_model=30, n_head=4 \(remainder 2\)"),
        ({"n_layer": -1}, "n_layer must be an integer >= 0"),
        ({"n_ctx": 0}, "n_ctx must be an integer >= 1"),
        ({"d_vocab": math.nan}, "d_vocab must be an integer >= 1, got nan"),
        ({"n_head": 2}, "d_qk must be even .* got d_qk=15"),
        ({"d_qk": 5}, "d_qk must be even .* got d_qk=5"),
        ({"d_qk": 0}, "d_qk must be an integer >= 1"),
        ({"d_vocab_used": 12}, "d_vocab_used must be at most d_vocab=11, got 12"),
        ({"d_vocab_used": 0}, "d_vocab_used must be an integer >= 1"),
        ({"mlp": "bilnear"}, "mlp must be one of bilinear, squared.*got 'bilnear'"),
        ({"attention": ["bilinear"]}, "attention must be one of"),
        ({"norm": "layer"}, "norm must be one of rms, none"),
        ({"rotary_table_dtype": "float16"}, "rotary_table_dtype must be one of bfloat16, float32"),
        ({"norm_eps": -1e-7}, "norm_eps must be a finite number >= 0"),
        ({"norm_eps": math.nan}, "norm_eps must be a finite number >= 0, got nan"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a finite number >= 0"),
        ({"rotary_base": 0}, "rotary_base must be above 0"),
        ({"rotary_base": math.inf}, "rotary_base must be a finite number"),
        ({"logit_softcap": 0}, "logit_softcap must be above 0.*null for off"),
        ({"logit_softcap": True}, "logit_softcap must be a finite number"),
        ({"qk_norm": 1}, "qk_norm must be true or false, got 1"),
        ({"qk_norm": "true"}, "qk_norm must be true or false"),
        ({"mlp": "none"}, 'd_hidden must be 0 exactly when mlp="none"'),
        ({"d_hidden": 0}, 'd_hidden must be 0 exactly when mlp="none"'),
    ],
)
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SMALL, **change})


def test_json_round_trip_for_every_field():
    config = tiny(
        qk_bias=True, norm_eps=0.0, logit_softcap=None, rotary_base=500.0, attention="differential", mlp="glu"
    )
    again = ModelConfig.from_dict(json.loads(config.to_json()))
    assert again == config
    assert hash(again) == hash(config)
    assert json.loads(config.to_json())["model_type"] == "tnlm"


@pytest.mark.user_error  # a type checker refuses the integer first
def test_integers_where_numbers_are_meant_compare_equal_after_a_round_trip():
    config = tiny(logit_softcap=15)
    assert isinstance(config.logit_softcap, float)
    assert config == tiny(logit_softcap=15.0)


@pytest.mark.user_error
@pytest.mark.parametrize("key", ["d_vocab", "n_layer", "n_head", "d_model", "n_ctx"])
def test_each_required_key_is_missed_by_name(key):
    values = tiny().to_dict()
    del values[key]
    with pytest.raises(
        ValueError, match=f"folder/config.json does not fit ModelConfig: missing {key}; unexpected none"
    ):
        ModelConfig.from_dict(values, source="folder/config.json")


@pytest.mark.parametrize("key", ["mlp", "attention", "d_qk", "d_vocab_used", "norm", "qk_norm", "logit_softcap"])
def test_each_optional_key_has_the_default_of_the_class(key):
    values = ModelConfig.released().to_dict()
    default = ModelConfig.__dataclass_fields__[key].default
    del values[key]
    made = ModelConfig.from_dict(values)
    assert getattr(made, key) == {"d_qk": 128, "d_vocab_used": 50304}.get(key, default)


@pytest.mark.user_error
def test_unknown_keys_are_refused_with_their_values():
    with pytest.raises(ValueError, match="unexpected device='cuda', n_heads=8"):
        ModelConfig.from_dict({**tiny().to_dict(), "n_heads": 8, "device": "cuda"})


@pytest.mark.user_error
@pytest.mark.parametrize("values", [[1, 2], "text", None, 3])
def test_only_an_object_is_a_config(values):
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, got"):
        ModelConfig.from_dict(values, source="config.json")


def test_metadata_is_dropped_with_one_warning():
    extra = dict.fromkeys(METADATA_KEYS, "x")
    with pytest.warns(UserWarning, match="config: ignored metadata _name_or_path, architectures") as caught:
        assert ModelConfig.from_dict({**tiny().to_dict(), **extra}) == tiny()
    assert len(caught) == 1


@pytest.mark.user_error
def test_a_refused_value_names_the_file():
    with pytest.raises(ValueError, match=r"config\.json: n_head must be an integer"):
        ModelConfig.from_dict({**tiny().to_dict(), "n_head": 8.0}, source="config.json")


def test_replace_follows_the_sizes_it_derives_from():
    config = ModelConfig.pure(**SMALL)
    assert config.replace(d_model=36).d_qk == 12
    assert config.replace(d_vocab=17).d_vocab_used == 17
    assert tiny().replace(d_model=36).d_qk == 4
    assert tiny().replace(d_vocab=17).d_vocab_used == 11
    assert ModelConfig.released(d_vocab=100).d_vocab_used == 100


@pytest.mark.user_error
def test_unknown_size_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown size 'huge'; known: debug, small, medium"):
        published_size("huge")
