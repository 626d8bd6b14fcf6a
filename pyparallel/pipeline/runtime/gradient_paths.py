"""The nodes of an autograd graph between outputs and inputs, and where parameters join them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

# Nodes whose kernel computes all gradients at once, whichever are requested.
_INDIVISIBLE = (
    *("BatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm"),
    *("CudnnRnn", "MiopenRnn", "MkldnnRnn", "ThnnFused"),
    *("ScaledDotProduct", "PreluKernel"),
)


@dataclass(eq=False)
class Part:
    """A group of parameters, and the graph edges from which their gradients are computed."""

    leaves: set[Node]
    # Indices of the roots on no path to an input that lead to the leaves.
    outputs: list[int] = field(default_factory=list)
    # Edges into nodes of a path, from which a branch to the leaves leaves the path.
    joints: list[GradientEdge] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of the leaves."""
        # Leaves are AccumulateGrad nodes; torch declares no type for their attribute.
        return [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]

    def merge(self, other: "Part") -> None:
        """Add the leaves and edges of another part."""
        self.leaves |= other.leaves
        self.outputs += other.outputs
        self.joints += other.joints


class GradientPaths:
    """The graph from root edges to its leaves, and the paths in it that end at inputs."""

    def __init__(self, roots: Sequence[GradientEdge], inputs: Iterable[Node]) -> None:
        self.roots = roots
        self.inputs = set(inputs)
        self.children: dict[Node, list[tuple[Node, int]]] = {}
        for root in roots:
            self._add_graph(root.node)
        self.on_path = self.inputs & self.children.keys()
        for node, children in self.children.items():
            if any(child in self.on_path for child, _ in children):
                self.on_path.add(node)

    def parts(self) -> list[Part]:
        """Return parts with every parameter in exactly one, those nearest to the outputs first."""
        part_of: dict[Node, Part] = {}
        for source in self._sources():
            known = {part_of[leaf] for leaf in source.leaves & part_of.keys()}
            for part in known:
                source.merge(part)
            part_of.update(dict.fromkeys(source.leaves, source))
        return list(dict.fromkeys(part_of.values()))

    def can_defer(self, part: Part) -> bool:
        """Return whether a part can be computed later on its own, with no node run twice.

        Not if a path leads from one of its joints to another, as where consecutive layers share
        parameters. And not if a joint computes all its gradients at once, the path's included:
        custom Python functions do, among them compiled graphs, and so do some kernels.
        """
        joints = {edge.node for edge in part.joints}
        is_indivisible = any(
            isinstance(joint, BackwardCFunction) or joint.name().startswith(_INDIVISIBLE)
            for joint in joints
        )
        return not is_indivisible and (len(joints) < 2 or not joints & self._descendants(joints))

    def _add_graph(self, root: Node) -> None:
        """Add all nodes reachable from ``root`` to ``children``, children before their parents."""
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
        """Yield a part for each root on no path, then for each path node with a branch off it."""
        for index, root in enumerate(self.roots):
            if root.node not in self.on_path:
                yield Part(self._leaves([root.node]), outputs=[index])
        output_nrs = self._output_nrs()
        for node in reversed(self.children):
            children = self.children[node] if node in self.on_path else ()
            branches = [child for child, _ in children if child not in self.on_path]
            if branches and (leaves := self._leaves(branches)):
                joints = [GradientEdge(node, nr) for nr in sorted(output_nrs[node])]
                yield Part(leaves, joints=joints)

    def _output_nrs(self) -> dict[Node, set[int]]:
        """Return through which of its outputs each path node receives gradients."""
        output_nrs: dict[Node, set[int]] = {node: set() for node in self.on_path}
        edges = [(root.node, root.output_nr) for root in self.roots]
        for each in (edges, *self.children.values()):
            for node, nr in each:
                if node in self.on_path:
                    output_nrs[node].add(nr)
        return output_nrs

    def _leaves(self, nodes: Iterable[Node]) -> set[Node]:
        reached = self._reachable(nodes)
        return {node for node in reached if not self.children[node] and hasattr(node, "variable")}

    def _descendants(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes reachable along paths from these, excluding the start of each walk."""
        children = [child for node in nodes for child, _ in self.children[node]]
        return self._reachable(child for child in children if child in self.on_path)

    def _reachable(self, nodes: Iterable[Node]) -> set[Node]:
        stack, reached = list(nodes), set[Node]()
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack.extend(child for child, _ in self.children[node])
        return reached
