"""Live sequences, scheduling, sampling, events.

The types of its interface (`rekindle.engine.types`) load no torch, so nothing is imported here.
"""
