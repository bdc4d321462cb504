"""The verb explain: why a gradient is missing, zero, not finite or not what its values say."""
