"""Toy languages: the stated next-token distribution against plain loops, against counted samples, by enumeration."""

import itertools
import math

import numpy as np
import pytest

from tests.languages.reference import REFERENCES
from tests.limits import assert_close, assert_within
from tnlm.languages import LANGUAGES
from tnlm.languages.rules import candidates

CASES = [(name, {}) for name in LANGUAGES] + [("skip-bigrams", {"once": True})]
SMALL = {
    "skip-bigrams": {"d_vocab": 4, "seq": 5, "reach": 2, "n_anywhere": 1, "n_offset": 0, "n_negative": 1, "n_next": 1},
    "and": {"d_vocab": 4, "seq": 5, "reach": 3, "n_rules": 1, "n_single": 1, "n_xor": 0, "share": 0.0},
    "induction": {"d_vocab": 3, "seq": 6, "n_exempt": 1},
    "retrieval": {"n_keys": 2, "n_values": 2, "n_pairs": 2, "n_queries": 1},
    "brackets": {"n_kinds": 1, "n_fillers": 1, "depth": 2, "seq": 7},
    "agreement": {"n_classes": 2, "n_nouns": 1, "n_invariant": 1, "n_fillers": 1, "seq": 5},
}
"""Languages of few ids, whose sequences can all be listed."""
NORMAL = 5.0
"""Standard deviations that a count may be off: one in 1.7 million, of up to 800 counts; seeds are fixed."""


def make(name, options=(), seed=3):
    return LANGUAGES[name](**dict(options), seed=seed)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_the_distribution_is_the_described_one(name, options, noise):
    language = make(name, {**options, "noise": noise})
    # prefixes without noise, which every reference can read; the mixture with the uniform draw is the same for all
    tokens, _ = make(name, options).sample(12, seed=1)
    for row, t in itertools.product(range(12), range(0, language.seq, 5)):
        t = min(language.seq - 1, t + row % 5)
        want = np.array(REFERENCES[name](language, tokens[row, :t].tolist()))
        want = (1 - noise) * want + noise / language.d_vocab
        assert_close(language.probs(tokens[row : row + 1, :t])[0], want, roundings=300, scale=1.0)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_samples_follow_the_distribution(name, options):
    """Occurrences of each token, of each rule's target where it applies, and of all those together, against the sum of
    the stated probabilities."""
    language = make(name, {**options, "noise": 0.02})
    tokens, entropy = language.sample(400, seed=1)
    assert tokens.shape == entropy.shape == (400, language.seq)
    every, target = np.eye(language.d_vocab), [rule.target for rule in language.rules]
    seen, mean, variance = np.zeros((3, language.d_vocab + len(target) + 1))
    for t in range(language.seq):
        p = language.probs(tokens[:, :t])
        assert_close(entropy[:, t], -(p * np.log(p)).sum(1), roundings=300, scale=np.log(language.d_vocab))
        applies = language.holds(tokens[:, :t])
        rules = applies @ every[target]  # of each token as the next one: the rules that have it as their target
        drawn, rows = tokens[:, t], np.arange(400)
        seen += np.concatenate(
            [every[drawn].sum(0), (applies & (drawn[:, None] == target)).sum(0), [rules[rows, drawn].sum()]]
        )
        mean += np.concatenate([p.sum(0), (applies * p[:, target]).sum(0), [(p * rules).sum()]])
        spread = (p * rules**2).sum(1) - (p * rules).sum(1) ** 2
        q = p[:, target]
        variance += np.concatenate([(p * (1 - p)).sum(0), (applies * q * (1 - q)).sum(0), [spread.sum()]])
    enough = variance > 20  # where a count is nearly normal
    assert enough[: language.d_vocab].all()
    assert enough[-1]
    assert_within(np.abs((seen - mean)[enough] / np.sqrt(variance[enough])), NORMAL, "standard deviations")


@pytest.mark.parametrize("name", LANGUAGES)
def test_entropy_is_that_of_all_sequences(name):
    language = make(name, SMALL[name])
    every = np.array(list(itertools.product(range(language.d_vocab), repeat=language.seq)))
    log_p = np.zeros(len(every))
    for t in range(language.seq):
        prefixes, inverse = np.unique(every[:, :t], axis=0, return_inverse=True)
        p = (
            language.probs(prefixes)[inverse.reshape(-1), every[:, t]]
            if t
            else language.probs(every[:, :0])[0][every[:, 0]]
        )
        with np.errstate(divide="ignore"):
            log_p += np.log(p)
    p = np.exp(log_p)
    assert_close(p.sum(), 1.0, roundings=len(every))
    whole = -(p * np.where(p > 0, log_p, 0)).sum()
    _, entropy = language.sample(4000, seed=2)
    of_each = entropy.sum(1)
    assert_within((of_each.mean() - whole) / max(of_each.std() / 4000**0.5, 1e-12), NORMAL, "standard errors")


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_seeds(name, options):
    language = make(name, options)
    again, other = make(name, options), make(name, options, seed=4)
    assert language.rules == again.rules
    assert language.rules != other.rules
    tokens, entropy = language.sample(9, seed=1)
    np.testing.assert_array_equal(tokens, again.sample(9, seed=1)[0])
    np.testing.assert_array_equal(entropy, again.sample(9, seed=1)[1])
    assert (tokens != language.sample(9, seed=2)[0]).any()
    assert (tokens != other.sample(9, seed=1)[0]).any()


def test_a_larger_sample_begins_with_the_same_blocks():
    language = make("retrieval")
    np.testing.assert_array_equal(language.sample(4100, seed=1)[0][:4096], language.sample(4096, seed=1)[0])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_lists_of_candidates(name, options, seed):
    language = make(name, options, seed)
    found = set()
    for axes in language.axes:
        rows = candidates(axes, language.rules)
        assert len(rows.true) >= 200
        assert 0 < rows.true.mean() <= 0.2
        assert rows.sources.shape == (len(rows.true), len(axes.sources))
        all_rows = np.column_stack([rows.sources, rows.offset, rows.target, rows.sign])
        assert len(np.unique(all_rows, axis=0)) == len(all_rows)
        true = {tuple(row) for row in all_rows[rows.true].tolist()}
        want = {
            (*r.sources, r.offset, r.target, r.sign)
            for r in language.rules
            if (r.kind, r.context) == (axes.kind, axes.context)
        }
        assert true == want
        found |= want
    assert len(found) == len(set(language.rules)) - sum(
        r.context == "closed" and len(set(r.sources)) == 1 for r in language.rules
    )


def test_offsets_of_a_pair_that_holds_anywhere_are_no_candidates():
    language = make("skip-bigrams")
    rows = candidates(language.axes[0], language.rules)
    anywhere = {(r.sources[0], r.target) for r in language.rules if not r.offset}
    at = {(a, t) for a, t, k in zip(rows.sources[:, 0].tolist(), rows.target.tolist(), rows.offset.tolist()) if k}
    assert not anywhere & at
    pairs = language.d_vocab * (language.d_vocab - 1)
    assert len(rows.true) == 2 * (5 * pairs - 4 * len(anywhere))


@pytest.mark.parametrize("seed", [0, 3])
def test_rules_of_skip_bigrams(seed):
    language = make("skip-bigrams", seed=seed)
    positive = [r for r in language.rules if r.sign > 0]
    negative = [r for r in language.rules if r.sign < 0]
    anywhere = [r for r in positive if not r.offset]
    assert (len(anywhere), len(positive) - len(anywhere), len(negative)) == (48, 24 + 12, 12)
    assert len({(r.sources, r.target) for r in language.rules}) == len(language.rules)
    assert len({r.sources for r in anywhere}) == len({r.target for r in anywhere}) == 29  # 60 % of 48
    assert not {r.target for r in negative} & {r.target for r in positive}
    tokens, _ = language.sample(300, seed=1)
    counts = np.bincount(tokens.reshape(-1), minlength=128)
    assert min(counts[r.target] for r in negative) >= 5 * np.median(counts)
    # the decoys follow sources of the other rules at once, and no other rule has their pair
    decoys = language.rules[-12:]
    assert all(r.offset == 1 and r.sources in {a.sources for a in anywhere} for r in decoys)
    assert not {r.target for r in decoys} & {r.target for r in anywhere}


def test_decoys_of_and():
    language = make("and")
    sources = {s for r in language.rules for s in r.sources}
    assert len(language.rules) == 12
    assert len(sources) < 24, "rules share sources"
    assert [r.kind for r in language.decoys] == ["pair"] * 4 + ["xor"]
    assert language.decoys[-1].sources not in {r.sources for r in language.rules}


def test_the_distractor_is_nearer_in_half_of_the_sentences():
    language = make("agreement", {"filler": 0.0})
    tokens, _ = language.sample(800, seed=1)
    first = tokens[:, 0] == language._groups["marker"][0]
    assert_within(first.mean() - 0.5, NORMAL * 0.5 / 800**0.5)
    # subject marker distractor verb, or marker distractor subject verb
    verb = tokens[:, 3]
    form = {rule.sources[0]: rule.target for rule in language.rules}
    subject = np.where(first, tokens[:, 2], tokens[:, 0])
    assert all(form.get(s, v) == v for s, v in zip(subject.tolist(), verb.tolist()))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", ["induction", "retrieval", "brackets", "agreement"])
def test_strength_is_the_log_odds_of_a_rule(name, noise):
    """Odds of the target where the rule applies, against one where it does not and the place is the same."""
    language = make(name, {"noise": noise})
    tokens, _ = make(name).sample(400, seed=1)
    checked = 0
    for t in range(4, language.seq, 7):
        applies, p = language.holds(tokens[:, :t]), language.probs(tokens[:, :t])
        for row, column in np.argwhere(applies)[:50]:
            rule = language.rules[column]
            if name == "induction":
                base = language._base[rule.target]
                clean = 0.3 * base
                assert_close(rule.strength, math.log((0.7 + clean) / clean), roundings=20, scale=10.0)
            elif noise:
                other = min(p[row])
                assert other == noise / language.d_vocab
                if name != "agreement" or p[row, rule.target] > 0.5:
                    assert_close(rule.strength, math.log(p[row, rule.target] / other), roundings=50, scale=10.0)
            else:
                assert math.isinf(rule.strength)
            checked += 1
    assert checked > 20


@pytest.mark.user_error
@pytest.mark.parametrize(
    "name, options, message",
    [
        ("skip-bigrams", {"d_vocab": 36}, "two ids more than targets"),
        ("skip-bigrams", {"n_next": 30}, "29 distinct sources and targets must have room for all rules"),
        ("and", {"n_rules": 40, "d_vocab": 20}, "ids for all sources"),
        ("induction", {"n_exempt": 32}, "at least one token that is not exempt"),
        ("induction", {"noise": 1.0}, "noise must be a probability below 1"),
        ("induction", {"d_vocab": -3}, "d_vocab must be at least 0, got d_vocab=-3"),
        ("retrieval", {"n_pairs": 13}, "1 <= n_pairs <= n_keys"),
        ("brackets", {"p_open": 0.8}, "above 0 and below 1 together"),
        ("agreement", {"filler": 1.0}, "0 <= filler < 1"),
        ("agreement", {"seed": -1}, "seed must be an integer of at least 0"),
    ],
)
def test_options_that_contradict_each_other(name, options, message):
    with pytest.raises(ValueError, match=message):
        LANGUAGES[name](**options)


@pytest.mark.user_error
def test_a_sample_has_sequences():
    with pytest.raises(ValueError, match="at least one sequence, got n=0"):
        make("retrieval").sample(0)
