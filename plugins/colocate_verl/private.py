"""All private names of verl and Ray that this plugin uses. A test fails if one of these names disappears."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from colocate.errors import CapabilityError

HOME = "verl.single_controller.ray.base"  # The module that defines the replaced classes.
PASSED_BY = "verl.single_controller"  # Counted as library code, so that errors name the trainer's line.
MARK = "attrs_3141562937"  # Methods marked by `@register` have this attribute (verl's MAGIC_ATTR).
PROTECTED = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of workers that verl sets for its own use, and that `worker_env` must not set."""
# Variables with the namespace and the job id of the driver's Ray. vLLM names sockets by the job id.
_NAMESPACE, _JOB = (
    "COLOCATE_VERL_NAMESPACE",
    "COLOCATE_VERL_JOB",
)


def check_version() -> None:
    """Raise a CapabilityError for an unsupported version of verl."""
    version = importlib.metadata.version("verl")
    if not (0, 9) <= tuple(int(part) for part in version.split(".")[:2]) < (0, 11):
        raise CapabilityError(
            f"colocate_verl is for verl from 0.9 up to before 0.11, and verl {version} is installed: install one of "
            "these, or unset COLOCATE_VERL"
        )


def import_home() -> Any:
    """Import and return verl's module of the replaced classes. This also imports `PASSED_BY`."""
    return importlib.import_module(HOME)


def replace_objects(instead: Mapping[str, Any]) -> None:
    """Replace verl's objects with the given names, in every module that has imported such an object."""
    by_id = {id(getattr(import_home(), name)): value for name, value in instead.items()}
    for module in [candidate for candidate in sys.modules.values() if isinstance(candidate, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def refuse_all(error: Exception) -> None:
    """Defer an error of `install`, so that the first worker group or resource pool raises the error."""

    class Refused:
        def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise error

    replace_objects({"RayWorkerGroup": Refused, "RayResourcePool": Refused})


def patch_ray(executor: str) -> None:
    """Patch verl to skip checks of a missing Ray, and patch Ray to treat a worker like an actor of the driver."""
    import_home().ResourcePoolManager._check_resource_available = functools.partialmethod(_check_pools, executor)
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect &= executor == "ray"  # On other executors only `ray.init` starts Ray.
    if "WG_BACKEND" not in os.environ:
        of_main_ppo: Any = importlib.import_module("verl.trainer.constants_ppo")
        of_verl = of_main_ppo.get_ppo_ray_runtime_env
        of_main_ppo.get_ppo_ray_runtime_env = functools.partial(_patch_main_ppo, executor, of_verl)
    elif executor == "ray":
        _join_ray(hook)


def _check_pools(pools: Any, executor: str) -> None:
    """Refuse a PPO trainer that would start Ray actors although there is no Ray.

    This runs early, because the trainer makes its pools first. The pools' resources are checked when they are reserved.
    """
    import ray

    named = {getattr(role, "name", "") for role in pools.mapping}
    trainer: Any = sys.modules.get("verl.trainer.ppo.ray_trainer")
    if executor == "ray" or ray.is_initialized() or trainer is None or not named & {"ActorRollout", "ActorRolloutRef"}:
        return
    loop: Any = importlib.import_module("verl.experimental.reward_loop")
    theirs = [
        f"{module.__name__}.{name}"
        for module, name in ((loop, "RewardLoopManager"), (trainer, "LLMServerManager"))
        if getattr(module, name).__module__.startswith("verl.")
    ]
    if theirs:
        raise CapabilityError(
            f"RayPPOTrainer on {executor!r}: {' and '.join(theirs)} would start Ray actors, and there is no Ray. Put "
            "classes of your own in their place, and name one for "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class, as colocate_verl.demo.of_v0 does; or say "
            "COLOCATE_VERL=ray"
        )


def _patch_main_ppo(executor: str, of_verl: Any, config: Any = None) -> Any:
    """Return the Ray runtime environment for verl's `main_ppo`, with `COLOCATE_VERL` set for all actors."""
    if executor != "ray":
        raise CapabilityError(
            f"verl.trainer.main_ppo on {executor!r}: its trainer, agent and reward loops and vLLM are Ray actors: "
            "it needs COLOCATE_VERL=ray. Elsewhere run a trainer of verl's with managers of your own"
        )
    options = of_verl(config)
    options["env_vars"]["COLOCATE_VERL"] = executor
    return options


def unwrap_class(cls: Any) -> type:
    """Return the class inside a Ray actor class."""
    original: type = getattr(cls, "__ray_actor_class__", cls)
    return original


def actor_options(given: Any) -> dict[str, Any]:
    """Return the Ray actor options of a `RayClassWithInitArgs`."""
    return {**given._options, **given._additional_resource}


def bind_methods(group: Any, cls: type) -> None:
    """Add a class's methods, if marked by `@register`, to a worker group."""
    group._bind_worker_method(cls, import_home().func_generator)


def set_siblings(worker: Any, others: Mapping[str, Any]) -> None:
    """Set a worker's siblings, which verl finds with `get_fused_worker_by_name`."""
    worker.fused_worker_dict = others


def cluster_environment() -> dict[str, str]:
    """Return environment variables that let a worker join the driver's Ray at the first use of Ray."""
    import ray

    if not ray.is_initialized():
        ray.init()  # verl itself starts Ray with its first placement group.
    context = ray.get_runtime_context()
    return {"RAY_ADDRESS": context.gcs_address, _NAMESPACE: context.namespace, _JOB: context.get_job_id()}


def _join_ray(hook: Any) -> None:
    """Patch Ray to treat this worker of colocate like a Ray actor."""
    import ray

    collective: Any = importlib.import_module("ray.util.collective.collective")
    context_of, kind = ray.get_runtime_context, importlib.import_module("ray.runtime_context").RuntimeContext
    accelerators: Callable[[Any], dict[str, list[str]]] = kind.get_accelerator_ids
    lock = threading.Lock()

    def join() -> None:
        with lock:
            if not ray.is_initialized():
                ray.init(os.environ["RAY_ADDRESS"], namespace=os.environ[_NAMESPACE], log_to_driver=False)

    def context() -> Any:
        join()
        return context_of()

    def with_the_slots(self: Any) -> dict[str, list[str]]:
        return {**accelerators(self), "GPU": [*filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))]}

    hook.auto_init_ray, ray.get_runtime_context, collective._check_inside_actor = join, context, lambda: None
    kind.get_job_id, kind.get_accelerator_ids = lambda self: os.environ[_JOB], with_the_slots
