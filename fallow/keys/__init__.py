"""The keys of a run, in groups: what a part has stands in a file of its own; `fallow/config.py` puts them together."""
