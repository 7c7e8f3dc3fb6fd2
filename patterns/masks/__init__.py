"""What an attn_mask says, proven from its graph."""
