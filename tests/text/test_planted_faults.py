"""Mistakes in tokenizer, evaluation and sampling, planted one at a time: the test named beside each must notice it."""

from functools import partial

from tests.planted import each_is_noticed
from tests.text import test_evaluate, test_sampling, test_tokenizer
from tnlm.text import evaluate, sampling, tokenizer

BUCKETS = test_evaluate.test_each_bucket_reaches_twice_as_far_as_the_one_before
FAULTS = {
    "ranks sorted as text": (
        tokenizer,
        "key=lambda pair: int(pair[1])",
        "key=lambda pair: pair[1]",
        test_tokenizer.test_ranks_of_a_rank_file_are_numbers,
    ),
    "a hash without end-of-text": (
        tokenizer,
        'b"eot" if self.eot is not None else b"no eot"',
        'b"eot"',
        test_tokenizer.test_the_hash_tells_whether_end_of_text_is_an_id,
    ),
    "tokens always as bytes": (
        tokenizer,
        'return repr(data.decode("utf-8"))',
        "return repr(data)",
        test_tokenizer.test_a_token_for_people_shows_the_bytes_of_half_a_character,
    ),
    "bytes of the inputs": (
        evaluate,
        "device=targets.device)[targets].sum()",
        "device=targets.device)[stacked[:, :-1]].sum()",
        test_evaluate.test_bits_per_byte_counts_the_bytes_of_predicted_tokens,
    ),
    "error of the population": (
        evaluate,
        "math.sqrt(spread * n / (n - 1))",
        "math.sqrt(spread)",
        test_evaluate.test_a_matrix_holds_one_window_per_row,
    ),
    "buckets of one length": (evaluate, "start, stop = stop, 2 * stop", "start, stop = stop, stop + 64", BUCKETS),
    "sums for means": (evaluate, "loss=sum(sums[start:stop]) / tokens", "loss=sum(sums[start:stop])", BUCKETS),
    "row within its batch": (
        evaluate,
        "row = len(row_sums) + int(",
        "row = int(",
        test_evaluate.test_a_loss_that_is_not_finite_is_of_a_row_of_any_batch,
    ),
    "the largest set below top_p": (
        sampling,
        "before >= top_p",
        "before > top_p - 0.2",
        partial(
            test_sampling.test_top_p_keeps_the_smallest_set_that_reaches_it,
            top_p=0.81,
            expected=[10 / 19, 6 / 19, 3 / 19, 0],
        ),
    ),
}

test_fault_is_noticed = each_is_noticed(FAULTS)
