"""Rekindle: a local LLM server for hybrid models."""

__version__ = "0.1.0"
