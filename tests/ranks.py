"""One rank of tests/test_parallel.py: for each number of a step on its standard input, `ranks.py
DIR` takes one step of full fine-tuning and one with adapters on hand-made trees, from the
checkpoint of the step before, and leaves loss, gradients and weights in DIR. RANK and WORLD_SIZE
say which of how many it is."""
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import grpo  # noqa: E402
import train  # noqa: E402
import warmup  # noqa: E402
from model import Qwen3, Qwen3Config, whole  # noqa: E402
from runtime.parallel import World  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402
from tree import Node, Rollout, Turn  # noqa: E402

KINDS = {"full": {"lr": 1e-3}, "lora": {"lora_rank": 2, "lr": 1e-2}}


def make_model(path):
    tokenizer = Tokenizer.train(["abc abd aef"] * 9, 300)
    torch.manual_seed(0)
    Qwen3(Qwen3Config(tokenizer.vocab_size, 32, 48, 2, 4, 2, 8, 384)).save_pretrained(path)
    tokenizer.save(path)
    warmup.TINY_RLM.save(f"{path}/rlm.json")


def trees(step):
    """Two groups; ten nodes with an advantage, of 20 to 300 tokens."""
    rng = random.Random(step)

    def node(path, *children):
        made = Node(path, children=list(children))
        for _ in range(2):
            prompt, answer = ([rng.randrange(256) for _ in range(rng.randint(10, 150))]
                              for _ in range(2))
            made.add(Turn("user", "", tuple(prompt)))
            made.add(Turn("assistant", "", tuple(answer), tuple([-5.5] * len(answer))))
        return made

    return [Rollout(None, group, node((), *(node((i,)) for i in range(n))), reward)
            for group, reward, n in (("a", 1.0, 3), ("a", 0.0, 1), ("b", 0.2, 0), ("b", 0.7, 2))]


def step(out, kind, number, world, split=None):
    """Resume, update, save. `split` of the rows go to rank 0, the others to rank 1."""
    try:
        return step_in(out, kind, number, world, split)
    finally:
        world.release()


def step_in(out, kind, number, world, split):
    trainer = train.Trainer(
        train.RunConfig(out=str(out), model=str(out.parent / "model"), resume=number > 0,
                        heldout=1),
        train.WarmupConfig(warmup_steps=0), train.UpdateConfig(micro_tokens=512, **KINDS[kind]),
        grpo.GRPOConfig(), world)
    if number == 0:
        trainer.end_warmup()
    found, optimizer_step = {}, trainer.optimizer_step

    def watched(lr, loss):
        found["gradients"] = {name: whole(w.grad).clone()
                              for name, w in trainer.model.named_parameters() if w.requires_grad}
        return optimizer_step(lr, loss)

    def unequal(rows, *_):
        return [rows[:split], rows[split:]][world.rank:world.rank + 1]

    trainer.optimizer_step = watched
    if split and world.size == 2:
        grpo.micro_batches, dealt = unequal, grpo.micro_batches
    with torch.no_grad():  # as the report does: it must leave no weight gathered
        trainer.model.logprobs(torch.arange(9)[None], torch.ones(1, 9))
    assert (world.size == 2) == all(isinstance(w, DTensor) for w in trainer.model.parameters())
    found["metrics"] = trainer.update(trees(number), number)
    if split and world.size == 2:
        grpo.micro_batches = dealt
    found["weights"] = dict(trainer.model.merged())
    found["rows"] = found["metrics"]["rows"]
    trainer.state["step"] = number + 1
    trainer.save_checkpoint()
    return found


if __name__ == "__main__":
    world, folder = World(), Path(sys.argv[1])
    for line in sys.stdin:  # numbers of steps
        for kind in KINDS:
            found = step(folder / kind, kind, int(line), world, split=3)
            if world.rank == 0:
                torch.save(found, folder / f"{kind}.pt.tmp")
                os.rename(folder / f"{kind}.pt.tmp", folder / f"{kind}-{int(line)}.pt")
    world.close()
