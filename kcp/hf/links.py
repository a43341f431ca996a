"""Files of a checkpoint folder stay in it: links that lead elsewhere are not followed."""

from pathlib import Path


def leads_outside(path: Path) -> bool:
    """Whether a file of a checkpoint folder is a link out of it.

    The snapshots of a Hugging Face cache are links to files of ``blobs`` beside ``snapshots``; those are followed.
    """
    folder, target = path.parent.resolve(), path.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    return not any(target.is_relative_to(place) for place in allowed)


def outside(path: Path) -> str:
    """What is wrong with such a link, in a line."""
    return f"{path}: a link to {path.resolve()}, a file of this folder is needed"
