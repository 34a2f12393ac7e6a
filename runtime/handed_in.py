"""What comes from a user's file: `path/to/file.py`, or `path/to/file.py:function`.

What such a file raises ends the run with an ordinary traceback, which ends in that file.
Standard library only.
"""
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

_files: dict[str, ModuleType] = {}  # by their paths


def is_path(spec: str) -> bool:
    """Whether a specification means a file; otherwise it is a NAME of ours."""
    return ".py" in spec or "/" in spec


def load_file(path: str) -> ModuleType:
    """Import a Python file, once. Raises ValueError if there is none, and whatever the file
    raises."""
    file = os.path.realpath(path)
    if not os.path.isfile(file):
        raise ValueError(f"{path}: no such file")
    if file not in _files:
        loader = SourceFileLoader(f"handed_in.{file}", file)
        module = module_from_spec(spec_from_loader(loader.name, loader))
        # Where `inspect` looks for the source of a function that travels to the REPL.
        sys.modules[loader.name] = _files[file] = module
        loader.exec_module(module)
    return _files[file]


def load(spec: str, default: str) -> Callable:
    """The function `path/to/file.py:function`, or the one called `default` in the file."""
    path, colon, name = spec.partition(".py:")
    if colon:
        path += ".py"
    return getattr(load_file(path), name or default)


def is_theirs(error: BaseException) -> bool:
    """Whether the error was raised in a handed-in file, or in what the file calls. Then a
    traceback says where the mistake is."""
    frames = traceback.walk_tb(error.__traceback__)
    here = any(frame.f_code.co_filename in _files for frame, _ in frames)
    return here or (error.__cause__ is not None and is_theirs(error.__cause__))
