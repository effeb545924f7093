# %% [markdown]
# # Why did the model predict this token?
#
# A logit of a tensor transformer is a sum: the direct path from the token's own embedding, what each head moved from
# each earlier token, and one term per eigen-component of each MLP. This notebook loads a model, checks that the
# extracted tensors are the model, writes one logit as that sum, and then takes parts out to see what the sum predicts.

# %%
import torch

from tnlm import interp
from tnlm.app import specimens
from tnlm.interp.views import plot
from tnlm.points import record

MODEL = "nano"  # or a run folder, or a released model: "bilinear-bilinear-18l"

specimen = specimens.get(MODEL)
model, tokenizer = specimen.model, specimen.tokenizer
print(f"{model.config.n_layer} layers, width {model.config.d_model}, {model.config.n_params:,} parameters")

# %% [markdown]
# ## Are the extracted tensors the model?
#
# `extract` reads the weights as tensors; `check` contracts them with the norms of a run and returns the largest
# difference to the model's logits, relative to the largest logit. Nothing below means anything if this is not small.
# (Softmax and SwiGLU have no tensor to check; what follows holds for them too, given the patterns of the run and with
# each MLP as one row.)

# %%
net = interp.extract(model)
if model.config.layers_polynomial:
    error = net.check(specimen.tokens[:2, :-1])
    print(f"largest difference {error:.1e} of the largest logit")
    assert error < 1e-4

# %% [markdown]
# ## One logit as a sum
#
# The prompt is the beginning of a held-out window; we explain what the model prefers as the next token over its second
# choice. The rows sum to the difference of the two logits before the softcap: exact, given the norms of this run.

# %%
prompt = specimen.tokens[0, :24]
with torch.no_grad():
    best, second = model(prompt[None])[0, -1, : model.config.d_vocab_used].topk(2).indices.tolist()
explanation = interp.explain(net, prompt, best, foil=second, tokenizer=tokenizer)
print(tokenizer.decode(prompt), "\n")
print(explanation.table(12))
assert abs(explanation.remainder) < 1e-3
assert explanation.logit > 0, "the first choice has the larger logit"

# %%
explanation.plot(top=15)

# %% [markdown]
# ## A row is a term, not a counterfactual
#
# `ablate` removes a part and returns three numbers. Predicted is minus the row. Held is measured with the norms and the
# later layers as they were: for what a head reads at one position it is the prediction. An eigen-component of an MLP is
# removed from the input that the MLP reads, and the input keeps its length, so the other components grow a little.
# Actual is measured with everything after the part recomputed, and is another number.

# %%
rows = [row for row in explanation.rows if row.kind in ("head", "mlp")][:12]
ablated = [explanation.ablate(row) for row in rows]
heads = [a for row, a in zip(rows, ablated, strict=True) if row.kind == "head"]
gap_held = max((abs(a.held - a.predicted) for a in heads), default=0.0)
gap_actual = max((abs(a.actual - a.predicted) for a in heads), default=0.0)
print(f"heads, largest distance from the prediction: norms held {gap_held:.1e}, everything recomputed {gap_actual:.1e}")
assert gap_held < 1e-2 * (1 + abs(explanation.logit))
assert gap_actual > 10 * gap_held or not heads

# %%
names = [explanation.label(row) for row in rows]
figure = plot.lines(
    {
        "predicted from the row": (range(len(rows)), [a.predicted for a in ablated]),
        "norms and later layers held": (range(len(rows)), [a.held for a in ablated]),
        "everything recomputed": (range(len(rows)), [a.actual for a in ablated]),
    },
    title="Taking one part out",
    x="",
    y="change of the logit difference",
    subtitle="before the softcap",
)
figure.update_traces(mode="markers", marker_size=10)
figure.update_xaxes(tickvals=list(range(len(rows))), ticktext=names, automargin=True)

# %% [markdown]
# ## Where did the heads look?
#
# The pattern of a bilinear head is the product of two score matrices. It is signed and its rows are not normalised:
# a head may subtract what it reads.

# %%
head = max((row for row in explanation.rows if row.kind == "head"), key=lambda row: abs(row.value))
point = f"blocks.{head.layer}.attn."
points = ["hook_attn_scores", "hook_attn_scores2", "hook_pattern"] if model.config.n_qk == 2 else ["hook_pattern"]
run = record(model, prompt[None], [point + name for name in points])
*factors, pattern = (run[point + name][0, head.head : head.head + 1] for name in points)
if model.config.attention == "bilinear":
    torch.testing.assert_close((factors[0] * factors[1]).tril(), pattern)
labels = [f"{i} {tokenizer.decode([t])!r}" for i, t in enumerate(prompt.tolist())]
plot.attention(pattern, [f.tril() for f in factors], labels=labels, heads=[head.head], title=f"Layer {head.layer}")
