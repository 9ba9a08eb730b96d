"""The learning side: a batch in, a new policy version and its metrics out. Loads torch.

Promises that no result depends on how a step is cut into micro-batches or over ranks, and that a non-finite update is
never applied. May import ``models``, ``data`` and what is below; called by ``runs`` and ``tools``. Read
``rl/policy_trainer``, learner, ``forward/``, then the arithmetic in ``estimators/`` and ``objectives/``.
"""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal.names import missing_name

        raise missing_name(__name__, name)
