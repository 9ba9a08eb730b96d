"""Images in prompts: placeholders expanded, pixels processed, positions of Qwen's rotary embedding."""
