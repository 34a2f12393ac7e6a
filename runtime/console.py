"""A program and what it prints to: its reader may show ASCII alone, or leave early.

Standard library only.
"""
import codecs
import os
import sys
from collections.abc import Callable

# What trees are drawn with, where an encoding lacks it.
PLAIN = {"┌": "+", "│": "|", "└": "+", "»": ">", "·": "-", "…": "..."}
READER_LEFT = 141  # the status of a program that SIGPIPE has ended, as shells report it


def start(main: Callable[[], int | None]) -> None:
    """Run the `main` of a program, and exit with the status that it returns.

    Characters that the output's encoding lacks become ASCII. If nobody reads the output any
    more, as behind `| head`, the program ends quietly."""
    codecs.register_error("plain", plain)
    # A stream is None if the program was started with it closed.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plain")
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = READER_LEFT
    sys.exit(status)


def line(error: BaseException) -> str:
    """An error as one line. Of a file its name comes first, and no number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        why = error.strerror.removesuffix(" or directory")
        return f"{error.filename}: {why[0].lower()}{why[1:]}"
    return str(error)


def plain(error: UnicodeError) -> tuple[str, int]:
    """A handler of codec errors: a drawing in ASCII, other characters as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start:error.end]
    return "".join(PLAIN.get(c, ascii(c)[1:-1]) for c in wrong), error.end
