"""Named points: :class:`Point` submodules called ``hook_*``, where hooks observe and change values.

A point costs nothing while it has no hook. To add one, make a ``Point()`` in the ``__init__`` of its module
(``transformer.py``, ``attention.py``, ``mlp.py`` or ``norm.py``), call it in ``forward``, and add a row to
the list of all points, ``docs/points.md``.
"""

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

M = TypeVar("M", bound=nn.Module)


class Point(nn.Identity):
    """The identity at a named place of the forward; every hook on it gets its own copy of the value.

    A hook that edits its copy in place, or returns another tensor, changes the value that leaves this point and nothing
    else: neither tensors of other parts of the model nor those that other hooks have kept. The same is true of
    gradients in backward hooks. Without hooks nothing is copied. Hooks on modules that are no points are torch's own:
    they get the model's tensors, and should return a new one.

    Raises:
        ValueError: In the forward or the backward, if a hook returns a value of another shape, dtype or device.
    """

    name: str | None = None
    """Path of the point in its model; set by the model."""

    def register_forward_hook(self, hook: Callable, **options: Any) -> RemovableHandle:
        """As in torch; ``hook`` is called with a copy, as the input and as the output of this identity."""
        return super().register_forward_hook(partial(_on_output, hook), **options)

    def register_forward_pre_hook(self, hook: Callable, **options: Any) -> RemovableHandle:
        """As in torch; ``hook`` is called with a copy."""
        return super().register_forward_pre_hook(partial(_on_input, hook), **options)

    def register_full_backward_hook(self, hook: Callable, prepend: bool = False) -> RemovableHandle:
        """As in torch; ``hook`` is called with copies of the gradients."""
        return super().register_full_backward_hook(partial(_on_gradient, hook), prepend=prepend)

    def register_full_backward_pre_hook(self, hook: Callable, prepend: bool = False) -> RemovableHandle:
        """As in torch; ``hook`` is called with a copy of the gradient."""
        return super().register_full_backward_pre_hook(partial(_on_gradient, hook), prepend=prepend)

    register_backward_hook = register_full_backward_hook  # torch's older one would give the gradients, not copies


def _on_output(hook: Callable, point: Point, inputs: tuple, *others: Any) -> Tensor | None:
    *kwargs, value = others
    if value is None:  # an always_call hook after an earlier hook failed
        return hook(point, inputs, *kwargs, value)
    own = value.clone()
    returned = hook(point, (own,), *kwargs, own)
    return _passed_on(point, value, own if returned is None else returned)


def _on_input(hook: Callable, point: Point, inputs: tuple, *kwargs: Any) -> Any:
    own = inputs[0].clone()
    returned = hook(point, (own,), *kwargs)
    if kwargs and returned is not None:
        returned, _ = returned
    (new,) = returned if isinstance(returned, tuple) else (own if returned is None else returned,)
    new = _passed_on(point, inputs[0], new)
    return ((new,), *kwargs) if kwargs else new


def _on_gradient(hook: Callable, point: Point, *gradients: tuple) -> tuple | None:
    """Call a backward hook with copies of the gradients of input and output, or of the output alone.

    The value that it returns, or an edit in place of any of the copies, replaces the gradient at this point.
    """
    own = [tuple(None if g is None else g.clone() for g in given) for given in gradients]
    returned = hook(point, *own)
    if returned is None:
        # a fresh copy has version 0
        returned = next((given for given in own if any(g is not None and g._version for g in given)), None)
    new = returned[0] if isinstance(returned, tuple) else returned
    if new is None:
        return None
    old = next(given[0] for given in gradients if given[0] is not None)
    return (_passed_on(point, old, new),)


def _passed_on(point: Point, old: Tensor, new: Any) -> Tensor:
    """A copy of the value ``new`` that a hook gave for ``old``; later edits of the copy do not reach the hook's tensor.

    A real value may become complex of the same precision: coefficients of a polynomial are read from its values at
    roots of unity.

    Raises:
        ValueError: Another shape, dtype or device.
    """
    kept = isinstance(new, Tensor) and new.shape == old.shape and new.device == old.device
    if not kept or new.dtype not in (old.dtype, _complex(old.dtype)):
        where = f"the point {point.name}" if point.name else "a point of a part without a model"
        raise ValueError(f"a hook at {where} must keep shape, dtype and device: {_kind(old)}; got {_kind(new)}")
    return new.clone()


def _complex(dtype: torch.dtype) -> torch.dtype | None:
    """The complex dtype of the same precision, or None if models do not compute in it."""
    return {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(dtype)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)}, {value.dtype}, {value.device}"


def name_points(model: nn.Module) -> None:
    """Set the name of every point of a model to its path, for error messages."""
    for name, module in model.named_modules():
        if isinstance(module, Point):
            module.name = name


def hooked(*modules: nn.Module) -> bool:
    """Whether a hook of any kind is registered on one of the modules."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def listened(*points: nn.Module) -> bool:
    """Whether a hook of any kind is registered on one of the points, or another module stands in its place.

    Layers ask this to decide whether to compute a value that the fast implementation does not form (a pattern, a
    per-head result), so that the hooks of every point fire. In a compiled graph only hooks count that were registered
    before it was compiled; torch ignores later ones.
    """
    return hooked(*points) or any(type(p) is not Point for p in points)


@contextmanager
def intervene(model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """Context manager in which each named point's value passes through its function.

    The tensor that the function returns replaces the value; ``None`` keeps the tensor that it was given, with edits in
    place. That tensor is a copy (see :class:`Point`), so an edit acts at that point alone. On exit, also by an
    exception, these hooks are removed; hooks of others stay.

    Raises:
        ValueError: A name is not a point of the model (close matches are named), or a part of it is compiled; in the
            forward, if a value of another shape, dtype or device is returned.
    """
    refuse_compiled(model)
    points = {name: module for name, module in model.named_modules() if is_point(name)}
    for name in edits:
        if name not in points:
            close = difflib.get_close_matches(name, points, n=3) or sorted(points)[:3]
            raise ValueError(f"the model has no point {name!r}; close: {', '.join(close)}")
    with ExitStack() as stack:
        for name, edit in edits.items():
            handle = points[name].register_forward_hook(lambda _module, _inputs, out, edit=edit: edit(out))
            stack.callback(handle.remove)
        yield


def refuse_compiled(model: nn.Module) -> None:
    """Raise if the model is compiled: hooks that are added to a compiled module never fire, without any error.

    Raises:
        ValueError: ``torch.compile`` or ``.compile()`` was applied to the module or to a part of it.
    """
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            where = f"its part {name}" if name else "the model"
            raise ValueError(
                f"hooks do not fire inside a compiled graph and {where} is compiled; hook the eager module"
            )


def record(model: nn.Module, tokens: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Values of the named points in one forward without gradients, by name, plus ``"logits"``; all are copies."""
    values: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def hook(value: Tensor) -> None:
            values[name] = value

        return hook

    with torch.no_grad(), intervene(model, {name: keep(name) for name in names}):
        values["logits"] = model(tokens)
    return values


def is_point(name: str) -> bool:
    """Whether a module path is that of a named point."""
    return name.rpartition(".")[2].startswith("hook_")


def shared_copy(model: M) -> M:
    """A copy of a model with new modules and without hooks, which shares every parameter by identity."""
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return copied
