"""The ``Symmetries`` line of every public function of interp, tried both ways on random and on trained models.

A probe calls a function as it is used: with weights, directions and inputs taken from the model itself, so that they
turn along. Listed changes leave its numbers equal, changes that are not listed move them on one model at least.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.limits import limit
from tests.symmetries import SYMMETRIES
from tests.test_symmetries import CONFIGS, random_model, trained_model
from tests.tiny_models import build, ids
from tnlm import interp
from tnlm.transformer import Transformer

MODELS: dict[str, Callable[[], Transformer]] = {
    "released": lambda: random_model("no softcap"),
    "released, trained": lambda: trained_model("no softcap"),
    "pure": lambda: random_model("pure"),
    "two attention layers": lambda: random_model("two attention layers"),
}
LAYER = 1
ROUNDINGS = 2**20
"""A symmetry changes all weights, by matrices with condition numbers up to ten, and spectra are iterated."""
CONDITION = 1e4
"""How much larger the terms may be than their differences: an effect of a part is a difference of two logits."""
EQUAL = limit(torch.float64, ROUNDINGS, CONDITION)
MOVED = 1e-5
"""Smallest relative move that counts as one."""

NO_NUMBERS = {
    "BilinearHead": "a container of weights; its methods are declared one by one",
    "BilinearTensor": "a container of weights; its methods are declared one by one",
    "Bounds": "a result of bounds",
    "cp": "a search from a random start; what it finds is a layer of few units",
    "DeltaCE": "a result of delta_ce",
    "Eig": "a result of eig",
    "Explanation": "a result of explain",
    "Extracted": "the weights themselves",
    "Inertia": "a result of inertia",
    "LowRank": "a matrix as factors",
    "Match": "a result of match",
    "Moments": "a result of moments",
    "Similarity": "a result of similarity",
    "Tucker": "a result of hosvd",
    "extract": "returns the weights themselves",
    "ablation_edits": "returns edits; ablate and delta_ce give numbers",
    "degrees": "of any function",
    "polynomial_coefficients": "of any function",
    "equal_part": "of token ids alone",
    "follower_entries": "of token ids alone",
    "match": "of a table that the caller made",
    "top_tokens": "of a matrix that the caller made",
    "trace_bounds": "of numbers that the caller made",
    "report": "shows what other functions return",
    "top_examples": "shows places in text; its values are those of the layer",
}
"""Public names that have no numbers of a model, with the reason."""

METHODS_WITHOUT_NUMBERS = {
    *(f"BilinearTensor.{name}" for name in ("augment", "canonical", "fold", "project", "symmetrize", "tensor", "to")),
    "BilinearTensor.apply_rows",  # of hidden weights that the caller made
    "BilinearHead.fix_gauge",
    *(f"Extracted.{name}" for name in ("cast", "check", "read_prompt", "read_token")),
}
"""Methods that return a layer or head, its dense tensor, what they were given, or an error of rounding."""


def _net(model: Transformer) -> Any:
    return interp.extract(model)


def _read(net: Any) -> Tensor:
    """A direction that the logits read: one token against the mean of all."""
    return net.unembed_centred()[3]


def _x(net: Any) -> Tensor:
    """Inputs of a layer: tokens alone, as its norm passes them."""
    return net.x0[: len(net.tokens)]


def _tokens() -> Tensor:
    return ids(1, 6)[0]


def _values(b: Any, net: Any) -> Tensor:
    """What a layer writes along a direction, on inputs on the sphere."""
    x = _x(net)
    x = x * (x.shape[1] ** 0.5 / x.norm(dim=1, keepdim=True))
    return b(x) @ _read(net)


def _table(rows: Any) -> list[Any]:
    """The numbers of a table in the order of its names."""
    names = [c for c in rows.columns if rows[c].dtype.kind not in "f"]
    rows = rows.sort_values(names)
    return [torch.tensor(rows[c].to_numpy(dtype=float)) for c in rows.columns if c not in names]


def _rows(rows: Any) -> Tensor:
    """Named terms and their absolute sum, in the order of their names; components of an MLP by their size."""
    key = lambda row: tuple(str(x) for x in (row.kind, row.layer, row.head, row.source, row.component))  # noqa: E731
    values = [row.value for row in sorted(rows, key=key)]
    return torch.tensor([*values, sum(map(abs, values))], dtype=torch.float64)


def _truncated(model: Transformer) -> Any:
    net = _net(model)
    return _values(interp.truncate(net.mlp[LAYER], _read(net), 3), net)


def _removed(model: Transformer) -> Any:
    net = _net(model)
    b, u = net.mlp[LAYER], _read(net)
    pairs = interp.eig(b, u, k=2, which="max")
    return _values(interp.remove(b, u, pairs.values, pairs.vectors), net)


def _composed(model: Transformer) -> Any:
    net = _net(model)
    x = _x(net)
    if model.config.mlp_bias:
        x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    return interp.compose(net.mlp[0], net.mlp[LAYER]).contract({"x": x}) @ _read(net)


def _vocab_eigs(model: Transformer) -> Any:
    return interp.vocab_eigs(_net(model), LAYER, k=2, progress=False).values


def _delta_ce(model: Transformer) -> Any:
    net = _net(model)
    edits = interp.ablation_edits(net, ids(3, 6), f"blocks.{LAYER}.hook_mlp_out", "mean")
    result = interp.delta_ce(net, edits, ids(3, 7, seed=2))
    return [result.mean, result.kl, result.base]


def _ablate(model: Transformer) -> Any:
    return interp.ablate(model, ids(2, 6), f"blocks.{LAYER}.hook_mlp_out", "zero").log_softmax(-1)


def _with_mlp(model: Transformer) -> Any:
    net = _net(model)
    edited = interp.with_mlp(model, {LAYER: net.mlp[LAYER] * 0.5})
    return edited(ids(2, 6)).log_softmax(-1)


def _gauged(model: Transformer) -> Any:
    """Lengths of what the units write, and what they read with their signs, which are fixed in the basis."""
    net = _net(model)
    fixed = interp.fix_gauge(net.mlp[LAYER])
    return [fixed.w_d.norm(dim=0), _x(net) @ fixed.w_l.mT]


def _paths(model: Transformer) -> Any:
    return interp.paths(model, _tokens(), 3, [f"blocks.{model.config.n_layer - 1}.hook_attn_out"]).values


def _path_tables(model: Transformer) -> Any:
    parts = ["direct", *([] if model.config.mlp == "none" else ["mlp"]), 0]
    return [x for part in parts for x in _table(interp.path_table(_net(model), LAYER, part, 3))]


def _inputs(model: Transformer) -> Tensor:
    """Inputs of a head, with the constant in front where it has biases."""
    net = _net(model)
    x = _x(net)
    return torch.cat([torch.ones_like(x[:, :1]), x], 1) if model.config.qk_bias else x


def _heads(model: Transformer, layer: int) -> list[Any]:
    return [_net(model).attention[layer].head(n) for n in range(model.config.n_head)]


def _on(tensor: Tensor, x: Tensor) -> Tensor:
    """A tensor with the same vector on all of its legs, for every row of ``x``."""
    values = torch.tensordot(x, tensor, 1)
    while values.ndim > 1:
        values = torch.einsum("ni,ni...->n...", x, values)
    return values


def _inverse_norms(model: Transformer) -> list[Any]:
    if model.config.norm == "none":
        raise ValueError("no norms")
    return list(_net(model).inverse_norms(ids(2, 6)).values())


def _other(model: Transformer) -> Transformer:
    """Another model of the same kind."""
    kind = (
        "no softcap" if model.config.norm == "rms" else "pure" if model.config.mlp != "none" else "two attention layers"
    )
    return build(CONFIGS[kind], seed=5)


def _ablated(model: Transformer) -> Any:
    explanation = interp.explain(model, _tokens(), 3, 5, components=2)
    rows = [r for r in explanation.rows if r.layer == LAYER and (r.kind == "mlp" or r.source == 2)]
    rows.sort(key=lambda r: (r.kind, r.layer, str(r.head), str(r.component)))
    # differences of logits, which are as exact as the terms of a logit are
    changes = [x for row in rows for x in explanation.ablate(row)]
    return torch.tensor([*changes, explanation.absolute_sum], dtype=torch.float64)


PROBES: dict[str, Callable[[Transformer], Any]] = {
    "ablate": _ablate,
    "alignment": lambda m: interp.alignment(_read(_net(m)), _net(m).mlp[LAYER].gram("in")),
    "attribute": lambda m: interp.attribute(m, _tokens(), 3).values,
    "BilinearHead.inner": lambda m: _heads(m, 0)[0].inner(_heads(m, LAYER)[-1], 2),
    "BilinearHead.norm": lambda m: _heads(m, LAYER)[-1].norm(2),
    "BilinearHead.token_scores": lambda m: _table(_heads(m, LAYER)[-1].token_scores(_inputs(m), 2, 3)),
    "BilinearHead.ov": lambda m: (
        _x(_net(m)) @ (_heads(m, LAYER)[-1].ov().tensor()[:, -m.config.d_model :].T @ _read(_net(m)))
    ),
    "BilinearHead.pattern_tensor": lambda m: _on(_heads(m, LAYER)[-1].pattern_tensor(2), _inputs(m)[:5]),
    "BilinearHead.qk": lambda m: _inputs(m) @ _heads(m, LAYER)[-1].qk(1, 2).tensor() @ _inputs(m).T,
    "BilinearHead.read_gram": lambda m: _on(_heads(m, LAYER)[-1].read_gram("q", 2), _inputs(m)),
    "BilinearHead.token_table": lambda m: _heads(m, LAYER)[-1].token_table(_inputs(m)),
    "BilinearTensor.apply": lambda m: _x(_net(m)) @ _net(m).mlp[LAYER].apply(_read(_net(m)), _x(_net(m)).T),
    "BilinearTensor.gram": lambda m: _on(_net(m).mlp[LAYER].gram("out"), _read(_net(m))[None]),
    "BilinearTensor.interaction": lambda m: _on(_net(m).mlp[LAYER].interaction(_read(_net(m))), _x(_net(m))),
    "BilinearTensor.shift": lambda m: _net(m).mlp[LAYER].shift() @ _read(_net(m)),
    "BilinearTensor.traces": lambda m: _net(m).mlp[LAYER].traces() @ _read(_net(m)),
    "Extracted.inverse_norms": _inverse_norms,
    "Extracted.parallel_tokens": lambda m: _net(m).parallel_tokens(),
    "Extracted.unembed_centred": lambda m: _net(m).unembed_centred() @ _x(_net(m)).T,
    "BilinearTensor.inner": lambda m: _net(m).mlp[LAYER].inner(_net(m).mlp[0]),
    "BilinearTensor.norm": lambda m: _net(m).mlp[LAYER].norm(),
    "Explanation.ablate": _ablated,
    "bounds": lambda m: list(interp.bounds(_net(m).mlp[LAYER], _read(_net(m))))[:2],
    "compose": _composed,
    "copy_table": lambda m: interp.copy_table(_net(m), LAYER, 0, _net(m).x0),
    "cycle_votes": lambda m: interp.cycle_votes(_net(m), 3, 5),
    "delta_ce": _delta_ce,
    "edges": lambda m: _table(interp.edges(_net(m))),
    "effective_rank": lambda m: interp.effective_rank(_net(m).mlp[LAYER], _read(_net(m)), "participation"),
    "eig": lambda m: interp.eig(_net(m).mlp[LAYER], _read(_net(m)), k=5).values,
    "explain": lambda m: _rows(interp.explain(m, _tokens(), 3, components=2).rows),
    "fix_gauge": _gauged,
    # the mean of traceless forms is 0
    "haar_null": lambda m: list(interp.haar_null(_net(m).mlp[0], _net(m).mlp[LAYER]))[1:],
    "hosvd": lambda m: interp.hosvd(_net(m).mlp[LAYER], 3, 3).spectrum_in[:5],
    "jacobian_kernel": lambda m: ((_x(_net(m)) @ interp.jacobian_kernel(_net(m).mlp[LAYER])) * _x(_net(m))).sum(1),
    "layer_pairs": lambda m: interp.layer_pairs(_net(m).mlp[LAYER], _read(_net(m)), _x(_net(m))[:3]),
    "layer_shapley": lambda m: interp.layer_shapley(_net(m).mlp[LAYER], _read(_net(m)), _x(_net(m))[:3]),
    "inertia": lambda m: [x.double() for x in interp.inertia(_net(m).mlp[LAYER], _read(_net(m)))],
    "match_heads": lambda m: interp.match_heads(_net(m).attention[0], _net(m).attention[LAYER]).similarity,
    "moments": lambda m: interp.moments(_net(m).mlp[LAYER]).mean @ _read(_net(m)),
    "path_table": lambda m: _path_tables(m),
    "paths": _paths,
    "pattern_table": lambda m: interp.pattern_table(_net(m).attention[LAYER].head(0), _inputs(m), _inputs(m), 2),
    "remove": _removed,
    "similarity": lambda m: interp.similarity(m, _other(m), distances=(0, 2), permutations=0).value,
    "truncate": _truncated,
    "vocab_bounds": lambda m: list(interp.vocab_bounds(_net(m), LAYER))[:2],
    "vocab_eigs": _vocab_eigs,
    "vocab_moments": lambda m: list(interp.vocab_moments(_net(m), LAYER))[:2],
    "with_mlp": _with_mlp,
}


def declared(name: str) -> list[str] | None:
    """The ids in the ``Symmetries`` line of a public function or method; None without one."""
    value: Any = interp
    for part in name.split("."):
        value = getattr(value, part)
    found = re.search(r"^\s*Symmetries: ([A-Z ]+)\.", inspect.getdoc(value) or "", re.MULTILINE)
    return None if found is None else found[1].split()


@cache
def _numbers(name: str, kind: str, id: str | None) -> list[Tensor] | None:
    """The numbers of a probe on a model as it is (``id`` None) or changed; None where the probe cannot run."""
    model = MODELS[kind]()
    if id is not None:
        model = SYMMETRIES[id](model)
    try:
        found = PROBES[name](model)
    except ValueError:  # the function refuses this architecture, with and without the change
        return None
    found = found if isinstance(found, list | tuple) else [found]
    return [torch.as_tensor(x, dtype=torch.float64).detach() for x in found]


def moved(name: str, kind: str, id: str) -> float | None:
    """Largest change of a probe's numbers by a symmetry, relative to the largest of each; None where it cannot run."""
    before, after = _numbers(name, kind, None), _numbers(name, kind, id)
    assert (before is None) == (after is None), f"{name} runs on one of two equal models"
    if before is None or after is None:
        return None
    assert all(bool(torch.isfinite(x).all()) for x in (*before, *after))
    if [x.shape for x in before] != [x.shape for x in after]:
        return 1.0
    return max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True) if a.numel())


def _holding(name: str) -> list[tuple[str, str]]:
    return [(kind, id) for kind in MODELS for id, s in SYMMETRIES.items() if s.holds(MODELS[kind]().config)]


@pytest.mark.parametrize("name", PROBES)
def test_declared_symmetries_are_those_that_hold(name):
    ids_declared = declared(name)
    assert ids_declared is not None, f"{name} has no line 'Symmetries: ...'"
    assert set(ids_declared) <= set(SYMMETRIES)
    found = {(kind, id): moved(name, kind, id) for kind, id in _holding(name)}
    assert any(x is not None for x in found.values()), f"the probe of {name} runs on no model"
    wrong = [
        f"{id} moves it by {x:.1e} ({kind})"
        for (kind, id), x in found.items()
        if id in ids_declared and x is not None and x > EQUAL
    ]
    for id in set(SYMMETRIES) - set(ids_declared):
        largest = max((x for (_, other), x in found.items() if other == id and x is not None), default=None)
        if largest is not None and largest < MOVED:
            wrong.append(f"{id} is not listed and moves it by {largest:.1e} only")
    assert not wrong, f"{name}: " + "; ".join(sorted(wrong))


def test_every_public_method_is_declared_or_has_no_numbers():
    owners = {owner.__name__: owner for owner in (interp.BilinearHead, interp.BilinearTensor, interp.Extracted)}
    methods = {
        f"{owner}.{name}"
        for owner, value in owners.items()
        for name, method in vars(value).items()
        if callable(method) and not name.startswith("_")
    }
    assert methods - METHODS_WITHOUT_NUMBERS == {name for name in PROBES if name.split(".")[0] in owners}


def test_every_public_name_is_declared_or_has_no_numbers():
    missing = [name for name in interp.__all__ if name not in PROBES and name not in NO_NUMBERS]
    assert not missing, "neither probed nor named as without numbers"
    assert not set(NO_NUMBERS) & set(PROBES)
    assert set(NO_NUMBERS) <= set(interp.__all__)


DOCS = Path(__file__).parents[2] / "docs" / "symmetries.md"


def documented() -> str:
    """The two tables of the docs: the symmetries, and the functions that they leave alone."""
    lines = ["| id | change | holds | stays equal |", "|---|---|---|---|"]
    lines += [f"| {s.id} | {s.words} | {s.when} | {s.kept} |" for s in SYMMETRIES.values()]
    lines += ["", "| function | " + " | ".join(SYMMETRIES) + " |", "|---|" + "---|" * len(SYMMETRIES)]
    for name in sorted(PROBES, key=str.lower):
        listed = declared(name) or []
        lines.append(f"| `{name}` | " + " | ".join("=" if id in listed else "" for id in SYMMETRIES) + " |")
    return "\n".join(lines)


def test_the_page_has_the_tables():
    assert documented() in DOCS.read_text(encoding="utf-8"), "run: python -m tests.interp.test_symmetries"


if __name__ == "__main__":
    text = DOCS.read_text(encoding="utf-8")
    start = text.index("| id |")
    end = text.rindex("|\n") + 1
    DOCS.write_text(text[:start] + documented() + text[end:], encoding="utf-8")
