"""Parameter groups: Adam for embedding, unembedding and scalars, Muon for the matrices of the blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tnlm.training.config import TrainConfig
from tnlm.training.optim.muon import Muon


class Optimizers:
    """Adam and Muon over the published parameter groups, under one schedule.

    ====================== ========= ==================
    parameters             optimiser learning rate
    ====================== ========= ==================
    ``embed.w_e``          Adam      ``lr_embed``
    ``unembed.w_u``        Adam      ``lr_head``
    2-D, in ``blocks``     Muon      ``lr_matrix``
    the rest of ``blocks`` Adam      ``lr_scalar``
    ====================== ========= ==================

    Weight decay, off by default, is decoupled and acts on everything 2-D. Gradients must be finite, as
    :func:`gradient_norm` tells.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.schedule = config.schedule
        named = dict(model.named_parameters())
        self.names = {p: name for name, p in named.items()}
        matrices = {name: p for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2}
        decay = config.weight_decay
        adam: list[tuple[list[nn.Parameter], float, float]] = [
            ([named.pop("embed.w_e")], config.lr_embed, decay),
            ([named.pop("unembed.w_u")], config.lr_head, decay),
            ([p for name, p in named.items() if name not in matrices], config.lr_scalar, 0.0),
        ]
        self.adam = AdamW(
            [{"params": params, "lr": lr, "weight_decay": decay} for params, lr, decay in adam if params],
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=True,
        )
        self.all: list[Optimizer] = [self.adam]
        self.muon = None
        if matrices:
            self.muon = Muon(
                matrices.items(),
                lr=config.lr_matrix,
                weight_decay=decay,
                ns_dtype=config.ns_dtype,
                distribution=config.muon_distribution,
                check_finite=False,
            )
            self.all.append(self.muon)
        self._base = [(group, group["lr"]) for optimizer in self.all for group in optimizer.param_groups]

    def step(self, step: int) -> tuple[float, float]:
        """Make update number ``step`` (from 0); returns the learning-rate factor and Muon's momentum that it used."""
        factor, momentum = self.schedule.lr_factor(step), self.schedule.momentum(step)
        for group, lr in self._base:
            group["lr"] = lr * factor
        for group in self.muon.param_groups if self.muon is not None else []:
            group["momentum"] = momentum
        for optimizer in self.all:
            optimizer.step()
        return factor, momentum

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All state tensors by ``optimizer.{parameter}.{key}``: the same on every rank and for any number of ranks."""
        return {
            f"optimizer.{self.names[p]}.{key}": value  # type: ignore[index]
            for optimizer in self.all
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state` in the dtypes it was saved in.

        Raises:
            ValueError: A parameter has no state, or a state belongs to no parameter or has another shape.
        """
        wanted = {f"optimizer.{name}." for name in self.names.values()}
        given = {key: t for key, t in tensors.items() if key.startswith("optimizer.")}
        prefixes = {key.rpartition(".")[0] + "." for key in given}
        if prefixes != wanted:
            raise ValueError(
                "optimiser state does not fit the model: "
                f"missing {', '.join(sorted(p[10:-1] for p in wanted - prefixes)) or 'none'}; "
                f"unexpected {', '.join(sorted(p[10:-1] for p in prefixes - wanted)) or 'none'}"
            )
        for optimizer in self.all:
            keys = {"momentum_buffer"} if optimizer is self.muon else {"step", "exp_avg", "exp_avg_sq"}
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                prefix = f"optimizer.{self.names[p]}."
                state = {key.removeprefix(prefix): t for key, t in given.items() if key.startswith(prefix)}
                shapes = {key: tuple(t.shape) for key, t in state.items()}
                if shapes != {key: () if key == "step" else tuple(p.shape) for key in keys}:
                    raise ValueError(
                        f"state of {self.names[p]} must be {', '.join(sorted(keys))} of shape {tuple(p.shape)}, "
                        f"got {shapes}"
                    )
                optimizer.state[p] = {key: t.to(p.device, copy=True) for key, t in state.items()}


def gradient_norm(model: nn.Module) -> Tensor:
    """The 2-norm of all gradients together; not finite if one of them is not."""
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
