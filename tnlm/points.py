"""Named points: ``nn.Identity`` submodules called ``hook_*``, free in training, where hooks observe and intervene."""

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def hooked(*modules: nn.Module) -> bool:
    """Whether a hook of any kind is registered on one of the modules."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def listened(*points: nn.Module) -> bool:
    """Whether a hook of any kind is registered on one of the points, or another module stands in its place.

    A quantity that the fast path never forms (a pattern, a per-head result) is computed only when this holds, so that
    a point which is present always fires. In a compiled graph that means hooks registered before it was compiled;
    torch ignores later ones.
    """
    return hooked(*points) or any(type(p) is not nn.Identity for p in points)


@contextmanager
def intervene(model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """While open, each named point's value passes through its function; ``None`` leaves it unchanged.

    The hooks are removed on the way out, whatever happened inside, and nobody else's are touched.

    Raises:
        ValueError: A name is not a point of the model (close matches are named), or a part of it is compiled.
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
    """Hooks that are added to a compiled module never fire, in silence.

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
    """One forward without gradients; the value of each named point, plus ``"logits"``."""
    values: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def hook(value: Tensor) -> None:
            values[name] = value

        return hook

    with torch.no_grad(), intervene(model, {name: keep(name) for name in names}):
        values["logits"] = model(tokens)
    return values


def is_point(name: str) -> bool:
    """Whether a module path ends in a named point."""
    return name.rpartition(".")[2].startswith("hook_")


def shared_copy(model: M) -> M:
    """A copy of the structure: modules of its own, every parameter shared by identity, none of the original's hooks."""
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return copied
