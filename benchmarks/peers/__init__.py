"""Other loaders beside zephon_mm, in one run, on the same samples: see `__main__`."""
