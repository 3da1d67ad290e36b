"""PPO with four roles in one group: the main example of colocate, built only on the public API.

`colocate run docs/examples/ppo.yaml` trains with it. The roles are `ppo.actor`, `ppo.critic`, `ppo.reference` and
`ppo.reward`; the job is `ppo.train`.
"""
