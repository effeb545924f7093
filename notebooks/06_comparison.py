# %% [markdown]
# # How many more batches does the variant need?
#
# The question has several readings, and they differ more than architectures do. We first ask it of an algorithm against
# itself, where the truth is 0 %, with public loss curves; then of the small replication's arms; and then train the
# family of gated MLPs (Shazeer 2020) at a size that takes seconds.
#
# - E1, matched schedule: the length of a complete run of the variant that ends at the base's final loss.
# - E2a, within schedule: the step at which the variant's own curve passes that loss. Biased by the warm-down.
# - E3, stable phase: the same in the constant-rate phase, for every loss level both arms pass there.

# %%
import json
import tempfile
from pathlib import Path

from tnlm import zoo
from tnlm.interp.plot import lines
from tnlm.training import compare_arms, plot, train
from tnlm.training.compare import Options
from tnlm.training.compare_report import to_text
from tnlm.training.metrics import read_metrics
from tnlm.training.runs import load_curves

REPOSITORY = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pyproject.toml").is_file())
RECORDED = REPOSITORY / "tests/training/speedrun_curves.csv"
REPLICATION = REPOSITORY / "benchmarks/results/small_replication"  # or a folder of `tnlm-train compare --out`

# %% [markdown]
# ## An algorithm against itself
#
# 28 public runs of one algorithm: 20 with a schedule of 3,350 steps, 8 with 3,150. Calling the longer schedule "the
# variant" gives E2a a tight interval around a wrong number: inside its warm-down the loss falls much faster than from
# one complete run to the next. E1 refuses to answer from one horizon per arm.

# %%
biased = compare_arms(load_curves(RECORDED, ["short"]), load_curves(RECORDED, ["long"]), Options(draws=2000))
print(to_text(biased))
assert biased.e2a.low > 0.01, "an interval that excludes the true answer, 0"
assert biased.e1.value is None
assert biased.e1.status == "not bracketed"

# %% [markdown]
# With both horizons in both arms (the runs split in two halves) E1 has what it needs, and its interval holds the truth.
# E3 needs to know where the constant-rate phase ends; we take the published fraction, 38 % of warm-down.

# %%
halves = ["long:0-9", "short:0-3"], ["long:10-19", "short:4-7"]
fair = compare_arms(*(load_curves(RECORDED, half) for half in halves), Options(draws=2000, warmdown=0.381))
print(to_text(fair))
assert fair.e1.low < 0 < fair.e1.high
assert fair.e3.low < 0 < fair.e3.high

# %%
plot.comparison(fair)

# %% [markdown]
# ## The small replication
#
# Nano models on the embedded corpus, `{swiglu, bilinear} x {softmax, bilinear}` and bilinear attention with half the
# query-key width, which has the parameters of softmax; several seeds, two horizons each, recorded by
# `scripts/small_replication.py`. What holds at 1.4M parameters and 300 steps says nothing certain about 500M; the
# point is the method, and the size of the intervals.

# %%
readings = {p.parent.name: json.loads(p.read_text()) for p in sorted(REPLICATION.glob("*/compare.json"))}
figure = lines(
    {}, title="Extra batches against swiglu + softmax", x="", y="extra batches (%)", subtitle="95 % intervals"
)
for key, name in (("e1", "E1 matched"), ("e2a", "E2a within, biased"), ("e3", "E3 stable phase")):
    found = {arm: r[key] for arm, r in readings.items() if r[key]["value"] is not None}
    for arm, reading in found.items():
        low, high = reading["low"], reading["high"]
        assert low is None or high is None or low <= reading["value"] <= high
        print(f"{arm:27} {name:20} {100 * reading['value']:+6.1f} %", "" if low is None else f"[{100 * low:+.1f}, ...]")
    ends = [
        [abs(100 * ((r[end] if r[end] is not None else r["value"]) - r["value"])) for r in found.values()]
        for end in ("high", "low")
    ]
    figure.add_scatter(
        x=list(found),
        y=[100 * r["value"] for r in found.values()],
        error_y={"type": "data", "symmetric": False, "array": ends[0], "arrayminus": ends[1]},
        mode="markers",
        name=name,
    )
for arm, reading in readings.items():
    print(f"{arm}: {reading['verdict']}")
print(f"{len(readings)} comparisons recorded in benchmarks/results/small_replication")
figure.update_layout(scattermode="group")

# %% [markdown]
# ## The family of gated MLPs
#
# Shazeer (2020, "GLU Variants Improve Transformer") compared gates at equal parameters: `D (act(Lx) * Rx)` with `act`
# the identity (bilinear), sigmoid (GLU), relu (ReGLU), gelu (GEGLU), silu (SwiGLU), against ungated MLPs with half
# again as many hidden units. One seed each, at a size that takes seconds: enough to see that all of them train, not to
# rank them.

# %%
KINDS = ("bilinear", "glu", "reglu", "geglu", "swiglu", "gelu", "relu2")
small = zoo.training_config("nano", attention="softmax").with_model(n_layer=2, d_model=32, n_head=2)
small = small.replace(steps=min(small.steps, 150), val_every=10, save_every=None, threads=1)
curves, sizes = {}, {}
with tempfile.TemporaryDirectory() as folder:
    for kind in KINDS:
        gated = small.with_model(mlp=kind).model.mlp_gated
        config = small.with_model(mlp=kind, d_hidden=128 if gated else 192).replace(out=f"{folder}/{kind}")
        result = train(config, progress=False)
        events = [e for e in read_metrics(result.folder / "metrics.jsonl") if e["kind"] == "val"]
        curves[kind] = [e["step"] for e in events], [e["loss"] for e in events]
        sizes[kind] = config.model.n_params
for kind, (_, losses) in sorted(curves.items(), key=lambda item: item[1][1][-1]):
    print(f"{kind:9} {sizes[kind]:,} parameters, validation loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert len(set(sizes.values())) == 1, "equal parameters"
assert all(losses[-1] < losses[0] - 0.5 for _, losses in curves.values()), "every kind learns"

# %%
lines(
    curves, title="Gated MLPs at equal parameters", x="step", y="nats per token", subtitle="softmax attention, one seed"
)
