"""What is wrong with a checkpoint folder."""

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint can't be read or written. ``problems`` holds one line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
