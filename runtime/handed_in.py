"""Functions and tasks that come from somebody's file: `path/to/file.py` or
`path/to/file.py:function`.

An error inside such a file becomes one line with the file, the line and the function, since
the file's author has to mend it. Standard library only.
"""
import importlib.util
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType

from tree import Node, Unscored


class HandedInError(ValueError):
    """A mistake in a file that was handed in. It ends the run, without a second try."""


def is_path(spec: str) -> bool:
    """Whether a specification means a file; otherwise it is a NAME of ours, or a judge."""
    return not spec.startswith("judge:") and (".py" in spec or "/" in spec)


def load_file(path: str) -> ModuleType:
    """Run a Python file as a module of its own, once. Raises HandedInError."""
    file = os.path.realpath(path)
    if not os.path.isfile(file):
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
            raise explain(error, file) from error
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

    async def guarded_later(waiting):
        try:
            return await waiting
        except Unscored:
            raise
        except Exception as error:
            raise explain(error, module.__file__, name) from error

    def guarded(*args, **named):
        try:
            value = found(*args, **named)
        except Unscored:
            raise
        except Exception as error:
            raise explain(error, module.__file__, name) from error
        return guarded_later(value) if inspect.isawaitable(value) else value

    code = getattr(found, "__code__", None)  # of an object with __call__ there is none
    line = f" line {code.co_firstlineno}" if code else ""
    guarded.place = f"{module.__file__}{line}: {name}"  # for `wrong`
    return guarded


def load_objective(spec: str) -> Callable:
    """`credit(rollouts, config) -> {node: Credit}`: a function of lab/objectives.py by its
    NAME, or of a user's file, whose results are checked."""
    if not is_path(spec):
        ours = load_file(_ours("objectives"))
        if spec not in ours.NAMES:
            raise ValueError(f"objective is {spec!r}; it can be grpo, "
                             f"{', '.join(ours.NAMES)} or path/to/file.py")
        return getattr(ours, spec)
    credit = load(spec, "credit")

    def checked(rollouts, config) -> dict:
        given = credit(rollouts, config)
        if not isinstance(given, dict):
            raise wrong(credit, "{node: grpo.Credit(advantages, weight)}", given)
        for node, value in given.items():
            advantages = getattr(value, "advantages", None)
            if not isinstance(advantages, (list, tuple)):
                raise wrong(credit, "grpo.Credit([number, ...], weight) per node", value)
            if not all(is_finite(number) for number in (*advantages, value.weight)):
                raise wrong(credit, "finite numbers in a grpo.Credit", value)
            if not isinstance(node, Node):
                raise wrong(credit, "nodes as keys", node)
        return given

    return checked


def load_reward(spec: str) -> Callable:
    """`score(task, answer)` of a file, plain or async, as an async function that returns a
    finite float. "judge:..." is that of lab/judge.py."""
    if spec.startswith("judge:"):
        return load_file(_ours("judge")).judge(spec.removeprefix("judge:"))
    score = load(spec, "score")

    async def checked(task, answer) -> float:
        value = score(task, answer)
        if inspect.isawaitable(value):
            value = await value
        if not is_finite(value):
            raise wrong(score, "a finite number", value)
        return float(value)

    return checked


def scorer(spec: str) -> str:
    """What the scores of a reward depend on: of a judge its model, not where it is."""
    if not spec.startswith("judge:"):
        return spec
    parts = spec.removeprefix("judge:").split(",")
    return "judge:" + ",".join(part for part in parts if part.startswith("model="))


def _ours(name: str) -> str:
    """The path of a file of lab/. It is loaded like anybody's: runtime imports no lab."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(root, "lab", f"{name}.py")


def is_finite(value) -> bool:
    """Whether it is a number, Python's or numpy's, and finite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


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
    place = getattr(found, "place", getattr(found, "__qualname__", "a function"))
    return HandedInError(f"{place} returned {got!r:.80}; it should return {expected}")
