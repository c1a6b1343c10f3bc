"""ray_moe: a Ray-based elastic expert-serving cluster for Mixture-of-Experts models."""

__version__ = "0.1.0"
