# %% [markdown]
# # What can be taken out of a model, and what does it cost?
#
# Two ways to find out which parts matter: change activations while the model runs (hooks, with transformer-lens names
# and tools), and change the weights themselves (smaller tensors in place of an MLP). The cost of either is measured in
# cross-entropy on held-out text.

# %%
from dataclasses import replace

import torch
import transformer_lens.patching as patching

from tnlm import interp, lens
from tnlm.app import specimens
from tnlm.interp.views import plot

MODEL = "nano"  # or a run folder, or a released model: "bilinear-bilinear-18l"

specimen = specimens.get(MODEL, rows=24)
model, tokenizer, tokens = specimen.model, specimen.tokenizer, specimen.tokens
hooked = lens.hook(model, tokenizer=tokenizer)
assert all(p is q for p, q in zip(hooked.parameters(), model.parameters(), strict=True)), "one set of parameters"

# %% [markdown]
# ## Caches and decompositions
#
# Every named point can be read. The parts of the residual stream carry the factors that x0 mixing puts on them, so they
# sum to the stream.

# %%
prompt = tokens[:1, :20]
with torch.no_grad():
    logits, cache = hooked.run_with_cache(prompt)
parts, labels = cache.decompose_resid(return_labels=True)
final = cache["resid_post", model.config.n_layer - 1]
error = float((parts.sum(0) - final).abs().max() / final.abs().max())
print(f"{len(cache)} activations; the parts {labels} sum to the final residual, relative error {error:.1e}")
assert error < 1e-4
with torch.no_grad():
    assert torch.allclose(logits, model(prompt), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## Patching: where does the difference between two prompts live?
#
# The two prompts differ in one token. We run the model on the second and put in the residual stream of the first, one
# layer and position at a time, with transformer-lens's own tool. 0: as the corrupted prompt; 1: as the clean one.

# %%
place = 8
clean = prompt.clone()
corrupted = prompt.clone()
corrupted[0, place] = tokens[1, place] if tokens[1, place] != prompt[0, place] else tokens[2, place]
with torch.no_grad():
    clean_logits, clean_cache = hooked.run_with_cache(clean)
    other_logits = hooked(corrupted)
used = model.config.d_vocab_used
gap = (clean_logits - other_logits)[0, -1, :used]
up, down = int(gap.argmax()), int(gap.argmin())


def difference(z):
    return z[0, -1, up] - z[0, -1, down]


start, end = difference(other_logits), difference(clean_logits)
assert end > start


def recovered(z):
    """0 at the corrupted prompt's difference of logits, 1 at the clean one's."""
    return (difference(z) - start) / (end - start)


with torch.no_grad():
    grid = patching.get_act_patch_resid_pre(hooked, corrupted, clean_cache, recovered)
print(tuple(grid.shape), f"patched before layer 0 at the changed token: {float(grid[0, place]):.3f}")
assert grid[:, :place].abs().max() < 1e-3, "earlier positions are the same in both prompts"
with torch.no_grad():
    restored = hooked.run_with_hooks(corrupted, fwd_hooks=[("hook_embed", lambda value, hook: clean_cache[hook.name])])
assert abs(float(recovered(restored)) - 1) < 1e-3, "the clean embedding restores everything, x0 mixing included"

# %%
texts = [f"{i} {t!r}" for i, t in enumerate(hooked.to_str_tokens(clean[0]))]
figure = plot.similarity(
    grid.clamp(-1, 1),
    rows=[f"before layer {l}" for l in range(model.config.n_layer)],
    columns=texts,
    title="Share of the difference restored by one patch",
)
figure.update_layout(title_subtitle_text="of this run; resid_pre, x0 mixing reads the corrupted embedding again")
figure.update_yaxes(automargin=True)

# %% [markdown]
# ## Ablations: heads that matter
#
# Each head replaced by its mean over held-out text, and each silenced; the price in nats per token with its standard
# error over windows. The prices of single heads need not add up to the price of all.

# %%
calibration, held_out = tokens[:8], tokens[8:]
names, prices = [], {"mean": [], "zero": []}
heads = [(f"blocks.{l}.attn.hook_z", h) for l in range(model.config.n_layer) for h in range(model.config.n_head)]
for point, head in heads:
    names.append(f"L{point.split('.')[1]}.H{head}")
    for how in prices:
        edits = interp.ablation_edits(model, held_out[:, :-1], (point, head), how, reference=calibration[:, :-1])
        prices[how].append(interp.delta_ce(model, edits, held_out))
together = interp.delta_ce(
    model, interp.ablation_edits(model, held_out[:, :-1], heads, "mean", reference=calibration[:, :-1]), held_out
)
alone = sum(cost.mean for cost in prices["mean"])
print(f"all heads at their means: {together.mean:+.4f} +- {together.error:.4f}; sum of single prices {alone:+.4f}")
assert together.kl > max(cost.kl for cost in prices["mean"]), "all of them change the predictions most"
assert all(cost.kl > 0 for cost in prices["zero"]), "every head changes the predictions"

# %%
figure = plot.truncation(
    range(len(names)),
    {how: [cost.mean for cost in costs] for how, costs in prices.items()},
    errors={how: [cost.error for cost in costs] for how, costs in prices.items()},
    title="One head taken out",
)
figure.update_traces(mode="markers").update_xaxes(title="", tickvals=list(range(len(names))), ticktext=names)

# %% [markdown]
# ## Compression: the MLP's tensor at lower rank
#
# HOSVD keeps the leading directions that an MLP writes to and reads from; its error in the norm of the tensor obeys a
# bound read off the spectra. The control projects on random directions of the same number. At full rank nothing is
# lost.

# %%
net = interp.extract(model)
last = net.n_layer - 1
layer = net.mlp[last].canonical()  # a multiple of |x|**2, which a norm makes constant, is in the bias
d = model.config.d_model
generator = torch.Generator().manual_seed(0)
random = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
ranks = [d // 16, d // 8, d // 4, d // 2, d]
costs, distances = {"hosvd": [], "random": []}, {"hosvd": [], "random": []}
for rank in ranks:
    tucker = interp.hosvd(layer, rank, rank)
    basis = random[:, :rank]
    smaller = {
        "hosvd": tucker.reconstruct(),
        "random": replace(layer.fold(basis @ basis.mT).project(basis @ basis.mT), bias=layer.bias, domain=layer.domain),
    }
    for name, tensor in smaller.items():
        distances[name].append(float((tensor - layer).norm() / layer.norm()))
        costs[name].append(interp.delta_ce(model, interp.with_mlp(model, {last: tensor}), held_out))
    assert distances["hosvd"][-1] <= float(tucker.error_bound / layer.norm()) + 1e-3
    print(
        f"rank {rank:4}", {name: f"error {distances[name][-1]:.3f}, {costs[name][-1].mean:+.5f} nats" for name in costs}
    )
assert all(h <= r + 1e-3 for h, r in zip(distances["hosvd"], distances["random"], strict=True))
assert distances["hosvd"][0] > distances["hosvd"][-2] > distances["hosvd"][-1]
assert abs(costs["hosvd"][-1].mean) < 1e-4, "full rank is the same layer"

# %%
plot.truncation(
    ranks,
    {name: [cost.mean for cost in by_rank] for name, by_rank in costs.items()},
    errors={name: [cost.error for cost in by_rank] for name, by_rank in costs.items()},
    title=f"Layer {last}'s MLP at lower rank",
)

# %% [markdown]
# ## Fewer hidden units
#
# CP looks for the nearest layer with fewer hidden units, by alternating solves from several starts: a local minimum,
# whose error is exact. Whether a part of the tensor that is large is also a part that matters is a question to the
# text, so both are printed.

# %%
units = max(4, layer.d_hidden // 16)
fit = interp.cp(layer, units, sweeps=20, restarts=1)
distance = float((fit - layer).norm() / layer.norm())
cost = interp.delta_ce(model, interp.with_mlp(model, {last: fit}), held_out)
removed = interp.delta_ce(
    model, interp.ablation_edits(model, held_out[:, :-1], f"blocks.{last}.hook_mlp_out", "mean"), held_out
)
print(f"{units} of {layer.d_hidden} units: error {distance:.3f}, {cost.mean:+.5f} +- {cost.error:.5f} nats")
print(f"the whole MLP replaced by its mean: {removed.mean:+.5f} +- {removed.error:.5f} nats")
assert 0 < distance < 1, "better than nothing, and not exact"
