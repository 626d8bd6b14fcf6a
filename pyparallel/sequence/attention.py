"""Ring attention: attention over a sequence of which each rank has a part."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import ANY, Call, CommStats, Run, device_of, warn_if_alone
from ..comm.consistency import check_same_call, gather_rows, row_of_call
from ..comm.p2p import PointToPoint
from ..compression import Compressor
from ..compression.compressor import not_a_compressor
from ..compression.quantizers.blockwise import BlockwiseCompressor
from ..training.arguments import check_type, find_error, raise_problem, require, summarize
from .ring import BACKWARD, FORWARD, WIDE, Causal, Ring

aten = torch.ops.aten


def can_use_flash(q: Tensor) -> bool:
    """Return whether a flash kernel of torch takes q, and k and v like it.

    On the CPU all, on a GPU those of 16 bits with dim a multiple of 8, up to 256, if it has one.
    """
    if not q.is_cuda:
        return q.is_cpu
    arguments = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    return q.shape[3] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(arguments)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, uses_flash: bool
) -> tuple[Tensor, Tensor]:
    """Return o = softmax(scale q k') v, and lse, the log of the softmax's denominators (..., 1)."""
    if not uses_flash:
        q, k, v = (each.to(WIDE[q.dtype]) for each in (q, k, v))
        scores = _scores(q, k, scale, is_causal)
        lse = scores.logsumexp(-1, keepdim=True)
        return scores.sub_(lse).exp_() @ v, lse
    name = "_scaled_dot_product_flash_attention" + "_for_cpu" * q.is_cpu
    out, lse, *_ = getattr(aten, name)(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse.unsqueeze(-1)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention to other keys into ``out`` and ``lse``.

    o <- o - sigmoid(lse_j - lse) (o - o_j), and lse <- log(exp(lse) + exp(lse_j)).
    """
    out.lerp_(other.to(out.dtype), torch.sigmoid(other_lse - lse))
    lse.copy_(torch.logaddexp(lse, other_lse))


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_all: tuple[Tensor, ...],
    scale: float,
    is_causal: bool,
    uses_flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these rows of q and keys add to the gradients of q, k and v.

    ``of_all`` are do, o and lse (..., 1) of attention to all keys.
    """
    grad, out, lse = of_all
    if not uses_flash:
        q, k, v, grad, out = (each.to(lse.dtype) for each in (q, k, v, grad, out))
        p = _scores(q, k, scale, is_causal).sub_(lse).exp_()
        delta = (grad * out).sum(-1, keepdim=True)
        ds = (grad @ v.mT).sub_(delta).mul_(p).mul_(scale)  # dp - delta, times p
        return ds @ k, ds.mT @ q, p.mT @ grad
    lse = lse.squeeze(-1).contiguous()
    name, lengths, random = "_scaled_dot_product_flash_attention", list[Any](), list[Tensor]()
    if q.is_cpu:
        name += "_for_cpu"
    else:  # no sequences of several lengths; and no random numbers, as nothing is dropped out
        lengths = [None, None, q.shape[2], k.shape[2]]
        random = [q.new_empty(2, dtype=torch.uint64)] * 2
    arguments = grad, q, k, v, out, lse, *lengths, 0.0, is_causal, *random
    added = getattr(aten, f"{name}_backward")(*arguments, scale=scale)
    return cast("tuple[Tensor, Tensor, Tensor]", added)


def _scores(q: Tensor, k: Tensor, scale: float, is_causal: bool) -> Tensor:
    scores = (q @ k.mT).mul_(scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        q = q.contiguous()
        out = torch.zeros_like(q, dtype=WIDE[q.dtype])
        lse, message = out.new_full((*q.shape[:3], 1), -math.inf), ring.pack(k, v)
        for step, received in ring.trip(message, FORWARD):
            if received is None:
                continue
            keys, values = ring.unpack(received, ring.part(step))
            for rows, columns, is_causal in ring.blocks(ring.part(step), q.shape[2]):
                seen = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                new = attend(*seen, ring.scale, is_causal, ring.uses_flash)
                merge_(out[:, :, rows], lse[:, :, rows], *new)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, message, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        with torch.autocast(grad_out.device.type, enabled=False):
            grad_q, own = _backward(ctx.ring, grad_out, *ctx.saved_tensors)
        grad_k, grad_v = own
        return grad_q, grad_k, grad_v, None


def _backward(
    ring: Ring, grad_out: Tensor, q: Tensor, message: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and those of k and v, (2, batch, heads, length, dim)."""
    of_all = grad_out.contiguous(), out, lse
    me, grad_q = ring.run.group_rank, torch.zeros_like(q, dtype=lse.dtype)
    own, returned = ring.zeros(me), ring.zeros(me)
    arriving: Tensor | None = None
    wait: Callable[[], Any] = list
    for step, received in ring.trip(message, BACKWARD):
        grads = None
        if received is not None:
            keys, values = ring.unpack(received, ring.part(step))
            grads = ring.zeros(ring.part(step))
            for rows, columns, is_causal in ring.blocks(ring.part(step), q.shape[2]):
                seen = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                of_rows = tuple(each[:, :, rows] for each in of_all)
                new = attend_backward(*seen, of_rows, ring.scale, is_causal, ring.uses_flash)
                grad_q[:, :, rows] += new[0]
                grads[:, :, :, columns] += torch.stack(new[1:])
        wait()
        if grads is not None and arriving is not None:
            grads += arriving
        if step == 0 and grads is not None:
            own += grads
        arriving, wait = ring.send_gradients(step, grads, returned)
    wait()
    return grad_q.to(q.dtype), (own + returned).to(q.dtype)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    compressor: Compressor | None = None,
    stats: CommStats | None = None,
) -> Tensor:
    """Attend to the keys and values of all ranks, each of which has a part of one sequence.

    The parts of k and v go around the ring of ranks while each rank computes with the part that it
    has; results are merged by their log-sum-exp (Liu et al., Ring Attention, arXiv 2310.01889). The
    backward sends k and v around again, with their gradients. Results are merged, and gradients
    added and sent, in float32, or in float64 for float64. All ranks must make the call, and its
    backward, in the same order.

    Torch's flash kernels attend to each part: on the CPU, and on a GPU for bfloat16 and float16 if
    dim is a multiple of 8 up to 256. Otherwise plain PyTorch does, in the dtype in which results
    are merged, for 256 queries at a time. Memory grows with the length, not with its square.

    Args:
        q: (batch, heads, length, dim) float64, float32, bfloat16 or float16, of this rank's part.
        k: (batch, heads, length, dim), like q; lengths may differ between ranks, and be 0.
        v: like k.
        causal: True: a place sees itself and those before it, with parts in the order of ranks. A
            part is then sent to later ranks only, and the last rank computes most. ``"zigzag"``:
            likewise, with parts cut by `zigzag_split`, for which all ranks compute as much.
        scale: what scores are multiplied by; None: 1 / sqrt(dim).
        group: the process group; None: the default one.
        compressor: encodes k and v of each rank, once for all others and the backward: ``Int8()``,
            or another one without state and draws whose messages have a fixed length. The owner
            too computes with what its message decodes to, and gets the gradients of that.
        stats: counts the bytes that this rank sends, and the seconds for which it waits.

    Returns:
        This rank's part, of q's shape and dtype; zeros if no rank has a key.

    Raises:
        DisagreementError: an argument is invalid on a rank, or differs between ranks. All ranks
            raise it, before k and v are sent.
        ValueError: ``group`` does not contain this rank.
        PeerError: a rank died, or did not make the call, or its backward, within the timeout.
    """
    warn_if_alone(stacklevel=3)
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    rule, fix = "group must be a process group with this rank", "call this on its ranks only"
    require(is_group and (group is None or dist.get_rank(group) >= 0), rule, group, fix)
    run, fields, length = Run(group), list[tuple[str, str]](), ANY
    problem = find_error(lambda: _check(q, k, v, causal, scale, compressor, stats, run))
    if problem is None:
        length = k.shape[2]
        needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
        shape = [*q.shape[:2], q.shape[3]]
        names = ["batch, heads and dim", "dtype", "causal", "scale", "compressor", "requires_grad"]
        values = [shape, q.dtype, causal, scale, compressor, needs_grad]
        fields = list(zip(names, map(repr, values), strict=True))
    ring = Ring(
        run=run,
        messages=PointToPoint(run, stats, "ring_attention's message"),
        lengths=_agree(run, fields, problem, length),
        like=q.detach()[:, :, :0],
        causal=causal,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
        compressor=cast("BlockwiseCompressor | None", compressor),  # others are refused
        uses_flash=can_use_flash(q),
    )
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return out


def zigzag_split(tensor: Tensor, rank: int, num_ranks: int, dim: int = 2) -> Tensor:
    """Return a rank's part of a whole sequence, for ``causal="zigzag"``.

    The sequence is cut into 2 num_ranks equal chunks, and a rank has the one at its own number, and
    behind it the one as far from the end.

    Args:
        tensor: any shape, as tokens, targets or places (batch, length) with ``dim=1``. A length
            that is no multiple of 2 num_ranks is a ValueError.
    """
    length, num_chunks = tensor.shape[dim], 2 * num_ranks
    rule = f"the length must be a multiple of {num_chunks}, two chunks for each rank"
    require(length % num_chunks == 0, rule, length, "pad the sequence")
    chunks = tensor.chunk(num_chunks, dim)
    return torch.cat([chunks[rank], chunks[num_chunks - 1 - rank]], dim)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: object,
    scale: object,
    compressor: object,
    stats: object,
    run: Run,
) -> None:
    for name, each in (("q", q), ("k", k), ("v", v)):
        rule = "a tensor (batch, heads, length, dim)"
        check_type(name, each, Tensor, rule)
        require(each.dim() == 4, f"{name} must be {rule}", each)
        rule = f"{name} must be float64, float32, bfloat16 or float16, like q"
        require(each.dtype in WIDE and each.dtype == q.dtype, rule, f"{each.dtype}")
        require(each.device == q.device, f"{name} must be on the device of q", f"{each.device}")
    rule, shapes = "k must have the batch, heads and dim of q", f"{[*k.shape]} and {[*q.shape]}"
    fix = "repeat the heads of grouped queries by repeat_interleave(..., dim=1)"
    require((*k.shape[:2], k.shape[3]) == (*q.shape[:2], q.shape[3]), rule, shapes, fix)
    require(v.shape == k.shape, "v must have the shape of k", f"{[*v.shape]} and {[*k.shape]}")
    rule = "causal must be False, True or 'zigzag'"
    require(isinstance(causal, bool) or causal == "zigzag", rule, summarize(causal))
    rule = "k must be as long as q in causal attention"
    require(not causal or k.shape[2] == q.shape[2], rule, shapes)
    rule, fix = "k must have an even length with causal='zigzag'", "cut it by zigzag_split"
    require(causal != "zigzag" or k.shape[2] % 2 == 0, rule, k.shape[2], fix)
    is_scale = scale is None or isinstance(scale, int | float)
    require(is_scale, "scale must be a number or None", summarize(scale))
    require(stats is None or isinstance(stats, CommStats), "stats must be CommStats or None", stats)
    kind = q.device.type if run.size == 1 else device_of(run.group).type
    require(q.device.type == kind, f"q must be on {kind}, from which the group sends", q)
    if compressor is not None:
        raise_problem(not_a_compressor(compressor))
        is_blockwise = isinstance(compressor, BlockwiseCompressor)
        rule = "compressor must have no state, no draws and messages of a fixed length"
        is_plain = is_blockwise and getattr(compressor, "seed", None) is None
        require(is_plain, rule, compressor, "use Int8(), Fp8() or Cast()")
        rule = "q must be float32, bfloat16 or float16 with a compressor"
        require(q.dtype != torch.float64, rule, f"{q.dtype}")


def _agree(
    run: Run, fields: Sequence[tuple[str, str]], problem: str | TypeError | None, length: int
) -> list[int]:
    """Return the length of each rank's part; the same error on all ranks if there is a problem."""
    rows = [[Call.ATTENTION, length, 0.0]]
    if run.size > 1:
        numbers = [length, zlib.crc32(repr(fields).encode())]
        row = row_of_call(Call.ATTENTION, numbers, device_of(run.group))
        with run.raising("the comparison of all ranks' shapes failed"):
            rows = gather_rows(row, run.group).tolist()
        check_same_call(rows, {Call.ATTENTION}, run.group)
    if any(row[1] == ANY or row[2] != rows[0][2] for row in rows):
        run.agree(fields, problem)
    return [int(row[1]) for row in rows]
