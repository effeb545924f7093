"""Interpretability of bilinear transformers from their weights.

The public list, loaded lazily (PEP 562): ``import tnlm.interp`` reads no tensor library.
"""

from typing import TYPE_CHECKING

if __name__ != "tnlm.interp":
    raise ImportError(
        f"this package must be imported as tnlm.interp, not as {__name__!r}: the folder interp/ at the top of the "
        "repository is a link for readers; write `from tnlm import interp`"
    )

from tnlm._lazy import attach

if TYPE_CHECKING:
    from tnlm.interp.ablation import DeltaCE, ablate, ablation_edits, delta_ce, with_mlp
    from tnlm.interp.attribution import layer_pairs, layer_shapley
    from tnlm.interp.bilinear import BilinearTensor
    from tnlm.interp.circuits import alignment, edges
    from tnlm.interp.comparison import Similarity, haar_null, match_heads, similarity
    from tnlm.interp.composition import compose
    from tnlm.interp.copying import Match, copy_table, cycle_votes, equal_part, follower_entries, match, pattern_table
    from tnlm.interp.decompositions import Tucker, cp, fix_gauge, hosvd, remove, truncate
    from tnlm.interp.examples import top_examples
    from tnlm.interp.explanation import Explanation, explain
    from tnlm.interp.extraction import Extracted, extract
    from tnlm.interp.gating import paths
    from tnlm.interp.heads import BilinearHead
    from tnlm.interp.lowrank import LowRank
    from tnlm.interp.polynomials import degrees, gate_coefficients
    from tnlm.interp.ranking import top_tokens
    from tnlm.interp.reporting import report
    from tnlm.interp.sources import attribute
    from tnlm.interp.spectra import Eig, effective_rank, eig
    from tnlm.interp.statistics import Bounds, Moments, bounds, jacobian_kernel, moments, trace_bounds
    from tnlm.interp.tables import path_table
    from tnlm.interp.vocab import vocab_bounds, vocab_eigs, vocab_moments

_HOMES = {
    "tnlm.interp.extraction": ("extract", "Extracted"),
    "tnlm.interp.explanation": ("explain", "Explanation"),
    "tnlm.interp.sources": ("attribute",),
    "tnlm.interp.gating": ("paths",),
    "tnlm.interp.tables": ("path_table",),
    "tnlm.interp.ablation": ("ablate", "ablation_edits", "delta_ce", "DeltaCE", "with_mlp"),
    "tnlm.interp.examples": ("top_examples",),
    "tnlm.interp.reporting": ("report",),
    "tnlm.interp.bilinear": ("BilinearTensor",),
    "tnlm.interp.spectra": ("Eig", "eig", "effective_rank"),
    "tnlm.interp.statistics": ("Moments", "moments", "Bounds", "bounds", "trace_bounds", "jacobian_kernel"),
    "tnlm.interp.decompositions": ("Tucker", "hosvd", "cp", "truncate", "remove", "fix_gauge"),
    "tnlm.interp.attribution": ("layer_pairs", "layer_shapley"),
    "tnlm.interp.lowrank": ("LowRank",),
    "tnlm.interp.heads": ("BilinearHead",),
    "tnlm.interp.vocab": ("vocab_eigs", "vocab_moments", "vocab_bounds"),
    "tnlm.interp.ranking": ("top_tokens",),
    "tnlm.interp.comparison": ("Similarity", "similarity", "match_heads", "haar_null"),
    "tnlm.interp.composition": ("compose",),
    "tnlm.interp.polynomials": ("degrees", "gate_coefficients"),
    "tnlm.interp.circuits": ("edges", "alignment"),
    "tnlm.interp.copying": (
        "Match",
        "match",
        "pattern_table",
        "copy_table",
        "cycle_votes",
        "follower_entries",
        "equal_part",
    ),
}

__all__ = [
    "BilinearHead",
    "BilinearTensor",
    "Bounds",
    "DeltaCE",
    "Eig",
    "Explanation",
    "Extracted",
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
    "gate_coefficients",
    "haar_null",
    "hosvd",
    "jacobian_kernel",
    "layer_pairs",
    "layer_shapley",
    "match",
    "match_heads",
    "moments",
    "path_table",
    "paths",
    "pattern_table",
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
