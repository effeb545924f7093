"""Ranks of a distributed run: read from the environment that torchrun sets, and the collectives of the loop.

Reading the environment imports no torch and allocates nothing, so a wrong launch fails before anything is built.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""Time limit of every collective: a lost rank is an error, never a hang."""


@dataclass(frozen=True)
class World:
    """Number of this process (rank) and of all processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Read ``WORLD_SIZE``, ``RANK`` and ``LOCAL_RANK`` as torchrun sets them; one process when none is set.

        Raises:
            ValueError: One is missing, no integer, or out of range.
        """
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
        given = {name: environment[name] for name in names if name in environment}
        if not given:
            return cls()
        if "WORLD_SIZE" not in given or "RANK" not in given:
            missing = " and ".join(n for n in names[:2] if n not in given)
            raise ValueError(
                f"torchrun sets WORLD_SIZE, RANK and LOCAL_RANK together, got {given} without {missing}; "
                "start with torchrun, or unset them all for one process"
            )
        values = {}
        for name, text in given.items():
            if not text.strip().isdecimal():
                raise ValueError(f"{name} must be an integer >= 0, got {text!r}")
            values[name] = int(text)
        size, rank = values["WORLD_SIZE"], values["RANK"]
        if size < 1:
            raise ValueError(f"WORLD_SIZE must be at least 1, got {size}")
        if rank >= size:
            raise ValueError(f"RANK must be below WORLD_SIZE, got RANK={rank}, WORLD_SIZE={size}")
        absent = [n for n in ("MASTER_ADDR", "MASTER_PORT") if n not in environment]
        if size > 1 and absent:
            raise ValueError(f"{size} ranks need {' and '.join(absent)}; start with torchrun, which sets them")
        return cls(rank=rank, size=size, local_rank=values.get("LOCAL_RANK", 0))


@contextmanager
def process_group(world: World, device: "torch.device") -> Iterator[None]:
    """Join the ranks: gloo on CPU, nccl on CUDA (gloo for CPU tensors); nothing for one process.

    The group is destroyed after success only: when one rank fails, the others still wait in a collective, destroying
    would wait for them, and the message of the failure would never be seen. The process ends, and its launcher ends
    the others.
    """
    if world.size == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def sum_over_ranks(values: "torch.Tensor", world: World) -> "torch.Tensor":
    """The sum of ``values`` over all ranks, in place; every rank calls it."""
    if world.size > 1:
        import torch.distributed as dist

        dist.all_reduce(values)
    return values


def on_main(action: Callable[[], T], world: World) -> T:
    """Run ``action`` on rank 0 while the others wait; every rank returns its value or raises its exception."""
    if world.size == 1:
        return action()
    import torch.distributed as dist

    value: T | None = None
    error: Exception | None = None
    if world.main:
        try:
            value = action()
        except Exception as raised:
            error = raised
    box = [value, error]
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]  # type: ignore[misc]
    return box[0]  # type: ignore[return-value]
