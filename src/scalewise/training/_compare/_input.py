"""The one exception for what a user handed in and can mend."""


class InputError(ValueError):
    """Something given can't be used; the message is one sentence that says what is accepted."""
