"""Eagleray pretrains vision transformers without labels, straight from WebDataset shards or a folder of images.

The functions of the command line are here under the names that they have there, and raise UserError where the command
line prints `error: ...`. Everything is imported when it is first used, so `import eagleray` costs nothing."""

import importlib
from typing import Any

__version__ = "0.1.0"

# The module of each public name; `__init__.pyi` says the same to type checkers.
_MODULES = {
    "api.checks": ("MethodReport", "check_method"),
    "api.curate": ("curate",),
    "api.data": ("data_map", "index", "measure", "prepare", "which"),
    "api.embed": ("embed", "find_clusters"),
    "api.evaluate": ("Refused", "Scores", "evaluate"),
    "api.export": ("export", "load", "verify"),
    "api.forget": ("forget",),
    "api.jobs": ("Job", "job", "jobs", "submit"),
    "api.plan": ("plan",),
    "api.pretrain": ("finetune", "pretrain"),
    "api.run": ("Run",),
    "api.stream": ("Loader", "loader"),
    "api.track": ("track",),
    "api.tune": ("tune",),
    "base.errors": ("Outage", "PluginError", "UserError"),
    "config": ("register",),
    "config.schedule": ("Progress", "Schedule"),
    "data.batch": ("Batch",),
    "engine.loop": ("Step",),
    "methods.method": ("Method",),
    "models.backbone": ("Backbone", "Encoder"),
    "protocols.outcome": ("Outcome",),
    "protocols.protocol": ("FeatureProtocol", "ImageProtocol", "PatchProtocol", "Protocol", "Workspace"),
    "reports.listing": ("list_runs",),
    "reports.watch": ("Watch", "watch"),
    "reports.write": ("report",),
    "runs.callbacks": ("Callback", "RunView"),
    "runs.forecast": ("Forecast",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eagleray' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"eagleray.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
