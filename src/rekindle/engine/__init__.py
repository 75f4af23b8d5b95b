"""Live sequences, scheduling, sampling, events.

The types that cross the room's door (`rekindle.engine.types`) load no torch, so nothing is imported here.
"""
