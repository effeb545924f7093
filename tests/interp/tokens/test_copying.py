"""Scores of copying from the weights: the permutation null, planted heads, and a clock that is exact."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.conftest import randomize
from tests.interp.builders import make_head, noise
from tests.limits import assert_close
from tests.symmetries import SYMMETRIES
from tnlm.config import ModelConfig
from tnlm.interp import copy_table, cycle_votes, equal_part, extract, follower_entries, match, pattern_table
from tnlm.transformer import Transformer

SIZES = {"d_vocab": 5, "n_layer": 2, "n_head": 1, "d_model": 10, "d_hidden": 0, "n_ctx": 17, "mlp": "none"}
PLAIN = {"x0_mixing": False, "value_residual": False}


def test_match_is_the_mean_and_deviation_over_all_permutations():
    table = noise(5, 5)
    means = torch.stack([table[range(5), list(p)].mean() for p in itertools.permutations(range(5))])
    found, deviation = match(table), float(means.std(correction=0))
    assert_close(found.value, float(table.diagonal().mean()))
    assert_close(found.null, float(means.mean()))
    assert_close(found.z, (found.value - found.null) / deviation)
    residue = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
    assert_close(found.effect, (found.value - found.null) / float(residue.square().mean().sqrt()))


def test_match_of_the_identity_of_its_opposite_and_of_nothing():
    eye = torch.eye(7, dtype=torch.float64)
    assert_close(match(3 * eye + 2).z, 6)
    assert_close(match(1 - eye).z, -6)
    assert match(noise(7, 1) + noise(1, 7, seed=1)).z == 0  # rows and columns alone prefer no pairing


@pytest.mark.parametrize("attention", ["bilinear", "squared"])
def test_pattern_table_contracts_the_pattern_tensor(attention):
    head, queries, keys = make_head(attention), noise(3, 7), noise(4, 7, seed=1)
    expected = torch.einsum("ijkl,ni,nj,mk,ml->nm", head.pattern_tensor(2), queries, queries, keys, keys)
    assert_close(pattern_table(head, queries, keys, 2), expected)


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("layer, head", [(0, 1), (1, 0)])
def test_copy_table_is_what_the_head_adds_to_the_logits(norm, layer, head):
    """Token by token, with both values of a value residual."""
    sizes = SIZES | {"n_head": 2, "d_qk": 4, "d_vocab_used": 4}
    config = (
        ModelConfig.released(**sizes)
        if norm == "rms"
        else ModelConfig.pure(**sizes, value_residual=True, x0_mixing=True)
    )
    model = randomize(Transformer(config, dtype=torch.float64))
    net, inputs = extract(model), noise(5, 10, seed=3)
    found = copy_table(net, layer, head, inputs)
    blocks, rows = model.blocks, slice(head * 5, (head + 1) * 5)

    def rms(x):
        return x / (x @ x / 10 + config.norm_eps).sqrt() if norm == "rms" else x

    for j in range(5):
        bare = rms(model.embed.w_e[j]) * blocks[0].lambdas.sum()
        value = blocks[layer].attn.w_v[rows] @ rms(inputs[j])
        if layer:
            mix = blocks[1].attn.lamb
            value = (1 - mix) * value + mix * (blocks[0].attn.w_v[rows] @ rms(bare))
        written = blocks[layer].attn.w_o[:, rows] @ value * (1 if layer else blocks[1].lambdas[0])
        assert_close(found[:, j], (model.unembed.w_u @ written).detach())


def test_a_planted_head_copies_whatever_the_scale_of_its_embedding():
    """In a model with norms: the effect is that of the identity, and the score of another head is not."""
    model = randomize(Transformer(ModelConfig.released(**SIZES | {"n_head": 2, "d_qk": 4}), dtype=torch.float64))
    with torch.no_grad():
        model.embed.w_e[:] = 7 * torch.eye(5, 10)
        model.unembed.w_u[:] = 3 * torch.eye(5, 10)
        model.blocks[0].attn.w_v[:5, :5] = torch.eye(5)
        model.blocks[0].attn.w_o[:5, :5] = torch.eye(5)
        model.blocks[0].attn.w_v[:5, 5:] = model.blocks[0].attn.w_o[5:, :5] = 0
        model.blocks[1].lambdas[0] = 0.5
    net = extract(model)
    found = match(copy_table(net, 0, 0, net.x0))
    assert_close([found.z, found.effect], [4.0, 2.0])
    assert_close(found.value, 3 * 10**0.5 * 0.5, dtype=torch.float32)  # of length sqrt(10) after the norm
    assert abs(match(copy_table(net, 0, 1, net.x0)).z) < 3


def test_follower_entries_are_the_keys_after_an_equal_token():
    found = follower_entries(torch.tensor([[3, 1, 2, 3, 1, 1]]))[0]
    assert found.nonzero().tolist() == [[3, 1], [4, 2], [5, 2], [5, 5]]


def test_equal_part_draws_as_many_others_in_every_row():
    entries = follower_entries(torch.arange(3).repeat(2, 4))
    drawn = [equal_part(entries, seed) for seed in range(50)]
    for part in drawn:
        assert torch.equal(part.sum(-1), entries.sum(-1))
        assert not (part & entries).any()
        assert torch.equal(part, part.tril())
    assert torch.equal(drawn[0], equal_part(entries, 0))
    # every other entry is drawn at some time
    assert torch.equal(torch.stack(drawn).any(0)[:, 5:], (~entries).tril()[:, 5:])


def clock_model(period_reading=0.3):
    """Tokens are interchangeable, so averages over them are exact: layer 0 matches equal ones, layer 1 reads sums."""
    config = ModelConfig.pure(**SIZES, **PLAIN, rotary_base=1.0)
    model = Transformer(config, dtype=torch.float64)
    v, eye = 5, torch.eye(5, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.embed.w_e[:, :v] = eye
        model.unembed.w_u[:, :v] = eye
        first, second = model.blocks[0].attn, model.blocks[1].attn
        for w in (first.w_q1, first.w_k1, first.w_q2, first.w_k2):
            w[:v, :v] = 3 * eye
        first.w_v[:v, :v] = first.w_o[v:, :v] = eye  # written beside the embedding
        for n, w in enumerate((second.w_q1, second.w_k1, second.w_q2, second.w_k2)):
            w[:2, :v] = noise(2, 1, seed=n)
            w[:2, v:] = period_reading * noise(2, 1, seed=10 + n)
        second.w_v[:v, :v] = eye
        second.w_o[:v, :v] = -2 * eye
    return model


def test_effect_does_not_grow_with_the_number_of_tokens_and_z_does():
    small, large = (match(noise(n, n) + 3 * torch.eye(n, dtype=torch.float64)) for n in (100, 900))
    assert large.z > 2.5 * small.z
    assert small.effect == pytest.approx(large.effect, rel=0.1)


def test_votes_of_a_model_with_norms():
    """One-hot embeddings of one length: the norms scale them all alike, so a model without norms is equal."""
    model = clock_model()
    config = replace(model.config, norm="rms", norm_eps=0.0, embedding_norm=False, final_norm=False)
    other = Transformer(config, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    # layer 0 reads tokens of length sqrt(10); layer 1 reads sums of unequal length, so it is left to read tokens alone
    with torch.no_grad():
        for m in (model, other):
            m.blocks[0].attn.w_o.zero_()
        other.embed.w_e.mul_(3)
        for block in other.blocks:
            block.attn.w_v.div_(10**0.5)
            for name in ("w_q1", "w_k1", "w_q2", "w_k2"):
                getattr(block.attn, name).div_(10**0.5)
    votes = [cycle_votes(extract(m), 3, 11) for m in (model, other)]
    assert float(votes[0].abs().max()) > 1e-3
    assert_close(votes[1], votes[0])


@pytest.mark.parametrize("id", ["R", "E", "P", "U", "Q", "QR", "V"])
def test_votes_do_not_move_under_symmetries(id):
    sizes = SIZES | {"d_vocab_used": 4}
    config = ModelConfig.released(**sizes, **PLAIN, norm_eps=0.0, logit_softcap=None)
    model = randomize(Transformer(config, dtype=torch.float64))
    before, after = (cycle_votes(extract(m), 3, 7) for m in (model, SYMMETRIES[id](model)))
    assert_close(after, before, roundings=2**20)


@pytest.mark.parametrize("period", [2, 3, 5])
def test_votes_are_the_logits_of_a_model_with_interchangeable_tokens(period):
    model = clock_model()
    net, tokens = extract(model), torch.arange(period).repeat(9)[None, :17]
    logits = model(tokens)[0]
    for position in (period, 11, 16):
        votes = cycle_votes(net, period, position)
        back = tokens[0, position - torch.arange(period)]
        expected = logits[position, back] - torch.eye(period, dtype=torch.float64)[0]  # the direct path is no copy
        assert_close(votes, expected, dtype=torch.float32)  # the model's rotary tables are float32
    assert not torch.allclose(cycle_votes(net, period, 16), cycle_votes(net, period, 16, clock=False))


def test_without_the_clock_layer_1_reads_distance_alone():
    with_reading, without = extract(clock_model()), extract(clock_model(period_reading=0))
    expected = cycle_votes(without, 3, 11)
    assert_close(cycle_votes(with_reading, 3, 11, clock=False), expected)


@pytest.mark.user_error
@pytest.mark.parametrize(
    "call, text",
    [
        (lambda net, entries: match(noise(3, 4)), r"table must have shape \(any, 3\), got \(3, 4\)"),
        (lambda net, entries: match(noise(1, 1)), "number of tokens must be an integer at least 2, got 1"),
        (
            lambda net, entries: pattern_table(make_head("softmax"), noise(2, 7), noise(2, 7)),
            "pattern_table needs a polynomial pattern, got attention='softmax'",
        ),
        (
            lambda net, entries: cycle_votes(extract(Transformer(ModelConfig.pure(**SIZES))), 3, 5),
            "two layers of one head and nothing else",
        ),
        (
            lambda net, entries: cycle_votes(extract(clock_model()), 3, 17),
            "position must be an integer between 3 and 16, got 17",
        ),
        (lambda net, entries: copy_table(net, -1, 0, net.x0), "layer must be an integer between 0 and 1, got -1"),
        (lambda net, entries: copy_table(net, 2, 0, net.x0), "layer must be an integer between 0 and 1, got 2"),
        (lambda net, entries: copy_table(net.model, 0, 0, net.x0), "must be an extracted model, got Transformer"),
        (lambda net, entries: cycle_votes(net.model, 3, 5), "must be an extracted model, got Transformer"),
        (lambda net, entries: match(noise(3, 3) + 0j), "table must be real"),
        (
            lambda net, entries: follower_entries(torch.arange(3)),
            r"tokens must be ids \(batch, seq\), got shape \(3,\)",
        ),
        (
            lambda net, entries: equal_part(torch.zeros(1, 3, 4, dtype=torch.bool)),
            r"bool \(batch, seq, seq\), got torch.bool of shape \(1, 3, 4\)",
        ),
        (lambda net, entries: equal_part(torch.zeros(1, 3, 3)), "entries must be bool"),
        (lambda net, entries: equal_part(entries.logical_not()), "must be causal"),
        (
            lambda net, entries: equal_part(torch.eye(3, dtype=torch.bool)[None]),
            r"every row needs as many other entries as it has, got 1 of the 1 in row 0",
        ),
    ],
)
def test_what_is_refused(call, text):
    net = extract(clock_model())
    entries = torch.zeros(1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=text):
        call(net, entries)
