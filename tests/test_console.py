"""What every program does with its output, with wrong flags and with an old Python."""
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import ask

ROOT = Path(__file__).resolve().parent.parent
USUAL = {name: value for name, value in os.environ.items()
         if not name.startswith("PYTHON")}
ASCII = {**USUAL, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


def run(*args, stdout=subprocess.PIPE, env=USUAL):
    return subprocess.run([sys.executable, *args], cwd=ROOT, text=True, stdout=stdout,
                          stderr=subprocess.PIPE, env=env, timeout=120)


@pytest.mark.parametrize("line", [
    "repl.py --help", "rlm.py --help", "-m lab.chart --help",
    "eval.py --policy oracle --tasks niah,code --n 2"])
def test_a_program_whose_reader_leaves_ends_quietly(line):
    """As behind `| head`, which has read all that it wants."""
    read, write = os.pipe()
    os.close(read)
    done = run(*line.split(), stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_program_that_is_started_without_an_output_ends_well():
    line = f"{sys.executable} -c 'from runtime import console; console.start(lambda: None)'"
    done = subprocess.run(["sh", "-c", f"{line} >&-"], cwd=ROOT, text=True,
                          stderr=subprocess.PIPE, env=USUAL, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("line, names", [
    ("repl.py --typo", "--typo"), ("rlm.py --typo question", "--typo"),
    ("train.py --typo", "--typo"), ("eval.py --n many", "--n"),
    ("rlm.py", "a question is needed (")])
def test_a_wrong_flag_gets_one_line_that_names_it_and_where_to_find_help(line, names):
    done = run(*line.split())
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1
    assert names in done.stderr and "--help" in done.stderr


def test_where_only_ascii_can_be_shown_a_tree_is_drawn_with_it():
    code = ("from runtime import console\nfrom tree import Node, Turn, render\n"
            "turns = [Turn('user', 'na\\xefve?'), Turn('assistant', 'a\\n' * 20)]\n"
            "root = Node(turns=turns, answer='ok', end='final')\n"
            "console.start(lambda: print(render(root, max_lines=1)))")
    done = run("-c", code, env=ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "| - na\\xefve?", "| > a", "|   ... 19 more lines", "+ final: 'ok'"]


def test_a_context_that_is_piped_is_read_as_files_are(monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO("naïve \xff".encode() + b"\xff"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", piped)
    assert ask.read_context([]) == "naïve \xff\ufffd"


def test_a_context_that_is_typed_is_asked_for(monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"hello"))
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    assert ask.read_context([]) == "hello"
    assert capsys.readouterr().err.count("Ctrl-D ends it\n") == 1


def test_an_empty_question_is_refused():
    done = run("rlm.py", "--model", "nowhere", " ", "README.md")
    assert (done.returncode, done.stderr) == (1, "rlm.py: the question is empty\n")


@pytest.mark.parametrize("name", ["repl", "rlm", "tasks"])
def test_a_python_that_is_too_old_is_told_so_in_one_line(name):
    done = run("-c", "import sys; sys.version = '3.10.13 (main)'\n"
                     f"sys.version_info = (3, 10, 13)\nimport {name}")
    assert done.returncode == 1
    assert done.stderr == "Python 3.11 or later is needed; this one is 3.10.13\n"
