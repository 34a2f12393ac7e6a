"""train.py over children that stay as they are: sampled from the weights in $START.

    START=RUN/warmup python -m experiments.frozen --model RUN/warmup --warmup-steps 0 \
        --credit root
"""
import os

import engine  # noqa: F401  before torch: it says how torch's threads wait

import train
from ask import RLM
from rlm import local_policy


def main() -> None:
    children = RLM(os.environ["START"], batch=96).policy

    def apart(sampler, tokenizer):
        roots = local_policy(sampler, tokenizer)

        async def policy(node, max_tokens: int, key: tuple):
            return await (children if node.path else roots)(node, max_tokens, key)

        return policy

    train.local_policy = apart
    train.main()


if __name__ == "__main__":
    main()
