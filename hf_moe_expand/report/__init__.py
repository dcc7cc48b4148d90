"""The page of a run, and what `inspect` says."""
