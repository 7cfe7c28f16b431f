"""Tiny checkpoints of every model family, as their own repositories spell them, and what they answer."""
