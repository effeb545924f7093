"""Training and validation batches from token shards; one integer, the global position, names the next batch.

The sorted shards form one stream of tokens, cut into windows of ``seq + 1`` tokens that overlap by one. Global
sequence number ``g = step * S + i`` names window ``g mod n`` of epoch ``g div n``, where S sequences make a batch
and n windows an epoch. Micro-batch j of rank r takes ``i = (j W + r) B ... + B``. So the position is one integer,
and any world size W and micro-batch B with the same S see the same batches, bit for bit.

``order="published"`` instead repeats the per-rank rule of the public code (its first micro-batch twice, shard tails
unused, ranks changing shard at different steps), which depends on W and B and resumes only under the same ones.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Int64, UInt16
from torch import Tensor

from tnlm.text.evaluate import byte_lengths
from tnlm.text.tokenizer import Tokenizer
from tnlm.training.data import shards

Order = Literal["stream", "shuffle", "published"]


class TokenStream:
    """The tokens of sorted shards as one sequence, read on demand.

    Raises:
        ValueError: A shard is damaged (all are checked here, by header and size), or given twice.
    """

    def __init__(self, paths: Sequence[Path], *, allow_truncated: bool = False):
        if not paths:
            raise ValueError("a token stream needs at least one shard, got none")
        self.paths = [Path(path) for path in paths]
        self._shards = [shards.Shard(path, allow_truncated=allow_truncated) for path in self.paths]
        shards.refuse_duplicates(self.paths)
        self.sizes = [len(shard) for shard in self._shards]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def identities(self) -> list[dict[str, Any]]:
        """Name, size, and hash of the first and last 4 kB of each shard, in order."""
        return [shards.shard_identity(path) for path in self.paths]

    @property
    def fingerprint(self) -> str:
        """One hash of :attr:`identities`."""
        return shards.fingerprint(self.identities)

    def shards_before(self, end: int) -> int:
        """Number of shards that hold the tokens ``[0, end)``."""
        return bisect.bisect_left(self._starts[:-1].tolist(), end)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``[start, start + count)`` as uint16, across shard boundaries.

        Raises:
            ValueError: A shard has shrunk since it was opened.
        """
        assert 0 <= start <= len(self) - count
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while count > 0:
            offset = start - int(self._starts[first])
            part = self._shards[first].read(offset, count)
            parts.append(part)
            start, count, first = start + len(part), count - len(part), first + 1
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def refuse_ids(self, tokens: np.ndarray, start: int, d_vocab: int) -> None:
        """Raise ``ValueError`` naming shard and place when a token, read from ``start`` on, is no id of the model."""
        if tokens.size and int(tokens.max()) >= d_vocab:
            place = start + int(np.argmax(tokens >= d_vocab))
            shard = int(np.searchsorted(self._starts, place, side="right")) - 1
            shards.refuse_id(self.read(place, 1), d_vocab, self.paths[shard], place - int(self._starts[shard]))

    def counts(self, d_vocab: int) -> Int64[Tensor, " d_vocab"]:
        """How often each id occurs. Reads everything: about half a second per 100M tokens.

        Raises:
            ValueError: A token is no id of the vocabulary; names shard and place.
        """
        total = np.zeros(d_vocab, dtype=np.int64)
        for start, shard in zip(self._starts, self._shards):
            for at, tokens in shard.blocks():
                self.refuse_ids(tokens, int(start) + at, d_vocab)
                total += np.bincount(tokens, minlength=d_vocab)
        return torch.from_numpy(total)

    def document_starts(self, eot: int) -> np.ndarray:
        """Places of the end-of-text id, which precedes each document. Reads everything: 0.1 s per 100M tokens."""
        return np.concatenate(
            [
                start + at + np.flatnonzero(tokens == eot)
                for start, shard in zip(self._starts, self._shards)
                for at, tokens in shard.blocks()
            ]
        )


def accumulation_steps(*, batch: int, micro_batch: int, world_size: int = 1) -> int:
    """Micro-batches per rank and step, ``batch / (micro_batch * world_size)``.

    Raises:
        ValueError: It is no whole number; names the three numbers and the nearest batch that fits.
    """
    together = micro_batch * world_size
    if min(batch, micro_batch, world_size) < 1 or batch % together:
        nearest = max(1, round(batch / max(1, together))) * max(1, together)
        raise ValueError(
            f"batch must be a multiple of micro_batch * world_size, got batch={batch} sequences, "
            f"micro_batch={micro_batch}, world_size={world_size}; the nearest batch that fits is {nearest}"
        )
    return batch // together


class Loader:
    """Training batches of one rank, prepared one step ahead in a thread.

    Args:
        stream: All training shards.
        seq: Tokens per sequence; a window has one more.
        batch: Sequences per step over all ranks.
        micro_batch: Sequences per forward on one rank.
        order: ``stream``, ``shuffle`` (a permutation of the windows per epoch, from ``seed``), or ``published``.
        bos_align: Start each window at an end-of-text id ``eot``; the tokens between two windows are skipped.
        d_vocab: Limit that every id is checked against.

    Raises:
        ValueError: The batch does not divide among ranks, or the shards hold no whole window.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        seq: int,
        batch: int,
        micro_batch: int,
        d_vocab: int,
        rank: int = 0,
        world_size: int = 1,
        order: Order = "stream",
        seed: int = 0,
        bos_align: bool = False,
        eot: int | None = None,
    ):
        if order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank={rank}, world_size={world_size}")
        if bos_align and (eot is None or order == "published"):
            raise ValueError(f"bos_align needs an end-of-text id and not order published, got {eot}, {order!r}")
        self.stream, self.seq, self.batch, self.micro_batch, self.d_vocab = stream, seq, batch, micro_batch, d_vocab
        self.rank, self.world_size, self.order, self.seed = rank, world_size, order, seed
        self.bos_align, self.eot = bos_align, eot
        self.accumulation = accumulation_steps(batch=batch, micro_batch=micro_batch, world_size=world_size)
        if len(stream) < seq + 1:
            raise ValueError(
                f"the shards must hold at least seq + 1 = {seq + 1} tokens, got {len(stream)} in "
                f"{len(stream.paths)} shards"
            )
        self.windows = (len(stream) - 1) // seq if not bos_align else len(self._aligned_starts)
        if self.windows == 0:
            raise ValueError(f"no document start is followed by {seq} tokens, so bos_align leaves no window")
        if order == "published":
            own, ahead = (
                PublishedOrder(stream.sizes, seq=seq, micro_batch=micro_batch, rank=r, world_size=world_size)
                for r in (rank, world_size - 1)
            )
            self._published, self._published_ahead = own, ahead
        self.position = 0
        self._permutation: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tnlm-data")
        self._next: Future | None = None

    @property
    def tokens_dropped(self) -> int:
        """Tokens of an epoch that are in no window: at its end, and between documents with ``bos_align``."""
        return len(self.stream) - 1 - self.windows * self.seq

    @cached_property
    def _aligned_starts(self) -> list[int]:
        assert self.eot is not None
        documents = self.stream.document_starts(self.eot).tolist()
        starts, at = [], 0
        while (i := bisect.bisect_left(documents, at)) < len(documents):
            at = documents[i]
            if at + self.seq + 1 > len(self.stream):
                break
            starts.append(at)
            at += self.seq
        return starts

    def window_start(self, g: int) -> int:
        """Place in the stream of the first token of global sequence ``g`` (orders ``stream`` and ``shuffle``)."""
        epoch, index = divmod(g, self.windows)
        if self.order == "shuffle":
            if self._permutation[0] != epoch:
                self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            index = int(self._permutation[1][index])
        return self._aligned_starts[index] if self.bos_align else index * self.seq

    def progress(self, position: int) -> tuple[int, int]:
        """Progress through the data: units taken by the first ``position`` sequences of the run, and units of an epoch.

        A unit is a window; or, in the published order, a micro-batch of the last rank, the first to begin a new epoch.
        """
        if self.order != "published":
            return position, self.windows
        return self._published_ahead.taken(self._published_count(position)), self._published_ahead.per_epoch

    def _published_count(self, position: int) -> int:
        return position // self.batch * self.accumulation

    def next_step(self) -> UInt16[Tensor, "accumulation micro_batch window"]:
        """The windows of the next step of this rank, ``seq + 1`` tokens each; see :func:`inputs_and_targets`.

        Raises:
            ValueError: An id is no row of the vocabulary; names shard and place.
        """
        batch = (self._next or self._thread.submit(self._read, self.position)).result()
        self.position += self.batch
        self._next = self._thread.submit(self._read, self.position)
        return batch

    def _read(self, position: int) -> Tensor:
        windows = np.empty((self.accumulation, self.micro_batch, self.seq + 1), dtype=np.uint16)
        for j in range(self.accumulation):
            if self.order == "published":
                start = self._published.start(self._published_count(position) + j)
                tokens = self.stream.read(start, self.micro_batch * self.seq + 1)
                self.stream.refuse_ids(tokens, start, self.d_vocab)
                windows[j, :, :-1] = tokens[:-1].reshape(self.micro_batch, self.seq)
                windows[j, :, -1] = tokens[self.seq :: self.seq]
                continue
            first = position + (j * self.world_size + self.rank) * self.micro_batch
            for row in range(self.micro_batch):
                start = self.window_start(first + row)
                windows[j, row] = self.stream.read(start, self.seq + 1)
                self.stream.refuse_ids(windows[j, row], start, self.d_vocab)
        batch = torch.from_numpy(windows)
        return batch.pin_memory() if torch.cuda.is_available() else batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream and what it depends on, as JSON values; the same on every rank."""
        state: dict[str, Any] = {
            "position": self.position,
            "batch": self.batch,
            "seq": self.seq,
            "order": self.order,
            "seed": self.seed,
            "bos_align": self.bos_align,
            "fingerprint": self.stream.fingerprint,
            "shards": self.stream.identities,
            "epoch_length": self.progress(0)[1],
        }
        if self.order == "published":
            state |= {"world_size": self.world_size, "micro_batch": self.micro_batch}
        return state

    def load_state_dict(self, state: dict[str, Any], *, allow_other_data: bool = False) -> None:
        """Continue from the position of a :meth:`state_dict`.

        Shards that were not read yet may have been added, removed or changed: the run then is the one that had these
        from the beginning. A shuffle, and a second epoch, depend on all of them.

        Args:
            allow_other_data: Accept other shards, length, batch, seed or order.

        Raises:
            ValueError: The state is of other data; lists what differs. ``published`` needs equal world size and
                micro-batch.
        """
        own, beside = self.state_dict(), ("position", "shards", "epoch_length")
        missing = [key for key in own if key not in state and key not in ("shards", "epoch_length")]
        differ = [key for key in own if key not in (*beside, "fingerprint") and state.get(key) != own[key]]
        if missing or (differ and (self.order == "published" or not allow_other_data)):
            listed = ", ".join(f"{key} {state.get(key)!r} (now {own[key]!r})" for key in differ or missing)
            raise ValueError(f"the data position is of another stream: {listed}; resume with the same data")
        if state["fingerprint"] != own["fingerprint"] and not allow_other_data:
            self._refuse_other_shards(state)
        self.position = int(state["position"])
        self._next = None

    def _refuse_other_shards(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` unless the shards that the state has read are still the first ones."""
        then, now, position = state.get("shards"), self.stream.identities, int(state["position"])
        way_out = "put back what was there, or start anew with another --out"
        if then is None:
            raise ValueError(f"the training shards are not those of the checkpoint (by hash); {way_out}")
        used, why = max(len(then), len(now)), "which the run has read"
        taken, length = self.progress(position)
        if self.order == "shuffle":
            why = "all of which a shuffle draws from"
        elif taken > state["epoch_length"]:
            why = f"all of which the run has read {taken / state['epoch_length']:.2f} times"
        elif taken <= length:
            used = self.stream.shards_before(self._end(position))
        for i in range(used):
            was, held = (x[i] if i < len(x) else None for x in (then, now))
            if was != held:
                old, new = (f"{x['name']} of {x['size']} bytes" if x else "none" for x in (was, held))
                raise ValueError(
                    f"the training shards have changed under the run: of those, {why}, number {i + 1} was {old} and is "
                    f"{'another file of that name and size' if old == new else new}; {way_out}"
                )

    def shards_read(self, steps: int) -> list[str] | None:
        """Hashes of the shards that ``steps`` steps read, in order; None where the batches depend on all shards."""
        position = steps * self.batch
        taken, length = self.progress(position)
        if self.order == "shuffle" or taken > length:
            return None
        used = self.stream.shards_before(self._end(position))
        return [shards.fingerprint([identity])[:16] for identity in self.stream.identities[:used]]

    def _end(self, position: int) -> int:
        """Place in the stream after the last token of the first ``position`` sequences, within the first epoch."""
        if position == 0:
            return 0
        if self.order == "published":
            return self._published_ahead.start(self._published_count(position) - 1) + self.micro_batch * self.seq + 1
        return self.window_start(position - 1) + self.seq + 1

    def close(self) -> None:
        """Stop the thread. The loader cannot be used afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class PublishedOrder:
    """Start of every micro-batch of one rank in the order of the public code (modded-nanogpt of November 2025).

    Rank r starts each shard at ``r B T`` and strides ``B T W``; it leaves when its position plus ``B T W + 1``
    exceeds the shard, and after the last shard begins anew. One micro-batch is drawn before the loader is reset,
    so the first one comes twice.
    """

    def __init__(self, sizes: Sequence[int], *, seq: int, micro_batch: int, rank: int, world_size: int):
        self._sizes, self._own = list(sizes), micro_batch * seq
        self._stride, self._first = micro_batch * seq * world_size, rank * micro_batch * seq
        if min(self._sizes) < self._stride + 1:
            raise ValueError(
                f"order published needs shards of at least world_size * micro_batch * seq + 1 = {self._stride + 1} "
                f"tokens, got {min(self._sizes)}"
            )
        self._before = np.concatenate([[0], np.cumsum(self._sizes)]).tolist()
        # the visits that a rank pays each shard, so that any micro-batch is found without replay
        self._visits = [max(1, -(-(size - self._stride - self._first) // self._stride)) for size in self._sizes]
        self._visited = np.concatenate([[0], np.cumsum(self._visits)]).tolist()

    @property
    def per_epoch(self) -> int:
        """Number of micro-batches of the rank in one epoch."""
        return self._visited[-1]

    def taken(self, count: int) -> int:
        """Number of different micro-batches among the first ``count``; those of later epochs count again."""
        return count - 1 if count > 1 else count

    def start(self, index: int) -> int:
        """Place in the stream of the first token of micro-batch ``index`` = 0, 1, ... of this rank."""
        visit = max(0, index - 1) % self.per_epoch
        shard = bisect.bisect_right(self._visited, visit) - 1
        return self._before[shard] + self._first + (visit - self._visited[shard]) * self._stride


def inputs_and_targets(
    windows: UInt16[Tensor, "micro_batch window"], device: torch.device | str
) -> tuple[Int64[Tensor, "micro_batch seq"], Int64[Tensor, "micro_batch seq"]]:
    """Inputs and targets of one micro-batch, on ``device``: each window without its last, and without its first, token.

    The ids are moved as uint16 and widened there.
    """
    wide = windows.to(device, non_blocking=True).long()
    return wide[:, :-1], wide[:, 1:]


class Validation:
    """The first ``tokens`` tokens of the validation shards, in windows of ``seq``.

    They are the same for any number of ranks and any micro-batch. The validation loss is the sum of all cross-entropies
    divided by ``tokens``; a mean over batches would weigh a smaller last batch too much.

    Raises:
        ValueError: ``tokens`` is no multiple of ``seq``, or more than the shards hold (names the exact number).
    """

    def __init__(self, stream: TokenStream, *, seq: int, tokens: int, d_vocab: int):
        available = max(0, len(stream) - 1) // seq * seq
        if tokens < 1 or tokens % seq:
            raise ValueError(
                f"val_tokens must be a positive multiple of seq={seq}, got {tokens}; "
                f"the nearest is {max(1, round(tokens / seq)) * seq}"
            )
        if tokens > available:
            raise ValueError(
                f"val_tokens must be at most {available} (whole windows of {seq} in {len(stream)} tokens of "
                f"{stream.paths[0]}), got {tokens}"
            )
        self.seq, self.tokens, self.windows = seq, tokens, tokens // seq
        self._ids = stream.read(0, tokens + 1)
        stream.refuse_ids(self._ids, 0, d_vocab)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the ``tokens + 1`` ids that are read, as little-endian uint16."""
        return hashlib.sha256(self._ids.astype("<u2").tobytes()).hexdigest()

    def batches(
        self, micro_batch: int, *, rank: int = 0, world_size: int = 1
    ) -> Iterator[UInt16[Tensor, "rows window"]]:
        """This rank's windows, ``micro_batch`` at a time; the last batch may be smaller, and a rank may have none."""
        first, last = (self.windows * r // world_size for r in (rank, rank + 1))
        for start in range(first, last, micro_batch):
            rows = range(start, min(start + micro_batch, last))
            windows = [self._ids[w * self.seq : w * self.seq + self.seq + 1] for w in rows]
            yield torch.from_numpy(np.stack(windows))

    def text_bytes(self, tokenizer: Tokenizer) -> int:
        """Number of bytes of text that the predicted tokens stand for; end-of-text counts none.

        Bits per byte = mean CE in nats / ln 2 * ``tokens`` / this.
        """
        return int(np.array(byte_lengths(tokenizer))[self._ids[1:]].sum())
