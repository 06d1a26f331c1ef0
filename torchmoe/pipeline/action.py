"""The schedule's language: one list of actions per group, in torch's text grammar extended by an edge name.

``2F0`` is the forward of unit 2 on micro-batch 0; ``3B1`` its full backward; ``3I1``/``3W1`` input and weight gradients.
A lowered schedule also says every message: ``2SEND_F0:dispatch`` starts a send of unit 2, ``3RECV_F0:dispatch`` posts the
receive at unit 3, ``3WAIT_F0:dispatch`` waits for it. The unit named is the one that acts; F and B say the direction.

Units: 2l is the attention of MoE layer l, 2l + 1 its experts, 2L the head (forward, loss and backward as one action ``F``
followed by a ``B`` that only sends).

Two more forms: torch's ``(0F3;7B1)OVERLAP_F_B``, two computations that overlap, and ``3F0:chunk.1``, a part of a computation
(colocated schedules with chunked all-to-alls).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torchmoe.errors import ScheduleError

__all__ = ["BACKWARD", "COMPUTE", "MESSAGE", "Action", "Op", "Schedule"]


class Op(StrEnum):
    """What an action does. The names are torch.distributed.pipelining's, plus WAIT_F and WAIT_B."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    WAIT_F = "WAIT_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_B = "WAIT_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
BACKWARD = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
MESSAGE = frozenset({Op.SEND_F, Op.RECV_F, Op.WAIT_F, Op.SEND_B, Op.RECV_B, Op.WAIT_B})
_PATTERN = re.compile(
    r"(\d+)(F|B|I|W|SEND_F|RECV_F|WAIT_F|SEND_B|RECV_B|WAIT_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d*)(?::([A-Za-z_][\w.>-]*))?"
)


class Action(NamedTuple):
    """One step of a group: unit ``stage``, what, which micro-batch, and for messages which edge.

    ``sub`` holds the two computations of an ``OVERLAP_F_B``; it is empty otherwise.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    edge: str | None = None
    sub: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.sub:
            return f"({';'.join(map(str, self.sub))}){self.op.value}"
        mb = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.stage}{self.op.value}{mb}" + (f":{self.edge}" if self.edge else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action, e.g. ``12SEND_B3:d_combine``.

        Raises:
            ScheduleError: the text is not an action.
        """
        text = text.strip()
        if text.endswith(")" + Op.OVERLAP_F_B.value) and text.startswith("("):
            sub = tuple(cls.parse(part) for part in text[1 : text.rindex(")")].split(";"))
            if not all(a.is_compute for a in sub):
                raise ScheduleError(f"{text!r} overlaps {', '.join(map(str, sub))}; only computations (F, B, I, W) can overlap")
            return cls(sub[0].stage, Op.OVERLAP_F_B, None, None, sub)
        m = _PATTERN.fullmatch(text)
        if m is None:
            raise ScheduleError(f"{text!r} is not an action; write e.g. 2F0, 3B1 or 2SEND_F0:dispatch")
        stage, op, mb, edge = m.groups()
        return cls(int(stage), Op(op), int(mb) if mb else None, edge)

    @property
    def is_compute(self) -> bool:
        return self.op in COMPUTE

    @property
    def parts(self) -> tuple[Action, ...]:
        """The computations of an overlapped pair, or the action itself."""
        return self.sub or (self,)


@dataclass(frozen=True)
class Schedule:
    """Action lists by group name (``A0``, ``F1``; a plain pipeline uses ``0``, ``1``, ...), every rank of a group runs its list.

    Args:
        lists: group -> its actions in order.
        num_microbatches: micro-batches of one step.
        lowered: whether messages are explicit.
        forward_only: a validation schedule, without backward.
    """

    lists: Mapping[str, tuple[Action, ...]]
    num_microbatches: int
    lowered: bool = False
    forward_only: bool = False

    def __eq__(self, other: object) -> bool:
        """Equal lists are equal schedules, whether a generator made them or a file."""
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, theirs = ((s.lists, s.num_microbatches, s.lowered, s.forward_only) for s in (self, other))
        return mine == theirs

    def dump(self) -> str:
        """CSV: one row a group, the group's name first when it is not its row number."""
        rows = []
        for i, (group, actions) in enumerate(self.lists.items()):
            head = [] if group == str(i) else [f"{group}="]
            rows.append(",".join([*head, *map(str, actions)]))
        return "\n".join(rows) + "\n"

    @classmethod
    def load(cls, text: str) -> Schedule:
        """Read what :meth:`dump` wrote, or a CSV of torch.distributed.pipelining (one row a rank; empty cells are idle).

        Raises:
            ScheduleError: a cell that is no action, a group named twice, or no action at all.
        """
        lists: dict[str, tuple[Action, ...]] = {}
        for i, row in enumerate(line for line in text.splitlines() if line.strip()):
            cells: Sequence[str] = [c.strip() for c in row.split(",")]
            name = str(i)
            if cells[0].endswith("="):
                name, cells = cells[0][:-1], cells[1:]
            if name in lists:
                raise ScheduleError(f"group {name} has two rows; give each group one row")
            lists[name] = tuple(Action.parse(c) for c in cells if c)
        actions = [part for acts in lists.values() for a in acts for part in a.parts]
        if not actions:
            raise ScheduleError("the schedule has no action; give one row of actions per group")
        n = 1 + max((a.microbatch for a in actions if a.microbatch is not None), default=-1)
        return cls(
            lists,
            n,
            lowered=any(a.op in MESSAGE for a in actions),
            forward_only=not any(a.op in BACKWARD for a in actions),
        )
