"""Make verl's PPO trainers as verl's task runners do, with replacements for Ray actors (see `rollout`)."""

# Types are checked without verl installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any


def of_v0(config: Any) -> Any:
    """Make verl's `RayPPOTrainer` with the arguments of verl's task runner.

    Answers are sampled on the driver, with the actor's weights, without vLLM or Ray. Of the config's choices, only
    `reward.custom_reward_function` is used; without a function, the reward is an answer's share of digits.

    Args:
        config: The result of `settings("v0", ...)`, or a config of verl's PPO with the same added keys.

    Returns:
        The trainer: call its `init_workers()`, then its `fit()`.
    """
    import ray
    import verl.experimental.reward_loop
    import verl.trainer.ppo.ray_trainer as v0
    from omegaconf import OmegaConf
    from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
    from verl.utils import hf_tokenizer
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from colocate_verl.demo import rollout

    OmegaConf.resolve(config)
    v0.LLMServerManager = rollout.Servers
    verl.experimental.reward_loop.RewardLoopManager = rollout.Rewards
    nodes = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    workers = {v0.Role.ActorRolloutRef: ActorRolloutRefWorker, v0.Role.Critic: TrainingWorker}
    return v0.RayPPOTrainer(
        config=config,
        tokenizer=hf_tokenizer(config.actor_rollout_ref.model.path),
        role_worker_mapping={role: ray.remote(cls) for role, cls in workers.items()},
        resource_pool_manager=ResourcePoolManager({"all": nodes}, dict.fromkeys(workers, "all")),
        ray_worker_group_cls=RayWorkerGroup,
    )


def of_v1(config: Any) -> Any:
    """Make verl's `PPOTrainerSync` as `TaskRunnerV1` does. The TransferQueue must be running."""
    import verl.trainer.ppo.v1.trainer_base as v1
    from omegaconf import OmegaConf

    from colocate_verl.demo import rollout

    OmegaConf.resolve(config)
    v1.LLMServerManager, v1.RewardLoopManager = rollout.Servers, rollout.Rewards
    return v1.get_trainer_cls(config.trainer.v1.trainer_mode)(config)


def make_answers(config: Any) -> Any:
    """Make the object that answers prompts for the V1 trainer. The V0 trainer itself makes such an object."""
    from colocate_verl.demo import rollout

    return rollout.Answers(config)
