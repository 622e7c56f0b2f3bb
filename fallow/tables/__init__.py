"""Papers' tables: their cells and published figures, runs of them, and what these came to."""
