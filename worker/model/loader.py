"""Builds a model from a Hugging Face folder and loads its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.draft import read_eagle_config, read_nextn_config
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.dummy import fill_dummy
from mla_router.worker.model.eagle import UNUSED_BY_EAGLE, EagleHead
from mla_router.worker.model.linear import Linear
from mla_router.worker.model.mtp import MultiTokenPrediction
from mla_router.worker.model.parallel.divide import divide, divide_drafter
from mla_router.worker.model.parallel.placement import Placement
from mla_router.worker.model.quantization.apply import quantize
from mla_router.worker.model.quantization.kv_scales import read_kv_scales
from mla_router.worker.model.registry import build_model
from mla_router.worker.model.weights import (
    has_tensor,
    is_unused,
    is_unused_by_mtp,
    load_weights,
)

Built = TypeVar("Built", bound=nn.Module)


def load_model(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    dummy: bool = False,
    config: ModelConfig | None = None,
    groups: Groups = ONE_RANK,
    expert_parts: int = 1,
    placement: Placement | None = None,
) -> CausalLM:
    """Returns the model in `folder` on `device`, built by `config` or else by the folder's config.json. Raises
    ModelError.

    With several ranks in `groups` it is this rank's part (`parallel/divide.py`), and no other parts of the weights are
    read. Quantized weights keep the format of the checkpoint, all others are converted to `dtype`. Weights never change
    again and take no part in autograd. With `dummy` they are random, and no file but config.json is read.
    """
    built_by = config or read_config(folder)
    model: CausalLM = _load(
        lambda: build_model(built_by),
        built_by,
        folder,
        partial(is_unused, config=built_by),
        device=torch.device(device),
        dtype=dtype,
        dummy=dummy,
        divide_built=partial(divide, groups=groups, expert_parts=expert_parts, placement=placement),
    )
    return model


def load_mtp(
    model: CausalLM,
    folder: Path,
    *,
    config: ModelConfig | None = None,
    draft_folder: Path | None = None,
    dummy: bool = False,
) -> MultiTokenPrediction:
    """Returns the layers for multi-token prediction in `folder`, from which `model` was loaded, or the one in
    `draft_folder`: on its device, in its dtype, with its table of rotations, and of its rank. `config`: by which the
    whole model was built, by default that of `model`, which is then not divided. Raises ModelError, also if there are
    no such layers."""
    config = config or _config_of_whole(model)
    if not isinstance(config, DeepseekConfig):
        raise ModelError(f"{draft_folder or folder}: DeepSeek's models alone have NextN layers")
    numbers = config.mtp_layers
    if draft_folder is not None:
        folder, numbers = draft_folder, range(1)
        config = read_nextn_config(draft_folder, config)
    elif not numbers:
        raise ModelError(
            f"{folder}: no layers for multi-token prediction (num_nextn_predict_layers)"
        )
    head = model.head.values
    return _load(
        lambda: MultiTokenPrediction(config, model.model.rotations, first=numbers.start),
        config,
        folder,
        partial(is_unused_by_mtp, numbers=numbers),
        device=head.device,
        dtype=head.dtype,
        dummy=dummy,
        divide_built=lambda built: divide_drafter(
            built, built.depths, model.groups, model.placement
        ),
    )


def load_eagle(
    model: CausalLM, folder: Path, *, config: ModelConfig | None = None, dummy: bool = False
) -> EagleHead:
    """Returns the EAGLE draft head in `folder` for `model`: on its device, in its dtype, with its table of rotations,
    and of its rank. `config`: see `load_mtp`. Raises ModelError."""
    config = read_eagle_config(folder, config or _config_of_whole(model))
    has_bias = not dummy and has_tensor(folder, "fc.bias")
    head = model.head.values
    return _load(
        lambda: EagleHead(config, model.model.rotations, bias=has_bias),
        config,
        folder,
        lambda name: name in UNUSED_BY_EAGLE,
        device=head.device,
        dtype=head.dtype,
        dummy=dummy,
        divide_built=lambda built: divide_drafter(
            built, list(built.layers), model.groups, model.placement
        ),
    )


def _config_of_whole(model: CausalLM) -> ModelConfig:
    assert model.groups.size == 1, "a rank's part has a config of its own, not the model's"
    return model.config


def _load(
    build: Callable[[], Built],
    config: ModelConfig,
    folder: Path,
    unused: Callable[[str], bool],
    *,
    device: torch.device,
    dtype: torch.dtype,
    dummy: bool,
    divide_built: Callable[[Built], None],
) -> Built:
    """Returns the result of `build` with its weights. `unused` names tensors of the checkpoint that it does not
    need. `divide_built` leaves to it the part of this rank."""
    with torch.device(device), default_dtype(dtype):
        built = build()
        if config.quantization is not None:
            quantize(built, config.quantization)
        divide_built(built)
        allocate(built)
    if dummy:
        fill_dummy(built)
    else:
        load_weights(built, folder, unused, built.own_name if isinstance(built, CausalLM) else str)
    after_load(built, dtype)
    read_kv_scales(built)
    return built.eval()


def allocate(model: nn.Module) -> None:
    """Gives the parameters of `model` memory on torch's current default device. Biases are zero, since a checkpoint
    may have them for some parts of a layer only; the rest is uninitialised."""
    for module in model.modules():
        for name, declared in list(module.named_parameters(recurse=False)):
            new = torch.zeros if name == "bias" else torch.empty
            memory = new(declared.shape, dtype=declared.dtype)
            module.register_parameter(name, nn.Parameter(memory, requires_grad=False))


def after_load(model: nn.Module, dtype: torch.dtype) -> None:
    """Prepares the loaded linear layers of `model` for products with activations of `dtype`."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.after_load(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the dtype of parameters that are created inside without one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
