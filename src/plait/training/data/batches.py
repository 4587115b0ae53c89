"""Batches by token budget, each a pure function of (seed, epoch, index)."""

from __future__ import annotations

from plait.errors import UsageError
from plait.training.batch import Batch, collate, nothing
from plait.training.data.examples import Joined
from plait.training.data.order import Plan, members_of_epoch, plan_epoch


class Batches:
    """The batches of one split. Nothing is drawn and nothing is remembered: to resume, ask for the next index.

    budget_tokens: the most positions of a batch, padding included (longest * count).
    shuffle: False for evaluation: sorted by length, every epoch the same, each example once, whatever the weights.
    rank, world: of several processes each takes every world-th batch; where batches run out, the rest of them get a
    batch of one position of padding, which has no target and moves nothing.

    Raises UsageError where an example alone is longer than the budget.
    """

    def __init__(
        self,
        examples: Joined,
        budget_tokens: int,
        seed: int = 0,
        *,
        pad_id: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        longest = int(examples.lengths.max(initial=0))
        if longest > budget_tokens:
            raise UsageError(
                f"a batch of {budget_tokens} tokens has no room for the longest example ({longest}): raise the budget, "
                f"or lower data.context"
            )
        if not 0 <= rank < world:
            raise UsageError(f"there is no rank {rank} in a world of {world}")
        self._examples, self._budget, self._seed, self._pad_id = examples, budget_tokens, seed, pad_id
        self._shuffle, self._rank, self._world = shuffle, rank, world
        self._plans: dict[int, Plan] = {}
        self._counts: list[int] = []  # of the epochs asked for so far, in order

    @property
    def per_epoch(self) -> int:
        """Batches (of this rank) in the first epoch; where lengths vary, others may have a few more or less."""
        return self.count(0)

    def count(self, epoch: int) -> int:
        """Batches (of this rank) in an epoch."""
        while len(self._counts) <= epoch:
            self._counts.append(-(-self._plan(len(self._counts)).count // self._world))
        return self._counts[epoch]

    def padding_share(self, epoch: int = 0) -> float:
        """Which share of the positions of an epoch's batches, of all ranks, is padding."""
        return self._plan(epoch).padding_share

    def tokens(self, epoch: int = 0) -> int:
        """Positions that are no padding, of an epoch and all ranks."""
        return self._plan(epoch).tokens

    def members(self, epoch: int, index: int) -> list[int]:
        """The places in `examples` of a batch's rows; none where this rank's batches have run out."""
        if not 0 <= index < self.count(epoch):
            raise IndexError(f"epoch {epoch} has {self.count(epoch)} batches, no number {index}")
        plan, place = self._plan(epoch), index * self._world + self._rank
        if place >= plan.count:
            return []
        return plan.members[plan.starts[place] : plan.starts[place + 1]].tolist()

    def batch(self, epoch: int, index: int) -> Batch:
        """The batch of this number in this epoch."""
        members = self.members(epoch, index)
        if not members:
            return nothing(collate([self._examples[0]], self._pad_id), self._pad_id)
        return collate([self._examples[member] for member in members], self._pad_id)

    def place(self, index: int) -> tuple[int, int]:
        """(epoch, index in it) of a batch counted over all epochs. UsageError where there is no batch at all."""
        if not len(self._examples):
            raise UsageError("there is no example to make batches of")
        epoch = 0
        while index >= self.count(epoch):
            index -= self.count(epoch)
            epoch += 1
        return epoch, index

    def at(self, index: int) -> Batch:
        """The batch of this number, counted over all epochs."""
        return self.batch(*self.place(index))

    def _plan(self, epoch: int) -> Plan:
        if not self._shuffle:
            epoch = 0
        if epoch not in self._plans:
            examples = self._examples
            weights = examples.weights if self._shuffle else [1.0] * len(examples.weights)
            members = members_of_epoch(examples.starts, weights, self._seed, epoch)
            plan = plan_epoch(examples.lengths, members, self._budget, self._seed, epoch, self._shuffle)
            self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}  # this one and the one before
        return self._plans[epoch]
