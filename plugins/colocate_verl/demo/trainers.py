"""verl's PPO trainers, made as in verl's task runners, with stand-ins for Ray actors (`rollout`)."""

# verl isn't there when types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any


def of_v0(config: Any) -> Any:
    """Make verl's `RayPPOTrainer` with the arguments of verl's task runner.

    Answers are sampled on the driver, with the actor's weights: no vLLM, and no Ray. Of the config's choices, only
    `reward.custom_reward_function` is used; without one the reward is an answer's share of digits.

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
    """Make `PPOTrainerSync`, as `TaskRunnerV1` does; the TransferQueue must be running."""
    import verl.trainer.ppo.v1.trainer_base as v1
    from omegaconf import OmegaConf

    from colocate_verl.demo import rollout

    OmegaConf.resolve(config)
    v1.LLMServerManager, v1.RewardLoopManager = rollout.Servers, rollout.Rewards
    return v1.get_trainer_cls(config.trainer.v1.trainer_mode)(config)


def answers(config: Any) -> Any:
    """Make V1's source of answers; V0 makes one by name from the config."""
    from colocate_verl.demo import rollout

    return rollout.Answers(config)
