"""Process groups of one epoch, the transports over them, and the step agreement."""
