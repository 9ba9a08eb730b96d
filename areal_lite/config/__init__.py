"""The sections of a run's YAML, and how a file becomes them.

Promises that an unknown key, a wrong type or two keys that contradict each other is one error with file, key, rule and
fix, before anything is started. May import ``errors`` and ``files``; everything else may import it. Read run_config,
the sections (rollout_config, trainer_config, ...) and rules; then loader for the way in, and dump for the way out.
"""
