//! Curves over the time of a run.
