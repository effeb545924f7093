"""Mistakes in what explanations, attributions, tables and figures show, one at a time: the test beside each notices it.

``python -m pytest -v tests/interp/test_planted_faults.py`` prints one line per mistake.
"""

from functools import partial

from tests.interp.predictions import test_attribution as attributed
from tests.interp.predictions import test_explanation as explained
from tests.interp.tokens import test_copying as copied
from tests.interp.tokens import test_tables as tabled
from tests.interp.views import test_plot as plotted
from tests.interp.views import test_reporting as reported
from tests.planted import each_is_noticed
from tnlm.interp.predictions import attribution, explanation, terms
from tnlm.interp.tokens import bare_tokens, copying, tables
from tnlm.interp.views import plot, reporting

ROWS = explained.test_every_row_of_the_known_model
FACTOR = explained.test_rows_count_twice_where_a_later_layer_doubles_its_input
ABLATIONS = explained.test_predicted_held_and_actual_change_of_the_known_model
TABLE = explained.test_the_table_cell_by_cell
RECORD = explained.test_the_record_number_by_number
BARS = explained.test_the_figure_bar_by_bar
PAIRS = attributed.test_every_pair_of_the_known_model
SHARES = attributed.test_every_shapley_share_of_the_known_model
PATH = partial(tabled.test_path_tables_are_dense_products_without_padding, layer=1)
HEAD, MLP, DIRECT = (partial(PATH, path=path) for path in (1, "mlp", "direct"))
COUNTED = partial(tabled.test_counted_tokens_weigh_the_mean_and_those_that_never_occur_are_left_out, path=1)
MATCH = copied.test_match_is_the_mean_and_deviation_over_all_permutations
SPECTRUM = plotted.test_a_spectrum_shows_its_largest_values
EIGENVECTORS = plotted.test_eigenvectors_show_their_highest_and_lowest_tokens
INTERACTION = plotted.test_an_interaction_shows_rows_down_and_columns_across
ATTENTION = plotted.test_attention_shows_the_past_of_every_head
LENS = plotted.test_a_logit_lens_shows_the_likeliest_tokens
SIMILARITY = plotted.test_a_similarity_shows_a_matrix_that_is_not_square
TRUNCATION = plotted.test_a_truncation_shows_costs_and_errors
LAMBDAS = plotted.test_lambdas_show_each_scalar_under_its_name
LINES = plotted.test_lines_show_pairs_under_their_names
PAGE = reported.test_the_explanation_cell_by_cell
FAULTS = {
    # explanation
    "source reversed": (terms, "head=n, source=source", "head=n, source=len(by_source) - 1 - source", ROWS),
    "heads reversed": (terms, "head=n, source", "head=len(values) - 1 - n, source", ROWS),
    "layer of a head off by one": (
        terms,
        'Row("head", value, layer=self.layer,',
        'Row("head", value, layer=self.layer - 1,',
        ROWS,
    ),
    "eigenvalue without its factor": (terms, "float(self.factor * self.values[k])", "float(self.values[k])", ROWS),
    "component rank off by one": (terms, "component=k, eigenvalue", "component=k + 1, eigenvalue", ROWS),
    "value without its factor": (terms, "float(self.factor * self.parts[k])", "float(self.parts[k])", ROWS),
    "direct path without its factor": (terms, "net.embed_factor.double() *", "1.0 *", FACTOR),
    "head without its factor": (terms, "float(net.write_factors[layer]) * read, w_o", "read, w_o", FACTOR),
    "smallest row first": (explanation, "key=lambda row: -abs(row.value)", "key=lambda row: abs(row.value)", ROWS),
    "rows by value": (explanation, "key=lambda row: -abs(row.value)", "key=lambda row: -row.value", ROWS),
    "foil added": (explanation, "direction = direction - net.cast", "direction = direction + net.cast", TABLE),
    "another key kept": (
        terms,
        "pattern[:, row.head, -1, row.source] = 0",
        "pattern[:, row.head, -1, -1 - row.source] = 0",
        ABLATIONS,
    ),
    "another head removed": (terms, "pattern[:, row.head, -1,", "pattern[:, -1 - row.head, -1,", ABLATIONS),
    "another component removed": (terms, "else [row.component]", "else [row.component + 1]", ABLATIONS),
    "direct path not removed": (
        explanation,
        "after, left = self._measure(removal, point)",
        "after, left = self._measure(removal if row.layer is not None else {}, point)",
        ABLATIONS,
    ),
    "held and actual exchanged": (
        explanation,
        "self._measure(held)[0] - before, after - before",
        "after - before, self._measure(held)[0] - before",
        ABLATIONS,
    ),
    "predicted of the other sign": (explanation, "Ablated(-row.value", "Ablated(row.value", ABLATIONS),
    "write without its factor when held": (
        explanation,
        "lost = factor * (written - left)",
        "lost = written - left",
        ABLATIONS,
    ),
    "token of the next position": (
        explanation,
        "int(self.tokens[row.source])",
        "int(self.tokens[row.source - 1])",
        TABLE,
    ),
    "target and foil exchanged in the title": (
        explanation,
        'f"{name} minus {self._token(self.foil)}"',
        'f"logit of {self._token(self.foil)} minus {self._token(self.target)}"',
        TABLE,
    ),
    "sum of the shown rows as the others": (
        explanation,
        "rest = sum(row.value for row in self.rows[top:])",
        "rest = sum(row.value for row in self.rows[:top])",
        TABLE,
    ),
    "one other row too many": (explanation, "{len(self) - top} other rows", "{len(self) - top + 1} other rows", TABLE),
    "share of the logit": (explanation, "row.value / self.absolute_sum if", "row.value / self.logit if", RECORD),
    "cancellation upside down": (
        explanation,
        "self.absolute_sum / abs(self.logit) if",
        "abs(self.logit) / self.absolute_sum if",
        RECORD,
    ),
    "record without its first row": (
        explanation,
        "for row in self.rows[:top]]\n        head",
        "for row in self.rows[1:top]]\n        head",
        RECORD,
    ),
    "norms named where there are none": (
        explanation,
        'if held else "exact"',
        'if held else "exact given the norms of this run"',
        TABLE,
    ),
    # attribution
    "heads in reverse order": (
        attribution,
        'torch.einsum("mnd,nd->nm", w_o, z)',
        'torch.einsum("mnd,nd->nm", w_o, z).flip(0)',
        PAIRS,
    ),
    "direct path in one entry": (attribution, "values[0] += direct / 2", "values[0] += direct", PAIRS),
    "constant has the interactions": (attribution, "shares[0] = values[0, 0]", "shares[0] = values[0].sum()", SHARES),
    "layer without its factor": (attribution, "values += factor * layer_pairs", "values += layer_pairs", PAIRS),
    # tables
    "not centred": (tables, "net.unembed_centred(weights)[ids])", "net.unembed[ids])", HEAD),
    "mean without weights": (tables, "net.unembed_centred(weights)[ids])", "net.unembed_centred()[ids])", COUNTED),
    "tokens that never occur": (
        tables,
        "if weights is not None:\n        ids",
        "if weights is None:\n        ids",
        COUNTED,
    ),
    "value of block 0 left out": (bare_tokens, "if circuit.v0 is not None:", "if False:", HEAD),
    "value of block 0 of the layer's input": (bare_tokens, "bare_inputs(net, 0, x0)))", "2 * inputs))", HEAD),
    "trace kept": (tables, "net.mlp[layer].canonical()", "net.mlp[layer]", MLP),
    "factor of later layers left out": (tables, "factor * targets @ quadratic", "targets @ quadratic", MLP),
    "direct path of the first layer": (tables, "net.embed_factor * targets @", "targets @", DIRECT),
    "effect over n": (copying, "z / (n - 1) ** 0.5", "z / n**0.5", MATCH),
    "z over n - 1": (copying, "z = n * (value", "z = (n - 1) * (value", MATCH),
    # plots
    "ascending magnitudes": (plot, "np.argsort(-np.abs(v)", "np.argsort(np.abs(v)", SPECTRUM),
    "magnitudes for values": (
        plot,
        '= v[np.argsort(-np.abs(v), kind="stable")]',
        '= np.abs(v[np.argsort(-np.abs(v), kind="stable")])',
        SPECTRUM,
    ),
    "colours exchanged": (plot, "POSITIVE if value > 0 else NEGATIVE", "NEGATIVE if value > 0 else POSITIVE", SPECTRUM),
    "eigenvectors as rows": (plot, "token_scores = rows @ v", "token_scores = rows @ v[:, ::-1]", EIGENVECTORS),
    "lowest token first": (plot, "*order[:top][::-1]]", "*order[:top]]", EIGENVECTORS),
    "labels by rank": (
        plot,
        '{labels[t]!r}" for t in ends',
        '{labels[n % len(labels)]!r}" for n, t in enumerate(ends)',
        EIGENVECTORS,
    ),
    "form transposed": (
        plot,
        "heat = _heatmap(m, x=axis, y=axis)",
        "heat = _heatmap(m.T, x=axis, y=axis)",
        INTERACTION,
    ),
    "range not symmetric": (plot, "zmin=-limit", "zmin=0", INTERACTION),
    "pattern before its factors": (
        plot,
        '[_array("factors", f, 3) for f in factors] + [_array("pattern", pattern, 3)]',
        '[_array("pattern", pattern, 3)] + [_array("factors", f, 3) for f in factors]',
        ATTENTION,
    ),
    "norms of the query": (plot, "maps[-1] * norms[:, None]", "maps[-1] * norms[:, :, None]", ATTENTION),
    "pattern transposed": (
        plot,
        "blank = np.where(masked, np.nan, m[n])",
        "blank = np.where(masked, np.nan, m[n].T)",
        ATTENTION,
    ),
    "heads exchanged": (
        plot,
        "range(n_head) if heads is None else heads",
        "range(n_head) if heads is None else sorted(heads)",
        ATTENTION,
    ),
    "the present masked": (plot, "seq_k - seq_q)", "seq_k - seq_q - 1)", ATTENTION),
    "one range for all columns": (
        plot,
        "limits = [_limit(m[:, ~masked]) for m in maps]",
        "limits = [_limit(maps[0][:, ~masked]) for m in maps]",
        ATTENTION,
    ),
    "queries named keys": (plot, 'title="query"', 'title="key"', ATTENTION),
    "least likely token": (plot, ".softmax(-1).max(-1)", ".softmax(-1).min(-1)", LENS),
    "probability over positions": (plot, ".softmax(-1)", ".softmax(1)", LENS),
    "other rows left out": (
        plot,
        "values.append(sum(r.value for r in e.rows[top:]))",
        "values.append(sum(r.value for r in e.rows))",
        BARS,
    ),
    "upside down": (plot, 'update_yaxes(autorange="reversed", automargin=True)', "update_yaxes(automargin=True)", BARS),
    "rows and columns exchanged": (
        plot,
        "x=_unique(columns), y=_unique(rows)",
        "x=_unique(rows), y=_unique(columns)",
        SIMILARITY,
    ),
    "error bars that are values": (plot, "list(errors[name])}", "list(values)}", TRUNCATION),
    "cost across": (plot, "x=list(kept), y=list(values)", "x=list(values), y=list(kept)", TRUNCATION),
    "scalars exchanged": (plot, '"residual": net.scalars.lambda0', '"residual": net.scalars.lambda1', LAMBDAS),
    "axis titles exchanged": (
        plot,
        "title=x or None, **AXIS).update_yaxes(title=y or None",
        "title=y or None, **AXIS).update_yaxes(title=x or None",
        LINES,
    ),
    # report
    "columns exchanged": (reporting, "row.value, e.share(row), *e", "e.share(row), row.value, *e", PAGE),
    "ablations in another order": (reporting, "*e.ablate(row))", "*reversed(e.ablate(row)))", PAGE),
    "headings exchanged": (reporting, '"part", "adds", "share"', '"part", "share", "adds"', PAGE),
    "last rows": (reporting, "for row in e.rows[: study.top]", "for row in e.rows[-study.top :]", PAGE),
    "last row as the prompt": (reporting, "prompt = tokens[0, :-1]", "prompt = tokens[-1, :-1]", PAGE),
}

test_fault_is_noticed = each_is_noticed(FAULTS)
