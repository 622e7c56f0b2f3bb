"""The recipes of papers, and how recipes are read: the keys of a run, or of a table with rows and cells."""
