"""RMS norm without gain."""

from jaxtyping import Shaped
from torch import Tensor, nn

from tnlm.config import FP32_EPS
from tnlm.kernels import rms_norm
from tnlm.points import Point, listened


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps)`` over the last axis; no learned gain; half precision is normed in float32.

    Points: ``hook_scale`` (..., 1), the square root above, and ``hook_normalized``. Replacing ``hook_scale`` by a
    recorded value freezes the norm, which makes the layer linear: exact given the norms of that run.

    ``eps`` is explicit because torch's own default depends on the dtype.
    """

    def __init__(self, eps: float = FP32_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.hook_scale = Point()
        self.hook_normalized = Point()

    def forward(self, x: Shaped[Tensor, "... d"]) -> Shaped[Tensor, "... d"]:
        if not listened(self.hook_scale, self.hook_normalized):
            return rms_norm(x, self.eps)
        return self.hook_normalized(rms_norm(x, self.eps, at_scale=self.hook_scale))

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"


class NoNorm(nn.Module):
    """The identity, with the point ``hook_normalized`` where a norm would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_normalized = Point()

    def forward(self, x: Shaped[Tensor, "... d"]) -> Shaped[Tensor, "... d"]:
        return self.hook_normalized(x)
