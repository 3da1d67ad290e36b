"""All private names of verl and Ray that this plugin uses; a test notices when one is gone."""

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

HOME = "verl.single_controller.ray.base"  # the module of the replaced classes
PASSED_BY = "verl.single_controller"  # errors name the trainer's line instead of a line in this package
MARK = "attrs_3141562937"  # the attribute of methods marked by `@register`: MAGIC_ATTR of verl's decorator
PROTECTED = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of workers that verl sets for its own use: `worker_env` may not."""
_NAMESPACE, _JOB = (
    "COLOCATE_VERL_NAMESPACE",
    "COLOCATE_VERL_JOB",
)  # of the driver; vLLM names sockets by the job's id


def check_version() -> None:
    """Raise a CapabilityError for an unsupported version of verl."""
    version = importlib.metadata.version("verl")
    if not (0, 9) <= tuple(int(part) for part in version.split(".")[:2]) < (0, 11):
        raise CapabilityError(
            f"colocate_verl is for verl from 0.9 up to before 0.11, and verl {version} is installed: install one of "
            "these, or unset COLOCATE_VERL"
        )


def home() -> Any:
    """Import verl's module of the replaced classes. `PASSED_BY` is imported too."""
    return importlib.import_module(HOME)


def replace(instead: Mapping[str, Any]) -> None:
    """Replace verl's objects by name, in every module that has imported them."""
    by_id = {id(getattr(home(), name)): value for name, value in instead.items()}
    for module in [candidate for candidate in sys.modules.values() if isinstance(candidate, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def refuse(error: Exception) -> None:
    """Defer an error of `install`: the first worker group or resource pool raises the error."""

    class Refused:
        def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise error

    replace({"RayWorkerGroup": Refused, "RayResourcePool": Refused})


def patch(executor: str) -> None:
    """Patch verl to skip checks of an absent Ray, and Ray to answer a worker like an actor of the driver."""
    home().ResourcePoolManager._check_resource_available = functools.partialmethod(_check_pools, executor)
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect &= executor == "ray"  # elsewhere only `ray.init` itself starts a Ray
    if "WG_BACKEND" not in os.environ:
        of_main_ppo: Any = importlib.import_module("verl.trainer.constants_ppo")
        of_verl = of_main_ppo.get_ppo_ray_runtime_env
        of_main_ppo.get_ppo_ray_runtime_env = functools.partial(_for_main_ppo, executor, of_verl)
    elif executor == "ray":
        _be_in_ray(hook)


def _check_pools(pools: Any, executor: str) -> None:
    """Refuse early a PPO trainer that would start Ray actors without a Ray.

    The trainer makes its pools first, which is when this runs. The pools' resources are checked when they are reserved.
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


def _for_main_ppo(executor: str, of_verl: Any, config: Any = None) -> Any:
    """Return the runtime environment for Ray in verl's `main_ppo`: all actors get `COLOCATE_VERL`."""
    if executor != "ray":
        raise CapabilityError(
            f"verl.trainer.main_ppo on {executor!r}: its trainer, agent and reward loops and vLLM are Ray actors: "
            "it needs COLOCATE_VERL=ray. Elsewhere run a trainer of verl's with managers of your own"
        )
    options = of_verl(config)
    options["env_vars"]["COLOCATE_VERL"] = executor
    return options


def unwrapped(cls: Any) -> type:
    """Return the class that was given to `ray.remote`."""
    original: type = getattr(cls, "__ray_actor_class__", cls)
    return original


def options_of(given: Any) -> dict[str, Any]:
    """Return the actor options of a class with arguments."""
    return {**given._options, **given._additional_resource}


def bind(group: Any, cls: type) -> None:
    """Bind a class's methods that `@register` has marked to a worker group."""
    group._bind_worker_method(cls, home().func_generator)


def put_beside(worker: Any, others: Mapping[str, Any]) -> None:
    """Set a worker's siblings, which verl finds with `get_fused_worker_by_name`."""
    worker.fused_worker_dict = others


def cluster() -> dict[str, str]:
    """Return environment variables with which a worker joins the driver's Ray at the first use of Ray."""
    import ray

    if not ray.is_initialized():
        ray.init()  # as verl's first placement group does
    context = ray.get_runtime_context()
    return {"RAY_ADDRESS": context.gcs_address, _NAMESPACE: context.namespace, _JOB: context.get_job_id()}


def _be_in_ray(hook: Any) -> None:
    """Patch Ray to answer this worker like an actor, although colocate made no actor."""
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
