"""Training in several processes that share one update and the rollouts.

`world.py` is the group of processes and says who is missing when a wait fails. `balance.py` deals
whole groups to ranks by cost. `sharding.py` and `learner.py` are a learner whose gradient is the
sum over ranks, with whole or sharded weights. `team.py` lets rank 0 lead the others, `engine.py`
spreads prompts, and `ranks.py` is a run under `torchrun`.
"""
