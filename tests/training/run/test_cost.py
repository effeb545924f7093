"""The figures of ``--dry-run``: memory against what autograd keeps, the others against arithmetic on what is built."""

import re

import pytest
import torch

from tests.training.small import small_config
from tnlm.training.presets import preset
from tnlm.training.run.cost import estimate, to_text
from tnlm.training.run.losses import MeanLoss
from tnlm.transformer import Transformer


def kept_bytes(config, *, half: bool) -> int:
    """Memory of everything that one forward keeps for backward, the parameters aside."""
    model = Transformer(config.model, implementation="chunked")
    model.compute_dtype = torch.bfloat16 if half else None
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t  # alive, or its address is used again
        return t

    tokens = torch.randint(0, config.model.d_vocab, (config.micro_batch, config.seq))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = MeanLoss(model)(tokens, tokens)
    assert loss.requires_grad
    return sum(size for address, (size, _) in kept.items() if address not in own)


@pytest.mark.parametrize(
    "name, mlp",
    [("nano", "bilinear"), ("nano", "swiglu"), ("nano", "relu2"), ("tiny", "bilinear"), ("nano-pure", "bilinear")],
)
def test_activations_in_float32(name, mlp):
    config = preset(name)
    config = config.replace(model=config.model.replace(mlp=mlp), batch=8, micro_batch=8)
    assert estimate(config)["activation_bytes"] == pytest.approx(kept_bytes(config, half=False), rel=0.2)


def test_activations_in_half_precision():
    config = preset("small")
    sizes = {"n_layer": 3, "n_head": 3, "d_model": 96, "d_hidden": 384, "d_qk": 32, "d_vocab": 640, "d_vocab_used": 640}
    config = config.replace(model=config.model.replace(**sizes, n_ctx=512), micro_batch=4, precision="bfloat16")
    assert estimate(config)["activation_bytes"] == pytest.approx(kept_bytes(config, half=True), rel=0.2)


@pytest.mark.parametrize(
    "name, changes, half",
    [
        ("nano", {}, False),
        ("nano", {"preset": "mine"}, False),
        ("nano", {"precision": "bfloat16"}, True),
        ("debug", {}, True),
        ("debug", {"preset": "nano"}, True),
        ("debug", {"device": "cpu"}, False),
        ("debug", {"precision": "float32"}, False),
        ("nano", {"device": "cuda"}, True),
    ],
)
def test_precision_follows_the_configuration_and_not_its_label(name, changes, half):
    config = preset(name).replace(**changes)
    by_precision = {p: estimate(config.replace(precision=p))["activation_bytes"] for p in ("float32", "bfloat16")}
    assert by_precision["float32"] != by_precision["bfloat16"]
    assert estimate(config)["activation_bytes"] == by_precision["bfloat16" if half else "float32"]


def counted(config):
    """Parameters of a model that is built: all, and those in matrices of its blocks."""
    model = Transformer(config.model)
    return sum(p.numel() for p in model.parameters()), sum(
        p.numel() for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2
    )


def test_every_figure_of_a_dry_run(tmp_path):
    """From a model that is built, shards that are written, and the multiplications of the formula in docs."""
    config = small_config(tmp_path, steps=210, keep_last=2, keep_every=40, save_every=20, micro_batch=2)
    params, matrices = counted(config)
    model = config.model
    assert (model.n_layer, model.n_head, model.d_qk, model.d_head) == (1, 2, 6, 6)
    flops = 6 * (matrices + model.d_vocab * model.d_model) + 6 * 6 * 1 * 2 * (2 * 6 + 6)
    state = 4 * (params + params + matrices + 2 * (params - matrices))  # weights, gradients, Muon, Adam
    saved = 4 * (params + matrices + 2 * (params - matrices))
    kept = [40, 80, 120, 130, 160, 200, 210]  # the warm-down begins at 130, the newest two are 200 and 210
    tokens = 210 * 4 * 6
    facts = estimate(config)
    work = tokens * flops
    assert facts["eta_seconds"] == pytest.approx(
        {"cpu_thread": work / 25e9, "1xH100": work / (989e12 * 0.4), "8xH100": work / (8 * 989e12 * 0.4)}
    )
    expected = {
        "command": "run",
        "dry_run": True,
        "folder": str(config.folder),
        "n_params": params,
        "flops_per_token": flops,
        "tokens_per_step": 24,
        "steps": 210,
        "tokens": tokens,
        "flops": work,
        "state_bytes": state,
        "activation_bytes": facts["activation_bytes"],  # approximate: compared with autograd above
        "checkpoint_bytes": saved,
        "kept_steps": kept,
        "metrics_bytes": 210 * 256,
        "disk_bytes": 7 * saved + 210 * 256,
        "export_bytes": 4 * params,
        "train_tokens": 301 + 157 + 211,
        "epochs": tokens / (301 + 157 + 211),
        "data_problem": None,
        "eta_seconds": facts["eta_seconds"],
    }
    assert facts == expected


def test_a_dry_run_as_text_shows_each_figure_under_its_name(tmp_path):
    """Sizes for which no two figures agree; MiB and GiB are powers of two."""
    config = small_config(tmp_path)
    facts = {
        "folder": "F",
        "flops_per_token": 12_345,
        "flops": 6.78e15,
        "tokens": 432_100,
        "state_bytes": 3 * 2**30,
        "activation_bytes": 5 * 2**20,
        "checkpoint_bytes": 7 * 2**20,
        "kept_steps": [1, 20, 300, 4000, 5000, 6000, 7000],
        "metrics_bytes": 11 * 2**20,
        "disk_bytes": 13 * 2**30 + 2**29,
        "export_bytes": 17 * 2**20,
        "train_tokens": 1_234,
        "epochs": 2.5,
        "data_problem": None,
        "eta_seconds": {"cpu_thread": 61, "1xH100": 3_723, "8xH100": 7},
    }
    lines = {line[:13].strip(): line[13:] for line in to_text(config, facts).splitlines()[1:]}
    assert list(lines) == ["parameters", "FLOPs", "tokens", "memory", "data", "disk", "time"]
    assert lines["parameters"] == f"{config.model.n_params:,}"
    assert lines["FLOPs"].startswith("12,345 per token")
    assert lines["FLOPs"].endswith("6.78e+15 in all")
    assert lines["tokens"] == "24 per step, 20 steps, 432,100 in all"
    assert re.match(r"3.00 GiB of weights, gradients and optimiser state, about 5.0 MiB of act", lines["memory"])
    assert lines["data"].startswith("2.50 epochs of 1,234 tokens: tokens come more than once")
    assert lines["disk"].startswith(
        "13.50 GiB when done: 7 checkpoints of 7.0 MiB kept (steps 1, 20, 300, ..., 6,000, 7,000) and 11.0 MiB of "
    )
    assert lines["disk"].endswith("17.0 MiB")
    assert re.match(
        r"about 1:01 on cpu_thread, 1:02:03 on 1xH100, 0:07 on 8xH100 \(h:mm:ss; 40% of 9.89e\+14 FLOP/s", lines["time"]
    )
    once = to_text(config, {**facts, "epochs": 1.0})
    assert "1.00 epochs of 1,234 tokens\n" in once
