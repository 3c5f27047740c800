"""Operators, one a file: accumulators that see metadata, and stateless ops that run in workers."""
