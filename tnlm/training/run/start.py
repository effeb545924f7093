"""Start of a run: device, threads, run folder and its lock, fresh model, and the versions that are recorded."""

import contextlib
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

import tnlm
from tnlm.checkpoints.local import is_run
from tnlm.output.files import lock, write_atomically
from tnlm.training.config import OPERATIONAL, TrainConfig, load_config
from tnlm.training.run.distributed import World, on_main
from tnlm.transformer import Transformer


def choose_device(config: TrainConfig, world: World) -> torch.device:
    """The device of this rank: ``config.device``, or its GPU if there is one.

    Raises:
        ValueError: CUDA is asked for and absent, or there are more ranks than GPUs on this machine.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={config.device!r} needs a CUDA device and torch sees none; use --device cpu")
    index = world.local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK must be below the number of GPUs, got {index} with {torch.cuda.device_count()}; "
            "start torchrun with a smaller --nproc_per_node"
        )
    return torch.device("cuda", index)


def cpu_threads(config: TrainConfig, world: World) -> int:
    """Number of CPU threads: ``config.threads``; by default at most 4, and 1 for each of several ranks."""
    if config.threads is not None:
        return config.threads
    return 1 if world.size > 1 else min(torch.get_num_threads(), 4)


@contextlib.contextmanager
def run_lock(config: TrainConfig, world: World) -> Iterator[None]:
    """Make the run folder and hold its lock file on rank 0; every rank raises if another process holds it.

    Raises:
        ValueError: Another process trains in the folder (names process, host and start), or a folder lies where a file
            of the run must be, or the reverse.
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            _check_kinds(config.folder)
            config.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(config.folder / ".lock", what=f"the run folder {config.folder}"))

        on_main(take, world)
        yield


def _check_kinds(folder: Path) -> None:
    files = [folder / name for name in (".lock", "config.json", "metrics.jsonl", "latest")]
    folders = [folder, folder / "checkpoints"]
    wrong = [f"{path} must be a file, but is a folder" for path in files if path.is_dir()]
    wrong += [f"{path} must be a folder, but is a file" for path in folders if path.is_file()]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}; rename or remove it, or choose another --out")


def claim_folder(config: TrainConfig) -> None:
    """Make the run folder and write ``config.json``; a run that has begun there must be the same.

    Raises:
        ValueError: It holds another run, with the fields that differ, or a saved model.
    """
    path = config.folder / "config.json"
    if path.exists() and not is_run(config.folder):
        raise ValueError(f"{path} is not the configuration of a run and would be lost; choose another --out")
    begun = any((config.folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if begun and path.exists():
        old, new = load_config(path).to_dict(), config.to_dict()
        changed = [f"{k}: {old[k]} -> {new[k]}" for k in new if k not in OPERATIONAL | {"model"} and old[k] != new[k]]
        models = old["model"], new["model"]
        changed += [f"model.{k}: {models[0][k]} -> {v}" for k, v in models[1].items() if models[0][k] != v]
        if changed:
            raise ValueError(
                f"{config.folder} holds another run, differing in {'; '.join(changed)}. Choose another --out, repeat "
                "the command it was started with to resume it, or start a new schedule from it with tnlm-train branch"
            )
    write_atomically(path, json.dumps(config.to_dict(), indent=1) + "\n")


def wants_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Whether activations are bf16: asked for, or automatic on a GPU that has it."""
    if config.precision == "auto":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return config.precision == "bfloat16"


def build_model(config: TrainConfig, *, mixed: bool, initial: Mapping[str, Tensor] | None = None) -> Transformer:
    """A model with seeded initial weights, on CPU; the same for every world size and device.

    ``replication`` keeps every parameter in float32 and computes in bf16 if ``mixed``. ``replication-exact`` then also
    holds the embedding and everything below two dimensions in bf16, as the public code does.
    """
    torch.manual_seed(config.seed)
    model = Transformer(config.model)
    with torch.no_grad():
        model.embed.w_e.mul_(config.init_scale)
    if mixed and config.recipe == "replication-exact":
        for name, p in model.named_parameters():
            if name == "embed.w_e" or p.ndim < 2:
                p.data = p.data.bfloat16()
    elif mixed:
        model.compute_dtype = torch.bfloat16
    if initial is not None:
        model.load_state_dict(initial)
    return model


def versions() -> dict[str, str | None]:
    """Versions of tnlm (with the commit of its checkout), torch and python."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
        commit = done.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {
        "tnlm": tnlm.__version__,
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
