"""Batches: the position is one integer, the same for any ranks; the public order is reproduced exactly."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from tests.limits import assert_close
from tnlm.text.tokenizer import get, train_bpe
from tnlm.training.data import shards
from tnlm.training.data.stream import (
    Loader,
    PublishedOrder,
    TokenStream,
    Validation,
    accumulation_steps,
    inputs_and_targets,
)

SIZES = (403, 517, 350)
SEQ = 7
EOT = 65_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three shards whose token at place i of the stream is i, and a validation shard."""
    folder = tmp_path_factory.mktemp("shards")
    start = 0
    for number, size in enumerate(SIZES, start=1):
        shards.write_shard(folder / f"x_train_{number:06d}.bin", np.arange(start, start + size))
        start += size
    shards.write_shard(folder / "x_val_000000.bin", np.arange(2000, 2100))
    return folder


@pytest.fixture
def stream(folder):
    return TokenStream(shards.find_shards(folder))


def loader(stream, **changes):
    values = {"seq": SEQ, "batch": 12, "micro_batch": 3, "d_vocab": 65536, **changes}
    return Loader(stream, **values)


def steps(stream, n, **changes):
    made = loader(stream, **changes)
    batches = [made.next_step() for _ in range(n)]
    made.close()
    return batches


def global_batches(stream, n, *, world_size, micro_batch, **changes):
    """The n global batches, put together from all ranks in the order of the global sequence number."""
    ranks = [
        steps(stream, n, world_size=world_size, micro_batch=micro_batch, rank=rank, **changes)
        for rank in range(world_size)
    ]
    return [torch.stack([ranks[r][k] for r in range(world_size)], dim=1).flatten(0, 2) for k in range(n)]


class TestStream:
    def test_reads_across_boundaries(self, stream):
        assert len(stream) == sum(SIZES)
        for start, count in [(0, 1), (400, 6), (402, 2), (403, 1), (100, 1000), (0, 1270)]:
            np.testing.assert_array_equal(stream.read(start, count), np.arange(start, start + count))

    def test_fingerprint(self, folder, stream):
        assert stream.fingerprint == TokenStream(stream.paths).fingerprint
        assert stream.fingerprint != TokenStream(stream.paths[:2]).fingerprint

    def test_counts(self, tmp_path):
        paths = [tmp_path / "train_000001.bin", tmp_path / "train_000002.bin"]
        shards.write_shard(paths[0], [5, 3, 3, 0])
        shards.write_shard(paths[1], [3, 1, 6])
        assert TokenStream(paths).counts(8).tolist() == [1, 1, 0, 3, 0, 1, 1, 0]
        with pytest.raises(ValueError, match=r"id 6 >= vocab 6 in .*train_000002\.bin at token 2"):
            TokenStream(paths).counts(6)

    @pytest.mark.user_error
    def test_user_errors(self, stream, tmp_path):
        with pytest.raises(ValueError, match="at least one shard, got none"):
            TokenStream([])
        with pytest.raises(
            ValueError, match=r"given once, got .*x_train_000002.bin with the content of .*x_train_000002.bin$"
        ):
            TokenStream([*stream.paths, stream.paths[1]])
        (tmp_path / "train_000001.bin").write_bytes(b"x")
        with pytest.raises(
            ValueError, match=r"train_000001.bin is too short for a header: it must have at least 1024 bytes, got 1$"
        ):
            TokenStream([*stream.paths, tmp_path / "train_000001.bin"])


class TestGlobalPosition:
    def test_windows_overlap_by_one_and_cross_shards(self, stream):
        (first, second) = steps(stream, 2, batch=12)
        rows = torch.cat([first, second]).flatten(0, 1).long()
        assert_close(rows, torch.arange(24)[:, None] * SEQ + torch.arange(SEQ + 1))

    @pytest.mark.parametrize("order", ["stream", "shuffle"])
    @pytest.mark.parametrize("world_size, micro_batch", [(1, 12), (1, 1), (2, 3), (3, 4), (4, 3), (2, 1), (6, 1)])
    def test_any_world_size_and_micro_batch_see_the_same_batches(self, stream, order, world_size, micro_batch):
        expected = global_batches(stream, 40, world_size=1, micro_batch=3, order=order)  # more than two epochs
        found = global_batches(stream, 40, world_size=world_size, micro_batch=micro_batch, order=order)
        assert all(torch.equal(a, b) for a, b in zip(expected, found))

    @pytest.mark.parametrize("order", ["stream", "shuffle"])
    def test_an_epoch_is_every_window_once(self, stream, order):
        made = loader(stream, order=order)
        n = made.windows
        assert (n, made.tokens_dropped) == (1269 // 7, 1269 % 7)
        epochs = [[made.window_start(g) for g in range(e * n, (e + 1) * n)] for e in range(3)]
        assert all(sorted(epoch) == [w * SEQ for w in range(n)] for epoch in epochs)
        assert (epochs[0] == epochs[1]) == (order == "stream")

    def test_shuffle_depends_on_the_seed_alone(self, stream):
        a, b, c = (steps(stream, 3, order="shuffle", seed=seed) for seed in (1, 1, 2))
        assert all(torch.equal(x, y) for x, y in zip(a, b))
        assert not torch.equal(a[0], c[0])

    def test_shards_smaller_than_a_batch(self, stream):
        (batch,) = steps(stream, 1, batch=150, micro_batch=150)
        assert_close(batch[0, :, 0].long(), torch.arange(150) * SEQ)

    @pytest.mark.parametrize("order", ["stream", "shuffle", "published"])
    def test_resume_at_every_step_continues_exactly(self, stream, order):
        straight = loader(stream, order=order)
        states, batches = [], []
        for _ in range(35):  # over shard boundaries and the end of an epoch
            states.append(json.loads(json.dumps(straight.state_dict())))
            batches.append(straight.next_step())
        for k in (0, 4, 5, 15, 16, 34):
            resumed = loader(stream, order=order)
            resumed.next_step()  # a stale prefetched batch must not survive loading
            resumed.load_state_dict(states[k])
            assert torch.equal(resumed.next_step(), batches[k])
            resumed.close()
        straight.close()

    def test_resume_at_another_world_size(self, stream):
        expected = global_batches(stream, 8, world_size=1, micro_batch=3)
        four = loader(stream, world_size=4, rank=2)
        for _ in range(5):
            four.next_step()
        resumed = loader(stream, world_size=1, micro_batch=12)
        resumed.load_state_dict(four.state_dict())
        for k in (5, 6, 7):
            assert torch.equal(resumed.next_step().flatten(0, 1), expected[k])
        four.close()
        resumed.close()

    @pytest.mark.user_error
    def test_other_data_is_refused_unless_allowed(self, stream):
        state = loader(stream).state_dict()
        other = loader(TokenStream(stream.paths[:2]), seq=5)
        with pytest.raises(ValueError, match=r"another stream: seq 7 \(now 5\); resume"):
            other.load_state_dict(state)
        other.load_state_dict(state, allow_other_data=True)
        with pytest.raises(ValueError, match="another stream: batch None"):
            other.load_state_dict({}, allow_other_data=True)
        published = loader(stream, order="published", world_size=2).state_dict()
        with pytest.raises(ValueError, match=r"world_size 2 \(now 4\)"):
            loader(stream, order="published", world_size=4).load_state_dict(published, allow_other_data=True)


class TestChangedShards:
    """What a run has not read yet may change under it; the batches are then those of the new shards from the start."""

    @pytest.fixture
    def copy(self, folder, tmp_path):
        for path in shards.find_shards(folder):
            shutil.copy(path, tmp_path)
        return tmp_path

    @staticmethod
    def after(folder, n, **changes):
        """State after n steps of 12 windows of 7 tokens; the first shard has 403."""
        made = loader(TokenStream(shards.find_shards(folder)), **changes)
        _drain(made, n)
        state = json.loads(json.dumps(made.state_dict()))
        made.close()
        return state

    @pytest.mark.parametrize(
        "changes",
        [{}, {"bos_align": True, "eot": 7}, {"order": "published"}, {"order": "published", "world_size": 2, "rank": 0}],
        ids=["stream", "aligned", "published", "published of two"],
    )
    def test_shards_that_were_not_read_may_be_added_or_changed(self, copy, changes):
        if "bos_align" in changes:
            for path in shards.find_shards(copy):
                shards.write_shard(path, shards.Shard(path).read() % 15)
        state = self.after(copy, 3, **changes)
        shards.write_shard(copy / "x_train_000003.bin", np.arange(33_000, 33_400) % 15)
        shards.write_shard(copy / "x_train_000004.bin", np.arange(44_000, 44_500) % 15)
        more = TokenStream(shards.find_shards(copy))
        resumed, whole = loader(more, **changes), loader(more, **changes)
        resumed.load_state_dict(state)
        _drain(whole, 3)
        for _ in range(12):
            assert torch.equal(resumed.next_step(), whole.next_step())
        resumed.close()
        whole.close()

    @pytest.mark.user_error
    @pytest.mark.parametrize("order", ["stream", "published"])
    def test_a_shard_that_was_read_may_not_change(self, copy, order):
        state = self.after(copy, 6, order=order)  # 504 tokens: two shards
        second = copy / "x_train_000002.bin"
        ids = shards.Shard(second).read()
        shards.write_shard(second, np.append(ids[:-1], 9))
        with pytest.raises(
            ValueError,
            match=r"of those, which the run has read, number 2 was x_train_000002.bin of 2058 "
            "bytes and is another file of that name and size; put back",
        ):
            loader(TokenStream(shards.find_shards(copy)), order=order).load_state_dict(state)
        paths = shards.find_shards(copy)
        for others, now in ((paths[::2], "x_train_000003.bin of 1724 bytes"), (paths[:1], "none")):
            with pytest.raises(ValueError, match=rf"number 2 was x_train_000002.bin of 2058 bytes and is {now}"):
                loader(TokenStream(others), order=order).load_state_dict(state)

    @pytest.mark.parametrize("order", ["stream", "published"])
    def test_the_first_epoch_ends_exactly_here(self, copy, order):
        """181 windows are 15 steps of 12 and one more; the public order has 4, 6 and 4 of them, the first twice."""
        changes = {"order": order, "micro_batch": 12}
        states = [self.after(copy, n, **changes) for n in (15, 16)]
        shards.write_shard(copy / "x_train_000004.bin", np.arange(500))
        made = loader(TokenStream(shards.find_shards(copy)), **changes)
        made.load_state_dict(states[0])
        with pytest.raises(ValueError, match=r"all of which the run has read 1.0\d times, number 4 was none"):
            made.load_state_dict(states[1])

    @pytest.mark.user_error
    def test_a_shuffle_draws_from_all(self, copy):
        state = self.after(copy, 1, order="shuffle")
        shards.write_shard(copy / "x_train_000004.bin", np.arange(500))
        with pytest.raises(
            ValueError, match="all of which a shuffle draws from, number 4 was none and is x_train_000004"
        ):
            loader(TokenStream(shards.find_shards(copy)), order="shuffle").load_state_dict(state)

    @pytest.mark.user_error
    def test_a_state_of_an_earlier_version_wants_the_same_shards(self, stream, copy):
        state = {k: v for k, v in self.after(copy, 1).items() if k not in ("shards", "epoch_length")}
        loader(stream).load_state_dict(state)
        shards.write_shard(copy / "x_train_000004.bin", np.arange(500))
        with pytest.raises(ValueError, match="are not those of the checkpoint"):
            loader(TokenStream(shards.find_shards(copy))).load_state_dict(state)


def test_shards_read_are_those_of_all_steps(stream):
    """12 windows of 7 tokens a step: 403 tokens end in the fifth, 920 in the eleventh, 1270 in the sixteenth."""
    made = loader(stream)
    assert [len(made.shards_read(n)) for n in (1, 4, 5, 10, 11, 15)] == [1, 1, 2, 2, 3, 3]
    assert made.shards_read(15)[:2] == made.shards_read(10) == loader(TokenStream(stream.paths[:2])).shards_read(10)
    assert made.shards_read(16) is None
    assert loader(stream, order="shuffle").shards_read(1) is None


class TestEpochs:
    def test_passes_over_the_windows(self, stream):
        made = loader(stream)
        assert [made.progress(p) for p in (0, 1, 181, 182)] == [(0, 181), (1, 181), (181, 181), (182, 181)]

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_the_public_order_begins_anew(self, stream, world_size):
        """Counted on the last rank, whose first place comes again when an epoch is over."""
        changes = {"order": "published", "micro_batch": 3, "batch": 3 * world_size}
        made = loader(stream, **changes, world_size=world_size, rank=world_size - 1)
        starts = [made._published.start(i) for i in range(200)]
        again = next(i for i in range(2, 200) if starts[i] == starts[0])
        progress = [made.progress((i + 1) * 3 * world_size) for i in range(200)]
        assert all(taken <= length for taken, length in progress[:again])
        assert progress[again][0] == progress[again][1] + 1


class TestPublishedOrder:
    def test_recorded_order_of_the_public_loader(self, golden):
        recorded = json.loads((golden / "loader_order" / "order.json").read_text())
        stream = TokenStream(shards.find_shards(golden / "loader_order"))
        assert [o["world_size"] for o in recorded["orders"]] == [1, 2, 4, 3]
        for case in recorded["orders"]:
            world, seq, rows = case["world_size"], case["sequence_length"], case["device_batch_size"]
            for rank in range(world):
                expected = case["first_token_of_each_micro_batch"][rank]
                made = loader(
                    stream,
                    order="published",
                    seq=seq,
                    micro_batch=rows,
                    batch=rows * world,
                    rank=rank,
                    world_size=world,
                )
                batches = [made.next_step() for _ in expected]
                made.close()
                assert [int(b[0, 0, 0]) for b in batches] == expected
                for batch, first in zip(batches, expected):
                    np.testing.assert_array_equal(
                        batch[0].long(), first + np.arange(rows)[:, None] * seq + np.arange(seq + 1)
                    )

    def test_published_size_ranks_leave_a_shard_at_different_steps(self):
        """Eight ranks of 64 x 1024 on shards of 1e8 tokens: 190 micro-batches on ranks 0-5, 189 on 6 and 7."""
        visits = [
            PublishedOrder([10**8] * 2, seq=1024, micro_batch=64, rank=rank, world_size=8)._visits for rank in range(8)
        ]
        assert visits == [[190, 190]] * 6 + [[189, 189]] * 2

    def test_equals_a_replay_of_the_rule(self):
        sizes, own = [403, 517, 350], 14
        for world, rank in [(1, 0), (2, 1), (5, 0), (5, 4)]:
            order = PublishedOrder(sizes, seq=7, micro_batch=2, rank=rank, world_size=world)
            shard, at, expected = 0, rank * own, []
            for _ in range(300):
                expected.append(sum(sizes[:shard]) + at)
                at += own * world
                if at + own * world + 1 > sizes[shard]:
                    shard, at = (shard + 1) % 3, rank * own
            assert [order.start(i) for i in range(1, 301)] == expected
            assert order.start(0) == expected[0]

    @pytest.mark.user_error
    def test_shards_below_one_batch(self, stream):
        with pytest.raises(ValueError, match=r"at least world_size \* micro_batch \* seq \+ 1 = 421 tokens, got 350"):
            loader(stream, order="published", batch=60, micro_batch=60)


class TestAligned:
    def test_windows_start_at_documents(self, tmp_path):
        documents = [5, 3, 20, 1, 9, 8, 2]
        ids = [t for d, n in enumerate(documents) for t in [EOT, *range(100 * d, 100 * d + n)]]
        shards.write_shard(tmp_path / "train_000001.bin", ids[:17])
        shards.write_shard(tmp_path / "train_000002.bin", ids[17:])
        stream = TokenStream(shards.find_shards(tmp_path))
        made = loader(stream, seq=4, bos_align=True, eot=EOT, batch=1, micro_batch=1)
        windows = [made.next_step()[0, 0].tolist() for _ in range(made.windows)]
        made.close()
        assert all(w[0] == EOT for w in windows)
        starts = [made.window_start(g) for g in range(made.windows)]
        assert all(b - a >= 4 for a, b in itertools.pairwise(starts))
        places = [i for i, t in enumerate(ids) if t == EOT]
        for a, b in itertools.pairwise([-4, *starts]):
            assert [p for p in places if a + 4 <= p < b] == [], "no document start that fits may be skipped"
        for window, start in zip(windows, starts):
            assert window == ids[start : start + 5]

    @pytest.mark.user_error
    def test_user_errors(self, stream):
        with pytest.raises(
            ValueError, match=r"^bos_align needs an end-of-text id and not order published, got None, 'stream'$"
        ):
            loader(stream, bos_align=True)
        with pytest.raises(
            ValueError, match=f"^no document start is followed by {SEQ} tokens, so bos_align leaves no window$"
        ):
            loader(stream, bos_align=True, eot=1269)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": 8, "world_size": 3}, r"batch=8 sequences, micro_batch=3, world_size=3; the nearest .* is 9"),
        ({"micro_batch": 0}, "must be a multiple"),
        ({"rank": 1}, r"rank must be in \[0, world_size\), got rank=1, world_size=1"),
        ({"order": "random"}, "order must be one of stream, shuffle, published"),
        ({"seq": 1270}, "at least seq \\+ 1 = 1271 tokens, got 1270 in 3 shards"),
    ],
)
def test_loader_user_errors(stream, changes, message):
    with pytest.raises(ValueError, match=message):
        loader(stream, **changes)


def test_accumulation():
    assert accumulation_steps(batch=512, micro_batch=64, world_size=4) == 2
    assert accumulation_steps(batch=512, micro_batch=64) == 8


def _drain(made, n):
    for _ in range(n):
        made.next_step()


@pytest.mark.user_error
@pytest.mark.parametrize("order", ["stream", "published"])
def test_an_id_beyond_the_vocabulary_names_shard_and_place(folder, stream, order):
    made = loader(stream, d_vocab=410, order=order, batch=3)
    with pytest.raises(ValueError, match=r"id 410 >= vocab 410 in .*x_train_000002.bin at token 7"):
        _drain(made, 30)
    made.close()


def test_inputs_and_targets():
    windows = torch.tensor([[1, 2, 3], [4, 5, 65535]], dtype=torch.uint16)
    x, y = inputs_and_targets(windows, "cpu")
    assert x.tolist() == [[1, 2], [4, 5]]
    assert y.tolist() == [[2, 3], [5, 65535]]
    assert x.dtype == torch.int64


class TestValidation:
    @pytest.fixture
    def held_out(self, folder):
        return TokenStream(shards.find_shards(folder, split="val"))

    @pytest.mark.parametrize("world_size, micro_batch", [(1, 4), (1, 100), (3, 2), (4, 5), (20, 1)])
    def test_every_window_once(self, held_out, world_size, micro_batch):
        validation = Validation(held_out, seq=SEQ, tokens=98, d_vocab=65536)
        rows = [
            row.tolist()
            for rank in range(world_size)
            for batch in validation.batches(micro_batch, rank=rank, world_size=world_size)
            for row in batch.long()
        ]
        assert rows == [list(range(2000 + 7 * w, 2008 + 7 * w)) for w in range(14)]
        assert sum(len(row) - 1 for row in rows) == validation.tokens == 98

    def test_fingerprint_is_of_the_tokens_read(self, held_out, tmp_path):
        shards.write_shard(tmp_path / "other_val_000000.bin", np.arange(2000, 2099))
        other = TokenStream([tmp_path / "other_val_000000.bin"])
        a, b, c = (
            Validation(s, seq=SEQ, tokens=t, d_vocab=65536) for s, t in [(held_out, 98), (other, 98), (held_out, 91)]
        )
        assert a.fingerprint == b.fingerprint != c.fingerprint

    @pytest.mark.user_error
    def test_user_errors(self, held_out):
        with pytest.raises(ValueError, match=r"at most 98 \(whole windows of 7 in 100 tokens of .*got 105"):
            Validation(held_out, seq=SEQ, tokens=105, d_vocab=65536)
        with pytest.raises(ValueError, match="multiple of seq=7, got 50; the nearest is 49"):
            Validation(held_out, seq=SEQ, tokens=50, d_vocab=65536)
        with pytest.raises(ValueError, match=r"id 2050 >= vocab 2050 in .*x_val_000000.bin at token 50"):
            Validation(held_out, seq=SEQ, tokens=98, d_vocab=2050)

    def test_text_bytes(self, tmp_path):
        tokenizer = train_bpe(["the cat sat on the mat " * 20], 265)
        text = "the cat on the caf\u00e9 mat"
        ids = [tokenizer.eot, *tokenizer.encode(text), tokenizer.eot]
        shards.write_shard(tmp_path / "val_000000.bin", ids)
        validation = Validation(
            TokenStream([tmp_path / "val_000000.bin"]), seq=len(ids) - 1, tokens=len(ids) - 1, d_vocab=265
        )
        assert validation.text_bytes(tokenizer) == len(text.encode())
        shards.write_shard(tmp_path / "b.bin", list(b"abcd"))
        validation = Validation(TokenStream([tmp_path / "b.bin"]), seq=3, tokens=3, d_vocab=256)
        assert validation.text_bytes(get("bytes")) == 3

    def test_text_bytes_are_those_of_the_predicted_tokens(self, tmp_path):
        """The first token is read alone, the last one predicted alone; their texts differ in length."""
        tokenizer = train_bpe(["the cat sat on the mat " * 20], 265)
        ids = [*tokenizer.encode(" the"), *tokenizer.encode(" cat"), *tokenizer.encode("x")]
        assert [len(tokenizer.token_bytes(i)) for i in (ids[0], ids[-1])] == [4, 1]
        shards.write_shard(tmp_path / "val_000000.bin", ids)
        stream = TokenStream([tmp_path / "val_000000.bin"])
        validation = Validation(stream, seq=len(ids) - 1, tokens=len(ids) - 1, d_vocab=265)
        assert validation.text_bytes(tokenizer) == len(" catx")
