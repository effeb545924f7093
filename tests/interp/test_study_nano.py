"""On models trained here on real text: a prediction from the weights that the run confirms, and exact explanations."""

import pytest
import torch

import tnlm
from tests.limits import assert_close
from tnlm import interp
from tnlm.points import intervene, record
from tnlm.training import preset, train
from tnlm.training.data import corpus

SEQ = 64
# every MLP kind and every attention kind
KINDS = [
    ("squared", "squared"),
    ("swiglu", "softmax"),
    ("relu2", "differential"),
    ("gelu", "squared_normalized"),
    ("none", "bilinear"),
    ("bilinear", "none"),
    ("geglu", "bilinear"),
    ("reglu", "bilinear"),
    ("glu", "softmax"),
    ("relu", "squared"),
]


def trained(folder, mlp, attention, steps):
    """Two layers of the nano preset's width after some steps on the corpus that every Python carries."""
    config = preset("nano", mlp=mlp, attention=attention).with_model(n_layer=2, n_ctx=SEQ)
    small = {"batch": 8, "micro_batch": 8, "val_every": steps, "val_tokens": 8 * SEQ, "save_every": None}
    train(config.replace(steps=steps, threads=1, sample_tokens=0, out=str(folder), **small), progress=False)
    return tnlm.load(folder)


@pytest.fixture(scope="module")
def text():
    """Held-out text: 48 rows of 65 tokens."""
    ids = corpus.embedded_tokenizer().encode("\n\n".join(corpus.embedded_corpus().validation[:60]))
    return torch.tensor(ids[: 48 * (SEQ + 1)]).view(48, SEQ + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano") / "bilinear"
    trained(folder, "bilinear", "bilinear", 60)
    return folder


def test_removing_the_top_component_moves_the_logit_as_predicted(folder, text):
    model = tnlm.load(folder, dtype=torch.float64)
    net, layer = interp.extract(model), model.config.n_layer - 1
    inputs = text[:, :-1]
    run = record(model, inputs, [f"blocks.{layer}.ln2.hook_normalized", "ln_final.hook_scale"])
    x, scale = run[f"blocks.{layer}.ln2.hook_normalized"], run["ln_final.hook_scale"]
    frequent = text.flatten().bincount(minlength=model.config.d_vocab).topk(3).indices.tolist()
    kl, kl_random = [], []
    for token in frequent:
        direction = net.unembed[token]
        top = interp.eig(net.mlp[layer], direction, k=1)
        edited = interp.with_mlp(model, {layer: interp.remove(net.mlp[layer], direction, top.values, top.vectors)})
        predicted = -top.values[0] * (x @ top.vectors[:, 0]).square() / scale[..., 0]
        with intervene(edited, {"ln_final.hook_scale": lambda _: scale}):  # the norm of the run
            change = (edited.pre_softcap(inputs) - model.pre_softcap(inputs))[..., token]
        assert_close(change, predicted)
        assert change.abs().max() > 0.1  # the component is one that text uses

        moved = interp.delta_ce(model, edited, text)
        print(f"token {token}: eigenvalue {float(top.values[0]):+.4f}, {moved}")  # shown with -rP
        kl.append(moved.kl)
        if token == frequent[0]:
            assert moved.mean > 2 * moved.error > 0  # worse on held-out text, beyond chance
        for _ in range(2):  # as large a component along a random input direction
            vector = torch.nn.functional.normalize(torch.randn_like(top.vectors), dim=0)
            other = interp.remove(net.mlp[layer], direction, top.values, vector)
            kl_random.append(interp.delta_ce(model, interp.with_mlp(model, {layer: other}), text).kl)
    assert sum(kl) / len(kl) > 10 * sum(kl_random) / len(kl_random)


def check_ten_prompts(model, text):
    parts = set()
    for row, tokens in enumerate(text[:10]):
        prompt, foil = tokens[: 3 + 2 * row], int(tokens[-1]) if row % 2 else None
        explanation = interp.explain(model, prompt, int(tokens[3 + 2 * row]), foil)
        size = sum(abs(r.value) for r in explanation.rows)
        assert_close(explanation.remainder, 0.0, scale=size, dtype=torch.float32)
        assert_close(explanation.logit, sum(r.value for r in explanation.rows), scale=size, dtype=torch.float32)
        parts |= {r.kind for r in explanation.rows if abs(r.value) > 1e-3}
    return parts


def test_explanations_of_ten_prompts_are_exact(folder, text):
    assert check_ten_prompts(tnlm.load(folder), text) >= {"direct", "head", "mlp", "mlp_rest"}


@pytest.mark.parametrize("mlp, attention", KINDS)
def test_explanations_are_exact_for_every_kind(mlp, attention, tmp_path, text):
    model = trained(tmp_path / "run", mlp, attention, 15)
    expected = {"direct"} | ({"head"} if attention != "none" else set()) | ({"mlp"} if mlp != "none" else set())
    assert check_ten_prompts(model, text) >= expected
