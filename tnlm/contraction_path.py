"""The order in which an einsum contracts its operands, two at a time: chosen by an optimiser or given, and its cost."""

import contextlib
import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import opt_einsum
from opt_einsum.paths import get_path_fn

Path = tuple[tuple[int, ...], ...]
Optimizer = Callable[[list[frozenset[str]], frozenset[str], dict[str, int], int | None], Iterable[Sequence[int]]]
"""An object or function that chooses a path, called as opt_einsum and cotengra do: inputs, output, sizes, None."""
Optimize = str | Sequence[Path] | Optimizer
"""How to choose paths: the name of an optimiser, an optimiser, or the ``path`` of a `Cost`."""


@dataclass(frozen=True)
class Cost:
    """FLOPs, memory and path of a contraction, known before anything is allocated.

    ``flops`` counts a multiply-add as two; ``largest`` is the number of elements of the largest array that is
    built, results of nested networks and the output included, and ``bytes`` its size in the accumulation dtype.
    ``path`` holds one opt_einsum path for every network, nested ones first and this one last: a flat network has
    exactly one.
    """

    flops: int
    largest: int
    bytes: int
    path: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.flops:,} FLOPs, largest intermediate {self.largest:,} elements ({self.bytes:,} bytes)"


class Step(NamedTuple):
    """Plan of one einsum: its equation, the order of its pairwise contractions, and their cost."""

    equation: str
    path: Path
    flops: int
    largest: int


def one_choice_each(optimize: Optimize, count: int, name: str) -> Sequence[Any]:
    """``optimize`` for each of the ``count`` einsums of a network called ``name``.

    Raises:
        ValueError: It is no name of an optimiser, no optimiser, and not one path for each einsum.
    """
    if isinstance(optimize, str):
        try:
            get_path_fn(optimize)
        except KeyError as error:
            raise ValueError(f"optimize must name an opt_einsum optimiser, got {optimize!r}: {error.args[0]}") from None
        return [optimize] * count
    if callable(optimize) and not isinstance(optimize, type):
        return [optimize] * count
    if isinstance(optimize, Sequence) and len(optimize) == count:
        return optimize
    got = f"{len(optimize)} paths" if isinstance(optimize, Sequence) else repr(optimize)
    raise ValueError(
        "optimize must be the name of an optimiser, an optimiser (an object, not its class) or one path for "
        f"each of the {count} nodes of {name}, as in cost().path; got {got}"
    )


def plan_step(
    name: str, operands: Sequence[Sequence[str]], output: Sequence[str], sizes: Mapping[str, int], choice: Any
) -> Step:
    """Plan the pairwise contractions of one einsum.

    Args:
        name: Of the network, for errors.
        operands: The index names of each operand.
        choice: The name of an optimiser, an optimiser or a path.

    Raises:
        ValueError: The path does not contract all operands, one or two at a time.
    """
    indices = list(dict.fromkeys(index for names in operands for index in names))
    symbol = {index: opt_einsum.get_symbol(number) for number, index in enumerate(indices)}
    terms = ["".join(symbol[index] for index in names) for names in operands]
    equation = f"{','.join(terms)}->{''.join(symbol[index] for index in output)}"
    shapes = [tuple(sizes[index] for index in names) for names in operands]
    if callable(choice):
        choice = _choose_path(operands, output, sizes, choice)
    if not isinstance(choice, str):
        choice = _checked_path(name, len(operands), choice)
    path, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=choice)
    return Step(equation, tuple(map(tuple, path)), int(info.opt_cost), int(info.largest_intermediate))


def _choose_path(
    operands: Sequence[Sequence[str]], output: Sequence[str], sizes: Mapping[str, int], optimizer: Optimizer
) -> Iterable[Sequence[int]]:
    """The path that an optimiser chooses, or a copy of it; one or two operands leave no choice."""
    if len(operands) <= 2:
        return [range(len(operands))]
    with contextlib.suppress(TypeError):  # cotengra's hold a module or a pool, and cannot be copied
        optimizer = copy.deepcopy(optimizer)
    return optimizer([frozenset(names) for names in operands], frozenset(output), dict(sizes), None)


def _checked_path(name: str, count: int, path: Any) -> Path:
    """``path``, which must contract ``count`` operands, one or two at a time.

    A step of more would leave the order inside it to torch, and its memory could not be foreseen.
    """
    left = count
    try:
        steps = tuple(tuple(map(operator.index, step)) for step in path)
    except TypeError:
        steps = ()
    for step in steps:
        if not 1 <= len(set(step)) == len(step) <= 2 or not all(0 <= position < left for position in step):
            left = 0
            break
        left -= len(step) - 1
    if left != 1:
        raise ValueError(
            f"a path of {name} must contract its {count} operands to one, two operands at a time, got {path!r}"
        )
    return steps
