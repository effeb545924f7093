"""``tnlm-train`` as its user meets it: flags, exit codes, the last line."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tnlm
from tests.conftest import wait_for_announcement
from tests.training.run.test_resume import Stop, raise_stop, stop_at
from tests.training.small import small_config
from tnlm.training.cli import main
from tnlm.training.commands import Run
from tnlm.training.config import load_config
from tnlm.training.presets import preset
from tnlm.training.run.loop import Trainer


def write_config(tmp_path, **changes):
    """A config file for the small run, and the arguments that use it."""
    config = small_config(tmp_path, **changes)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config.to_dict()))
    return config, ["run", "--config", str(path)]


def last_record(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_run_prints_one_record_and_leaves_a_model(tmp_path, capsys):
    config, command = write_config(tmp_path)
    assert main([*command, "--steps", "6"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["command"] == "run"
    assert (record["steps"], record["tokens"], record["recipe"]) == (6, 144, "replication")
    assert "step 6/6" in captured.err
    assert tnlm.load(record["folder"]).config == config.model


def test_configuration_is_written_before_anything_else(tmp_path, monkeypatch):
    config, command = write_config(tmp_path)
    stop_at(monkeypatch, 0, raise_stop)
    with pytest.raises(Stop):
        main(command)
    assert json.loads((config.folder / "config.json").read_text()) == config.to_dict()


def test_flags_override_the_file_and_the_file_the_preset(tmp_path):
    (tmp_path / "some.json").write_text('{"steps": 7, "lr_head": 0.5, "model": {"n_layer": 2}}')
    config = Run(config=tmp_path / "some.json", training={"steps": 9}).resolve()
    assert (config.steps, config.lr_head, config.model.n_layer, config.model.d_model) == (9, 0.5, 2, 128)
    (tmp_path / "named.json").write_text('{"preset": "tiny"}')
    assert Run(config=tmp_path / "named.json").resolve() == preset("tiny")


def test_the_exact_recipe_takes_the_published_order(tmp_path):
    """Of a preset that shuffles; a file that asks for both is refused."""
    assert preset("nano").shuffle
    config = Run(training={"recipe": "replication-exact"}).resolve()
    assert (config.recipe, config.shuffle) == ("replication-exact", False)
    (tmp_path / "c.json").write_text('{"shuffle": true}')
    with pytest.raises(ValueError, match="published order, got shuffle=True, bos_align=False; set both to false"):
        Run(config=tmp_path / "c.json", training={"recipe": "replication-exact"}).resolve()


def test_flags_reach_the_model():
    run = Run(model={"mlp": "swiglu", "attention": "softmax", "d_model": 192, "n_layer": 3})
    model = run.resolve().model
    assert (model.mlp, model.attention, model.d_model, model.n_layer, model.d_hidden) == (
        "swiglu",
        "softmax",
        192,
        3,
        768,
    )
    assert Run(matched=True).resolve().model.d_qk == 16
    assert Run(training={"batch": 4}).resolve().micro_batch == 4


def test_dry_run_says_what_it_costs_and_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["run", "--preset", "medium", "--attention", "softmax", "--dry-run"]
    assert main(command) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["n_params"] == 498_127_158
    assert record["tokens"] == 5_099_225_088
    assert record["flops"] == pytest.approx(1.48e19, rel=5e-3)
    # float32 weights, gradients, two moments of embedding, head and scalars, one of the matrices
    matrices = 18 * (4 * 1152**2 + 3 * 1152 * 4608)
    assert record["state_bytes"] == 4 * (2 * 498_127_158 + matrices + 2 * (498_127_158 - matrices))
    assert "498,127,158" in captured.err
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr() == (captured.out, "")
    assert not list(tmp_path.iterdir())


def test_interrupted_run_tells_the_scheduler(tmp_path, capsys, monkeypatch):
    _, command = write_config(tmp_path)
    stop_at(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGTERM))
    assert main(command) == 143
    assert "stopped at step 6: the last complete checkpoint is" in capsys.readouterr().err
    stop_at(monkeypatch, 9, lambda: signal.raise_signal(signal.SIGINT))
    assert main(command) == 130
    assert main(command) == 0


@pytest.mark.parametrize("command", [["run", "--steps", "3"], ["data", "toy", "cycles", "--out", "x"]], ids=str)
def test_ctrl_c_before_and_beside_training_is_one_line(command, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tnlm.training.run.loop.choose_device", interrupt)
    monkeypatch.setattr("tnlm.training.data.toy.write_cycles", interrupt)
    assert main(command) == 130
    assert capsys.readouterr() == ("", "tnlm-train: interrupted\n")


@pytest.mark.parametrize(
    "command, patched, said",
    [
        (["run"], "tnlm.training.run.loop.Trainer", "opening data, building the model ..."),
        (["export", "some", "--out", "x"], "tnlm.training.run.export.export_run", "exporting some ..."),
        (["data", "toy", "cycles", "--out", "x"], "tnlm.training.data.toy.write_cycles", "writing x ..."),
        (
            ["data", "tokenize", "a.txt", "--out", "x", "--tokenizer", "bpe300"],
            "tnlm.text.tokenizer.train_bpe",
            "training a vo",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_takes_long_says_what_it_does(command, patched, said, tmp_path, capsys, monkeypatch):
    def slow(*_, **__):
        wait_for_announcement()
        raise ValueError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tnlm.output.progress.DELAY", 0.1)
    monkeypatch.setattr(patched, slow)
    assert main(command) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(said)
    assert last == "tnlm-train: enough"


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from tnlm.training.cli import main; sys.exit(main(['run', '--dry-run']))"
    line = f'"{sys.executable}" -c "{code}" 2> /dev/null | true; exit ${{PIPESTATUS[0]}}'
    assert subprocess.run(["bash", "-c", line], check=False).returncode == 141


def test_later_signal_ends_the_process_at_once(tmp_path):
    _, command = write_config(tmp_path, steps=10**6, log_every=1, save_every=None)
    code = (
        "import os, signal, sys, time, tnlm.training.run.loop as loop, tnlm.training.run.signals as signals\n"
        "from tnlm.training.cli import main\n"
        "def step(self):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(0.01)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "loop.Trainer.train_step = step\n"
        "signals.SAME_SIGNAL_SECONDS = 0.0\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert "SIGTERM: saving after this step; again after 0 s to exit at once, without a save" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_divergence_has_its_exit_code(tmp_path, capsys, monkeypatch):
    _, command = write_config(tmp_path, save_every=4)

    def poison(self):
        with torch.no_grad():
            self.model.unembed.w_u.fill_(float("nan"))

    original = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: (self.step == 6 and poison(self)) or original(self))
    assert main(command) == 3
    assert "the loss is nan at step 7; the last complete checkpoint is" in capsys.readouterr().err


def test_disk_full_has_its_exit_code(tmp_path, capsys):
    config, command = write_config(tmp_path, save_every=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        assert main(command) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"checkpoint {config.folder}/checkpoints/step_000004 could not be written" in capsys.readouterr().err


@pytest.mark.user_error
@pytest.mark.parametrize(
    "command, message",
    [
        (["run", "--steps", "0"], "tnlm-train: steps must be an integer >= 1, got 0"),
        (["run", "--preset", "nanoo"], "unknown preset 'nanoo'; known: nano, nano-pure"),
        (["run", "--mlp", "swiglu", "--preset", "nano-pure", "--data", "no/such"], "no such folder"),
        (["run", "--attention", "softmax", "--matched"], "two query-key pairs"),
        (["run", "--config", "no/such.json"], "config file no/such.json cannot be read"),
        (["branch", "no/such", "--steps", "10"], "cannot be read"),
        (["compare", "--base", "no/such", "--variant", "no/such"], "no/such"),
        (["export", "no/such", "--out", "x"], "cannot be read"),
        (["nope"], "nope"),
        (["run", "--stepz", "3"], "stepz"),
        (
            ["compare", "--base", "a", "--variant", "b", "--sigma", "-1"],
            "sigma must be a finite number above 0, got -1",
        ),
        (["compare", "--base", "a", "--variant", "b", "--at", "nan"], "at must be a finite number above 0, got nan"),
        (["compare", "--base", "a", "--variant", "b", "--warmdown", "1"], "warmdown must be a fraction of the steps"),
        (["data", "tokenize", "--out", "x"], "at least one source, got none: name files"),
    ],
)
def test_wrong_use_is_a_message_and_exit_code_2(command, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.err + captured.out).split())
    assert "Traceback" not in captured.err


@pytest.mark.user_error
@pytest.mark.parametrize("name", ["latest", "metrics.jsonl", ".lock"])
def test_a_folder_in_the_place_of_a_file_of_the_run_is_named(name, tmp_path, capsys):
    config, command = write_config(tmp_path)
    (config.folder / name).mkdir(parents=True)
    assert main(command) == 2
    message = f"{config.folder / name} must be a file, but is a folder; rename or remove it, or choose another --out"
    assert message in capsys.readouterr().err
    assert [path.name for path in config.folder.iterdir()] == [name]


@pytest.mark.user_error
@pytest.mark.parametrize("name", [".", "checkpoints"])
def test_a_file_in_the_place_of_a_folder_of_the_run_is_named(name, tmp_path, capsys):
    config, command = write_config(tmp_path)
    path = config.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    assert main(command) == 2
    assert f"{path} must be a folder, but is a file; rename or remove it, or choose another --out" in (
        capsys.readouterr().err
    )


def test_branch_compare_and_export(tmp_path, capsys):
    """From two seeds of two arms to the answer, through the commands alone."""
    arms = {}
    for mlp in ("swiglu", "bilinear"):
        for seed in (0, 1):
            _, command = write_config(tmp_path, keep_every=4, warmdown=0.4, val_every=2)
            out = str(tmp_path / f"{mlp}{seed}")
            assert main([*command, "--mlp", mlp, "--seed", str(seed), "--out", out]) == 0
            assert main(["branch", out, "--steps", "14"]) == 0
            record = last_record(capsys)
            assert record["branched_from"].endswith("step_000008")
            arms.setdefault(mlp, []).extend([out, f"{out}-steps14"])
    command = ["compare", "--base", *arms["swiglu"], "--variant", *arms["bilinear"], "--out", str(tmp_path / "answer")]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "E1 matched" in captured.err
    record = json.loads(captured.out)
    assert len(captured.out) < 2500, "what is behind the answer is in the file"
    whole = json.loads(Path(record["file"]).read_text())
    assert record["file"] == str(tmp_path / "answer" / "compare.json")
    assert whole["base"]["horizons"]["14"]["runs"] == 2
    assert whole["e1"]["n0"] == pytest.approx((14 * 20) ** 0.5)
    for name in ("e1", "e2a", "e2b", "e3"):
        assert record[name] == {key: whole[name][key] for key in ("value", "low", "high", "status")}
    assert (record["verdict"], record["warnings"]) == (whole["verdict"], whole["warnings"])
    assert record["final"]["difference"] == whole["final"]["difference"]
    assert record["variant"] == {"label": "bilinear+bilinear", "seeds": 2}
    assert main([*command[:-2], "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {**record, "file": None}
    assert captured.err == ""
    assert "E1 compares complete schedules" in (tmp_path / "answer" / "compare.html").read_text()

    run = arms["bilinear"][0]
    assert main(["export", run, "--out", run]) == 2
    assert "is the folder of a training run" in capsys.readouterr().err
    assert load_config(Path(run) / "config.json").steps == 20
    assert main(["export", run, "--out", str(tmp_path / "model"), "--step", "12"]) == 0
    assert last_record(capsys)["step"] == 12
    expected = tnlm.load(tmp_path / "bilinear0" / "checkpoints" / "step_000012")
    torch.testing.assert_close(tnlm.load(tmp_path / "model").state_dict(), expected.state_dict(), rtol=0, atol=0)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "12 of 20" in card
    assert "replication" in card


def test_data_commands(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"line {i} of a text"}) + "\n" for i in range(90)))
    out = tmp_path / "shards"
    source = str(tmp_path / "text.jsonl")
    options = ["--tokenizer", "bpe270", "--val-tokens", "100", "--processes", "1"]
    assert main(["data", "tokenize", source, "--out", str(out), *options]) == 0
    record = last_record(capsys)
    assert record["d_vocab"] == 270
    assert main(["data", "check", str(out)]) == 0
    checked = last_record(capsys)
    assert checked["train_tokens"] == record["splits"]["train"]["tokens"]
    shard = out / "train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["data", "check", str(out)]) == 1
    assert "the header counts" in capsys.readouterr().err
    assert main(["data", "toy", "cycles", "--out", str(tmp_path / "toy"), "--train-sequences", "40"]) == 0
    assert last_record(capsys)["d_vocab"] == 64


def test_toy_cycles_train(tmp_path, capsys):
    assert main(["data", "toy", "cycles", "--out", str(tmp_path / "toy"), "--train-sequences", "40"]) == 0
    flags = ["--preset", "nano-attention-only", "--model.d-vocab", "64", "--model.n-ctx", "32", "--model.d-model", "32"]
    flags += ["--steps", "2", "--val-tokens", "320", "--data", str(tmp_path / "toy"), "--out", str(tmp_path / "run")]
    assert main(["run", *flags]) == 0
    record = last_record(capsys)
    assert record["bits_per_byte"] is None
    assert tnlm.load(record["folder"]).config.polynomial


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from tnlm.training.cli import main\n"
        "assert main(['run', '--help']) == 0 and main(['--help']) == 0\n"
        "assert main(['run', '--preset', 'medium', '--dry-run']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "--model.d-model" in done.stdout
