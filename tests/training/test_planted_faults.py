"""Mistakes in data and metrics, planted one at a time: the test that is named beside each must notice it."""

from functools import partial

from tests.planted import each_is_noticed
from tests.training import test_commands
from tests.training.data import test_shards, test_stream, test_toy
from tests.training.run import test_cost, test_metrics
from tnlm.text import evaluate
from tnlm.training import commands
from tnlm.training.data import shards, stream, tokenize, toy
from tnlm.training.run import cost, metrics

TEXT_BYTES = test_stream.TestValidation.test_text_bytes_are_those_of_the_predicted_tokens
REPORT = test_shards.TestCheckData.test_report_of_a_folder
FIGURES = test_cost.test_every_figure_of_a_dry_run
TEXT = test_cost.test_a_dry_run_as_text_shows_each_figure_under_its_name
TOKENIZE = test_commands.test_data_tokenize_and_check
FAULTS = {
    "bytes of the inputs": (stream, "[self._ids[1:]].sum()", "[self._ids[:-1]].sum()", TEXT_BYTES),
    "end-of-text counted as text": (
        evaluate,
        "[0 if i == tokenizer.eot else len(",
        "[len(",
        test_stream.TestValidation.test_text_bytes,
    ),
    "bits per byte in nats": (metrics, "loss / math.log(2) * tokens", "loss * tokens", test_metrics.test_bits_per_byte),
    "bytes per token upside down": (
        metrics,
        "return loss / math.log(2) * tokens / n_bytes",
        "return loss / math.log(2) * n_bytes / tokens",
        test_metrics.test_bits_per_byte,
    ),
    "the first step in the mean": (
        metrics,
        "self.steps == 1 and not self._warm",
        "self.steps < 0",
        test_metrics.test_speed_leaves_out_the_first_step,
    ),
    "minutes of a day for those of an hour": (
        metrics,
        "hours, minutes = divmod(minutes, 60)",
        "hours, minutes = divmod(minutes, 24)",
        test_metrics.test_plain_lines_off_a_terminal,
    ),
    "peak of the shortest name": (
        metrics,
        "max(matches, key=len)",
        "min(matches, key=len)",
        test_metrics.test_peak_of_a_known_device_and_none_of_another,
    ),
    "largest id of the last shard": (
        shards,
        "max(report.max_id for report in reports.values())",
        "[report.max_id for report in reports.values()][-1]",
        REPORT,
    ),
    "shards for documents": (shards, "else sum(documents),", "else len(documents),", REPORT),
    "tokens of validation for those of training": (
        shards,
        "reports[p].tokens for p in train",
        "reports[p].tokens for p in val",
        REPORT,
    ),
    "tokens and documents exchanged": (
        toy,
        '{"tokens": len(tokens), "documents": len(sequences)}',
        '{"tokens": len(sequences), "documents": len(tokens)}',
        test_toy.test_shards,
    ),
    "the longest period never drawn": (
        toy,
        "rng.integers(low, high + 1,",
        "rng.integers(low, high,",
        partial(test_toy.test_every_sequence_is_a_tiled_cycle, period=(3, 9)),
    ),
    "characters for bytes": (tokenize, 'len(text.encode("utf-8", "surrogatepass"))', "len(text)", TOKENIZE),
    "printed documents and tokens exchanged": (
        commands,
        '{documents:,} documents, {tokens:,} tokens"',
        '{tokens:,} documents, {documents:,} tokens"',
        TOKENIZE,
    ),
    "printed tokens and largest id exchanged": (
        commands,
        "{r.tokens:,} tokens, largest id {r.max_id}",
        "{r.max_id:,} tokens, largest id {r.tokens}",
        TOKENIZE,
    ),
    "one moment for Adam": (
        cost,
        "state = 4 * (2 * model.n_params + matrices + 2 * (",
        "state = 4 * (2 * model.n_params + matrices + (",
        FIGURES,
    ),
    "passes upside down": (cost, "tokens / held if held", "held / tokens if held", FIGURES),
    "time of one GPU for eight": (cost, "(n * PEAK_FLOPS[GPU] * MFU)", "(PEAK_FLOPS[GPU] * MFU)", FIGURES),
    "tokens under FLOPs": (cost, "{facts['flops']:.3g} in all", "{facts['tokens']:.3g} in all", TEXT),
    "GB for GiB": (cost, "n_bytes / 2**30:.2f", "n_bytes / 1e9:.2f", TEXT),
}

test_fault_is_noticed = each_is_noticed(FAULTS)
