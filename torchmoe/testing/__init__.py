"""The public test kit: many ranks in one process or on gloo, a rendezvous transport that proves deadlocks."""

from torchmoe.testing.ranks import RankContext, RankFailure, RanksFailed, run_ranks
from torchmoe.testing.sim import Deadlock, SimHub, SimTransport

__all__ = ["Deadlock", "RankContext", "RankFailure", "RanksFailed", "SimHub", "SimTransport", "run_ranks"]
