"""Position schemes behind the contract of `variants.positions.contract`."""
