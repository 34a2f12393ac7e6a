"""repl.py at a terminal."""
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


def test_lines_up_to_an_empty_one_are_a_block():
    with Terminal("README.md") as terminal:
        assert f"str of {len((ROOT / 'README.md').read_text())}" in terminal.until(PROMPT)
        terminal.say("def f(n):")
        terminal.say("    return n * 2")
        terminal.say("print(f(21))")
        assert terminal.say("") == "42\n\n"
        terminal.say("x = search(context, 'zyzzyva'); f(1) / 0")
        assert "ZeroDivisionError" in terminal.say("")
        terminal.say("FINAL(x)")
        assert terminal.say("", until="[]\n").endswith("[]\n")
        assert terminal.run.wait(60) == 0


def test_ctrl_c_ends_the_session_even_while_a_block_runs():
    with Terminal() as terminal:
        terminal.until(PROMPT)
        terminal.say("import time; time.sleep(600)")
        os.write(terminal.master, b"\n")
        time.sleep(0.5)
        os.write(terminal.master, b"\x03")
        assert terminal.run.wait(60) == 0


def test_a_file_that_is_not_there_is_named_in_one_line():
    done = subprocess.run([sys.executable, ROOT / "repl.py", "none.txt"], text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 1 and "none.txt" in done.stderr
    assert done.stderr.count("\n") == 1
