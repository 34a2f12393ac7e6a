"""What keeps a run alive on a machine: processes, memory, files, several ranks.

Import it before torch: a thread that waits for the others spins a little, then sleeps.
torch's default is to spin long. That is 1.3 times faster on two idle cores, and ten times
slower on two busy ones. """
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
