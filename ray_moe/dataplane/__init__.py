"""The hot path: routes to plan, dispatch, experts, combine. Read `layer.py` first."""
