"""Metrics and profiles of a run.

run_metrics has the metrics of engine and episodes; profiling writes traces and memory snapshots of chosen steps, also
of one that fails. Called by the runs of the room above; where metrics are written is in ``trainer/metrics.py``.
"""
