"""From what was typed to what is needed: the declared application of `module:attribute`, the settings.

Decides what a user is told when it cannot be loaded. Importing the module runs the user's code, so whatever that
raises is named with its place.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

import click

from broker_config import BrokerSettings, SettingsError, load_settings
from subagent_tasks.app import SubagentApp
from subagent_tasks.errors import ConfigurationError, SubagentError


def load_app(reference: str) -> SubagentApp:
    """The app named by `module:attribute`, as uvicorn has it; the current directory is searched first.

    Raises `ConfigurationError` with one line, or click's `BadParameter` when the reference is none.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise click.BadParameter(f"{reference!r} is not module:attribute, such as agents:app", param_hint="APP")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(module_name, here=here)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}{_apps_in(module)}") from error
    if not isinstance(found, SubagentApp):
        raise ConfigurationError(f"{reference} is a {type(found).__name__}, not a SubagentApp{_apps_in(module)}")
    return found


def load_environment() -> BrokerSettings:
    """The settings of the environment. Raises `ConfigurationError`."""
    try:
        return load_settings()
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error


def _import(name: str, *, here: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"no module named {error.name!r}: it is neither in {here} nor installed; run this where it is, or set "
                "PYTHONPATH"
            ) from error
        raise ConfigurationError(_account(name, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(_account(name, error)) from error


def _account(name: str, error: BaseException) -> str:
    """Which line of the module raised what."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, what = f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"
    else:
        # The innermost line of the user's own code says more than one inside a library it called.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_ours(frame.filename)]
        frame = (own or frames)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        what = str(error) if isinstance(error, SubagentError) else f"{type(error).__name__}: {error}"
    return f"module {name!r} cannot be imported: {place}: {what}"


def _is_ours(filename: str) -> bool:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.abspath(filename).startswith(package + os.sep)


def _apps_in(module: ModuleType) -> str:
    """What was meant, as the end of a sentence."""
    apps = [name for name, value in vars(module).items() if isinstance(value, SubagentApp)]
    if not apps:
        return ": it declares no SubagentApp; add app = SubagentApp()"
    return f": did you mean {module.__name__}:{(difflib.get_close_matches('app', apps, n=1) or apps)[0]}?"
