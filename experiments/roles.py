"""roles.py MODE flags of train.py. MODE: shared; roles, a model per role; frozen, children of
the start; twice, one model with a step for the children and one for the roots."""
import sys
from functools import partial
import train, rlm
mode = sys.argv.pop(1)
kids = {}
real_update, real_sampler = train.update, train.make_sampler
def make_sampler(setup, model):
    sampler = real_sampler(setup, model)
    if mode in ("roles", "frozen"):
        start = setup.config.model
        from training.run import Start
        kids["model"], kids["optimizer"] = train.load(
            Start(start, setup.run.state), setup, False)
        kids["sampler"] = real_sampler(setup, kids["model"])
    return sampler
def sample_trees(run, model, sampler, score, asked, key, label, group=1, sampling=train.Sampling()):
    sampler.load(model)
    policy = rlm.local_policy(sampler, run.tokenizer, sampling)
    if kids:
        kids["sampler"].load(kids["model"])
        below = rlm.local_policy(kids["sampler"], run.tokenizer, sampling)
        above = policy
        async def policy(node, most, key):
            return await (below if node.depth else above)(node, most, key)
    return train.grown(rlm.jobs(asked, key, group), run.world, lambda jobs: rlm.collect(
        jobs, policy, run.tokenizer, run.rlm_config, label=label, score=score))
def update(setup, model, optimizer, reference, batches):
    if mode == "twice":  # one model, a step for the roots and one for the children
        for of in (lambda row: row.depth, lambda row: not row.depth):
            part = [[row for row in rows if of(row)] for rows in batches]
            if any(part):
                measured = real_update(setup, model, optimizer, reference, part)
        return measured
    if not kids:
        return real_update(setup, model, optimizer, reference, batches)
    top = [[row for row in rows if not row.depth] for rows in batches]
    low = [[row for row in rows if row.depth] for rows in batches]
    if mode == "roles" and any(low):
        real_update(setup, kids["model"], kids["optimizer"], None, low)
    return real_update(setup, model, optimizer, reference, top)
train.make_sampler, train.sample_trees, train.update = make_sampler, sample_trees, update
train.main()
