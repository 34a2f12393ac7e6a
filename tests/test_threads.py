"""How torch waits, and what runs beside an event loop."""
import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime import threads

ROOT = Path(__file__).resolve().parent.parent


def test_ctrl_c_in_a_notebook_ends_what_runs():
    seen = []

    async def work():
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def notebook():
        with pytest.raises(KeyboardInterrupt):
            threads.run(work())

    loop = asyncio.new_event_loop()  # asyncio.run would take the signal
    loop.run_until_complete(notebook())
    loop.close()
    assert seen == ["cancelled"]


@pytest.mark.parametrize("program", [
    "import train", "import eval", "import rlm\nrlm.RLM('x')"])
def test_every_program_says_how_torch_waits_before_torch_is_loaded(program):
    """torch reads the setting once. Without it, two threads on a busy core take seconds."""
    code = ("import os, sys\n"
            "class Finder:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'torch':\n"
            "            sys.exit(os.environ.get('GOMP_SPINCOUNT') != '1000')\n"
            "sys.meta_path.insert(0, Finder())\n" + program + "\nsys.exit(2)")
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment)
    assert done.returncode == 0
