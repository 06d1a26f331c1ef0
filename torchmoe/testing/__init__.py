"""The public test kit: many ranks in one process or on gloo, fault injectors, tolerances that print the ratio.

:mod:`torchmoe.testing.strategies` (hypothesis) and :mod:`torchmoe.testing.oracle` are imported by name.
"""

from torchmoe.testing.faults import Fault, FaultyTransport, Killed
from torchmoe.testing.properties import Dispatcher, check_dispatcher
from torchmoe.testing.ranks import RankContext, RankFailure, RanksFailed, run_ranks
from torchmoe.testing.sim import Deadlock, SimHub, SimTransport
from torchmoe.testing.tolerance import assert_close_rel, relative_error

__all__ = [
    "Deadlock",
    "Dispatcher",
    "Fault",
    "FaultyTransport",
    "Killed",
    "RankContext",
    "RankFailure",
    "RanksFailed",
    "SimHub",
    "SimTransport",
    "assert_close_rel",
    "check_dispatcher",
    "relative_error",
    "run_ranks",
]
