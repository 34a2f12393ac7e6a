"""How torch's threads wait."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
