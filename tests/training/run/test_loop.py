"""The loop's parts: losses, accumulation, groups, validation, and what it refuses before the first step."""

import copy
import json
import math
import os
import re
import shutil

import pytest
import torch

import tnlm
from tests.limits import ROUNDINGS, assert_close
from tests.tiny_models import ATTENTIONS, build, ids, tiny
from tests.training.small import VOCAB, small_config, write_data
from tnlm.text.evaluate import cross_entropy
from tnlm.text.tokenizer import get
from tnlm.training import train
from tnlm.training.compare.runs import load_run
from tnlm.training.data.shards import find_shards
from tnlm.training.data.stream import TokenStream
from tnlm.training.data.tokenize import tokenize_files
from tnlm.training.optim.groups import Optimizers
from tnlm.training.run.distributed import World
from tnlm.training.run.export import export_run
from tnlm.training.run.loop import Trainer
from tnlm.training.run.losses import MeanLoss, TokenLosses
from tnlm.training.run.metrics import read_metrics
from tnlm.training.run.start import build_model, cpu_threads

PLAINER = [
    {"norm": "none", "qk_norm": False, "embedding_norm": False, "logit_softcap": None},
    {"qk_bias": True, "logit_softcap": None},
    {"x0_mixing": False, "value_residual": False, "mlp_bias": False},
]


def losses_of(config, steps: int = 6) -> list[float]:
    trainer = Trainer(config, progress=False)
    return [trainer.train_step()["loss"] for _ in range(steps)]


GOLDEN_CURVE = [3.970291, 3.962451, 3.953027, 3.956661, 3.941586, 3.931513, 3.918772, 3.905281, 3.893877, 3.907323]
"""Training losses of the small configuration, recorded when the loop reproduced the public trajectories."""


def test_golden_curve(tmp_path):
    assert_close(losses_of(small_config(tmp_path), 10), GOLDEN_CURVE, dtype=torch.float32)


def test_the_model_learns(tmp_path):
    config = small_config(tmp_path, steps=80, val_every=80, save_every=None)
    result = train(config, progress=False)
    curve = [e["loss"] for e in read_metrics(config.folder / "metrics.jsonl") if e["kind"] == "val"]
    assert_close(curve[0], math.log(VOCAB), dtype=torch.float32)
    # each id follows the one before by 1 with probability 0.8: the entropy of that is 0.64 nats
    assert 0.64 < result.val_loss < 3.5


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_accumulation_does_not_change_the_batch(micro_batch, tmp_path):
    config = small_config(tmp_path)
    expected = losses_of(config)
    other = losses_of(config.replace(micro_batch=micro_batch, out=str(tmp_path / "other")))
    assert_close(other, expected, dtype=torch.float32)
    assert_close(other[0], expected[0], roundings=64, dtype=torch.float32)


@pytest.mark.parametrize("changes", [{"attention": kind} for kind in ATTENTIONS] + PLAINER, ids=str)
def test_the_fast_step_has_the_gradients_of_the_plain_one(changes, monkeypatch):
    """Closed forms, chunked attention and the loss by rows in float32, against the formulas in float64."""
    model, tokens = build(tiny(n_layer=2, **changes), dtype=torch.float32), ids(3, 6)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    plain = copy.deepcopy(model).double()
    model.set_implementation("chunked")
    loss = MeanLoss(model)(inputs, targets)
    loss.backward()
    monkeypatch.setattr("tnlm.kernels.pointwise.closed_gradients_fit", lambda *_: False)
    plain.set_implementation("eager")
    want = torch.nn.functional.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
    want.backward()
    assert_close(loss.item(), want.item(), roundings=64, dtype=torch.float32)
    scale = max(float(q.grad.abs().max()) for q in plain.parameters())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        # forward, loss and backward: twice the depth of a forward, with sums over the batch too
        assert_close(p.grad.double(), q.grad, scale=scale, roundings=4 * ROUNDINGS, dtype=torch.float32)


@pytest.mark.parametrize("module", ["", "unembed"])
def test_hooks_on_the_logits_reach_the_loss(module):
    model, tokens = build(tiny(n_layer=1), dtype=torch.float32), ids(2, 6)
    plain = MeanLoss(model)(tokens[:, :-1], tokens[:, 1:])
    model.get_submodule(module).register_forward_hook(lambda _m, _i, out: out * 0)
    loss = MeanLoss(model)(tokens[:, :-1], tokens[:, 1:])
    assert_close(loss.item(), math.log(13), roundings=64, dtype=torch.float32)
    assert abs(plain.item() - loss.item()) > 0.1


def test_tied_weights_have_one_gradient():
    model, tokens = build(tiny(n_layer=1)), ids(2, 6)
    model.unembed.w_u = model.embed.w_e
    loss = MeanLoss(model)(tokens[:, :-1], tokens[:, 1:])
    (want,) = torch.autograd.grad(TokenLosses(model)(tokens[:, :-1], tokens[:, 1:]).mean(), model.embed.w_e)
    for create_graph in (True, False):
        (got,) = torch.autograd.grad(loss, model.embed.w_e, create_graph=create_graph, retain_graph=True)
        assert_close(got, want)


def test_the_loss_in_bfloat16_is_the_mean_of_the_token_losses():
    model, tokens = build(tiny(n_layer=1), dtype=torch.float32), ids(2, 6)
    model.compute_dtype = torch.bfloat16
    loss = MeanLoss(model)(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert torch.equal(loss, TokenLosses(model)(tokens[:, :-1], tokens[:, 1:]).mean())


@pytest.mark.parametrize("val_batch", [1, 3, 10])
def test_validation_is_the_plain_cross_entropy(val_batch, tmp_path):
    trainer = Trainer(small_config(tmp_path, val_batch=val_batch), progress=False)
    for _ in range(5):
        trainer.train_step()
    stream = TokenStream(find_shards(tmp_path / "data", split="val"))
    tokens = torch.from_numpy(stream.read(0, 61)).long()
    expected = cross_entropy(trainer.model, tokens)
    values = trainer.evaluate()
    assert_close(values["loss"], expected.loss, roundings=64, dtype=torch.float32)
    assert (values["val_tokens"], expected.tokens) == (60, 60)


def test_buckets_average_to_the_loss(tmp_path):
    data = write_data(tmp_path / "data", sizes=(900,), val=900)
    model = small_config(tmp_path).model.replace(n_ctx=100)
    trainer = Trainer(small_config(tmp_path, model=model, data=str(data), val_tokens=800), progress=False)
    trainer.train_step()
    values = trainer.evaluate()
    (a, b, first), (c, d, second) = values["buckets"]
    assert (a, b, c, d) == (0, 64, 64, 100)
    assert_close((64 * first + 36 * second) / 100, values["loss"])
    assert first != second


def test_groups_and_rates_are_the_published_ones(tmp_path):
    config = small_config(tmp_path, steps=10, warmdown=0.4, weight_decay=0.1)
    model = build_model(config, mixed=False)
    optimizers = Optimizers(model, config)
    named = {p: name for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    factor, momentum = optimizers.step(8)
    assert (factor, momentum) == (0.5, 0.95)
    groups = [
        (g["lr"], g["weight_decay"], {named[p] for p in g["params"]}) for o in optimizers.all for g in o.param_groups
    ]
    block = {name for name in named.values() if name.startswith("blocks.")}
    matrices = {name for p, name in named.items() if name in block and p.ndim == 2}
    assert groups == [
        (0.15, 0.1, {"embed.w_e"}),
        (0.001, 0.1, {"unembed.w_u"}),
        (0.01, 0.0, block - matrices),
        (0.01, 0.1, matrices),
    ]
    assert len(block - matrices) == 3
    assert {g["betas"] for g in optimizers.adam.param_groups} == {(0.9, 0.95)}
    assert {g["eps"] for g in optimizers.adam.param_groups} == {1e-8}


def test_zero_gradients_and_no_decay_change_nothing(tmp_path):
    config = small_config(tmp_path)
    model = build_model(config, mixed=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.step(0)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
    decaying = Optimizers(model, config.replace(weight_decay=0.5))
    decaying.step(0)
    assert_close(model.embed.w_e, before["embed.w_e"] * (1 - 0.3 * 0.5))
    assert_close(model.blocks[0].attn.w_v, before["blocks.0.attn.w_v"] * (1 - 0.02 * 0.5))
    torch.testing.assert_close(model.blocks[0].lambdas, before["blocks.0.lambdas"], rtol=0, atol=0)


def test_clipping_scales_all_gradients_to_the_limit(tmp_path, monkeypatch):
    trainer = Trainer(small_config(tmp_path, clip=0.1), progress=False)
    norms = []
    monkeypatch.setattr(
        trainer.optimizers,
        "step",
        lambda step: (
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])) or (1, 1)
        ),
    )
    values = trainer.train_step()
    assert values["grad_norm"] > 0.1
    assert_close(norms[0], torch.tensor(0.1))


def test_initial_model_depends_on_the_seed_alone(tmp_path):
    config = small_config(tmp_path)
    torch.manual_seed(123)
    first = build_model(config, mixed=False).state_dict()
    second = build_model(config, mixed=False).state_dict()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    other = build_model(config.replace(seed=1), mixed=False)
    assert not torch.equal(first["embed.w_e"], other.embed.w_e)
    scaled = build_model(config.replace(init_scale=0.5), mixed=False)
    assert_close(scaled.embed.w_e, first["embed.w_e"] / 2)


def test_text_gives_bits_per_byte_and_a_sample(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    tokenize_files([tmp_path / "text.txt"], tmp_path / "bytes", get("bytes"), separator=". ", val_tokens=200)
    config = small_config(tmp_path, data=str(tmp_path / "bytes"), tokenizer="bytes", steps=3).with_model(d_vocab=256)
    result = train(config, progress=False)
    # every token is one byte
    assert result.bits_per_byte == pytest.approx(result.val_loss / math.log(2))
    events = {event["kind"]: event for event in read_metrics(config.folder / "metrics.jsonl")}
    assert isinstance(events["sample"]["text"], str)
    assert events["start"]["data"]["tokenizer"] == "bytes"
    assert tnlm.text.tokenizer.Tokenizer.load(config.folder / "checkpoints" / "step_000003").hash == get("bytes").hash


def test_pure_models_train(tmp_path):
    model = tnlm.ModelConfig.pure(d_vocab=VOCAB, n_layer=2, n_head=2, d_model=12, d_hidden=14, n_ctx=6)
    config = small_config(tmp_path, steps=40, lr_matrix=0.005, lr_embed=0.03, save_every=None).replace(model=model)
    assert train(config, progress=False).val_loss < math.log(VOCAB) - 0.1


def test_what_a_run_depends_on_is_recorded(tmp_path):
    config = small_config(tmp_path, steps=2)
    train(config, progress=False)
    assert json.loads((config.folder / "config.json").read_text()) == config.to_dict()
    start = read_metrics(config.folder / "metrics.jsonl")[0]
    assert (start["kind"], start["step"], start["recipe"], start["dtype"]) == ("start", 0, "replication", "float32")
    assert start["n_params"] == config.model.n_params
    assert start["versions"]["torch"] == torch.__version__
    data = start["data"]
    assert data["tokens"] - 1 == data["windows"] * config.seq + data["tokens_dropped"]
    assert 0 <= data["tokens_dropped"] < config.seq


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": "nowhere"}, "no train shards|no shards matching nowhere"),
        ({"data": "fineweb10B"}, r"fineweb10B, which is not there: fetch it with `tnlm-train data get fineweb10B`"),
        ({"val_tokens": 600}, r"val_tokens must be at most 144 .*got 600"),
        ({"tokenizer": "bytes"}, "vocabulary of the data, got d_vocab=53 and 256 ids in .*--model.d-vocab 256"),
        ({"tokenizer": "nope"}, "--tokenizer none"),
        ({"data": "corpus", "tokenizer": "gpt2"}, "the embedded corpus is read as"),
        ({"device": "cuda:9"}, "needs a CUDA device|below the number of GPUs"),
        ({"implementation": "trytone"}, "implementation must be one of"),
    ],
)
def test_refused_before_the_first_step(changes, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TNLM_CACHE", str(tmp_path))
    config = small_config(tmp_path).replace(**changes)
    with pytest.raises(ValueError, match=message):
        train(config, progress=False)
    assert not (config.folder / "checkpoints").exists()


@pytest.mark.user_error
def test_a_truncated_shard_is_refused_or_read_to_its_end(tmp_path):
    config = small_config(tmp_path, steps=1)
    shard = tmp_path / "data" / "tiny_train_000002.bin"
    shard.write_bytes(shard.read_bytes()[:-51])
    with pytest.raises(
        ValueError, match=r"tiny_train_000002.bin.* pass --allow-truncated to use (\d+) tokens"
    ) as error:
        train(config, progress=False)
    held = int(re.search(r"use (\d+) tokens", str(error.value))[1])
    trainer = Trainer(config.replace(allow_truncated=True), progress=False)
    assert trainer.inputs.loader.stream.sizes[1] == held
    assert math.isfinite(trainer.train_step()["loss"])


@pytest.mark.user_error
def test_an_id_that_is_no_row_stops_with_its_place(tmp_path):
    config = small_config(tmp_path).with_model(d_vocab=50)
    with pytest.raises(ValueError, match=r"id 5[0-2] >= vocab 50 in .*\.bin at token \d+"):
        train(config, progress=False)


@pytest.mark.user_error
def test_validation_shard_among_the_training_shards(tmp_path):
    config = small_config(tmp_path)
    data = tmp_path / "data"
    (data / "tiny_train_000009.bin").write_bytes((data / "tiny_val_000000.bin").read_bytes())
    with (
        pytest.warns(UserWarning, match="not numbered without gaps"),
        pytest.raises(ValueError, match="validation shard"),
    ):
        train(config, progress=False)


def test_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    config = small_config(tmp_path).replace(threads=None)
    assert cpu_threads(config, World()) == 4
    assert cpu_threads(config, World(rank=1, size=2)) == 1
    assert cpu_threads(config.replace(threads=3), World(size=2)) == 3


def test_compiled_model_gives_the_same_losses(tmp_path, monkeypatch, request):
    """The whole step in one graph; the eager backend needs no compiler."""
    if request.config.getoption("--jaxtyping-packages"):
        pytest.skip("the runtime type checker cannot be compiled")
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: compile_model(m, backend="eager", fullgraph=True))
    expected = losses_of(small_config(tmp_path), 3)
    assert_close(losses_of(small_config(tmp_path, "compiled", compile=True), 3), expected, dtype=torch.float32)


@pytest.mark.user_error
def test_a_failed_compilation_names_the_way_out(tmp_path, monkeypatch):
    def no_compiler(graph, inputs):
        raise OSError("no working C++ compiler found")

    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m: compile_model(m, backend=no_compiler))
    with pytest.raises(ValueError, match=r"cannot be compiled \(.*no working C\+\+ compiler.*\); .*--compile False"):
        train(small_config(tmp_path, compile=True), progress=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_gpu(tmp_path):
    """bf16, compiled, the Triton kernel, save and resume."""
    config = small_config(tmp_path, device="cuda", precision="bfloat16", compile=True, steps=30)
    config = config.with_model(d_model=64, n_head=2, d_hidden=64)
    result = train(config, progress=False)
    assert result.val_loss < math.log(VOCAB)
    assert train(config, progress=False) == result


def test_tokens_that_come_again_are_announced_and_logged(tmp_path, capsys):
    """669 tokens are 111 windows of 6: steps of 16 begin again in the 7th and in the 14th."""
    config = small_config(tmp_path, batch=16, micro_batch=16, steps=18)
    assert sum((301, 157, 211)) == 669
    train(config)
    err = capsys.readouterr().err
    assert "18 steps of 96 tokens, 2.59 epochs of 669;" in err
    assert "step 7/18  epoch 2 of 2.59 begins: tokens come again" in err
    events = read_metrics(config.folder / "metrics.jsonl")
    assert [(e["step"], e["epoch"]) for e in events if e["kind"] == "epoch"] == [(7, 2), (14, 3)]
    assert [e["epoch"] for e in events if e["kind"] == "train"] == [16 * step / 111 for step in range(1, 19)]
    assert next(e for e in events if e["kind"] == "start")["epochs"] == 16 * 18 / 111
    assert load_run(config.folder).curve_steps.tolist() == [0, 5, 10, 15, 18], "other readers pass over the events"
    exported = export_run(config.folder, tmp_path / "exported")
    assert exported["val"] == load_run(config.folder).final


def test_an_epoch_is_logged_once_however_the_run_was_stopped(tmp_path):
    config = small_config(tmp_path, batch=16, micro_batch=16, steps=18, save_every=7)
    train(config, progress=False)
    shutil.rmtree(config.folder / "checkpoints" / "step_000018")
    train(config, progress=False)
    events = read_metrics(config.folder / "metrics.jsonl")
    assert [(e["step"], e["epoch"]) for e in events if e["kind"] == "epoch"] == [(7, 2), (14, 3)]


def test_a_run_within_its_data_has_no_epoch_event(tmp_path):
    config = small_config(tmp_path)
    train(config, progress=False)
    assert all(e["kind"] != "epoch" for e in read_metrics(config.folder / "metrics.jsonl"))


def test_a_batch_may_be_more_than_an_epoch(tmp_path):
    config = small_config(tmp_path, batch=240, micro_batch=240, steps=2, momentum_warmup_steps=1)
    train(config, progress=False)
    events = read_metrics(config.folder / "metrics.jsonl")
    assert [(e["step"], e["epoch"]) for e in events if e["kind"] == "epoch"] == [(1, 3), (2, 5)]


@pytest.mark.user_error
def test_a_shard_that_shrinks_under_the_run_stops_it_with_a_message(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    path, original = tmp_path / "data" / "tiny_train_000001.bin", Trainer.train_step

    def shrinking(self):
        if self.step == 3:
            os.truncate(path, 1024 + 2 * 150)
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", shrinking)
    with pytest.raises(
        ValueError, match=r"tiny_train_000001.bin must keep the 301 tokens .* ends after 150: put it back"
    ):
        train(config, progress=False)
