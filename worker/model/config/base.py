"""The config of a model of any architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_router.worker.kv_cache.spec import KVCacheSpec
from mla_router.worker.model.config.attention_spec import AttentionSpec
from mla_router.worker.model.config.fields import number, read_dtype, size
from mla_router.worker.model.config.rope import RopeConfig
from mla_router.worker.model.quantization.config import parse_quantization
from mla_router.worker.model.quantization.spec import Quantization

if TYPE_CHECKING:
    import torch

MAX_LAYERS = 10_000  # modules without end would be made before the weights are found not to fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """The config.json of a model, checked, with the fields that all architectures have."""

    architecture: str
    dtype: str  # of the checkpoint's plain weights, such as "bfloat16"
    quantization: Quantization | None
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int  # of the dense layers
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int  # longest context in tokens, with YaRN's factor
    rope: RopeConfig
    num_mtp_layers: int = 0  # NextN layers (multi-token prediction) after the last layer

    @property
    def mtp_layers(self) -> range:
        """The numbers of the NextN layers."""
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    @abstractmethod
    def attention_spec(self, layer: int) -> AttentionSpec:
        """Returns the attention of `layer`, which may be a NextN layer."""

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The distinct specs of the model's layers, without NextN layers."""
        return tuple(dict.fromkeys(self.attention_spec(layer) for layer in range(self.num_layers)))

    def attention_index(self, layer: int) -> int:
        """Returns the index of the attention of `layer` in `attention_specs`."""
        return self.attention_specs.index(self.attention_spec(layer))

    def kv_cache_specs(self, dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
        """Returns the rows of each layer in a KV cache of `dtype`, without NextN layers."""
        layers = range(self.num_layers)
        return tuple(self.attention_spec(layer).kv_cache_spec(dtype) for layer in layers)


def common_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ModelConfig that have the same names in all architectures. Raises ModelError."""
    quantization = raw.get("quantization_config")
    return {
        "dtype": read_dtype(raw),
        "quantization": parse_quantization(quantization) if quantization else None,
        "vocab_size": size(raw, "vocab_size"),
        "hidden_size": size(raw, "hidden_size"),
        "num_layers": size(raw, "num_hidden_layers", most=MAX_LAYERS),
        "num_heads": size(raw, "num_attention_heads"),
        "intermediate_size": size(raw, "intermediate_size"),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6, most=1.0),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "max_position_embeddings": size(raw, "max_position_embeddings"),
    }
