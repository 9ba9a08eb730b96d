"""AReaL's statistics: the mean of each value over the accepted episodes of a step is the metric ``scope/name``."""

from dataclasses import dataclass
from areal_lite.api.episode_context import record_scalars


@dataclass(frozen=True, slots=True)
class StatsTracker:
    """Records values under a scope."""

    name: str = ""

    def scalar(self, **values: float) -> None:
        """Record numbers of the running episode; RuntimeError outside an episode."""
        prefix = f"{self.name.strip('/')}/" if self.name else ""
        record_scalars({prefix + key: value for key, value in values.items()})


get = StatsTracker
"""Returns the tracker of a scope; workflows use ``workflow_context.stat_scope()``."""

scalar = StatsTracker().scalar
