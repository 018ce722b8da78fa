"""The C++ extension `_C`: loaded once here, refused when missing or built from another version."""

from __future__ import annotations

import importlib

from proa import __version__
from proa.core.errors import ConfigError

__all__ = ["load_extension"]

_BUILD = "build it with `pip install -e .` (from a checkout: `make build`)"


def load_extension() -> None:
    """Imports `proa.native._C`.

    Raises:
        ConfigError: it is missing, of another version, or PROA_FORCE_ISA names what this machine cannot run.
    """
    try:
        extension = importlib.import_module("proa.native._C")
    except ModuleNotFoundError as error:
        raise ConfigError("proa.native", "the compiled extension proa.native._C", "none", _BUILD) from error
    except ImportError as error:
        raise ConfigError("proa.native", "a loadable extension proa.native._C", error) from error
    if extension.__version__ != __version__:
        raise ConfigError("proa.native", f"extension version {__version__}", extension.__version__, _BUILD)


load_extension()
