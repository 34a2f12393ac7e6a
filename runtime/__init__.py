"""What keeps a run alive on a machine: processes, memory, files, several ranks."""
import sys

if sys.version_info < (3, 11):  # every program imports this early
    sys.exit("Python 3.11 or later is needed; this one is " + sys.version.split()[0])
