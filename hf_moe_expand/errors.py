"""The one exception that means: the input was wrong, and the message says what, where and what to do."""


class InputError(ValueError):
    """Wrong input. The command line prints its message without a traceback."""
