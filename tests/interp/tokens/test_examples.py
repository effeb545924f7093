"""Extreme places in text, against a loop; tables of bare tokens, against dense products."""

import pytest
import torch

from tests.interp.test_extraction import make
from tests.limits import assert_close
from tnlm.interp.extraction import extract
from tnlm.interp.layers.rounding import form_size
from tnlm.interp.tokens.examples import top_examples
from tnlm.interp.tokens.tables import path_table
from tnlm.points import record


@pytest.mark.parametrize("pure", [False, True])
def test_top_examples_are_the_extremes_of_the_layer(pure):
    model, tokens = make(pure=pure), torch.randint(0, 11, (5, 9))
    u = torch.randn(30, dtype=torch.float64)
    out = record(model, tokens, ["blocks.1.hook_mlp_out"])["blocks.1.hook_mlp_out"] @ u
    found = top_examples(model, tokens, 1, u, k=3, context=9, batch_size=2)
    assert_close(found.high[0].value, out.max().item())
    assert_close(found.low[0].value, out.min().item())
    best = found.high[0]
    assert_close(out[best.row, best.position].item(), best.value)
    assert best.tokens == tuple(tokens[best.row, : best.position + 1].tolist())
    assert float(found.bounds.low) <= found.low[0].value <= found.high[0].value <= float(found.bounds.high)
    ends = (found.high[0].value / float(found.bounds.high), found.low[0].value / float(found.bounds.low))
    assert_close(found.usage, ends, roundings=1)
    assert max(found.usage) <= 1
    assert [e.value for e in found.high] == sorted((e.value for e in found.high), reverse=True)


def test_bounds_of_a_definite_form_reach_the_small_inputs_that_eps_allows():
    model, tokens = make("squared", d_hidden=40), torch.randint(0, 11, (2, 5))
    with torch.no_grad():
        model.blocks[1].mlp.w_d.abs_()
    u = torch.ones(30, dtype=torch.float64)
    found = top_examples(model, tokens, 1, u)
    size = 30 * float(form_size(extract(model).mlp[1], u[None]))
    assert_close(float(found.bounds.low), model.blocks[1].mlp.bias.sum().item(), scale=size)
    assert float(found.bounds.low) < found.low[0].value


def test_equal_contexts_appear_once():
    model = make()
    tokens = torch.randint(0, 11, (1, 6)).repeat(4, 1)
    found = top_examples(model, tokens, 0, torch.randn(30, dtype=torch.float64), k=6, context=6)
    assert len({e.tokens for e in found.high}) == len(found.high) == 6


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda net, u, tokens: path_table(net, 3, "mlp"), "layer must be an integer between 0 and 2, got 3"),
        (lambda net, u, tokens: path_table(net, 0, "attn"), "path must be a head number"),
        (lambda net, u, tokens: path_table(net, -1, "mlp"), "layer must be an integer between 0 and 2, got -1"),
        (
            lambda net, u, tokens: path_table(net.model, 0, "mlp"),
            r"must be an extracted model, got Transformer .* tnlm\.interp\.extract",
        ),
        (lambda net, u, tokens: top_examples(net, tokens, 0, u, k=0), "k must be an integer at least 1, got 0"),
        (
            lambda net, u, tokens: top_examples(net, tokens, 0, u, context=0),
            "context must be an integer at least 1, got 0",
        ),
        (
            lambda net, u, tokens: top_examples(net, tokens, 0, u, batch_size=0),
            "batch_size must be an integer at least 1, got 0",
        ),
        (lambda net, u, tokens: top_examples(make("swiglu"), tokens, 0, u), "swiglu MLP is not polynomial"),
        (lambda net, u, tokens: top_examples(net, tokens, 0, u * torch.nan), "u must be finite"),
        (
            lambda net, u, tokens: top_examples(
                net, torch.zeros(3, dtype=torch.long), 0, torch.randn(30, dtype=torch.float64)
            ),
            "rows, seq",
        ),
    ],
)
def test_bad_requests_are_refused(call, text):
    net = extract(make())
    u, tokens = torch.randn(30, dtype=torch.float64), torch.randint(0, 11, (2, 4))
    with pytest.raises(ValueError, match=text):
        call(net, u, tokens)
