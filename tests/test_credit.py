"""True credit by replay: exact where nothing is new, else the value of a closed form."""
import asyncio
from statistics import fmean

import pytest
from test_bias import all_trees

import tasks
from experiments.credit import replaying
from rlm import Job, RLMConfig, scored_rollout
from tree import Completion

REWARDS = {tuple(tokens): reward for _, tokens, reward in all_trees()}
ASK = 'ks = [*map(int, llm_query_batched(["5 or 6?"] * {}))]\n'


class Bytes:
    """A tokenizer with which ids say what a node has read."""
    end_of_turn = 0
    open = staticmethod(lambda system, user, example: user.encode())
    observe = staticmethod(lambda text, closed: text.encode())


@pytest.mark.parametrize("shown", ["", "ks"])
def test_a_child_sampled_again_has_the_credit_of_the_closed_form(shown, tmp_path):
    """A root that sees its children's answers says something new where they changed."""
    kind = tmp_path / f"leaves{shown}.py"
    kind.write_text(f"score = lambda task, answer: {REWARDS}[tuple(answer)]")
    tasks.load(str(kind))
    task = tasks.Task("leaves", kind.stem, "", "", "gold")
    code = {1: ASK.format(1) + "FINAL([1, *ks])", 2: ASK.format(2) + f"print({shown})",
            3: "FINAL([2, 3, *ks])", 4: "FINAL([2, 4, *ks])"}

    def grown(token_of, n=0, old=None, path=None):
        async def policy(node, most, key):
            token = token_of(*key)
            text = str(token) if node.path else f"```repl\n{code[token]}\n```"
            return Completion(text, tuple(text.encode()), (0.0,) * len(text))

        chosen = replaying(old, policy, path) if old else policy
        config = RLMConfig(style="brief")
        return asyncio.run(scored_rollout(Job(task, (n,)), chosen, Bytes, config))

    def sampled(n, path, turn):
        """Eight keys are the policy: 6 with 3/4, and, independent of that, 3 with 1/2."""
        return (5 if n % 4 == 0 else 6) if path else (3 if n < 4 else 4)

    for said, asked in (((1,), (5,)), ((2, 3), (5, 6)), ((2, 4), (6, 6))):
        tree = grown(lambda n, path, turn: asked[path[0]] if path else said[turn])
        twin = grown(None, old=tree.root)
        assert [n.ids for n in tree.root.walk()] == [n.ids for n in twin.root.walk()]
        assert tree.reward == twin.reward == REWARDS[said + asked]
        for i, was in enumerate(asked):
            expected = 0.0
            for b, p in ((5, 1 / 4), (6, 3 / 4)):
                answers = (*asked[:i], b, *asked[i + 1:])
                follow = [(2, 3), (2, 4)] if shown and b != was and said[1:] else [said]
                expected += p * fmean(REWARDS[root + answers] for root in follow)
            again = [grown(sampled, n, tree.root, (i,)).reward for n in range(8)]
            assert fmean(again) == pytest.approx(expected)
