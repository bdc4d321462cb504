"""Why a gradient is None, zero, NaN or wrong: the path of the data, the cause, the line and the fix."""
