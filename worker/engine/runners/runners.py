"""All runners of an engine."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.runners.choose import RunnerKind
from mla_router.worker.engine.runners.decode_graph import DecodeGraphRunner
from mla_router.worker.engine.runners.eager import EagerRunner
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import ForwardOutput, LayerOutput
from mla_router.worker.engine.runners.piecewise import PiecewiseRunner
from mla_router.worker.engine.runners.prefill_graph import PrefillGraphRunner
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.step.plan import StepPlan


class Inputs(Protocol):
    """A packed step: the fields that the inputs of every runner have."""

    @property
    def entries(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...


I = TypeVar("I", bound=Inputs)


class Runner(Protocol[I]):
    """Runs the steps for which `choose_runner` selects it. Neither method waits for the device."""

    def pack(self, plan: StepPlan, rows: int) -> I:
        """Copies the inputs of `plan`, as `rows` rows, to the device."""
        ...

    def run(self, plan: StepPlan, inputs: I) -> LayerOutput | ForwardOutput:
        """Launches the step. Its writes to the state of the slots must be launched."""
        ...


class Runners:
    """The runners by kind, and the sizes of their captured graphs."""

    def __init__(
        self, forward_pass: ForwardPass, packer: InputPacker, *, for_drafter: bool = False
    ) -> None:
        """`for_drafter`: a drafter reads the batches of the steps."""
        eager = EagerRunner(forward_pass, packer)
        self.decode_graph = DecodeGraphRunner(forward_pass, packer)
        queries = forward_pass.capacity.rows_per_decode
        self.verify_graph = DecodeGraphRunner(forward_pass, packer, queries)
        self.prefill_graph = PrefillGraphRunner(forward_pass, packer, for_drafter=for_drafter)
        self.piecewise = PiecewiseRunner(forward_pass, eager)
        self.sizes = GraphSizes()  # of the captured graphs
        self._by_kind: dict[RunnerKind, Runner[Any]] = {
            RunnerKind.EAGER: eager,
            RunnerKind.DECODE_GRAPH: self.decode_graph,
            RunnerKind.VERIFY_GRAPH: self.verify_graph,
            RunnerKind.PREFILL_GRAPH: self.prefill_graph,
            RunnerKind.PIECEWISE: self.piecewise,
        }

    def __getitem__(self, kind: RunnerKind) -> Runner[Any]:
        return self._by_kind[kind]

    def capture(self, sizes: GraphSizes) -> None:
        """Replaces all captured graphs by graphs of `sizes`."""
        self.sizes = GraphSizes()
        self.decode_graph.capture(sizes.decode, sizes.compiled)
        self.verify_graph.capture(sizes.verify)
        self.piecewise.capture(sizes.piecewise)
        self.prefill_graph.capture(sizes.prefill)
        self.sizes = sizes
