"""The placement of routed experts from the settings of a worker (--init-expert-location)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from mla_router.worker.bounded_file import read_bounded
from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.parallel.balance import balanced
from mla_router.worker.model.parallel.placement import Placement, trivial

TRIVIAL = "trivial"

Load = Annotated[float, msgspec.Meta(ge=0)]


class _File(msgspec.Struct):
    """One of the two, with SGLang's names and a row for each layer, of which those without experts are ignored."""

    logical_count: list[list[Load]] | None = None
    physical_to_logical_map: list[list[int]] | None = None


def choose_placement(config: WorkerConfig, model: ModelConfig) -> Placement | None:
    """Returns the placement on --ep-size ranks; None if one has all experts. Raises ConfigError."""
    if not isinstance(model, DeepseekConfig) or not model.num_experts:
        if config.enable_expert_distribution_metrics:
            raise ConfigError(
                f"--enable-expert-distribution-metrics: this {model.architecture} has no routed experts; leave it out"
            )
        return None
    if config.ep_size == 1:
        return None
    location, redundant = config.init_expert_location, config.ep_num_redundant_experts
    try:
        if location == TRIVIAL:
            return trivial(model.num_layers, model.num_experts, config.ep_size, redundant)
        found = _read(Path(location))
        rows = found.physical_to_logical_map or found.logical_count or []
        width = model.num_experts + (redundant if found.physical_to_logical_map else 0)
        if len(rows) != model.num_layers or any(len(row) != width for row in rows):
            raise ModelError(
                f"not [{model.num_layers}, {width}] numbers, as the model and --ep-num-redundant-experts {redundant} "
                f"need"
            )
        if found.physical_to_logical_map:
            layers = tuple(map(tuple, found.physical_to_logical_map))
            return Placement(layers, model.num_experts, config.ep_size)
        return balanced(found.logical_count or [], config.ep_size, redundant)
    except (ModelError, OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--init-expert-location {location}: {error}") from error


def _read(file: Path) -> _File:
    """Raises ModelError, OSError, msgspec.DecodeError, RecursionError."""
    found = msgspec.json.decode(read_bounded(file), type=_File)
    if bool(found.logical_count) == bool(found.physical_to_logical_map):
        raise ModelError("either logical_count or physical_to_logical_map is needed")
    return found
