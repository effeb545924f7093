"""Interpretability of bilinear transformers from their weights.

The public list, loaded lazily (PEP 562): ``import tnlm.interp`` reads no tensor library.
"""

from importlib import import_module

if __name__ != "tnlm.interp":
    raise ImportError(
        f"this package must be imported as tnlm.interp, not as {__name__!r}: the folder interp/ at the top of the "
        "repository is a link for readers; write `from tnlm import interp`"
    )

# public name -> the module that defines it
_EXPORTS = {
    "extract": "extraction",
    "Extracted": "extraction",
    "explain": "explanation",
    "Explanation": "explanation",
    "attribute": "sources",
    "paths": "gating",
    "path_table": "tables",
    "ablate": "ablation",
    "ablation_edits": "ablation",
    "delta_ce": "ablation",
    "DeltaCE": "ablation",
    "with_mlp": "ablation",
    "top_examples": "examples",
    "report": "reporting",
    "BilinearTensor": "bilinear",
    "Eig": "spectra",
    "eig": "spectra",
    "effective_rank": "spectra",
    "Moments": "statistics",
    "moments": "statistics",
    "Bounds": "statistics",
    "bounds": "statistics",
    "trace_bounds": "statistics",
    "jacobian_kernel": "statistics",
    "Tucker": "decompositions",
    "hosvd": "decompositions",
    "cp": "decompositions",
    "truncate": "decompositions",
    "remove": "decompositions",
    "fix_gauge": "decompositions",
    "layer_pairs": "attribution",
    "layer_shapley": "attribution",
    "LowRank": "lowrank",
    "BilinearHead": "heads",
    "vocab_eigs": "vocab",
    "vocab_moments": "vocab",
    "vocab_bounds": "vocab",
    "top_tokens": "ranking",
    "Similarity": "comparison",
    "similarity": "comparison",
    "match_heads": "comparison",
    "haar_null": "comparison",
    "compose": "composition",
    "degrees": "polynomials",
    "gate_coefficients": "polynomials",
    "edges": "circuits",
    "alignment": "circuits",
    "Match": "copying",
    "match": "copying",
    "pattern_table": "copying",
    "copy_table": "copying",
    "cycle_votes": "copying",
    "follower_entries": "copying",
    "equal_part": "copying",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f"tnlm.interp.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'tnlm.interp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
