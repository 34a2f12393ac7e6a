"""repl.py at a terminal, and with a script that is piped in."""
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMPT = ">>> "
TASK = ('def make(rng, **more):\n    return "q", "c", "a"\n\n\n'
        "def score(task, answer):\n    return 1.0\n\n\n"
        'def look(name):\n    """What stands there."""\n    return name.upper()\n\n\n'
        "TOOLS = (look,)\n")


def script(*args, stdin=""):
    return subprocess.run([sys.executable, ROOT / "repl.py", *map(str, args)], input=stdin,
                          text=True, capture_output=True, timeout=60)


class Terminal:
    """A terminal in which repl.py runs: `say` types a line and returns what is shown until
    the next prompt."""

    def __init__(self, *args, **environment):
        self.master, slave = pty.openpty()

        def control():
            fcntl.ioctl(slave, termios.TIOCSCTTY)

        self.run = subprocess.Popen(
            [sys.executable, ROOT / "repl.py", *map(str, args)], stdin=slave, stdout=slave,
            stderr=slave, start_new_session=True, preexec_fn=control,
            env={**os.environ, "TERM": "dumb", **environment})
        os.close(slave)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run.kill()
        self.run.wait()
        os.close(self.master)

    def until(self, text):
        shown = ""
        while text not in shown:
            assert select.select([self.master], [], [], 60)[0], shown
            shown += os.read(self.master, 4096).decode().replace("\r", "")
        return shown

    def say(self, line, until=PROMPT):
        os.write(self.master, line.encode() + b"\n")
        return self.until(until).partition("\n")[2].removesuffix(PROMPT)

    def press(self, key):
        os.write(self.master, key)

    def stop(self):
        """Ctrl-C, and once more if it came too early: before the block began, or before
        readline waited for a key."""
        shown = ""
        while PROMPT not in shown:
            time.sleep(0.3)
            self.press(b"\x03")
            while PROMPT not in shown and select.select([self.master], [], [], 20)[0]:
                shown += os.read(self.master, 4096).decode().replace("\r", "")
        return shown

    def end(self):
        """Ctrl-D. Returns the exit status."""
        self.press(b"\x04")
        return self.run.wait(60)


@pytest.fixture
def home(tmp_path):
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}


# --- a terminal -----------------------------------------------------------------------


def test_values_of_expressions_are_shown_and_blocks_may_have_several_lines(home):
    with Terminal("README.md", **home) as terminal:
        terminal.until(PROMPT)
        assert terminal.say("1 + 1") == "2\n"
        assert terminal.say("_ + 1; x = 5") == "3\n"
        assert terminal.say("None") == terminal.say("x = 'a' * 2") == ""
        assert terminal.say("x") == "'aa'\n"
        terminal.say("def f(n):", until="... ")
        terminal.say("    return n * 2", until="... ")
        assert terminal.say("") == ""
        assert terminal.say("f(21)") == "42\n"
        assert "ZeroDivisionError" in terminal.say("f(1) / 0")
        assert "SyntaxError" in terminal.say("x = )")
        assert terminal.say("FINAL(x)", until="aa\n") == "aa\n"
        assert terminal.run.wait(60) == 0


def test_the_banner_names_what_is_there(home):
    size = len((ROOT / "README.md").read_text())
    with Terminal("README.md", **home) as terminal:
        said = terminal.until(PROMPT)
        assert f"context: str of {size}" in said
        for name in ("FINAL_VAR", "rlm_query_batched", "list_papers", "search"):
            assert name in said
        assert terminal.say("search(context, 'alphaXiv')") == "[]\n"
        assert terminal.end() == 0


def test_ctrl_c_ends_a_block_and_keeps_the_variables(home):
    with Terminal(**home) as terminal:
        terminal.until(PROMPT)
        terminal.say("import time; x = 7")
        for block in ("time.sleep(600)", "exec('while True: x += 1')"):
            said = ""
            while 'File "<repl>", line 1' not in said:  # else it was pressed too early
                terminal.say(block, until="\n")
                said = terminal.stop()
            assert "KeyboardInterrupt" in said
        assert int(terminal.say("x")) >= 7
        terminal.press(b"half a line")
        terminal.until("half a line")
        assert "KeyboardInterrupt" in terminal.stop()  # at the prompt it gives up the line
        assert terminal.say("x >= 7") == "True\n"
        assert terminal.end() == 0


def test_the_tab_key_completes_names_and_indents(home):
    with Terminal(**home) as terminal:
        terminal.until(PROMPT)
        terminal.say("first_name = 20")
        assert terminal.say("first\t + 22") == "42\n"
        assert "no model is attached" in terminal.say("rlm_query_b\t('a')")
        terminal.say("def f():", until="... ")
        terminal.say("\tret\t 7", until="... ")
        terminal.say("")
        assert terminal.say("f()") == "7\n"
        assert terminal.end() == 0


def test_lines_are_remembered_in_the_users_folder_if_there_is_a_home(home, tmp_path):
    kept = tmp_path / ".local" / "state" / "rlm-repl-history"
    with Terminal(**home) as terminal:
        terminal.until(PROMPT)
        terminal.say("first = 1")
        assert terminal.end() == 0
    assert kept.read_text().splitlines()[-1] == "first = 1"
    with Terminal(**home) as terminal:
        terminal.until(PROMPT)
        terminal.press(b"\x10")  # Ctrl-P: the line before
        terminal.until("first = 1")
        assert terminal.say(" + 1") == "" and terminal.say("first") == "2\n"
        assert terminal.end() == 0
    with Terminal(HOME=str(tmp_path / "gone"), XDG_STATE_HOME="") as terminal:
        terminal.until(PROMPT)
        assert terminal.say("1") == "1\n" and terminal.end() == 0
    assert not (tmp_path / "gone").exists()


# --- a script ---------------------------------------------------------------------------


def test_a_script_is_one_block_without_echo(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world")
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    done = script(a, stdin="def f():\n    return 2\nprint(f())\n3\nFINAL(context)\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\nhello\n", "")
    done = script(a, b, stdin="for k in context:\n  print(context[k])")
    assert (done.returncode, done.stdout) == (0, "hello\nworld\n")
    assert script().returncode == 0


@pytest.mark.parametrize("code, error", [
    ("print(1)\n1 / 0\nprint(2)\n", "ZeroDivisionError"), ("x = )", "SyntaxError"),
    ("while True: pass", "TimeoutError"), ("import os; os._exit(3)", "exit code 3")])
def test_a_script_that_fails_ends_with_status_1(code, error):
    done = script("--seconds", "0.5", stdin=code)
    assert done.returncode == 1 and error in done.stderr
    assert done.stdout == ("1\n" if "print" in code else "")


def test_tools_are_those_of_the_task(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    asked = "print(look('x'), 'search' in globals())"
    assert script("--task", tmp_path / "mine.py", stdin=asked).stdout == "X False\n"
    assert script("--task", "hop", stdin="print(search('A b. C.', 'b', 0))").stdout == (
        "['A b.']\n")


@pytest.mark.parametrize("args, says", [
    (["none.txt"], "cannot read none.txt"), (["--task", "chess"], "no task 'chess'"),
    (["--task", "chess.py"], "chess.py: no such file"),
    *((["--seconds", wrong], "above 0") for wrong in ("0", "-1", "nan"))])
def test_what_is_not_there_is_named_in_one_line(args, says):
    done = script(*args)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
