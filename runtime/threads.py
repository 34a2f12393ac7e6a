"""How many threads torch computes with, how they wait, and how it allocates on a GPU.

Programs import this file before torch, which reads the settings below when it is loaded."""
import contextlib
import os
from collections.abc import Iterator

# A thread that waits for the others spins a little, then sleeps. torch's default is to spin
# long: 1.3 times faster on two idle cores, ten times slower on two busy ones.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# A GPU's freed blocks of one size serve requests of another.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

SMALL_MODEL = 10_000_000


@contextlib.contextmanager
def suited_to(parameters: int) -> Iterator[None]:
    """Within it, torch has as many CPU threads as suit a model with so many parameters: one
    below SMALL_MODEL, otherwise all. With matrices this small, threads mostly wait for each
    other (measured), and one thread leaves the other cores to the REPLs."""
    import torch  # here, as a question to a server needs none of it

    before = torch.get_num_threads()
    if parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
