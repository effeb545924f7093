"""Mistakes in what explanations, attributions, tables and figures show, one at a time: a named check notices each.

``python -m pytest -v tests/interp/test_planted_faults.py`` prints one line per mistake.
"""

from functools import partial

import pytest

from tests.interp.predictions import test_attribution as attributed
from tests.interp.predictions import test_explanation as explained
from tests.interp.predictions.known import TARGET, Texts, known_model
from tests.interp.tokens import test_copying as copied
from tests.interp.tokens import test_tables as tabled
from tests.interp.views import test_plot as plotted
from tests.interp.views import test_reporting as reported
from tests.planted import assert_noticed
from tnlm.interp.predictions import attribution, explanation, terms
from tnlm.interp.tokens import bare_tokens, copying, tables
from tnlm.interp.views import plot, reporting


def report_of_the_known_model(folder) -> None:
    """The page of the model known by hand, its explanation cell by cell."""
    tokens, path = reported.KNOWN_TOKENS, folder / "r.html"
    options = {"tokens": tokens, "tokenizer": Texts(), "target": TARGET, "progress": False}
    reported.assert_known_explanation(reporting.report(known_model(), path, **options).read_text())


EXPLANATION = {
    "source reversed": (
        explained.assert_known_rows,
        terms,
        "head=n, source=source",
        "head=n, source=len(by_source) - 1 - source",
    ),
    "heads reversed": (explained.assert_known_rows, terms, "head=n, source", "head=len(values) - 1 - n, source"),
    "layer of a head off by one": (
        explained.assert_known_rows,
        terms,
        'Row("head", value, layer=self.layer,',
        'Row("head", value, layer=self.layer - 1,',
    ),
    "eigenvalue without its factor": (
        explained.assert_known_rows,
        terms,
        "float(self.factor * self.values[k])",
        "float(self.values[k])",
    ),
    "component rank off by one": (
        explained.assert_known_rows,
        terms,
        "component=k, eigenvalue",
        "component=k + 1, eigenvalue",
    ),
    "value without its factor": (
        explained.assert_known_rows,
        terms,
        "float(self.factor * self.parts[k])",
        "float(self.parts[k])",
    ),
    "direct path without its factor": (explained.assert_known_factor, terms, "net.embed_factor.double() *", "1.0 *"),
    "head without its factor": (
        explained.assert_known_factor,
        terms,
        "float(net.write_factors[layer]) * read, w_o",
        "read, w_o",
    ),
    "smallest row first": (
        explained.assert_known_rows,
        explanation,
        "key=lambda row: -abs(row.value)",
        "key=lambda row: abs(row.value)",
    ),
    "rows by value": (
        explained.assert_known_rows,
        explanation,
        "key=lambda row: -abs(row.value)",
        "key=lambda row: -row.value",
    ),
    "foil added": (
        explained.assert_known_table,
        explanation,
        "direction = direction - net.cast",
        "direction = direction + net.cast",
    ),
    "another key kept": (
        explained.assert_known_ablations,
        terms,
        "pattern[:, row.head, -1, row.source] = 0",
        "pattern[:, row.head, -1, -1 - row.source] = 0",
    ),
    "another head removed": (
        explained.assert_known_ablations,
        terms,
        "pattern[:, row.head, -1,",
        "pattern[:, -1 - row.head, -1,",
    ),
    "another component removed": (
        explained.assert_known_ablations,
        terms,
        "else [row.component]",
        "else [row.component + 1]",
    ),
    "direct path not removed": (
        explained.assert_known_ablations,
        explanation,
        "after, left = self._measure(removal, point)",
        "after, left = self._measure(removal if row.layer is not None else {}, point)",
    ),
    "held and actual exchanged": (
        explained.assert_known_ablations,
        explanation,
        "self._measure(held)[0] - before, after - before",
        "after - before, self._measure(held)[0] - before",
    ),
    "predicted of the other sign": (
        explained.assert_known_ablations,
        explanation,
        "Ablated(-row.value",
        "Ablated(row.value",
    ),
    "write without its factor when held": (
        explained.assert_known_ablations,
        explanation,
        "lost = factor * (written - left)",
        "lost = written - left",
    ),
    "token of the next position": (
        explained.assert_known_table,
        explanation,
        "int(self.tokens[row.source])",
        "int(self.tokens[row.source - 1])",
    ),
    "target and foil exchanged in the title": (
        explained.assert_known_table,
        explanation,
        'f"{name} minus {self._token(self.foil)}"',
        'f"logit of {self._token(self.foil)} minus {self._token(self.target)}"',
    ),
    "sum of the shown rows as the others": (
        explained.assert_known_table,
        explanation,
        "rest = sum(row.value for row in self.rows[top:])",
        "rest = sum(row.value for row in self.rows[:top])",
    ),
    "one other row too many": (
        explained.assert_known_table,
        explanation,
        "{len(self) - top} other rows",
        "{len(self) - top + 1} other rows",
    ),
    "share of the logit": (
        explained.assert_known_record,
        explanation,
        "row.value / self.absolute_sum if",
        "row.value / self.logit if",
    ),
    "cancellation upside down": (
        explained.assert_known_record,
        explanation,
        "self.absolute_sum / abs(self.logit) if",
        "abs(self.logit) / self.absolute_sum if",
    ),
    "record without its first row": (
        explained.assert_known_record,
        explanation,
        "for row in self.rows[:top]]\n        head",
        "for row in self.rows[1:top]]\n        head",
    ),
    "norms named where there are none": (
        explained.assert_known_table,
        explanation,
        'if held else "exact"',
        'if held else "exact given the norms of this run"',
    ),
}
ATTRIBUTION = {
    "heads in reverse order": (
        attributed.assert_known_pairs,
        attribution,
        'torch.einsum("mnd,nd->nm", w_o, z)',
        'torch.einsum("mnd,nd->nm", w_o, z).flip(0)',
    ),
    "direct path in one entry": (
        attributed.assert_known_pairs,
        attribution,
        "values[0] += direct / 2",
        "values[0] += direct",
    ),
    "constant has the interactions": (
        attributed.assert_known_shares,
        attribution,
        "shares[0] = values[0, 0]",
        "shares[0] = values[0].sum()",
    ),
    "layer without its factor": (
        attributed.assert_known_pairs,
        attribution,
        "values += factor * layer_pairs",
        "values += layer_pairs",
    ),
}
TABLES = {
    "not centred": (
        partial(tabled.assert_path_table, 1),
        tables,
        "net.unembed_centred(weights)[ids])",
        "net.unembed[ids])",
    ),
    "mean without weights": (
        partial(tabled.assert_counted_table, 1),
        tables,
        "net.unembed_centred(weights)[ids])",
        "net.unembed_centred()[ids])",
    ),
    "tokens that never occur": (
        partial(tabled.assert_counted_table, 1),
        tables,
        "if weights is not None:\n        ids",
        "if weights is None:\n        ids",
    ),
    "value of block 0 left out": (
        partial(tabled.assert_path_table, 1),
        bare_tokens,
        "if circuit.v0 is not None:",
        "if False:",
    ),
    "value of block 0 of the layer's input": (
        partial(tabled.assert_path_table, 1),
        bare_tokens,
        "bare_inputs(net, 0, x0)))",
        "2 * inputs))",
    ),
    "trace kept": (partial(tabled.assert_path_table, "mlp"), tables, "net.mlp[layer].canonical()", "net.mlp[layer]"),
    "factor of later layers left out": (
        partial(tabled.assert_path_table, "mlp"),
        tables,
        "factor * targets @ quadratic",
        "targets @ quadratic",
    ),
    "direct path of the first layer": (
        partial(tabled.assert_path_table, "direct"),
        tables,
        "net.embed_factor * targets @",
        "targets @",
    ),
    "effect over n": (
        copied.test_match_is_the_mean_and_deviation_over_all_permutations,
        copying,
        "z / (n - 1) ** 0.5",
        "z / n**0.5",
    ),
    "z over n - 1": (
        copied.test_match_is_the_mean_and_deviation_over_all_permutations,
        copying,
        "z = n * (value",
        "z = (n - 1) * (value",
    ),
}
PLOTS = {
    "ascending magnitudes": (plotted.assert_spectrum, plot, "np.argsort(-np.abs(v)", "np.argsort(np.abs(v)"),
    "magnitudes for values": (
        plotted.assert_spectrum,
        plot,
        '= v[np.argsort(-np.abs(v), kind="stable")]',
        '= np.abs(v[np.argsort(-np.abs(v), kind="stable")])',
    ),
    "colours exchanged": (
        plotted.assert_spectrum,
        plot,
        "POSITIVE if value > 0 else NEGATIVE",
        "NEGATIVE if value > 0 else POSITIVE",
    ),
    "eigenvectors as rows": (
        plotted.assert_eigenvectors,
        plot,
        "token_scores = rows @ v",
        "token_scores = rows @ v[:, ::-1]",
    ),
    "lowest token first": (plotted.assert_eigenvectors, plot, "*order[:top][::-1]]", "*order[:top]]"),
    "labels by rank": (
        plotted.assert_eigenvectors,
        plot,
        '{labels[t]!r}" for t in ends',
        '{labels[n % len(labels)]!r}" for n, t in enumerate(ends)',
    ),
    "form transposed": (
        plotted.assert_interaction,
        plot,
        "heat = _heatmap(m, x=axis, y=axis)",
        "heat = _heatmap(m.T, x=axis, y=axis)",
    ),
    "range not symmetric": (plotted.assert_interaction, plot, "zmin=-limit", "zmin=0"),
    "pattern before its factors": (
        plotted.assert_attention,
        plot,
        '[_array("factors", f, 3) for f in factors] + [_array("pattern", pattern, 3)]',
        '[_array("pattern", pattern, 3)] + [_array("factors", f, 3) for f in factors]',
    ),
    "norms of the query": (plotted.assert_attention, plot, "maps[-1] * norms[:, None]", "maps[-1] * norms[:, :, None]"),
    "pattern transposed": (
        plotted.assert_attention,
        plot,
        "blank = np.where(masked, np.nan, m[n])",
        "blank = np.where(masked, np.nan, m[n].T)",
    ),
    "heads exchanged": (
        plotted.assert_attention,
        plot,
        "range(n_head) if heads is None else heads",
        "range(n_head) if heads is None else sorted(heads)",
    ),
    "the present masked": (plotted.assert_attention, plot, "seq_k - seq_q)", "seq_k - seq_q - 1)"),
    "one range for all columns": (
        plotted.assert_attention,
        plot,
        "limits = [_limit(m[:, ~masked]) for m in maps]",
        "limits = [_limit(maps[0][:, ~masked]) for m in maps]",
    ),
    "queries named keys": (plotted.assert_attention, plot, 'title="query"', 'title="key"'),
    "least likely token": (plotted.assert_logit_lens, plot, ".softmax(-1).max(-1)", ".softmax(-1).min(-1)"),
    "probability over positions": (plotted.assert_logit_lens, plot, ".softmax(-1)", ".softmax(1)"),
    "other rows left out": (
        explained.assert_known_figure,
        plot,
        "values.append(sum(r.value for r in e.rows[top:]))",
        "values.append(sum(r.value for r in e.rows))",
    ),
    "upside down": (
        explained.assert_known_figure,
        plot,
        'update_yaxes(autorange="reversed", automargin=True)',
        "update_yaxes(automargin=True)",
    ),
    "rows and columns exchanged": (
        plotted.assert_similarity,
        plot,
        "x=_unique(columns), y=_unique(rows)",
        "x=_unique(rows), y=_unique(columns)",
    ),
    "error bars that are values": (plotted.assert_truncation, plot, "list(errors[name])}", "list(values)}"),
    "cost across": (plotted.assert_truncation, plot, "x=list(kept), y=list(values)", "x=list(values), y=list(kept)"),
    "scalars exchanged": (
        plotted.assert_lambdas,
        plot,
        '"residual": net.scalars.lambda0',
        '"residual": net.scalars.lambda1',
    ),
    "axis titles exchanged": (
        plotted.assert_lines,
        plot,
        "title=x or None, **AXIS).update_yaxes(title=y or None",
        "title=y or None, **AXIS).update_yaxes(title=x or None",
    ),
}
REPORT = {
    "columns exchanged": (reporting, "row.value, e.share(row), *e", "e.share(row), row.value, *e"),
    "ablations in another order": (reporting, "*e.ablate(row))", "*reversed(e.ablate(row)))"),
    "headings exchanged": (reporting, '"part", "adds", "share"', '"part", "share", "adds"'),
    "last rows": (reporting, "for row in e.rows[: study.top]", "for row in e.rows[-study.top :]"),
    "last row as the prompt": (reporting, "prompt = tokens[0, :-1]", "prompt = tokens[-1, :-1]"),
}


@pytest.mark.parametrize("fault", EXPLANATION)
def test_fault_in_an_explanation_is_noticed(fault, request):
    assert_noticed(*EXPLANATION[fault], request)


@pytest.mark.parametrize("fault", ATTRIBUTION)
def test_fault_in_an_attribution_is_noticed(fault, request):
    assert_noticed(*ATTRIBUTION[fault], request)


@pytest.mark.parametrize("fault", TABLES)
def test_fault_in_a_table_over_tokens_is_noticed(fault, request):
    assert_noticed(*TABLES[fault], request)


@pytest.mark.parametrize("fault", PLOTS)
def test_fault_in_a_figure_is_noticed(fault, request):
    assert_noticed(*PLOTS[fault], request)


def test_the_report_as_it_is_passes(tmp_path):
    report_of_the_known_model(tmp_path)


@pytest.mark.parametrize("fault", REPORT)
def test_fault_in_the_report_is_noticed(fault, tmp_path, request):
    assert_noticed(partial(report_of_the_known_model, tmp_path), *REPORT[fault], request)
