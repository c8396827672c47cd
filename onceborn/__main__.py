"""``python -m onceborn``."""

from .surfaces.cli import main

if __name__ == "__main__":
    main()
