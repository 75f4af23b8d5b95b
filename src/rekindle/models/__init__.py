"""Families of models: which files are theirs, how their numbers are read, which mixers their layers have. No torch."""
