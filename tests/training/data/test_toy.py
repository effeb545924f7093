"""Toy cycles: every sequence tiles one cycle of distinct tokens."""

import numpy as np
import pytest

from tnlm.training.data import shards, toy


@pytest.mark.parametrize("period", [5, (3, 9)])
def test_every_sequence_is_a_tiled_cycle(period):
    sequences = toy.cycles(200, seq=23, d_vocab=11, period=period, seed=1)
    assert sequences.shape == (200, 23)
    found = set()
    for row in sequences:
        k = next(i for i in range(1, 23) if row[i] == row[0])
        found.add(k)
        assert len(set(row[:k].tolist())) == k
        np.testing.assert_array_equal(row, np.resize(row[:k], 23))
    assert found == ({5} if period == 5 else set(range(3, 10)))
    assert set(sequences.ravel().tolist()) == set(range(11))


def test_seeds():
    a, b, c = (toy.cycles(4, seq=9, d_vocab=7, period=3, seed=seed) for seed in (0, 0, 1))
    assert (a == b).all()
    assert (a != c).any()


def test_shards(tmp_path):
    facts = toy.write_cycles(tmp_path, seq=9, d_vocab=7, period=(2, 4), train_sequences=50, val_sequences=5, seed=3)
    assert facts["d_vocab"] == 7
    assert facts["source"] == {"task": "cycles", "seq": 9, "period": [2, 4], "seed": 3}
    train, val = (shards.Shard(tmp_path / name).read() for name in ("train_000001.bin", "val_000000.bin"))
    assert (len(train), len(val)) == (50 * 9 + 1, 5 * 9 + 1)
    np.testing.assert_array_equal(train[:-1].reshape(50, 9), toy.cycles(50, seq=9, d_vocab=7, period=(2, 4), seed=6))
    assert (train[:45] != val[:45]).any(), "validation sequences must be others"
    report = shards.check_data(tmp_path)
    assert (report["train_tokens"], report["d_vocab"]) == (451, 7)


@pytest.mark.user_error
@pytest.mark.parametrize("wrong", [{"period": 1}, {"period": 8}, {"period": (4, 3)}, {"seq": 5, "period": 5}])
def test_periods_that_do_not_fit(wrong):
    with pytest.raises(ValueError, match="a cycle must have 2 <= period <= d_vocab distinct tokens"):
        toy.cycles(3, **{"seq": 20, "d_vocab": 7, **wrong})


@pytest.mark.user_error
def test_a_folder_with_shards_is_left_alone(tmp_path):
    shards.write_shard(tmp_path / "train_000001.bin", [1])
    with pytest.raises(ValueError, match="must hold no shards yet"):
        toy.write_cycles(tmp_path)
