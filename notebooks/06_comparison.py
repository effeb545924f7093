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

from tnlm.app import specimens
from tnlm.interp.views.plot import lines
from tnlm.training import compare_arms, train
from tnlm.training.compare import plot
from tnlm.training.compare.arms import Options
from tnlm.training.compare.report import to_text
from tnlm.training.compare.runs import load_curves
from tnlm.training.run.metrics import read_metrics

REPOSITORY = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "pyproject.toml").is_file())
RECORDED = REPOSITORY / "tests/training/compare/speedrun_curves.csv"
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
# E3 needs to know where the constant-rate phase ends: the learning rate of these runs falls over their last 70 %.

# %%
halves = ["long:0-9", "short:0-3"], ["long:10-19", "short:4-7"]
fair = compare_arms(*(load_curves(RECORDED, half) for half in halves), Options(draws=2000, warmdown=0.7))
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
# `scripts/small_replication.py`. What holds at 1.4M parameters and 300 steps says nothing certain about 500M. What does
# carry over is the method: E1 asks for complete runs; E2b reads the base's curve inside its warm-down; E3 says nothing
# about what the warm-down will make of either arm. An arm that keeps up in the stable phase can end behind.

# %%
NAMES = {"e1": "E1 matched", "e2a": "E2a within, biased", "e2b": "E2b mirror, biased", "e3": "E3 stable phase"}
readings = {p.parent.name: json.loads(p.read_text()) for p in sorted(REPLICATION.glob("*/compare.json"))}
print(f"{len(readings)} comparisons in {REPLICATION.relative_to(REPOSITORY).as_posix()}")
figure = lines({}, title="Extra batches against swiglu + softmax", x="", y="extra batches", subtitle="95 % intervals")
for key, name in NAMES.items():
    found = {arm: r[key] for arm, r in readings.items() if r[key]["value"] is not None}
    values = {arm: r["value"] for arm, r in found.items()}
    for arm, r in found.items():
        ends = [f"{100 * r[end]:+.1f}" if r[end] is not None else "censored" for end in ("low", "high")]
        print(f"{arm:27} {name:20} {100 * r['value']:+6.1f} % [{', '.join(ends)}]")
    bars = {
        side: [0 if r[end] is None else abs(r[end] - r["value"]) for r in found.values()]
        for side, end in (("array", "high"), ("arrayminus", "low"))
    }
    error = {"type": "data", "symmetric": False, **bars}
    figure.add_scatter(x=list(values), y=list(values.values()), error_y=error, mode="markers", marker_size=9, name=name)
for arm, r in readings.items():
    print(f"{arm}: {r['verdict']}")
    given = [r[key]["value"] for key in NAMES if r[key]["value"] is not None]
    assert r["e1"]["status"] == "ok"
    assert max(given) > min(given), "the readings of one pair of arms are different numbers"
figure.update_layout(scattermode="group").update_yaxes(tickformat="+.0%")

# %% [markdown]
# ## The family of gated MLPs
#
# Shazeer (2020, "GLU Variants Improve Transformer") compared gates at equal parameters: `D (act(Lx) * Rx)` with `act`
# the identity (bilinear), sigmoid (GLU), relu (ReGLU), gelu (GEGLU), silu (SwiGLU), against ungated MLPs with half
# again as many hidden units. One seed each, at a size that takes seconds: enough to see that all of them train, not to
# rank them.

# %%
KINDS = ("bilinear", "glu", "reglu", "geglu", "swiglu", "gelu", "relu2")
small = specimens.training_config("nano", attention="softmax").with_model(n_layer=2, d_model=32, n_head=2)
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
steps, reference = curves["bilinear"]
lines(
    {kind: (steps, [y - r for y, r in zip(curves[kind][1], reference, strict=True)]) for kind in KINDS},
    title="Validation loss minus that of the bilinear MLP",
    x="step",
    y="nats per token",
    subtitle="equal parameters, softmax attention, one seed",
)
