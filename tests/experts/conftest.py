"""Triton runs in its interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
