"""`python -m rekindle.cli`."""

from rekindle.cli import main

main()
