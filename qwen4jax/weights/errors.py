"""What a checkpoint that cannot be loaded raises."""

from collections.abc import Iterable

_SHOWN = 40


class CheckpointError(ValueError):
    """A checkpoint that does not hold the model its configuration names.

    Attributes:
        problems: everything that was found, one line each; the message shows the first of them.
    """

    def __init__(self, where: object, problems: Iterable[str]):
        self.problems = tuple(problems)
        shown = self.problems[:_SHOWN]
        hidden = len(self.problems) - len(shown)
        if len(self.problems) == 1:
            message = f"{where}: {self.problems[0]}"
        else:
            lines = [f"{where}: {len(self.problems)} problems", *shown]
            if hidden:
                lines.append(f"... and {hidden} more (all in the exception's `problems`)")
            message = "\n  ".join(lines)
        super().__init__(message)
