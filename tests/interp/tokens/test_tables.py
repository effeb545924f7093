"""Blockwise top-k against sorting the whole matrix, and the table of a path against dense products."""

import sys

import pytest
import torch

from tests.interp.builders import noise
from tnlm.interp import LowRank, top_tokens

KEYS = {"max": lambda v: -v, "min": lambda v: v, "abs": lambda v: -abs(v)}


def brute(w, ids, k, which, keep_self, by):
    pairs = [(s, t, float(w[t, s])) for s in ids for t in ids if keep_self or s != t]
    pairs.sort(key=lambda p: KEYS[which](p[2]))
    if by == "all":
        return pairs[:k]
    return [p for s in ids for p in [p for p in pairs if p[0] == s][:k]]


@pytest.mark.parametrize("which", ["max", "min", "abs"])
@pytest.mark.parametrize("by", ["source", "all"])
@pytest.mark.parametrize("block", [2**24, 20])
def test_ranking_is_that_of_the_sorted_matrix(monkeypatch, which, by, block):
    monkeypatch.setattr("tnlm.interp.ranking._BLOCK", block)
    factors = LowRank(noise(11, 3), noise(3, 11, seed=1))
    ids = [0, 2, 3, 5, 7, 8, 9]
    for keep_self in (False, True):
        want = brute(factors.tensor(), ids, 4, which, keep_self, by)
        for matrix in (factors, factors.tensor()):
            got = top_tokens(matrix, 4, tokens=ids, by=by, which=which, keep_self=keep_self)
            rows = [tuple(r) for r in got.itertuples(index=False)]
            assert [r[:2] for r in rows] == [r[:2] for r in want]
            assert [r[2] for r in rows] == pytest.approx([r[2] for r in want])


def test_asking_for_more_than_there_is():
    w = noise(5, 5)
    assert len(top_tokens(w, 99, by="all")) == 20
    assert len(top_tokens(w, 99)) == 20
    assert len(top_tokens(w, 3, tokens=torch.tensor([], dtype=torch.long))) == 0


def test_without_pandas_the_table_is_a_list(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    w = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    assert top_tokens(w, 1) == [(0, 1, 1.0), (1, 0, 2.0)]
    assert top_tokens(w, 1)[0]._fields == ("source", "target", "value")


@pytest.mark.user_error
def test_bad_arguments_are_refused():
    w = noise(5, 5)
    for call, text in [
        (lambda: top_tokens(noise(5, 4), 1), r"matrix must be square, one row and column per token id, got \(5, 4\)"),
        (lambda: top_tokens(LowRank(noise(5, 2), noise(2, 4)), 1), "matrix must be square"),
        (lambda: top_tokens(w * torch.nan, 1), "matrix must be finite"),
        (lambda: top_tokens(noise(5, 5, dtype=torch.complex128), 1), "matrix must be real to be ranked"),
        (lambda: top_tokens(w, 0), "k must be an integer at least 1"),
        (lambda: top_tokens(w, 1, by="target"), "by must be one of 'source', 'all'"),
        (lambda: top_tokens(w, 1, which="top"), "which must be one of"),
        (lambda: top_tokens(w, 1, tokens=[1, -1]), r"token ids must be in \[0, 5\), got -1 at position 1"),
        (lambda: top_tokens(w, 1, tokens=[1, 2, 1]), "token ids must differ, got 1 repeated"),
        (lambda: top_tokens(w, 1, tokens=[1.0]), "tokens must be a vector of integer ids"),
        (lambda: top_tokens(w, 1, tokens=torch.ones(5, dtype=torch.bool)), "tokens must be a vector of integer ids"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
