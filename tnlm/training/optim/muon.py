"""The optimiser Muon as the public runs use it: SGD momentum, Nesterov, five Newton-Schulz steps, shared among ranks.

For a matrix W (rows x cols) with gradient g::

    buf <- mu buf + g                  u = g + mu buf
    X = u / (||u||_F + 1e-7), transposed when rows > cols
    five times:  A = X X',  X <- a X + (b A + c A A) X
    transpose back;   W <- W - lr sqrt(max(1, rows / cols)) X

``torch.optim.Muon`` averages gradients instead of summing them (``buf <- mu buf + (1 - mu) g``), which is the
same direction at constant mu and up to 9 % another one while mu warms up; it also has no choice of dtype.

Source: Jordan et al., Muon (KellerJordan/modded-nanogpt); coefficients as published there.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from tnlm.kernels.precision import HALF

NSDtype = Literal["auto", "float32", "bfloat16", "float64"]
Distribution = Literal["round_robin", "replicate"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MAX_STACK = 1 << 26
"""Elements that one batched iteration takes at most; it holds about four times as many in temporaries."""


def newton_schulz(
    u: Float[Tensor, "*stack rows cols"], *, steps: int = 5, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*stack rows cols"]:
    """Push the singular values of each matrix towards 1: roughly U V' of its SVD, each value in about [0.7, 1.2].

    Scale-free up to the eps of the normalisation; a zero matrix stays zero. Up to three steps on a matrix at least
    twice as wide as high go through its small Gram matrix, unless in half precision, whose rounding they magnify.

    Cost: with sides ``n <= m``, ``4 n**2 m + 2 n**3`` FLOPs a step; two steps by one Gram matrix take
    ``4 n**2 m + 10 n**3``, three ``4 n**2 m + 18 n**3``.

    Returns:
        In ``dtype``, in which all products are taken (the norm is taken in the dtype of ``u``).
    """
    return _newton_schulz(u.to(dtype) / _scale(u).to(dtype), steps)


def _scale(u: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(u)[..., None, None] + 1e-7


def _newton_schulz(u: Tensor, steps: int) -> Tensor:
    """Newton-Schulz steps on matrices that are normalised already."""
    high = u.shape[-2] > u.shape[-1]
    x = u.reshape(-1, *u.shape[-2:])
    x = x.mT if high else x
    together = 3 if x.shape[-1] >= 2 * x.shape[-2] and u.dtype not in HALF else 1
    for done in range(0, steps, together):
        x = _iterate(x, min(together, steps - done))
    return (x.mT if high else x).reshape(u.shape)


def _iterate(x: Float[Tensor, "stack n m"], steps: int) -> Float[Tensor, "stack n m"]:
    """``P_steps ... P_1 x`` with ``P = a + b A + c A**2``, where A is the Gram matrix of what ``P`` acts on.

    Only the first A is formed from x; the next is ``P A P``, for all of them commute.
    """
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    if steps == 1:
        return torch.baddbmm(x, q, x, beta=a)
    product = p = _plus_identity(q, a)
    for _ in range(1, steps):
        gram = p @ (gram @ p)
        p = _plus_identity(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), a)
        product = p @ product
    return product @ x


def _plus_identity(q: Tensor, a: float) -> Tensor:
    """Add ``a`` times the identity to ``q``, in place."""
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    return q


@cache
def _dtype(ns_dtype: NSDtype, device: torch.device) -> torch.dtype:
    if ns_dtype != "auto":
        return getattr(torch, ns_dtype)
    # bf16 products on a CPU, or on a GPU before sm_80, are emulated and slower than float32 by an order
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if native else torch.float32


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks; embedding, head and vectors belong to Adam.

    Set ``group["lr"]`` and ``group["momentum"]`` before each step, as any schedule does. Every rank keeps every
    momentum buffer (gradients are already averaged, so they agree) and only Newton-Schulz is shared, so
    ``state_dict`` is whole on each rank and loads at any world size.

    Args:
        params: Matrices, or (name, matrix) pairs as from ``named_parameters``; errors then use the names.
        ns_dtype: Dtype of the iteration; ``auto`` is bfloat16 on GPUs from sm_80 on and float32 elsewhere. The update
            is in this dtype too, as published. Momentum is kept in the dtype of the parameter.
        weight_decay: Decoupled, ``W <- (1 - lr weight_decay) W`` first; off in the published recipe.
        distribution: ``round_robin`` gives each matrix to one rank, balanced by cost, and sums the updates with
            one all_reduce; ``replicate`` repeats all work on each rank. Both give the same update.
        group: Process group of the all_reduce.
        check_finite: Look at every gradient first; false where the caller has, as by a norm of all of them.

    Raises:
        ValueError: A parameter is no non-empty matrix, or is named as an embedding or head.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: NSDtype = "auto",
        weight_decay: float = 0.0,
        distribution: Distribution = "round_robin",
        group: Any = None,
        check_finite: bool = True,
    ):
        if ns_dtype not in get_args(NSDtype) or distribution not in get_args(Distribution):
            raise ValueError(
                f"ns_dtype must be one of {', '.join(get_args(NSDtype))} and distribution one of "
                f"{', '.join(get_args(Distribution))}, got {ns_dtype!r}, {distribution!r}"
            )
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(params, {**defaults, "ns_dtype": ns_dtype, "weight_decay": weight_decay})
        self._shared = distribution == "round_robin" and dist.is_available() and dist.is_initialized()
        self._group = group
        self._check_finite = check_finite

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, param in zip(self._names(group), group["params"]):
            if param.ndim != 2 or param.numel() == 0:
                raise ValueError(
                    f"Muon takes matrices with both sides at least 1, got {name} of shape {tuple(param.shape)}; "
                    "give it to Adam"
                )
            if name.split(".")[-1] in ("w_e", "w_u"):
                raise ValueError(f"Muon takes matrices inside blocks, got {name}; give embedding and head to Adam")

    @staticmethod
    def _names(group: dict[str, Any]) -> list[str]:
        return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            FloatingPointError: A gradient holds NaN or inf, and ``check_finite`` holds; nothing has been changed then.
        """
        if self._check_finite:
            self._require_finite()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            world, rank = (dist.get_world_size(self._group), dist.get_rank(self._group)) if self._shared else (1, 0)
            owner = balanced_owners([tuple(p.shape) for p in params], world)
            mine = [i for i in range(len(params)) if owner[i] == rank]
            for i in set(range(len(params))).difference(mine):
                self._advanced(params[i], group)
            updates = self._orthogonalised([params[i] for i in mine], group)
            if world > 1:
                updates = self._summed(dict(zip(mine, updates)), params, group)
            for p, update in zip(params, updates):
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)

    def _require_finite(self) -> None:
        named = [
            (name, p.grad)
            for group in self.param_groups
            for name, p in zip(self._names(group), group["params"])
            if p.grad is not None
        ]
        if not named or torch.stack([grad.sum() for _, grad in named]).isfinite().all():
            return
        # the sum of finite numbers may overflow
        bad = [name for name, grad in named if not grad.isfinite().all()]
        if bad:
            raise FloatingPointError(f"gradient of {bad[0]} is not finite; no parameter was changed")

    def _advanced(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance the momentum buffer, ``buf <- mu buf + g``, and return it."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        return torch.add(p.grad, buffer, alpha=group["momentum"], out=buffer)

    def _direction(self, p: Tensor, group: dict[str, Any], out: Tensor) -> None:
        """Advance the momentum buffer, and write the matrix to orthogonalise into ``out``."""
        buffer = self._advanced(p, group)
        assert p.grad is not None
        if group["nesterov"]:
            torch.add(p.grad, buffer, alpha=group["momentum"], out=out)
        else:
            out.copy_(buffer)

    def _orthogonalised(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Newton-Schulz of each direction, those of one shape stacked."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, p in enumerate(params):
            by_shape.setdefault((p.shape[0], p.shape[1]), []).append(i)
        updates: dict[int, Tensor] = {}
        for (rows, cols), indices in by_shape.items():
            size = max(1, _MAX_STACK // (rows * cols))
            for chunk in (indices[k : k + size] for k in range(0, len(indices), size)):
                stack = params[chunk[0]].new_empty(len(chunk), rows, cols)
                for i, out in zip(chunk, stack):
                    self._direction(params[i], group, out)
                dtype = _dtype(group["ns_dtype"], stack.device)
                scale = _scale(stack).to(dtype)
                updates.update(zip(chunk, _newton_schulz(stack.to(dtype).div_(scale), group["ns_steps"])))
        return [updates[i] for i in range(len(params))]

    def _summed(self, mine: dict[int, Tensor], params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """All updates on every rank: zeros but for one's own, in one flat buffer, summed (exactly) over the ranks."""
        sizes = [p.numel() for p in params]
        dtype = _dtype(group["ns_dtype"], params[0].device)
        flat = torch.zeros(sum(sizes), dtype=dtype, device=params[0].device)
        parts = flat.split(sizes)
        for i, update in mine.items():
            parts[i].copy_(update.reshape(-1))
        dist.all_reduce(flat, group=self._group)
        return [part.view_as(p) for part, p in zip(parts, params)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, refusing a momentum of another dtype than its parameter: torch would cast it in silence."""
        params = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, index in zip(params, saved):
            buffer = state_dict["state"].get(index, {}).get("momentum_buffer")
            if buffer is not None and (buffer.dtype, buffer.shape) != (p.dtype, p.shape):
                raise ValueError(
                    f"momentum of parameter {index} must be {p.dtype} of shape {tuple(p.shape)} like the parameter, "
                    f"got {buffer.dtype} of shape {tuple(buffer.shape)}; load the model in the dtype it was saved in"
                )
        super().load_state_dict(state_dict)


def balanced_owners(shapes: list[tuple[int, ...]], world_size: int) -> list[int]:
    """Rank that works on each matrix: the costliest first, each for the rank with the least work so far."""
    cost = [4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3 for s in shapes]
    load, owner = [0] * world_size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owner[i] = min(range(world_size), key=load.__getitem__)
        load[owner[i]] += cost[i]
    return owner
