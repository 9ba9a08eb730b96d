"""Images in prompts: placeholders expanded, pixels processed, positions of Qwen's rotary embedding.

For training loops of your own: a run takes no images, and imports nothing from here. Promises one placeholder for each
image, in order. Read multimodal (rows to the processor's tensors), rope_positions, qwen2_5_vlm_packer. Imports
``data.chat`` and ``data.packer``; called by ``data.rows.rl_dataset``.
"""
