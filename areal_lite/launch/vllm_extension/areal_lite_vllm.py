"""Runs inside vLLM's workers (``--worker-extension-cls areal_lite_vllm.WorkerExtension``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class WorkerExtension:
    """Adds a method to vLLM's workers."""

    def load_checkpoint_dir(self: Any, weights_path: str) -> dict[str, Any]:
        """Load a checkpoint folder into the running model; return errors instead of killing the engine."""
        try:
            folder = Path(weights_path)
            if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
                raise FileNotFoundError(f"{folder} is not a safetensors checkpoint")
            self.reload_weights(weights_path=weights_path)
            head = getattr(self.model_runner.get_model(), "lm_head", None)
            if head is not None and getattr(head, "quant_method", None) is not None:
                head.quant_method.process_weights_after_loading(head)  # tied heads are packed on CPUs
            return {"success": True, "message": ""}
        except Exception as error:
            return {"success": False, "message": f"{type(error).__name__}: {error}"}
