"""Kernels and edges of a captured CUDA graph, which torch does not expose."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

KERNEL_NODE = 0  # a CUgraphNodeType
PROGRAMMATIC = 1  # a CUgraphDependencyType
MANGLED = "_Z"  # prefix of kernels in C++, such as torch's; Triton's have none


@dataclass(frozen=True)
class Edge:
    before: int  # indices into `Graph.names`
    after: int
    is_programmatic: bool  # `after` may start while `before` runs


@dataclass(frozen=True)
class Graph:
    # Kernel names of the nodes, mangled if they are C++; "" for nodes of another type
    names: list[str]
    edges: list[Edge]

    def named(self, *names: str) -> list[int]:
        return [node for node, name in enumerate(self.names) if name in names]

    def before(self, node: int, *, by_programmatic_edges: bool = False) -> set[int]:
        """Returns all nodes with a path to `node`, over any edges or over programmatic ones only."""
        found, open_nodes = set[int](), [node]
        while open_nodes:
            last = open_nodes.pop()
            for edge in self.edges:
                followed = edge.is_programmatic or not by_programmatic_edges
                if edge.after == last and followed and edge.before not in found:
                    found.add(edge.before)
                    open_nodes.append(edge.before)
        return found


def unsettled(graph: Graph, readers: Iterable[str], writers: Iterable[str]) -> list[str]:
    """Returns a message for each violation of the rule for settled arguments (`pdl.py`).

    A reader may start while those kernels run that lead to it by programmatic edges alone. The first of them started
    after all before it had ended: these must be all writers, and the look-up of rotations, which is torch's.
    """
    broken, written = [], graph.named(*writers)
    early = {edge.after for edge in graph.edges if edge.is_programmatic}
    for reader in graph.named(*readers):
        name = graph.names[reader]
        overlapped = graph.before(reader, by_programmatic_edges=True) | {reader}
        broken += [
            f"{graph.names[node]} beside {name}" for node in overlapped.intersection(written)
        ]
        needed = graph.before(reader).intersection(written)
        for first in overlapped - early:
            ended = graph.before(first)
            if not needed <= ended:
                broken.append(f"{graph.names[first]} before {name}, ahead of a writer")
            if not any(graph.names[node].startswith(MANGLED) for node in ended):
                broken.append(
                    f"{graph.names[first]} before {name}, ahead of all of torch's kernels"
                )
    return broken


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def read_graph(captured: torch.cuda.CUDAGraph) -> Graph:
    """Reads a graph that was captured with keep_graph=True."""
    cuda = ctypes.CDLL("libcuda.so.1")
    graph, count = ctypes.c_void_p(captured.raw_cuda_graph()), ctypes.c_size_t()
    _call(cuda.cuGraphGetNodes, graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call(cuda.cuGraphGetNodes, graph, nodes, ctypes.byref(count))
    places = {node: place for place, node in enumerate(nodes)}

    _call(cuda.cuGraphGetEdges_v2, graph, None, None, None, ctypes.byref(count))
    before, after = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (_EdgeData * count.value)()
    _call(cuda.cuGraphGetEdges_v2, graph, before, after, data, ctypes.byref(count))
    edges = [
        Edge(places[a], places[b], kind.type == PROGRAMMATIC)
        for a, b, kind in zip(before, after, data, strict=True)
    ]
    return Graph([_kernel_name(cuda, ctypes.c_void_p(node)) for node in nodes], edges)


def _kernel_name(cuda: Any, node: ctypes.c_void_p) -> str:
    kind = ctypes.c_int()
    _call(cuda.cuGraphNodeGetType, node, ctypes.byref(kind))
    if kind.value != KERNEL_NODE:
        return ""
    params, name = _KernelNodeParams(), ctypes.c_char_p()
    _call(cuda.cuGraphKernelNodeGetParams_v2, node, ctypes.byref(params))
    if params.func:
        _call(cuda.cuFuncGetName, ctypes.byref(name), ctypes.c_void_p(params.func))
    else:
        _call(cuda.cuKernelGetName, ctypes.byref(name), ctypes.c_void_p(params.kern))
    assert name.value is not None, f"a kernel without a name: node {node}"
    return name.value.decode()


def _call(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    assert code == 0, f"{function.__name__}: CUDA error {code}"
