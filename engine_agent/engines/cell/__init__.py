"""What cells of every engine share; only the standard library, as engine processes have environments of their own."""
