"""Recording: what ran in the forward, as values and operations that can be run again."""
