"""``python -m qfuse``."""

from .cli import main

main()
