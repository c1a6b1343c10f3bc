"""The `ray-moe` command line, one module per verb group."""
