"""Two models compared, layer by layer and head by head: by tokens, which they share, not by coordinates."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Real
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tnlm.checks import check_kind, seeded
from tnlm.interp.checks import check_choice, check_count, check_number
from tnlm.interp.extraction import AttentionLayer, Extracted, extract
from tnlm.interp.layers.heads import BilinearHead
from tnlm.interp.layers.similarities import GIVEN, KINDS, Kind, Map, Similarity, cosine, head_product, map_similarity
from tnlm.interp.tokens.folded import Folded, shared_rows
from tnlm.transformer import Transformer

Model = Transformer | Extracted


class HeadMatch(NamedTuple):
    """``similarity (n, m)`` of all pairs and the one-to-one ``pairs`` of largest total."""

    similarity: Tensor
    pairs: list[tuple[int, int]]
    basis: str = GIVEN
    """As in `Similarity`."""


def similarity(
    a: Map | Model,
    b: Map | Model,
    kind: Kind = "sym",
    samples: int | None = None,
    per_layer: bool = False,
    seed: int = 0,
    *,
    residual: bool = False,
    d_in: int | None = None,
    token_weights: Real[Tensor, " d_vocab_used"] | None = None,
    distances: Sequence[int] = (0, 1, 2, 4, 8),
    permutations: int = 8,
    max_bytes: int = 2**30,
) -> Similarity:
    """Cosine of two models by tokens; of two layers it depends on the residual basis, so take layers of one model.

    **Models**, as a `tnlm.Transformer` or from `extract`: one value for the attention and one for the MLP of every
    layer, in the order in which the network applies them. Each is read as a tensor from the normed embeddings of
    tokens to centred logits: ``fold(x0^T).project(centred w_u)`` of an MLP, without its bias; patterns times value
    circuits, summed over heads and ``distances``, of attention. So widths and bases of the residual streams do not
    matter, and models that differ by a symmetry have 1 everywhere. Layers read here what a token alone gives them,
    not what earlier layers add. What is no polynomial (softmax patterns, gated MLPs) has no entry. ``chance`` is the
    same with the tokens of ``b`` renamed at random. Two different layers of trained models score above that, too.

    Symmetries: R E P U Q QR V N L X H S.

    **Layers, stacks and functions**, in one of five inner products, in the coordinates of their inputs:

    ====== ============================================== =================================================
    kind   inner product                                  how
    ====== ============================================== =================================================
    sym    of the tensors, symmetric over all input legs  closed form for one and two layers
    gaus.  ``E f_a . f_b`` over ``N(0, 1)``               closed form for one layer, else sampled
    sphere the same on ``|x|**2 = d_in``                  closed form for one layer, else sampled
    comp.  ``E f_a . conj f_b``, complex Gaussian:        closed form for one layer, else sampled; degrees
           ``sum_n n! <S_a^n, S_b^n>``                    do not mix, no trace term
    tree   product of per-layer symmetric cores           closed form; **no** function similarity: equal
                                                          functions may score 0
    ====== ============================================== =================================================

    Args:
        a, b: Two models; or a layer (its `canonical` form counts), a stack of layers (as they are stored) in the order
            in which the network applies them, a `Network` with one input ``(batch, d_in)``, or a function of
            ``(n, d_in)`` that is a polynomial (and takes complex input for ``complex``).
        samples: Sampled even where a closed form exists; ``None`` samples only where there is none, 4096 times. Of
            models: at most so many tokens, drawn by weight; ``None`` takes all.
        per_layer: For stacks: compare layer by layer instead of end to end, in closed form.
        residual: Every layer is ``x + f(x)``. Bias and residual are part of the function for gaussian, sphere, complex.
        d_in: Input width, needed when no side is a layer.
        token_weights: Of models: of the ids in use, such as how often each occurs; equal by default. Of tokens with
            parallel unembedding rows one is kept.
        distances: Of models: query position minus key position of the patterns.
        permutations: Of models: rows of ``chance``, each at two thirds of the cost of the value; 0 leaves it out.

    Returns:
        The error is a jackknife over samples; both norms come from the same samples as the product. Models cost three
        inner products per MLP, and about ``50 n (n_head d_qk)**2`` flop per attention layer for ``n`` tokens; all
        pairs of ``n`` tokens for the parallel rows.

    Raises:
        ValueError: Bad shapes, a map that is zero, a kind that has no meaning for these maps.
    """
    check_choice("kind", kind, KINDS)
    if samples is not None:
        check_count("samples", samples, 2)
    models = [isinstance(m, Model) for m in (a, b)]
    if any(models):
        if not all(models) or kind != "sym" or residual:
            raise ValueError(
                'a model is compared with a model, with kind="sym" and without residual; to compare one of its '
                "layers pass extract(model).mlp[layer], to compare it as a whole a function of (n, d_in)"
            )
        nets = [extract(m) for m in (a, b)]
        return _models(nets, token_weights, distances, samples, permutations, seed)
    x, y = cast(Map, a), cast(Map, b)
    return map_similarity(x, y, kind, samples, per_layer, seed, residual=residual, d_in=d_in, max_bytes=max_bytes)


def match_heads(
    a: Sequence[BilinearHead] | AttentionLayer,
    b: Sequence[BilinearHead] | AttentionLayer,
    distances: Sequence[int] = (0,),
    *,
    token_weights: Real[Tensor, " d_vocab_used"] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> HeadMatch:
    """Pair the heads of two layers: of any two models by tokens, lists of heads in their residual basis (one model).

    Similarity of two heads is the cosine of ``sum_distances <A, A'>`` times ``<OV, OV'>``, of pattern tensors and
    output-value circuits. Assignment by the Hungarian method.

    - Attention layers, ``extract(model).attention[layer]``: queries and keys of each token that the head reads alone
      (QK norm included), values of normed embeddings, outputs as centred logits. No basis matters.
    - Lists of `BilinearHead`: the tensors themselves, exact (with QK norm: given the norms). Models that differ by a
      rotation of their residual streams have unrelated lists.

    Symmetries: R E P U Q QR V L X H S.

    Args:
        distances: Query position minus key position of the patterns.
        token_weights, samples, seed: As in `similarity` of models.
    """
    for name, heads in (("a", a), ("b", b)):
        check_kind(name, heads, (Sequence, AttentionLayer), "pass extract(model).attention[layer]")
    _check_distances(distances)
    if not len(a) or not len(b) or not len(distances):
        raise ValueError(f"needs heads and distances, got {len(a)} and {len(b)} heads, {len(distances)} distances")
    if isinstance(a, AttentionLayer) and isinstance(b, AttentionLayer):
        basis, rows = "tokens", shared_rows(a.net, b.net, token_weights, samples, seed)
        products = Folded(*rows).heads(a.layer, b.layer, distances)
        norms = [Folded(r, r).heads(x.layer, x.layer, distances).diagonal() for r, x in zip(rows, (a, b))]
    elif isinstance(a, AttentionLayer) or isinstance(b, AttentionLayer):
        raise ValueError("match_heads takes two attention layers or two lists of BilinearHead, got one of each")
    else:
        basis = GIVEN
        products = torch.stack([torch.stack([head_product(x, y, distances) for y in b]) for x in a])
        norms = [torch.stack([head_product(h, h, distances) for h in heads]) for heads in (a, b)]
    for name, values in zip("ab", norms):
        if bool((values <= 0).any()):
            raise ValueError(f"a head of {name} is zero: its similarity is undefined")
    cosines = products / norms[0].sqrt()[:, None] / norms[1].sqrt()
    matched = linear_sum_assignment(cosines.detach().cpu().numpy(), maximize=True)
    return HeadMatch(cosines, list(zip(*(side.tolist() for side in matched))), basis)


def _models(
    nets: Sequence[Extracted],
    weights: Tensor | None,
    distances: Sequence[int],
    samples: int | None,
    permutations: int,
    seed: int,
) -> Similarity:
    check_count("permutations", permutations, 0)
    if nets[0].n_layer != nets[1].n_layer:
        raise ValueError(f"models must have the same n_layer, got {nets[0].n_layer} and {nets[1].n_layer}")
    _check_distances(distances)
    if not len(distances):
        raise ValueError("distances must hold at least one distance, got none")
    a, b = shared_rows(nets[0], nets[1], weights, samples, seed)
    crossed, own = Folded(a, b).layers(distances), Folded(a, a).layers(distances)
    if not crossed:
        raise ValueError(
            "nothing to compare: neither the attention nor the MLPs are polynomials in both models, got "
            + " and ".join(f"{net.config.attention} with {net.config.mlp}" for net in nets)
        )

    def cosines(products: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        return torch.stack([cosine(p, own[part], other[part]).value for part, p in products.items()])

    value = cosines(crossed, Folded(b, b).layers(distances))
    generator, chance = seeded(seed), []
    for _ in range(permutations):
        renamed = b.permuted(torch.randperm(len(b.inputs), generator=generator).to(b.inputs.device))
        chance.append(cosines(Folded(a, renamed).layers(distances), Folded(renamed, renamed).layers(distances)))
    nulls = torch.stack(chance) if chance else None
    return Similarity(value, torch.zeros_like(value), "tokens", tuple(crossed), nulls)


def _check_distances(distances: Sequence[int]) -> None:
    check_kind("distances", distances, Sequence, "give a list of distances")
    for distance in distances:
        check_number("every one of distances", distance)
