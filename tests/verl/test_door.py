"""The entry into verl, and the names of verl's and Ray's that the entry needs."""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import ray._private.auto_init_hook
import ray.util.collective.collective as collective
import verl.utils.ray_utils
from verl.single_controller import ray as of_ray
from verl.single_controller.base import WorkerGroup, decorator
from verl.trainer import constants_ppo

import colocate
from colocate_verl import groups, private
from colocate_verl.driver import ENGINE

FOLDER = Path(private.__file__).parent


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


class TestDoor:
    @pytest.mark.parametrize(
        ("executor", "version", "words"),
        [
            ("dsak", "0.9.1", "ConfigError: .*'ray', 'dask', 'local', and not on 'dsak'"),
            ("local", "0.8.0", "CapabilityError: .*for verl from 0.9 up to before 0.11, and verl 0.8.0 is installed"),
        ],
    )
    def test_plugin_error_is_printed_and_raised(self, executor, version, words):
        """A plugin's error, which verl swallows, is printed, and the first worker group raises the error."""
        code = (
            "import importlib.metadata as m; of = m.version\n"
            f"m.version = lambda name: {version!r} if name == 'verl' else of(name)\n"
            "from verl.single_controller.ray import RayWorkerGroup; print('imported'); RayWorkerGroup()"
        )
        done = run(code, COLOCATE_VERL=executor)
        assert "imported" in done.stdout, done.stderr
        told, raised = done.stderr.partition("Traceback")[::2]
        assert f"[colocate_verl] COLOCATE_VERL={executor}: " in told
        assert re.search(words, raised)

    def test_modules_that_have_imported_verls_classes(self):
        code = (
            "from verl.trainer.ppo import ray_trainer; import colocate_verl\n"
            "home = lambda: ray_trainer.create_colocated_worker_cls.__globals__['__name__']\n"
            "before = home(); colocate_verl.install('local'); print(before, home())"
        )
        done = run(code, COLOCATE_VERL="")
        assert done.stdout.split()[-2:] == ["verl.single_controller.ray.base", "colocate_verl.groups"], done.stderr

    @pytest.mark.parametrize("version", ["0.8.0", "0.11.0", "1.0"])
    def test_unsupported_verl_version_is_refused(self, monkeypatch, version):
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
        with pytest.raises(colocate.CapabilityError, match=rf"for verl from 0\.9 up to before 0\.11.*verl {version}"):
            private.check_version()

    def test_another_executor_beside_groups(self):
        ENGINE.connect_runtime()
        other = next(name for name in ("local", "dask") if name != ENGINE.executor)
        with pytest.raises(colocate.ConfigError, match="already"):
            ENGINE.choose_executor(other, {})

    @pytest.mark.parametrize("executor", ["local", "dask"])
    def test_main_ppo_where_there_is_no_ray(self, executor):
        code = "from verl.trainer.main_ppo import get_ppo_ray_runtime_env; get_ppo_ray_runtime_env({})"
        done = run(code, COLOCATE_VERL=executor)
        assert f"CapabilityError: verl.trainer.main_ppo on '{executor}'" in done.stderr

    def test_nothing_but_ray_init_starts_a_ray(self):
        code = "import verl, ray; ray.put(1)"
        for executor in ("local", "dask"):
            done = run(code, COLOCATE_VERL=executor)
            assert "Ray has not been started" in done.stderr


class TestPrivateNames:
    """A name that verl or Ray has dropped fails its test, and not a trainer."""

    def test_of_verl(self):
        home = private.import_home()
        assert set(groups.REPLACEMENTS) <= set(vars(home))
        assert set(of_ray.__all__) - set(groups.REPLACEMENTS) == {"RayClassWithInitArgs", "ResourcePoolManager"}
        assert private.MARK == decorator.MAGIC_ATTR
        assert next(iter(inspect.signature(home.func_generator).parameters)) == "self"
        assert [*inspect.signature(WorkerGroup._bind_worker_method).parameters][1:] == [
            "user_defined_cls",
            "func_generator",
        ]
        given = home.RayClassWithInitArgs(dict)
        given.update_options({"name": "a"})
        given.set_additional_resource({"b": 1})
        assert private.actor_options(given) == {"name": "a", "b": 1}
        assert isinstance(constants_ppo.get_ppo_ray_runtime_env, functools.partial)
        assert "= get_ppo_ray_runtime_env(" in Path(constants_ppo.__file__).with_name("main_ppo.py").read_text()
        source = Path(home.__file__).read_text()
        assert "self._check_resource_available()" in source
        assert "parallel_put" in inspect.getsource(decorator.dispatch_nd_compute)
        assert verl.utils.ray_utils.parallel_put([1])[0].wait_value() == 1
        found = re.search(r"env_vars = \{(.*?)\}", source, re.DOTALL)
        assert found is not None
        assert set(re.findall(r'"([A-Z_]+)":', found[1])) == set(private.PROTECTED)

    def test_of_verls_worker(self):
        from verl.single_controller.base import Worker

        assert Worker.fused_worker_attr_name == "fused_worker_dict"
        assert "fused_worker_dict.get(" in inspect.getsource(Worker.get_fused_worker_by_name)

    def test_of_ray(self):
        assert private.unwrap_class(ray.remote(type("Some", (), {}))).__name__ == "Some"
        assert ray._private.auto_init_hook.enable_auto_connect in (True, False)
        assert "auto_init_ray()" in inspect.getsource(ray._private.auto_init_hook.wrap_auto_init)
        assert inspect.isfunction(collective._check_inside_actor)
        for name in ("get_job_id", "get_accelerator_ids", "gcs_address", "namespace"):
            assert hasattr(ray.runtime_context.RuntimeContext, name)

    def test_private_names_are_in_one_file(self):
        theirs = {"__ray_actor_class__", "_bind_worker_method", "_check_resource_available", "func_generator"}
        theirs |= {"_options", "_additional_resource", "fused_worker_dict", "get_ppo_ray_runtime_env"}
        for file in set(FOLDER.glob("*.py")) - {Path(private.__file__)}:
            for node in ast.walk(ast.parse(file.read_text())):
                assert getattr(node, "attr", None) not in theirs, f"{file.name}: {ast.unparse(node)}"
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [getattr(node, "module", None) or "", *(each.name for each in node.names)]
                    assert not any(re.search(r"\b_[a-z]", name) for name in names), f"{file.name}: {ast.unparse(node)}"
