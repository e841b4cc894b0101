"""Loads the drafter of --speculative-algorithm."""

from __future__ import annotations

import logging

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.speculation.chain import NewChain
from mla_router.worker.engine.speculation.drafter import NewDrafter
from mla_router.worker.engine.speculation.extension import DraftLayer
from mla_router.worker.engine.speculation.ngram import NewNgram
from mla_router.worker.engine.speculation.tree import NewTree
from mla_router.worker.kv_cache.spec import own_window
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.loader import load_eagle, load_mtp

logger = logging.getLogger(__name__)


def load_drafter(config: WorkerConfig, model: CausalLM, whole: ModelConfig) -> NewDrafter | None:
    """Returns the drafter with its weights; None without speculative decoding. `whole`: the config of the model that ranks
    divide. Raises ConfigError, ModelError."""
    if config.speculative_algorithm == "none":
        return None
    flag = f"--speculative-algorithm {config.speculative_algorithm}"
    if config.speculative_algorithm == "NGRAM":
        if own_window(model.config.kv_cache_specs(model.head.values.dtype)) is not None:
            raise ConfigError(f"{flag}: not for models whose layers have windows of their own")
        logger.info("%s: %d drafts a request", flag, config.num_drafts)
        return NewNgram(config.num_drafts)
    try:
        layer = _draft_layer(config, model, whole)
    except ModelError as error:
        raise ConfigError(f"{flag}: {error}") from error
    logger.info(
        "%s: %s makes %d drafts a request%s, in steps of at most %d requests%s",
        flag,
        config.speculative_draft_model_path or "the layer for multi-token prediction",
        config.num_drafts,
        f" in depth, in trees of {config.rows_per_decode} nodes" if config.tree else "",
        config.speculative_max_bs,
        ", where they pay by measured times" if config.chooses_drafts else "",
    )
    if config.tree is not None:
        return NewTree(layer, config.tree)
    return NewChain(layer, config.num_drafts)


def _draft_layer(config: WorkerConfig, model: CausalLM, whole: ModelConfig) -> DraftLayer:
    folder, dummy = config.draft_folder, config.load_format == "dummy"
    if config.speculative_algorithm == "EAGLE":
        assert folder is not None, "checked by WorkerConfig"
        return load_eagle(model, folder, config=whole, dummy=dummy)
    return load_mtp(model, config.folder, config=whole, draft_folder=folder, dummy=dummy)
