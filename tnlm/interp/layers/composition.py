"""The composition of bilinear layers as one nested tensor network."""

import itertools

from tnlm.interp.checks import check_tensor
from tnlm.interp.layers.bilinear import BilinearTensor, check_layer
from tnlm.network import Network


def compose(*layers: BilinearTensor, residual: bool = False) -> Network:
    """The composition of layers as a `tnlm.network.Network`: ``compose(f1, f2)(x) == f2(f1(x))``.

    The layers are given in the order in which the network applies them, as everywhere. Each is a shared node
    and contracted once; the tensor of order ``2**n + 1`` is never formed. Exact.

    Args:
        residual: Every layer is ``x + f(x)``.

    Returns:
        Network with the input ``x (batch, d_in)`` and output ``(batch, d_out)``. With a residual or a bias the input is
        the augmented ``(1, x)``, of width ``1 + d_in``: the constant coordinate carries every lower degree. The output
        has no constant coordinate.

    Symmetries: R E P U Q QR V N L H.

    Raises:
        ValueError: No layer, widths that do not fit, or a residual between different widths.
    """
    if not layers:
        raise ValueError("compose needs at least one layer, got none")
    for layer in layers:
        check_layer(layer)
        check_tensor("w_l of every layer", layer.w_l, (None, None), layers[0].w_l)
    for lower, upper in itertools.pairwise(layers):
        if upper.d_in != lower.d_out:
            raise ValueError(
                f"compose(f1, f2) needs f2.d_in == f1.d_out, got {upper.d_in} and {lower.d_out}; "
                "layers come in the order in which they are applied"
            )
    if residual or any(layer.bias is not None for layer in layers):
        layers = tuple(layer.augment(residual) for layer in layers)
        top = layers[-1]
        layers = (*layers[:-1], BilinearTensor(top.w_l, top.w_r, top.w_d[1:]))
    network = _node(layers[0], "x", "layer 0")
    for depth, layer in enumerate(layers[1:], start=1):
        network = _node(layer, network, f"layer {depth}")
    return network


def _node(layer: BilinearTensor, x: Network | str, name: str) -> Network:
    """Network of one layer applied to ``x``: a named input, or the network that computes it."""
    inputs = [(x, "batch left"), (x, "batch right")]
    factors = [(layer.w_l, "d_hidden left"), (layer.w_r, "d_hidden right"), (layer.w_d, "d_out d_hidden")]
    return Network([*factors, *inputs], "batch d_out", name=name)
