"""Networks of layers and models, contracted, are the forward: float64, 1e-12, pairwise different sizes."""

import contextlib
import copy
import io
import re
from pathlib import Path

import opt_einsum
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests import tiny_models
from tests.limits import ROUNDINGS, assert_close
from tests.tiny_models import ATTENTIONS, MLPS, ids, tiny
from tnlm.checkpoints.checkpoint import load
from tnlm.config import NOT_POLYNOMIAL, ModelConfig
from tnlm.explicit import augment
from tnlm.mlp import MLP, BilinearMLP
from tnlm.network import Network
from tnlm.rotary import rotary_tables
from tnlm.transformer import Transformer

POLYNOMIAL = ("bilinear", "squared")


def pure(**changes):
    """A polynomial outright at the sizes of ``tiny``."""
    sizes = {"d_vocab": 13, "n_layer": 2, "n_head": 3, "d_model": 30, "d_qk": 4, "n_ctx": 17}
    hidden = 0 if changes.get("mlp") == "none" else 7
    return ModelConfig.pure(**{**sizes, "d_hidden": hidden, **changes})


def build(config):
    """Larger embeddings: without norms two blocks are of degree 100 in their size, and small ones leave nothing."""
    model = tiny_models.build(config)
    model.embed.w_e.data *= 0.6 * config.d_model**0.5
    return model


def inputs_of(model, tokens):
    one_hot = F.one_hot(tokens, model.config.d_vocab).to(model.embed.w_e)
    return {"tokens": one_hot, **model.inverse_norms(tokens)}


def before_softcap(model, tokens):
    return model.unembed(model.ln_final(model.run(model.embedding(tokens))))


def assert_is_the_forward(model, network=None, *, batch=2, seq=5):
    """Compare relative to the largest logit, and see that every layer moves the logits, or a lost one would pass."""
    tokens = ids(batch, seq)
    network = model.network(seq) if network is None else network
    with torch.no_grad():
        expected = before_softcap(model, tokens)
        scale = expected.abs().max()
        got = network.contract(inputs_of(model, tokens))
        # an error of the input grows by the degree, 5 per layer
        assert_close(got / scale, expected / scale, roundings=4 * ROUNDINGS)
        for name, weight in model.named_parameters():
            if name.endswith(("w_o", "w_d")):
                saved = weight.clone()
                weight.zero_()
                assert (before_softcap(model, tokens) - expected).abs().max() > 1e-3 * scale, name
                weight.copy_(saved)


def random_mlp(kind="bilinear", *, bias=False, hidden_bias=False, d_in=5, d_hidden=7, d_out=3):
    sizes = {"d_in": d_in, "d_hidden": d_hidden, "d_out": d_out}
    mlp = MLP(kind=kind, bias=bias, hidden_bias=hidden_bias, dtype=torch.float64, **sizes)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


@pytest.mark.parametrize("bias, hidden_bias", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", POLYNOMIAL)
@pytest.mark.parametrize("d_in, d_hidden, d_out", [(5, 7, 3), (2, 3, 5), (7, 5, 2), (1, 1, 1), (3, 3, 3)])
def test_mlp_tensor_and_network_are_the_forward(kind, bias, hidden_bias, d_in, d_hidden, d_out):
    mlp = random_mlp(kind, bias=bias, hidden_bias=hidden_bias, d_in=d_in, d_hidden=d_hidden, d_out=d_out)
    x = torch.randn(11, d_in, dtype=torch.float64)
    constant = bias or hidden_bias
    read = augment(x) if constant else x
    t = mlp.tensor()
    assert t.shape == (d_out, d_in + constant, d_in + constant)
    assert torch.equal(t, t.mT)
    assert_close(torch.einsum("oij,bi,bj->bo", t, read, read), mlp(x))
    assert_close(mlp.network().contract({"x": read}), mlp(x))
    assert_close(opt_einsum.contract(*mlp.network().args(x=read)), mlp(x))


def test_mlp_network_without_bias_is_made_of_the_parameters():
    mlp = random_mlp()
    tensors = [operand for operand, _ in mlp.network().operands if isinstance(operand, torch.Tensor)]
    assert [t.shape for t in tensors] == [(3, 7), (7, 5), (7, 5)]
    x = torch.randn(2, 5, dtype=torch.float64)
    parameters = list(mlp.parameters())
    got = torch.autograd.grad(mlp.network().contract({"x": x}).square().sum(), parameters)
    expected = torch.autograd.grad(mlp(x).square().sum(), parameters)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("d, h, elements", [(128, 512, "8,388,608"), (768, 3072, "1,811,939,328")])
def test_mlp_tensor_refuses_before_it_allocates(d, h, elements):
    mlp = BilinearMLP(d_in=d, d_hidden=h, d_out=d, device="meta")
    with pytest.raises(ValueError, match=rf"contracting mlp tensor builds an array of {elements} elements .*max_bytes"):
        mlp.tensor(max_bytes=4 * 10**6)


def attention_inputs(attn, x, v_first, tables):
    """Inputs of ``attn.network`` with the inverse norms worked out by hand."""
    inputs = {"x": x if v_first is None and attn.b_q1 is None else augment(x)}
    if v_first is not None:
        inputs["v_first"] = augment(v_first.flatten(2))
    for leg in ("q1", "k1", "q2", "k2")[: 2 * len(attn.branches)]:
        norm = getattr(attn, f"{leg.removesuffix('1')}_norm")
        if hasattr(norm, "eps"):
            bias = getattr(attn, f"b_{leg}")
            projected = x @ getattr(attn, f"w_{leg}").T + (0 if bias is None else bias)
            squares = projected.unflatten(-1, (attn.n_head, -1)).square().mean(-1)
            inputs[f"{leg.removesuffix('1')}_norm.hook_scale"] = augment((squares + norm.eps).rsqrt())
    return inputs


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("qk_bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", POLYNOMIAL)
def test_attention_network_is_the_forward(kind, qk_norm, qk_bias, mixed):
    config = tiny(attention=kind, qk_norm=qk_norm, qk_bias=qk_bias, n_layer=1)
    attn = build(config).blocks[0].attn
    x = torch.randn(2, 5, 30, dtype=torch.float64)
    v_first = torch.randn(2, 5, 3, 10, dtype=torch.float64) if mixed else None
    tables = rotary_tables(5, 4, dtype=torch.bfloat16)
    expected, _ = attn(x, v_first, tables)
    net = attn.network(5, v_first=mixed)
    inputs = attention_inputs(attn, x, v_first, tables)
    assert_close(net.contract(inputs), expected)
    assert_close(opt_einsum.contract(*net.args(**inputs)), expected)


@pytest.mark.parametrize("kind", POLYNOMIAL)
def test_attention_network_has_degree_two_in_the_query_and_three_in_the_key(kind):
    attn = build(pure(attention=kind, mlp="none", n_layer=1, value_residual=False)).blocks[0].attn
    legs = [operand.name for operand, _ in attn.network(5).operands[1:-2]]
    assert legs == (["q1", "k1", "q2", "k2"] if kind == "bilinear" else ["q1", "k1", "q1", "k1"])
    x = torch.randn(2, 5, 30, dtype=torch.float64)
    net = attn.network(5)
    assert_close(net.contract({"x": -3 * x}), -(3**5) * net.contract({"x": x}))


SWITCHES = {
    "released": {},
    "squared": {"mlp": "squared", "attention": "squared"},
    "no QK-norm": {"qk_norm": False},
    "QK bias": {"qk_bias": True},
    "no norm": {"norm": "none"},
    "no embedding norm": {"embedding_norm": False},
    "no final norm": {"final_norm": False},
    "hidden bias": {"mlp_hidden_bias": True},
    "hidden bias of one encoder, no other": {"mlp_hidden_bias": True, "mlp_bias": False, "mlp": "squared"},
    "no mixing": {"x0_mixing": False, "value_residual": False},
    "no MLP bias": {"mlp_bias": False},
    "float32 tables, other base and eps": {"rotary_table_dtype": "float32", "rotary_base": 100.0, "norm_eps": 0.1},
    "attention only": {"mlp": "none"},
    "MLP only": {"attention": "none"},
    "d_qk is d_head": {"d_qk": 10},
    "one narrow head each": {"n_head": 6, "d_model": 6, "d_qk": 2},
    "no layers": {"n_layer": 0},
}


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES.keys())
def test_nested_network_is_the_forward_given_the_norms(changes):
    assert_is_the_forward(build(tiny(**changes)))


@pytest.mark.parametrize("attention", POLYNOMIAL)
@pytest.mark.parametrize("mlp", POLYNOMIAL)
def test_nested_network_of_a_pure_model_takes_tokens_alone(mlp, attention):
    model = build(pure(mlp=mlp, attention=attention, n_layer=3, qk_bias=True))
    assert list(model.network(5).inputs) == ["tokens"]
    assert model.inverse_norms(ids(2, 5)) == {}
    assert_is_the_forward(model)


PLAIN = {"x0_mixing": False, "value_residual": False}
FLAT = {
    "one attention layer": (pure(mlp="none", n_layer=1), 28),
    "two attention layers": (pure(mlp="none", **PLAIN), 118),
    "two squared attention layers with QK bias": (pure(mlp="none", attention="squared", qk_bias=True, **PLAIN), 118),
    "two attention layers with mixing and value residual": (pure(mlp="none"), 172),
    "one layer with MLP": (pure(n_layer=1), 57),
    "one squared layer with MLP": (pure(n_layer=1, mlp="squared", attention="squared"), 57),
    "one layer with MLP and norms": (tiny(n_layer=1), 119),
}


@pytest.mark.parametrize("config, count", FLAT.values(), ids=FLAT.keys())
def test_one_einsum_is_the_forward(config, count):
    model = build(config)
    flat = model.network(5).flatten()
    assert len(flat.operands) == count
    assert_is_the_forward(model, flat)


@pytest.fixture(scope="module")
def published():
    """The 18-layer model's network, without memory behind it."""
    return Transformer(ModelConfig.released(), device="meta").network(512)


def test_flattening_a_deep_model_is_refused_with_the_count(published):
    with pytest.raises(ValueError, match=r"transformer as one einsum has 13,177,777,777,777,777,765 operands"):
        published.flatten()


def test_cost_of_the_published_model(published):
    config = ModelConfig.released()
    cost = published.cost({"batch": 1})
    assert cost.largest == 512 * config.d_vocab
    forward = config.flops_per_token(512) * 512 / 3
    assert forward < cost.flops < 4.5 * forward


def test_gradients_of_the_network_are_those_of_the_model():
    model = build(pure(n_layer=2))
    tokens = ids(2, 5)
    logits = model(tokens), model.network(5).contract(inputs_of(model, tokens))
    expected, got = (
        # block 0's lamb mixes a value with itself: no gradient, and no place in the network
        torch.autograd.grad(z.square().sum(), [*model.parameters()], allow_unused=True, materialize_grads=True)
        for z in logits
    )
    assert_close(got, expected, scale=max(float(gradient.abs().max()) for gradient in expected))


@pytest.mark.parametrize("batch, seq", [(0, 5), (2, 0), (1, 1), (2, 17)])
def test_edge_sizes(batch, seq):
    model = build(tiny(n_layer=1))
    tokens = ids(batch, seq)
    got = model.network(seq).contract(inputs_of(model, tokens))
    assert_close(got, before_softcap(model, tokens))


def test_bf16_weights_lose_no_digit_to_the_constants():
    model = build(pure(d_qk=6)).bfloat16()
    tokens = ids(2, 5)
    got = model.network(5).contract(inputs_of(model, tokens))
    assert got.dtype is torch.float32
    expected = copy.deepcopy(model).double()(tokens).detach()
    assert_close(got.double(), expected, dtype=torch.float32)


@pytest.mark.parametrize(
    "network",
    [lambda mlp, kind: mlp.network(), lambda mlp, kind: mlp.tensor(), lambda _, kind: build(tiny(mlp=kind)).network(5)],
    ids=["network", "tensor", "whole model"],
)
@pytest.mark.parametrize("kind", [kind for kind in MLPS if kind not in (*POLYNOMIAL, "none")])
def test_refused_mlp_kinds(kind, network):
    match = rf"mlp='{kind}' has no tensor network: .*polynomial.*that have one are bilinear, squared"
    with pytest.raises(ValueError, match=match):
        network(random_mlp(kind), kind)


@pytest.mark.parametrize("kind", [kind for kind in ATTENTIONS if kind not in (*POLYNOMIAL, "none")])
def test_refused_attention_kinds(kind):
    model = build(tiny(attention=kind))
    match = rf"attention='{kind}' has no tensor network: .*that have one are bilinear, squared"
    with pytest.raises(ValueError, match=match):
        model.network(5)
    with pytest.raises(ValueError, match=match):
        model.blocks[0].attn.network(5)


def test_every_kind_without_a_network_has_its_reason():
    assert set(NOT_POLYNOMIAL) == {*MLPS, *ATTENTIONS} - {*POLYNOMIAL, "none"}


@pytest.mark.user_error
def test_refused_arguments():
    model = build(pure(value_residual=False))
    with pytest.raises(ValueError, match="seq must be between 0 and n_ctx=17, got 18"):
        model.network(18)
    with pytest.raises(ValueError, match="v_first=True needs an attention with a value residual"):
        model.blocks[0].attn.network(5, v_first=True)
    normed = build(tiny(n_layer=0))
    inputs = inputs_of(normed, ids(2, 5))
    del inputs["ln_final.hook_scale"]
    with pytest.raises(ValueError, match=r"missing ln_final.hook_scale; unknown none"):
        normed.network(5).contract(inputs)
    plain = random_mlp(bias=True)
    with pytest.raises(ValueError, match=r"size 5 in input 'x' of shape \(2, 5\) but size 6"):
        plain.network().contract({"x": torch.ones(2, 5, dtype=torch.float64)})


TOYS = [
    "toy_layout/attention_only_2L",
    "toy_layout/transformer_1L_qk_norm",
    "two_layer_layout",
    "cycle_layout/add",
    "cycle_layout/lerp",
    "trained_induction",
]


@pytest.mark.parametrize("toy", TOYS)
def test_recorded_logits_of_the_polynomial_toys(toy, golden, request):
    # the trained model is not ours to copy: it is read from beside the repository
    folder = golden / toy if (golden / toy).is_dir() else request.getfixturevalue("shared") / "golden" / toy
    model = load(folder)
    recorded = load_file(folder / "expected.safetensors")
    tokens, expected = recorded["tokens"].long(), recorded["logits_fp32"]
    nested = model.network(tokens.shape[1])
    for net in (nested, nested.flatten()):
        got = net.contract(inputs_of(model, tokens))
        assert_close(got, expected)
    assert_is_the_forward(model.double(), seq=tokens.shape[1])


def test_documentation_runs():
    text = (Path(__file__).parents[1] / "docs" / "tensors.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) == 2
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec("\n".join(blocks), {})
    documented = re.search(r"print\(net\)  # (.*)", text).group(1)
    assert output.getvalue().splitlines()[0] == documented


def test_no_operand_of_a_network_shares_memory_with_the_model():
    model = build(tiny(norm="none", embedding_norm=False, qk_norm=False, value_residual=False))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def tensors(network):
        for operand, _ in network.operands:
            yield from tensors(operand) if isinstance(operand, Network) else [operand]

    block = model.blocks[0]
    for network in (model.network(3), block.attn.network(3), block.mlp.network()):
        found = [t for t in tensors(network) if isinstance(t, torch.Tensor)]
        assert found
        assert not [t.shape for t in found if t.untyped_storage().data_ptr() in parameters]
