"""Networks against torch.einsum in float64: equations crossed with every optimiser, then what einsum lacks."""

import itertools
import string
import sys
import weakref

import opt_einsum
import pytest
import torch

from tests.limits import assert_close
from tnlm.network import Network

OPTIMISERS = [
    *["auto", "auto-hq", "optimal", "dp", "greedy"],
    *["random-greedy", "random-greedy-128", "branch-all", "branch-2", "branch-1"],
]
EQUATIONS = [
    "ij,jk,kl->il",
    "ij,jk,kl->li",
    "oh,hi,hj,bi,bj->bo",
    "bi,bj,bk->bijk",
    "bi,bi,bi->b",
    "bi,ij,bj,->b",
    "ii,ij->j",
    "iij,jk->ik",
    "ii->",
    "i,j->ij",
    "ij->ji",
    "ij->",
    "ij,kl->ik",
    ",->",
    "ni,nj,nij,oni->oj",
    "ab,bc,cd,de,ea->",
]
SIZE = dict(zip(string.ascii_lowercase, itertools.cycle([2, 3, 5, 7, 4]), strict=False))


def build(equation, *, size=SIZE, dtype=torch.float64):
    """Network and einsum arguments of an equation; the first operand becomes the input ``x``."""
    terms, output = equation.split("->")
    tensors = [torch.randn([size[i] for i in term], dtype=dtype) for term in terms.split(",")]
    operands = [(t, tuple(term)) for t, term in zip(tensors, terms.split(","), strict=True)]
    operands[0] = ("x", operands[0][1])
    return Network(operands, tuple(output)), tensors


@pytest.mark.parametrize("optimize", OPTIMISERS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_equals_einsum(equation, optimize):
    net, tensors = build(equation)
    expected = torch.einsum(equation, *tensors)
    assert_close(net.contract({"x": tensors[0]}, optimize=optimize), expected)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_interleaved_arguments_and_complex_numbers(equation):
    net, tensors = build(equation, dtype=torch.complex128)
    expected = torch.einsum(equation, *tensors)
    assert_close(opt_einsum.contract(*net.args(x=tensors[0])), expected)
    assert_close(net.contract({"x": tensors[0]}), expected)


def nested(dtype=torch.float64):
    """``y = A x``, used twice with different indices and once on its own diagonal with an outer batch index."""
    a, b = torch.randn(3, 5, dtype=dtype), torch.randn(7, 3, 3, dtype=dtype)
    inner = Network([(a, "out in"), ("x", "batch in")], "batch out", name="inner")
    outer = Network([(b, "o i j"), (inner, "n i"), (inner, "n j"), ("scale", "n")], "n o", name="outer")
    return outer, a, b


def test_nested_network_equals_its_flat_form_and_einsum():
    net, a, b = nested()
    inputs = {"x": torch.randn(2, 5, dtype=torch.float64), "scale": torch.randn(2, dtype=torch.float64)}
    y = inputs["x"] @ a.T
    expected = torch.einsum("oij,ni,nj,n->no", b, y, y, inputs["scale"])
    flat = net.flatten()
    assert (len(net.operands), len(flat.operands)) == (4, 6)
    for value in (net.contract(inputs), flat.contract(inputs), opt_einsum.contract(*net.args(**inputs))):
        assert_close(value, expected)


def test_diagonal_of_a_nested_network():
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    product = Network([(a, "i j"), (b, "j k")], "i k")
    trace = Network([(product, "i i")], "")
    for net in (trace, trace.flatten()):
        assert_close(net.contract(), (a @ b).trace())


def test_flat_copies_sum_their_inner_indices_apart():
    inner = Network([(torch.ones(3, dtype=torch.float64), "i")], "")
    square = Network([(inner, ""), (inner, ""), (torch.ones(2, dtype=torch.float64), "i")], "i")
    flat = square.flatten()
    assert [indices for _, indices in flat.operands] == [("i.1",), ("i.2",), ("i",)]
    assert flat.contract().tolist() == [9.0, 9.0]


def test_flat_names_do_not_meet_names_that_look_like_copies():
    a, b, c = (torch.randn(3, dtype=torch.float64) for _ in range(3))
    inner = Network([(a, "o"), (b, "i")], "o")
    net = Network([(inner, "o"), (inner, "i"), (c, "i.1"), (inner, "i.2")], "o")
    expected = a * (a.sum() * c.sum() * a.sum()) * b.sum() ** 3
    for either in (net, net.flatten(), Network([(net.flatten(), "o"), (c, "i.1")], "o i.1").flatten()):
        value = either.contract()
        assert_close(value, expected if value.ndim == 1 else torch.outer(expected, c))


def test_shared_node_is_contracted_once(monkeypatch):
    net, *_ = nested()
    equations = []
    contract = opt_einsum.contract
    monkeypatch.setattr(opt_einsum, "contract", lambda eq, *a, **kw: equations.append(eq) or contract(eq, *a, **kw))
    net.contract({"x": torch.randn(2, 5), "scale": torch.randn(2)})
    assert len(equations) == 2


def test_results_are_freed_after_their_last_use(monkeypatch):
    net = Network([("x", "i")], "i")
    for _ in range(9):
        net = Network([(net, "i"), (torch.eye(3), "i j")], "j")
    alive, most = weakref.WeakSet(), []
    contract = opt_einsum.contract

    def watched(*args, **kwargs):
        result = contract(*args, **kwargs)
        alive.add(result)
        most.append(len(alive))
        return result

    monkeypatch.setattr(opt_einsum, "contract", watched)
    with torch.no_grad():
        net.contract({"x": torch.ones(3)})
    assert len(most) == 10
    assert max(most) == 2


def test_gradients_reach_tensors_and_inputs():
    net, a, _ = nested()
    a.requires_grad_()
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, s, _: net.contract({"x": x, "scale": s}), (x, scale, a))


def test_cost_is_known_before_the_inputs():
    net, *_ = nested()
    cost = net.cost({"n": 2})
    # y: 2 * 3 * 5 multiply-adds; the largest array is the pairwise (n, o, i) or (n, i, j) one
    assert cost.flops >= 2 * 2 * 3 * 5
    assert cost.bytes == 8 * cost.largest
    assert len(cost.path) == 2
    assert f"{cost.bytes:,} bytes" in str(cost)


def test_nested_results_count_as_intermediates():
    inner = Network([("x", "i"), ("y", "j")], "i j", name="inner")
    net = Network([(inner, "i j"), ("x", "i"), ("y", "j")], "")
    assert net.cost({"i": 101, "j": 103}).largest == 101 * 103
    inputs = {"x": torch.ones(101, dtype=torch.float64), "y": torch.ones(103, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"inner inside network builds an array of 10,403 elements \(83,224 bytes"):
        net.contract(inputs, max_bytes=10_000)


def bilinear(d, d_hidden, *, device="cpu"):
    new = {"device": device}
    w_l, w_r, w_d = torch.empty(d_hidden, d, **new), torch.empty(d_hidden, d, **new), torch.empty(d, d_hidden, **new)
    return Network([(w_d, "o h"), (w_l, "h i"), (w_r, "h j")], "o i j")


def test_known_sizes_of_dense_tensors():
    assert bilinear(128, 512).cost().largest == 8_388_608
    large = bilinear(768, 3072, device="meta").cost()
    assert (large.largest, large.bytes) == (1_811_939_328, 4 * 1_811_939_328)
    with pytest.raises(ValueError, match="8,388,608 elements"):
        bilinear(128, 512).contract(max_bytes=4 * 10**6)
    with pytest.raises(ValueError, match="1,811,939,328 elements"):
        bilinear(768, 3072, device="meta").contract()


def test_two_layer_composite_is_estimated():
    layer = bilinear(768, 5, device="meta")
    composite = Network([(layer, "o a b"), (layer, "a i j"), (layer, "b k l")], "o i j k l", name="composite")
    assert composite.cost().largest == 768**5 == 267_181_325_549_568
    with pytest.raises(ValueError, match="composite builds an array of 267,181,325,549,568 elements"):
        composite.contract()


def test_budget_of_one_byte_refuses_and_the_exact_budget_does_not():
    net, tensors = build("ij,jk,kl->il")
    cost = net.cost({"i": SIZE["i"]})
    with pytest.raises(ValueError, match=f"{cost.largest:,} elements.*max_bytes=1;"):
        net.contract({"x": tensors[0]}, max_bytes=1)
    net.contract({"x": tensors[0]}, max_bytes=cost.bytes)
    said = rf"{cost.largest} elements \({cost.bytes} bytes in torch.float64\), over max_bytes={cost.bytes - 1}; "
    with pytest.raises(ValueError, match=said):
        net.contract({"x": tensors[0]}, max_bytes=cost.bytes - 1)


def test_nothing_is_allocated_before_the_refusal(monkeypatch):
    net, tensors = build("ij,jk,kl->il")
    monkeypatch.setattr(torch.Tensor, "to", lambda *_: pytest.fail("a tensor was cast"))
    monkeypatch.setattr(opt_einsum, "contract", lambda *_, **__: pytest.fail("something was contracted"))
    with pytest.raises(ValueError, match="over max_bytes"):
        net.contract({"x": tensors[0]}, max_bytes=1)


@pytest.mark.parametrize("optimize", ["auto", "greedy", "random-greedy", "auto-hq"])
def test_more_than_52_indices(optimize):
    size = 40
    rungs = [torch.randn(2, 2, 2, dtype=torch.float64) for _ in range(size)]
    ladder = Network([(t, f"a{n} a{n + 1} b{n}") for n, t in enumerate(rungs)] * 2, "a0")
    value = torch.ones(2, 2, dtype=torch.float64)
    for t in reversed(rungs):
        value = torch.einsum("ijb,ijb,j->i", t, t, value[0]).expand(2, 2)
    assert len({index for _, indices in ladder.operands for index in indices}) == 2 * size + 1
    assert_close(ladder.contract(optimize=optimize), value[0])
    assert_close(opt_einsum.contract(*ladder.args()), value[0])


@pytest.mark.parametrize("optimize", OPTIMISERS)
def test_zero_size_axes(optimize):
    a, b, c = torch.ones(3, 0), torch.ones(0, 5), torch.ones(5, 2)
    net = Network([(a, "i j"), (b, "j k"), (c, "k l")], "i l")
    assert torch.equal(net.contract(optimize=optimize), torch.zeros(3, 2))
    batch = Network([("x", "b k"), (c, "k l"), (c, "m l")], "b m")
    assert batch.contract({"x": torch.ones(0, 5)}, optimize=optimize, max_bytes=64).shape == (0, 5)
    assert batch.cost({"b": 0}, optimize=optimize).flops <= batch.cost({"b": 1}, optimize=optimize).flops


@pytest.mark.parametrize(
    "dtypes, result",
    [
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.float64, torch.complex64), torch.complex128),
        ((torch.int64, torch.float32), torch.float32),
    ],
)
@pytest.mark.parametrize("terms", [("i j", "j k", "i k"), ("i", "", "i")])
def test_mixed_dtypes_are_promoted_whatever_the_shapes(dtypes, result, terms):
    x, y = ((torch.randn([3] * len(term.split())) * 4).to(d) for term, d in zip(terms, dtypes, strict=False))
    net = Network([(x, terms[0]), ("y", terms[1])], terms[2])
    symbols = [term.replace(" ", "") for term in terms]
    expected = torch.einsum(f"{symbols[0]},{symbols[1]}->{symbols[2]}", x.to(result), y.to(result))
    assert_close(net.contract({"y": y}), expected)
    assert all(value.dtype is result for value in net.args(y=y)[:-1:2])


def test_accumulation_dtype_reaches_nested_networks():
    third = torch.tensor([1.0, 1.0, 1.0]) / 3
    inner = Network([(third, "i"), (third, "i")], "")
    net = Network([(inner, ""), (torch.ones((), dtype=torch.float64), "")], "")
    assert net.contract().item() == (third.double() ** 2).sum().item()


def test_autocast_does_not_reach_the_contraction():
    x = torch.randn(3, 4, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        net = Network([(x.to(dtype), "i j"), ("y", "j k")], "i k")
        expected = net.contract({"y": x.mT.to(dtype)})
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(net.contract({"y": x.mT.to(dtype)}), expected)


def test_compiled_network_reuses_its_path(monkeypatch):
    net, a, b = nested()
    run = net.compile({"n": 2}, optimize="random-greedy")
    tight = net.compile({"n": 2}, max_bytes=1000)
    monkeypatch.setattr("tnlm.contraction_path.get_path_fn", lambda _: pytest.fail("planned again"))
    for batch in (2, 1, 6):
        x, scale = torch.randn(batch, 5, dtype=torch.float64), torch.randn(batch, dtype=torch.float64)
        expected = torch.einsum("oij,ni,nj,n->no", b, x @ a.T, x @ a.T, scale)
        assert_close(run({"x": x, "scale": scale}), expected)
    with pytest.raises(ValueError, match="over max_bytes"):
        tight({"x": torch.randn(99, 5), "scale": torch.randn(99)})


def test_flatten_refuses_with_the_count():
    net = Network([("x", "i")], "i")
    for _ in range(40):
        net = Network([(net, "i"), (net, "i")], "i", name="power")
    with pytest.raises(ValueError, match=rf"has {2**40:,} operands, over max_operands=4,096"):
        net.flatten()
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(net.contract({"x": x}), x)


def test_inputs_and_sizes_are_listed():
    net, *_ = nested()
    assert net.inputs == {"x": ("batch", "in"), "scale": ("n",)}
    assert net.sizes == {"o": 7, "i": 3, "j": 3}
    assert repr(net) == "Network(outer: x (batch in), scale (n) -> n o; 4 operands, 2 nodes)"
    many = Network([(f"x{n}", "i") for n in range(9)], "i")
    assert repr(many) == "Network(network: x0 (i), x1 (i), x2 (i), and 6 more -> i; 9 operands, 1 nodes)"


ONE = torch.ones(1, 5)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "operands, output, match",
    [
        ([], "", "needs at least one operand"),
        ([([1.0], "i")], "i", "must be a Tensor, a Network or the name of an input, got list"),
        ([(ONE, "ij")], "ij", "has 2 axes but 1 index names"),
        ([(ONE, "i j")], "k", "output index 'k' of network stands in no operand"),
        ([(ONE, "i j")], "i i", "may stand once in the output"),
        ([(torch.ones(2, 1), "i j"), (torch.ones(3, 2), "j k")], "i k", "size 3 in operand 1.*size 1 in operand 0"),
        ([(ONE, "i i")], "i", "index 'i' has size 5 .* but size 1 in operand 0"),
        ([(Network([(ONE, "i j")], "i j"), "j"), (ONE, "i j")], "i", "has 2 axes but 1 index names"),
        ([(Network([(ONE, "i j")], "i j"), "i j"), (torch.ones(3), "j")], "i", "a size of 1 does not broadcast"),
    ],
)
def test_refused_networks(operands, output, match):
    with pytest.raises(ValueError, match=match):
        Network(operands, output)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "inputs, match",
    [
        ({"x": torch.ones(2, 5)}, "takes inputs .*: missing scale; unknown none"),
        ({"x": torch.ones(2, 5), "scale": torch.ones(2), "y": ONE}, "missing none; unknown y"),
        ({"x": ONE[0], "scale": torch.ones(2)}, r"input 'x' of outer must be a tensor \(.* in\), got shape"),
        ({"x": 1.0, "scale": torch.ones(2)}, "must be a tensor .* got float"),
        ({"x": torch.ones(2, 1), "scale": torch.ones(2)}, r"size 1 in input 'x' of shape \(2, 1\) but size 5"),
        ({"x": torch.ones(2, 5), "scale": torch.ones(1)}, "has size 1 in input 'scale'.*does not broadcast"),
        ({"x": torch.ones(2, 5, device="meta"), "scale": torch.ones(2)}, "must be on one device, got .'cpu', 'meta'."),
    ],
)
def test_refused_inputs(inputs, match):
    net, *_ = nested()
    with pytest.raises(ValueError, match=match):
        net.contract(inputs)
    with pytest.raises(ValueError, match=match):
        net.args(**inputs)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "sizes, optimize, message",
    [
        ({"batch": 2}, None, "names index 'batch', which outer does not have"),
        ({"i": 4}, None, "index 'i' has size 4 in sizes but size 3"),
        ({"n": 2}, "best", "got 'best'"),
        ({"n": 2}, [((0, 1),)], r"each of the 2 nodes of outer.*got 1 paths"),
        ({"n": 2}, [((0, 1),), ((0, 1, 2, 3),)], r"a path of outer .* two operands at a time, got \(\(0, 1, 2, 3\),\)"),
    ],
)
def test_refused_plans(sizes, optimize, message):
    net, *_ = nested()
    with pytest.raises(ValueError, match=message):
        net.cost(sizes, **({} if optimize is None else {"optimize": optimize}))


@pytest.mark.user_error
def test_a_plan_without_a_size_is_refused():
    net, *_ = nested()
    with pytest.raises(ValueError, match=r"size of 'n' in outer is unknown; pass sizes=\{'n': ...\}"):
        Network([("x", "n"), (net, "n o")], "o", name="outer").cost()


def test_same_input_name_is_one_tensor_in_every_node():
    inner = Network([("x", "i j"), (torch.ones(3), "i")], "j")
    net = Network([(inner, "j"), ("x", "k l")], "j k l")
    x = torch.randn(3, 2)
    assert_close(net.contract({"x": x}), torch.einsum("j,kl->jkl", x.sum(0), x))
    assert net.cost({"l": 2}).largest == 2 * 3 * 2


def test_to_quimb_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "quimb", None)
    net, tensors = build("ij,jk,kl->il")
    with pytest.raises(ImportError, match=r"pip install quimb"):
        net.to_quimb(x=tensors[0])


@pytest.mark.parametrize("equation", ["oh,hi,hj,bi,bj->bo", "bi,bi,bi->b"])
def test_to_quimb(equation):
    pytest.importorskip("quimb", reason="optional: pip install quimb")
    net, tensors = build(equation)
    value = net.to_quimb(x=tensors[0]).contract(output_inds=net.output)
    assert_close(getattr(value, "data", value), torch.einsum(equation, *tensors))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_quimb_contracts_to_the_output_by_itself_and_tags_say_what_a_tensor_is(equation):
    pytest.importorskip("quimb", reason="optional: pip install quimb")
    net, tensors = build(equation)
    drawn = net.to_quimb(x=tensors[0])
    assert_close(torch.as_tensor(getattr(drawn.contract(), "data", drawn.contract())), torch.einsum(equation, *tensors))
    assert [set(t.tags) for t in drawn] == [
        {"network", "x" if position == 0 else f"operand{position}"} for position in range(len(tensors))
    ]


def plain_function(inputs, output, sizes, memory_limit):
    """An optimiser that is a function: from left to right."""
    return [(0, 1), *[(0, left) for left in range(len(inputs) - 2, 0, -1)]]


OBJECTS = {
    "RandomGreedy": lambda: opt_einsum.RandomGreedy(max_repeats=4),
    "DynamicProgramming": lambda: opt_einsum.DynamicProgramming(),
    "BranchBound": lambda: opt_einsum.BranchBound(nbranch=2),
    "function": lambda: plain_function,
    "cotengra": lambda: pytest.importorskip("cotengra", reason="optional").ReusableHyperOptimizer(
        methods=["greedy"], max_repeats=4, parallel=False
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_optimiser_object_equals_einsum(equation, kind):
    optimize = OBJECTS[kind]()
    net, tensors = build(equation)
    expected = torch.einsum(equation, *tensors)
    assert_close(net.contract({"x": tensors[0]}, optimize=optimize), expected)
    sizes = {index: tensors[0].shape[axis] for axis, index in enumerate(net.inputs["x"])}
    cost = net.cost(sizes, optimize=optimize)
    assert_close(net.contract({"x": tensors[0]}, optimize=cost.path), expected)
    assert_close(net.compile(sizes, optimize=optimize)({"x": tensors[0]}), expected)


@pytest.mark.parametrize("kind", OBJECTS)
def test_one_optimiser_object_serves_contractions_of_several_sizes(kind):
    optimize = OBJECTS[kind]()
    net, (x, b, c) = build("ij,jk,kl->il")
    for rows in (2, 5):
        wide = x[:1].expand(rows, -1)
        assert_close(net.contract({"x": wide}, optimize=optimize), torch.einsum("ij,jk,kl->il", wide, b, c))


@pytest.mark.parametrize("kind", OBJECTS)
def test_each_network_of_a_nest_gets_an_optimiser_of_its_own(kind):
    a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in [(2, 3), (4, 3), (4, 5)])
    d, x = (torch.randn(shape, dtype=torch.float64) for shape in [(5, 7), (2, 7)])
    inner = Network([(a, "i j"), (b, "k j"), (c, "k l")], "i l", name="inner")
    outer = Network([(inner, "i l"), (inner, "i m"), ("x", "i n"), (d, "l n")], "l m", name="outer")
    dense = torch.einsum("ij,kj,kl->il", a, b, c)
    expected = torch.einsum("il,im,in,ln->lm", dense, dense, x, d)
    assert_close(outer.contract({"x": x}, optimize=OBJECTS[kind]()), expected)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "optimize, match",
    [
        (opt_einsum.RandomGreedy, "not its class"),
        (None, "optimize must be .* got None"),
        (7, "optimize must be .* got 7"),
        ([[(0, 9)]], r"contract its 3 operands to one, .* \[\(0, 9\)\]"),
        ([[(0, 0)]], "two operands at a time"),
        ([[(0, 1)]], "contract its 3 operands to one"),
        ([[(0, 1, 2)]], "two operands at a time"),
        ([["ab"]], "two operands at a time"),
        ([7], "two operands at a time"),
        (lambda *_: None, "two operands at a time"),
    ],
)
def test_an_optimiser_that_cannot_be_used_is_refused(optimize, match):
    net, tensors = build("ij,jk,kl->il")
    with pytest.raises(ValueError, match=match):
        net.contract({"x": tensors[0]}, optimize=optimize)
