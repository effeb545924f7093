"""Toy cycles: every sequence tiles one cycle of distinct tokens."""

import numpy as np
import pytest

from tests.kills import killed_after
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
    assert facts["splits"] == {"train": {"tokens": 451, "documents": 50}, "val": {"tokens": 46, "documents": 5}}
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


def test_validation_sequences_that_are_trained_on_are_counted(tmp_path):
    train, val = (toy.cycles(n, seq=7, d_vocab=5, period=(3, 4), seed=seed) for n, seed in ((30, 0), (20, 1)))
    repeated = sum((train == row).all(1).any() for row in val)
    assert 0 < repeated < 20
    message = rf"^{repeated} of the 20 validation sequences also .*: 5 tokens have only 60 cycles of period 3; take"
    with pytest.warns(UserWarning, match=message):
        toy.write_cycles(tmp_path, seq=7, d_vocab=5, period=(3, 4), train_sequences=30, val_sequences=20)


SIZES = {"seq": 9, "d_vocab": 50, "period": 8, "val_sequences": 3}


def test_a_kill_at_any_moment_leaves_all_shards_or_a_folder_to_start_anew(tmp_path):
    expected = None
    for changes in range(200):
        out = tmp_path / str(changes)
        with killed_after(changes) as died:
            toy.write_cycles(out, train_sequences=20, **SIZES)
        if not died[0]:
            break
        whole = (out / "val_000000.bin").exists()
        if whole:
            assert shards.check_data(out)["train_tokens"] == 20 * 9 + 1
        else:
            toy.write_cycles(out, train_sequences=10, **SIZES)
            assert shards.check_data(out)["train_tokens"] == 10 * 9 + 1
            expected = {p.name for p in out.iterdir()}
            assert expected == {"dataset.json", "train_000001.bin", "val_000000.bin"}
    assert changes > 8
    assert expected is not None
    assert {p.name for p in out.iterdir()} == expected


@pytest.mark.user_error
def test_two_processes_do_not_write_one_folder(tmp_path):
    with (
        shards.all_or_none(tmp_path),
        pytest.raises(ValueError, match=r"is in use by process \d+"),
    ):
        toy.write_cycles(tmp_path, train_sequences=20, **SIZES)
    toy.write_cycles(tmp_path, train_sequences=20, **SIZES)
