"""Functions and tasks that come from somebody's file: `path/to/file.py` or
`path/to/file.py:function`.

An error inside such a file becomes one line with the file, the line and the function, since
the file's author has to mend it. Standard library only.
"""
import functools
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


class HandedInError(ValueError):
    """A mistake in a file that was handed in. It ends the run, without a second try."""


def is_path(spec: str) -> bool:
    """Whether a specification means a file; otherwise it is a NAME of ours."""
    return ".py" in spec or "/" in spec


def load_file(path: str) -> ModuleType:
    """Run a Python file as a module of its own, once. Raises HandedInError."""
    file = Path(path).resolve()
    if not file.is_file():
        raise HandedInError(f"{path}: no such file")
    name = f"handed_in.{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None:
            raise HandedInError(f"{path}: not a Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise explain(error, str(file)) from error
    return sys.modules[name]


def load(spec: str, default: str) -> Callable:
    """The function `path/to/file.py:function`, or the one called `default` in the file.

    Raises HandedInError if there is no such file or function."""
    path, _, name = spec.partition(".py:")
    path += ".py" * (".py:" in spec)
    return function(load_file(path), name or default)


def function(module: ModuleType, name: str) -> Callable:
    """A function of a file that was handed in, whose errors name file and line.

    Raises HandedInError if the file has no such function."""
    found = getattr(module, name, None)
    if not callable(found):
        raise HandedInError(f"{module.__file__}: there is no function {name}")
    if inspect.iscoroutinefunction(found):
        async def guarded(*args, **named):
            try:
                return await found(*args, **named)
            except Exception as error:
                raise explain(error, module.__file__, name) from error
    else:
        def guarded(*args, **named):
            try:
                return found(*args, **named)
            except Exception as error:
                raise explain(error, module.__file__, name) from error
    return functools.wraps(found)(guarded)


def load_objective(spec: str) -> Callable:
    """`credit(rollouts, config) -> {node: Credit}`: a function of lab/objectives.py by
    its NAME, or of somebody's file. What it returns is checked."""
    if not is_path(spec):
        spec = f"{Path(__file__).parent.parent}/lab/objectives.py:{spec}"
    credit = load(spec, "credit")

    def checked(rollouts, config) -> dict:
        given = credit(rollouts, config)
        if not isinstance(given, dict):
            raise wrong(credit, "{node: grpo.Credit(advantages, weight)}", given)
        for node, value in given.items():
            given_in = getattr(value, "advantages", [math.nan])
            numbers = [*given_in, getattr(value, "weight", math.nan)]
            if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
                raise wrong(credit, "finite numbers in a grpo.Credit", value)
        return given

    return checked


def load_reward(spec: str) -> Callable:
    """`score(task, answer)` of a file, plain or async, as an async function that returns a
    finite float."""
    score = load(spec, "score")

    async def checked(task, answer) -> float:
        value = score(task, answer)
        if inspect.isawaitable(value):
            value = await value
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise wrong(score, "a finite number", value)
        return float(value)

    return checked


def explain(error: BaseException, file: str, name: str = "") -> HandedInError:
    """The error as one line that names the file, its line, and the function."""
    if isinstance(error, HandedInError):
        return error
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            line = frame.lineno
    where = f"{file} line {line}" if line else file
    inside = f" in {name}" if name else ""
    what = str(error).splitlines()[:1] or [""]
    return HandedInError(f"{where}{inside}: {type(error).__name__}: {what[0]}")


def wrong(found: Callable, expected: str, got) -> HandedInError:
    """What to raise for a function that returned something else than it should."""
    code = inspect.unwrap(found).__code__
    where = f"{code.co_filename} line {code.co_firstlineno}"
    return HandedInError(
        f"{where}: {found.__name__} returned {got!r:.80}; it should return {expected}")
