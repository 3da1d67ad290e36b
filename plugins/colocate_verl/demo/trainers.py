"""verl's PPO trainers, as its task runners make them, but with what stands in the place of Ray actors (`rollout`)."""

# verl isn't there when types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any


def of_v0(config: Any) -> Any:
    """Make verl's `RayPPOTrainer`, which wants to be given what its task runner makes.

    Answers are sampled on the driver, by the actor's weights: no vLLM, and no Ray. Of the config's own choices it takes
    `reward.custom_reward_function`; without one an answer is worth its share of digits.

    Args:
        config: What `settings("v0", ...)` returns, or a config of verl's for its PPO with the keys that it adds.

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
    """Make `PPOTrainerSync`, as `TaskRunnerV1` does; the TransferQueue is there already."""
    import verl.trainer.ppo.v1.trainer_base as v1
    from omegaconf import OmegaConf

    from colocate_verl.demo import rollout

    OmegaConf.resolve(config)
    v1.LLMServerManager, v1.RewardLoopManager = rollout.Servers, rollout.Rewards
    return v1.get_trainer_cls(config.trainer.v1.trainer_mode)(config)


def answers(config: Any) -> Any:
    """Make what V1 calls for answers; V0 makes it by its name in the config."""
    from colocate_verl.demo import rollout

    return rollout.Answers(config)
