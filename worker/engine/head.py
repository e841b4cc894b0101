"""The end of a forward pass, after the attention of the last layer, for the rows whose output is needed."""

from __future__ import annotations

from torch import Tensor

from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import ForwardOutput, LayerOutput
from mla_router.worker.engine.sampling.features import SlotFeatures
from mla_router.worker.engine.sampling.logprobs import Run, prompt_token_logprobs
from mla_router.worker.model.exchange import NO_EXCHANGE, Exchange
from mla_router.worker.step.plan import StepPlan


class Head:
    """The last layer's feed-forward half, the norm, and the language model's head."""

    def __init__(
        self, forward_pass: ForwardPass, packer: InputPacker, *, for_drafter: bool = False
    ) -> None:
        """`for_drafter`: a drafter reads the hidden states of all rows."""
        self._forward = forward_pass
        self._model = forward_pass.model
        self._packer = packer
        self._for_drafter = for_drafter

    def run(self, plan: StepPlan, output: LayerOutput, features: SlotFeatures) -> ForwardOutput:
        """Returns the logits of the sampled rows, and the logprobs of prompt tokens that `plan` requests, with the number
        of most likely tokens in `features`. Packs its inputs while the device computes the layers, which do not need
        them."""
        wanted = self._packer.pack_outputs(plan)
        num_sampled = len(wanted.rows) - len(wanted.logprob_tokens)
        exchange = self._forward.exchange(plan)
        if self._for_drafter or exchange is not None:
            of_all = self._finish(output, exchange)
            hidden_states = of_all.index_select(0, wanted.rows)
        else:
            of_all = hidden_states = self._model.model.finish(
                output.hidden_states, output.residual, wanted.rows
            )
        prompt_logprobs = None
        if len(wanted.logprob_tokens):
            runs = [
                Run(i, len(chunk.logprob_tokens), features.num_top(chunk.slot))
                for i, chunk in enumerate(plan.chunks)
                if chunk.logprob_tokens
            ]
            prompt_logprobs = prompt_token_logprobs(
                hidden_states[num_sampled:], self._model.logits, wanted.logprob_tokens, runs
            )
        return ForwardOutput(
            plan,
            self._model.logits(hidden_states[:num_sampled]),
            wanted.slots,
            of_all,
            prompt_logprobs,
            wanted.rows[:num_sampled],
            output.batch,
        )

    def _finish(self, output: LayerOutput, exchange: Exchange | None) -> Tensor:
        """Returns the final hidden states of all rows. Other DP ranks' experts need to know their number."""
        return self._model.model.finish(
            output.hidden_states, output.residual, exchange=exchange or NO_EXCHANGE
        )
