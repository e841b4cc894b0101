"""The border between scheduler and engine: the plan of a step, its result, and the engine that runs it."""
