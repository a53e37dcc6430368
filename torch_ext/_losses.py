"""What a state loses where the policy keeps less of it than was saved: said once for each load."""

import warnings

_SHOWN = 4


class Losses:
    """Collects them, by parameter."""

    def __init__(self) -> None:
        self._rounded: dict[str, list[str]] = {}
        self._dropped: list[str] = []
        self._seeded: list[str] = []

    def rounded(self, key: str, name: str) -> None:
        """Of some element something was rounded off."""
        self._rounded.setdefault(key, []).append(name)

    def dropped(self, name: str) -> None:
        """The parameter has no master, and the saved one is more than its weight can hold."""
        self._dropped.append(name)

    def seeded(self, name: str) -> None:
        """The parameter has a master, and none was saved."""
        self._seeded.append(name)

    def warn(self) -> None:
        """One warning, where there is something to say."""
        said = [
            f"{key} of {_all(names)} was saved in more bits than the policy keeps, and is rounded to those"
            for key, names in self._rounded.items()
        ]
        if self._dropped:
            said.append(f"master_param of {_all(self._dropped)} is dropped: the policy keeps the weight only")
        if self._seeded:
            said.append(f"there is no master_param of {_all(self._seeded)}: the weight is its master from now on")
        if said:
            warnings.warn(f"torch_ext: of the loaded state {'; '.join(said)}", stacklevel=2)


def _all(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
