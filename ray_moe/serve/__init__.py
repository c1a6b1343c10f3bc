"""The OpenAI-compatible HTTP front door, a Ray Serve deployment."""
