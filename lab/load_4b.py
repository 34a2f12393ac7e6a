"""Makes a random checkpoint of the Qwen3-4B shape (8 GB, bfloat16, sharded), loads it, decodes a
few tokens and deletes it: `python tests/load_4b.py [FOLDER]`. Linux, 12 GB of memory.

Prints parameters, the peak of anonymous memory over the weights' bytes, and the tokens. FOLDER is
where the checkpoint is put for the time being, by default the system's temporary folder.
"""
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import model as model_module  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402

CONFIG = Qwen3Config(151_936, 2560, 9728, 36, 32, 8, 128, 40_960)


def anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(x.split()[1]) << 10 for x in file if x.startswith("RssAnon"))


def make(path: str) -> None:
    """Four shards, each written before the next is made."""
    with torch.device("meta"):
        shapes = [(name, w.shape) for name, w in Qwen3(CONFIG).named_parameters()]
    block = (torch.rand(10_007_777) - 0.5).mul_(0.07).bfloat16()  # repeated: quick to make
    index, count = {}, 4
    for i in range(count):
        file, shard = f"model-{i + 1:05d}-of-{count:05d}.safetensors", {}
        for name, shape in shapes[i::count]:
            n = shape.numel()
            shard[name] = (torch.ones(n).bfloat16() if len(shape) == 1 else
                           block.repeat(n // len(block) + 1)[:n]).view(shape).clone()
            index[name] = file
        save_file(shard, Path(path, file), metadata={"format": "pt"})
    model_module._write_json(str(Path(path, "model.safetensors.index.json")),
                             {"metadata": {}, "weight_map": index})
    model_module._write_json(str(Path(path, "config.json")), CONFIG.to_json(torch.bfloat16))


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as path:
        maker = multiprocessing.Process(target=make, args=(path,))  # its memory is not counted
        maker.start(), maker.join()
        peak, over = [anonymous()], threading.Event()
        before = peak[0]

        def watch():
            while not over.wait(0.005):
                peak[0] = max(peak[0], anonymous())
        watcher, start = threading.Thread(target=watch), time.monotonic()
        watcher.start()
        model = Qwen3.from_pretrained(path, torch.bfloat16)
        over.set(), watcher.join()
        print(f"loaded in {time.monotonic() - start:.0f} s")
    weights = sum(w.nbytes for w in model.parameters())
    print(f"{sum(w.numel() for w in model.parameters()):,} parameters, {weights / 1e9:.3f} GB")
    print(f"anonymous memory: {before / 1e9:.2f} GB before, peak {peak[0] / 1e9:.3f} GB, "
          f"{peak[0] / weights:.3f} x the weights")
    ids = [9707, 11]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    print("decoded", ids[2:])


if __name__ == "__main__":
    main()
