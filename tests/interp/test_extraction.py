"""The extracted tensors are the model: contracted with a run's norms they give its logits."""

from dataclasses import replace

import pytest
import torch

import tnlm
from tests.checkpoints.test_checkpoint_layouts import asked, recorded
from tests.conftest import randomize
from tests.limits import ROUNDINGS, assert_close, assert_within, limit
from tnlm.config import ModelConfig
from tnlm.interp.extraction import extract
from tnlm.interp.tokens.copying import pattern_table
from tnlm.points import record
from tnlm.rotary import rotary_tables, rotate
from tnlm.transformer import Transformer

SIZES = {"d_vocab": 11, "n_layer": 3, "n_head": 3, "d_model": 30, "n_ctx": 13}
KINDS = [("bilinear", "bilinear"), ("squared", "squared"), ("bilinear", "none"), ("none", "bilinear")]


def make(mlp="bilinear", attention="bilinear", *, pure=False, dtype=torch.float64, **changes):
    sizes = {**SIZES, "d_hidden": 0 if mlp == "none" else 7, "mlp": mlp, "attention": attention, **changes}
    config = ModelConfig.pure(**sizes) if pure else ModelConfig.released(**sizes)
    return randomize(Transformer(config, dtype=dtype))


@pytest.mark.parametrize("mlp, attention", KINDS)
@pytest.mark.parametrize("pure", [False, True])
def test_extracted_tensors_reproduce_the_logits(mlp, attention, pure):
    model = make(mlp, attention, pure=pure, d_qk=4)
    # an error of the input grows by the degree, 5 per layer
    assert_close(extract(model).check(torch.randint(0, 11, (2, 7))), 0.0, scale=1, roundings=4 * ROUNDINGS)


@pytest.mark.parametrize(
    "changes",
    [{"qk_bias": True}, {"x0_mixing": False}, {"value_residual": False}, {"mlp_bias": False}, {"final_norm": False}],
)
def test_every_switch_is_extracted(changes):
    model = make(d_qk=4, **changes)
    # an error of the input grows by the degree, 5 per layer
    assert_close(extract(model).check(torch.randint(0, 11, (2, 7))), 0.0, scale=1, roundings=4 * ROUNDINGS)


@pytest.mark.user_error
def test_a_form_of_one_and_x_is_no_form_of_x():
    net = extract(make(mlp_hidden_bias=True))
    with pytest.raises(ValueError, match=r"mlp_hidden_bias.* form of \(1, x\).*mlp.tensor\(\)"):
        net.mlp[0]


def test_check_in_float32_and_of_a_wrong_weight():
    model = make(dtype=torch.float32)
    net, tokens = extract(model), torch.randint(0, 11, (2, 7))
    assert_close(net.check(tokens), 0.0, scale=1, dtype=torch.float32)
    assert net.mlp[1].w_d.data_ptr() == model.blocks[1].mlp.w_d.data_ptr()
    wrong = extract(make(dtype=torch.float32))
    wrong.mlp[1].w_l.mul_(1)
    object.__setattr__(wrong.mlp[1], "w_l", wrong.mlp[1].w_r)
    assert wrong.check(tokens) > 1e-3


def test_half_precision_is_widened_and_the_caller_decides():
    model = make().to(torch.bfloat16)
    assert extract(model).mlp[0].dtype == torch.float32
    assert extract(model).embed.dtype == torch.float32
    assert extract(model, dtype=torch.float64).attention[0].head(1).q1.dtype == torch.float64


def test_scalars_and_factors_recompose_the_final_residual():
    model, tokens = make(), torch.randint(0, 11, (2, 5))
    net = extract(model)
    names = ["hook_embed", "blocks.2.hook_resid_post"]
    names += [f"blocks.{l}.hook_{part}_out" for l in range(3) for part in ("attn", "mlp")]
    run = record(model, tokens, names)
    total = net.embed_factor * run["hook_embed"]
    for l in range(3):
        total = total + net.write_factors[l] * (run[f"blocks.{l}.hook_attn_out"] + run[f"blocks.{l}.hook_mlp_out"])
    assert_close(total, run["blocks.2.hook_resid_post"])


def test_token_rows_are_normed_and_padding_is_known():
    model = make(d_vocab_used=9)
    net = extract(model)
    assert_close(net.x0, model.embedding(torch.arange(11)[None])[0])
    assert list(net.pad_tokens) == [9, 10]
    assert len(net.tokens) == 9


def test_layers_know_where_their_inputs_live():
    assert extract(make()).mlp[1].domain == "sphere"
    assert extract(make(pure=True)).mlp[1].domain == "space"


def test_the_centred_unembedding_leaves_padding_out_and_weighs_tokens():
    net = extract(make(d_vocab_used=9))
    rows = net.unembed[:9]
    assert_close(net.unembed_centred(), rows - rows.sum(0) / 9, scale=rows.abs().max())
    counts = torch.tensor([3, 0, 1, 0, 0, 0, 0, 0, 4])
    mean = (3 * rows[0] + rows[2] + 4 * rows[8]) / 8
    assert_close(net.unembed_centred(counts), rows - mean, scale=rows.abs().max())


def test_rows_that_point_the_same_way_are_one_group():
    model = make(d_vocab_used=9)
    w_u = model.unembed.w_u.data
    mean = w_u[:9].mean(0)
    ray = w_u[2] - mean
    # 5 and 7 on the ray of 2; 8 opposite, which also keeps the mean where it was
    w_u[5], w_u[7], w_u[8] = mean + 2 * ray, mean + 0.5 * ray, mean - 3.5 * ray
    w_u[1] = mean - (w_u[[0, 3, 4, 6]] - mean).sum(0) - ray
    groups = extract(model).parallel_tokens()
    assert groups.tolist() == [0, 1, 2, 3, 4, 2, 6, 2, 8]
    equal = torch.ones(9, 30, dtype=torch.float64) * torch.arange(9)[:, None].double()
    model.unembed.w_u.data[:9] = equal
    assert extract(model).parallel_tokens().tolist() == [0, 0, 0, 0, 4, 5, 5, 5, 5]  # row 4 is the mean, so zero


@pytest.mark.user_error
@pytest.mark.parametrize(
    "weights, text",
    [
        (torch.ones(11), r"one number per token, shape \(9,\), got \(11,\)"),
        ([1.0] * 9, "one number per token, .* got list"),
        (-torch.ones(9), "at least 0 and not all 0"),
        (torch.zeros(9), "at least 0 and not all 0"),
        (torch.full((9,), torch.nan), "weights must be finite"),
    ],
)
def test_weights_that_weigh_nothing_are_refused(weights, text):
    with pytest.raises(ValueError, match=text):
        extract(make(d_vocab_used=9)).unembed_centred(weights)


@pytest.mark.user_error
@pytest.mark.parametrize("mlp", ["swiglu", "relu2", "gelu"])
def test_mlps_that_are_no_polynomials_say_so(mlp):
    net = extract(make(mlp, "softmax"))
    with pytest.raises(ValueError, match=f"the {mlp} MLP is not polynomial: .* has no tensor"):
        net.mlp[0]
    with pytest.raises(ValueError, match=r"softmax attention is not polynomial: .*, so its pattern has"):
        net.check(torch.randint(0, 11, (1, 4)))


def test_extracted_tensors_are_extracted_again():
    model = make()
    net = extract(model)
    assert extract(net) is net
    wide = extract(extract(model, dtype=torch.float32), dtype=torch.float64)
    assert (wide.mlp[0].dtype, wide.model) == (torch.float64, model)
    narrow = extract(model, dtype=torch.float32)
    assert extract(narrow) is narrow


def test_inverse_norms_have_one_convention():
    model, tokens = make(), torch.randint(0, 11, (2, 7))
    ours, theirs = extract(model).inverse_norms(tokens), model.inverse_norms(tokens)
    assert_close(ours, theirs)
    assert ours["blocks.1.ln2.hook_scale"].shape == (2, 7, 2)
    assert ours["blocks.1.attn.q2_norm.hook_scale"].shape == (2, 7, 1 + 3)
    assert extract(model, dtype=torch.float32).inverse_norms(tokens)["ln_final.hook_scale"].dtype == torch.float32


@pytest.mark.user_error
def test_softmax_heads_expose_circuits_only():
    head = extract(make("bilinear", "softmax")).attention[1].head(2)
    assert head.ov("layer").tensor().shape == (30, 30)
    with pytest.raises(
        ValueError,
        match=r"^pattern_tensor needs a polynomial pattern, got attention='softmax': softmax is not polynomial",
    ):
        head.pattern_tensor()


@pytest.mark.user_error
def test_extract_refuses_what_is_no_model_and_absent_parts():
    with pytest.raises(ValueError, match=r"needs a tnlm\.Transformer, got Linear"):
        extract(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"needs a tnlm\.Transformer, got NoneType"):
        extract(None)
    with pytest.raises(ValueError, match=r"""^the model has no attention \(attention="none"\)$"""):
        extract(make("bilinear", "none")).attention[0]
    with pytest.raises(ValueError, match=r"""^the model has no MLP \(mlp="none"\)$"""):
        extract(make("none", "bilinear")).mlp[0]
    with pytest.raises(ValueError, match=r"head must be in \[0, 3\), got 3"):
        extract(make()).attention[0].head(3)


PUBLISHED = [
    *(f"{mlp}-mlp_{attention}-attn" for mlp in ("bilinear", "squared") for attention in ("bilinear", "squared")),
    "raw_training_checkpoint",
    "two_layer_layout",
    "toy_layout/attention_only_2L",
    "toy_layout/transformer_1L_qk_norm",
    "cycle_layout/add",
    "cycle_layout/lerp",
    "trained_induction",
]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extracted_tensors_of_every_published_layout(name, dtype):
    model = tnlm.load(recorded(name), dtype=dtype, attention=asked(name))
    tokens = torch.randint(0, model.config.d_vocab_used, (2, 7))
    for _ in range(2):  # as recorded, then with every scalar and bias away from where it starts
        with torch.no_grad():
            assert float(model(tokens).abs().max()) > 0.1
        assert_close(extract(model).check(tokens), 0.0, scale=1, dtype=dtype)
        randomize(model)


@pytest.mark.parametrize("attention", ["bilinear", "squared"])
def test_queries_and_keys_of_layer_0_fold_into_tables_over_tokens(attention):
    model = make(attention=attention, d_qk=4, rotary_table_dtype="float32")
    net, tokens = extract(model), torch.randint(0, 11, (2, 7))
    pattern = record(model, tokens, ["blocks.0.attn.hook_pattern"])["blocks.0.attn.hook_pattern"]
    for n in range(3):
        head, x0 = net.attention[0].head(n), net.x0
        for s in range(7):
            for u in range(s + 1):
                query, key = x0[tokens[:, s]], x0[tokens[:, u]]
                values = pattern_table(head, query, key, s - u).diagonal()
                # the tables are float32, and exact at position 0; there ln1's eps cancels in the QK-norm to 2nd order
                assert_within(values - pattern[:, n, s, u], limit(torch.float32, ROUNDINGS) if s else 1e-11)
    assert float(pattern.abs().max()) <= 1


def test_a_whole_model_as_one_dense_tensor():
    # one layer, two positions of width 2: the last logits are degree 10 in z = (1, x_0, x_1), 3 * 5**10 numbers
    config = ModelConfig.pure(
        d_vocab=3, n_layer=1, n_head=1, d_model=2, d_hidden=7, n_ctx=2, x0_mixing=False, value_residual=False
    )
    model = randomize(Transformer(config, dtype=torch.float64))
    net, attn, eye = extract(model), model.blocks[0].attn, torch.eye(5, dtype=torch.float64)
    tables = [t.double() for t in rotary_tables(2, 2, base=config.rotary_base, dtype=torch.float32)]
    turned = {  # [d_model, position, d_qk]
        name: rotate(getattr(attn, name).T[:, None, None].expand(-1, 2, -1, -1), *tables)[:, :, 0]
        for name in ("w_q1", "w_k1", "w_q2", "w_k2")
    }
    one, at, ov = eye[0], (eye[1:3], eye[3:]), net.attention[0].head(0).ov().tensor()
    after = torch.einsum("dz,a,b,c,e->dzabce", at[1], one, one, one, one)
    for u in (0, 1):
        first, second = (
            at[1].T @ (turned[f"w_q{b}"][:, 1] @ turned[f"w_k{b}"][:, u].T / config.d_qk) @ at[u] for b in (1, 2)
        )
        after = after + torch.einsum("za,bc,de->dzabce", first, second, ov @ at[u])
    after, constant = after.reshape(2, -1), torch.eye(5**5, dtype=torch.float64)[0]
    mlp, w_u = net.mlp[0], net.unembed
    form = replace(mlp, bias=None).tensor()
    dense = torch.einsum("oij,ia,jb->oab", form, after, after) + after[:, :, None] * constant
    dense[:, 0, 0] += 0 if mlp.bias is None else mlp.bias
    dense = torch.einsum("vo,oab->vab", w_u, dense).detach()
    assert dense.numel() == 3 * 5**10
    for tokens in torch.cartesian_prod(torch.arange(3), torch.arange(3)):
        z = torch.cat([torch.ones(1, dtype=torch.float64), net.x0[tokens].flatten()])
        power = torch.einsum("a,b,c,d,e->abcde", z, z, z, z, z).flatten()
        with torch.no_grad():
            expected = model(tokens[None])[0, -1]
        assert_close(dense @ power @ power, expected)
