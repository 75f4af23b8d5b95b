"""Drafters: what proposes tokens that the target then verifies."""
