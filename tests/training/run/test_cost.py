"""The memory that ``--dry-run`` promises, against what autograd keeps."""

import pytest
import torch

from tnlm.training.presets import preset
from tnlm.training.run.cost import estimate
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
