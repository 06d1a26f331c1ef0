"""Loads a recipe and shows the real error when it cannot be imported (torchtitan shows that of its last guess)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from torchmoe.errors import ConfigError
from torchmoe.titan.shims import ensure

__all__ = ["load_recipe"]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            raise ConfigError(
                f"recipe module {name!r} does not exist (no module {e.name!r}); start from the folder that contains it, "
                "and write it with dots, e.g. recipes.disag_tiny"
            ) from None
        raise


def load_recipe(module: str, config: str, options: Sequence[str] = ()) -> Any:
    """The Trainer.Config that ``module.config()`` returns, with torchtitan's command line ``options`` applied.

    Raises:
        ConfigError: there is no such module or function.
        ImportError: (or whatever else) raised inside the recipe, as it is.
    """
    ensure()
    found = _module(module)
    function = getattr(found, config, None)
    if not callable(function):
        names = [n for n in vars(found) if n[0].islower() and getattr(vars(found)[n], "__module__", None) == found.__name__]
        raise ConfigError(f"recipe module {module!r} has no function {config!r}; it has {', '.join(sorted(names)) or 'none'}")
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--module", module, "--config", config, *options])
