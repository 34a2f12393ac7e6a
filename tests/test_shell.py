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

ROOT = Path(__file__).resolve().parent.parent
PROMPT = ">>> "


def script(*args, stdin=""):
    return subprocess.run([sys.executable, ROOT / "repl.py", *map(str, args)], input=stdin,
                          text=True, capture_output=True, timeout=60)


class Terminal:
    """A terminal in which repl.py runs: `say` types a line and returns what is shown until
    the next prompt."""

    def __init__(self, *args):
        self.master, slave = pty.openpty()

        def control():
            fcntl.ioctl(slave, termios.TIOCSCTTY)

        self.run = subprocess.Popen(
            [sys.executable, ROOT / "repl.py", *map(str, args)], stdin=slave, stdout=slave,
            stderr=slave, start_new_session=True, preexec_fn=control,
            env={**os.environ, "TERM": "dumb"})
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


def test_a_terminal_shows_values_and_takes_blocks_of_several_lines():
    with Terminal("README.md") as terminal:
        assert f"str of {len((ROOT / 'README.md').read_text())}" in terminal.until(PROMPT)
        assert terminal.say("1 + 1") == "2\n"
        assert terminal.say("None") == terminal.say("x = 'a' * 2") == ""
        terminal.say("def f(n):", until="... ")
        terminal.say("    return n * 2", until="... ")
        assert terminal.say("") == ""
        assert terminal.say("f(21)") == "42\n"
        assert "ZeroDivisionError" in terminal.say("f(1) / 0")
        assert "SyntaxError" in terminal.say("x = )")
        assert terminal.say("search(context, 'zyzzyva')") == "[]\n"
        assert terminal.say("FINAL(x)", until="aa\n") == "aa\n"
        assert terminal.run.wait(60) == 0


def test_ctrl_c_ends_the_session_even_while_a_block_runs():
    with Terminal() as terminal:
        terminal.until(PROMPT)
        terminal.say("import time")
        os.write(terminal.master, b"time.sleep(600)\n")
        time.sleep(0.5)
        os.write(terminal.master, b"\x03")
        assert terminal.run.wait(60) == 0


def test_a_script_is_one_block_without_echo(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world")
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    done = script(a, stdin="def f():\n    return 2\nprint(f())\n3\nFINAL(context)\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\nhello\n", "")
    done = script(a, b, stdin="print(*context.values())\n1 / 0")
    assert (done.returncode, done.stdout) == (1, "hello world\n")
    assert "ZeroDivisionError" in done.stderr


def test_a_file_that_is_not_there_is_named_in_one_line():
    done = script("none.txt")
    assert done.returncode == 1 and "none.txt" in done.stderr
    assert done.stderr.count("\n") == 1
