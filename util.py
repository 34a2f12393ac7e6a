"""What several parts need: small files, command lines, and files of the user's own.

Standard library only. Left out: nested configurations, and files of settings.
"""
import argparse
import contextlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

if sys.version_info < (3, 11):  # every program imports this early
    sys.exit("Python 3.11 or later is needed; this one is " + sys.version.split()[0])


# --- files that are there whole or not at all ---------------------------------------------

def write_text(path: str, text: str) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never a part."""
    aside = f"{path}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(aside, path)


def write_json(path: str, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2))


def readable(size: float) -> str:
    """A number of bytes for people: 1000 bytes, 41.2 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
        size /= 1024


# What code raises that reads a value of another form than it expects.
MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SyntaxError,
           EOFError, RecursionError)


@contextlib.contextmanager
def reading(path: str):
    """Around code that reads a file: what is wrong in it becomes a ValueError of one line
    that names the file."""
    try:
        yield
    except MISREAD as error:
        if str(error).startswith(str(path)):
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: {type(error).__name__}: {why:.200}") from None


def read_json(path: str) -> dict:
    """The object in a file. Raises OSError, or ValueError that names the file."""
    with open(path, encoding="utf-8") as file, reading(path):
        value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        return value


# --- command lines ------------------------------------------------------------------------
# A dataclass can be one: a field that `flag` made is the flag --name. A class is a group of
# flags. Classes are combined by inheritance, so a program has one flat configuration. The
# same check is made of a file's fields (rlm.json).

ABOVE_ZERO, MOST = 1e-12, 1e12  # the least number above 0, and what no number reaches

def flag(default, text: str, least: float = 0, choices: tuple = (), common: bool = False,
         shown: str = "", words: str = ""):
    """A dataclass field that becomes --name with this help text.

    A number has to be at least `least`, a text one of `choices` if there are any; or the
    default. The help lists the flags that are `common` first, and has `shown` in place of
    the default. `words` makes it no flag but words of the command: "?" for one, "*" for
    some, or none."""
    metadata = {"help": text, "least": least, "choices": choices, "common": common,
                "shown": shown or default, "words": words}
    return field(default=default, metadata=metadata)


def check(config) -> None:
    """Raises ValueError for a field of another type than its default, for a number that is
    too small or too large, and for a text that is no choice. Of a file's fields that no
    `flag` made, numbers have to be above 0."""
    for f in fields(config):
        value, usual = getattr(config, f.name), f.default
        words = f.metadata.get("words") or usual is MISSING
        if words or type(value) is type(usual) and value == usual:
            continue
        numbers = (int, float) if isinstance(usual, float) else (type(usual),)
        choices, least = f.metadata.get("choices"), f.metadata.get("least", ABOVE_ZERO)
        if type(value) not in numbers:
            raise ValueError(f"{f.name} cannot be {value!r}")
        if choices and value not in choices:
            raise ValueError(f"{f.name} is {value!r}; it can be {' or '.join(choices)}")
        if type(value) in (int, float) and not least <= value < MOST:
            floor = "above 0" if least == ABOVE_ZERO else f"at least {least:g}"
            raise ValueError(f"{f.name} is {value}: it has to be {floor}, below {MOST:g}")


def read_flags(description: str, config_type, groups, earlier=lambda args: {}):
    """An instance of `config_type` from the command line.

    `groups` are the classes it inherits from, as {title: class}. `earlier(args)` gives
    values that stand in for the defaults. Raises ValueError for what the classes refuse.
    Exits with status 2 and one line for what is no flag, or no number."""
    # A file shows each line at once, too; what a terminal cannot show ends no program.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    words = "".join(f" [{f.name}]" for f in fields(config_type) if f.metadata["words"])
    made = argparse.ArgumentParser(
        usage=f"%(prog)s [--flag value ...]{words}", description=description,
        allow_abbrev=False)
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}; see --help\n")
    common = made.add_argument_group("common flags")
    for title, group_type in groups.items():
        group = made.add_argument_group(title)
        for f in fields(group_type):
            _add(common if f.metadata["common"] else group, f)
    # Flags may stand between words. That parser does not know `--`, the other one does.
    parse = made.parse_args if "--" in sys.argv else made.parse_intermixed_args
    # A resumed run takes its flags from a file; those that are given now still win.
    made.set_defaults(**earlier(parse()))
    args = vars(parse())
    return config_type(**{f.name: args[f.name] for f in fields(config_type)})


def _add(group, f) -> None:
    name = "--" + f.name.replace("_", "-")
    text = f.metadata["help"].replace("%", "%%")
    if f.metadata["words"]:
        group.add_argument(f.name, nargs=f.metadata["words"], default=f.default, help=text)
        return
    if isinstance(f.default, bool):
        group.add_argument(name, action="store_true", help=text)
        return
    metavar = {str: "TEXT", int: "N", float: "X"}[type(f.default)]
    if f.metadata["choices"]:
        metavar = "|".join(f.metadata["choices"])
    if f.metadata["shown"] != "":
        text += f" (default {f.metadata['shown']})"
    group.add_argument(name, type=type(f.default), default=f.default, metavar=metavar,
                       help=text)


# --- what comes from a user's file --------------------------------------------------------
# It is path/to/file.py, or path/to/file.py:function. What such a file raises ends the run
# with an ordinary traceback, which ends in that file.

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


def split_path(spec: str) -> tuple[str, str]:
    """(path/to/file.py, function) of path/to/file.py:function; the second may be ""."""
    path, colon, name = spec.partition(".py:")
    return path + ".py" if colon else path, name


def load_function(spec: str, call: str) -> Callable | None:
    """The function `path/to/file.py:function`, or the one of that file which `call` names,
    as "score(question, answer)"; None of "". Raises ValueError if there is none, or if it
    cannot be called like that."""
    if not spec:
        return None
    path, name = split_path(spec)
    default, *arguments = re.findall(r"\w+", call)
    function = function_of(load_file(path), name or default)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{spec}: {error}: it is called as {call}") from None
    return function


def function_of(module: ModuleType, name: str) -> Callable:
    """Raises ValueError if the module has no such function."""
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{module.__file__} has no function {name}")
    return getattr(module, name)


def expect(right: bool, function: Callable, gave: Any, wanted: str) -> None:
    """Raises ValueError, which names the function and its file, unless what it gave is
    right. Ours and users' are checked alike."""
    if not right:
        name = getattr(function, "__name__", function)
        shown = " ".join(repr(gave).split())
        raise ValueError(f"{sys.modules[function.__module__].__file__}: {name} gives "
                         f"{shown:.80} in place of {wanted}")


def is_theirs(error: BaseException) -> bool:
    """Whether the error was raised in a handed-in file, or in what the file calls. Then a
    traceback says where the mistake is."""
    frames = traceback.walk_tb(error.__traceback__)
    here = any(frame.f_code.co_filename in _files for frame, _ in frames)
    return here or (error.__cause__ is not None and is_theirs(error.__cause__))
