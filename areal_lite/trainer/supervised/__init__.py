"""Training on items with a known loss: SFT, preferences (DPO) and reward models.

Promises that loss and gradients do not depend on the cut. May import ``learner``, ``forward/``, ``objectives/`` and the
cut of ``rl/step_tokens``; called by ``runs``. Read supervised_trainer, then preference_trainer.
"""
