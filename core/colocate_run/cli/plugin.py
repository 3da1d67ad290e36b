"""`colocate plugins`: list the installed plugins without any import, or import one plugin and show the details."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from colocate.errors import PluginError
from colocate.executor import Detachable, Growing, Labelled, MultiNode, OwnProcess, SharedSlots
from colocate.plugins import (
    FoundJob,
    FoundRole,
    PluginInfo,
    about_executor,
    find_engine,
    find_executor,
    find_observer,
    jobs_of,
    needed_by,
    plugins,
    plugins_named,
    roles_of,
)
from colocate.signatures import Arguments, arguments_of, brief, methods_of, options_of
from colocate_run.cli.output import error_to_json, print_errors, print_json, report_errors
from colocate_run.screen import console, show_table


def show_plugins(*, json: bool) -> int:
    """Print all plugins; return exit status 1 if two distributions claim one name."""
    infos = plugins()
    if json:
        print_json([attrs.asdict(plugin) for plugin in infos])
    else:
        show_table("plugins", [_plugin_row(plugin) for plugin in infos], console())
    return 1 if any(plugin.rivals for plugin in infos) else 0


def _plugin_row(plugin: PluginInfo) -> dict[str, str]:
    rivals = f"; also claimed by {', '.join(plugin.rivals)}: uninstall one" if plugin.rivals else ""
    return {
        "name": plugin.name,
        "kind": plugin.brings,
        "from": plugin.origin + rivals,
        "object": plugin.value,
    }


@report_errors
def show_plugin(name: str, *, json: bool) -> int:
    """Print the details of all plugins with a name; return exit status 1 if there is none, or if one is broken."""
    faults: list[PluginError] = []
    entries = [(plugin, _describe_plugin(plugin, faults)) for plugin in plugins_named(name)]
    if json:
        print_json([attrs.asdict(plugin) | details for plugin, details in entries])
    else:
        for plugin, details in entries:
            _print_plugin(plugin, details, console())
        print_errors(faults, as_json=False)
    return 1 if faults else 0


def _describe_plugin(plugin: PluginInfo, faults: list[PluginError]) -> dict[str, Any]:
    """Return a plugin's roles, jobs or options as plain data.

    A broken part has an entry `error` instead, and the error is added to `faults`.
    """
    name = plugin.name
    if plugin.kind == "executor":
        return _catch_error(partial(_describe_executor, name), faults)
    if plugin.kind in ("observer", "engine"):
        return _catch_error(partial(_describe_class, plugin), faults)
    return _catch_error(
        lambda: {
            "roles": {spec.name: _catch_error(partial(_describe_role, spec), faults) for spec in roles_of(name)},
            "jobs": {spec.name: _catch_error(partial(_describe_job, spec), faults) for spec in jobs_of(name)},
        },
        faults,
    )


def _catch_error(details: Callable[[], dict[str, Any]], faults: list[PluginError]) -> dict[str, Any]:
    try:
        return details()
    except PluginError as error:
        faults.append(error)
        return {"error": error_to_json(error)}


def _describe_executor(name: str) -> dict[str, Any]:
    cls: Any = find_executor(name)
    options = _describe_options(options_of(cls), cls, cls.__init__, cls.connect)
    about = about_executor(name)
    can = {
        capability.__name__: name
        for capability in (OwnProcess, MultiNode, SharedSlots, Labelled, Growing, Detachable)
        if issubclass(cls, capability)
    }
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "about": _first_doc_line(cls),
        "capabilities": {**(about.capabilities if about is not None else {}), **can},
        "options": options,
    }


def _describe_class(plugin: PluginInfo) -> dict[str, Any]:
    is_engine = plugin.kind == "engine"
    cls: Any = find_engine(plugin.name).load() if is_engine else find_observer(plugin.name).load()
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "about": _first_doc_line(cls),
        # Skip the first argument of an engine, which is the role's context.
        "options": _describe_options(arguments_of(cls, plugin.name, skip=int(is_engine)), cls, cls.__init__),
    }


def _describe_role(found: FoundRole) -> dict[str, Any]:
    cls: Any = found.load()
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "about": _first_doc_line(cls),
        "needs": sorted(needed_by(cls)),
        "options": _describe_options(arguments_of(cls, found.name), *reversed(cls.__mro__), cls.__init__),
        "methods": {
            name: {
                "signature": _format_signature(spec.signature),
                "dispatch": repr(spec.dispatch),
                "collect": repr(spec.collect),
                "async": spec.is_async,
                "about": _first_doc_line(spec.function),
            }
            for name, spec in methods_of(cls).items()
        },
    }


def _describe_job(found: FoundJob) -> dict[str, Any]:
    function = found.load()
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {
        "function": f"{function.__module__}:{name}",
        "about": _first_doc_line(function),
        "options": _describe_options(arguments_of(function, found.name, skip=1), function),
    }


def _describe_options(arguments: Arguments, *described: Any) -> dict[str, dict[str, Any]]:
    """Return the type, the default, and the docstring's description of each option, by the option's name."""
    about = {name: text for obj in described for name, text in read_docstring_section(obj)}
    shown: dict[str, dict[str, Any]] = {
        name: {
            "type": "" if parameter.annotation is parameter.empty else _format_type(parameter.annotation),
            "default": None if parameter.default is parameter.empty else brief(repr(parameter.default)),
            "required": parameter.default is parameter.empty,
            "about": about.get(name, ""),
        }
        for name, parameter in arguments.parameters.items()
    }
    rest_about = next((text for name, text in about.items() if name.startswith("**")), "any other option")
    rest = {"type": "", "default": None, "required": False, "about": rest_about}
    return shown | ({"**": rest} if arguments.open else {})


def read_docstring_section(described: Any, section: str = "Args:") -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions in a section of a docstring, such as "Args:" or "Attributes:"."""
    lines = _own_docstring(described).splitlines()
    name, parts = "", list[str]()
    for line in lines[lines.index(section) + 1 :] if section in lines else ():
        if line and not line.startswith(" "):
            break
        if entry := _ARGUMENT.fullmatch(line):
            yield name, " ".join(parts)
            name, parts = entry[1], [entry[2]]
        else:
            parts.append(line.strip())
    yield name, " ".join(parts).strip()


_ARGUMENT = re.compile(r" {4}(\*{0,2}\w+)(?: \([^)]*\))?: (.*)")


class _Source(str):
    __slots__ = ()
    __repr__ = str.__str__


def _format_signature(signature: inspect.Signature) -> str:
    def plain(annotation: Any) -> Any:
        return _Source(annotation) if isinstance(annotation, str) else annotation

    parameters = [
        parameter.replace(annotation=plain(parameter.annotation)) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=plain(signature.return_annotation)))


def _format_type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _first_doc_line(described: Any) -> str:
    return _own_docstring(described).partition("\n")[0]


def _own_docstring(described: Any) -> str:
    text = getattr(described, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _print_plugin(plugin: PluginInfo, details: Mapping[str, Any], to: Console) -> None:
    def line(text: str) -> None:
        to.print(Text(text), soft_wrap=True)

    to.print(Text(f"{plugin.name}: {plugin.brings}, from {plugin.origin} ({plugin.value})", "bold"), soft_wrap=True)
    if "class" in details:
        line(_about_text(details))
    if "capabilities" in details:
        can = [name if plain == plugin.name else f"{name} ({plain})" for name, plain in details["capabilities"].items()]
        line(f"capabilities: {', '.join(can) or 'none'}")
    _print_options("options", details, to)
    for kind in ("role", "job"):
        for name, described in details.get(f"{kind}s", {}).items():
            about = "broken, see below" if "error" in described else _about_text(described)
            to.print(Text(f"\n{kind} {name}", "bold").append(Text(f": {about}", "not bold")), soft_wrap=True)
            if described.get("needs"):
                line(f"needs {', '.join(described['needs'])}")
            for called, method in described.get("methods", {}).items():
                line(f"  {'async ' if method['async'] else ''}{called}{method['signature']}")
                note = f": {method['about']}" if method["about"] else ""
                line(f"      {method['dispatch']}, {method['collect']}{note}")
            _print_options(f"options of {name}", described, to)


def _about_text(described: Mapping[str, Any]) -> str:
    where = described.get("class") or described.get("function")
    return f"{described['about']} ({where})" if described["about"] else str(where)


def _print_options(title: str, described: Mapping[str, Any], to: Console) -> None:
    rows = [
        {
            "option": name,
            "type": option["type"],
            "default": "(required)" if option["required"] else option["default"],
            "what it is": option["about"],
        }
        for name, option in described.get("options", {}).items()
    ]
    show_table(title, rows, to)
