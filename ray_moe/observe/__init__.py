"""What an operator sees: the status of a running cluster."""
