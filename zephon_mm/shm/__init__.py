"""Shared memory: the arena that leases slabs, and the byte layout of a batch inside one."""
