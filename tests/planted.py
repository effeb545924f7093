"""Plants one mistake in a module: named checks must notice it.

A table of mistakes says what the tests of a module are worth: a check that passes on a wrong module checks nothing.
Each mistake is one replacement in the module's source. Functions are changed where they are, so that every other module
that has imported them runs the wrong one too.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest


@contextmanager
def planted(module: ModuleType, right: str, wrong: str) -> Iterator[None]:
    """Context manager in which the source of ``module`` holds ``wrong`` in the place of ``right``."""
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"the fault no longer fits {module.__name__}: {right!r}"
    faulty: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), faulty)
    caches = [x for x in vars(module).values() if hasattr(x, "cache_clear") and x.__module__ == module.__name__]
    with pytest.MonkeyPatch.context() as patch:
        changed = sum(_patch(patch, module, name, faulty[name], module) for name in vars(module).keys() & faulty.keys())
        assert changed, "the fault changes nothing"
        _clear(caches)
        try:
            yield
        finally:
            _clear(caches)


def _clear(caches: list[Any]) -> None:
    """Forget results, those of the right code or of the wrong one."""
    for cached in caches:
        cached.cache_clear()


def _patch(patch: pytest.MonkeyPatch, owner: Any, name: str, new: Any, module: ModuleType) -> int:
    """Change one name of a module or class to its faulty version; returns how many things that changed."""
    old = vars(owner)[name]
    for kind, part in ((property, "fget"), (cached_property, "func"), (staticmethod | classmethod, "__func__")):
        if isinstance(old, kind):
            old, new = getattr(old, part), getattr(new, part)
    old, new = (getattr(x, "__wrapped__", x) for x in (old, new))
    if isinstance(old, FunctionType) and old.__module__ == module.__name__:
        same = old.__code__ == new.__code__ and old.__kwdefaults__ == new.__kwdefaults__
        if not same:
            patch.setattr(old, "__code__", new.__code__)
            patch.setattr(old, "__kwdefaults__", new.__kwdefaults__)
        return not same
    if isinstance(old, type) and old.__module__ == module.__name__:
        return sum(_patch(patch, old, inner, vars(new)[inner], module) for inner in vars(old).keys() & vars(new).keys())
    if isinstance(old, str | int | float | tuple | dict | list) and not name.startswith("__") and old != new:
        patch.setattr(owner, name, new)
        return 1
    return 0


Fault = tuple[ModuleType, str, str, Callable[..., Any]]
"""A module, what its source holds, what it holds with the mistake, and the test that fails on it."""


def each_is_noticed(faults: dict[str, Fault]) -> Callable[..., None]:
    """A test with one case for each mistake of a table, by name; assign it to a name that starts with ``test``."""

    @pytest.mark.parametrize("fault", faults)
    def test_fault_is_noticed(fault: str, request: pytest.FixtureRequest) -> None:
        assert_noticed(*faults[fault], request)

    return test_fault_is_noticed


def assert_noticed(
    module: ModuleType, right: str, wrong: str, check: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Assert that a test, which passes on the module as it is, fails on the one with the mistake.

    Args:
        check: A test function, or a method of a test class; ``functools.partial`` binds the values of its parameters.
        request: Gives the fixtures that the test takes.
    """
    if request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("the runtime type checker wraps functions, whose code is then not that of the source")
    bound = inspect.signature(check).parameters
    plain = check.func if isinstance(check, partial) else check
    case = plain.__qualname__.rpartition(".")[0]
    own = [getattr(sys.modules[plain.__module__], case)()] if case else []
    fixtures = {
        name: request.getfixturevalue(name) for name, p in bound.items() if name != "self" and p.default is p.empty
    }
    if check is not plain:
        check(*own, **fixtures)  # the bound values are not those that the test itself runs with
    with planted(module, right, wrong), pytest.raises(AssertionError):
        check(*own, **fixtures)
