"""What importing costs, and that it works without CUDA, triton, a compiler or a PATH."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "transformer_lens", "plotly", "triton", "transformers"]


def python(code: str, *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, in a folder that is not the repository unless asked."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=cwd or ROOT / "tests", capture_output=True, text=True, timeout=600)


def heavy_after(code: str) -> list[str]:
    """Which of the heavy libraries are loaded after the code ran."""
    tail = f"import sys, json; print('\\n' + json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = python(f"{code}\n{tail}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_tnlm_imports_no_torch():
    assert heavy_after("import tnlm; tnlm.ModelConfig.released(); dir(tnlm)") == []


@pytest.mark.parametrize("command", ["tnlm.app.cli", "tnlm.training.cli"])
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["eval", "--help"]], ids=" ".join)
def test_help_imports_no_torch(command, arguments):
    if (command, arguments[0]) in (("tnlm.app.cli", "run"), ("tnlm.training.cli", "eval")):
        arguments = ["info" if command == "tnlm.app.cli" else "compare", "--help"]
    assert heavy_after(f"import sys; from {command} import main; assert main({arguments}) == 0") == []


@pytest.mark.parametrize("command", ["tnlm.app.cli", "tnlm.training.cli"])
def test_version_imports_no_torch(command):
    code = f"from {command} import main; assert main(['--version']) == main(['--json', '--version']) == 0"
    assert heavy_after(code) == []


def test_training_loads_no_lens_and_every_module_has_one_name():
    code = """
import importlib, pkgutil, sys, tnlm
names = [module.name for module in pkgutil.walk_packages(tnlm.__path__, "tnlm.") if ".triton" not in module.name]
walked = set(sys.modules)  # the walk imports packages, whose __init__ imports nothing more
for name in names:
    if name.startswith("tnlm.training.") and not name.endswith(".plot"):
        importlib.import_module(name)
assert not {"transformer_lens", "plotly", "transformers"} & set(sys.modules)
assert not [name for name in sys.modules.keys() - walked if name.startswith("tnlm.interp.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 60
assert not {"training", "interp"} & set(sys.modules)
"""
    done = python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


RUN = """
import warnings; warnings.simplefilter("error")
import torch, tnlm
from tnlm import kernels
config = tnlm.ModelConfig.pure(d_vocab=11, n_layer=1, n_head=3, d_model=30, d_hidden=7, n_ctx=13)
assert tnlm.Transformer(config)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)
x = torch.ones(1, 300, 1, 16)
for implementation in ("auto", "eager", "chunked", "recurrent"):
    assert kernels.squared_attention(x, x, x, implementation=implementation).shape == x.shape
try:
    kernels.squared_attention(x, x, x, implementation="triton")
except ValueError as error:
    print(error)
"""


QUERY_RAISES = """
import triton.runtime
class Driver:
    def __getattr__(self, name): raise RuntimeError("0 active drivers ([]). There should only be one.")
triton.runtime.driver = Driver()
"""


def test_runs_without_path_compiler_or_gpu_beside_a_triton_that_finds_no_driver():
    broken = QUERY_RAISES if find_spec("triton") else ""
    done = python(broken + RUN, PATH="", CXX="/nonexistent", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert 'implementation="triton" needs a CUDA tensor, got cpu' in done.stdout


def test_runs_without_triton():
    done = python("import sys; sys.modules['triton'] = None\n" + RUN)
    assert done.returncode == 0, done.stderr
    assert 'implementation="triton" needs' in done.stdout


@pytest.mark.parametrize("name", ["training", "interp"])
def test_the_links_at_the_top_level_refuse_to_be_imported(name):
    done = python(f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: this package must be imported as tnlm.{name}" in done.stderr
