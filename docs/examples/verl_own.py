"""verl's PPO trainer V0 by a config of your own, in processes of this machine. Two steps: `python verl_own.py 2`.

Models and questions are tiny here, and on the CPU. What you change is in `CHANGES` and in `compute_score`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from colocate_verl.demo import ENVIRONMENT, make, of_v0, settings

FOLDER = Path("own").absolute()
CHANGES = {
    "actor_rollout_ref.model.path": FOLDER / "actor",  # a folder that `save_pretrained` has written
    "critic.model.path": FOLDER / "critic",
    "data.train_files": FOLDER / "ppo.parquet",  # with the columns of verl's data sets
    "data.train_batch_size": 16,  # questions in a step
    "actor_rollout_ref.rollout.n": 2,  # answers to each of them
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,  # questions in an update
    "reward.custom_reward_function.path": __file__,  # which has `compute_score`
    "trainer.default_local_dir": FOLDER / "checkpoints",
    "trainer.save_freq": 1,  # a checkpoint after each step
    "trainer.resume_mode": "auto",  # the next run goes on after the newest one
    "trainer.logger": "[console]",
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward, as verl calls it: whether the answer begins as it should, or else whether it has a digit."""
    return 1.0 if solution_str.startswith(ground_truth) else 0.1 * any(map(str.isdigit, solution_str))


def main() -> None:
    os.environ.update(ENVIRONMENT)  # the CPU as verl's accelerator: leave this out where there is a GPU
    import colocate_verl

    colocate_verl.install("local")
    if not FOLDER.exists():
        FOLDER.mkdir()
        make(FOLDER, steps=8)  # models, a tokenizer, 72 questions
    trainer = of_v0(settings("v0", FOLDER, steps=int(sys.argv[1]), changes=CHANGES))
    trainer.init_workers()
    trainer.fit()


if __name__ == "__main__":
    main()
