"""``areal-lite plan``: time, memory and disk of a run, measured on a few of its steps.

Promises that the measured run is the real one, in a temporary folder. Read plan (prediction), then probe (the run).
"""
