"""Images: their canonical form, files, processors, and tokens in prompts; positions of Qwen's rotary embedding.

Promises that an image is expanded to its tokens once and is a span from there on, and that its pixels are equal to the
bit wherever they are read. Read canonical_image, image_encoder (messages to spans), image_processor, rope_positions;
for training loops of your own, multimodal (rows to the processor's tensors) and qwen2_5_vlm_packer. Imports
``data.chat`` and ``data.packer``; called by agents, servers and the embedded server.
"""
