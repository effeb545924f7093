"""The next-token distributions of the toy languages, written again from their description: one prefix, plain loops.

They take the rules and roles from a language and nothing else: no distribution, no parsing of a prefix.
"""

import math


def windowed(language, prefix):
    recent = prefix[-language.reach :] if language.reach else []
    logits = [math.log(b) for b in language._base]
    for rule in (*language.rules, *language.decoys):
        present = [source in recent for source in rule.sources]
        if rule.kind == "and":
            times = all(present)
        elif rule.kind == "xor":
            times = present[0] != present[1]
        elif rule.offset:
            times = len(prefix) >= rule.offset and prefix[-rule.offset] == rule.sources[0]
        else:
            times = recent.count(rule.sources[0])
            if language.name == "and" or language.once:
                times = min(times, 1)
        logits[rule.target] += times * rule.sign * rule.strength
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def induction(language, prefix):
    base = list(language._base)
    queries = {rule.sources[0] for rule in language.rules}
    if not prefix or prefix[-1] not in queries or prefix[-1] not in prefix[:-1]:
        return base
    newest = max(place for place in range(len(prefix) - 1) if prefix[place] == prefix[-1])
    p = [(1 - language.copy) * b for b in base]
    p[prefix[newest + 1]] += language.copy
    return p


def retrieval(language, prefix):
    keys = sorted({rule.sources[0] for rule in language.rules})
    values = sorted({rule.target for rule in language.rules})
    (ask,) = set(range(language.d_vocab)) - set(keys) - set(values)
    pairs = 2 * language.n_pairs
    stored = dict(zip(prefix[:pairs:2], prefix[1:pairs:2], strict=False))
    if len(prefix) < pairs:
        allowed = values if len(prefix) % 2 else [key for key in keys if key not in prefix[::2]]
    else:
        allowed = [[ask], list(stored), [stored[prefix[-1]]] if prefix[-1] in stored else values][
            (len(prefix) - pairs) % 3
        ]
    return uniform(language, allowed)


def brackets(language, prefix):
    openers = {rule.sources[1]: rule.target for rule in language.rules if rule.context == "open"}
    fillers = sorted(set(range(language.d_vocab)) - set(openers) - set(openers.values()))
    still_open = []
    for token in prefix:
        if token in openers:
            still_open.append(token)
        elif token in openers.values():
            assert openers[still_open.pop()] == token
    p = [0.0] * language.d_vocab
    rest = 1.0
    if len(still_open) < language.depth:
        rest -= language.p_open
        for token in openers:
            p[token] = language.p_open / len(openers)
    if still_open:
        rest -= language.p_close
        p[openers[still_open[-1]]] = language.p_close
    for token in fillers:
        p[token] = rest / len(fillers)
    return p


def agreement(language, prefix):
    form = {rule.sources[0]: rule.target for rule in language.rules}
    nouns = {rule.sources[1] for rule in language.rules}
    forms = sorted(set(form.values()))
    marker = int(language._groups["marker"][0])
    fillers = sorted(set(range(language.d_vocab)) - nouns - set(forms) - {marker})
    ends = [place for place, token in enumerate(prefix) if token in forms]
    sentence = prefix[ends[-1] + 1 :] if ends else prefix
    if sentence and sentence[-1] == marker:
        return uniform(language, nouns)
    subjects = [b for a, b in zip([None, *sentence], sentence, strict=False) if b in nouns and a != marker]
    p = uniform(language, fillers, language.filler)
    rest = 1 - language.filler
    if subjects and marker in sentence:
        options = [([form[subjects[0]]] if subjects[0] in form else forms, rest)]
    elif subjects:
        options = [([marker], rest)]
    elif marker in sentence:
        options = [(nouns, rest)]
    else:
        options = [(nouns, rest / 2), ([marker], rest / 2)]
    for tokens, weight in options:
        p = [a + b for a, b in zip(p, uniform(language, tokens, weight), strict=True)]
    return p


def uniform(language, tokens, weight=1.0):
    return [weight / len(tokens) if token in tokens else 0.0 for token in range(language.d_vocab)]


REFERENCES = {
    "skip-bigrams": windowed,
    "and": windowed,
    "induction": induction,
    "retrieval": retrieval,
    "brackets": brackets,
    "agreement": agreement,
}
