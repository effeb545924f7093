"""The numbers that a run shows and records: each from a clock set by the test, the data, and the schedule's formula.

Every step takes another time, every token of the text has another number of bytes, and no two sizes agree.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.small import small_config
from tnlm.text.tokenizer import Tokenizer, train_bpe
from tnlm.training.cli import main
from tnlm.training.compare.runs import load_run
from tnlm.training.data.shards import find_shards
from tnlm.training.data.stream import TokenStream
from tnlm.training.data.tokenize import tokenize_files
from tnlm.training.run import loop, metrics

STEPS, BATCH, SEQ, LOG_EVERY = 20, 4, 6, 3
PEAK = 3e6
TEXT = "".join(f"{n} elephants and {n * n} mice met at the river of the {n % 7}th forest; " for n in range(60))


def seconds(step: int) -> float:
    """Duration of a step by the test's clock; the first one is long, as one that compiles."""
    return 1000.0 if step == 1 else 2 + step**2 / 7


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_000_000 + self.now


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A run through the command line, whose steps and validations take the times of :func:`seconds` and 5 s."""
    clock = Clock()
    for module in (loop, metrics):
        monkeypatch.setattr(module, "time", clock)
    update, evaluate = loop.Trainer.train_step, loop.Trainer.evaluate

    def slow_update(self):
        values = update(self)
        clock.now += seconds(self.step)
        return values

    def slow_evaluate(self):
        clock.now += 5
        return evaluate(self)

    monkeypatch.setattr(loop.Trainer, "train_step", slow_update)
    monkeypatch.setattr(loop.Trainer, "evaluate", slow_evaluate)
    (tmp_path / "text.txt").write_text(TEXT)
    data, tokenizer = tmp_path / "data", train_bpe([TEXT], 300)
    tokenize_files([tmp_path / "text.txt"], data, tokenizer, separator="; ", val_tokens=200)
    config = small_config(tmp_path, data=str(data), tokenizer="bytes", peak_flops=PEAK, keep_last=1).with_model(
        d_vocab=300
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr(metrics, "on_terminal", lambda: False)
    assert main(["run", "--config", str(tmp_path / "config.json")]) == 0
    events = metrics.read_metrics(config.folder / "metrics.jsonl")
    return SimpleNamespace(config=config, events=events, tokenizer=tokenizer, data=data)


def of_kind(done: SimpleNamespace, kind: str) -> dict[int, dict]:
    return {event["step"]: event for event in done.events if event["kind"] == kind}


def per_step(step: int) -> float:
    """Mean duration up to a step, without the first."""
    return sum(seconds(s) for s in range(2, step + 1)) / (step - 1)


def check_speed(done: SimpleNamespace) -> None:
    train, flops = of_kind(done, "train"), done.config.model.flops_per_token()
    assert [event["dt"] for event in train.values()] == pytest.approx([seconds(step) for step in train])
    logged = [step for step in range(1, STEPS + 1) if step % LOG_EVERY == 0 or step == STEPS]
    assert [step for step, event in train.items() if "tok_s" in event] == logged
    for step in logged:
        speed = BATCH * SEQ / per_step(step)
        assert train[step]["tok_s"] == pytest.approx(speed)
        assert train[step]["mfu"] == pytest.approx(speed * flops / PEAK)
    assert [event["dt"] for event in of_kind(done, "val").values()] == pytest.approx([5] * 5)


def check_progress_of_the_data(done: SimpleNamespace) -> None:
    train, windows = of_kind(done, "train"), (len(TokenStream(find_shards(done.data))) - 1) // SEQ
    assert list(train) == list(range(1, STEPS + 1))
    assert [event["tokens"] for event in train.values()] == [step * BATCH * SEQ for step in train]
    assert [event["epoch"] for event in train.values()] == pytest.approx([step * BATCH / windows for step in train])
    assert of_kind(done, "start")[0]["epochs"] == pytest.approx(STEPS * BATCH / windows)


def check_schedule(done: SimpleNamespace) -> None:
    """The factor is 1 up to the last 8 steps; the momentum rises over the first 8."""
    assert round(3704 / 9726 * STEPS) == 8
    for step, event in of_kind(done, "train").items():
        assert event["lr"] == pytest.approx(min(1, (STEPS - step + 1) / 8))
        assert event["mu"] == pytest.approx(0.85 + 0.1 * min(1, (step - 1) / 8))


def check_bits_per_byte(done: SimpleNamespace) -> None:
    """Of the tokens that are predicted: the first is not, and end-of-text is no text."""
    ids = TokenStream(find_shards(done.data, split="val")).read(0, 61).tolist()
    sizes = [0 if i == done.tokenizer.eot else len(done.tokenizer.token_bytes(i)) for i in ids]
    assert sizes[0] != sizes[-1]
    assert len({*sizes}) > 4
    for event in of_kind(done, "val").values():
        assert event["bits_per_byte"] == pytest.approx(event["loss"] / math.log(2) * 60 / sum(sizes[1:]))
        assert event["val_tokens"] == 60


def check_result(done: SimpleNamespace, record: dict) -> None:
    train, val = of_kind(done, "train")[STEPS], of_kind(done, "val")[STEPS]
    assert record == {
        "command": "run",
        "folder": str(done.config.folder),
        "steps": STEPS,
        "tokens": STEPS * BATCH * SEQ,
        "train_loss": train["loss"],
        "val_loss": val["loss"],
        "bits_per_byte": val["bits_per_byte"],
        "recipe": "replication",
    }
    assert abs(train["loss"] - val["loss"]) > 1e-3
    end = of_kind(done, "end")[STEPS]
    assert (end["train_loss"], end["val_loss"], end["tokens"]) == (train["loss"], val["loss"], STEPS * BATCH * SEQ)


def check_lines(done: SimpleNamespace, printed: str) -> None:
    train, val = of_kind(done, "train"), of_kind(done, "val")
    lines = re.findall(
        r"step (\d+)/20  loss ([\d.]+)  lr ([\d.]+)  ([\d.]+) tok/s  mfu (\d+)%  eta (\d+):(\d\d)\n", printed
    )
    assert [int(line[0]) for line in lines] == [3, 6, 9, 12, 15, 18, 20]
    for step, loss, lr, speed, use, minutes, rest in lines:
        event = train[int(step)]
        assert (loss, lr) == (f"{event['loss']:.4f}", f"{event['lr']:.2f}")
        assert (speed, use) == (f"{event['tok_s']:.0f}", f"{100 * event['mfu']:.0f}")
        assert 60 * int(minutes) + int(rest) == round((STEPS - int(step)) * per_step(int(step)))
    shown = re.findall(r"step (\d+)/20  val ([\d.]+)  ([\d.]+) bits/byte\n", printed)
    told = [(str(step), f"{e['loss']:.4f}", f"{e['bits_per_byte']:.4f}") for step, e in val.items()]
    assert shown == told
    assert len(shown) == 5


def check_headline(done: SimpleNamespace, printed: str) -> None:
    tokens, model = len(TokenStream(find_shards(done.data))), done.config.model
    epochs = STEPS * BATCH / ((tokens - 1) // SEQ)
    for said in (
        f"{model.mlp} MLP, {model.attention} attention, {model.n_params / 1e6:.2f}M parameters",
        f"20 steps of 24 tokens, {epochs:.2f} epochs of {tokens:,}",
        f"recipe replication, fp32, cpu, 1 threads; {done.config.folder}",
    ):
        assert said in printed


def test_every_number_of_a_run(tmp_path, monkeypatch, capsys):
    done = run(tmp_path, monkeypatch)
    out, err = capsys.readouterr()
    check_speed(done)
    check_progress_of_the_data(done)
    check_schedule(done)
    check_bits_per_byte(done)
    check_result(done, json.loads(out))
    check_lines(done, err)
    check_headline(done, err)
    (sample,) = re.findall(r"^sample: (.*)$", err, flags=re.M)
    assert sample == repr(of_kind(done, "sample")[STEPS]["text"])
    read = load_run(done.config.folder)
    times = sorted(seconds(step) for step in range(1, STEPS + 1))
    assert read.seconds_per_step == pytest.approx((times[9] + times[10]) / 2), "the median: one step is long"
    assert Tokenizer.load(done.config.folder / "checkpoints" / "step_000020").hash == done.tokenizer.hash


def test_peak_memory_is_in_bytes():
    """Compared with what the kernel says of this process, in kB."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system has no /proc")
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    assert peak / 2 < metrics.resident_bytes() < 2 * peak
