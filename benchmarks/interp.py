"""Cost of the vocabulary-scale analyses at the released 546M shape, against the naive route on the same weights.

    OMP_NUM_THREADS=1 python benchmarks/interp.py [--full] [--only NAME ...] [--trained FOLDER ...]

Weights are random (or random with planted strong units), drawn from a fixed seed. Only the convergence of eigenpairs
depends on the weights, so their rows describe the spectrum that they hold for; one of them is of a nano model that is
trained here first (a minute), with one more for every folder given. Every case runs in its own process, so that its
peak memory is its own. Times are process times of one thread, in seconds, median of the repeats. A naive route that
would take too long runs on a subset, is scaled to the whole, and says so. Results are appended as JSON lines to
benchmarks/results/.
"""

import argparse
import json
import math
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import processes
import record
import torch

import tnlm
from tnlm import interp
from tnlm.interp.layers.bilinear import BilinearTensor
from tnlm.interp.layers.spectra import DENSE_WIDTH, iteration_pays, krylov, squared_norms
from tnlm.interp.layers.statistics import trace_bounds

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "layers/test_bilinear",
    "layers/test_spectra",
    "layers/test_similarities",
    "discovery/test_model_comparison",
    "tokens/test_token_spectra",
    "test_extraction",
]

D_MODEL, D_HIDDEN, D_VOCAB, N_LAYER, N_HEAD = 1152, 4608, 50304, 18, 9
DIRECTIONS, PAIRS, NAIVE_DIRECTIONS = 256, 4, 8
# A unit of strength s and output weight w adds the eigenvalues +-s |w| / 2 to a form whose random bulk ends at 2.8 |w|.
STRONG_UNITS = 64
GRADED = torch.logspace(math.log10(40), math.log10(10), STRONG_UNITS)
EQUAL = torch.full((STRONG_UNITS,), 20.0)


def make_layer(seed: int, strengths: torch.Tensor | None = None) -> BilinearTensor:
    """A layer of the released shape in float32; the first hidden units write ``strengths`` times as much."""
    g = torch.Generator().manual_seed(seed)
    w_l, w_r = (torch.randn(D_HIDDEN, D_MODEL, generator=g) / D_MODEL**0.5 for _ in range(2))
    w_d = torch.randn(D_MODEL, D_HIDDEN, generator=g) / D_HIDDEN**0.5
    if strengths is not None:
        w_d[:, : len(strengths)] *= strengths
    return BilinearTensor(w_l, w_r, w_d)


def make_unembed(rows: int = D_VOCAB) -> torch.Tensor:
    return torch.randn(rows, D_MODEL, generator=torch.Generator().manual_seed(99)) / D_MODEL**0.5


def timed(call: Callable, repeats: int = 1) -> tuple[object, dict]:
    """Result of ``call`` and its process time: median, and spread over the repeats."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        seconds.append(time.process_time() - start)
    return result, {
        "cpu_seconds": round(statistics.median(seconds), 3),
        "spread": round(max(seconds) - min(seconds), 3),
        "repeats": repeats,
    }


def case_moments(full: bool) -> dict:
    """Mean, Frobenius norm and bounds of all tokens' forms in one layer, after its Gram."""
    net = SimpleNamespace(mlp=[make_layer(0)], unembed=make_unembed(), tokens=range(50257))
    directions = net.unembed[:NAIVE_DIRECTIONS] - net.unembed[: len(net.tokens)].mean(0)
    gram, gram_time = timed(lambda: net.mlp[0].gram("out"))
    moments, own = timed(lambda: interp.vocab_moments(net, 0, gram=gram), repeats=3 if full else 2)
    forms, naive = timed(lambda: net.mlp[0].interaction(directions))
    traces = forms.diagonal(dim1=1, dim2=2).sum(-1)
    norms = forms.flatten(1).double().norm(dim=1)
    ends = torch.linalg.eigvalsh(forms[:2])
    brackets = trace_bounds(*(t[:2] for t in moments), D_MODEL)
    assert bool((brackets.min_low <= ends[:, 0]).all())
    assert bool((brackets.max_high >= ends[:, -1]).all())
    naive_seconds = naive["cpu_seconds"] * D_VOCAB / NAIVE_DIRECTIONS
    return own | {
        "tokens": D_VOCAB,
        "gram_cpu_seconds": gram_time["cpu_seconds"],
        "relative_error": float(((moments.frobenius[:NAIVE_DIRECTIONS] - norms) / norms).abs().max()),
        "trace_error_over_norm": float(((moments.mean[:NAIVE_DIRECTIONS] - traces) / norms).abs().max()),
        "naive": f"build every form: {NAIVE_DIRECTIONS} directions, scaled to {D_VOCAB}",
        "naive_cpu_seconds": round(naive_seconds, 1),
        "ratio": round(naive_seconds / own["cpu_seconds"], 1),
        "ratio_with_gram": round(naive_seconds / (own["cpu_seconds"] + gram_time["cpu_seconds"]), 1),
        "target": "cpu_seconds <= 10",
        "met": own["cpu_seconds"] <= 10,
    }


def _eigs(b: BilinearTensor, rows: torch.Tensor, spectrum: str, wanted: float | None, repeats: int) -> dict:
    """Top pairs of a batch of vocabulary directions by the iteration, against build-and-eigh of some of them."""
    norms, norms_time = timed(lambda: squared_norms(b, rows), repeats)
    pairs, own = timed(lambda: krylov(b, rows, norms, PAIRS, tol=1e-5), repeats)
    _, gram_time = timed(lambda: b.gram("out"), repeats)
    top = pairs.values[:, :1].abs()
    residuals = pairs.residuals / top
    some = rows if b.d_in <= DENSE_WIDTH else rows[:NAIVE_DIRECTIONS]
    n = len(some)
    forms = b.canonical()
    exact, naive = timed(
        lambda: torch.stack([torch.linalg.eigh(forms.interaction(u)).eigenvalues for u in some]), repeats
    )
    exact = exact.gather(1, exact.abs().argsort(1, descending=True))
    last = pairs.values[:, -1].abs()
    naive_seconds = naive["cpu_seconds"] * len(rows) / n
    ratio = naive_seconds / own["cpu_seconds"]
    worst = float(residuals.max())
    vocabulary = own["cpu_seconds"] * D_VOCAB / len(rows) + gram_time["cpu_seconds"]
    return own | {
        "spectrum": spectrum,
        "fourth_over_first": _median(exact[:, PAIRS - 1] / exact[:, 0]),
        "fifth_over_fourth": _median(exact[:, PAIRS] / exact[:, PAIRS - 1]),
        "participation_rank": _median(exact.abs().sum(1).square() / exact.square().sum(1)),
        "directions": len(rows),
        "pairs": PAIRS,
        "norms_cpu_seconds": norms_time["cpu_seconds"],
        "gram_cpu_seconds": gram_time["cpu_seconds"],
        "residual_over_top": worst,
        "eigenvalue_error_over_top": float(((pairs.values[:n] - exact[:, :PAIRS]).abs() / top[:n]).max()),
        "certified_complete": float((pairs.unfound < last).float().mean()),
        "unfound_over_fourth": _median(pairs.unfound / last),
        "naive": f"form each, then eigh: {n} directions" + ("" if n == len(rows) else f", scaled to {len(rows)}"),
        "naive_cpu_seconds": round(naive_seconds, 3),
        "ratio": round(ratio, 2),
        "ratio_with_norms": round(naive_seconds / (own["cpu_seconds"] + norms_time["cpu_seconds"]), 2),
        "ratio_with_gram": round(naive_seconds / (own["cpu_seconds"] + gram_time["cpu_seconds"]), 2),
        "ratio_note": "the bound on what is not listed needs the norms of the forms: ratio leaves them out, "
        f"ratio_with_norms has those of these {len(rows)}, ratio_with_gram the Gram that serves a whole vocabulary",
        "vocabulary_cpu_seconds": round(vocabulary),
        "vocabulary_note": f"{D_VOCAB} directions, extrapolated from {len(rows)} with this spectrum ({spectrum})",
        "target": "none" if wanted is None else f"residual_over_top <= 1e-5 and ratio >= {wanted:g}",
        "met": wanted is None or (worst <= 1e-5 and ratio >= wanted),
    }


def _median(x: torch.Tensor) -> float:
    return round(float(x.abs().median()), 4)


def case_eigs_planted(full: bool) -> dict:
    """Top eigenpairs on random weights with planted strong hidden units."""
    label = f"{STRONG_UNITS} planted units of strength 40 down to 10, evenly in the logarithm, seed 0"
    return _eigs(make_layer(0, GRADED), make_unembed(DIRECTIONS), label, wanted=15, repeats=3 if full else 1)


def case_eigs_equal(full: bool) -> dict:
    """The same with equal strengths: the leading eigenvalues lie closer together. No target."""
    label = f"{STRONG_UNITS} planted units of strength 20 each, seed 0"
    return _eigs(make_layer(0, EQUAL), make_unembed(DIRECTIONS), label, wanted=None, repeats=3 if full else 1)


def case_eigs_random(full: bool) -> dict:
    """Top eigenpairs on purely random weights."""
    label = "purely random, seed 0"
    return _eigs(make_layer(0), make_unembed(DIRECTIONS), label, wanted=5, repeats=3 if full else 1)


def case_eigs_trained(full: bool, folder: str) -> dict:
    """Top eigenpairs in the last layer of a trained model, for tokens spread over its vocabulary. No target.

    The iteration is timed at any width; below the width where it pays `vocab_eigs` is dense, timed beside it.
    """
    model = tnlm.load(folder)
    net, layer, config = interp.extract(model), model.config.n_layer - 1, model.config
    ids = torch.linspace(0, len(net.tokens) - 1, min(DIRECTIONS, len(net.tokens))).long()
    label = f"trained: {Path(folder).name}, layer {layer} of {config.n_layer}"
    repeats = 5 if full else 3
    found = _eigs(net.mlp[layer], net.unembed_centred()[ids], label, wanted=None, repeats=repeats)
    _, whole = timed(lambda: interp.vocab_eigs(net, layer, PAIRS, ids, progress=False), repeats)
    pays = iteration_pays(config.d_model, len(ids), PAIRS)
    shape = {
        "d_model": config.d_model,
        "d_hidden": config.d_hidden,
        "d_vocab": config.d_vocab,
        "n_layer": config.n_layer,
    }
    return found | {
        "shape": shape,
        "vocabulary_cpu_seconds": round(whole["cpu_seconds"] * len(net.tokens) / len(ids), 3),
        "vocabulary_note": f"{len(net.tokens)} directions, extrapolated from the {len(ids)} of vocab_eigs",
        "vocab_eigs_method": "iteration, norms included" if pays else "dense",
        "vocab_eigs_cpu_seconds": whole["cpu_seconds"],
        "vocab_eigs_ratio": round(found["naive_cpu_seconds"] / whole["cpu_seconds"], 2),
    }


def train_nano(run: Path) -> None:
    """Train the preset nano: 250 steps on the embedded corpus, seed 0, about a minute on one core."""
    from tnlm.training import preset, train

    train(preset("nano").replace(seed=0, threads=1, sample_tokens=0, save_every=None, out=str(run)), progress=False)


def trained_nano(folder: Path) -> Path:
    """The folder of a nano model, trained in another process: children start from the peak memory of this one."""
    run = folder / "nano-250-steps-seed-0"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(train_nano, run).result()
    return run


def case_crossover(full: bool) -> dict:
    """Dense eigendecompositions against the iteration with its norms, for few and many directions and pairs."""
    ratios = {}
    for d in (512, 768, D_MODEL) if full else (512,):
        g = torch.Generator().manual_seed(0)
        w_l, w_r, w_d = (torch.randn(*s, generator=g) for s in ((4 * d, d), (4 * d, d), (d, 4 * d)))
        planted = torch.ones(4 * d)
        planted[:STRONG_UNITS] = GRADED
        for spectrum, w in (("random", w_d), ("planted", w_d * planted)):
            b = BilinearTensor(w_l / d**0.5, w_r / d**0.5, w / (4 * d) ** 0.5)
            u = torch.randn(32, d, generator=g) / d**0.5
            _, one = timed(lambda b=b, u=u: interp.eig(b, u[:4], 1, method="full"))
            for n, k in ((4, 4), (8, 8), (16, 8), (32, 4), (32, 8), (32, 32)):
                _, own = timed(lambda b=b, u=u, n=n, k=k: interp.eig(b, u[:n], k, method="krylov"))
                ratio = one["cpu_seconds"] * n / 4 / own["cpu_seconds"]
                ratios[f"{spectrum}, width {d}, {n} directions, {k} pairs"] = round(ratio, 2)
    return {"dense_over_iteration": ratios, "target": "none", "met": True}


def case_similarity(full: bool) -> dict:
    """Layerwise ``sym`` similarity of two stacks: all layers with --full, else one pair times their number."""
    layers = N_LAYER if full else 1
    seconds, values = 0.0, []
    for layer in range(layers):
        a, b = make_layer(layer), make_layer(layer, GRADED)
        found, own = timed(lambda a=a, b=b: interp.similarity(a, b))
        seconds += own["cpu_seconds"]
        values.append(float(found.value))
    total = seconds * N_LAYER / layers
    outputs = torch.eye(D_MODEL)[:NAIVE_DIRECTIONS]
    (x, y), naive = timed(lambda: (a.interaction(outputs), b.interaction(outputs)))
    x, y = x.double(), y.double()  # float32 sums of 10 million squares are off by 4e-5
    same = (x * y).sum() / x.norm() / y.norm()
    factored = interp.similarity(a.project(outputs), b.project(outputs)).value
    naive_seconds = naive["cpu_seconds"] * D_MODEL / NAIVE_DIRECTIONS * N_LAYER
    return {
        "cpu_seconds": round(total, 1),
        "repeats": 1,
        "layers_measured": layers,
        "layers": N_LAYER,
        "note": "all layers measured" if full else f"one pair measured, times {N_LAYER}",
        "mean_value": statistics.mean(values),
        "error_on_subset": abs(float(same) - float(factored)),
        "naive": f"dense tensors: {NAIVE_DIRECTIONS} of {D_MODEL} outputs of one pair, scaled to {N_LAYER} pairs",
        "naive_cpu_seconds": round(naive_seconds, 1),
        "ratio": round(naive_seconds / total, 1),
        "target": "cpu_seconds <= 300",
        "met": total <= 300,
    }


def case_extraction(full: bool) -> dict:
    """Memory that the extracted view of a whole model adds to the model."""
    del full
    from tnlm import ModelConfig, Transformer

    sizes = {"n_layer": N_LAYER, "n_head": N_HEAD, "d_model": D_MODEL}
    model = Transformer(ModelConfig.released(**sizes, mlp="bilinear", attention="bilinear"))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    before = peak_bytes()

    def everything() -> int:
        net = interp.extract(model)
        heads = [net.attention[l].head(n) for l in range(N_LAYER) for n in range(N_HEAD)]
        return len(heads) + len(net.mlp) + len(net.unembed) + len(net.embed)

    _, own = timed(everything)
    added = peak_bytes() - before
    return own | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": model_bytes,
        "added_bytes": added,
        "added_over_model": round(added / model_bytes, 4),
        "target": "added_over_model <= 0.2",
        "met": added <= 0.2 * model_bytes,
    }


CASES: dict[str, Callable[..., dict]] = {
    "crossover": case_crossover,
    "eigs_equal": case_eigs_equal,
    "eigs_planted": case_eigs_planted,
    "eigs_random": case_eigs_random,
    "eigs_trained": case_eigs_trained,
    "extraction": case_extraction,
    "moments": case_moments,
    "similarity": case_similarity,
}


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_case(name: str, full: bool, trained: list[str]) -> dict:
    """The row of one case, measured in this process."""
    torch.set_num_threads(1)
    before = peak_bytes()
    with torch.no_grad():
        result = CASES[name](full, *trained)
    return {"case": name, **result, "peak_bytes": peak_bytes(), "peak_bytes_before": before}


def measured(task: list[str], *, full: bool) -> str:
    """The row of one case, as JSON, measured in a process of its own."""
    return processes.run_again(__file__, *(["--full"] if full else []), "--inside", *task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="measure every layer and more repeats (several minutes)")
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument(
        "--trained",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="folders of trained models with bilinear or squared MLPs, one more row of eigs_trained each",
    )
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(run_case(args.inside, args.full, args.trained)))
        return 0

    torch.set_num_threads(1)
    tests = [str(ROOT / f"tests/interp/{name}.py") for name in TESTS]
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode:
        print("the tests of what is measured fail: no figures", file=sys.stderr)
        return 1
    facts = {
        **record.about("interp"),
        "shape": {"d_model": D_MODEL, "d_hidden": D_HIDDEN, "d_vocab": D_VOCAB, "n_layer": N_LAYER},
        "dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as scratch:
        tasks: list[list[str]] = []
        for name in args.only:
            models = [trained_nano(Path(scratch)), *args.trained] if name == "eigs_trained" else []
            tasks += [[name, "--trained", str(model)] for model in models] or [[name]]
        rows = (json.loads(measured(task, full=args.full)) for task in tasks)
        return 0 if all(row["met"] for row in record.write(facts, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
