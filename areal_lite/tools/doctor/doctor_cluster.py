"""The check of ``areal-lite doctor`` on the nodes of a run with ``launch: ray``."""

from pathlib import Path
from tempfile import TemporaryDirectory
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.tools.doctor.doctor_machine import Findings, ok, warning

_CLOCK_S = 1.0
"""Difference of clocks that is worth a warning: times in dumps and metrics are each node's own."""


def cluster_findings(config: ExperimentConfig) -> Findings:
    """Reserve all that the run wants, compare the nodes, and look at folder, clock and a port of each."""
    if config.launch != "ray":
        return
    from areal_lite.cluster.ray_places import bundles_of, rank_bundles, ray_places
    from areal_lite.cluster.ray_session import check_ray

    check_ray(config.ray)
    bundles = [*rank_bundles(config), *bundles_of(config)]
    with TemporaryDirectory() as logs, ray_places(config, Path(logs), bundles) as places:
        yield ok(f"Ray at {places.address} has all that the run wants, with the code and the model of this machine")
        blind = places.blind(Path(config.fileroot)) if Path(config.fileroot).is_dir() else []
        for role, place in places.items():
            host, port = place.listen_at("", 0)
            ahead, sight = place.clock_s(), "does not see" if place.host in blind else "sees"
            text = f"{role}: node {host} {sight} {config.fileroot}, port {port} is free, clock {ahead:+.1f} s"
            yield warning(f"{text}: set the clocks") if abs(ahead) > _CLOCK_S else ok(text)
