"""notes whose root may print all that it has found: children are not needed."""
from tasks.notes import *
TINY = {"max_turns": 2, "limits": {"output_chars": 250}}
