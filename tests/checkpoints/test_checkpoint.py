"""Saving and loading: dtypes, memory, interrupted saves, training runs."""

import itertools
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import tnlm
from tests.checkpoints.checkpoint_files import published_model, published_state, same_state, write_published
from tests.conftest import GOLDEN
from tests.kills import killed_after
from tests.tiny_models import build, ids, tiny
from tnlm.checkpoints import checkpoint
from tnlm.checkpoints.checkpoint import finish_save, read_config
from tnlm.checkpoints.local import MANIFEST
from tnlm.config import ModelConfig
from tnlm.output.files import SAVED
from tnlm.text.tokenizer import Tokenizer, train_bpe


def test_dtype_of_the_caller_wins(tmp_path):
    model = published_model()
    state = {k: t.bfloat16() if t.ndim < 2 else t for k, t in published_state(model).items()}
    write_published(tmp_path, model, state)
    assert {p.dtype for p in tnlm.load(tmp_path).parameters()} == {torch.float32}
    assert {p.dtype for p in tnlm.load(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}
    kept = tnlm.load(tmp_path, dtype="checkpoint")
    assert kept.blocks[0].attn.lamb.dtype == kept.blocks[1].mlp.bias.dtype == torch.bfloat16
    assert kept.blocks[0].attn.w_q2.dtype == torch.float32


@pytest.mark.user_error
@pytest.mark.parametrize("dtype", ["float", torch.int64, torch.float8_e5m2, "bfloat"])
def test_dtype_that_is_none(tmp_path, dtype):
    with pytest.raises(ValueError, match=r'dtype must be one of float16, .*, "checkpoint" or None'):
        tnlm.load(write_published(tmp_path, published_model()), dtype=dtype)


@pytest.mark.user_error
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match='device="cuda:1" needs a CUDA device'):
        tnlm.load(write_published(tmp_path, published_model()), device="cuda:1")


def test_tensors_tagged_cuda_load_on_cpu(tmp_path, monkeypatch):
    model = published_model()
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    write_published(tmp_path, model)
    monkeypatch.undo()
    assert same_state(tnlm.load(tmp_path), model)


@pytest.mark.parametrize("dtype", [None, "checkpoint"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_parameters_own_their_memory(tmp_path, name, dtype):
    model = published_model()
    folder = write_published(tmp_path, model)
    if name == "model.safetensors":
        (folder / "pytorch_model.bin").unlink()
        save_file({k: t.clone() for k, t in published_state(model).items()}, folder / name)
    loaded = tnlm.load(folder, dtype=dtype)
    with (folder / name).open("r+b") as file:
        file.write(b"\0" * (folder / name).stat().st_size)
    assert same_state(loaded, model)
    owners = [p.untyped_storage() for p in loaded.parameters()]
    assert all(s.nbytes() == p.numel() * p.element_size() for s, p in zip(owners, loaded.parameters(), strict=True))


def test_parameters_can_be_trained(tmp_path):
    loaded = tnlm.load(write_published(tmp_path, published_model()))
    loaded(ids(1, 3)).sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in loaded.parameters())


def test_config_without_weights():
    folder = GOLDEN / "bilinear-mlp_bilinear-attn"
    assert read_config(folder) == tnlm.load(folder).config
    assert read_config("bilinear-bilinear-18l").n_params == 545_902_902


# Saving


CONFIGS = (
    tiny(),
    tiny(mlp="relu2", attention="differential", d_qk=10),
    tiny(mlp="none", d_hidden=0, attention="squared_normalized", qk_bias=True, logit_softcap=None),
    tiny(attention="none", mlp="squared", x0_mixing=False, value_residual=False),
    ModelConfig.pure(d_vocab=11, n_layer=1, n_head=3, d_model=30, d_hidden=7, n_ctx=5, mlp_bias=False),
)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_save_and_load_give_the_same_bits(tmp_path, config, dtype):
    model = build(config, dtype)
    tnlm.save(model, tmp_path / "m")
    loaded = tnlm.load(tmp_path / "m", dtype="checkpoint")
    assert loaded.config == config
    assert same_state(loaded, model)
    with safe_open(tmp_path / "m/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_single_file_beside_its_config(tmp_path):
    model = build(tiny(), torch.float32)
    tnlm.save(model, tmp_path)
    assert same_state(tnlm.load(str(tmp_path / "model.safetensors")), model)


def test_shards_and_index(tmp_path):
    model = build(tiny(), torch.float32)
    tnlm.save(model, tmp_path, max_shard_bytes=5000)
    shards = sorted(p.name for p in tmp_path.glob("model-*"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((tmp_path / s).stat().st_size < 7000 for s in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.config.n_params
    assert same_state(tnlm.load(tmp_path), model)
    # a later save in one file leaves no shard behind
    tnlm.save(model, tmp_path)
    assert not list(tmp_path.glob("model-*"))
    assert same_state(tnlm.load(tmp_path), model)


def test_tied_parameters_are_saved_as_two(tmp_path):
    model = build(tiny(), torch.float32)
    model.unembed.w_u = model.embed.w_e
    tnlm.save(model, tmp_path)
    loaded = tnlm.load(tmp_path)
    assert torch.equal(loaded.unembed.w_u, loaded.embed.w_e)
    assert loaded.unembed.w_u.data_ptr() != loaded.embed.w_e.data_ptr()


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.user_error
def test_distributed_tensors_are_gathered_or_refused(tmp_path, one_rank):
    model, spread = (build(tiny(), torch.float32) for _ in range(2))
    spread.unembed.w_u = torch.nn.Parameter(distribute_tensor(spread.unembed.w_u.detach(), one_rank))
    tnlm.save(spread, tmp_path / "ours")
    assert same_state(tnlm.load(tmp_path / "ours"), model)
    folder = write_published(tmp_path / "theirs", published_model())
    shards = {"lm_head.weight": distribute_tensor(torch.zeros(13, 30), one_rank)}
    torch.save({**published_state(published_model()), **shards}, folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"plain tensors, got lm_head\.weight \(DTensor\).*distributed tensors gathered"
    ):
        tnlm.load(folder)


def test_card(tmp_path):
    model = tnlm.load(write_published(tmp_path / "a", published_model()))
    tnlm.save(model, tmp_path / "b")
    assert str(tmp_path / "a") in (tmp_path / "b/README.md").read_text()
    (tmp_path / "b/README.md").write_text("mine")
    tnlm.save(model, tmp_path / "b")
    assert (tmp_path / "b/README.md").read_text() == "mine"
    tnlm.save(model, tmp_path / "c", card="theirs")
    assert (tmp_path / "c/README.md").read_text() == "theirs"
    tnlm.save(model, tmp_path / "d", card=False)
    assert not (tmp_path / "d/README.md").exists()


def test_killed_save_leaves_the_old_model_or_the_new_one(tmp_path):
    """Killed before each change to the file system in turn; the tokenizer is always that of the model."""
    old, new = build(tiny(), torch.float32, seed=3), build(tiny(n_layer=2), torch.float32, seed=4)
    of_old, of_new = (train_bpe(["abc abd"], size) for size in (260, 261))
    tnlm.save(old, tmp_path / "old", max_shard_bytes=20000, tokenizer=of_old)
    tnlm.save(new, tmp_path / "new", tokenizer=of_new)
    seen = []
    for changes in itertools.count():
        folder = tmp_path / f"m{changes}"
        shutil.copytree(tmp_path / "old", folder)
        with killed_after(changes) as died:
            tnlm.save(new, folder, tokenizer=of_new)
        if not died[0]:
            break
        loaded, tokenizer = tnlm.load(folder), Tokenizer.load(folder)
        seen.append("old" if same_state(loaded, old) else "new" if same_state(loaded, new) else "neither")
        assert tokenizer.hash == (of_old if seen[-1] == "old" else of_new).hash
        # and the next save cleans up
        tnlm.save(new, folder, tokenizer=of_new)
        assert same_state(tnlm.load(folder), new)
        assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in (tmp_path / "new").iterdir())
    assert len(seen) > 25
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}


def test_second_save_into_a_folder_is_refused_while_the_first_writes(tmp_path, monkeypatch):
    model, original = build(tiny(), torch.float32, seed=3), checkpoint._write_weights
    refused = []

    def write(*args):
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on .*, since 2") as error:
            tnlm.save(model, tmp_path)
        refused.append(error.value)
        original(*args)

    monkeypatch.setattr(checkpoint, "_write_weights", write)
    tnlm.save(model, tmp_path)
    assert len(refused) == 1
    assert same_state(tnlm.load(tmp_path), model)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_committed_save_is_read_and_finished(tmp_path):
    old, new = build(tiny(), torch.float32, seed=3), build(tiny(n_layer=2), torch.float32, seed=4)
    tnlm.save(old, tmp_path, max_shard_bytes=20000)
    tnlm.save(new, tmp_path / SAVED)
    names = sorted(p.name for p in (tmp_path / SAVED).iterdir())
    (tmp_path / SAVED / MANIFEST).write_text(json.dumps(names))
    assert same_state(tnlm.load(tmp_path), new)
    finish_save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert same_state(tnlm.load(tmp_path), new)


@pytest.mark.user_error
def test_save_that_the_disk_refuses(tmp_path, monkeypatch):
    old, new = build(tiny(), torch.float32, seed=3), build(tiny(), torch.float32, seed=4)
    tnlm.save(old, tmp_path / "m")
    with pytest.raises(OSError, match=r"could not be saved to /dev/full: .*; what was there is untouched"):
        tnlm.save(new, "/dev/full")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=f"could not be saved to {tmp_path}/file: File exists"):
        tnlm.save(new, tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match=f"could not be saved to {tmp_path}/m: .*File too large"):
            tnlm.save(new, tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same_state(tnlm.load(tmp_path / "m"), old)
    assert not [p.name for p in (tmp_path / "m").iterdir() if p.name.startswith(".")]


@pytest.mark.user_error
def test_save_beside_another_format_is_refused(tmp_path):
    folder = write_published(tmp_path, published_model())
    with pytest.raises(ValueError, match=r"already holds pytorch_model\.bin, a second format"):
        tnlm.save(published_model(), folder)


# Training runs


def write_run(run: Path, steps: dict[int, tnlm.Transformer]) -> None:
    for step, model in steps.items():
        folder = run / f"checkpoints/step_{step:06d}"
        tnlm.save(model, folder.with_name("part"), card=False)
        folder.with_name("part").rename(folder)
        save_file({"training.momentum": torch.zeros(3)}, folder / "training.safetensors")
        sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
        (folder / "COMPLETE").write_text(json.dumps({"step": step, "sizes": sizes}))
    (run / "latest").write_text(f"checkpoints/step_{max(steps):06d}\n")
    (run / "config.json").write_text('{"steps": 20}')


def test_run_folder_and_its_checkpoints(tmp_path):
    models = {step: build(tiny(), torch.float32, seed=step) for step in (10, 20)}
    write_run(tmp_path, models)
    assert same_state(tnlm.load(tmp_path), models[20])
    assert same_state(tnlm.load(tmp_path / "checkpoints/step_000010"), models[10])


@pytest.mark.user_error
def test_a_checkpoint_of_a_run_is_not_saved_over(tmp_path):
    model = build(tiny(), torch.float32)
    write_run(tmp_path, {10: model})
    with pytest.raises(ValueError, match="step_000010 is a checkpoint of a training run, which would be lost"):
        tnlm.save(build(tiny(), torch.float32, seed=5), tmp_path / "checkpoints/step_000010")
    assert same_state(tnlm.load(tmp_path), model)


@pytest.mark.user_error
def test_incomplete_checkpoints_are_passed_over_by_name(tmp_path):
    models = {step: build(tiny(), torch.float32, seed=step) for step in (10, 20, 30)}
    write_run(tmp_path, models)
    newest, cut = (tmp_path / f"checkpoints/step_0000{n}" for n in (30, 20))
    (newest / "COMPLETE").unlink()
    with (cut / "training.safetensors").open("ab") as file:
        file.write(b"x")
    said = (
        r"loading step_000010, passed over step_000030 \(no COMPLETE marker\); step_000020 \(training.safetensors has"
    )
    with pytest.warns(UserWarning, match=said):
        assert same_state(tnlm.load(tmp_path), models[10])
    with pytest.raises(ValueError, match="step_000030 is not complete: no COMPLETE marker"):
        tnlm.load(newest)
    with pytest.raises(ValueError, match="step_000030 is not complete: no COMPLETE marker; load the run folder"):
        tnlm.load(newest / "model.safetensors")
    (tmp_path / "checkpoints/step_000010/config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no complete checkpoint: .*step_000010 \(config.json is missing\)"):
        tnlm.load(tmp_path)
