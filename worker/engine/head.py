"""The rest of a step behind the attention of the last layer, for the rows whose output is wanted."""

from __future__ import annotations

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.runners.outputs import LayerOutput, StepLogits
from mla_router.worker.engine.sampling.groups import SlotWants
from mla_router.worker.engine.sampling.scores import Run, score_hidden
from mla_router.worker.model.causal_lm import CausalLM


class Head:
    """The last layer's feed-forward half, the norm, and the language model's head."""

    def __init__(self, model: CausalLM, packer: InputPacker) -> None:
        self._model = model
        self._packer = packer

    def run(self, plan: StepPlan, output: LayerOutput, wants: SlotWants) -> StepLogits:
        """Logits of the sampled rows, and logprobs of scored prompt tokens with as many likeliest tokens as their slots
        want. Packed while the device computes the layers: nothing before needs it."""
        wanted = self._packer.pack_outputs(plan)
        hidden_states = self._model.model.finish(*output, wanted.rows)
        num_sampled = len(wanted.slots)
        prompt_scores = None
        if len(wanted.score_tokens):
            runs = [
                Run(i, len(chunk.score_tokens), wants.num_top(chunk.slot))
                for i, chunk in enumerate(plan.chunks)
                if chunk.score_tokens
            ]
            prompt_scores = score_hidden(
                hidden_states[num_sampled:], self._model.logits, wanted.score_tokens, runs
            )
        return StepLogits(
            self._model.logits(hidden_states[:num_sampled]),
            wanted.slots,
            wanted.lengths,
            hidden_states,
            prompt_scores,
        )
