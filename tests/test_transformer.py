"""The whole forward against loops over floats, and the settings in which it has to run."""

import copy
import math
import shutil

import numpy
import pytest
import torch
from torch.func import functional_call, grad, jvp, stack_module_state, vmap

from tests.limits import assert_close, assert_within
from tests.tiny_models import ATTENTIONS, MLPS, build, forward_by_loops, ids, tiny
from tnlm.config import ModelConfig
from tnlm.transformer import Transformer

SWITCHES = [
    {"norm": "none"},
    {"embedding_norm": False},
    {"final_norm": False},
    {"final_norm": False, "norm": "none"},
    {"mlp_hidden_bias": True},
    {"mlp_hidden_bias": True, "mlp_bias": False, "mlp": "swiglu"},
    {"mlp_hidden_bias": True, "mlp": "relu2"},
    {"qk_norm": False},
    {"qk_bias": True},
    {"qk_bias": True, "qk_norm": False, "attention": "differential"},
    {"logit_softcap": None},
    {"logit_softcap": 1.5},
    {"x0_mixing": False},
    {"value_residual": False},
    {"mlp_bias": False},
    {"norm_eps": 0.3},
    {"rotary_base": 50.0},
    {"d_qk": 10},
    {"n_layer": 0},
    {"norm": "none", "qk_norm": False, "embedding_norm": False, "logit_softcap": None},
]


def assert_equals_loops(config, *, dtype=None):
    model, tokens = build(config), ids(2, 5)
    expected = torch.stack([forward_by_loops(model, row) for row in tokens.tolist()])
    assert expected.abs().max() > 0.1
    assert_close(model(tokens), expected, dtype=dtype)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_each_attention_equals_loops(attention):
    assert_equals_loops(tiny(attention=attention))


@pytest.mark.parametrize("mlp", MLPS)
def test_each_mlp_equals_loops(mlp):
    assert_equals_loops(tiny(mlp=mlp, n_layer=2))


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_each_switch_equals_loops(switch):
    assert_equals_loops(tiny(**switch))


def test_float32_tables_equal_loops_to_their_rounding():
    config = tiny(rotary_table_dtype="float32")
    assert_equals_loops(config, dtype=torch.float32)
    rounded = build(tiny())
    rounded.load_state_dict(build(config).state_dict())
    assert (rounded(ids(2, 17)) - build(config)(ids(2, 17))).abs().max() > 1e-4


def test_pure_models_equal_loops():
    for attention in ("bilinear", "squared"):
        sizes = {"d_vocab": 11, "n_layer": 2, "n_head": 3, "d_model": 30, "d_hidden": 7, "n_ctx": 13}
        assert_equals_loops(ModelConfig.pure(**sizes, attention=attention), dtype=torch.float32)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_future_is_not_seen(attention):
    model, tokens = build(tiny(attention=attention)), ids(2, 9)
    before = model(tokens)
    tokens[:, 6] = (tokens[:, 6] + 1) % 11
    after = model(tokens)
    assert_close(after[:, :6], before[:, :6])
    assert (after[:, 6] - before[:, 6]).abs().max() > 1e-3
    assert attention == "none" or (after[:, 7:] - before[:, 7:]).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_float32_and_bfloat16_follow_float64(attention):
    tokens = ids(2, 17)
    model = build(tiny(attention=attention))
    exact = model(tokens)
    assert_close(model.float()(tokens).double(), exact, dtype=torch.float32)
    low = model.to(torch.bfloat16)(tokens)
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).norm() < 0.05 * exact.norm()


def test_compute_dtype_casts_activations_and_keeps_parameters():
    model, tokens = build(tiny(), dtype=torch.float32), ids(2, 5)
    exact = model(tokens)
    model.compute_dtype = torch.bfloat16
    low = model(tokens)
    assert low.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 0 < (low.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("table", ["bfloat16", "float32"])
def test_bfloat16_is_right_at_position_1000(table):
    model = build(tiny(n_ctx=1024, n_layer=1, rotary_table_dtype=table, attention="softmax"), dtype=torch.float32)
    tokens = ids(1, 1024)
    exact = model(tokens)[:, 1000]
    low = model.to(torch.bfloat16)(tokens)[:, 1000].float()
    assert (low - exact).norm() < 0.05 * exact.norm()


def test_logits_do_not_depend_on_what_was_called_before():
    model, tokens = build(tiny(), dtype=torch.float32), ids(2, 16)
    fresh = {seq: build(tiny(), dtype=torch.float32)(tokens[:, :seq]) for seq in (8, 4, 16)}
    for seq in (8, 4, 16, 8):
        assert torch.equal(model(tokens[:, :seq]), fresh[seq])
    build(tiny(), dtype=torch.float32).to("meta")(tokens.to("meta"))
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    expected = build(tiny(), dtype=torch.float32).to(torch.bfloat16)(tokens)
    assert torch.equal(model.to(torch.bfloat16)(tokens), expected)


def test_inference_mode_leaves_nothing_that_stops_training():
    model, tokens = build(tiny(), dtype=torch.float32), ids(2, 8)
    with torch.inference_mode():
        model(tokens)
    model(tokens).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.numel() != 1)


def test_the_state_dict_holds_parameters_and_nothing_else():
    model = build(tiny(qk_bias=True))
    model(ids(2, 5))
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert [name for name, _ in model.blocks[1].named_parameters()] == [
        "lambdas",
        *(f"attn.{w}" for w in ("w_q1", "b_q1", "w_k1", "b_k1", "w_q2", "b_q2", "w_k2", "b_k2", "w_v", "w_o", "lamb")),
        *(f"mlp.{w}" for w in ("w_l", "w_r", "w_d", "bias")),
    ]


@pytest.mark.parametrize("d_vocab, loss", [(50304, 10.825840), (50257, 10.824905)])
def test_the_first_loss_is_that_of_a_uniform_guess(d_vocab, loss):
    model = Transformer(ModelConfig.released(d_vocab=d_vocab, n_layer=1, n_head=1, d_model=4))
    logits = model(ids(1, 3, limit=50257))
    assert not logits.any()
    assert torch.nn.functional.cross_entropy(logits[0], torch.tensor([0, 7, 50256])).item() == pytest.approx(
        loss, abs=2e-6
    )
    assert model.blocks[0].lambdas.tolist() == [1, 0]
    assert 0.9 < model.embed.w_e.std() < 1.1


def test_meta_tensors_give_shapes_without_memory():
    model = Transformer(ModelConfig.released(), device="meta", dtype=torch.bfloat16)
    logits = model(torch.empty(2, 1024, dtype=torch.long, device="meta"))
    assert logits.shape == (2, 1024, 50304)
    assert (logits.device.type, logits.dtype) == ("meta", torch.bfloat16)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_and_sequences_give_empty_logits(attention, shape):
    model = build(tiny(attention=attention))
    assert model(torch.empty(shape, dtype=torch.long)).shape == (*shape, 13)


@pytest.mark.user_error
@pytest.mark.parametrize("bad", [-1, 13, 2**31, -(2**40)])
def test_ids_outside_the_vocabulary_are_named(bad):
    tokens = ids(3, 5)
    tokens[2, 4] = bad
    with pytest.raises(ValueError, match=rf"ids must be in \[0, 13\), got {bad} at row 2, position 4"):
        build(tiny())(tokens)


def test_forward_reads_padding_ids_and_both_integer_widths():
    model, tokens = build(tiny()), ids(2, 5, limit=13)
    assert torch.equal(model(tokens.int()), model(tokens))


@pytest.mark.user_error
@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(5, dtype=torch.long), r"tokens must be \(batch, seq\), got shape \(5,\); add a batch axis"),
        (torch.zeros(1, 1, 5, dtype=torch.long), r"got shape \(1, 1, 5\)"),
        ([[1, 2]], r"tokens must be a torch tensor \(batch, seq\), got list"),
        (numpy.zeros((1, 2), int), r"got ndarray"),
        (torch.zeros(1, 5), r"tokens must be int64 or int32, got torch.float32"),
        (torch.zeros(1, 5, dtype=torch.bool), r"got torch.bool"),
        (torch.zeros(1, 5, dtype=torch.uint16), r"got torch.uint16; convert with .long\(\)"),
        (torch.zeros(1, 18, dtype=torch.long), r"at most n_ctx=17 tokens, got 18"),
    ],
)
def test_tokens_that_are_none(tokens, message):
    with pytest.raises(ValueError, match=message):
        build(tiny())(tokens)


@pytest.fixture
def graphs(request):
    """Clean compiler state; not under a runtime type checker, whose wrappers break graphs."""
    if request.config.getoption("--jaxtyping-packages"):
        pytest.skip("the runtime type checker cannot be compiled")
    torch._dynamo.reset()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_compiles_without_a_graph_break(attention):
    model, tokens = build(tiny(attention=attention, n_layer=2), dtype=torch.float32), ids(2, 7)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(tokens), model(tokens))


@pytest.mark.usefixtures("graphs")
def test_hooks_that_were_there_before_compilation_fire():
    model, tokens = build(tiny(n_layer=1, qk_norm=False), dtype=torch.float32), ids(2, 7)
    plain = model(tokens)
    names = ("hook_q2", "hook_attn_scores", "hook_pattern", "hook_result")
    for name in names:
        model.get_submodule(f"blocks.0.attn.{name}").register_forward_hook(lambda _module, _inputs, out: 2 * out)
    edited = model(tokens)
    assert (edited - plain).abs().max() > 0.1
    assert_close(torch.compile(model, backend="eager")(tokens), edited)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("implementation", ["auto", "chunked"])
def test_compiled_gradients_equal_eager_ones(implementation):
    model, tokens = build(tiny(n_layer=1), dtype=torch.float32), ids(2, 7)
    model.set_implementation(implementation)
    model(tokens).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).square().mean().backward()
    for p, g in zip(model.parameters(), expected, strict=True):
        assert_close(p.grad, g)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.usefixtures("graphs")
def test_inductor_keeps_the_rounding_of_the_tables():
    model, tokens = build(tiny(n_layer=1), dtype=torch.float32), ids(2, 7)
    with torch.no_grad():
        expected, found = model(tokens), torch.compile(model, fullgraph=True)(tokens)
    assert_close(found, expected)


def loss_of(model, tokens):
    def loss(parameters):
        return functional_call(model, parameters, (tokens,)).square().mean()

    return loss


def test_functional_gradients_equal_autograd():
    model, tokens = build(tiny()), ids(2, 5)
    loss = loss_of(model, tokens)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = grad(loss)(parameters)
    model(tokens).square().mean().backward()
    # a gradient of a scalar is a sum of large terms that cancel
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    for name, p in model.named_parameters():
        assert_close(gradients[name], p.grad, scale=largest)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_forward_mode_agrees_with_a_difference_quotient(attention):
    model, tokens = build(tiny(attention=attention)), ids(2, 5)
    loss = loss_of(model, tokens)
    at = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in at.items()}
    _, tangent = jvp(loss, (at,), (along,))
    plus, minus = ({name: at[name] + step * along[name] for name in at} for step in (1e-6, -1e-6))
    quotient = (loss(plus) - loss(minus)).item() / 2e-6
    assert_within(tangent.item() / quotient - 1, 1e-5)  # truncation: the third derivative times 1e-12


def test_an_ensemble_of_models_under_vmap():
    models, tokens = [build(tiny(), seed=seed) for seed in range(3)], ids(2, 5)
    parameters, buffers = stack_module_state(models)
    assert not buffers
    base = copy.deepcopy(models[0])
    stacked = vmap(lambda p: functional_call(base, p, (tokens,)))(parameters)
    assert_close(stacked, torch.stack([m(tokens) for m in models]))


def test_rows_under_vmap():
    model, tokens = build(tiny()), ids(4, 5)
    assert_close(vmap(lambda row: model(row[None])[0])(tokens), model(tokens))


def test_softcap_is_the_last_step():
    model, tokens = build(tiny(logit_softcap=2.0)), ids(2, 5)
    before = model.pre_softcap(tokens)
    assert before.abs().max() > 2
    assert_close(model(tokens), 2 * torch.tanh(before / 2))
    assert torch.equal(model.softcap(torch.tensor([0.0])), torch.tensor([0.0]))
    assert model.softcap(torch.tensor([1.0])).item() == pytest.approx(2 * math.tanh(0.5))


def test_the_last_position_alone():
    model, tokens = build(tiny()), ids(2, 5)
    assert_close(model(tokens, last=True), model(tokens)[:, -1:])
    assert model(tokens[:, :0], last=True).shape == (2, 0, 13)
