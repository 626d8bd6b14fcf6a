"""Which of autograd's nodes lie between outputs and inputs, and where parameters join them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

# Nodes whose kernel makes all gradients at once, whichever are asked for.
_INDIVISIBLE = (
    *("BatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm"),
    *("CudnnRnn", "MiopenRnn", "MkldnnRnn", "ThnnFused"),
    *("ScaledDotProduct", "PreluKernel"),
)


@dataclass(eq=False)
class Part:
    """Some parameters, and all the places where their gradients come from.

    Args:
        leaves: the nodes that accumulate the parameters' gradients.
        outputs: which of the graph's roots they come from, of those that are on no path.
        joints: edges into nodes of a path, at which they leave it.
    """

    leaves: set[Node]
    outputs: list[int] = field(default_factory=list)
    joints: list[GradientEdge] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """What the leaves accumulate for."""
        # Leaves are AccumulateGrad nodes, which torch declares no attribute of.
        return [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]

    def take(self, other: "Part") -> None:
        """Become the union of both."""
        self.leaves |= other.leaves
        self.outputs += other.outputs
        self.joints += other.joints


class GradientPaths:
    """The graph from some edges down to its leaves, and the paths in it that end at inputs.

    Args:
        roots: where the gradients of the outputs arrive.
        inputs: the nodes that accumulate the gradients of the inputs.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Iterable[Node]) -> None:
        self.roots = roots
        self.inputs = set(inputs)
        self.children: dict[Node, list[tuple[Node, int]]] = {}
        for root in roots:
            self._enter(root.node)
        self.on_path = self.inputs & self.children.keys()
        for node, children in self.children.items():
            if any(child in self.on_path for child, _ in children):
                self.on_path.add(node)

    def parts(self) -> list[Part]:
        """Every parameter in exactly one part, those nearest to the outputs first."""
        part_of: dict[Node, Part] = {}
        for source in self._sources():
            known = {part_of[leaf] for leaf in source.leaves & part_of.keys()}
            for part in known:
                source.take(part)
            part_of.update(dict.fromkeys(source.leaves, source))
        return list(dict.fromkeys(part_of.values()))

    def can_wait(self, part: Part) -> bool:
        """Whether the part can be computed later, apart from all others, with nothing done twice.

        Not if a path leads from one of its joints to another, as where layers in a row share their
        parameters. And not if a joint makes all gradients at once, that of the path among them: a
        function written in Python does, a compiled graph is one, and so do some kernels.
        """
        joints = {edge.node for edge in part.joints}
        return not any(_is_indivisible(node) for node in joints) and not (
            len(joints) > 1 and joints & self._below(joints)
        )

    def _enter(self, root: Node) -> None:
        """Note the children of all nodes down from ``root``, children before their parents."""
        stack: list[tuple[Node, list[tuple[Node, int]] | None]] = [(root, None)]
        while stack:
            node, children = stack.pop()
            if node in self.children:
                continue
            if children is None:
                children = [(child, nr) for child, nr in node.next_functions if child is not None]
                stack.append((node, children))
                stack.extend((child, None) for child, _ in children)
            else:
                self.children[node] = children

    def _sources(self) -> Iterator[Part]:
        """Each output that is on no path, then each node of a path with parameters beside it."""
        for index, root in enumerate(self.roots):
            if root.node not in self.on_path:
                yield Part(self._leaves([root.node]), outputs=[index])
        arrivals = self._arrivals()
        for node in reversed(self.children):
            aside = self._aside(node)
            leaves = self._leaves(aside) if aside else None
            if leaves:
                joints = [GradientEdge(node, nr) for nr in sorted(arrivals[node])]
                yield Part(leaves, joints=joints)

    def _arrivals(self) -> dict[Node, set[int]]:
        """Through which of its outputs each node of a path gets gradients."""
        arrivals: dict[Node, set[int]] = {node: set() for node in self.on_path}
        edges = [(root.node, root.output_nr) for root in self.roots]
        for each in (edges, *self.children.values()):
            for node, nr in each:
                if node in self.on_path:
                    arrivals[node].add(nr)
        return arrivals

    def _aside(self, node: Node) -> list[Node]:
        """Where a node of a path leads to beside it."""
        if node not in self.on_path:
            return []
        return [child for child, _ in self.children[node] if child not in self.on_path]

    def _leaves(self, nodes: Iterable[Node]) -> set[Node]:
        reached = self._reached(nodes)
        return {node for node in reached if not self.children[node] and hasattr(node, "variable")}

    def _below(self, nodes: Iterable[Node]) -> set[Node]:
        """What paths lead to from these nodes; the nodes only where one leads to another."""
        children = [child for node in nodes for child, _ in self.children[node]]
        return self._reached(child for child in children if child in self.on_path)

    def _reached(self, nodes: Iterable[Node]) -> set[Node]:
        stack, reached = list(nodes), set[Node]()
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack.extend(child for child, _ in self.children[node])
        return reached


def _is_indivisible(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) or node.name().startswith(_INDIVISIBLE)
