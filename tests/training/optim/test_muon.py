"""Muon: against torch.optim.Muon, its state, what it refuses, and the same update on any number of ranks."""

import multiprocessing
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.limits import assert_close, assert_within
from tnlm.training.optim import muon
from tnlm.training.optim.muon import Muon, balanced_owners, newton_schulz
from tnlm.training.optim.schedule import Schedule

SHAPES = [(30, 30), (7, 30), (30, 7), (5, 13), (1, 11)]


def matrices(shapes=SHAPES, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def gradients(step, shapes=SHAPES):
    """A drifting signal plus noise: old gradients must matter for a momentum test to mean anything."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.arange(r * c).reshape(r, c) / (r * c) - 0.1 * step).sin()
        + 0.5 * torch.randn((r, c), generator=generator)
        for r, c in shapes
    ]


def set_gradients(params, step):
    for p, g in zip(params, gradients(step, [tuple(p.shape) for p in params])):
        p.grad = g.to(p.dtype)


def fp64_newton_schulz(u, ns_coefficients=muon.COEFFICIENTS, ns_steps=5, eps=1e-7):
    """The iteration by its definition in float64, called as torch.optim.Muon calls it."""
    return defined_newton_schulz(u.double(), ns_steps, eps).to(u.dtype)


def defined_newton_schulz(u, steps, eps=1e-7):
    a, b, c = muon.COEFFICIENTS
    x = u / (u.norm() + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class TestAgainstTorch:
    """Per-step relative difference of the change of each matrix, as in torch.optim.Muon with adjust_lr 'original'."""

    @staticmethod
    def worst(monkeypatch, momenta, *, rescale):
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", fp64_newton_schulz)
        ours, theirs = matrices(), matrices()
        mine = Muon(ours, lr=0.02, ns_dtype="float64")
        oracle = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0, nesterov=True, ns_steps=5, adjust_lr_fn="original")
        worst, last = 0.0, momenta[0]  # relative to the update, a tenth of its parameter or less
        for step, mu in enumerate(momenta):
            mine.param_groups[0]["momentum"] = oracle.param_groups[0]["momentum"] = mu
            if rescale:
                for state in oracle.state.values():
                    state["momentum_buffer"] *= (1 - mu) / (1 - last)
            last = mu
            before = [p.detach().clone() for p in ours]
            with torch.no_grad():
                for p, q in zip(ours, theirs):
                    q.copy_(p)  # compare each step by itself
            set_gradients(ours, step)
            set_gradients(theirs, step)
            mine.step()
            oracle.step()
            for p, q, old in zip(ours, theirs, before):
                worst = max(worst, ((p - q).norm() / (p - old).norm()).item())
        return worst

    warmed = [Schedule(steps=60, warmdown_steps=0, momentum_warmup_steps=40).momentum(t) for t in range(60)]

    def test_constant_momentum(self, monkeypatch):
        assert_close(self.worst(monkeypatch, [0.95] * 60, rescale=False), 0.0, scale=10, dtype=torch.float32)

    def test_warmed_momentum_with_the_buffer_rescaled(self, monkeypatch):
        assert_close(self.worst(monkeypatch, self.warmed, rescale=True), 0.0, scale=10, dtype=torch.float32)

    def test_warmed_momentum_without_it_is_another_optimiser(self, monkeypatch):
        assert self.worst(monkeypatch, self.warmed, rescale=False) > 1e-2

    def test_bfloat16_direction(self):
        ours, theirs = matrices([(64, 48)]), matrices([(64, 48)])
        mine = Muon(ours, lr=0.02, momentum=0.95, ns_dtype="bfloat16")
        oracle = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0, momentum=0.95, adjust_lr_fn="original")
        for step in range(5):
            before = [p.detach().clone() for p in (*ours, *theirs)]
            set_gradients(ours, step)
            set_gradients(theirs, step)
            mine.step()
            oracle.step()
            a, b = (p - old for p, old in zip((*ours, *theirs), before))
            assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) >= 0.999


@pytest.mark.parametrize("shape", [(40, 40), (24, 60), (60, 24)])
def test_newton_schulz_keeps_singular_vectors_and_lifts_values(shape):
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    u = left @ torch.linspace(0.2, 5.0, left.shape[1], dtype=torch.float64).diag() @ right
    core = left.mT @ newton_schulz(u, dtype=torch.float64) @ right.mT
    values = core.diagonal()
    assert_close(core, values.diag())
    assert 0.3 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("shape", [(5, 13), (13, 5), (6, 12), (7, 11), (1, 3)])
def test_newton_schulz_is_its_definition(shape, steps):
    u = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(steps))
    expected = defined_newton_schulz(u, steps)
    assert_close(newton_schulz(u, steps=steps, dtype=torch.float64), expected)


@pytest.mark.parametrize("decades", [0, 3, 6])
def test_newton_schulz_through_the_gram_matrix_rounds_like_the_definition(decades):
    """Singular values over many decades: what the squares in a Gram matrix could lose."""
    generator = torch.Generator().manual_seed(decades)
    left, right = (torch.linalg.qr(torch.randn(n, 24, generator=generator, dtype=torch.float64))[0] for n in (24, 60))
    u = left @ torch.logspace(0, -decades, 24, dtype=torch.float64).diag() @ right.mT
    exact = defined_newton_schulz(u, 5)
    error, definition = (
        (x.double() - exact).norm() for x in (newton_schulz(u.float()), defined_newton_schulz(u.float(), 5))
    )
    assert error <= 3 * definition
    assert_within(error / exact.norm(), 1e-4)


@pytest.mark.parametrize("shape", [(1152, 1152), (1152, 4608), (4608, 1152)])
def test_newton_schulz_at_the_released_sizes_is_the_published_one(shape):
    """``X /= X.norm() + eps``, five times ``A = X @ X.T; B = A @ X; X = a * X + b * B + c * A @ B``, in float32.

    Ours groups the products otherwise. A step multiplies what it is given, errors included, by at most ``a``; the
    three products of a step each add an error of about ``sqrt(n) U`` of what they sum, ``n`` terms with independent
    roundings, ``|P| <= a + |b| + c`` at norm 1, and both sides have it: ``2 * 5 * 3 * sqrt(n) U (a + |b| + c)``, of
    the norm of the result, where the last steps no longer magnify: their factor at 1 is ``a + b + c``, about 0.7.
    """
    a, b, c = muon.COEFFICIENTS
    u = torch.randn(shape)
    x = u / (u.norm() + 1e-7)
    x = x.T if shape[0] > shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        product = gram @ x
        x = a * x + b * product + c * gram @ product
    x = x.T if shape[0] > shape[1] else x
    size = (a + abs(b) + c) * x.norm()
    assert_close((newton_schulz(u) - x).norm(), torch.tensor(0.0), roundings=2 * 5 * 3 * max(shape), scale=size)


def test_newton_schulz_of_a_stack_is_that_of_each():
    u = torch.randn(3, 5, 9, dtype=torch.float64)
    stacked = newton_schulz(u, dtype=torch.float64)
    for i in range(3):
        assert_close(stacked[i], newton_schulz(u[i], dtype=torch.float64))


def test_stacks_are_split_without_effect(monkeypatch):
    whole, split = matrices([(6, 4)] * 5), matrices([(6, 4)] * 5)
    for params, limit in ((whole, 1 << 26), (split, 2 * 24)):
        monkeypatch.setattr(muon, "_MAX_STACK", limit)
        set_gradients(params, 0)
        Muon(params).step()
    for p, q in zip(whole, split):
        assert_close(p, q)


def test_one_step_by_hand():
    """Orthogonal gradient: the iteration acts on its one singular value as a scalar polynomial."""
    p = nn.Parameter(torch.zeros(6, 2, dtype=torch.float64))
    q, _ = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64))
    p.grad = 3.0 * q
    Muon([p], lr=0.1, momentum=0.9, ns_dtype="float64").step()
    s = 2**-0.5  # 1.9 * 3 q has norm 1.9 * 3 * sqrt 2
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    # the published division is by the norm + 1e-7, which five steps amplify
    assert_within(p.detach() / (-0.1 * 3**0.5 * s * q) - 1, 1e-5)


def test_momentum_is_a_sum_and_weight_decay_is_decoupled():
    p = nn.Parameter(torch.ones(3, 4))
    optimiser = Muon([p], lr=0.5, momentum=0.8, weight_decay=0.1)
    for grad in (1.0, 10.0):
        p.grad = torch.full((3, 4), grad)
        optimiser.step()
    assert_close(optimiser.state[p]["momentum_buffer"], torch.full((3, 4), 10.8))
    p = nn.Parameter(torch.ones(3, 4))
    p.grad = torch.zeros(3, 4)
    Muon([p], lr=0.5, weight_decay=0.1).step()
    assert_close(p.detach(), torch.full((3, 4), 0.95))


def test_zero_and_absent_gradients_change_nothing():
    params = matrices()
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.zeros_like(params[0])
    optimiser = Muon(params)
    optimiser.step()
    for p, old in zip(params, before):
        assert torch.equal(p, old)
    assert list(optimiser.state) == [params[0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_step(bad):
    params = matrices()
    optimiser = Muon([(f"w{i}", p) for i, p in enumerate(params)])
    set_gradients(params, 0)
    optimiser.step()
    before = [p.detach().clone() for p in params]
    buffers = [optimiser.state[p]["momentum_buffer"].clone() for p in params]
    set_gradients(params, 1)
    params[3].grad[2, 4] = bad
    with pytest.raises(FloatingPointError, match="gradient of w3 is not finite; no parameter was changed"):
        optimiser.step()
    for p, old, buffer in zip(params, before, buffers):
        assert torch.equal(p, old)
        assert torch.equal(optimiser.state[p]["momentum_buffer"], buffer)


def test_a_caller_that_has_looked_at_the_gradients_may_skip_the_check():
    params = matrices()
    set_gradients(params, 0)
    params[3].grad[2, 4] = float("nan")
    Muon(params, check_finite=False).step()
    assert params[3].isnan().any()
    assert not params[2].isnan().any()


@pytest.mark.user_error
@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4), (4, 0), (0, 4)])
def test_only_matrices(shape):
    with pytest.raises(ValueError, match=r"got blocks.0.w of shape .*; give it to Adam"):
        Muon([("a", nn.Parameter(torch.ones(1, 3))), ("blocks.0.w", nn.Parameter(torch.ones(shape)))])


@pytest.mark.user_error
@pytest.mark.parametrize("name", ["embed.w_e", "unembed.w_u"])
def test_embedding_and_head_are_refused(name):
    with pytest.raises(ValueError, match=f"got {name}; .* to Adam"):
        Muon([(name, nn.Parameter(torch.ones(4, 3)))])


@pytest.mark.user_error
def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="ns_dtype must be one of auto, float32"):
        Muon(matrices(), ns_dtype="float16")


def test_reloaded_state_continues_exactly():
    straight, first = matrices(), matrices()
    one, two = Muon(straight), Muon(first)
    for step in range(5):
        for params, optimiser in ((straight, one), (first, two)):
            set_gradients(params, step)
            optimiser.step()
    again = [nn.Parameter(p.detach().clone()) for p in first]
    three = Muon(again)
    three.load_state_dict(two.state_dict())
    for params, optimiser in ((straight, one), (again, three)):
        set_gradients(params, 5)
        optimiser.step()
    for p, q in zip(straight, again):
        assert torch.equal(p, q)


@pytest.mark.user_error
def test_reload_under_another_dtype_is_refused():
    params = matrices()
    set_gradients(params, 0)
    saved = Muon(params)
    saved.step()
    with pytest.raises(ValueError, match=r"momentum of parameter 0 must be torch.bfloat16 .* got torch.float32"):
        Muon(matrices(dtype=torch.bfloat16)).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_no_rank_idles_and_work_is_balanced(world):
    shapes = [(30, 30)] * 6 + [(120, 30)] * 4
    owner = balanced_owners(shapes, world)
    assert set(owner) == set(range(world))
    cost = [sum(s[0] for s, o in zip(shapes, owner) if o == rank) for rank in range(world)]
    assert max(cost) - min(cost) <= 120


@pytest.mark.parametrize("world, dtype", [(2, "float32"), (3, "float32"), (4, "float32"), (4, "bfloat16")])
def test_ranks_share_the_work_and_agree_with_one(monkeypatch, world, dtype):
    """Ranks as threads: each has its own optimiser; all_reduce meets at a barrier."""
    shapes = [(8, 8)] * 6 + [(16, 4)] * 4
    alone = matrices(shapes)
    optimiser = Muon(alone, ns_dtype=dtype)
    for step in range(3):
        set_gradients(alone, step)
        optimiser.step()

    local, barrier, sent, worked = threading.local(), threading.Barrier(world), [None] * world, [0] * world

    def all_reduce(flat, group):
        sent[local.rank] = flat.clone()
        worked[local.rank] += int(flat.count_nonzero())
        barrier.wait(30)
        flat.copy_(torch.stack(sent).sum(0))
        barrier.wait(30)

    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda group: world,
        get_rank=lambda group: local.rank,
        all_reduce=all_reduce,
    )
    monkeypatch.setattr(muon, "dist", fake)
    results = [matrices(shapes) for _ in range(world)]

    def run(rank):
        local.rank = rank
        optimiser = Muon(results[rank], ns_dtype=dtype)
        for step in range(3):
            set_gradients(results[rank], step)
            optimiser.step()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert min(worked) > 0, "a rank idled"
    for rank in range(world):
        for p, q in zip(alone, results[rank]):
            # stacks differ, so products may round differently
            assert_close(q, p, dtype=getattr(torch, dtype), roundings=64)
        for q, first in zip(results[rank], results[0]):
            assert torch.equal(q, first), "ranks must agree bit for bit"


def _rank(rank, folder):
    torch.set_num_threads(1)  # the parent's threads do not survive the fork: a parallel region would wait for them
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    params = matrices([(30, 30), (7, 30), (30, 7)])
    optimiser = Muon(params)
    for step in range(5):
        set_gradients(params, step)
        optimiser.step()
    if rank == 0:
        torch.save({"params": [p.detach() for p in params], "muon": optimiser.state_dict()}, folder / "state.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_save_on_one_rank_and_reload(tmp_path):
    """Real gloo: five steps on two ranks, the state of rank 0 alone reloaded, and the sixth update of one process."""
    context = multiprocessing.get_context("fork")  # a fresh interpreter would import torch twice more
    ranks = [context.Process(target=_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    assert [process.exitcode for process in ranks] == [0, 0]
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    params = [nn.Parameter(p) for p in saved["params"]]
    optimiser = Muon(params)
    optimiser.load_state_dict(saved["muon"])
    straight = matrices([(30, 30), (7, 30), (30, 7)])
    reference = Muon(straight)
    for step in range(6):
        set_gradients(straight, step)
        reference.step()
    set_gradients(params, 5)
    optimiser.step()
    for p, q in zip(params, straight):
        assert_close(p, q)


def test_the_costliest_matrix_goes_to_the_rank_with_the_least_work():
    """Costs 4 s^2 l + 2 s^3 with sides s <= l: 10 x 10 costs 6,000, 4 x 9 costs 704, 2 x 50 costs 816, 5 x 5 750."""
    assert balanced_owners([(4, 9), (10, 10), (50, 2), (5, 5)], 2) == [1, 0, 1, 1]
    assert balanced_owners([(4, 9), (10, 10), (50, 2), (5, 5)], 3) == [2, 0, 1, 2]
