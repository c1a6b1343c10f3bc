"""Pure decisions: which generation is live, where experts live. No torch, no Ray."""
