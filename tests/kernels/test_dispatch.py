"""What "auto" chooses, what a named implementation refuses, and what autocast does."""

import warnings

import pytest
import torch

from tests.kernels.attention_cases import FUNCTIONS, operands
from tnlm.kernels import IMPLEMENTATIONS, bilinear_attention, dispatch, squared_attention, tiles

BOTH = pytest.mark.parametrize("kind", FUNCTIONS)


@pytest.mark.parametrize(
    "device, dtype, seq, d, capability, chosen",
    [
        ("cpu", torch.float32, 128, 64, None, "eager"),
        ("cpu", torch.float32, 129, 64, None, "chunked"),
        ("cpu", torch.float32, 97, 32, None, "chunked"),
        ("cpu", torch.bfloat16, 320, 256, None, "eager"),
        ("cpu", torch.bfloat16, 321, 256, None, "chunked"),
        ("cpu", torch.float64, 1024, 64, None, "eager"),
        ("cpu", torch.complex64, 1024, 64, None, "eager"),
        ("cuda", torch.bfloat16, 1, 64, (9, 0), "triton"),
        ("cuda", torch.float16, 1024, 128, (8, 0), "triton"),
        ("cuda", torch.bfloat16, 1024, 48, (12, 0), "triton"),
        ("cuda", torch.float64, 1024, 64, (9, 0), "eager"),
    ],
)
def test_what_auto_chooses(device, dtype, seq, d, capability, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes = {"seq_q": seq, "d_qk": d, "d_v": d, "scores": 2**18 + 1}
    assert dispatch.choose(torch.device(device), dtype, **sizes) == chosen
    if device == "cpu":
        assert dispatch.choose(torch.device(device), dtype, **{**sizes, "scores": 2**18}) == "eager"


@pytest.mark.parametrize(
    "d, capability, installed, reason",
    [
        (64, (9, 0), False, "needs the package triton"),
        (256, (9, 0), True, "needs d_qk and d_v up to 128, got 256 and 256"),
        (64, (7, 5), True, "has no tiles for this GPU"),
    ],
)
def test_the_slower_path_on_a_gpu_is_announced_once(d, capability, installed, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", installed)
    dispatch._notice.cache_clear()
    gpu, sizes = torch.device("cuda"), {"seq_q": 1024, "d_qk": d, "d_v": d, "scores": 2**30}
    with pytest.warns(RuntimeWarning, match=f"attention runs chunked: .*{reason}"):
        assert dispatch.choose(gpu, torch.bfloat16, **sizes) == "chunked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(gpu, torch.bfloat16, **sizes) == "chunked"


@BOTH
def test_auto_calls_what_it_chose(kind, monkeypatch):
    tensors = operands(kind, seq_q=300, dtype=torch.float32)
    few, short = [x[:1, :, :2] for x in tensors], [x[:, :68] for x in tensors]
    for given, implementation in ((tensors, "chunked"), (few, "eager"), (short, "eager")):
        assert torch.equal(FUNCTIONS[kind](*given), FUNCTIONS[kind](*given, implementation=implementation))


@pytest.mark.user_error
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(
    "implementation, dtype, message",
    [
        ("triton", torch.float32, 'implementation="triton" needs a CUDA tensor, got cpu; use "chunked", or "auto"'),
        ("chunked", torch.complex64, 'implementation="chunked" needs a real dtype, got torch.complex64; use "eager"'),
        ("fast", torch.float32, r"implementation must be one of \('auto', .*, got 'fast'"),
    ],
)
def test_a_named_implementation_runs_or_says_why(kind, implementation, dtype, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[kind](*operands(kind, seq_q=3, dtype=dtype), implementation=implementation)


def test_every_implementation_has_a_name():
    assert IMPLEMENTATIONS == ("auto", "eager", "chunked", "recurrent", "triton")


@pytest.mark.user_error
@pytest.mark.parametrize(
    "change, message",
    [
        ({"q1": (2, 5, 12)}, r"q1 must be \(batch, seq, n_head, d\), got shape \(2, 5, 12\)"),
        ({"k2": (2, 5, 3, 6)}, "k2 must have the d_qk of q1, got 6 and 4"),
        ({"q2": (2, 6, 3, 4)}, r"q2 must share .* seq with q1, got q2=\(2, 6, 3, 4\), .* q1=\(2, 5, 3, 4\)"),
        ({"k1": (2, 6, 3, 4)}, r"k1 must share .* seq with v, got k1=\(2, 6, 3, 4\), v=\(2, 5, 3, 10\)"),
        ({"k1": (1, 5, 3, 4)}, r"k1 must share batch and n_head with v"),
        ({"q1": (2, 5, 1, 4)}, r"q1 must share batch and n_head with v"),
        (dict.fromkeys(("q1", "k1", "q2", "k2"), (2, 5, 3, 0)), "d_qk must be at least 1"),
    ],
)
def test_shapes_that_do_not_fit(change, message):
    shapes = dict.fromkeys(("q1", "k1", "q2", "k2"), (2, 5, 3, 4)) | {"v": (2, 5, 3, 10)} | change
    with pytest.raises(ValueError, match=message):
        bilinear_attention(*(torch.zeros(shape) for shape in shapes.values()))


@pytest.mark.user_error
def test_dtypes_and_devices_that_do_not_fit():
    q, k, v = (x.detach() for x in operands("squared", seq_q=3, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"q must have the dtype of v, got q=torch.bfloat16, v=torch.float32"):
        squared_attention(q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="k must be on the device of v, got k on meta, v on cpu"):
        squared_attention(q, k.to("meta"), v)
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"v must be one of float32, .*complex128, got {dtype}; cast it"):
            squared_attention(q.to(dtype), k.to(dtype), v.to(dtype))


@BOTH
@pytest.mark.parametrize("implementation", ["eager", "chunked", "recurrent"])
def test_autocast_casts_the_operands_and_not_the_sums(kind, implementation):
    tensors = operands(kind, seq_q=130, dtype=torch.float32)
    mixed = [x.bfloat16() if i % 2 else x for i, x in enumerate(tensors)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = FUNCTIONS[kind](*mixed, implementation=implementation)
    want = FUNCTIONS[kind](*(x.bfloat16() for x in tensors), implementation=implementation)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


@BOTH
def test_backward_under_autocast_stays_in_float32(kind):
    tensors = operands(kind, seq_q=130, dtype=torch.float32)
    out = FUNCTIONS[kind](*tensors, implementation="chunked")
    plain = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))


def test_autocast_leaves_float64_alone():
    tensors = operands("squared", seq_q=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = squared_attention(*tensors)
    assert torch.equal(out, squared_attention(*tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_width_to_128_has_tiles(dtype, target, kind):
    for d_qk in range(1, 129):
        for d_v in (1, 16, 17, 32, 48, 64, 65, 128):
            row, (width_qk, width_v) = tiles.lookup(target, kind, dtype, d_qk, d_v)
            assert d_qk <= width_qk
            assert d_v <= width_v
            assert min(row.forward.block_m, row.dq.block_m, row.dkv.block_n) >= 16
    assert tiles.lookup(target, kind, dtype, 64, 128)[1] == (64, 128)
    assert tiles.lookup(target, kind, dtype, 24, 24)[1] == (32, 32)


@pytest.mark.user_error
def test_no_tiles_past_128():
    with pytest.raises(ValueError, match=r'needs d_qk and d_v up to 128, got 64 and 160; use "chunked"'):
        tiles.lookup("sm_90", "bilinear", torch.bfloat16, 64, 160)


def test_auto_decides_by_sizes_that_are_all_different(monkeypatch):
    """Batch 2, heads 3, 5 queries and 7 keys of width 4, values of width 10: 210 scores."""
    asked = []
    monkeypatch.setattr(dispatch, "choose", lambda device, dtype, **sizes: asked.append((dtype, sizes)) or "eager")
    tensors = operands("bilinear", seq_q=5, seq_k=7, dtype=torch.float32)
    bilinear_attention(*tensors)
    assert asked == [(torch.float32, {"seq_q": 5, "d_qk": 4, "d_v": 10, "scores": 2 * 3 * 5 * 7})]
