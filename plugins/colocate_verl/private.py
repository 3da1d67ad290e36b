"""Each name of verl's and of Ray's that isn't public and is touched here; a test notices when one is gone."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from colocate.errors import CapabilityError

from .results import OnDriver, Put, get

VERSIONS = (0, 9), (0, 11)
"""The first version of verl that this is for, and the first that it isn't."""
HOME = "verl.single_controller.ray.base"
"""Where verl has the classes that are replaced; `verl.single_controller.ray` has them too."""
PASSED_BY = "verl.single_controller"
"""The lines of verl's that call worker groups for its trainers: errors name the line of the trainer."""
MARK = "attrs_3141562937"
"""The attribute of a method that verl's `@register` has marked: `verl.single_controller.base.decorator.MAGIC_ATTR`."""


def check_version() -> None:
    """Raise unless the installed verl is one that this is for."""
    from importlib.metadata import version

    found = version("verl")
    first, beyond = VERSIONS
    if not first <= tuple(int(part) for part in found.split(".")[:2]) < beyond:
        raise CapabilityError(
            f"colocate_verl is for verl from {first[0]}.{first[1]} up to before {beyond[0]}.{beyond[1]}, and verl "
            f"{found} is installed: install one of these, or unset COLOCATE_VERL"
        )


def home() -> Any:
    """Import verl's module with the classes that are replaced. `PASSED_BY` is imported with it."""
    return importlib.import_module(HOME)


def unwrapped(cls: Any) -> type:
    """Return the class that was given to `ray.remote`."""
    found: type = getattr(cls, "__ray_actor_class__", cls)
    return found


def replace(instead: Mapping[str, Any]) -> None:
    """Put other objects in the place of verl's, by name, wherever a module has imported them."""
    of_verl = home()
    by_id = {id(vars(of_verl)[name]): value for name, value in instead.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or str(names.get("__name__", "")).startswith("colocate"):
            continue
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]


def start_ray() -> None:
    """Have this process be in a Ray, as verl has it by its first placement group."""
    import ray

    if not ray.is_initialized():
        ray.init()


def cluster() -> dict[str, str]:
    """Return what a worker has to have in its environment to join the driver's Ray at its first question to Ray."""
    import ray

    found = ray.get_runtime_context()
    return {"RAY_ADDRESS": found.gcs_address, _NAMESPACE: found.namespace, _JOB: found.get_job_id()}


_NAMESPACE, _JOB = "COLOCATE_VERL_NAMESPACE", "COLOCATE_VERL_JOB"
"""Variables of workers: of their driver the namespace, and the job id, by which vLLM names its sockets."""


class _RuntimeContext:
    """Ray's runtime context in a worker, which answers as in an actor of the driver's."""

    def __init__(self, of_ray: Any) -> None:
        self._of_ray = of_ray

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_ray, name)

    def get_job_id(self) -> str:
        """The driver's, and not that of this process."""
        return os.environ[_JOB]

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """The GPUs of this worker's slot."""
        found: dict[str, list[str]] = dict(self._of_ray.get_accelerator_ids())
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {**found, "GPU": [each for each in own.split(",") if each]}


def _be_in_ray() -> None:
    """Have Ray answer this worker as an actor, of which colocate made it no one."""
    ray: Any = importlib.import_module("ray")
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    collective: Any = importlib.import_module("ray.util.collective.collective")
    of_ray = ray.get_runtime_context
    lock = threading.Lock()

    def join() -> None:
        with lock:
            if not ray.is_initialized():
                ray.init(os.environ["RAY_ADDRESS"], namespace=os.environ[_NAMESPACE], log_to_driver=False)

    def context() -> Any:
        join()
        return _RuntimeContext(of_ray())

    hook.auto_init_ray, ray.get_runtime_context, collective._check_inside_actor = join, context, lambda: None


def patch_ray(end: Callable[[], None], executor: str) -> None:
    """Have functions of Ray's take our results and worker handles, or refuse them by name.

    Args:
        end: What `ray.shutdown` calls first.
        executor: Where worker groups are. Elsewhere than on Ray nothing starts a Ray but `ray.init`.
    """
    import ray

    ray_utils: Any = importlib.import_module("verl.utils.ray_utils")
    if hasattr(ray.get, "of_ray"):
        return
    of_ray, shutdown = ray.get, ray.shutdown

    @functools.wraps(of_ray)
    def get_any(object_refs: Any, *, timeout: float | None = None, **options: Any) -> Any:
        return get(object_refs, timeout, functools.partial(of_ray, **options))

    @functools.wraps(shutdown)
    def end_and_shutdown(*args: Any, **options: Any) -> Any:
        end()
        return shutdown(*args, **options)

    get_any.of_ray = of_ray  # type: ignore[attr-defined]
    ray.get, ray.shutdown = get_any, end_and_shutdown
    for name in ("wait", "kill", "cancel"):
        setattr(ray, name, _refusing(name, getattr(ray, name)))
    if executor == "ray" and _JOB in os.environ:
        _be_in_ray()
    if executor != "ray":
        importlib.import_module("ray._private.auto_init_hook").enable_auto_connect = False  # type: ignore[attr-defined]
    if not in_worker():
        of_main_ppo: Any = importlib.import_module("verl.trainer.constants_ppo")
        of_verl = of_main_ppo.get_ppo_ray_runtime_env
        of_main_ppo.get_ppo_ray_runtime_env = functools.partial(_for_main_ppo, executor, of_verl)
    ray_utils.parallel_put = lambda data_list, max_workers=None: _put(data_list)


def in_worker() -> bool:
    """Return whether this process is a worker of colocate's."""
    return "WG_BACKEND" in os.environ


def _for_main_ppo(executor: str, of_verl: Any, config: Any = None) -> Any:
    """Return what Ray is started with by verl's `main_ppo`: its actors are to find the door, on any cluster."""
    if executor == "ray":
        found = of_verl(config)
        found["env_vars"]["COLOCATE_VERL"] = executor
        return found
    raise CapabilityError(
        f"verl.trainer.main_ppo on {executor!r}: its trainer, agent loops, reward loops and vLLM are Ray actors, so it "
        "goes with COLOCATE_VERL=ray only. Elsewhere run a trainer of verl's with managers of your own in a script"
    )


def _put(data_list: Any) -> list[Put]:
    assert len(data_list) > 0, "data_list must not be empty"  # as verl's
    return [Put(each) for each in data_list]


def _refusing(name: str, of_ray: Any) -> Any:
    @functools.wraps(of_ray)
    def refuse(subject: Any, *args: Any, **options: Any) -> Any:
        for each in subject if isinstance(subject, list | tuple) else (subject,):
            if issubclass(type(each), OnDriver):
                raise CapabilityError(f"ray.{name} can't be given {each!r}, which is colocate's: {_INSTEAD[name]}")
        return of_ray(subject, *args, **options)

    return refuse


_INSTEAD = {
    "wait": "use ray.get, await or asyncio.gather",
    "kill": "workers end when their worker group is no longer held, and by ray.shutdown()",
    "cancel": "a call of a worker group runs to its end",
}


def of_ray(refs: Any) -> bool:
    """Return whether it is an object reference of Ray's own."""
    import ray

    return issubclass(type(refs), ray.ObjectRef)
