# %% [markdown]
# # Is a whole model one polynomial?
#
# Without norms, QK-norm and softcap every operation is a product or a sum, so the logits are polynomials of the
# embeddings. First the model as a tensor network that gives the logits; then the degrees; then, for a model small
# enough, every coefficient of the polynomial: two models are equal exactly when these numbers are.

# %%
from math import comb

import torch
import torch.nn.functional as F

import tnlm
from tnlm import interp
from tnlm.app import specimens
from tnlm.interp.views import plot

MODEL = "nano"  # for the first section; or a run folder, or a released model: "bilinear-bilinear-18l"

# %% [markdown]
# ## A trained model as a network
#
# Models with norms are polynomials once the inverse norms of a run are given: `inverse_norms` records them, and they
# enter the network as named inputs. The contraction gives the logits before the softcap, which is monotone and no
# polynomial.

# %%
specimen = specimens.get(MODEL, rows=1, seq=8)
model = specimen.model
tokens = specimen.tokens[:, :-1]
network = model.network(tokens.shape[1])
print(network)
print(network.cost({"batch": 1}))
one_hot = F.one_hot(tokens, model.config.d_vocab).to(model.embed.w_e)
with torch.no_grad():
    z = network.contract({"tokens": one_hot, **model.inverse_norms(tokens)})
    expected = model.pre_softcap(tokens)
error = float((z - expected).abs().max() / expected.abs().max())
print(f"contraction against forward, relative: {error:.1e}")
assert error < 1e-3

# %% [markdown]
# ## A pure model, and its degrees
#
# Here nothing has to be given: attention is of degree 5 and the MLP doubles it, so one layer is of degree 10 in its
# input. `degrees` reads the homogeneous parts off 11 evaluations at complex multiples of the input; they sum to the
# output.

# %%
torch.manual_seed(0)
config = tnlm.ModelConfig.pure(
    d_vocab=3,
    n_layer=1,
    n_head=1,
    d_model=2,
    d_hidden=3,
    n_ctx=2,
    x0_mixing=False,
    value_residual=False,
    mlp_bias=False,
)
toy = tnlm.Transformer(config, dtype=torch.float64)
for parameter in toy.parameters():
    torch.nn.init.normal_(parameter)
with torch.no_grad():
    toy.embed.w_e.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
whole = toy.network(2)


def logits(x):
    """Logits of the last position from any embeddings (batch, 2, 2), real or complex, by contraction.

    The embedding of the "token" (1 - x0 - x1, x0, x1) is x: rows 1 and 2 of the table are unit vectors, row 0 is zero.
    """
    mixture = torch.cat([1 - x.sum(-1, keepdim=True), x], dim=-1)
    return whole.contract({"tokens": mixture})[:, -1]


x = torch.randn(1, 2, 2, dtype=torch.float64)
with torch.no_grad():
    assert torch.allclose(logits(x), toy.unembed(toy.run(x))[:, -1], rtol=1e-12, atol=1e-12)
    parts = interp.degrees(logits, x, 10)
print("largest entry of each homogeneous part:", [f"{v:.1e}" for v in parts.abs().amax((1, 2)).tolist()])
assert torch.allclose(parts.sum(0), logits(x), rtol=1e-9, atol=1e-9)
alive = (parts.abs().amax((1, 2)) > 1e-9).nonzero().flatten().tolist()
print("degrees that occur:", alive)
assert alive == [1, 2, 5, 6, 10], "x, attention (5), and the MLP of their sum: 2, 6 and 10"

# %% [markdown]
# ## Every coefficient
#
# The last logits depend on four numbers, the two embeddings of two entries each. As a tensor on copies of `(1, x)` this
# is an array of `3 * 5**10` numbers, but products commute: only `comb(14, 4) = 1001` monomials of degree 10 or less in
# four variables are distinct. Their coefficients are a discrete Fourier transform of the values on a grid of roots of
# unity, 11 along each variable; whatever is of higher degree would show outside the 1001.


# %%
def coefficients(f):
    """Coefficient of ``x00**a x01**b x10**c x11**d`` at ``[a, b, c, d]``, one logit per last index."""
    roots = torch.polar(torch.ones(11, dtype=torch.float64), 2 * torch.pi * torch.arange(11).double() / 11)
    grid = torch.cartesian_prod(roots, roots, roots, roots).view(-1, 2, 2)
    values = f(grid).view(11, 11, 11, 11, -1)
    found = torch.fft.fftn(values, dim=(0, 1, 2, 3)) / 11**4
    assert found.imag.abs().max() < 1e-10 * found.abs().max()
    return found.real


with torch.no_grad():
    program = coefficients(logits)
exponents = torch.cartesian_prod(*[torch.arange(11)] * 4).view(11, 11, 11, 11, 4)
degree = exponents.sum(-1)
present = (program.abs() > 1e-10 * program.abs().max()).any(-1)
print(f"{int((degree <= 10).sum())} monomials of degree 10 or less, {int(present.sum())} of them occur in this model")
assert int((degree <= 10).sum()) == comb(14, 4) == 1001
assert not present[degree > 10].any()
assert exponents[present][:, :2].sum(-1).max() == 6, (
    "the first token enters attention three times, and the MLP squares it"
)

# %% [markdown]
# The polynomial is the model: evaluated from its coefficients it gives the logits of every pair of tokens.

# %%
pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
with torch.no_grad():
    forward = toy(pairs)[:, -1]
    powers = toy.embed.w_e[pairs].flatten(1)[:, :, None] ** torch.arange(11)  # [pair, variable, power]
by_hand = torch.einsum("abcdv,na,nb,nc,nd->nv", program, *powers.unbind(1))
print(f"largest difference over all 9 pairs: {float((by_hand - forward).abs().max()):.1e}")
assert torch.allclose(by_hand, forward, rtol=1e-9, atol=1e-9)

# %% [markdown]
# ## Equal functions have equal coefficients
#
# Weights are not unique: swapping the two branches of the pattern, or scaling an encoder up and the other down, leaves
# the function. The coefficients do not move. A change of one weight by a thousandth does move them.

# %%
attn, mlp = toy.blocks[0].attn, toy.blocks[0].mlp
with torch.no_grad():
    for first, second in ((attn.w_q1, attn.w_q2), (attn.w_k1, attn.w_k2)):
        first.data, second.data = second.data.clone(), first.data.clone()
    mlp.w_l.mul_(3.0), mlp.w_r.div_(3.0)
    whole = toy.network(2)
    same = coefficients(logits)
    mlp.w_d[0, 0] += 1e-3
    whole = toy.network(2)
    other = coefficients(logits)
print(
    f"gauge change {float((same - program).abs().max()):.1e}, weight change {float((other - program).abs().max()):.1e}"
)
assert (same - program).abs().max() < 1e-9 * program.abs().max()
assert (other - program).abs().max() > 1e-6 * program.abs().max()

# %%
first, second = exponents[..., :2].sum(-1), exponents[..., 2:].sum(-1)
size = torch.zeros(11, 11, dtype=torch.float64)
size.index_put_((first[present], second[present]), program[present].square().sum(-1), accumulate=True)
size = size.sqrt()
figure = plot.interaction(size.log1p(), title="Size of the coefficients by degree in each token")
figure.update_xaxes(title="degree in the second (last) token").update_yaxes(title="degree in the first token")
figure.update_layout(title_subtitle_text="log(1 + norm); exact")
