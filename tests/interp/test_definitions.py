"""Numbers of the public functions against dense float64 definitions, from the parameters of a model with norms alone.

Nothing here calls what it judges: forms are arrays ``(d, d, d)``, spectra are those of ``eigvalsh``, and the run is
spelled out in :func:`forward`. Functions whose definition is tried by another file are named in ``ELSEWHERE``.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.limits import assert_close
from tests.tiny_models import build, ids, tiny
from tnlm import interp

FOLDER = Path(__file__).parent
ELSEWHERE = {
    "ablate": "predictions/test_ablation.py::test_one_head_is_replaced_and_the_others_kept",
    "BilinearHead.fix_gauge": "layers/test_heads.py::test_gauge_changes_no_quantity_and_fix_gauge_no_function",
    "BilinearHead.ov": "layers/test_heads.py::test_one_head_over_causal_positions_with_both_value_circuits",
    "BilinearHead.pattern_tensor": "layers/test_heads.py::"
    "test_pattern_tensor_is_the_pattern_and_depends_on_distance_alone",
    "BilinearTensor.apply": "layers/test_bilinear.py::test_interaction_and_apply_agree_with_the_dense_tensor",
    "BilinearTensor.augment": "layers/test_bilinear.py::test_fold_project_and_augment",
    "BilinearTensor.fold": "layers/test_bilinear.py::test_fold_project_and_augment",
    "BilinearTensor.project": "layers/test_bilinear.py::test_fold_project_and_augment",
    "BilinearTensor.symmetrize": "layers/test_bilinear.py::"
    "test_symmetrize_is_the_same_function_with_coefficient_a_quarter",
    "BilinearTensor.tensor": "layers/test_bilinear.py::test_tensor_reproduces_the_layer_and_is_symmetric",
    "Extracted.check": "test_extraction.py::test_check_in_float32_and_of_a_wrong_weight",
    "Extracted.inverse_norms": "test_extraction.py::test_inverse_norms_have_one_convention",
    "Extracted.parallel_tokens": "test_extraction.py::test_rows_that_point_the_same_way_are_one_group",
    "ablation_edits": "predictions/test_ablation.py::test_mean_and_resample_take_values_of_the_reference",
    "compose": "layers/test_composition.py::test_composed_network_is_the_composition",
    "copy_table": "tokens/test_copying.py::test_copy_table_is_what_the_head_adds_to_the_logits",
    "cp": "layers/test_decompositions.py::test_cp_error_is_the_explicit_error_and_does_not_rise",
    "cycle_votes": "tokens/test_copying.py::test_votes_are_the_logits_of_a_model_with_interchangeable_tokens",
    "degrees": "predictions/test_polynomials.py::test_degrees_of_two_residual_layers",
    "delta_ce": "predictions/test_ablation.py::test_delta_ce_is_the_paired_difference_of_cross_entropies",
    "edges": "discovery/test_edge_table.py::test_every_side_against_loops_over_pairs_of_tokens",
    "equal_part": "tokens/test_copying.py::test_equal_part_draws_as_many_others_in_every_row",
    "Explanation.ablate": "predictions/test_explanation.py::test_actual_change_recomputes_everything_after_the_write",
    "extract": "test_extraction.py::test_a_whole_model_as_one_dense_tensor",
    "fix_gauge": "layers/test_decompositions.py::"
    "test_fix_gauge_is_the_same_function_and_the_same_numbers_for_every_gauge",
    "follower_entries": "tokens/test_copying.py::test_follower_entries_are_the_keys_after_an_equal_token",
    "match": "tokens/test_copying.py::test_match_is_the_mean_and_deviation_over_all_permutations",
    "match_heads": "discovery/test_model_comparison.py::test_every_layer_against_dense_tensors_over_tokens",
    "path_table": "tokens/test_tables.py::test_path_tables_are_dense_products_without_padding",
    "polynomial_coefficients": "predictions/test_polynomials.py::test_coefficients_are_paths",
    "report": "views/test_reporting.py::test_report_is_one_offline_file",
    "similarity": "discovery/test_model_comparison.py::test_every_layer_against_dense_tensors_over_tokens",
    "top_examples": "tokens/test_examples.py::test_top_examples_are_the_extremes_of_the_layer",
    "top_tokens": "tokens/test_tables.py::test_ranking_is_that_of_the_sorted_matrix",
    "trace_bounds": "layers/test_statistics.py::test_brackets_from_trace_and_norm_contain_the_ends",
    "with_mlp": "predictions/test_ablation.py::"
    "test_replacing_an_mlp_by_its_own_tensor_changes_nothing_and_shares_the_rest",
}
"""Public functions whose definition is tried there."""
RESULTS = {
    *("BilinearHead", "BilinearTensor", "Bounds", "DeltaCE", "Eig", "Explanation", "Extracted", "Inertia", "LowRank"),
    *("Match", "Moments", "Similarity", "Tucker"),
}
"""Classes: containers of weights, whose methods are listed one by one, and results."""

SAME = {"BilinearTensor.to", "Extracted.cast", "Extracted.read_prompt", "Extracted.read_token"}
"""Methods that return what they were given in another form."""

ROUNDINGS = 2**16
"""Sums over 30 and 900 terms within sums, several deep, on both sides."""
LAYER, TARGET = 1, 3
TOKENS = ids(6, seed=4)


@cache
def model():
    return build(tiny(n_layer=2, d_hidden=37))  # fewer than 15 units leave an eigenvalue of many vectors


@cache
def net():
    return interp.extract(model())


def part(layer: int, name: str) -> Tensor:
    return dict(model().named_parameters())[f"blocks.{layer}.{name}"].detach()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + model().config.norm_eps).sqrt()


@cache
def stored(layer: int = LAYER) -> Tensor:
    """The symmetric tensor of an MLP, its factors multiplied out."""
    t = torch.einsum("oh,hi,hj->oij", *(part(layer, f"mlp.{name}") for name in ("w_d", "w_l", "w_r")))
    return (t + t.mT) / 2


@cache
def traceless(layer: int = LAYER) -> Tensor:
    s = stored(layer)
    traces = torch.stack([m.trace() for m in s])
    return s - traces[:, None, None] / 30 * torch.eye(30, dtype=torch.float64)


def written(s: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("oij,ni,nj->no", s, x, x)


def constant() -> Tensor:
    """What the layer adds on the sphere beside its traceless form."""
    return part(LAYER, "mlp.bias") + torch.stack([m.trace() for m in stored()])


def direction() -> Tensor:
    """One row of the unembedding."""
    return model().unembed.w_u.detach()[TARGET]


def centred() -> Tensor:
    rows = model().unembed.w_u.detach()[:11]
    return rows - rows.mean(0)


def spectrum() -> Tensor:
    return torch.linalg.eigvalsh(torch.einsum("o,oij->ij", direction(), traceless()))


def by_magnitude(values: Tensor) -> Tensor:
    return values[values.abs().argsort(descending=True)]


def components() -> tuple[Tensor, Tensor]:
    """Values and vectors of the direction's form, largest magnitude first."""
    values, vectors = torch.linalg.eigh(torch.einsum("o,oij->ij", direction(), traceless()))
    order = values.abs().argsort(descending=True)
    return values[order], vectors[:, order]


def fourth() -> Tensor:
    """``E x_i x_j x_k x_l`` over the sphere ``|x|**2 = 30``."""
    eye = torch.eye(30, dtype=torch.float64)
    pairs = ("ij,kl->ijkl", "ik,jl->ijkl", "il,jk->ijkl")
    return sum(torch.einsum(p, eye, eye) for p in pairs) * 30 / 32


@cache
def points() -> Tensor:
    x = torch.randn(7, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x * (30**0.5 / x.norm(dim=1, keepdim=True))


@cache
def parts() -> Tensor:
    return torch.randn(4, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def turned(x: Tensor, position: float) -> Tensor:
    """Rotary positions without the rounding of a table: rows ``(..., 4)`` turned by ``position``."""
    frequencies = 1.0 / model().config.rotary_base ** torch.tensor([0.0, 0.5])  # float32, as published
    angle = position * frequencies.double()
    a, b = x[..., :2], x[..., 2:]
    return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], -1)


def patterns(head: int, x: Tensor, distance: int) -> Tensor:
    """Pattern of every input as a query on every input as a key, with QK-norm."""
    product = torch.ones(len(x), len(x), dtype=torch.float64)
    for branch in "12":
        q, k = (rms(x @ part(LAYER, f"attn.w_{side}{branch}")[4 * head : 4 * head + 4].T) for side in "qk")
        product = product * (turned(q, distance) @ k.T) / 4
    return product


def score_matrices(head: int, distance: int) -> list[Tensor]:
    """Of both branches, ``W`` in ``score = x_query^T W x_key`` from the maps alone, without QK-norm."""
    found = []
    for branch in "12":
        q, k = (part(LAYER, f"attn.w_{side}{branch}")[4 * head : 4 * head + 4] for side in "qk")
        found.append(turned(q.T, distance) @ k / 4)
    return found


def without_norm(head: int, distance: int) -> Tensor:
    """The pattern tensor of the head's maps alone, symmetric in both queries and in both keys."""
    a = torch.einsum("ik,jl->ijkl", *score_matrices(head, distance))
    a = (a + a.transpose(0, 1)) / 2
    return (a + a.transpose(2, 3)) / 2


@cache
def forward() -> dict[str, Any]:
    """The run on ``TOKENS``: what enters the last position's logit, as it is written there."""
    m = model()
    assert m.config.rotary_table_dtype == "bfloat16"
    x0 = rms(m.embed.w_e.detach()[TOKENS])
    x, first, run = x0, None, {"x0": x0[-1], "heads": [], "read": [], "inverse": [], "mlp": []}
    for layer in range(2):
        a, b = part(layer, "lambdas")
        x = a * x + b * x0
        n = rms(x)
        v = (n @ part(layer, "attn.w_v").T).view(6, 3, 10)
        first = v if first is None else first
        lamb = part(layer, "attn.lamb")
        v = (1 - lamb) * v + lamb * first
        pattern = torch.ones(3, 6, 6, dtype=torch.float64)
        for branch in "12":
            q, k = (rms((n @ part(layer, f"attn.w_{s}{branch}").T).view(6, 3, 4)) for s in "qk")
            tables = _tables()
            q, k = (_by_table(y, tables) for y in (q, k))
            pattern = pattern * torch.einsum("snf,unf->nsu", q, k) / 4
        pattern = pattern.tril()
        w_o = part(layer, "attn.w_o").view(30, 3, 10)
        heads = torch.einsum("nsu,und,ond->snuo", pattern, v, w_o)  # position, head, source
        x = x + heads.sum((1, 2))
        run["heads"].append(heads[-1])
        n = rms(x)
        run["read"].append(n[-1])
        run["inverse"].append(float((n[-1] / x[-1])[0]))
        run["before"] = x[-1]
        run["mlp"].append((written(stored(layer), n) + part(layer, "mlp.bias"))[-1])
        x = x + written(stored(layer), n) + part(layer, "mlp.bias")
    a, b = part(1, "lambdas")
    run["passed"] = [float(a), 1.0]  # of what block 0 and block 1 write
    run["embedding"] = float(part(0, "lambdas").sum() * a + b)
    run["final"] = float((rms(x[-1]) / x[-1])[0])
    run["logit"] = float(rms(x[-1]) @ direction())
    return run


def _tables() -> tuple[Tensor, Tensor]:
    angles = torch.tensor([[s * model().config.rotary_base ** (-f / 2) for f in range(2)] for s in range(6)])
    return angles.cos().bfloat16().double(), angles.sin().bfloat16().double()


def _by_table(y: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (t[:, None] for t in tables)
    a, b = y[..., :2], y[..., 2:]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def explained() -> dict[str, float]:
    """Every row of the explanation of the last position's logit, by its kind, layer, head, source or component."""
    run, found = forward(), {}
    read = direction() * run["final"]
    found["direct None None None"] = run["embedding"] * read @ run["x0"]
    for layer in range(2):
        along = read * run["passed"][layer]
        for head, source in itertools.product(range(3), range(6)):
            found[f"head {layer} {head} {source}"] = run["heads"][layer][head, source] @ along
        values, vectors = torch.linalg.eigh(torch.einsum("o,oij->ij", along, traceless(layer)))
        n = run["read"][layer]
        for k, i in enumerate(values.abs().argsort(descending=True)):
            found[f"mlp {layer} None {k}"] = values[i] * (vectors[:, i] @ n) ** 2
        shift = torch.stack([m.trace() for m in stored(layer)]) / 30
        found[f"mlp_constant {layer} None None"] = along @ (shift * (n @ n) + part(layer, "mlp.bias"))
    return {name: float(value) for name, value in found.items()}


def rows() -> dict[str, float]:
    found = interp.explain(model(), TOKENS, TARGET, components=None).rows
    which = lambda r: r.source if r.kind == "head" else r.component  # noqa: E731
    return {f"{r.kind} {r.layer} {r.head} {which(r)}": r.value for r in found if r.kind != "mlp_rest"}


def pairs() -> Tensor:
    """The matrix of a logit's terms: the constant, the embedding, then of each layer its heads and its MLP."""
    run, read = forward(), direction() * forward()["final"]
    terms = torch.zeros(10, 10, dtype=torch.float64)
    stream = torch.zeros(10, 30, dtype=torch.float64)  # each component as it stands in the residual stream
    for layer in range(2):
        a, b = part(layer, "lambdas")
        stream = a * (stream if layer else _only(run["x0"])) + b * _only(run["x0"])
        stream[2 + 4 * layer : 5 + 4 * layer] = run["heads"][layer].sum(1)
        x, along = stream * run["inverse"][layer], read * run["passed"][layer]
        terms += torch.einsum("o,oij,pi,qj->pq", along, traceless(layer), x, x)
        shift = torch.stack([m.trace() for m in stored(layer)]) / 30
        n = run["read"][layer]
        terms[0, 0] += along @ (shift * (n @ n) + part(layer, "mlp.bias"))
        stream[5 + 4 * layer] = run["mlp"][layer]
    direct = stream @ read
    direct[[5, 9]] = 0  # both are expanded
    terms[0] += direct / 2
    terms[:, 0] += direct / 2
    return terms


def _only(x0: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, 30), x0[None], torch.zeros(8, 30)]).double()


def shapley() -> Tensor:
    """Average over all orders in which the nine components join the constant, each pair by the one that comes last."""
    terms, shares = pairs(), torch.zeros(10, dtype=torch.float64)
    shares[0] = terms[0, 0]
    for n in range(1, 10):
        others = [m for m in range(1, 10) if m != n]
        shares[n] = terms[n, n] + 2 * terms[0, n] + sum(2 * terms[n, m] * 0.5 for m in others)
    return shares


def branch() -> Tensor:
    """The logit by how often the last MLP's input holds what its attention wrote: reads of degree 0, 1 and 2."""
    run, read = forward(), direction() * forward()["final"]
    wrote = run["heads"][1].sum((0, 1))
    a, b = wrote * run["inverse"][1], run["read"][1] - wrote * run["inverse"][1]
    s = torch.einsum("o,oij->ij", read, stored(1))
    rest = run["before"] - wrote
    return torch.stack([read @ (rest + part(1, "mlp.bias")) + b @ s @ b, read @ wrote + 2 * a @ s @ b, a @ s @ a])


def hosvd() -> Tensor:
    """Projections of the traceless tensor on the leading singular vectors of its unfoldings."""
    s = traceless()
    out = torch.linalg.svd(s.reshape(30, -1))[0][:, :4]
    inp = torch.linalg.svd(s.transpose(0, 1).reshape(30, -1))[0][:, :5]
    return torch.einsum("oij,po,qi,rj->pqr", s, out @ out.T, inp @ inp.T, inp @ inp.T)


def removed(values: Tensor, vectors: Tensor) -> Tensor:
    """The layer on points of the sphere, lowered along the direction by the given components."""
    u, x = direction(), points()
    f = written(traceless(), x) + constant()
    return f - ((x @ vectors).square() @ values)[:, None] * u / (u @ u)


def ranks(values: Tensor) -> list[Tensor]:
    """Participation, entropy, maximum and stable rank of a spectrum."""
    a, p = values.abs(), values.square() / values.square().sum()
    return [a.sum() ** 2 / values.square().sum(), (-(p * p.log()).sum()).exp(), a.sum() / a.max(), 1 / p.max()]


def products() -> int:
    """Products that sum to the direction's form on the sphere: the best shift is an eigenvalue."""
    values = spectrum()
    return min(max(int((values > c + 1e-9).sum()), int((values < c - 1e-9).sum())) for c in values)


def covariance() -> Tensor:
    s, d = traceless(), fourth()
    return torch.einsum("oij,ijkl,pkl->op", s, d, s)


def mean_of_rotations() -> Tensor:
    """Mean and variance of the inner product under random rotations, from the traceless tensors: the mean is 0."""
    a, b = (torch.einsum("oij,pij->op", s, s) for s in (traceless(0), traceless(1)))
    variance = 2 * (a * b).sum() / (29 * 32)
    return torch.stack([torch.zeros_like(variance), variance])


def token_forms() -> Tensor:
    return torch.einsum("to,oij->tij", centred(), traceless())


def brackets() -> list[Tensor]:
    """Ends of a spectrum of mean 0 from its norm: all others equal."""
    spread = token_forms().square().sum((1, 2)).div(30).sqrt()
    return [-spread * 29**0.5, spread * 29**0.5]


def mlp() -> Any:
    return net().mlp[LAYER]


def head() -> Any:
    return net().attention[LAYER].head(2)


def scores() -> list[float]:
    """Pattern values by query token, largest magnitude first."""
    table = patterns(2, rms(model().embed.w_e.detach())[:11], 3)
    return [float(x) for row in table for x in row[row.abs().argsort(descending=True)][:4]]


def dense_pattern() -> Tensor:
    return without_norm(2, 3)


def shares(baseline: Tensor) -> Tensor:
    """Average over orders of what each part adds to ``u . f``."""
    u, found = direction(), torch.zeros(4, dtype=torch.float64)
    orders = list(itertools.permutations(range(4)))
    for order in orders:
        for n, p in enumerate(order):
            less, more = (baseline + parts()[list(order[:m])].sum(0) for m in (n, n + 1))
            found[p] += (written(stored(), more[None]) - written(stored(), less[None]))[0] @ u / len(orders)
    return found


def gaussian(a: Tensor, b: Tensor, bias_a: Tensor, bias_b: Tensor) -> Tensor:
    """``E f_a . f_b`` over ``N(0, 1)`` by the fourth moments, ``(30 + 2) / 30`` times those of the sphere."""
    quadratic = torch.einsum("oij,ijkl,okl->", a, fourth(), b) * 32 / 30
    mean_a, mean_b = (torch.stack([m.trace() for m in s]) for s in (a, b))
    return quadratic + mean_a @ bias_b + bias_a @ mean_b + bias_a @ bias_b


def size(rows: Tensor) -> Tensor:
    """``sum |u| |D| |L| |R|`` of directions: the absolute terms of their forms, which outward rounding allows for."""
    w_l, w_r, w_d = (part(LAYER, f"mlp.{name}") for name in ("w_l", "w_r", "w_d"))
    return rows.abs() @ w_d.abs() @ (w_l.norm(dim=1) * w_r.norm(dim=1))


Definition = tuple[Callable[[], Any], Callable[[], Any]]
DEFINITIONS: dict[str, Definition] = {
    "alignment": (
        lambda: interp.alignment(points(), mlp().gram("in")),
        lambda: (
            torch.stack([30 * torch.einsum("i,oij,okj,k->", x, stored(), stored(), x) for x in points()])
            / points().square().sum(1)
            / stored().square().sum()
        ),
    ),
    "attribute": (
        lambda: [interp.attribute(model(), TOKENS, TARGET, method).values for method in ("pairs", "shapley")],
        lambda: [pairs(), shapley()],
    ),
    "bounds": (
        lambda: list(interp.bounds(mlp(), direction()))[:2],
        lambda: [30 * spectrum()[end] + direction() @ constant() for end in (0, -1)],
    ),
    "effective_rank": (
        lambda: [
            interp.effective_rank(mlp(), direction(), kind) for kind in ("participation", "entropy", "max", "stable")
        ],
        lambda: ranks(spectrum()),
    ),
    "eig": (
        lambda: [interp.eig(mlp(), direction(), 5).values, interp.eig(mlp(), direction(), 3, "min").values],
        lambda: [by_magnitude(spectrum())[:5], spectrum()[:3]],
    ),
    "explain": (rows, explained),
    "haar_null": (
        lambda: torch.stack(list(interp.haar_null(net().mlp[0], mlp()))[:2]),
        mean_of_rotations,
    ),
    "hosvd": (lambda: dense(interp.hosvd(mlp(), 4, 5).reconstruct()), hosvd),
    "inertia": (lambda: int(interp.inertia(mlp(), direction()).products), products),
    "jacobian_kernel": (
        lambda: [interp.jacobian_kernel(mlp()), interp.jacobian_kernel(mlp(), parts().T @ parts() / 4)],
        lambda: [
            4 * torch.einsum("oij,okj->ik", stored(), stored()),
            sum(4 * torch.einsum("oij,j,okl,l->ik", stored(), x, stored(), x) for x in parts()) / 4,
        ],
    ),
    "layer_pairs": (
        lambda: interp.layer_pairs(mlp(), direction(), parts()),
        lambda: torch.einsum("o,oij,pi,qj->pq", direction(), stored(), parts(), parts()),
    ),
    "layer_shapley": (
        lambda: interp.layer_shapley(mlp(), direction(), parts(), points()[0]),
        lambda: shares(points()[0]),
    ),
    "moments": (
        lambda: list(interp.moments(mlp())),
        lambda: [constant(), covariance()],
    ),
    "paths": (lambda: interp.paths(model(), TOKENS, TARGET, ["blocks.1.hook_attn_out"]).values, branch),
    "pattern_table": (
        lambda: interp.pattern_table(replace(head(), qk_norm=False), points(), parts(), 3),
        lambda: torch.einsum("ijkl,ni,nj,mk,ml->nm", dense_pattern(), points(), points(), parts(), parts()),
    ),
    "remove": (
        lambda: interp.remove(mlp(), direction(), components()[0][:2], components()[1][:, :2])(points()),
        lambda: removed(components()[0][:2], components()[1][:, :2]),
    ),
    "truncate": (
        lambda: interp.truncate(mlp(), direction(), 4)(points()),
        lambda: removed(components()[0][4:], components()[1][:, 4:]),
    ),
    "vocab_bounds": (lambda: list(interp.vocab_bounds(net(), LAYER))[:2], brackets),
    "vocab_eigs": (
        lambda: interp.vocab_eigs(net(), LAYER, 6, progress=False).values,
        lambda: torch.stack([by_magnitude(torch.linalg.eigvalsh(q))[:6] for q in token_forms()]),
    ),
    "vocab_moments": (
        lambda: list(interp.vocab_moments(net(), LAYER))[:2],
        lambda: [centred() @ constant(), token_forms().square().sum((1, 2)).sqrt()],
    ),
    "BilinearHead.inner": (
        lambda: head().inner(net().attention[LAYER].head(0), 3),
        lambda: (dense_pattern() * without_norm(0, 3)).sum(),
    ),
    "BilinearHead.norm": (lambda: head().norm(3), lambda: dense_pattern().norm()),
    "BilinearHead.qk": (
        lambda: [head().qk(branch, 3).tensor() for branch in (1, 2)],
        lambda: score_matrices(2, 3),
    ),
    "BilinearHead.read_gram": (
        lambda: [head().read_gram(side, 3) for side in ("q", "k")],
        lambda: [
            torch.einsum("ijkl,mjkl->im", dense_pattern(), dense_pattern()),
            torch.einsum("ijkl,ijml->km", dense_pattern(), dense_pattern()),
        ],
    ),
    "BilinearHead.token_scores": (
        lambda: list(head().token_scores(net().x0[:11], 3, 4)["value"]),
        scores,
    ),
    "BilinearHead.token_table": (
        lambda: head().token_table(points(), 2, "k", 5),
        lambda: turned(rms(points() @ part(LAYER, "attn.w_k2")[8:12].T), 5),
    ),
    "BilinearTensor.apply_rows": (
        lambda: mlp().apply_rows(parts() @ mlp().w_d, points()[:4]),
        lambda: torch.einsum("no,oij,nj->ni", parts(), stored(), points()[:4]),
    ),
    "BilinearTensor.canonical": (
        lambda: [dense(mlp().canonical()), mlp().canonical().bias],
        lambda: [traceless(), constant()],
    ),
    "BilinearTensor.gram": (
        lambda: [mlp().gram("out"), mlp().gram("in")],
        lambda: [torch.einsum(f, stored(), stored()) for f in ("oij,pij->op", "oij,okj->ik")],
    ),
    "BilinearTensor.inner": (
        lambda: [mlp().inner(net().mlp[0], kind) for kind in ("sym", "gaussian")],
        lambda: [
            (stored(0) * stored(1)).sum(),
            gaussian(stored(0), stored(1), part(0, "mlp.bias"), part(1, "mlp.bias")),
        ],
    ),
    "BilinearTensor.interaction": (
        lambda: mlp().interaction(direction()),
        lambda: torch.einsum("o,oij->ij", direction(), stored()),
    ),
    "BilinearTensor.shift": (lambda: mlp().shift(), lambda: torch.stack([m.trace() / 30 for m in stored()])),
    "BilinearTensor.traces": (lambda: mlp().traces(), lambda: torch.stack([m.trace() for m in stored()])),
    "BilinearTensor.norm": (lambda: mlp().norm(), lambda: stored().norm()),
    "Extracted.unembed_centred": (lambda: net().unembed_centred(), centred),
}
"""What a function returns, and its definition."""


def absolute(layer: int) -> Tensor:
    """The tensor of an MLP with the absolute values of its factors."""
    return torch.einsum("oh,hi,hj->oij", *(part(layer, f"mlp.{name}").abs() for name in ("w_d", "w_l", "w_r")))


SCALES: dict[str, Callable[[], Any]] = {
    "BilinearTensor.inner": lambda: float((absolute(0) * absolute(1)).sum()),
    "bounds": lambda: 30 * float(size(direction())),
    "explain": lambda: sum(map(abs, explained().values())),
    "vocab_bounds": lambda: size(centred()).square() / token_forms().square().sum((1, 2)).sqrt(),  # root of a square
}
"""Absolute sums of terms, where they are larger than the numbers."""


def dense(b: Any) -> Tensor:
    """A layer's symmetric tensor from its factors."""
    t = torch.einsum("oh,hi,hj->oij", b.w_d, b.w_l, b.w_r)
    return (t + t.mT) / 2


def test_the_run_spelled_out_here_is_the_model_s():
    logit = model().pre_softcap(TOKENS[None])[0, -1, TARGET].item()
    assert_close(forward()["logit"], logit, roundings=ROUNDINGS, scale=30 * float(direction().abs().max()))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_numbers_are_those_of_the_definition(name):
    got, want = (f() for f in DEFINITIONS[name])
    assert_close(got, want, roundings=ROUNDINGS, scale=SCALES.get(name, lambda: None)())


def test_every_public_function_has_a_definition():
    methods = {
        f"{owner.__name__}.{name}"
        for owner in (interp.BilinearHead, interp.BilinearTensor, interp.Extracted)
        for name, value in vars(owner).items()
        if callable(value) and not name.startswith("_")
    } | {"Explanation.ablate"}
    wanted = (set(interp.__all__) - RESULTS) | (methods - SAME)
    assert wanted == {*DEFINITIONS, *ELSEWHERE}, "each is defined here or in a test that ELSEWHERE names"
    assert not set(DEFINITIONS) & set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert f"\ndef {test}(" in (FOLDER / file).read_text(encoding="utf-8"), place
