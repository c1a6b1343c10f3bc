"""Python's garbage collector in a process on whose answers others wait."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Take all that is alive now for permanent: the collector never looks through it again.

    Ray, torch and transformers leave some 400,000 objects. A full collection over these takes 0.2 s, in which the
    interpreter runs nothing else, no step either; for the same reason it comes so rarely that garbage in cycles, and
    the tensors that hang on it, would pile up meanwhile.
    """
    gc.collect()
    gc.freeze()
    # The next full collection comes when a quarter as much is new as the last one left, and freezing counts for none.
    gc.collect()


def forget_what_has_gone() -> None:
    """What was kept has been dropped in part, a checkpoint say: free that, cycles too, and keep the rest again.

    Takes as long as one full collection over everything.
    """
    gc.unfreeze()
    keep_what_is_loaded()
