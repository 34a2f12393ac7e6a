"""Makes a random checkpoint of the Qwen3-4B shape (8 GB, bfloat16, several files), loads
it, decodes a few tokens and deletes it: `python -m lab.load_4b [FOLDER]`. Linux, 12 GB.

Prints parameters, the peak of anonymous memory over the weights' bytes, and the tokens.
FOLDER is where the checkpoint is put meanwhile, by default the system's temporary folder.
"""
import multiprocessing
import os
import sys
import tempfile
import threading
import time

import torch

from model import Qwen3, Qwen3Config
from runtime import console, hf
from runtime.files import write_json

CONFIG = Qwen3Config(151_936, 2560, 9728, 36, 32, 8, 128, 40_960)


def anonymous() -> int:
    """Bytes of memory that no file is mapped to."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def make(path: str) -> None:
    """Several files, each written before the tensors of the next one are made."""
    hf.SHARD_BYTES = 2 << 30
    with torch.device("meta"):
        weights = Qwen3(CONFIG).weights()
    block = (torch.rand(10_007_777) - 0.5).mul_(0.07).bfloat16()  # repeated: quick to make

    def tensors():
        for name, weight in weights.items():
            size = weight.numel()
            tensor = block.repeat(size // len(block) + 1)[:size].view(weight.shape)
            yield name, torch.ones_like(tensor) if weight.dim() == 1 else tensor.clone()

    sizes = {name: weight.numel() * 2 for name, weight in weights.items()}
    hf.write_weights(path, tensors(), sizes, torch.bfloat16)
    write_json(os.path.join(path, hf.CONFIG), CONFIG.to_json(torch.bfloat16))


@torch.no_grad()
def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=folder) as path:
        # A process of its own, whose memory is not counted.
        maker = multiprocessing.Process(target=make, args=(path,))
        maker.start()
        maker.join()
        if maker.exitcode:
            sys.exit("load_4b.py: the checkpoint could not be made")

        before = peak = anonymous()
        over = threading.Event()

        def watch():
            nonlocal peak
            while not over.wait(0.005):
                peak = max(peak, anonymous())

        watcher, start = threading.Thread(target=watch), time.monotonic()
        watcher.start()
        model = Qwen3.from_pretrained(path, torch.bfloat16)
        over.set()
        watcher.join()
        print(f"loaded in {time.monotonic() - start:.0f} s")

    weights = sum(weight.nbytes for weight in model.parameters())
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count:,} parameters, {weights / 1e9:.3f} GB")
    print(f"anonymous memory: {before / 1e9:.2f} GB before, peak {peak / 1e9:.3f} GB, "
          f"{peak / weights:.3f} x the weights")
    ids = [9707, 11]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    print("decoded", ids[2:])


if __name__ == "__main__":
    console.start(main)
