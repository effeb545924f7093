"""The answer key: it is read as it was written, and its losses are those of a slow count."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tests.limits import assert_close
from tnlm.languages import LANGUAGES, load_key, losses, make_key


def made(name, n=60, **options):
    language = LANGUAGES[name](**options, seed=5)
    tokens, entropy = language.sample(n, seed=1)
    counts = np.bincount(tokens.reshape(-1), minlength=language.d_vocab)
    return language, counts, tokens, entropy, make_key(language, counts, losses(language, counts, tokens, entropy))


@pytest.mark.parametrize("name", LANGUAGES)
def test_round_trip(name, tmp_path):
    language, counts, _, _, key = made(name, noise=0.01 if name == "brackets" else 0.0)
    key.save(tmp_path / "key.json")
    again = load_key(tmp_path)
    assert again == key == load_key(tmp_path / "key.json")
    assert again.generator() == language
    assert again.counts == tuple(counts.tolist())
    assert all(isinstance(rule.sources, tuple) for rule in again.rules)
    for a, b in zip(key.candidates(), again.candidates(), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_infinite_strength_is_null_in_the_file(tmp_path):
    made("brackets")[-1].save(tmp_path / "key.json")
    values = json.loads((tmp_path / "key.json").read_text())
    assert {rule["strength"] for rule in values["rules"]} == {None}
    assert math.isinf(load_key(tmp_path).rules[0].strength)


@pytest.mark.parametrize("name", LANGUAGES)
def test_losses_are_those_of_a_slow_count(name):
    language, counts, tokens, entropy, key = made(name, n=20)
    code = [-math.log((c + 1) / (counts.sum() + len(counts))) for c in counts.tolist()]
    unigram, optimal, contexts = [], [], [[] for _ in language.rules]
    for row in range(20):
        for t in range(1, language.seq):
            unigram.append(code[tokens[row, t]])
            optimal.append(entropy[row, t])
            for column in np.flatnonzero(language.holds(tokens[row : row + 1, :t])[0]):
                contexts[column].append((unigram[-1], optimal[-1]))
    found = key.losses
    assert_close(found["unigram"], np.mean(unigram), roundings=len(unigram), scale=10.0)
    assert_close(found["optimal"], np.mean(optimal), roundings=len(unigram), scale=10.0)
    by_sequence = np.reshape(optimal, (20, -1)).mean(1)
    assert_close(found["optimal_error"], by_sequence.std() / math.sqrt(20), roundings=len(unigram), scale=10.0)
    assert [row["targets"] for row in found["contexts"]] == [len(rows) for rows in contexts]
    for row, want in zip(found["contexts"], contexts, strict=True):
        got = [row["unigram"], row["optimal"]]
        assert got == [None, None] if not want else assert_close(got, np.mean(want, 0).tolist(), scale=10.0) is None


def contexts_of(rule, prefix, key):
    """Whether a rule applies after one prefix, from the meaning of its kind."""
    options, other = key.options, set()
    if rule.kind == "pair":
        recent = prefix[-options["reach"] :]
        return prefix[-rule.offset :][:1] == list(rule.sources) if rule.offset else rule.sources[0] in recent
    if rule.kind == "and":
        return set(rule.sources) <= set(prefix[-options["reach"] :])
    if rule.kind == "induction":
        query, value = rule.sources
        places = [k for k in range(len(prefix) - 1) if prefix[k] == query]
        return prefix[-1] == query and bool(places) and prefix[places[-1] + 1] == value
    if rule.kind == "retrieval":
        query, key_, value = rule.sources
        pairs = 2 * options["n_pairs"]
        stored = list(zip(prefix[:pairs:2], prefix[1:pairs:2], strict=False))
        asked = len(prefix) - pairs
        return asked >= 2 and asked % 3 == 2 and prefix[-1] == query and (key_, value) in stored
    other = {r.sources[1]: r.target for r in key.rules if r.context == "open"}
    tree, closed = [], [None]
    for token in prefix:
        if token in other:
            tree.append(token)
            closed.append(None)
        elif token in other.values():
            closed.pop()
            closed[-1] = tree.pop()
    if rule.context == "open":
        return tuple(tree[-2:]) == rule.sources
    return bool(tree) and (tree[-1], closed[-1]) == rule.sources


@pytest.mark.parametrize("name", ["skip-bigrams", "and", "induction", "retrieval", "brackets"])
def test_rules_apply_where_their_kind_says(name):
    language, _, tokens, _, key = made(name, n=40)
    applied = 0
    for row in range(40):
        t = 3 + (7 * row) % (language.seq - 3)
        got = language.holds(tokens[row : row + 1, :t])[0]
        want = [contexts_of(rule, tokens[row, :t].tolist(), key) for rule in language.rules]
        assert got.tolist() == want
        applied += sum(want)
    assert applied > 5


@pytest.mark.user_error
def test_what_is_no_key(tmp_path):
    with pytest.raises(ValueError, match=r"must be the key of a toy language, .* `tnlm-train data toy LANGUAGE"):
        load_key(tmp_path)
    (tmp_path / "key.json").write_text('{"language": "and"}')
    with pytest.raises(
        ValueError, match=r"must hold the key of a toy language, but it does not fit: KeyError\('rules'"
    ):
        load_key(tmp_path)
    key = dataclasses.replace(made("and")[-1], language="klingon")
    key.save(tmp_path / "key.json")
    with pytest.raises(ValueError, match="'klingon'"):
        load_key(tmp_path)
