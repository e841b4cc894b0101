"""The arrays that the sampling of one step needs on the device, in one upload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mla_router.worker.engine.sampling.features import RowFeatures
from mla_router.worker.engine.sampling.rows import SampledRows
from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import StepPlan, TokenMasks


@dataclass(frozen=True, slots=True)
class DraftArrays:
    """The R rows of a step that verifies drafts."""

    slots: Tensor  # [R] int64
    numbers: Tensor  # [R] int32, of the rows of a slot
    bounds: Tensor  # [D] int64, `StepPlan.decode_bounds` of the D decode slots
    penalized: Tensor  # int64, indices of slots into `StepPlan.sampled_slots`
    # [D] int32, rows of each decode slot that may give a token; None: all
    room: Tensor | None = None
    # Of trees: the nodes that may have logprobs (`SampledRows.on_paths`)
    nodes: Tensor | None = None
    firsts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step that use each feature: ascending indices into its R sampled rows, int64."""

    penalized: Tensor
    biased: Tensor
    restricted: Tensor
    with_logprobs: Tensor
    masked: Tensor
    bits: Tensor  # [len(masked), words] int32, `TokenMasks.bits`
    drafts: DraftArrays | None  # None: each slot has one row

    @classmethod
    def upload(
        cls, upload: Upload, plan: StepPlan, features: RowFeatures, masks: TokenMasks | None
    ) -> StepRows:
        sampled = SampledRows(plan)
        slots = np.array(masks.rows if masks else (), dtype=np.int64)
        counts = np.array(masks.counts_of_rows if masks else (), dtype=np.int64)
        arrays = {
            "penalized": sampled.all(features.penalized),
            "biased": sampled.all(features.biased),
            "restricted": sampled.all(features.restricted),
            "with_logprobs": sampled.all(features.with_logprobs),
            "masked": sampled.leading(slots, counts),
            "bits": masks.bits if masks else np.zeros((0, 0), dtype=np.int32),
        }
        of_drafts = {}
        if plan.num_drafts:
            of_drafts = sampled.arrays()
            of_drafts["penalized"] = features.penalized
            if masks is not None:
                of_drafts["room"] = sampled.room(slots, counts)
            if plan.tree_nodes:
                nodes, firsts = sampled.on_paths(features.with_logprobs)
                of_drafts |= {"nodes": nodes, "firsts": firsts}
        uploaded = upload([*arrays.values(), *of_drafts.values()])
        rows = dict(zip(arrays, uploaded, strict=False))
        drafts = dict(zip(of_drafts, uploaded[len(arrays) :], strict=True))
        return cls(**rows, drafts=DraftArrays(**drafts) if drafts else None)
