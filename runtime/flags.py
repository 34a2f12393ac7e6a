"""Dataclasses as command lines: a field that `flag` made is the flag --name, its help, its default.

Left out: nested configurations, files of settings. Standard library only.
"""
import argparse
from dataclasses import field, fields


def flag(default, text: str, least: float = 0):
    """A dataclass field that becomes --name with this help text; a number is at least `least`."""
    return field(default=default, metadata={"help": text, "least": least})


def check_least(config) -> None:
    """Raises ValueError for a number below its least value, or not a number."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, (int, float)) and not value >= f.metadata["least"]:
            raise ValueError(f"{f.name} is {value}, the least is {f.metadata['least']}")


def parse(description: str, configs, earlier=lambda args: {}) -> list:
    """One instance of each of the dataclasses, from the command line. `earlier(args)` gives values
    that stand in for the defaults. Raises ValueError for a number that is too small, and what the
    dataclasses raise; exits with 2 for what is no flag, or no number."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for config in configs:
        group = parser.add_argument_group(config.__name__)
        for f in fields(config):
            text = f"{f.metadata['help']} (default {f.default!r})"
            name = "--" + f.name.replace("_", "-")
            if f.type in (bool, "bool"):
                group.add_argument(name, action="store_true", help=text)
            else:
                group.add_argument(name, type=type(f.default), default=f.default, help=text)
    parser.set_defaults(**earlier(parser.parse_args()))
    args = parser.parse_args()
    filled = [config(**{f.name: getattr(args, f.name) for f in fields(config)})
              for config in configs]
    for config in filled:
        check_least(config)
    return filled
