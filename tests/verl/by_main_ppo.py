"""verl's `main_ppo` with the demo's config and answers; the driver is its task runner, a Ray actor."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf

from colocate_verl.demo import ENVIRONMENT, make, settings

os.environ.update(ENVIRONMENT)
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # This reads the environment.

folder, of_ray = sys.argv[1:]
log = Path(folder) / "log.jsonl"
os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
del os.environ["COLOCATE_VERL"]  # Ray's processes lack this, as on a cluster elsewhere.


class WithAnswers(TaskRunnerV1.__ray_actor_class__):
    def run(self, config: Any) -> None:
        import verl.trainer.ppo.v1.trainer_base as v1

        from colocate_verl.demo import rollout

        v1.LLMServerManager, v1.RewardLoopManager = rollout.Servers, rollout.Rewards
        super().run(config)
        from colocate_verl.groups import RayWorkerGroup

        assert isinstance(self.trainer.actor_rollout_wg, RayWorkerGroup)


make(Path(folder), 3)
config = OmegaConf.create(OmegaConf.to_container(settings("v1", Path(folder), 3)))
config.ray_kwargs.ray_init.update(num_cpus=64, num_gpus=0, include_dashboard=False, _temp_dir=of_ray)
run_ppo(config, ray.remote(WithAnswers))
ray.shutdown()
print(json.dumps({"steps": [json.loads(line)["data"] for line in log.read_text().splitlines()]}))
