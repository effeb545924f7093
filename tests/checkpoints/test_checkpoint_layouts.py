"""Every published layout against the recorded outputs of the code it comes from."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import tnlm
from tests.checkpoints.checkpoint_files import (
    published_config,
    published_model,
    published_state,
    same_state,
    write_published,
)
from tests.conftest import GOLDEN, SHARED
from tests.limits import assert_close, assert_within
from tests.tiny_models import ids
from tnlm.checkpoints import weightfiles
from tnlm.rotary import rotary_tables
from tnlm.text.evaluate import token_losses

ARCHITECTURES = [
    f"{mlp}-mlp_{attention}-attn"
    for mlp in ("bilinear", "swiglu", "squared", "relu2")
    for attention in ("bilinear", "softmax", "squared", "differential")
]
OTHERS = [
    "raw_training_checkpoint",
    "bilinear_decomposition_layout",
    "two_layer_layout",
    "toy_layout/attention_only_2L",
    "toy_layout/transformer_1L_qk_norm",
    "cycle_layout/add",
    "cycle_layout/lerp",
    "trained_induction",
]
POLYNOMIALS = [name for name in OTHERS if name not in (OTHERS[0], OTHERS[1], "toy_layout/transformer_1L_qk_norm")]
NORMED = 256
"""Roundings of two codes with 4 sums of 32 each: behind a norm, an error does not grow with the degree of a layer."""


def recorded(name: str) -> Path:
    """The copy in the repository, else the recording beside it, else skip."""
    for root in (GOLDEN, SHARED / "golden"):
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"no recording {name}: only some are kept in the repository")


def asked(name: str) -> str | None:
    return "squared" if "squared-attn" in name else None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_released_layout_reproduces_the_training_code(name):
    folder = recorded(name)
    expected = load_file(folder / "expected.safetensors")
    model = tnlm.load(folder, attention=asked(name))
    assert f"{model.config.mlp}-mlp_{model.config.attention}-attn" == name
    residuals: dict[str, Tensor] = {}
    for i, block in enumerate(model.blocks):
        block.hook_resid_post.register_forward_hook(lambda _, __, x, i=i: residuals.update({f"resid_post.{i}": x}))
    with torch.no_grad():
        logits = model(expected["tokens"][:, :-1])
    assert_close(logits, expected["logits_fp32"], roundings=NORMED)
    loss = token_losses(logits, expected["tokens"][:, 1:]).double().mean()
    assert_close(loss.item(), expected["loss_fp32"].item(), roundings=16, dtype=torch.float32)
    assert len(residuals) == 3
    for point, x in residuals.items():
        rows = len(expected[point])
        assert_close(x[:rows], expected[point])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stored_precision_reproduces_the_training_run(name):
    """bf16 activations; the recording rounds after every operation in another order, so to bf16 rounding of logits
    of size 5, whose spacing is 0.031. Limits are five times what imitated hosts give."""
    folder = recorded(name)
    expected = load_file(folder / "expected.safetensors")
    model = tnlm.load(folder, attention=asked(name), dtype="checkpoint")
    dtypes = {key: p.dtype for key, p in model.named_parameters()}
    assert dtypes["embed.w_e"] == dtypes["blocks.1.lambdas"] == dtypes["blocks.0.mlp.bias"] == torch.bfloat16
    assert dtypes["blocks.0.attn.lamb"] == torch.bfloat16
    assert dtypes["unembed.w_u"] == dtypes["blocks.2.attn.w_q1"] == dtypes["blocks.0.mlp.w_d"] == torch.float32
    with torch.no_grad():
        logits = model(expected["tokens"][:, :-1])
    assert logits.dtype == torch.bfloat16
    rows = len(expected["logits_mixed"])
    error = (logits[:rows].float() - expected["logits_mixed"]).abs()
    assert_within(error, 0.8)
    assert_within(error.mean(), 0.1)
    # the errors of tokens partly cancel in their mean
    assert_within(token_losses(logits, expected["tokens"][:, 1:]).mean() - expected["loss_mixed"], 0.04)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_reproduce_their_code(name):
    folder = recorded(name)
    expected = load_file(folder / "expected.safetensors")
    model = tnlm.load(folder)
    with torch.no_grad():
        logits = model(expected["tokens"])
    recording = expected["logits_fp32"]
    # what is asked of the public toys; five times what any imitated host gives
    assert_within((logits - recording).abs().max() / recording.abs().max(), 1e-5, "relative error")
    assert model.config.polynomial == (name in POLYNOMIALS)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_network_of_a_polynomial_checkpoint_is_the_model(name):
    model = tnlm.load(recorded(name), dtype=torch.float64)
    tokens = ids(2, 5)
    with torch.no_grad():
        expected = model(tokens)
        one_hot = F.one_hot(tokens, model.config.d_vocab).double()
        found = model.network(tokens.shape[1]).contract({"tokens": one_hot})
    assert_close(found, expected)


PUBLISHED_TOYS = {
    "bookkeeping": "lr, qdist, stutter_p, variant",
    "no_n_head": "name",
    "norm_add": "topology",
    "norm_lerp": "topology",
    "softmax_lerp": "topology",
    "spec_attn_attn": None,
    "spec_attn_mlp_attn": None,
    "spec_full": "batch, lr, seed, steps",
    "spec_rms": None,
}
"""The toys of loganriggs/tensor_language as they lie on disk, and what each config says that changes nothing."""


@pytest.mark.parametrize("name, ignored", PUBLISHED_TOYS.items())
def test_public_toys_load_as_they_lie_on_disk(name, ignored):
    folder = recorded(f"published_toys/{name}")
    expected = load_file(folder / "expected.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = tnlm.load(folder)
    assert [str(w.message).partition("ignored metadata ")[2] for w in caught] == ([ignored] if ignored else [])
    with torch.no_grad():
        logits = model(expected["tokens"])
    largest = float(expected["logits_fp32"].abs().max())
    assert (logits - expected["logits_fp32"]).abs().max() <= max(2e-5, 1e-5 * largest)
    assert model.config.n_head == (4 if name.startswith("spec") else 1)


def public_forward(folder: Path, tokens: Tensor, eps: float) -> Tensor:
    """A model of loganriggs/tensor_language in float64, written out from its file: any spec, norm and residual."""
    raw = json.loads((folder / "config.json").read_text())
    p = {key: t.double() for key, t in torch.load(folder / "model.pt", weights_only=True).items()}
    n_head, d = raw["n_head"], raw["d_model"] // raw["n_head"]
    seq = tokens.shape[1]
    cos, sin = (torch.cat([t, t], -1).double()[:, None] for t in rotary_tables(seq, d))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    x = p["embed.weight"][tokens]
    for i, kind in enumerate(raw["spec"]):
        h = x
        if raw.get("norm") == "rms":
            h = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        w = {key.split(".")[2]: t for key, t in p.items() if key.startswith(f"layers.{i}.")}
        if kind == "mlp":
            y, residual = ((h @ w["L"].mT) * (h @ w["R"].mT)) @ w["D"].mT, raw.get("mlp_residual", "add")
        else:
            q1, k1, q2, k2, v = ((h @ w[n].mT).unflatten(-1, (n_head, d)) for n in ("q1", "k1", "q2", "k2", "v"))
            scores = [torch.einsum("bqhd,bkhd->bhqk", turned(q), turned(k)) / d for q, k in ((q1, k1), (q2, k2))]
            z = torch.einsum("bhqk,bkhd->bqhd", (scores[0] * scores[1]).tril(), v)
            y, residual = z.flatten(2) @ w["o"].mT, raw.get("residual", "lerp")
        s = raw.get("scale", 0.5)
        x = x + y if residual == "add" else (1 - s) * x + s * y
    return x @ p["head.weight"].mT


@pytest.mark.parametrize("norm", [None, "rms"])
@pytest.mark.parametrize(
    "spec, changes",
    [
        (["attn", "mlp", "attn", "mlp"], {"scale": 0.3}),
        (["mlp", "attn", "attn"], {"scale": 0.3}),
        (["attn", "mlp", "mlp", "attn"], {"residual": "add"}),
        (["mlp", "mlp"], {"mlp_residual": "lerp", "scale": 0.7}),
        (["attn", "mlp", "attn"], {"mlp_residual": "lerp", "scale": 0.7}),
    ],
)
def test_any_order_residual_and_norm_folds_exactly(tmp_path, spec, changes, norm):
    """Embeddings as small as the root of eps: a norm that read a rescaled residual would be seen."""
    shapes = {"attn": dict.fromkeys(("q1", "k1", "q2", "k2", "v", "o"), (12, 12))}
    shapes["mlp"] = {"L": (20, 12), "R": (20, 12), "D": (12, 20)}
    state = {"embed.weight": 2e-4 * torch.randn(11, 12), "head.weight": torch.randn(11, 12)}
    for i, kind in enumerate(spec):
        state |= {f"layers.{i}.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes[kind].items()}
        last = f"layers.{i}.{'o' if kind == 'attn' else 'D'}.weight"
        state[last] *= 3e-4 if norm else 1
    raw = {"spec": spec, "d_model": 12, "n_head": 3, "vocab": 11, **changes, **({"norm": norm} if norm else {})}
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, tokens = tnlm.load(tmp_path, dtype=torch.float64), ids(2, 7)
    expected = public_forward(tmp_path, tokens, eps=1.1920929e-07)
    with torch.no_grad():
        found = model(tokens)
    assert_close(found, expected)
    if norm:
        other = public_forward(tmp_path, tokens, eps=4 * 1.1920929e-07)
        assert (other - expected).abs().max() > 1e-3 * expected.abs().max()
    one_hot = F.one_hot(tokens, 11).double()
    network = model.network(7).contract({"tokens": one_hot, **model.inverse_norms(tokens)})
    assert_close(network, expected)
    tnlm.save(model, tmp_path / "ours")
    assert same_state(tnlm.load(tmp_path / "ours", dtype="checkpoint"), model)


def test_what_a_block_lacks_is_zero_and_stays_zero():
    """``attn mlp attn`` is two blocks, whose second MLP has no effect and no gradient."""
    model = tnlm.load(recorded("published_toys/spec_attn_mlp_attn"))
    assert (model.config.n_layer, model.config.d_hidden) == (2, 64)
    model(ids(2, 9)).square().sum().backward()
    first, second = (block.mlp for block in model.blocks)
    assert all(p.any() and p.grad.any() for p in first.parameters())
    assert not any(p.any() or p.grad.any() for p in second.parameters())


@pytest.mark.parametrize(
    "mlp, attention",
    [("bilinear", "differential"), ("squared", "squared"), ("relu2", "softmax"), ("swiglu", "squared_normalized")],
)
def test_published_layout_round_trip(tmp_path, mlp, attention):
    model = published_model(mlp=mlp, attention=attention)
    write_published(tmp_path, model)
    loaded = tnlm.load(tmp_path, attention=attention if "squared" in attention else None)
    assert loaded.config == model.config
    assert same_state(loaded, model)
    assert (loaded.source["layout"], loaded.source["path"]) == ("published", str(tmp_path))


def test_config_keys_that_came_later_may_be_absent(tmp_path):
    model = published_model(attention="softmax")
    write_published(tmp_path, model, bilinear_attn=None, squared_attn=None, step=None)
    assert same_state(tnlm.load(tmp_path), model)


@pytest.mark.user_error
def test_attention_that_the_files_cannot_tell_is_asked_for(tmp_path):
    folder = write_published(tmp_path, published_model(attention="squared"))
    with pytest.raises(ValueError, match=r'pass attention="squared" .* or attention="squared_normalized".*3\.5.*7\.5'):
        tnlm.load(folder)
    with pytest.raises(ValueError, match="got attention='bilinear'"):
        tnlm.load(folder, attention="bilinear")
    assert tnlm.load(folder, attention="squared_normalized").config.attention == "squared_normalized"


@pytest.mark.user_error
@pytest.mark.parametrize("attention", ["bilinear", "softmax", "differential"])
def test_attention_that_the_files_decide_cannot_be_overruled(tmp_path, attention):
    folder = write_published(tmp_path, published_model(attention=attention))
    with pytest.raises(ValueError, match=f"decides attention='{attention}', got attention='squared'"):
        tnlm.load(folder, attention="squared")


@pytest.mark.user_error
@pytest.mark.parametrize(
    "attention, flags, found",
    [
        ("bilinear", {"bilinear_attn": False}, "holds transformer.h.0.attn.c_q2.weight"),
        ("softmax", {"bilinear_attn": True, "squared_attn": True}, r"holds no \*.c_q2"),
        ("bilinear", {"squared_attn": False}, r"holds no \*.bilinear_lamb"),
        ("differential", {"squared_attn": True}, "holds transformer.h.0.attn.bilinear_lamb"),
    ],
)
def test_flags_that_contradict_the_keys(tmp_path, attention, flags, found):
    folder = write_published(tmp_path, published_model(attention=attention), **flags)
    with pytest.raises(ValueError, match=f"config.json says .*but the file {found}"):
        tnlm.load(folder)


RELEASED_SIZE = ["bilinear-mlp_bilinear-attn_1024", "swiglu-mlp_softmax-attn_1024"]


@pytest.mark.parametrize("name", RELEASED_SIZE)
@pytest.mark.parametrize("how", ["auto", "eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_released_head_width_and_length(name, how):
    """Heads 128 wide at 1,024 positions: angles up to 1,023 radians show how the rotary tables were formed."""
    folder = recorded(name)
    expected = load_file(folder / "expected.safetensors")
    model = tnlm.load(folder)
    model.set_implementation("eager" if how == "eager" else "auto")
    forward = torch.compile(model) if how == "compiled" else model
    with torch.no_grad():
        logits = forward(expected["tokens"][:, :-1])
    # what the release asks for, a sixth of what the roundings of a sum of 256 allow: not a limit of tests/limits.py
    assert (logits[:, ::16] - expected["logits_fp32"]).abs().max() < 2e-5
    assert abs(token_losses(logits, expected["tokens"][:, 1:]).double().mean() - expected["loss_fp32"]) < 2e-6
    cos, sin = rotary_tables(1024, 128, dtype=torch.bfloat16)
    assert torch.equal(cos, expected["rotary_cos"])
    assert torch.equal(sin, expected["rotary_sin"])


# What logits of small models hide


def test_numerics_of_each_layout():
    """eps, rounding of the rotary tables, and the order of norms, by layout."""
    said = {name: tnlm.load(recorded(name)).config for name in [ARCHITECTURES[0], *OTHERS[1:5]]}
    eps = {name: c.norm_eps for name, c in said.items() if c.norm == "rms"}
    assert eps == {ARCHITECTURES[0]: 1.1920929e-07, "bilinear_decomposition_layout": 1e-8}
    rounded = {name for name, c in said.items() if c.rotary_table_dtype == "bfloat16"}
    assert rounded == {ARCHITECTURES[0], "toy_layout/attention_only_2L", "toy_layout/transformer_1L_qk_norm"}
    assert {name for name, c in said.items() if c.qk_norm} == {ARCHITECTURES[0], "toy_layout/transformer_1L_qk_norm"}
    assert {name for name, c in said.items() if c.embedding_norm or c.x0_mixing or c.value_residual} == {
        ARCHITECTURES[0]
    }


def test_decomposition_layout_folds_gains_and_the_unscaled_residual(tmp_path):
    """Older trees: ``mlp.o`` and gains on the norms; ``scale_attn`` false: no 1/sqrt(2L)."""
    source = recorded("bilinear_decomposition_layout")
    state = load_file(source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    gains = {}
    for key in [k for k in state if ".mlp.p." in k]:
        state[key.replace(".p.", ".o.")] = state.pop(key)
    for i in range(2):
        for norm, key in (("n1", "attn.qkv"), ("n2", "mlp.w")):
            gain = gains[f"transformer.h.{i}.{norm}.weight"] = torch.rand(32) + 0.5
            state[f"transformer.h.{i}.{key}.weight"] /= gain
        state[f"transformer.h.{i}.attn.o.weight"] /= 2  # 1 / sqrt(2 * 2 layers)
    gain = gains["transformer.n_f.weight"] = torch.rand(32) + 0.5
    state["lm_head.weight"] /= gain
    save_file({**state, **gains}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**raw, "scale_attn": False}))
    tokens = ids(2, 9)
    assert_close(tnlm.load(tmp_path)(tokens), tnlm.load(source)(tokens))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate, bilinear", [(None, True), ("silu", True), ("relu", False), ("gelu", False)])
def test_decomposition_layout_with_biases_or_one_encoder(tmp_path, gate, bilinear, bias):
    """``p(gate(L x + b_l) * (R x + b_r))``, or ``p(gate(w x + b))``, against the layout's formula."""
    source = recorded("bilinear_decomposition_layout")
    raw = json.loads((source / "config.json").read_text())
    state = load_file(source / "model.safetensors")
    d, h, act = raw["d_model"], raw["d_hidden"], {None: lambda x: x, "silu": F.silu, "relu": F.relu, "gelu": F.gelu}
    for i in range(raw["n_layer"]):
        mlp = f"transformer.h.{i}.mlp"
        if not bilinear:
            state[f"{mlp}.w.weight"] = state[f"{mlp}.w.weight"][:h].clone()
        if bias:
            state |= {f"{mlp}.w.bias": torch.randn((1 + bilinear) * h), f"{mlp}.p.bias": torch.randn(d)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**raw, "bias": bias, "gate": gate, "bilinear": bilinear}))
    plain, model = (tnlm.load(folder, dtype=torch.float64) for folder in (source, tmp_path))
    tokens = ids(2, 5)
    with torch.no_grad():
        x = plain.embed(tokens)
        for i, block in enumerate(plain.blocks):
            x = x + block.attn(block.ln1(x), None, rotary_tables(5, d // raw["n_head"]))[0]
            mlp = {k.partition(".mlp.")[2]: t.double() for k, t in state.items() if f".h.{i}.mlp." in k}
            w, w_bias, p, p_bias = (mlp.get(f"{m}.{k}") for m in "wp" for k in ("weight", "bias"))
            hidden = F.linear(block.ln2(x), w, w_bias)
            hidden = act[gate](hidden[..., :h]) * (hidden[..., h:] if bilinear else 1)
            x = x + F.linear(hidden, p, p_bias)
        expected = plain.unembed(plain.ln_final(x))
        assert_close(model(tokens), expected)
    assert model.config.mlp_hidden_bias == bias
    assert bool((model(tokens) - plain(tokens)).abs().max() > 0.1) == bool(bias or gate)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "change, message",
    [
        ({"bilinear": False}, "gate must be one of 'relu', 'gelu', got None"),
        ({"bilinear": False, "gate": "relu"}, r"mlp.w.weight \(\d+, 32\) instead of"),
        ({"bias": True}, r"missing transformer.h.0.mlp.p.bias, transformer.h.0.mlp.w.bias"),
        ({"bias": 1}, "bias must be true or false, got 1"),
        ({"attention2": True}, "attention2 must be False"),
        ({"gate": "tanh"}, "gate must be one of None, 'silu', 'relu', 'gelu', got 'tanh'"),
        ({"normalization": "yes"}, "normalization must be true or false, got 'yes'"),
    ],
)
def test_decomposition_layout_refuses_what_it_cannot_hold(tmp_path, change, message):
    source = recorded("bilinear_decomposition_layout")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        tnlm.load(tmp_path)


@pytest.mark.user_error
def test_rotary_buffer_of_another_base_is_refused(tmp_path):
    source = recorded("bilinear_decomposition_layout")
    state = load_file(source / "model.safetensors")
    state["transformer.h.1.attn.rotary.inv_freq"] **= 1.1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"h\.1\.attn\.rotary\.inv_freq must hold the rotary frequencies of base 10000"
    ):
        tnlm.load(tmp_path)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("toy_layout/attention_only_2L", {"use_mixer": True}, "use_mixer must be False"),
        ("toy_layout/attention_only_2L", {"use_softmax": True}, "use_softmax must be False"),
        ("toy_layout/attention_only_2L", {"use_bilinear_attn": False}, "use_bilinear_attn must be True"),
        ("toy_layout/attention_only_2L", {"model_type": "transformer"}, "holds no layers.0.bilinear.proj1.weight"),
        ("cycle_layout/lerp", {"scale": 1.0}, "scale must be between 0 and 1 for residual='lerp', got 1.0"),
        ("cycle_layout/lerp", {"norm": "layer"}, "norm must be one of None, False, True, got 'layer'"),
        ("cycle_layout/lerp", {"n_layer": 2**31}, "n_layer=2147483648 layers cannot come from a file of 14 tensors"),
        ("cycle_layout/lerp", {"rotary_base": 500}, "missing none; unexpected rotary_base=500"),
        ("cycle_layout/lerp", {"scale": "half"}, "scale must be a finite number, got 'half'"),
        ("published_toys/spec_rms", {"spec": ["attn", "conv"]}, r"spec must list layers, each 'attn' or 'mlp', got"),
        ("published_toys/spec_rms", {"spec": []}, r"spec must list layers"),
        ("published_toys/spec_rms", {"spec": ["attn"] * 3}, r"missing layers.2.k1.weight"),
        ("published_toys/spec_rms", {"spec": ["attn", "mlp"]}, r"missing layers.1.D.weight.*unexpected layers.1.k1"),
        ("published_toys/spec_rms", {"norm": "none"}, r"norm must be one of None, False, True, 'rms', got 'none'"),
        ("published_toys/spec_attn_mlp_attn", {"d_hidden": 63}, r"layers.1.L.weight \(64, 16\) instead of \(63, 16\)"),
        ("published_toys/spec_attn_mlp_attn", {"mlp_residual": 1}, "mlp_residual must be one of 'add', 'lerp', got 1"),
        ("cycle_layout/lerp", {"attention": "linear"}, "attention must be one of 'bilinear', 'softmax', got 'linear'"),
        ("two_layer_layout", {"model": 3}, "must hold a block 'model'"),
    ],
)
def test_toy_layouts_refuse_what_they_cannot_hold(tmp_path, name, change, message):
    source = recorded(name)
    folder = tmp_path / "copy"
    copy_tree(source, folder)
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ValueError, match=message):
        tnlm.load(folder)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, key", [("cycle_layout/lerp", "embed.weight"), ("published_toys/spec_attn_mlp_attn", "layers.1.L.weight")]
)
def test_scalar_in_place_of_a_matrix_is_named(tmp_path, name, key):
    source = recorded(name)
    copy_tree(source, tmp_path)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.save({**state, key: torch.tensor(1.0)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=rf"wrong shape {key} \(\) instead of"):
        tnlm.load(tmp_path)


def copy_tree(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def test_two_layer_layout_may_interpolate(tmp_path):
    """``x <- (1 - s) x + s O z`` instead of ``x + s O z``, against the loop written out."""
    source = recorded("two_layer_layout")
    copy_tree(source, tmp_path)
    raw = json.loads((source / "config.json").read_text())
    raw["model"]["residual"] = "lerp"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    added, found = (tnlm.load(folder, dtype=torch.float64) for folder in (source, tmp_path))
    tokens, s = ids(2, 9), raw["model"]["attn_scale"]
    x = added.embed(tokens)
    tables = rotary_tables(9, added.config.d_qk)
    for block in added.blocks:
        x = (1 - s) * x + block.attn(x, None, tables)[0]
    assert_close(found(tokens), added.unembed(x))


def test_cycle_config_may_lie_in_the_history(tmp_path):
    source = recorded("cycle_layout/lerp")
    (tmp_path / "model.pt").write_bytes((source / "model.pt").read_bytes())
    raw = json.loads((source / "config.json").read_text())
    history = {"loss": [3.1], "config": {k: raw[k] for k in ("n_layer", "d_model", "n_head", "scale")}}
    (tmp_path / "history.json").write_text(json.dumps(history))
    assert same_state(tnlm.load(tmp_path), tnlm.load(source))


def write_history(folder: Path, **config) -> None:
    (folder / "history.json").write_text(json.dumps({"loss": [3.1, float("nan")], "config": config}))


def test_history_may_hold_nan_losses_and_a_config_may_not(tmp_path):
    source = recorded("cycle_layout/lerp")
    (tmp_path / "model.pt").write_bytes((source / "model.pt").read_bytes())
    raw = json.loads((source / "config.json").read_text())
    sizes = {k: raw[k] for k in ("n_layer", "d_model", "n_head", "scale")}
    write_history(tmp_path, **sizes)
    assert same_state(tnlm.load(tmp_path), tnlm.load(source))
    for scale in (float("nan"), float("inf")):
        write_history(tmp_path, **sizes | {"scale": scale, "residual": "add"})
        with pytest.raises(ValueError, match=r"scale must be a finite number, got (nan|inf)"):
            tnlm.load(tmp_path)


def test_config_and_history_must_describe_one_architecture(tmp_path):
    source = recorded("cycle_layout/lerp")
    copy_tree(source, tmp_path)
    raw = json.loads((source / "config.json").read_text())
    expected = tnlm.load(source)
    # Text for numbers, other bookkeeping, and keys of one file alone are no contradiction
    write_history(tmp_path, n_head=raw["n_head"], scale=str(raw["scale"]), n_params=1, seed=5, topology="grid")
    assert same_state(tnlm.load(tmp_path), expected)
    other = 1 if raw["n_head"] != 1 else 2
    write_history(tmp_path, n_head=other, scale=raw["scale"], seed=5)
    for path in (tmp_path, tmp_path / "model.pt"):
        with pytest.raises(ValueError, match=rf"describe different models: n_head={raw['n_head']} and {other}\. "):
            tnlm.load(path)
    assert same_state(tnlm.load(tmp_path, overrides={"n_head": raw["n_head"]}), expected)
    for useless in ('[{"config": {}}]', "no JSON", '{"config": 3}', "{}"):
        (tmp_path / "history.json").write_text(useless)
        assert same_state(tnlm.load(tmp_path), expected)


def test_step_file_is_the_last_one(tmp_path):
    source = recorded("two_layer_layout")
    copy_tree(source, tmp_path)
    early = torch.load(tmp_path / "checkpoints/step_00010.pt", weights_only=True)
    early["model_state_dict"]["embed.weight"] = torch.zeros(53, 24)
    torch.save(early, tmp_path / "checkpoints/step_00009.pt")
    assert tnlm.load(tmp_path).embed.w_e.any()
    assert not tnlm.load(tmp_path / "checkpoints/step_00009.pt").embed.w_e.any()


def test_raw_training_checkpoint(tmp_path):
    """Prefixed keys, a config pickled by reference, optimiser states: as the published script saves it."""
    model = published_model()
    raw = published_config(model, step=None, bilinear_attn=None, squared_attn=None)
    model = published_model(attention="softmax")
    main = sys.modules["__main__"]
    main.GPTConfig = type("GPTConfig", (), {"__module__": "__main__"})
    try:
        config = main.GPTConfig()
        config.__dict__.update(raw)
        state = {f"_orig_mod.{k}": t for k, t in published_state(model).items()}
        optimizers = [{"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}]
        file = tmp_path / "state_step000040.pt"
        torch.save({"step": 40, "code": "import os", "model": state, "config": config, "optimizers": optimizers}, file)
    finally:
        del main.GPTConfig
    assert weightfiles.read(file).config == raw
    for path in (file, tmp_path):
        assert same_state(tnlm.load(path), model)
