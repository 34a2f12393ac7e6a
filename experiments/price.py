import os
import tasks
P = float(os.environ["PRICE"])
def flat(task, answer, root):
    return tasks.reward(task, answer) - P * (sum(1 for _ in root.walk()) - 1)
def length(task, answer, root):
    """P per 100 sampled tokens of the tree."""
    return tasks.reward(task, answer) - P * sum(n.sampled for n in root.walk()) / 100
