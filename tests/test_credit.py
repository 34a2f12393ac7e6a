"""True credit by replay: exact where nothing is new, else a closed form's value."""
import asyncio
from statistics import fmean

import pytest
from test_bias import all_trees

import tasks
from experiments.credit import replayed
from rlm import Job, RLMConfig, scored_rollout
from tree import Completion

REWARDS = {tuple(tokens): reward for _, tokens, reward in all_trees()}
CONFIG = RLMConfig(style="brief")
ASK = 'ks = [*map(int, llm_query_batched(["5 or 6?"] * {}))]\n'
SAYS = {1: ASK.format(1) + "FINAL([1, *ks])", 3: "FINAL([2, 3, *ks])",
        4: "FINAL([2, 4, *ks])"}


class Bytes:
    """A tokenizer: what a node reads and writes decides its ids."""
    end_of_turn = 0

    def open(self, system, user, example):
        return user.encode()

    def observe(self, text, closed):
        return text.encode()


def writes(says, choose):
    """The policy whose message is the token choose(path, key); `says` is what roots run."""
    async def policy(node, most, key):
        token = choose(node.path, key)
        text = str(token) if node.path else f"```repl\n{says[token]}\n```"
        return Completion(text, tuple(text.encode()), (0.0,) * len(text))
    return policy


def sampled(path, key):
    """Eight keys are the policy: 5 or 6 with 1/4 and 3/4, then 3 or 4 with 1/2 each."""
    number = key[0]
    return (5 if number % 4 == 0 else 6) if path else (3 if number < 4 else 4)


@pytest.mark.parametrize("shown", ["", "ks"])
def test_a_node_sampled_again_has_the_credit_of_the_closed_form(shown, tmp_path):
    """A root that sees its children's answers says something new where they changed."""
    kind = tmp_path / f"leaves{shown}.py"
    kind.write_text(f"score = lambda task, answer: {REWARDS}[tuple(answer)]")
    tasks.load(str(kind))
    task = tasks.Task("leaves", kind.stem, "", "", "gold")
    says = SAYS | {2: ASK.format(2) + f"print({shown})"}

    async def check(tokens):
        given = {((), 0): tokens[0], ((), 1): tokens[1]}
        given |= {((i,), 0): b for i, b in enumerate(tokens[1 + (tokens[0] == 2):])}
        tree = await scored_rollout(
            Job(task), writes(says, lambda path, key: given[key[-2:]]), Bytes(), CONFIG)
        same, new = await replayed(tree, None, Bytes(), CONFIG)
        for was, now in zip(tree.root.walk(), same.root.walk(), strict=True):
            assert (was.ids, was.answer) == (now.ids, now.answer) and not new
        assert tree.reward == same.reward == REWARDS[tokens]

        first = len(tokens) - len(tree.root.children)  # of the children's tokens
        for i, child in enumerate(tree.root.children):
            expected = 0.0
            for b, p in ((5, 1 / 4), (6, 3 / 4)):
                changed = [*tokens[:first + i], b, *tokens[first + i + 1:]]
                both = [REWARDS[tuple([2, c, *changed[2:]])] if first == 2
                        else REWARDS[tuple(changed)] for c in (3, 4)]
                again = shown and tokens[first + i] != b and first == 2
                expected += p * (fmean(both) if again else REWARDS[tuple(changed)])
            made = [await replayed(tree, writes(says, sampled), Bytes(), CONFIG, (n,),
                                   child.path) for n in range(8)]
            assert fmean(new.reward for new, _ in made) == pytest.approx(expected)

    for tokens in ((1, 5), (2, 3, 5, 6), (2, 4, 6, 5), (2, 3, 6, 6)):
        asyncio.run(check(tokens))
