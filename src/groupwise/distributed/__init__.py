"""Training in several processes that share one update and the rollouts.

`world.py` is the group of processes and names the missing ranks when a wait fails. `balance.py`
assigns whole groups to ranks by cost. `sharding.py` and `learner.py` implement a learner whose
gradient is the sum over ranks, with whole or sharded weights. In `team.py` rank 0 leads the others,
`engine.py` distributes prompts, and `ranks.py` is a run under `torchrun`.

In `cluster.py`, Ray starts the processes: ranks, replicas (`replicas.py`), scorers (`scorers.py`).
"""
