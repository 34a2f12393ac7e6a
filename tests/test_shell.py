"""repl.py as a command: blocks are read from its input until FINAL."""
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shell(*args):
    return subprocess.Popen(
        [sys.executable, "-u", ROOT / "repl.py", *args], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_an_empty_line_runs_the_lines_above_it():
    blocks = ["def f(n):\n    return n * 2\nprint(f(21))", "x = search(context, 'zyzzyva')",
              "f(1) / 0", "FINAL([x, 'end'])", "print('never')"]
    done = shell("README.md")
    shown, errors = done.communicate("".join(f"{block}\n\n" for block in blocks), 60)
    assert (done.returncode, errors) == (0, "")
    assert f"str of {len((ROOT / 'README.md').read_text())}" in shown
    assert "42\n" in shown and "ZeroDivisionError" in shown
    assert shown.endswith("[[], 'end']\n")


def test_ctrl_c_ends_the_session_even_while_a_block_runs():
    session = shell()
    session.stdin.write("print('begun')\n\nimport time; time.sleep(600)\n\n")
    session.stdin.flush()
    while "begun" not in session.stdout.readline():
        pass
    session.send_signal(signal.SIGINT)
    assert session.wait(60) == 0


def test_a_file_that_is_not_there_is_named_in_one_line():
    done = shell("none.txt")
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 1 and "none.txt" in errors and errors.count("\n") == 1
