# %% [markdown]
# # What does bilinear attention express that softmax does not?
#
# A bilinear pattern is the product of two score matrices, `(q1.k1)(q2.k2) / d_qk**2`: no softmax, no positivity, no
# row that sums to 1. So a head can ask for two properties at once (AND), turn its output around (SIGN), and subtract
# one group of tokens from another (CANCELLATION). Below, each is built by hand from exact weights, and softmax heads
# with every advantage we could give them are fitted to the same function. The expressivity appendix of the article
# ("Tensor-Transformer Variants are Surprisingly Performant") asks this question; the three functions are ours.

# %%
from itertools import pairwise

import torch

from tnlm.app import specimens
from tnlm.interp.views import plot
from tnlm.kernels import bilinear_attention
from tnlm.points import record

MODEL = "nano"  # for the last section; or a run folder, or a released model: "bilinear-bilinear-18l"

generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## Three functions of a query and its keys
#
# A query reads `(1, s)` with a sign `s`; each of four keys reads `(1, a, b, p)`: two properties, 0 or 1, and a payload.
#
# - AND: the sum of the payloads of the keys that have `a` *and* `b`.
# - SIGN: the sum of the payloads of the keys that have `a`, times the query's sign.
# - CANCELLATION: payloads of keys with `a` minus payloads of keys with `b`; a key with both contributes nothing.

# %%
n, n_keys = 512, 4
s = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
a, b = torch.randint(0, 2, (2, n, n_keys), generator=generator).double()
p = torch.randn(n, n_keys, generator=generator, dtype=torch.float64)
queries = torch.stack([torch.ones(n, dtype=torch.float64), s], dim=-1)  # [n, 2]
keys = torch.stack([torch.ones_like(a), a, b, p], dim=-1)  # [n, n_keys, 4]
targets = {"AND": (a * b * p).sum(1), "SIGN": s * (a * p).sum(1), "CANCELLATION": ((a - b) * p).sum(1)}

# %% [markdown]
# ## Bilinear weights that are exactly these functions
#
# One head; each factor is a product of a query read-out and a key read-out, so one entry of `d_qk` is enough.

# %%
# (query weights on (1, s), key weights on (1, a, b, p)) of both factors; the value reads the payload.
weights = {
    "AND": (((1, 0), (0, 1, 0, 0)), ((1, 0), (0, 0, 1, 0))),
    "SIGN": (((0, 1), (1, 0, 0, 0)), ((1, 0), (0, 1, 0, 0))),
    "CANCELLATION": (((1, 0), (0, 1, -1, 0)), ((1, 0), (1, 0, 0, 0))),
}


def bilinear_head(factors):
    """The kernel itself: one query per example that sees all its keys; d_qk is 1, so the scale is 1."""
    operands = []
    for w_q, w_k in factors:
        operands.append((queries @ torch.tensor(w_q).double())[:, None, None, None])
        operands.append((keys @ torch.tensor(w_k).double())[:, :, None, None])
    return bilinear_attention(*operands, p[:, :, None, None], causal=False)[:, 0, 0, 0]


exact = {name: float((bilinear_head(weights[name]) - y).abs().max()) for name, y in targets.items()}
print(exact)
assert max(exact.values()) < 1e-12

# %% [markdown]
# ## The best softmax fit
#
# Scores are an arbitrary bilinear form of query and key features (no rank limit, no norm), values an arbitrary linear
# form; there is a learned sink that takes weight and gives nothing, and a free offset. We minimise the squared error
# on the same examples from several starts and keep the best. A numerical fit is an upper bound on the best error, not
# a proof: the next two sections say what is known without fitting. A pair of such heads is fitted as well.


# %%
def softmax_fit(y, heads, starts=8, steps=300):
    """Smallest relative error ``mean((f - y)**2) / var(y)`` of a sum of softmax heads with sinks, over all starts."""

    def draw(*shape):
        return torch.randn(starts, heads, *shape, generator=generator, dtype=torch.float64).requires_grad_()

    form, sink, value = draw(2, 4), draw(2), draw(4)
    offset = torch.zeros(starts, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([form, sink, value, offset], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    read = torch.einsum("nq,nkf->nkqf", queries, keys).flatten(2)  # [n, n_keys, 8]
    best = torch.full((starts,), torch.inf, dtype=torch.float64)
    for _ in range(steps):
        scores = torch.einsum("nkr,shr->shnk", read, form.flatten(2))
        scores = torch.cat([scores, (sink @ queries.mT)[..., None]], dim=-1)
        values = torch.einsum("nkf,shf->shnk", keys, value)
        out = (scores.softmax(-1)[..., :-1] * values).sum((1, 3)) + offset[:, None]
        loss = (out - y).square().mean(1) / y.var()
        best = torch.minimum(best, loss.detach())
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    return float(best.min())


fits = {name: [softmax_fit(y, heads) for heads in (1, 2)] for name, y in targets.items()}
for name, (one, two) in fits.items():
    print(f"{name:13} bilinear, one head {exact[name]:.0e}   softmax, one head {one:.3f}, two heads {two:.3f}")
assert min(fits["SIGN"][0], fits["CANCELLATION"][0]) > 0.2, "one softmax head is far off where the sign matters"
assert all(fits[name][1] < fits[name][0] / 2 for name in ("SIGN", "CANCELLATION")), "a second head supplies the sign"
assert min(min(pair) for pair in fits.values()) > 1e6 * max(exact.values())

# %% [markdown]
# Relative errors: 0 is exact, 1 is no better than a constant.

# %%
figure = plot.lines(
    {f"softmax, {h + 1} head{'s' * h}": (list(fits), [fit[h] for fit in fits.values()]) for h in (0, 1)}
    | {"bilinear, 1 head": (list(fits), list(exact.values()))},
    title="Error of the best fit",
    x="",
    y="mean squared error / variance",
    subtitle="bilinear: exact weights; softmax: best of 8 numerical fits",
)
figure.update_traces(mode="markers", marker_size=12)

# %% [markdown]
# ## AND is a matter of degree
#
# An exponential turns sums into products, so softmax can approach AND: with scores `beta (a + b - 2)` and a sink of
# score `S` that takes nearly all the weight, a key gets `exp(beta (a + b - 2) - S)`, which the output map scales up by
# `exp(S)`. A key with both properties counts 1, one with a single property `exp(-beta)`. The error vanishes only as
# scores and output weights grow without bound; the bilinear head is exact with weights 0 and 1. By the same token two
# heads approach a difference of two such sums, which is how they come closer on the other two functions.

# %%
betas, limit = [0.5, 1.0, 2.0, 4.0, 6.0], {}
for beta in betas:
    sink = 12.0
    scores = torch.cat([beta * (a + b - 2), torch.full((n, 1), sink, dtype=torch.float64)], dim=1)
    out = torch.e**sink * (scores.softmax(-1)[:, :-1] * p).sum(1)
    limit[beta] = float((out - targets["AND"]).square().mean() / targets["AND"].var())
print({beta: f"{error:.1e}" for beta, error in limit.items()}, f"with output weights of {torch.e**12:.1e}")
assert all(limit[x] > limit[y] for x, y in pairwise(betas))
assert limit[0.5] > 0.1
assert limit[6.0] < 1e-3

# %% [markdown]
# ## One case without any fitting
#
# With a single visible key and no sink, softmax gives it weight 1 whatever the scores are. The output then does not
# depend on the query, and no weights whatever can give SIGN an error below 1: the two signs ask for opposite outputs.

# %%
scores = 10 * torch.randn(5, 1, generator=generator)
assert torch.equal(scores.softmax(-1), torch.ones(5, 1))
payload = p[:, 0]
opposite = torch.cat([payload, -payload])  # every example once with either sign
blind = torch.cat([payload, payload])  # any function of the key alone
slope = (blind @ opposite) / (blind @ blind)
print(f"best multiple of any read-out of the key: {float(slope):.1e}")
assert abs(slope) < 1e-12

# %% [markdown]
# ## What trained heads do with it
#
# The two score matrices and their product, for the head whose pattern is most negative on held-out text.

# %%
specimen = specimens.get(MODEL, rows=4, seq=24)
model, tokenizer = specimen.model, specimen.tokenizer
assert model.config.attention == "bilinear", "choose a model with bilinear attention"
names = [
    f"blocks.{l}.attn.hook_{part}"
    for l in range(model.config.n_layer)
    for part in ("pattern", "attn_scores", "attn_scores2")
]
run = record(model, specimen.tokens[:, :-1], names)
patterns = torch.stack([run[name] for name in names[::3]])  # [layer, batch, head, seq_q, seq_k]
negative = -patterns.clamp(max=0).sum((1, 3, 4)) / patterns.abs().sum((1, 3, 4))
print("share of the weight that is negative, per layer and head:")
print(negative)
rows = patterns.sum(-1)
print(f"sums of rows range from {float(rows.min()):.2f} to {float(rows.max()):.2f}")
assert float(negative.max()) > 0.05, "trained heads use the sign"
assert float((rows - 1).abs().max()) > 0.1, "rows are not normalised"

# %%
index, head = divmod(int(negative.argmax()), model.config.n_head)
chosen = {
    part: run[f"blocks.{index}.attn.hook_{part}"][0, head : head + 1]
    for part in ("attn_scores", "attn_scores2", "pattern")
}
factors = [chosen["attn_scores"].tril(), chosen["attn_scores2"].tril()]
torch.testing.assert_close(factors[0] * factors[1], chosen["pattern"], rtol=1e-4, atol=1e-6)
labels = [f"{i} {tokenizer.decode([t])!r}" for i, t in enumerate(specimen.tokens[0, :-1].tolist())]
plot.attention(chosen["pattern"], factors, labels=labels, heads=[head], title=f"Layer {index}")
