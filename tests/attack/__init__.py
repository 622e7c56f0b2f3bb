"""A standing attacker: seeded mutations of run folders, recipes, data files and command lines."""
