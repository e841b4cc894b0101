"""Which layers of a model become quantized ones."""

from __future__ import annotations

from torch import nn

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.destinations import checkpoint_layers
from mla_router.worker.model.experts import Experts
from mla_router.worker.model.layers import Linear
from mla_router.worker.model.quantization.config import Quantization
from mla_router.worker.model.quantization.fp8 import Fp8Linear
from mla_router.worker.model.quantization.fp8_experts import Fp8Experts

# No published checkpoint quantizes these two, though DeepSeek's do not list them as left out.
PLAIN = ("lm_head", "eh_proj")


def quantize(model: nn.Module, quantization: Quantization) -> None:
    """Replace the linear layers of `model` that the checkpoint quantizes; norms, embeddings, gates and
    the head are none of them. To be called before parameters have memory. Raises ModelError."""
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, Linear)]
    for name, linear in linears:
        layers = checkpoint_layers(name, linear)
        ignored = [layer for layer in layers if quantization.ignores(layer)]
        if name.rpartition(".")[2] in PLAIN or len(ignored) == len(layers):
            continue
        if ignored:
            raise ModelError(
                f"quantization_config: {ignored[0]} is not quantized, but of the others that are "
                f"joined in {name} some are: only all or none is supported"
            )
        _replace(model, name, Fp8Linear(linear, quantization))
    for name, part in list(model.named_modules()):
        if isinstance(part, Experts):
            gate_up, down = part.gate_up_proj, part.down_proj
            if isinstance(gate_up, Fp8Linear) and isinstance(down, Fp8Linear):
                _replace(model, name, Fp8Experts(gate_up, down))


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, new)
