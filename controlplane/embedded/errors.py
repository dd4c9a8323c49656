"""The errors that a person at the terminal is meant to read."""


class CannotStart(Exception):
    """Why the launcher cannot go on, in one sentence that names what was wrong and what would be right."""
