"""Training, sweeping and comparing: everything that is done with variants."""
