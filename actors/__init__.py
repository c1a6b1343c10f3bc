"""Ray actors: expert, routing, controller. They run what the pure modules decide."""
