"""Expert weights: read from a checkpoint, held in slots, named by digest."""
