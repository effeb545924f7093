"""Run by test_ops: two gloo ranks train one compiled step on chunked attention; gradients must be the mean."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.limits import assert_close
from tnlm.kernels import squared_attention


class Layer(nn.Module):
    """Self-attention of three heads of width 4 through one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(2)
        return squared_attention(q, k, v, implementation="chunked").flatten(-2)


def batch(rank: int) -> Tensor:
    return torch.randn(2, 130, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = Layer()
    parallel = torch.compile(DistributedDataParallel(layer), backend="aot_eager")
    parallel(batch(rank)).square().mean().backward()
    alone = Layer()
    alone.load_state_dict(layer.state_dict())
    sum(alone(batch(r)).square().mean() / 2 for r in range(2)).backward()
    assert_close(layer.qkv.weight.grad, alone.qkv.weight.grad)
    assert alone.qkv.weight.grad.norm() > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, args=(os.path.join(folder, "store"),), nprocs=2, start_method="fork")
