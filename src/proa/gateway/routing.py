"""From the name in a request to a model and the fields that go with the name. Only exact names match."""

from __future__ import annotations

from dataclasses import dataclass

from proa.gateway.config import GatewayConfig, ModelConfig, Params
from proa.gateway.errors import UnknownModelError

__all__ = ["Route", "names", "resolve"]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `params` replace fields of its body; `upstream_model` replaces its `model`."""

    requested: str
    model: ModelConfig
    params: Params

    @property
    def upstream_model(self) -> str:
        """What the engine calls the model."""
        return self.model.served_name or self.model.name


def resolve(config: GatewayConfig, name: str) -> Route:
    """The route of `name`, a model's or an alias.

    Raises:
        UnknownModelError: neither.
    """
    if (model := config.models.get(name)) is not None:
        return Route(name, model, model.params)
    for model in config.models.values():
        if name in model.aliases:
            return Route(name, model, {**model.params, **model.aliases[name]})
    raise UnknownModelError(name, names(config))


def names(config: GatewayConfig) -> tuple[str, ...]:
    """All names there are: models first, each followed by its aliases."""
    return tuple(name for model in config.models.values() for name in (model.name, *model.aliases))
