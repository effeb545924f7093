"""Cross-entropy: every token once, whatever the batch size; errors, buckets and bytes by hand."""

import math

import pytest
import torch

from tests.limits import assert_close
from tests.tiny_models import build, ids, tiny
from tnlm.config import ModelConfig
from tnlm.text import tokenizer
from tnlm.text.evaluate import byte_lengths, cross_entropy, long_context_warning, position_buckets, token_losses


def losses_by_hand(model, stream, seq):
    """Loss of every predicted token, window by window."""
    out = []
    for start in range(0, len(stream) - 1, seq):
        window = stream[start : start + seq + 1]
        logits = model(window[None, :-1])[0]
        out.append([(logits[i].logsumexp(0) - logits[i, window[i + 1]]).item() for i in range(len(window) - 1)])
    return out


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
@pytest.mark.parametrize("length, seq", [(36, 5), (37, 6), (12, 11), (6, 17), (2, 1), (18, None), (40, None)])
def test_every_token_but_the_first_counts_once(model, length, seq, batch_size):
    stream = ids(length)
    rows = losses_by_hand(model, stream, seq or 17)
    result = cross_entropy(model, stream, seq=seq, batch_size=batch_size)
    total = [x for row in rows for x in row]
    assert result.tokens == len(total) == length - 1
    assert result.rows == len(rows)
    assert_close(result.loss, sum(total) / len(total))


def test_a_matrix_holds_one_window_per_row(model):
    tokens = ids(7, 6)
    result = cross_entropy(model, tokens, batch_size=3)
    by_hand = [losses_by_hand(model, row, 5)[0] for row in tokens]
    assert (result.rows, result.seq, result.tokens) == (7, 5, 35)
    assert_close(result.loss, sum(map(sum, by_hand)) / 35)
    means = torch.tensor([sum(row) / 5 for row in by_hand], dtype=torch.float64)
    assert_close(result.standard_error, (means.std() / 7**0.5).item())


def test_rows_takes_the_first_ones(model):
    stream = ids(100)
    some = cross_entropy(model, stream, seq=5, rows=4)
    assert some == cross_entropy(model, stream[:21], seq=5)
    assert some.tokens == 20
    assert cross_entropy(model, stream, seq=5, rows=1).standard_error is None


def test_buckets_split_the_loss_by_position():
    model = build(tiny(n_ctx=150))
    result = cross_entropy(model, ids(400), seq=150)
    rows = losses_by_hand(model, ids(400), 150)
    assert [(b.start, b.stop) for b in result.buckets] == [(0, 64), (64, 128), (128, 150)]
    for b in result.buckets:
        inside = [x for row in rows for x in row[b.start : b.stop]]
        assert b.tokens == len(inside)
        assert_close(b.loss, sum(inside) / len(inside))
    assert sum(b.tokens * b.loss for b in result.buckets) == pytest.approx(result.loss * result.tokens)


def test_bits_per_byte_counts_the_bytes_of_predicted_tokens(model):
    lengths = [0, 1, 2, 3, 1, 1, 4, 1, 1, 2, 5]
    stream = ids(30)
    result = cross_entropy(model, stream, seq=7, rows=3, byte_lengths=lengths)
    n_bytes = sum(lengths[i] for i in stream[1:22].tolist())
    assert_close(result.bits_per_byte, result.loss / math.log(2) * 21 / n_bytes)
    assert cross_entropy(model, stream, seq=7).bits_per_byte is None
    # a default device is that of new tensors, not of the model
    with torch.device("meta"):
        assert cross_entropy(model, stream, seq=7, rows=3, byte_lengths=lengths) == result


def test_byte_lengths_of_the_gpt2_vocabulary():
    gpt2 = tokenizer.get("gpt2")
    lengths, text = byte_lengths(gpt2), "caf\u00e9 \u4f60\u597d\n\n and\tmore"
    assert len(lengths) == 50257
    assert sum(lengths[i] for i in gpt2.encode(text)) == len(text.encode())
    assert lengths[gpt2.eot] == 0


def test_a_uniform_model_loses_the_logarithm_of_all_columns():
    """Padding columns stay in the softmax: ln 13, not ln 11."""
    import tnlm

    result = cross_entropy(tnlm.Transformer(tiny()), ids(30), seq=7)
    assert_close(result.loss, math.log(13), dtype=torch.float32)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 1, 50304, dtype=torch.bfloat16)
    loss = token_losses(logits, torch.zeros(1, 1, dtype=torch.long)).item()
    assert_close(loss, 10.825840, roundings=16, dtype=torch.float32)


def test_progress_is_on_stderr_and_only_when_slow(model, capsys):
    cross_entropy(model, ids(30), seq=7, progress=True)
    assert capsys.readouterr().out == ""


@pytest.mark.user_error
@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (ids(1), {}, "at least two tokens are needed"),
        (ids(0), {}, "at least two tokens are needed"),
        (ids(0, 5), {}, r"at least two tokens .* got shape \(0, 5\)"),
        (ids(2, 1), {}, r"at least two tokens .* got shape \(2, 1\)"),
        (ids(2, 3, 4), {}, r"a stream or \(rows, seq \+ 1\), got shape \(2, 3, 4\)"),
        (ids(30), {"seq": 18}, "seq must be between 1 and n_ctx=17, got 18"),
        (ids(30), {"seq": 0}, "seq must be between 1"),
        (ids(2, 20), {}, "seq must be between 1 and n_ctx=17, got 19"),
        (ids(2, 6), {"seq": 4}, r"got shape \(2, 6\) and seq=4"),
        (ids(30), {"rows": 0}, r"rows must be an integer in \[1, 2\*\*63\), or None"),
        (ids(30), {"batch_size": 0}, r"batch_size must be an integer in \[1, 2\*\*63\), got 0"),
        (ids(30).float(), {}, "tokens must be int64 or int32, got torch.float32"),
        (torch.tensor([3, 4, 11, 5]), {"seq": 2}, r"ids must be in \[0, 11\), got 11 in window 0"),
        (torch.tensor([3, -1]), {}, "got -1 in window 0"),
        (ids(30), {"byte_lengths": [1] * 10}, "byte_lengths must cover d_vocab_used=11 ids, got 10"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(model, tokens, **options)


def test_long_windows_of_the_released_two_pair_models_are_warned_about():
    warned = long_context_warning(ModelConfig.released(), 513)
    assert warned.startswith(
        "released models with bilinear attention predict badly beyond position 512, got windows of 513"
    )
    assert long_context_warning(ModelConfig.released(), 512) is None
    assert long_context_warning(ModelConfig.released(attention="softmax"), 1024) is None
    assert long_context_warning(ModelConfig.released(attention="squared_normalized"), 1024) is None
    pure = ModelConfig.pure(d_vocab=11, n_layer=1, n_head=1, d_model=2, d_hidden=1, n_ctx=1024)
    assert long_context_warning(pure, 1024) is None
    model = build(tiny(n_layer=1, n_head=1, d_model=4, d_qk=2, d_hidden=1, n_ctx=520))
    with pytest.warns(UserWarning, match="evaluate with seq=512"):
        cross_entropy(model, ids(600), seq=513)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(bad):
    model = build(tiny(), torch.float32)
    with torch.no_grad():
        model.blocks[1].mlp.w_d[3, 2] = bad
    with pytest.raises(ValueError, match="losses must be finite, got NaN or infinity in row 0"):
        cross_entropy(model, ids(2, 9))


def test_each_bucket_reaches_twice_as_far_as_the_one_before():
    sums, counts = [float(p) for p in range(300)], [2 + p % 3 for p in range(300)]
    buckets = position_buckets(sums, counts)
    assert [(b.start, b.stop) for b in buckets] == [(0, 64), (64, 128), (128, 256), (256, 300)]
    for b in buckets:
        assert b.tokens == sum(counts[b.start : b.stop])
        assert b.loss == pytest.approx(sum(sums[b.start : b.stop]) / b.tokens)


def test_a_loss_that_is_not_finite_is_of_a_row_of_any_batch():
    """Rows of a token whose embedding is NaN: the sixth of seven, in the third batch."""
    model = build(tiny(), torch.float32)
    with torch.no_grad():
        model.embed.w_e[10] = math.nan
    tokens = ids(7, 6, limit=10)
    tokens[5, 2] = 10
    with pytest.raises(ValueError, match="NaN or infinity in row 5"):
        cross_entropy(model, tokens, batch_size=2)
