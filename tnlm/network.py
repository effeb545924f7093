"""Tensor networks with named indices: one einsum each, nested if a result is used more than once.

A `Network` is a product of tensors summed over the indices that its output does not name. opt_einsum plans the
order of the contraction and runs it. This module adds named inputs instead of arrays, networks as operands of another,
equal sizes (opt_einsum lets a size 1 broadcast), a strict limit of memory (opt_einsum's ``memory_limit`` only guides
the path and may be exceeded), and one accumulation dtype.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import opt_einsum
import torch
from torch import Tensor

from tnlm.contraction_path import Cost, Optimize, Step, one_choice_each, plan_step
from tnlm.kernels.precision import without_autocast

DEFAULT_MAX_BYTES = 2**30


class Network:
    """A tensor network: operands with named indices, and the indices of the output.

    >>> net = Network([(w_d, "d_out d_hidden"), (w_l, "d_hidden d_in"), ("x", "batch d_in")], "batch d_out")
    >>> y = net.contract({"x": x})

    Args:
        operands: Pairs ``(operand, index names)``. An operand is a Tensor, a `Network` (contracted once, however
            often the same object is used), or a str: the name of an input that is supplied later. One name is one
            tensor, wherever it stands. Index names are words separated by spaces, or a sequence of str, one per
            axis.
        output: The index names of the result, each at most once. Indices that it does not name are summed. An index
            may stand in any number of operands, and more than once in one operand (its diagonal).
        name: Name of this network in error messages.

    Indices are local: an operand that is a Network is known by the names given beside it. Tensors are kept, not
    copied, so gradients reach them; ``operands`` and :meth:`args` give views of them, and so of a model's
    parameters. Everything is contracted in one accumulation dtype, the promotion (``torch.promote_types``) of the
    dtypes of all tensors and inputs, nested ones included; it does not depend on shapes nor on autocast, and is the
    dtype of the result.

    Raises:
        ValueError: Two sizes for one index (size 1 included: nothing broadcasts), a number of names unlike the
            number of axes, an output index that no operand has, or one that is repeated.
    """

    def __init__(
        self,
        operands: Iterable[tuple["Tensor | Network | str", str | Sequence[str]]],
        output: str | Sequence[str],
        *,
        name: str = "network",
    ) -> None:
        self.operands = tuple((operand, _names(indices)) for operand, indices in operands)
        self.output = _names(output)
        self.name = name
        if not self.operands:
            raise ValueError(f"{name} needs at least one operand, got none")
        for position, (operand, indices) in enumerate(self.operands):
            if not isinstance(operand, Tensor | Network | str):
                raise ValueError(
                    f"operand {position} of {name} must be a Tensor, a Network or the name of an input, "
                    f"got {type(operand).__name__}"
                )
            rank = _rank(operand)
            if rank is not None and rank != len(indices):
                raise ValueError(
                    f"operand {position} of {name} has {rank} axes but {len(indices)} index names {indices}; "
                    "separate the names by spaces"
                )
        available = {index for _, indices in self.operands for index in indices}
        if missing := [index for index in self.output if index not in available]:
            raise ValueError(f"output index {missing[0]!r} of {name} stands in no operand; known: {sorted(available)}")
        if len(set(self.output)) < len(self.output):
            raise ValueError(f"an index may stand once in the output of {name}, got {self.output}")
        self._known = self._check_own_sizes()

    def __repr__(self) -> str:
        shown = [f"{name} ({' '.join(indices)})" for name, indices in self.inputs.items()]
        if len(shown) > 4:
            shown[3:] = [f"and {len(shown) - 3} more"]
        return (
            f"Network({self.name}: {', '.join(shown) or 'no inputs'} -> {' '.join(self.output) or 'a scalar'}; "
            f"{len(self.operands)} operands, {len(self._nodes())} nodes)"
        )

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Name and index names of every input, those of nested networks included."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self._nodes():
            for operand, indices in node.operands:
                if isinstance(operand, str):
                    found.setdefault(operand, indices)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each index of this network that its tensors already fix."""
        return self._bind({}, {})[self]

    def cost(self, sizes: Mapping[str, int] | None = None, *, optimize: Optimize = "auto") -> Cost:
        """FLOPs, memory and path of a contraction, without doing it; bytes are counted in the dtype of the tensors.

        Args:
            sizes: Sizes of the indices of this network that only inputs have, such as ``{"batch": 2}``.
            optimize: Name of an opt_einsum optimiser; an optimiser, such as ``opt_einsum.RandomGreedy()``,
                ``cotengra.HyperOptimizer()`` or a function of the same arguments; or the ``path`` of an earlier `Cost`
                of this network. Optimisers of opt_einsum serve one contraction, so each nested network gets a copy.
                Those of cotengra cannot be copied: nested networks need ``cotengra.ReusableHyperOptimizer()``.

        Raises:
            ValueError: An index of unknown size, an unknown optimiser, or a path that does not fit.
        """
        steps = self._plan(self._bind({}, sizes or {}), optimize).values()
        largest = max(step.largest for step in steps)
        return Cost(
            flops=sum(step.flops for step in steps),
            largest=largest,
            bytes=largest * self._dtype({}).itemsize,
            path=tuple(step.path for step in steps),
        )

    def contract(
        self,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        optimize: Optimize = "auto",
    ) -> Tensor:
        """Contract the network to one tensor; each nested network is contracted once.

        Args:
            inputs: A tensor for every name in `inputs`, and no other.
            max_bytes: Bound on the largest array that is built, in bytes of the accumulation dtype. It is checked
                before anything is allocated. Several arrays, and the copies that a matrix product needs, live at
                one time.
            optimize: As in `cost`. Every choice gives equal values up to rounding.

        Returns:
            The axes of ``output``, in the accumulation dtype; differentiable. With a single operand it may be a
            view of it.

        Raises:
            ValueError: Missing or unknown inputs, unequal sizes, tensors on different devices, or an array over
                ``max_bytes``.
        """
        inputs = dict(inputs or {})
        self._check_inputs(inputs)
        plan = self._plan(self._bind({name: tuple(t.shape) for name, t in inputs.items()}, {}), optimize)
        dtype = self._dtype(inputs)
        self._check_budget(plan, dtype, max_bytes)
        uses = Counter(
            operand for node in self._nodes() for operand, _ in node.operands if isinstance(operand, Network)
        )
        results: dict[Network, Tensor] = {}
        for node, step in plan.items():
            tensors = []
            for operand, _ in node.operands:
                if isinstance(operand, Network):
                    tensors.append(results[operand])
                    uses[operand] -= 1
                    if not uses[operand]:
                        del results[operand]
                else:
                    tensors.append(_tensor(operand, inputs).to(dtype))
            with without_autocast(tensors[0].device.type):
                results[node] = opt_einsum.contract(step.equation, *tensors, optimize=step.path, backend="torch")
        return results[self]

    def compile(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        optimize: Optimize = "auto",
    ) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """A function of the inputs that contracts by a path which is chosen once, here.

        The path is chosen for ``sizes``, as in `cost`. The function takes other sizes too; equal sizes and
        ``max_bytes`` are checked in every call, as in `contract`.
        """
        return functools.partial(self.contract, max_bytes=max_bytes, optimize=self.cost(sizes, optimize=optimize).path)

    def flatten(self, max_operands: int = 4096) -> "Network":
        """The same function as one einsum, with nested networks written out, once for every use.

        Indices that a nested network sums get a fresh name for every copy (``d_head``, ``d_head.1``, ...).

        Raises:
            ValueError: More than ``max_operands`` operands, counted before anything is written out. The count grows
                as the power of the depth that the degree of a layer is; `contract` needs no copies.
        """
        return Network([(op, indices) for _, op, indices in self._leaves(max_operands)], self.output, name=self.name)

    def _leaves(self, max_operands: int = 4096) -> list[tuple["Network", "Operand", tuple[str, ...]]]:
        """The operands of the flat network, each with the network that it stands in and its index names."""
        count = self._count()
        if count > max_operands:
            raise ValueError(
                f"{self.name} as one einsum has {count:,} operands, over max_operands={max_operands:,}; "
                "contract the nested network, which computes each shared node once"
            )
        taken: set[str] = set()
        numbers: dict[str, itertools.count[int]] = {}

        def rename(index: str) -> str:
            fresh = index
            while fresh in taken:
                fresh = f"{index}.{next(numbers.setdefault(index, itertools.count(1)))}"
            taken.add(fresh)
            return fresh

        leaves: list[tuple[Network, Operand, tuple[str, ...]]] = []

        def expand(network: Network, bound: dict[str, str]) -> None:
            for operand, indices in network.operands:
                for index in indices:
                    if index not in bound:
                        bound[index] = rename(index)
                outer = tuple(bound[index] for index in indices)
                if isinstance(operand, Network):
                    expand(operand, dict(zip(operand.output, outer, strict=True)))
                else:
                    leaves.append((network, operand, outer))

        expand(self, {index: rename(index) for index in self.output})
        return leaves

    def args(self, **inputs: Tensor) -> list[Any]:
        """opt_einsum's interleaved arguments: ``opt_einsum.contract(*net.args(x=x))`` is ``net.contract({"x": x})``.

        A nested network is flattened. Names that are no Python identifiers are passed as
        ``net.args(**{"ln1.hook_scale": r})``.

        Raises:
            ValueError: As `flatten`, and as `contract` for inputs and sizes.
        """
        flat = self.flatten()
        flat._check_inputs(inputs)
        flat._bind({name: tuple(t.shape) for name, t in inputs.items()}, {})
        dtype = flat._dtype(inputs)
        arguments: list[Any] = []
        for operand, indices in flat.operands:
            arguments += [_tensor(operand, inputs).to(dtype), list(indices)]
        return [*arguments, list(self.output)]

    def to_quimb(self, **inputs: Tensor) -> Any:
        """A ``quimb.tensor.TensorNetwork`` of the flat network, one tensor per operand, for drawing or compression.

        Each tensor carries two tags: the name of the network that it stands in, and the name of the input, or
        ``operand7`` for the tensor at position 7. ``contract()`` of the result keeps the output of this network, and
        sums all other indices; other methods of quimb need ``output_inds=net.output`` where an index of the output
        stands in several tensors.

        Raises:
            ImportError: quimb is not installed.
            ValueError: As `args`.
        """
        try:
            import quimb.tensor
        except ImportError as error:
            raise ImportError("to_quimb needs quimb, which is optional: pip install quimb") from error

        class Open(quimb.tensor.TensorNetwork):
            """A network that knows its output: quimb takes for it what stands in one tensor only."""

            _EXTRA_PROPS = ("_output",)

            def contract(self, tags: Any = ..., output_inds: Any = None, **options: Any) -> Any:
                if output_inds is None and tags in (..., all):
                    output_inds = self._output
                return super().contract(tags, output_inds=output_inds, **options)

        arguments = self.args(**inputs)
        tensors = []
        for position, (network, operand, indices) in enumerate(self._leaves()):
            tag = operand if isinstance(operand, str) else f"operand{position}"
            tensors.append(quimb.tensor.Tensor(arguments[2 * position], inds=indices, tags=(network.name, tag)))
        made = Open(tensors)
        made._output = self.output
        return made

    def _nodes(self) -> list["Network"]:
        """This network and all nested ones, each once, operands before the networks that use them."""
        order: dict[Network, None] = {}

        def visit(network: Network) -> None:
            if network not in order:
                for operand, _ in network.operands:
                    if isinstance(operand, Network):
                        visit(operand)
                order[network] = None

        visit(self)
        return list(order)

    def _count(self) -> int:
        """Number of operands of the flat network, without building it."""
        counts: dict[Network, int] = {}
        for node in self._nodes():
            counts[node] = sum(counts[op] if isinstance(op, Network) else 1 for op, _ in node.operands)
        return counts[self]

    def _check_own_sizes(self) -> dict[str, int]:
        """Sizes that tensors and nested networks fix; `_bind` finds those that depend on inputs."""
        classes = _Classes()
        for position, (operand, indices) in enumerate(self.operands):
            for axis, index in enumerate(indices):
                if isinstance(operand, Tensor):
                    classes.assign((self, index), operand.shape[axis], self._where(position))
                elif isinstance(operand, Network) and operand.output[axis] in operand._known:
                    classes.assign((self, index), operand._known[operand.output[axis]], self._where(position))
        return classes.sizes(self)

    def _where(self, position: int) -> str:
        return f"operand {position} of {self.name} ({' '.join(self.operands[position][1])})"

    def _bind(self, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> dict["Network", dict[str, int]]:
        """Known size of every index of every node; raises a ValueError if one index has two sizes.

        One index has many names: inside and outside a nested network, and on the axes of an input that is used in
        several places. These are merged into one class, and a class has one size.
        """
        classes = _Classes()
        for node in self._nodes():
            for position, (operand, indices) in enumerate(node.operands):
                for axis, index in enumerate(indices):
                    if isinstance(operand, Tensor):
                        classes.assign((node, index), operand.shape[axis], node._where(position))
                    elif isinstance(operand, Network):
                        classes.merge((node, index), (operand, operand.output[axis]))
                    else:
                        classes.merge((node, index), (operand, axis))
        for name, shape in shapes.items():
            for axis, size in enumerate(shape):
                classes.assign((name, axis), size, f"input {name!r} of shape {shape}")
        for index, size in sizes.items():
            if not any(index in indices for _, indices in self.operands):
                raise ValueError(f"sizes names index {index!r}, which {self.name} does not have")
            classes.assign((self, index), size, "sizes")
        return {node: classes.sizes(node) for node in self._nodes()}

    def _plan(self, sizes: Mapping["Network", Mapping[str, int]], optimize: Optimize) -> dict["Network", Step]:
        """How each node is contracted, operands before the networks that use them."""
        nodes = self._nodes()
        for node in reversed(nodes):
            for index in (index for _, indices in node.operands for index in indices):
                if index not in sizes[node]:
                    raise ValueError(f"size of {index!r} in {node.name} is unknown; pass sizes={{{index!r}: ...}}")
        choices = one_choice_each(optimize, len(nodes), self.name)
        return {
            node: plan_step(node.name, [names for _, names in node.operands], node.output, sizes[node], choice)
            for node, choice in zip(nodes, choices, strict=True)
        }

    def _check_budget(self, plan: Mapping["Network", Step], dtype: torch.dtype, max_bytes: int) -> None:
        node, worst = max(plan.items(), key=lambda item: item[1].largest)
        needed = worst.largest * dtype.itemsize
        if needed > max_bytes:
            where = self.name if node is self else f"{node.name} inside {self.name}"
            raise ValueError(
                f"contracting {where} builds an array of {worst.largest:,} elements ({needed:,} bytes in {dtype}), "
                f"over max_bytes={max_bytes:,}; raise max_bytes, choose another optimize, or contract a smaller part"
            )

    def _check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        wanted = self.inputs
        if set(inputs) != set(wanted):
            missing = ", ".join(name for name in wanted if name not in inputs) or "none"
            unknown = ", ".join(name for name in inputs if name not in wanted) or "none"
            raise ValueError(f"{self.name} takes inputs {list(wanted)}: missing {missing}; unknown {unknown}")
        for name, tensor in inputs.items():
            if not isinstance(tensor, Tensor) or tensor.ndim != len(wanted[name]):
                got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"input {name!r} of {self.name} must be a tensor ({' '.join(wanted[name])}), got {got}"
                )
        devices = {tensor.device for tensor in self._tensors(inputs)}
        if len(devices) > 1:
            raise ValueError(f"all tensors of {self.name} must be on one device, got {sorted(map(str, devices))}")

    def _tensors(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        constants = [operand for node in self._nodes() for operand, _ in node.operands if isinstance(operand, Tensor)]
        return [*constants, *inputs.values()]

    def _dtype(self, inputs: Mapping[str, Tensor]) -> torch.dtype:
        """Accumulation dtype; torch's default if there is no tensor (the cost of inputs alone)."""
        dtypes = [tensor.dtype for tensor in self._tensors(inputs)] or [torch.get_default_dtype()]
        return functools.reduce(torch.promote_types, dtypes)


Operand = Tensor | Network | str


class _Classes:
    """Disjoint sets of indices that must agree, each with at most one size and the place that fixed it."""

    def __init__(self) -> None:
        self._parent: dict[tuple[Any, Any], tuple[Any, Any]] = {}
        self._fixed: dict[tuple[Any, Any], tuple[int, str]] = {}

    def _find(self, item: tuple[Any, Any]) -> tuple[Any, Any]:
        while (parent := self._parent.setdefault(item, item)) != item:
            self._parent[item] = self._parent[parent]
            item = parent
        return item

    def sizes(self, network: Network) -> dict[str, int]:
        """The known sizes of a network's own indices."""
        found = {
            index: self._fixed.get(self._find((network, index))) for _, names in network.operands for index in names
        }
        return {index: fixed[0] for index, fixed in found.items() if fixed is not None}

    def assign(self, item: tuple[Any, Any], size: int, where: str) -> None:
        root = self._find(item)
        known, place = self._fixed.setdefault(root, (size, where))
        if known != size:
            raise ValueError(
                f"index {item[1]!r} has size {size} in {where} but size {known} in {place}; "
                "a shared index needs one size, and a size of 1 does not broadcast"
            )

    def merge(self, item: tuple[Any, Any], other: tuple[Any, Any]) -> None:
        root, target = self._find(item), self._find(other)
        self._parent[root] = target
        if root != target and root in self._fixed:
            self.assign(item, *self._fixed.pop(root))


def _names(indices: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(indices.split()) if isinstance(indices, str) else tuple(indices)


def _rank(operand: Operand) -> int | None:
    """Number of axes; None for an input, which has one axis for each index name."""
    if isinstance(operand, Tensor):
        return operand.ndim
    return len(operand.output) if isinstance(operand, Network) else None


def _tensor(operand: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs[operand] if isinstance(operand, str) else operand
