"""Interpretability of bilinear transformers from their weights.

The names below are imported on first use (PEP 562), so ``import tnlm.interp`` imports no tensor library. The rooms,
each of which imports only those before it: ``layers`` (one layer or head), ``tokens`` (layers read in the vocabulary),
``predictions`` (one logit), ``discovery`` (connections between components, two models compared), ``views`` (figures,
the report).
"""

from typing import TYPE_CHECKING

if __name__ != "tnlm.interp":
    raise ImportError(
        f"this package must be imported as tnlm.interp, not as {__name__!r}: interp/ at the top of the "
        "repository is a symbolic link to tnlm/interp; write `from tnlm import interp`"
    )

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.interp.discovery.edge_table import alignment, edges
    from tnlm.interp.discovery.model_comparison import match_heads, similarity
    from tnlm.interp.extraction import Extracted, extract
    from tnlm.interp.layers.bilinear import BilinearTensor
    from tnlm.interp.layers.composition import compose
    from tnlm.interp.layers.decompositions import Tucker, cp, fix_gauge, hosvd, remove, truncate
    from tnlm.interp.layers.eigensolver import Eig
    from tnlm.interp.layers.heads import BilinearHead
    from tnlm.interp.layers.input_shares import layer_pairs, layer_shapley
    from tnlm.interp.layers.lowrank import LowRank
    from tnlm.interp.layers.similarities import Similarity, haar_null
    from tnlm.interp.layers.spectra import Inertia, effective_rank, eig, inertia
    from tnlm.interp.layers.statistics import Bounds, Moments, bounds, jacobian_kernel, moments, trace_bounds
    from tnlm.interp.predictions.ablation import DeltaCE, ablate, ablation_edits, delta_ce, with_mlp
    from tnlm.interp.predictions.attribution import attribute
    from tnlm.interp.predictions.explanation import Explanation, explain
    from tnlm.interp.predictions.path_expansion import paths
    from tnlm.interp.predictions.polynomials import degrees, polynomial_coefficients
    from tnlm.interp.tokens.copying import (
        Match,
        copy_table,
        cycle_votes,
        equal_part,
        follower_entries,
        match,
        pattern_table,
    )
    from tnlm.interp.tokens.examples import top_examples
    from tnlm.interp.tokens.tables import path_table, top_tokens
    from tnlm.interp.tokens.token_spectra import vocab_bounds, vocab_eigs, vocab_moments
    from tnlm.interp.views.reporting import report

_HOMES = {
    "tnlm.interp.extraction": ("extract", "Extracted"),
    "tnlm.interp.layers.bilinear": ("BilinearTensor",),
    "tnlm.interp.layers.composition": ("compose",),
    "tnlm.interp.layers.decompositions": ("Tucker", "hosvd", "cp", "truncate", "remove", "fix_gauge"),
    "tnlm.interp.layers.eigensolver": ("Eig",),
    "tnlm.interp.layers.heads": ("BilinearHead",),
    "tnlm.interp.layers.input_shares": ("layer_pairs", "layer_shapley"),
    "tnlm.interp.layers.lowrank": ("LowRank",),
    "tnlm.interp.layers.similarities": ("Similarity", "haar_null"),
    "tnlm.interp.layers.spectra": ("eig", "effective_rank", "inertia", "Inertia"),
    "tnlm.interp.layers.statistics": ("Moments", "moments", "Bounds", "bounds", "trace_bounds", "jacobian_kernel"),
    "tnlm.interp.tokens.copying": (
        "Match",
        "match",
        "pattern_table",
        "copy_table",
        "cycle_votes",
        "follower_entries",
        "equal_part",
    ),
    "tnlm.interp.tokens.examples": ("top_examples",),
    "tnlm.interp.tokens.tables": ("path_table", "top_tokens"),
    "tnlm.interp.tokens.token_spectra": ("vocab_eigs", "vocab_moments", "vocab_bounds"),
    "tnlm.interp.predictions.ablation": ("ablate", "ablation_edits", "delta_ce", "DeltaCE", "with_mlp"),
    "tnlm.interp.predictions.attribution": ("attribute",),
    "tnlm.interp.predictions.explanation": ("explain", "Explanation"),
    "tnlm.interp.predictions.path_expansion": ("paths",),
    "tnlm.interp.predictions.polynomials": ("degrees", "polynomial_coefficients"),
    "tnlm.interp.discovery.edge_table": ("edges", "alignment"),
    "tnlm.interp.discovery.model_comparison": ("similarity", "match_heads"),
    "tnlm.interp.views.reporting": ("report",),
}

__all__ = [
    "BilinearHead",
    "BilinearTensor",
    "Bounds",
    "DeltaCE",
    "Eig",
    "Explanation",
    "Extracted",
    "Inertia",
    "LowRank",
    "Match",
    "Moments",
    "Similarity",
    "Tucker",
    "ablate",
    "ablation_edits",
    "alignment",
    "attribute",
    "bounds",
    "compose",
    "copy_table",
    "cp",
    "cycle_votes",
    "degrees",
    "delta_ce",
    "edges",
    "effective_rank",
    "eig",
    "equal_part",
    "explain",
    "extract",
    "fix_gauge",
    "follower_entries",
    "haar_null",
    "hosvd",
    "inertia",
    "jacobian_kernel",
    "layer_pairs",
    "layer_shapley",
    "match",
    "match_heads",
    "moments",
    "path_table",
    "paths",
    "pattern_table",
    "polynomial_coefficients",
    "remove",
    "report",
    "similarity",
    "top_examples",
    "top_tokens",
    "trace_bounds",
    "truncate",
    "vocab_bounds",
    "vocab_eigs",
    "vocab_moments",
    "with_mlp",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
