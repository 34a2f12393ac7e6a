"""Command lines. A dataclass can be one: a field that `flag` made is the flag --name.

A class is a group of flags. Classes are combined by inheritance, so that a program has one
flat configuration. Left out: nested configurations and files of settings. Standard library
only.
"""
import argparse
from dataclasses import field, fields


def flag(default, text: str, least: float = 0, choices: tuple = (), common: bool = False,
         shown: str = ""):
    """A dataclass field that becomes --name with this help text.

    A number has to be at least `least`, or the default. A text has to be one of `choices`
    if there are any. The help lists the flags that are `common` first, and has `shown` in
    place of the default."""
    metadata = {"help": text, "least": least, "choices": choices, "common": common,
                "shown": shown or default}
    return field(default=default, metadata=metadata)


def check(config) -> None:
    """Raises ValueError for a number that is too small and for a text that is no choice."""
    for f in fields(config):
        value = getattr(config, f.name)
        choices = f.metadata["choices"]
        allowed = value == f.default or isinstance(value, str)
        if not allowed and not value >= f.metadata["least"]:
            raise ValueError(f"{f.name} is {value}, the least is {f.metadata['least']}")
        if choices and value not in choices:
            raise ValueError(f"{f.name} is {value!r}; it can be {' or '.join(choices)}")


def parser(description: str, **more) -> argparse.ArgumentParser:
    """An argparse parser that says in one line what is wrong, and takes no flag by half its
    name. `more` are arguments of argparse's own."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False, **more)
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}; see --help\n")
    return made


def parse(description: str, config_type, groups, earlier=lambda args: {}):
    """An instance of `config_type` from the command line.

    `groups` are the classes it inherits from, as {title: class}. `earlier(args)` gives
    values that stand in for the defaults. Raises ValueError for what `check` and the
    classes refuse. Exits with status 2 for what is no flag, or no number."""
    made = parser(description, usage="%(prog)s [--flag value ...]")
    common = made.add_argument_group("common flags")
    for title, group_type in groups.items():
        group = made.add_argument_group(title)
        for f in fields(group_type):
            _add(common if f.metadata["common"] else group, f)
    # A resumed run takes its flags from a file; those that are given now still win.
    made.set_defaults(**earlier(made.parse_args()))
    args = vars(made.parse_args())
    config = config_type(**{f.name: args[f.name] for f in fields(config_type)})
    check(config)
    return config


def _add(group, f) -> None:
    name = "--" + f.name.replace("_", "-")
    text = f.metadata["help"].replace("%", "%%")
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
