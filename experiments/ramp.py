"""A price per child that grows with the share of what the group has solved."""
import os, statistics
from dataclasses import replace
import grpo
P = float(os.environ["PRICE"])
def credit(rollouts, config):
    groups = grpo.scored_groups(rollouts)
    new = list(rollouts)
    for members in groups.values():
        solved = statistics.fmean(rollouts[i].reward for i in members)
        for i in members:
            k = sum(1 for _ in rollouts[i].root.walk()) - 1
            new[i] = replace(rollouts[i], reward=rollouts[i].reward - P * solved * k)
    return grpo.credit(new, config)
