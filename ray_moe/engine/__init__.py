"""The trunk and what keeps it busy: scheduler, paged KV cache, sampling, lockstep loop."""
