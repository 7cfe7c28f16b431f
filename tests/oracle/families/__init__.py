"""Tiny checkpoints of every model family, in the form of its own repositories, and their outputs."""
