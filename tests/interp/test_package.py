"""The public list, its laziness, and the guard against a second module object."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tnlm import interp

FOLDER = Path(interp.__file__).parent


def test_every_export_is_defined_where_the_list_says():
    for name in interp.__all__:
        assert getattr(interp, name).__module__.startswith("tnlm.interp."), name
    assert set(interp.__all__) <= set(dir(interp))


def test_no_module_has_the_name_of_a_public_function():
    assert not {path.stem for path in FOLDER.rglob("*.py")} & set(interp.__all__)


def test_import_reads_no_tensor_library():
    code = "import sys, tnlm.interp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_import_under_another_name_is_refused():
    spec = importlib.util.spec_from_file_location("interp", FOLDER / "__init__.py")
    with pytest.raises(ImportError, match=r"imported as tnlm\.interp, not as 'interp'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'eigs'"):
        interp.eigs  # noqa: B018
