"""Cross-entropy of a batch as modules that can be compiled, and its mean over the validation tokens."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tnlm.kernels import unembedded_cross_entropy
from tnlm.points import hooked
from tnlm.text.evaluate import token_losses
from tnlm.training.data.stream import Validation, inputs_and_targets
from tnlm.training.run.distributed import World, sum_over_ranks
from tnlm.transformer import Transformer


class MeanLoss(nn.Module):
    """Mean cross-entropy of a batch, as one module that can be compiled and wrapped by DDP."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
        if hooked(self.model, self.model.unembed):  # the fast loss forms no logits that a hook could see
            return token_losses(self.model(inputs), targets).mean()
        x, w_u = self.model.final_residual(inputs), self.model.unembed.w_u
        return unembedded_cross_entropy(x, w_u, targets, self.model.config.logit_softcap)


class TokenLosses(nn.Module):
    """Cross-entropy of each token of a batch, as one module that can be compiled; validation sums it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq"]:
        return token_losses(self.model(inputs), targets)


@torch.no_grad()
def validation_losses(
    losses: Callable[..., Tensor], validation: Validation, *, batch: int, device: torch.device, world: World
) -> list[float]:
    """Cross-entropy of the validation tokens at each position of the sequence, summed over all windows of all ranks.

    Args:
        losses: A :class:`TokenLosses`, compiled or not; the sums are float64.
        batch: Windows per forward.
    """
    sums = torch.zeros(validation.seq, dtype=torch.float64, device=device)
    for windows in validation.batches(batch, rank=world.rank, world_size=world.size):
        sums += losses(*inputs_and_targets(windows, device)).double().sum(0)
    return sum_over_ranks(sums, world).tolist()
