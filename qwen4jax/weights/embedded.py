"""Where the checkpoint that comes with the package lies."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
# a wheel holds it in the package, a checkout of the sources beside it
_PLACES = (_PACKAGE / "tiny", _PACKAGE.parent / "checkpoints" / "tiny")


def embedded_checkpoint() -> Path:
    """Directory of the small trained checkpoint that comes with the package.

    It has every mechanism of the model, and continues Python; its README says how it was made.

    Raises:
        FileNotFoundError: it is in neither of its places.
    """
    for place in _PLACES:
        if (place / "config.json").is_file():
            return place
    looked = " or ".join(str(place) for place in _PLACES)
    raise FileNotFoundError(
        f"the checkpoint that comes with the package is missing: no config.json in {looked}; "
        "install the package again, or pass the directory of another checkpoint"
    )
