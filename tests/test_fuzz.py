"""Random configs, checkpoint folders, sampling arguments and command lines: a clear error, or a result that holds.

``make fuzz`` sets ``TNLM_FUZZ_CASES`` to 2,000 cases of each; the cases are the same in every run.
"""

import contextlib
import io
import json
import math
import os
import shutil
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tnlm
from tests.tiny_models import build, tiny
from tnlm.app import cli
from tnlm.config import ModelConfig
from tnlm.interp.views import plot
from tnlm.output.files import parse_json
from tnlm.text import sampling
from tnlm.training import cli as training_cli
from tnlm.training.config import TrainConfig
from tnlm.training.data import shards
from tnlm.training.presets import PRESETS

pytestmark = [pytest.mark.user_error, pytest.mark.filterwarnings("ignore:.*ignored metadata")]


def fuzz(cases, **strategies):
    count = int(os.environ.get("TNLM_FUZZ_CASES", cases))
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
    options = settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=checks)
    return lambda test: options(given(**strategies)(test))


NUMBERS = st.sampled_from(
    [0, 1, 2, -1, 8, 1000, 2**31, 2**63 - 1, 2**63, 10**400, 0.5, 1e308, 5e-324, math.nan, math.inf, -math.inf]
)
ODD = st.one_of(
    NUMBERS,
    st.integers(-3, 40),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=4),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
)
BASE = tiny(d_vocab=16, d_vocab_used=16, n_ctx=16)


def changes(known):
    """Up to three fields, known or not, with odd values."""
    keys = st.one_of(st.sampled_from(sorted(known)), st.sampled_from(sorted(known)), st.text(max_size=3), st.integers())
    return st.dictionaries(keys, ODD, max_size=3)


@fuzz(150, changed=changes(BASE.to_dict()))
def test_a_model_config_is_refused_or_comes_back_from_json(changed):
    with contextlib.suppress(ValueError):
        config = ModelConfig.from_dict({**BASE.to_dict(), **changed})
        assert ModelConfig.from_dict(json.loads(config.to_json())) == config


NANO = PRESETS["nano"]().to_dict()


@fuzz(100, changed=changes(NANO))
def test_a_train_config_is_refused_or_comes_back_from_json(changed):
    with contextlib.suppress(ValueError):
        config = TrainConfig.from_dict({**NANO, **changed})
        assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    tnlm.save(build(BASE, dtype=torch.float32), folder, card=False)
    return folder


FILES = ("config.json", "model.safetensors", "COMPLETE", ".saved/MANIFEST.json", "history.json", "tokenizer.json")
CONTENT = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"", b"{}", b"[]", b"null", b'{"files": 3}', b"[" * 100_000, b'["../x"]', b'["config.json"]', b"[1]"]
    ),
    changes(BASE.to_dict()).map(lambda c: json.dumps({**BASE.to_dict(), **c}).encode()),
)


@fuzz(
    40,
    name=st.sampled_from(FILES),
    content=st.one_of(st.none(), CONTENT),
    cut=st.integers(0, 4000),
    flip=st.one_of(st.none(), st.integers(0, 40_000)),
)
def test_a_damaged_checkpoint_is_refused_or_computes_finite_logits(saved, tmp_path_factory, name, content, cut, flip):
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(saved, folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    old = bytearray(path.read_bytes() if path.exists() else b"")
    if flip is not None and old:
        old[flip // 8 % len(old)] ^= 1 << flip % 8
        path.write_bytes(old)
    else:
        path.write_bytes(content if content is not None else old[:cut])
    try:
        model = tnlm.load(folder)
    except ValueError:
        return
    finally:
        shutil.rmtree(folder)
    logits = model(torch.tensor([[1, 2]]))
    assert not logits.isnan().any()
    # one bit of an exponent can make a weight of 1e38, whose products overflow as they should
    assert logits.isfinite().all() or max(float(w.abs().max()) for w in model.parameters()) > 1e3


@fuzz(
    60,
    temperature=st.one_of(ODD, st.fractions(0, 3), st.decimals(), st.floats(0, 3)),
    top_k=ODD,
    top_p=st.one_of(ODD, st.fractions(0, 1), st.decimals(), st.floats(0, 1)),
    n=st.one_of(ODD, st.integers(0, 3)),
)
def test_sampling_arguments_are_refused_or_give_probabilities(temperature, top_k, top_p, n):
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with contextlib.suppress(ValueError):
        p = sampling.probabilities(torch.arange(5.0), **options)
        assert (p >= 0).all()
        assert math.isclose(float(p.sum()), 1, abs_tol=5 * 2**-52)
        assert not isinstance(top_k, int) or int((p > 0).sum()) <= top_k
    with contextlib.suppress(ValueError):
        out = tnlm.generate(MODEL, torch.tensor([[1, 2]]), n, **options)
        assert out.shape[1] == 2 + (14 if n is None else n)
        assert ((out >= 0) & (out < 16)).all()


MODEL = build(BASE, dtype=torch.float32)
WORDS = st.sampled_from(
    "run data check toy info generate explain --help --json --seq --d-vocab --steps --preset nano /nope -1 x".split()
)


@fuzz(6, argv=st.lists(WORDS, max_size=4))
@pytest.mark.parametrize("program, main", [("tnlm", cli.main), ("tnlm-train", training_cli.main)])
def test_a_command_line_ends_with_a_documented_code_and_is_refused_in_one_line(program, main, argv, tmp_path_factory):
    if "run" in argv:
        argv = [*argv, "--dry-run"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(tmp_path_factory.getbasetemp()),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = main(argv)
    assert code in (0, 1, 2)
    if code and "For full helptext, run" not in stderr.getvalue():  # tyro shows a wrong flag in a few lines of its own
        assert stderr.getvalue().startswith(f"{program}: ")
        assert stderr.getvalue().count("\n") == 1
        assert not stdout.getvalue()


# The faults that were found, one of each kind


@pytest.mark.parametrize("value", [10**400, Decimal("NaN"), "1", 1j])
def test_a_temperature_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        sampling.probabilities(torch.arange(5.0), temperature=value)


@pytest.mark.parametrize("kind", [Fraction, Decimal])
def test_numbers_of_other_libraries_mean_their_value(kind):
    z = torch.arange(5.0)
    p = sampling.probabilities(z, temperature=kind("0.5"), top_p=kind("0.75"))
    assert torch.equal(p, sampling.probabilities(z, temperature=0.5, top_p=0.75))


@pytest.mark.parametrize("top_k", [0, -1, True, 2.5])
def test_probabilities_refuses_top_k(top_k):
    with pytest.raises(ValueError, match="top_k must be an integer >= 1"):
        sampling.probabilities(torch.arange(5.0), top_k=top_k)


def test_tokens_without_values_or_layout_are_refused():
    with pytest.raises(ValueError, match="dense"):
        MODEL(torch.tensor([[1, 2]]).to_sparse())
    with pytest.raises(ValueError, match="dense"):
        tnlm.generate(MODEL, torch.tensor([[1, 2]]).to_sparse(), 1)
    with pytest.raises(ValueError, match="meta"):
        tnlm.generate(MODEL, torch.tensor([[1, 2]], device="meta"), 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_softcap", 1e308),
        ("logit_softcap", 1e-300),
        ("norm_eps", 10**400),
        ("n_ctx", 2**63),
        ("d_vocab", 10**400),
    ],
)
def test_a_config_refuses_numbers_that_torch_cannot_hold(field, value):
    with pytest.raises(ValueError, match=field):
        ModelConfig.from_dict({**BASE.to_dict(), field: value})


def test_keys_that_are_no_text_and_deep_nesting_are_refused():
    with pytest.raises(ValueError, match="unexpected"):
        ModelConfig.from_dict({**BASE.to_dict(), 1: 2, "a": 3})
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b'{"a":' + b"[" * 100_000)


@pytest.mark.parametrize("n_layer", [1000, 2**31])
def test_more_layers_than_the_file_can_hold_are_refused(saved, tmp_path, n_layer):
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({**BASE.to_dict(), "n_layer": n_layer}))
    with pytest.raises(ValueError, match=f"n_layer={n_layer} layers cannot come from a file"):
        tnlm.load(tmp_path / "m")


@pytest.mark.parametrize("manifest", [None, "{", "3", "[1]", '["../config.json"]', "[" * 100_000])
def test_a_save_without_a_list_of_its_files_is_refused(saved, tmp_path, manifest):
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / ".saved").mkdir()
    if manifest is not None:
        (tmp_path / "m" / ".saved" / "MANIFEST.json").write_text(manifest)
    for call in (lambda: tnlm.load(tmp_path / "m"), lambda: tnlm.save(MODEL, tmp_path / "m")):
        with pytest.raises(ValueError, match="must hold a list of the names"):
            call()


def test_lines_take_tensors_of_any_precision_with_gradients():
    y = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16, requires_grad=True)
    figure = plot.lines({"a": (torch.arange(3), y)}, title="t", x="x", y="y")
    assert list(figure.data[0].y) == [1, 2, 4]


def test_explain_refuses_a_device_without_values(saved, capsys):
    assert cli.main(["explain", str(saved), "--device", "meta", "ab"]) == 2
    assert "meta" in capsys.readouterr().err


def test_data_check_of_a_place_without_shards_is_a_wrong_argument(tmp_path):
    assert training_cli.main(["data", "check", str(tmp_path / "nope")]) == 2


def test_a_repeated_command_keeps_shards_that_are_not_its_own(tmp_path):
    moving = tmp_path / ".moving"
    moving.mkdir()
    (moving / shards.MOVING_NAMES).write_text(json.dumps(["train_000001.bin", "val_000000.bin"]))
    for path in (moving / "val_000000.bin", tmp_path / "train_000001.bin", tmp_path / "mine.bin"):
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"mine\.bin"), shards.all_or_none(tmp_path):
        pass
    assert [p.name for p in tmp_path.glob("*.bin")] == ["mine.bin"]
