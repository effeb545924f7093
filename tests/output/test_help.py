"""The help of both programs: every flag has a text, and says what is done when it is left out."""

import dataclasses
import re

import pytest

from tnlm.app.cli import COMMANDS
from tnlm.app.cli import main as tnlm_main
from tnlm.config import ModelConfig
from tnlm.training import commands
from tnlm.training.cli import main as train_main
from tnlm.training.config import TrainConfig
from tnlm.training.flags import field_texts

TRAIN = {
    "run": commands.Run,
    "branch": commands.Branch,
    "compare": commands.Compare,
    "export": commands.Export,
    "data get": commands.DataGet,
    "data tokenize": commands.DataTokenize,
    "data check": commands.DataCheck,
    "data toy": commands.DataToy,
}
MADE = [*COMMANDS.values(), *TRAIN.values(), TrainConfig, ModelConfig]
HELP = [(tnlm_main, *item) for item in COMMANDS.items()] + [(train_main, *item) for item in TRAIN.items()]


def texts_of(made):
    """The texts under the fields of a dataclass and of its bases, by field."""
    bases = [base for base in reversed(made.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in field_texts(base).items()}


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_every_field_has_a_text_and_one_that_may_be_left_out_says_what_then(made):
    texts = texts_of(made)
    for field in dataclasses.fields(made):
        if made is commands.Run and field.name == "preset":
            continue  # its text lists the presets, so it stands in the type
        assert field.name in texts, field.name
        if field.default is None:
            said = "left out|[Bb]y default|None means|None is|without it|needs none"
            assert re.search(said, texts[field.name]), f"{field.name}: {texts[field.name]}"


@pytest.mark.parametrize("main, command, made", HELP, ids=[name for _, name, _ in HELP])
def test_the_help_shows_every_text(main, command, made, capsys):
    assert main([*command.split(), "--help"]) == 0
    shown = " ".join(re.sub("\u2502", " ", capsys.readouterr().out).split())
    for name, text in texts_of(made).items():
        if name not in ("training", "model") or made is not commands.Run:
            assert text in shown, name


@pytest.mark.parametrize("program", [tnlm_main, train_main])
def test_version(program, capsys):
    import tnlm

    assert program(["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == tnlm.__version__


def test_json_leaves_out_the_table_of_a_training_command(capsys, tmp_path):
    command = ["run", "--preset", "nano", "--dry-run", "--out", str(tmp_path / "r")]
    assert train_main(command) == 0
    table = capsys.readouterr()
    assert train_main([*command, "--json"]) == 0
    record = capsys.readouterr()
    assert record.out == table.out
    assert len(record.out.splitlines()) == 1
    assert "parameters" in table.err
    assert record.err == ""
