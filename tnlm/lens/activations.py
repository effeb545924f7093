"""Activations that a hooked model's run has cached, with transformer-lens's analyses of them."""

import difflib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from tnlm.lens.residual import ResidualParts

Positions = int | tuple | list | Tensor | Slice | None
"""transformer-lens's slices: an index, the arguments of ``slice``, several indices; None is everything."""


class ResidualCache(ResidualParts, ActivationCache):
    """Activations of one run: a transformer-lens ``ActivationCache`` with the decompositions of :class:`ResidualParts`.

    In the cache that a run returns, no two entries share memory with each other or with the model, so that an entry
    may be edited in place.
    """

    def __getitem__(self, key: str | tuple) -> Tensor:
        """The activation at a point, given its full name or transformer-lens's shorthand.

        Examples of the shorthand: ``cache["pattern", 0]``, ``cache["scale", 1, "ln2"]``.

        Raises:
            KeyError: The point was not cached; the message lists close matches.
        """
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, tuple) and len(key) > 1 and key[1] is not None:
            name, layer, *kind = key
            layer = layer + self.model.config.n_layer if layer < 0 else layer
            # transformer-lens would read "k2" as the keys of layer 2.
            kinds = [f"{kind[0]}."] if kind and kind[0] else ["", "attn.", "mlp."]
            for full in (f"blocks.{layer}.{k}hook_{name}" for k in kinds):
                if full in self.cache_dict:
                    return self.cache_dict[full]
            key = (name, layer, *kind)
        try:
            return super().__getitem__(key)
        except KeyError as error:
            name = error.args[0]
            close = close_matches(name, self.cache_dict)
            raise KeyError(f"{name!r} was not cached; close: {close}. run_with_cache must cache it") from None

    def apply_slice_to_batch_dim(self, batch_slice: Positions) -> "ResidualCache":  # type: ignore[override]
        """A cache of some rows of the batch; for an index or a range, its entries are views of this one's."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return type(self)(sliced.cache_dict, self.model, has_batch_dim=sliced.has_batch_dim)

    # The methods below replace those of ActivationCache.

    def _get_cached_ln_scale(self, layer: Any, *args: Any, **options: Any) -> Tensor:
        if layer == self.model.config.n_layer and not self.model.config.final_norm:
            return self["hook_embed"].new_ones(())
        return super()._get_cached_ln_scale(layer, *args, **options)

    def _ensure_head_results(self) -> bool:
        name = "blocks.{}.attn.hook_result"
        layers = [i for i, block in enumerate(self.model.blocks) if block.attn is not None]
        missing = [i for i in layers if name.format(i) not in self.cache_dict]
        self.cache_dict |= {name.format(i): self._result(i) for i in missing}
        return not missing

    def _slice(self, positions: Positions) -> Slice:
        return positions if isinstance(positions, Slice) else Slice(positions)


def close_matches(name: Any, known: Iterable[str]) -> str:
    """Up to three of the known names that resemble ``name``, or contain it, for error messages."""
    known = list(known)
    found = difflib.get_close_matches(str(name), known, n=3) or [full for full in known if str(name) in full]
    return ", ".join((found or known)[:3])
