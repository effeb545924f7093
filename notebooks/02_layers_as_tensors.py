# %% [markdown]
# # Is a layer a tensor?
#
# A bilinear MLP is `D (Lx * Rx)`, a third-order tensor applied twice to its input; a bilinear attention is of degree 2
# in the query position and 3 in the key position. Written with named indices, both are one einsum, and `opt_einsum`
# plans and runs it. What changes with the order of contraction is the cost, never the value.

# %%
import opt_einsum
import torch

import tnlm
from tnlm import interp
from tnlm.app import specimens
from tnlm.explicit import augment
from tnlm.interp.views import plot

MODEL = "nano"  # or a run folder, or a released model: "bilinear-bilinear-18l"

model = specimens.get(MODEL, rows=1).model
d = model.config.d_model
mlp = model.blocks[-1].mlp
generator = torch.Generator().manual_seed(0)
x = torch.randn(3, d, generator=generator)

# %% [markdown]
# ## The MLP as a network of five operands
#
# `mlp.network()` names the indices; a bias is one more hidden unit that reads the constant of `(1, x)`.
# `args` gives opt_einsum's own arguments, so the network is no black box.

# %%
network = mlp.network()
print(network)
for operand, indices in network.operands:
    print("  ", operand if isinstance(operand, str) else tuple(operand.shape), " ".join(indices))
read = augment(x) if mlp.bias is not None else x
with torch.no_grad():
    expected = mlp(x)
    by_hand = opt_einsum.contract(*network.args(x=read))
scale = expected.abs().max()
assert (by_hand - expected).abs().max() < 1e-4 * scale

# %% [markdown]
# ## The dense tensor of a few outputs
#
# `T[o, i, j]` is symmetric in its two inputs: only the symmetric part is a property of the function. With a bias it is
# the tensor of `(1, x)`. The whole of it holds `d**3` numbers, so we project to three output directions first.

# %%
layer = interp.extract(model).mlp[-1]
some = layer.project(torch.eye(d)[:3])
tensor = some.tensor()
print("dense tensor", tuple(tensor.shape))
values = torch.einsum("oij,bi,bj->bo", tensor, read, read)
assert torch.equal(tensor, tensor.mT) or (tensor - tensor.mT).abs().max() < 1e-6 * tensor.abs().max()
assert (values - expected[:, :3]).abs().max() < 1e-4 * scale

# %%
plot.interaction(tensor[0, :48, :48], title="One output as a form between inputs (first 48)")

# %% [markdown]
# ## The order of contraction is the cost
#
# Two plans of one network: multiply the factors with the input first (what a forward does), or build the dense tensor
# first and apply it. `cost()` knows the FLOPs and the largest array before anything is allocated.

# %%
factors = tnlm.Network(
    [
        (layer.w_d, "out hidden"),
        (layer.w_l, "hidden i"),
        ("x", "batch i"),
        (layer.w_r, "hidden j"),
        ("x", "batch j"),
    ],
    "batch out",
)
batch = {"batch": 64}
planned = factors.cost(batch)
# Operands 0 1 2 3 4: join L with D, then R (dense out-i-j), then both inputs.
dense_first = factors.cost(batch, optimize=[((0, 1), (1, 3), (0, 2), (0, 1))])
print("planned:    ", planned)
print("dense first:", dense_first)
assert planned.flops < dense_first.flops
assert dense_first.largest >= d**3

# %% [markdown]
# ## Attention, and a whole model as one einsum
#
# The same holds for attention at fixed length. A pure model of two attention layers is one flat einsum; nested, each
# node is contracted once. Flat networks grow as the degree to the power of the depth, which is why deeper models stay
# nested.

# %%
seq = 6
attention = model.blocks[0].attn
if model.config.attention == "bilinear" and not model.config.qk_norm:
    print(attention.network(seq))
sizes = {"d_vocab": 11, "n_head": 2, "d_model": 8, "n_ctx": 8, "x0_mixing": False, "value_residual": False}
small = {
    "1 layer, attention": tnlm.ModelConfig.pure(n_layer=1, mlp="none", d_hidden=0, **sizes),
    "2 layers, attention": tnlm.ModelConfig.pure(n_layer=2, mlp="none", d_hidden=0, **sizes),
    "1 layer with MLP": tnlm.ModelConfig.pure(n_layer=1, d_hidden=6, **sizes),
}
counts, flops = {}, {}
for name, config in small.items():
    toy = tnlm.Transformer(config, dtype=torch.float64)
    for p in toy.parameters():
        torch.nn.init.normal_(p, std=0.4, generator=generator)
    tokens = torch.randint(11, (2, 4), generator=generator)
    nested = toy.network(4)
    flat = nested.flatten()
    one_hot = torch.nn.functional.one_hot(tokens, 11).double()
    with torch.no_grad():
        expected = toy(tokens)
        assert torch.allclose(nested.contract({"tokens": one_hot}), expected, rtol=1e-10, atol=1e-10)
        assert torch.allclose(opt_einsum.contract(*nested.args(tokens=one_hot)), expected, rtol=1e-10, atol=1e-10)
    counts[name] = len(flat.operands)
    flops[name] = (nested.cost({"batch": 2}).flops, flat.cost({"batch": 2}).flops)
    print(
        f"{name:20} {counts[name]:4} operands in one einsum, FLOPs nested {flops[name][0]:,}, flat {flops[name][1]:,}"
    )
assert counts["2 layers, attention"] > 4 * counts["1 layer, attention"]

# %%
figure = plot.lines(
    {kind: (list(flops), [pair[i] for pair in flops.values()]) for i, kind in enumerate(("nested", "one einsum"))},
    title="One function, two networks",
    x="",
    y="FLOPs of a contraction",
    subtitle="exact: equal values to rounding, checked above",
)
figure.update_traces(mode="markers", marker_size=12).update_yaxes(type="log")
