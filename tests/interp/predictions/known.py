"""A model whose every term is known by hand: one head reads one token, one MLP has three components."""

import torch

from tnlm.config import ModelConfig
from tnlm.text.tokenizer import Tokenizer
from tnlm.transformer import Transformer

PROMPT = torch.tensor([2, 4, 1, 0, 3])
TARGET, FOIL = 5, 6
LOGIT = -8.5
ROWS = {"L0.MLP component 1": -6.0, "L1.H2 from 1": -3.0, "direct path": 0.5}
"""Rows of the target's logit that are not 0. All others are."""
EIGENVALUES = [3.75, -1.5, 0.75]
"""Of layer 0 along the target: as it adds to the logit, through a factor 0.5 of layer 1."""
ABLATED = {"L0.MLP component 1": (6.0, 6.0, 3.0), "L1.H2 from 1": (3.0, 3.0, 3.0), "direct path": (-0.5, -0.5, 8.5)}
"""Predicted, held and actual change. Without the component the head's query doubles; without the embedding all is 0."""
TEXTS = ["nil", " one", "two", " three", "four ", "five", "six"]


class Texts(Tokenizer):
    """The tokenizer of the model, as far as the analyses need one."""

    def __init__(self) -> None:
        pass

    def decode(self, ids) -> str:
        return "".join(TEXTS[i] for i in ids)

    def quoted(self, token: int) -> str:
        return repr(TEXTS[token])


def known_model() -> Transformer:
    """Token t is the unit vector t, token 3 twice that; coordinate 7 is written by the head, 8 by the MLP."""
    config = ModelConfig.pure(
        d_vocab=9,
        d_vocab_used=7,
        n_layer=2,
        n_head=3,
        d_model=12,
        d_qk=4,
        d_hidden=3,
        n_ctx=8,
        rotary_base=1e16,  # the second pair of a head turns by 1e-8 per position
        x0_mixing=True,
        value_residual=False,
    )
    model = Transformer(config, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.embed.w_e[:9, :9] = torch.eye(9, dtype=torch.float64)
        model.embed.w_e[3] *= 2
        model.unembed.w_u[TARGET, [3, 7, 8]] = torch.tensor([0.25, 0.5, 1.5], dtype=torch.float64)
        model.unembed.w_u[FOIL, [3, 7, 8]] = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
        first, second = model.blocks
        first.lambdas.copy_(torch.tensor([1.0, 0.0]))
        second.lambdas.copy_(torch.tensor([0.5, 0.5]))
        for unit, (token, value) in enumerate(((3, -2.0), (2, 5.0), (1, 1.0))):
            first.mlp.w_l[unit, token] = first.mlp.w_r[unit, token] = 1
            first.mlp.w_d[8, unit] = value
        attn, row = second.attn, 2 * 4 + 1  # head 2, the pair that does not turn
        attn.w_q1[row, [3, 8]] = torch.tensor([1.0, 0.25], dtype=torch.float64)
        attn.w_k1[row, 4] = 8
        attn.w_q2[row, 3] = 1
        attn.w_k2[row, 4] = 0.75
        attn.w_v[2 * attn.d_head, :7] = torch.tensor([3.0, -5.0, 7.0, 0.5, 2.0, 1.0, 9.0], dtype=torch.float64)
        attn.w_o[7, 2 * attn.d_head] = -4
    return model
