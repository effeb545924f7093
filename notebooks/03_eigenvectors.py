# %% [markdown]
# # What does an MLP read to predict a word?
#
# In the direction of one token's unembedding, a bilinear MLP is a quadratic form `x' Q x`, and a quadratic form has
# eigenvectors: `sum_k lambda_k (v_k . x)**2`. They are read from the weights alone, for every token of the vocabulary.
# We look at some, certify that none was missed, remove the largest, and see whether the logit moves as predicted.

# %%
import torch

from tnlm import interp
from tnlm.app import specimens
from tnlm.interp.views import plot
from tnlm.points import intervene, record

MODEL = "nano"  # or a run folder, or a released model: "bilinear-bilinear-18l"

specimen = specimens.get(MODEL, rows=16)
model, tokenizer, tokens = specimen.model, specimen.tokenizer, specimen.tokens
net = interp.extract(model)
last = net.n_layer - 1
layer = net.mlp[last]

# %% [markdown]
# ## Spectra of the words of the text
#
# The eight most frequent words of three letters or more. Softmax does not see a shift common to all tokens, so the mean
# of the unembedding is subtracted. Behind a norm `|x|**2` is a constant, so the form is taken without its trace. In
# float64, so that the bounds below have little to allow for rounding.

# %%
frequency = tokens.flatten().bincount(minlength=len(net.tokens)).argsort(descending=True).tolist()
texts = {t: tokenizer.decode([t]).strip() for t in frequency}
words = [t for t in frequency if len(texts[t]) >= 3 and texts[t].isalpha()][:8]
wide = interp.extract(model, dtype=torch.float64)
spectra = interp.vocab_eigs(wide, last, k=8, tokens=words, progress=False)
for word, values in zip(words, spectra.values):
    print(f"{tokenizer.decode([word])!r:>12}", " ".join(f"{v:+8.3f}" for v in values.tolist()))
assert (spectra.residuals < 1e-3 * spectra.values.abs().amax(-1, keepdim=True)).all()

# %% [markdown]
# ## Nothing larger was missed
#
# Each result carries `unfound`, a bound on the magnitude of every eigenvalue that is not listed. Independently, trace
# and Frobenius norm of every token's form follow from one Gram matrix, and bound both ends of each spectrum without
# any eigenvalue at all. And an iteration that never forms `Q` agrees with the dense decomposition.

# %%
smallest = spectra.values.abs().amin(-1)
assert (spectra.unfound <= smallest * (1 + 1e-3)).all(), "the listed eigenvalues are the largest ones"
low, high = (ends[words] for ends in interp.vocab_bounds(net, last))
assert (spectra.values.amax(-1) <= high).all()
assert (spectra.values.amin(-1) >= low).all()

directions = net.unembed_centred()
iterated = interp.eig(layer, directions[words], k=4, method="krylov", max_steps=min(192, layer.d_in))
assert (iterated.values - spectra.values[:, :4]).abs().max() < 1e-3 * spectra.values.abs().max()
assert (iterated.unfound >= spectra.values[:, 4].abs() * (1 - 1e-3)).all(), "the fifth stays below the certificate"
print("share of the squared norm in the 8 leading components:")
frobenius = interp.vocab_moments(net, last).frobenius[words]
share = spectra.values.square().sum(-1) / frobenius.square()
print(" ".join(f"{tokenizer.decode([w])!r} {s:.2f}" for w, s in zip(words, share.tolist())))
assert (share <= 1 + 1e-4).all()

# %%
word = words[int(share.argmax())]
u = directions[word]
pairs = interp.eig(layer, u)
plot.spectrum(pairs.values, title=f"All eigenvalues of the form of {tokenizer.decode([word])!r}, last MLP")

# %% [markdown]
# ## Eigenvectors as tokens
#
# For each leading eigenvector, the tokens whose embedding scores highest and lowest. `x` and `-x` are one input to a
# quadratic form, so the two ends may be swapped: read each column as an axis, not as a list of likes.

# %%
seen = tokens.unique()
labels = [tokenizer.decode([t]) for t in seen.tolist()]
plot.eigenvectors(pairs.vectors[:, :4], pairs.values[:4], net.x0[seen], labels, top=6)

# %% [markdown]
# ## Remove the top component
#
# `remove` adds one hidden unit that cancels `lambda_1 (v_1 . x)**2` in this direction and nothing orthogonal to it. The
# prediction for each position is a number from the weights and the input of the layer.

# %%
edited = interp.with_mlp(model, {last: interp.remove(layer, u, pairs.values[:1], pairs.vectors[:, :1])})
points = [f"blocks.{last}.ln2.hook_normalized", f"blocks.{last}.hook_mlp_out", "ln_final.hook_scale"]
inputs = tokens[:8, :-1]
before, after = record(model, inputs, points), record(edited, inputs, points)
x = before[points[0]]
predicted = -pairs.values[0] * (x @ pairs.vectors[:, 0]).square()
measured = (after[points[1]] - before[points[1]]) @ u
largest, error = float(predicted.abs().max()), float((measured - predicted).abs().max())
print(f"largest prediction {largest:.3f}, largest error {error:.1e}")
assert largest > 0
assert error < 1e-3 * largest

# %% [markdown]
# What the logit does: held at the norm of the run, it moves by the prediction over that norm (relative to the mean over
# tokens). With the norm recomputed it moves by another amount, since the edit also changes the length of the residual.

# %%
hold = {"ln_final.hook_scale": lambda scale: before["ln_final.hook_scale"]}
used = torch.tensor(list(net.tokens))


def centred_logit(m, edits):
    with torch.no_grad(), intervene(m, edits):
        z = m.pre_softcap(inputs)
    return z[..., word] - z[..., used].mean(-1)


base = centred_logit(model, {})
expected = predicted / before["ln_final.hook_scale"][..., 0]
held, free = centred_logit(edited, hold) - base, centred_logit(edited, {}) - base
error_held, error_free = (float((change - expected).abs().max()) for change in (held, free))
print(f"error with the norm held {error_held:.1e}, free {error_free:.1e}")
assert error_held < 1e-3 * float(expected.abs().max()) + 1e-4
assert error_held < error_free

# %%
figure = plot.lines(
    {
        "norm held": (expected.flatten().tolist(), held.flatten().tolist()),
        "norm recomputed": (expected.flatten().tolist(), free.flatten().tolist()),
    },
    title=f"Change of the logit of {tokenizer.decode([word])!r} without its top component",
    x="predicted from the weights",
    y="measured",
    subtitle="one point per position of held-out text; exact with the norm held",
)
figure.update_traces(mode="markers", marker={"size": 5, "opacity": 0.5})

# %% [markdown]
# ## Does it matter for prediction?

# %%
cost = interp.delta_ce(model, edited, tokens)
print(
    f"cross-entropy {cost.base:.4f} -> {cost.edited:.4f}: {cost.mean:+.5f} +- {cost.error:.5f} nats, KL {cost.kl:.1e}"
)
assert cost.kl > 0, "the edit changes the predictions"
