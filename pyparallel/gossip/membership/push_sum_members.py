"""SGP and D-PSGD of members that come and go: messages that nobody merged come back."""

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

# No public names, which mypy asks for.
from typing_extensions import override

from ...comm import Collectives, Run
from ...training import FlatBuckets
from ...training.step_hook import decays_only
from ..algorithms import SGP
from ..messages import NeighborExchange
from ..push_sum.layout import layouts_of
from .decision import Epoch
from .ledger import Account, Settlement, settle
from .members import MembersAverager, Shares, bind, copy_tensors, gather_from_members
from .moves import move_mass
from .rounds import AcknowledgedRounds

_NUM_EPOCHS_KEPT = 64  # in the ledger, of members that have not settled them yet


class PushSumMembers(MembersAverager):
    """Rounds of PushSum. Members that join have weight 0, and are filled by one member each.

    Args:
        algorithm: for any number of members.
        optimizer: that of the module.
    """

    inner: AcknowledgedRounds | None

    def __init__(
        self,
        algorithm: SGP,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        run: Run,
    ) -> None:
        super().__init__(buckets, module, run)
        self._keeps_values = not decays_only(optimizer)
        self._algorithm, self._layouts = algorithm, layouts_of(buckets, module)
        self.account = Account()

    @property
    def current(self) -> AcknowledgedRounds:
        """The rounds of this epoch."""
        assert self.inner is not None
        return self.inner

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        self.current.step_buckets(step_bucket, num_buckets)

    @override
    def close(self) -> None:
        self.inner = None

    @override
    def release(self) -> None:
        """Release what keeps the group's connections; what was sent stays until it is settled."""
        if self.inner is not None:
            self.inner.restore_debiased()
            self.inner.release()

    @override
    def forget(self) -> None:
        self.account = Account()

    @override
    def begin(self, epoch: Epoch, identity: str) -> Shares:
        self.run.regroup()
        found = gather_from_members(dataclasses.asdict(self.account), epoch.members)
        accounts = {member: Account(**each) for member, each in found.items()}
        settlement = settle(accounts, epoch.veterans)
        if settlement.total == 0:
            settlement = self._start_fresh(epoch.members)
        self._apply(settlement, epoch, identity)
        before = settlement.total + settlement.lost
        return Shares(settlement.lost / before, settlement.returned[identity] / before)

    def _apply(self, settlement: Settlement, epoch: Epoch, own: str) -> None:
        """Take what this rank has in the new epoch, and fill the members that join."""
        last, scale = self.inner, len(epoch.members) / settlement.total
        returned = settlement.returned[own]
        kept = dict(list(self.account.merged.items())[-_NUM_EPOCHS_KEPT:])
        account = Account(
            weight=settlement.weights[own] - returned,
            exponent=settlement.exponent,
            merged=kept,
            settled=epoch.number,
            total=settlement.total,
        )
        algorithm = bind(self._algorithm, len(epoch.members))
        exchange = NeighborExchange(self.run)
        buffers = [
            algorithm.make_buffer(values, exchange, layout, is_acknowledged=True)
            for values, layout in zip(self.buffers, self._layouts, strict=True)
        ]
        of_epoch = epoch.members, account, epoch.number, scale, self._keeps_values
        rounds = AcknowledgedRounds(
            buffers, exchange, algorithm.bound_topology, algorithm.overlap, *of_epoch
        )
        if returned:
            assert last is not None
            rounds.merge_returned(last.sent_messages, returned * scale)
        self.account, self.inner = account, rounds
        self.run.barrier()  # before it a rank might have mass that another one takes back
        has_mass = [settlement.weights[member] > 0 for member in epoch.members]
        leaving = [each in epoch.leaving for each in epoch.members]
        neighbors = move_mass(self.run.rank, has_mass, leaving)
        if neighbors is not None:
            if not all(has_mass):
                copy_tensors(rounds.exchange, self.others, neighbors)
            rounds.move(neighbors)

    def _start_fresh(self, members: Sequence[str]) -> Settlement:
        """Broadcast the first rank's tensors; return that all members have the weight 1."""
        collectives = Collectives(self.run)
        for tensor in [*self.buffers, *self.others]:
            collectives.broadcast_(tensor, 0)
        self.run.barrier()
        weights, nothing = dict.fromkeys(members, 1.0), dict.fromkeys(members, 0.0)
        return Settlement(0, weights, nothing, float(len(members)), 0.0)
