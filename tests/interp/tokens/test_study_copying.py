"""How two trained models copy: told by the weights, confirmed by ablation. One is trained here, as the guide says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tnlm
from tests.limits import assert_close
from tnlm import interp
from tnlm.points import intervene
from tnlm.training import cli
from tnlm.training.data.toy import cycles

GUIDE = Path(__file__).parents[3] / "docs" / "copying.md"
GUESS = sum(1 / period for period in range(3, 10)) / 7
"""Accuracy of naming some token of the cycle at random, over cycles of 3 to 9."""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.S)


def run_commands(text):
    for line in text.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "tnlm-train"
        assert cli.main(arguments) == 0


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The names that the guide's study defines, after the guide's commands in an empty folder. 20 CPU-seconds."""
    folder = tmp_path_factory.mktemp("copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("copy.json").write_text(json.dumps(json.loads(blocks("json")[0])))
        with pytest.warns(UserWarning, match="2 of the 200 validation sequences also occur in training"):
            run_commands(blocks("bash")[0])
        names = {}
        exec(compile(blocks("python")[0], str(GUIDE), "exec"), names)
        yield names


def check_contraction(model, tokens):
    one_hot = F.one_hot(tokens, model.config.d_vocab).double()
    with torch.no_grad():
        contracted = model.network(tokens.shape[1]).contract({"tokens": one_hot})
        logits = model(tokens)
    assert_close(contracted, logits)


def test_the_weights_say_that_layer_0_moves_tokens_layer_1_matches_and_copies(study):
    strength, matches, size, copies = (study[name] for name in ("strength", "matches", "size", "copies"))
    assert strength[1] > 2 * max(strength[2:])  # the previous token is among the two that layer 0 reads
    assert abs(matches["E W"].z) > 20
    assert size["E W"] > 2 * max(size["E E"], size["W E"])
    assert abs(copies[1].z) > 20
    assert matches["E W"].z * copies[1].z > 0  # pattern and copy have one sign: what follows is raised
    assert abs(copies[1].z) > 4 * abs(copies[0].z)


def test_scores_vanish_when_tokens_are_permuted(study):
    order = torch.randperm(32)
    assert abs(interp.match(study["table"]["E W"][:, order]).z) < 5
    assert abs(interp.match(interp.copy_table(study["net"], 1, 0, study["E"])[:, order]).z) < 5


def test_ablating_what_the_weights_name_ends_copying_and_an_equal_part_does_not(study):
    assert study["full"] > 0.98
    moving, matching = study["ablated"]
    assert matching < GUESS
    assert moving < 0.6
    for control in study["control"]:
        assert len(control) == 5
        assert min(control) > 0.95


def test_this_model_keeps_no_clock(study):
    """The guide's second study, of models that copy by the period, finds nothing here: equal tokens are not used."""
    names = dict(study)
    exec(compile(blocks("python")[1], str(GUIDE), "exec"), names)
    assert max(map(abs, names["equal"])) < 10
    assert list(names["clock"]) == list(range(3, 10))
    for full, without_equal, without_others, ticking, stopped in names["clock"].values():
        assert min(full, without_equal) > 0.97 > without_others
        assert ticking == pytest.approx(stopped, abs=0.1)


def test_the_whole_model_is_one_network(study):
    check_contraction(study["model"], torch.from_numpy(cycles(2, seq=11, d_vocab=32, period=4, seed=3)).long())


@pytest.fixture(scope="module")
def public():
    """A model of this family that others trained: 2 layers, 1 head, width 64, 100 tokens. Float64."""
    folder = GUIDE.parents[1].parent / "shared" / "golden" / "trained_induction"
    if not folder.is_dir():
        pytest.skip("the public trained model is not beside the repository")
    return tnlm.load(folder, dtype=torch.float64)


def test_the_weights_of_the_public_model(public):
    net = interp.extract(public)
    first, second = (net.attention[layer].head(0) for layer in (0, 1))
    embedded = net.x0
    written = (first.ov() @ embedded.mT).mT
    strength = [float(interp.pattern_table(first, embedded, embedded, d).square().mean().sqrt()) for d in range(8)]
    assert min(strength[:2]) > 3 * max(strength[3:])  # own and previous token
    z = {
        name: [interp.match(interp.pattern_table(second, embedded, keys, d)).z for d in (1, 4, 8)]
        for name, keys in (("bare", embedded), ("written", written))
    }
    assert max(z["written"]) < -35
    assert max(map(abs, z["bare"])) < 2
    assert interp.match(interp.copy_table(net, 1, 0, embedded)).z < -15  # negative pattern, negative copy: raised


def test_ablations_of_the_public_model(public):
    tokens = torch.from_numpy(cycles(64, seq=90, d_vocab=100, period=9, seed=5)).long()

    def accuracy(gone):
        with torch.no_grad(), intervene(public, {"blocks.0.attn.hook_pattern": lambda p: p * ~gone[:, None]}):
            best = public(tokens)[:, 9:-1].argmax(-1)
        return float((best == tokens[:, 10:]).double().mean())

    previous = torch.diag_embed(torch.ones(64, 89, dtype=torch.bool), offset=-1)
    assert accuracy(torch.zeros_like(previous)) > 0.98
    assert accuracy(previous) < 0.08
    assert min(accuracy(interp.equal_part(previous, seed)) for seed in range(5)) > 0.85


def test_the_public_model_is_one_network(public):
    check_contraction(public, torch.from_numpy(cycles(1, seq=10, d_vocab=100, period=4, seed=3)).long())
