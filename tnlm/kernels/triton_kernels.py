"""The three Triton kernels: forward, dQ, and dK with dV, each for bilinear and squared attention.

One program computes one tile of the output and loops over tiles of the other axis. There is no softmax, so tiles are
independent and rows loaded as zeros add exactly zero: only tiles on the diagonal need a mask. Squared attention does
not read q2 and k2. Scores are formed and
scaled in float32 and rounded to the input dtype before the next matmul. Operands are (batch, seq, n_head, d) through
strides, the last axis contiguous. Query i sees key j when ``j <= i + seq_k - seq_q``.

Prefixes: ``o_`` offsets (int32), ``b_`` register tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(base, rows, seq, stride, WIDTH: tl.constexpr):
    """Rows of one head as [rows, WIDTH]; rows from `seq` on are zeros."""
    offsets = rows[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(base + offsets, mask=rows[:, None] < seq, other=0.0)


@triton.jit
def _store(base, rows, seq, stride, WIDTH: tl.constexpr, value):
    offsets = rows[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=rows[:, None] < seq)


@triton.jit
def _head(n_head, stride_batch, stride_head):
    """Element offset of this program's batch and head, int64."""
    pid = tl.program_id(0)
    batch = (pid // n_head).to(tl.int64)
    head = (pid % n_head).to(tl.int64)
    return batch * stride_batch + head * stride_head


@triton.jit
def _forward_keys(
    b_acc, b_q1, b_q2, k1, k2, v, scale, o_m, start, stop, seq_q, seq_k, stride_kt, stride_vt,
    D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n in range(start, stop, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        b_k1 = _tile(k1, o_n, seq_k, stride_kt, D_QK)
        b_s1 = tl.dot(b_q1, tl.trans(b_k1), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if SQUARED:
            b_p = b_s1 * b_s1 * scale
        else:
            b_k2 = _tile(k2, o_n, seq_k, stride_kt, D_QK)
            b_p = b_s1 * tl.dot(b_q2, tl.trans(b_k2), input_precision=PRECISION) * scale
        if MASK:
            b_p = tl.where(o_m[:, None] + (seq_k - seq_q) >= o_n[None, :], b_p, 0.0)
        b_v = _tile(v, o_n, seq_k, stride_vt, D_V)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc


@triton.jit(do_not_specialize=["n_head", "seq_q", "seq_k"])
def forward_kernel(
    q1, k1, q2, k2, v, out, scale, n_head, seq_q, seq_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh,
    D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention output. Program (batch * head, query tile); tiles that see the most keys come first."""
    m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    o_m = m + tl.arange(0, BLOCK_M)
    q_head = _head(n_head, stride_qb, stride_qh)
    k_head = _head(n_head, stride_kb, stride_kh)
    v += _head(n_head, stride_vb, stride_vh)
    k1 += k_head
    k2 += k_head
    b_q1 = _tile(q1 + q_head, o_m, seq_q, stride_qt, D_QK)
    if SQUARED:
        b_q2 = b_q1
    else:
        b_q2 = _tile(q2 + q_head, o_m, seq_q, stride_qt, D_QK)
    b_acc = tl.zeros([BLOCK_M, D_V], tl.float32)
    if CAUSAL:
        # Keys below `diagonal` are seen by the whole tile.
        diagonal = tl.maximum(m + seq_k - seq_q + 1, 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(m + BLOCK_M + seq_k - seq_q, seq_k)
    else:
        diagonal = seq_k
        stop = seq_k
    b_acc = _forward_keys(
        b_acc, b_q1, b_q2, k1, k2, v, scale, o_m, 0, diagonal, seq_q, seq_k, stride_kt, stride_vt,
        D_QK, D_V, BLOCK_N, False, SQUARED, PRECISION,
    )  # fmt: skip
    if CAUSAL:
        b_acc = _forward_keys(
            b_acc, b_q1, b_q2, k1, k2, v, scale, o_m, diagonal, stop, seq_q, seq_k, stride_kt, stride_vt,
            D_QK, D_V, BLOCK_N, True, SQUARED, PRECISION,
        )  # fmt: skip
    _store(out + _head(n_head, stride_ob, stride_oh), o_m, seq_q, stride_ot, D_V, b_acc)


@triton.jit
def _dq_keys(
    b_dq1, b_dq2, b_q1, b_q2, b_g, k1, k2, v, scale, o_m, start, stop, seq_q, seq_k, stride_kt, stride_vt,
    D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n in range(start, stop, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        b_v = _tile(v, o_n, seq_k, stride_vt, D_V)
        b_a = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        if MASK:
            b_a = tl.where(o_m[:, None] + (seq_k - seq_q) >= o_n[None, :], b_a, 0.0)
        b_k1 = _tile(k1, o_n, seq_k, stride_kt, D_QK)
        b_s1 = tl.dot(b_q1, tl.trans(b_k1), input_precision=PRECISION)
        if SQUARED:
            b_ds1 = (2.0 * b_a * b_s1).to(b_k1.dtype)
        else:
            b_k2 = _tile(k2, o_n, seq_k, stride_kt, D_QK)
            b_ds2 = (b_a * b_s1).to(b_k1.dtype)
            b_dq2 = tl.dot(b_ds2, b_k2, b_dq2, input_precision=PRECISION)
            b_s2 = tl.dot(b_q2, tl.trans(b_k2), input_precision=PRECISION)
            b_ds1 = (b_a * b_s2).to(b_k1.dtype)
        b_dq1 = tl.dot(b_ds1, b_k1, b_dq1, input_precision=PRECISION)
    return b_dq1, b_dq2


@triton.jit(do_not_specialize=["n_head", "seq_q", "seq_k"])
def dq_kernel(
    q1, k1, q2, k2, v, grad, dq1, dq2, scale, n_head, seq_q, seq_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_db, stride_dt, stride_dh,
    D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries. Program (batch * head, query tile), in the order of the forward."""
    m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    o_m = m + tl.arange(0, BLOCK_M)
    q_head = _head(n_head, stride_qb, stride_qh)
    k_head = _head(n_head, stride_kb, stride_kh)
    d_head = _head(n_head, stride_db, stride_dh)
    v += _head(n_head, stride_vb, stride_vh)
    k1 += k_head
    k2 += k_head
    b_g = _tile(grad + _head(n_head, stride_gb, stride_gh), o_m, seq_q, stride_gt, D_V)
    b_q1 = _tile(q1 + q_head, o_m, seq_q, stride_qt, D_QK)
    b_dq1 = tl.zeros([BLOCK_M, D_QK], tl.float32)
    if SQUARED:
        b_q2 = b_q1
        b_dq2 = b_dq1
    else:
        b_q2 = _tile(q2 + q_head, o_m, seq_q, stride_qt, D_QK)
        b_dq2 = tl.zeros([BLOCK_M, D_QK], tl.float32)
    if CAUSAL:
        diagonal = tl.maximum(m + seq_k - seq_q + 1, 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(m + BLOCK_M + seq_k - seq_q, seq_k)
    else:
        diagonal = seq_k
        stop = seq_k
    b_dq1, b_dq2 = _dq_keys(
        b_dq1, b_dq2, b_q1, b_q2, b_g, k1, k2, v, scale, o_m, 0, diagonal, seq_q, seq_k, stride_kt, stride_vt,
        D_QK, D_V, BLOCK_N, False, SQUARED, PRECISION,
    )  # fmt: skip
    if CAUSAL:
        b_dq1, b_dq2 = _dq_keys(
            b_dq1, b_dq2, b_q1, b_q2, b_g, k1, k2, v, scale, o_m, diagonal, stop, seq_q, seq_k,
            stride_kt, stride_vt, D_QK, D_V, BLOCK_N, True, SQUARED, PRECISION,
        )  # fmt: skip
    _store(dq1 + d_head, o_m, seq_q, stride_dt, D_QK, b_dq1)
    if not SQUARED:
        _store(dq2 + d_head, o_m, seq_q, stride_dt, D_QK, b_dq2)


@triton.jit
def _dkv_queries(
    b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, q1, q2, grad, scale, o_n, start, stop, seq_q, seq_k,
    stride_qt, stride_gt, D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr,
    MASK: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Transposed tiles, [BLOCK_N, BLOCK_M], so that P^T and dS^T are left operands straight from registers.
    for m in range(start, stop, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        b_q1 = _tile(q1, o_m, seq_q, stride_qt, D_QK)
        b_g = _tile(grad, o_m, seq_q, stride_gt, D_V)
        b_s1 = tl.dot(b_k1, tl.trans(b_q1), input_precision=PRECISION)
        b_a = tl.dot(b_v, tl.trans(b_g), input_precision=PRECISION) * scale
        if MASK:
            visible = o_m[None, :] + (seq_k - seq_q) >= o_n[:, None]
            b_s1 = tl.where(visible, b_s1, 0.0)
            b_a = tl.where(visible, b_a, 0.0)
        if SQUARED:
            b_p = b_s1 * b_s1 * scale
            b_ds1 = 2.0 * b_a * b_s1
        else:
            b_q2 = _tile(q2, o_m, seq_q, stride_qt, D_QK)
            b_s2 = tl.dot(b_k2, tl.trans(b_q2), input_precision=PRECISION)
            b_p = b_s1 * b_s2 * scale
            b_ds1 = b_a * b_s2
            b_ds2 = b_a * b_s1
            b_dk2 = tl.dot(b_ds2.to(b_q2.dtype), b_q2, b_dk2, input_precision=PRECISION)
        b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv, input_precision=PRECISION)
        b_dk1 = tl.dot(b_ds1.to(b_q1.dtype), b_q1, b_dk1, input_precision=PRECISION)
    return b_dk1, b_dk2, b_dv


@triton.jit(do_not_specialize=["n_head", "seq_q", "seq_k"])
def dkv_kernel(
    q1, k1, q2, k2, v, grad, dk1, dk2, dv, scale, n_head, seq_q, seq_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_db, stride_dt, stride_dh, stride_eb, stride_et, stride_eh,
    D_QK: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Program (batch * head, key tile); keys seen by the most queries come first."""
    n = tl.program_id(1) * BLOCK_N
    o_n = n + tl.arange(0, BLOCK_N)
    q_head = _head(n_head, stride_qb, stride_qh)
    k_head = _head(n_head, stride_kb, stride_kh)
    d_head = _head(n_head, stride_db, stride_dh)
    q1 += q_head
    q2 += q_head
    grad += _head(n_head, stride_gb, stride_gh)
    b_v = _tile(v + _head(n_head, stride_vb, stride_vh), o_n, seq_k, stride_vt, D_V)
    b_k1 = _tile(k1 + k_head, o_n, seq_k, stride_kt, D_QK)
    b_dk1 = tl.zeros([BLOCK_N, D_QK], tl.float32)
    b_dv = tl.zeros([BLOCK_N, D_V], tl.float32)
    if SQUARED:
        b_k2 = b_k1
        b_dk2 = b_dk1
    else:
        b_k2 = _tile(k2 + k_head, o_n, seq_k, stride_kt, D_QK)
        b_dk2 = tl.zeros([BLOCK_N, D_QK], tl.float32)
    if CAUSAL:
        # The first query that sees key n, and the first tile whose queries all see the whole tile of keys.
        first = tl.maximum(n - (seq_k - seq_q), 0) // BLOCK_M * BLOCK_M
        everyone = tl.maximum(n + BLOCK_N - 1 - (seq_k - seq_q), 0)
        full = tl.minimum((everyone + BLOCK_M - 1) // BLOCK_M * BLOCK_M, seq_q)
        b_dk1, b_dk2, b_dv = _dkv_queries(
            b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, q1, q2, grad, scale, o_n, first, full, seq_q, seq_k,
            stride_qt, stride_gt, D_QK, D_V, BLOCK_M, True, SQUARED, PRECISION,
        )  # fmt: skip
    else:
        full = 0
    b_dk1, b_dk2, b_dv = _dkv_queries(
        b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, q1, q2, grad, scale, o_n, full, seq_q, seq_q, seq_k,
        stride_qt, stride_gt, D_QK, D_V, BLOCK_M, False, SQUARED, PRECISION,
    )  # fmt: skip
    _store(dk1 + d_head, o_n, seq_k, stride_dt, D_QK, b_dk1)
    if not SQUARED:
        _store(dk2 + d_head, o_n, seq_k, stride_dt, D_QK, b_dk2)
    _store(dv + _head(n_head, stride_eb, stride_eh), o_n, seq_k, stride_et, D_V, b_dv)
