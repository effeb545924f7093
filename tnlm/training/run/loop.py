"""The training loop: updates, validations, checkpoints and progress of one run, until it ends or is told to stop."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import tnlm
from tnlm.output.progress import announce
from tnlm.text.evaluate import position_buckets
from tnlm.training.config import TrainConfig
from tnlm.training.data.inputs import open_inputs
from tnlm.training.data.stream import accumulation_steps, inputs_and_targets
from tnlm.training.optim.groups import Optimizers, gradient_norm
from tnlm.training.run import checkpointing, metrics
from tnlm.training.run.distributed import World, on_main, process_group, sum_over_ranks
from tnlm.training.run.losses import MeanLoss, TokenLosses, validation_losses
from tnlm.training.run.outcomes import Diverged, Interrupted, Result
from tnlm.training.run.retention import is_saved
from tnlm.training.run.signals import StopRequest
from tnlm.training.run.start import (
    build_model,
    choose_device,
    claim_folder,
    cpu_threads,
    run_lock,
    versions,
    wants_bfloat16,
)


def train(config: TrainConfig, *, initial: Mapping[str, Tensor] | None = None, progress: bool = True) -> Result:
    """Train, or resume, the run of ``config`` in its folder; under torchrun every rank calls this.

    Args:
        initial: Parameters to start from, by name, instead of the seeded initialisation.
        progress: Report on stderr.

    Raises:
        ValueError: The configuration, the data or the launch is refused, the folder holds another run, or another
            process trains in it.
        Diverged: A loss or gradient is not finite.
        Interrupted: SIGTERM, SIGINT or SIGHUP; a complete checkpoint was saved.
        SaveError: The disk refused a checkpoint.
    """
    world = World.from_environment()
    accumulation_steps(batch=config.batch, micro_batch=config.micro_batch, world_size=world.size)
    device = choose_device(config, world)
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads(config, world))
    with process_group(world, device), run_lock(config, world):
        shown = progress and world.main
        with announce("opening data, building the model") if shown else contextlib.nullcontext():
            trainer = Trainer(config, world=world, device=device, initial=initial, progress=progress)
        with trainer.stop_request.listen():
            return trainer.run()


class Trainer:
    """One training run on one rank: its model, optimisers, data and log. ``run`` trains to the end."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        world: World | None = None,
        device: torch.device | None = None,
        initial: Mapping[str, Tensor] | None = None,
        progress: bool = True,
    ) -> None:
        self.config, self.world = config, world or World()
        self.device = device or torch.device("cpu")
        self.progress_enabled = progress and self.world.main
        self.folder = config.folder
        self.log_path = self.folder / "metrics.jsonl"
        on_main(lambda: claim_folder(config), self.world)
        self.inputs = open_inputs(config, self.world)
        self.mixed = wants_bfloat16(config, self.device)
        self.model = build_model(config, mixed=self.mixed, initial=initial).to(self.device)
        self.model.set_implementation(config.implementation)  # type: ignore[arg-type]
        self.optimizers = Optimizers(self.model, config)
        self.losses: Any = TokenLosses(self.model)
        self.parallel: Any = MeanLoss(self.model)
        if config.compile:
            self.losses, self.parallel = torch.compile(self.losses), torch.compile(self.parallel)
        if self.world.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(self.parallel, device_ids=ids, broadcast_buffers=False)
        self.step = 0
        self.stop_request = StopRequest(announce=self.progress_enabled)
        self.stop = False
        self.micro_losses = torch.zeros(self.inputs.loader.accumulation)
        self.recorded: dict[str, dict[str, Any]] = {}
        self.log: metrics.MetricsLog | None = None
        self.speed = metrics.Speed()

    def train_step(self) -> dict[str, float]:
        """One update. Returns its loss (mean over micro-batches and ranks), factor, momentum and gradient norm.

        Raises:
            Diverged: Loss or gradient is not finite; the parameters are as before.
        """
        micro_losses = []
        windows = self.inputs.loader.next_step()
        for j, micro_batch in enumerate(windows):
            inputs, targets = inputs_and_targets(micro_batch, self.device)
            last = j == len(windows) - 1
            with contextlib.nullcontext() if last or self.world.size == 1 else self.parallel.no_sync():
                loss = self.parallel(inputs, targets)
                (loss / len(windows)).backward()
            micro_losses.append(loss.detach())
        self.micro_losses = torch.stack(micro_losses)
        norm = gradient_norm(self.model)
        loss, norm_value, stop = self._agree(self.micro_losses.mean(), norm)
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm_value}"
            raise Diverged(f"{what} at step {self.step + 1}; {self._last_good()}")
        if self.config.clip is not None and norm_value > self.config.clip:
            for p in self.model.parameters():
                p.grad.mul_(self.config.clip / norm_value)
        factor, momentum = self.optimizers.step(self.step)
        self.optimizers.zero_grad()
        self.step += 1
        self.stop = stop
        return {"loss": loss, "lr": factor, "mu": momentum, "grad_norm": norm_value}

    def evaluate(self) -> dict[str, Any]:
        """Mean cross-entropy over exactly ``val_tokens`` tokens, and what a ``val`` event says beside it."""
        config, validation = self.config, self.inputs.validation
        size = config.val_batch or config.micro_batch
        by_position = validation_losses(self.losses, validation, batch=size, device=self.device, world=self.world)
        loss = sum(by_position) / validation.tokens
        if not math.isfinite(loss):
            raise Diverged(f"the validation loss is {loss} at step {self.step}; {self._last_good()}")
        n_bytes, counts = self.inputs.text_bytes, [validation.windows] * config.seq
        return {
            "loss": loss,
            "bits_per_byte": metrics.bits_per_byte(loss, validation.tokens, n_bytes) if n_bytes else None,
            "buckets": [[b.start, b.stop, b.loss] for b in position_buckets(by_position, counts)],
            "val_tokens": validation.tokens,
        }

    def run(self) -> Result:
        """Train to the last step, resuming from the newest complete checkpoint.

        Raises:
            ValueError: The model cannot be compiled here; beside what :func:`train` raises.
        """
        config = self.config
        resumed = self.restore()
        if self.world.main:
            self.log = metrics.MetricsLog(self.log_path)
            self.tracking = metrics.Tracking(config.tracker, folder=self.folder, config=config.to_dict())
        self.progress = metrics.Progress(steps=config.steps, start=self.step, enabled=self.progress_enabled)
        try:
            self._event("resume" if resumed else "start", **self.facts())
            self.progress.say(self.headline())
            if resumed:
                last = self.recorded.get("train")
                self.progress.say(
                    f"continues after step {self.step}, "
                    + (f"whose loss was {last['loss']:.4f}" if last else f"whose loss is not in {self.log_path}")
                )
            return self._run()
        except RuntimeError as error:
            if config.compile:
                from torch._dynamo.exc import TorchDynamoException

                if isinstance(error, TorchDynamoException):
                    cause = " ".join(str(error).splitlines()[:2]).strip()
                    raise ValueError(f"the model cannot be compiled ({cause}); train with --compile False") from error
            raise
        finally:
            self.progress.close()
            self.inputs.loader.close()
            if self.log is not None:
                self.tracking.close()
                self.log.close()

    def _run(self) -> Result:
        config = self.config
        train, validation = self.recorded.get("train"), self.recorded.get("val")
        while True:
            if validation is None and (self.step % config.val_every == 0 or self.step == config.steps):
                validation = self._validate()
            if is_saved(config, self.step) or (self.stop and self.step > 0):
                self.save()
            if self.step == config.steps:
                assert train is not None
                assert validation is not None
                return self._finish(train, validation)
            if self.stop:
                number = self.stop_request.number or signal.SIGTERM
                raise Interrupted(f"stopped at step {self.step}: {self._last_good()}; the same command resumes", number)
            train, validation, self.recorded = self._update(), None, {}

    def _update(self) -> dict[str, Any]:
        self.speed.start()
        epoch = self._epoch()
        values = self.train_step()
        values["dt"] = self.speed.stop()
        values["epoch"] = self._epochs(self.step)
        if self._epoch() > max(1, epoch):
            self._event("epoch", epoch=self._epoch())
            self.progress.say(
                f"step {self.step}/{self.config.steps}  epoch {self._epoch()} of {self._epochs(self.config.steps):.2f} "
                "begins: tokens come again"
            )
        if self.step % self.config.log_every == 0 or self.step == self.config.steps:
            values |= self._performance()
            eta = (self.config.steps - self.step) * self.speed.per_step()
            self._event("train", **values)
            self.progress.train({"step": self.step, **values}, eta=eta)
        else:
            self._event("train", **values)
        return values

    def _epochs(self, step: int) -> float:
        """Passes over the training data after ``step`` updates."""
        taken, length = self.inputs.loader.progress(step * self.config.batch)
        return taken / length

    def _epoch(self) -> int:
        """Number, from 1 on, of the epoch that the last batch reached; 0 before the first batch."""
        taken, length = self.inputs.loader.progress(self.step * self.config.batch)
        return -(-taken // length)

    def _performance(self) -> dict[str, Any]:
        """Tokens per second over all ranks, model FLOPs utilisation where a peak is known, peak memory in bytes."""
        speed = self.config.tokens_per_step / self.speed.per_step()
        peak, memory = self.config.peak_flops, None
        if self.device.type == "cuda":
            peak = peak or metrics.peak_flops(torch.cuda.get_device_name(self.device))
            memory = torch.cuda.max_memory_allocated(self.device)
        used = speed * self.config.model.flops_per_token()
        return {
            "tok_s": speed,
            "mfu": used / (peak * self.world.size) if peak else None,
            "max_mem": memory if memory is not None else metrics.resident_bytes(),
        }

    def _validate(self) -> dict[str, Any]:
        began = time.perf_counter()
        values = self.evaluate()
        values["dt"] = time.perf_counter() - began
        self._event("val", **values)
        bpb = f"  {values['bits_per_byte']:.4f} bits/byte" if values["bits_per_byte"] else ""
        self.progress.say(f"step {self.step}/{self.config.steps}  val {values['loss']:.4f}{bpb}")
        zero = torch.zeros((), device=self.device)
        self.stop = self._agree(zero, zero)[2]
        return values

    def _finish(self, train: Mapping[str, Any], validation: Mapping[str, Any]) -> Result:
        result = Result(
            folder=self.folder,
            steps=self.step,
            tokens=self.step * self.config.tokens_per_step,
            train_loss=train["loss"],
            val_loss=validation["loss"],
            bits_per_byte=validation["bits_per_byte"],
            recipe=self.config.recipe,
        )
        if self.world.main and self.config.sample_tokens and self.inputs.tokenizer is not None:
            text = self.sample()
            self._event("sample", text=text)
            self.progress.say(f"sample: {text!r}")
        self._event("end", train_loss=result.train_loss, val_loss=result.val_loss, recipe=result.recipe)
        return result

    def sample(self) -> str:
        """Text that the model continues from one end-of-text id (or a line break)."""
        tokenizer = self.inputs.tokenizer
        assert tokenizer is not None
        start = [tokenizer.eot] if tokenizer.eot is not None else tokenizer.encode("\n")
        prompt = torch.tensor([start], device=self.device)
        new = min(self.config.sample_tokens, self.config.seq - len(start))
        ids = tnlm.generate(self.model, prompt, new, temperature=0.8, seed=self.config.seed)
        return tokenizer.decode(ids[0, len(start) :].tolist())

    def save(self) -> None:
        """Write a complete checkpoint of this step; rank 0 does, the others wait."""
        on_main(self._save, self.world)

    def _save(self) -> None:
        if self.log is not None:
            self.log.sync()  # or, after a power cut, the checkpoint may be there and the events before it not
        path = checkpointing.save(
            self.folder,
            step=self.step,
            model=self.model,
            tokenizer=self.inputs.tokenizer,
            tensors={**self.optimizers.state(), **checkpointing.random_state()},
            facts={
                "loader": self.inputs.loader.state_dict(),
                "val_fingerprint": self.inputs.validation.fingerprint,
                "recipe": self.config.recipe,
                "versions": versions(),
            },
        )
        checkpointing.prune(
            self.folder,
            keep_last=self.config.keep_last,
            keep_every=self.config.keep_every,
            stable_end=self.config.schedule.stable_end,
        )
        if "save" not in self.recorded:
            self._event("save", path=str(path.relative_to(self.folder)))

    def restore(self) -> bool:
        """Load the newest complete checkpoint, or the trunk's of a branch; false for a fresh start."""
        path, log = on_main(self._find_checkpoint, self.world)
        if path is not None:
            self._load(checkpointing.load(path))
        self.recorded = on_main(lambda: self._cut_back(log), self.world)
        return path is not None

    def _find_checkpoint(self) -> tuple[Path | None, Path]:
        """The checkpoint to continue from, its contents compared with their hashes, and the log that led to it."""
        path, removed = checkpointing.recover(self.folder)
        if removed:
            self.say(f"removed {', '.join(removed)}: interrupted saves")
        log = self.log_path
        if path is None and self.config.branched_from is not None:
            path = Path(self.config.branched_from)
            checkpointing.check(path)
            log = path.parents[1] / "metrics.jsonl"
        return path, log

    def _cut_back(self, log: Path) -> dict[str, dict[str, Any]]:
        """Cut the log back to this step; returns its events of exactly this step, by kind."""
        events = metrics.cut_back(log, self.step, into=self.log_path)
        return {event["kind"]: event for event in events if event["step"] == self.step}

    def _load(self, checkpoint: checkpointing.Checkpoint) -> None:
        loader, validation = checkpoint.facts["loader"], self.inputs.validation.fingerprint
        self.inputs.loader.load_state_dict(loader)
        if loader["fingerprint"] != self.inputs.loader.stream.fingerprint:
            self.say(
                f"the training shards have changed beyond what step {checkpoint.step} had read; going on with these"
            )
        if checkpoint.facts.get("val_fingerprint", validation) != validation:
            raise ValueError(
                f"the validation tokens are not those of {checkpoint.path} (by hash), and one curve cannot be of both; "
                "put back what was there, or start anew with another --out"
            )
        state = checkpoint.model_state()
        dtypes = {name: p.dtype for name, p in self.model.state_dict().items()}
        other = [name for name, p in state.items() if dtypes.get(name, p.dtype) != p.dtype]
        if other:
            raise ValueError(
                f"checkpoint {checkpoint.path} holds {other[0]} in {state[other[0]].dtype}, this run in "
                f"{dtypes[other[0]]}; resume with the same recipe and precision"
            )
        self.model.load_state_dict(state)
        self.optimizers.load_state(checkpoint.tensors)
        checkpointing.restore_random_state(checkpoint.tensors)
        self.step = checkpoint.step

    def facts(self) -> dict[str, Any]:
        """Facts that the run depends on beyond its configuration; they make the ``start`` event."""
        config = self.config
        return {
            "recipe": config.recipe,
            "n_params": config.model.n_params,
            "flops_per_token": config.model.flops_per_token(),
            "tokens_per_step": config.tokens_per_step,
            "warmdown_steps": config.warmdown_steps,
            "data": self.inputs.facts,
            "epochs": self._epochs(config.steps),
            "world_size": self.world.size,
            "accumulation": self.inputs.loader.accumulation,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtype": "bfloat16" if self.mixed else "float32",
            "versions": versions(),
        }

    def headline(self) -> str:
        """The first line of progress: sizes, data, recipe, device and folder."""
        config, model = self.config, self.config.model
        dtype = "bf16" if self.mixed else "fp32"
        where = f"{self.world.size} x {self.device.type}" if self.world.size > 1 else str(self.device)
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return (
            f"{config.preset}: {model.mlp} MLP, {model.attention} attention, {model.n_params / 1e6:.2f}M parameters; "
            f"{config.steps} steps of {config.tokens_per_step:,} tokens, {self._epochs(config.steps):.2f} epochs of "
            f"{len(self.inputs.loader.stream):,}; recipe {config.recipe}, {dtype}, {where}{threads}; {self.folder}"
        )

    def say(self, text: str) -> None:
        """Print a line on stderr, on rank 0 and where progress is wanted."""
        if self.progress_enabled:
            print(text, file=sys.stderr, flush=True)

    def _agree(self, loss: Tensor, norm: Tensor) -> tuple[float, float, bool]:
        """Means over ranks of loss and gradient norm, and whether any rank was told to stop; one collective."""
        told = torch.tensor(float(self.stop_request.number > 0), device=loss.device)
        values = torch.stack([loss.double(), norm.double(), told])
        loss_sum, norm_sum, stop = sum_over_ranks(values, self.world).tolist()
        return loss_sum / self.world.size, norm_sum / self.world.size, stop > 0

    def _last_good(self) -> str:
        path, _ = checkpointing.find_latest(self.folder)
        return f"the last complete checkpoint is {path}" if path else "no checkpoint had been saved"

    def _event(self, kind: str, **values: Any) -> None:
        if self.log is not None:
            self.log.append(kind, step=self.step, tokens=self.step * self.config.tokens_per_step, **values)
            self.tracking.log(kind, {"step": self.step, **values})
