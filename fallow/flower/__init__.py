"""The same methods on real nodes. Flower carries the messages; this package needs it only where it meets Flower."""
