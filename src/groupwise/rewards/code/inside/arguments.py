"""Changes that a call makes to the containers that a test passes to it, as the test sees them.

Both sides list the same containers in the same order: the judge those of the test, the program's
process its copies of them.
"""

from groupwise.rewards.code.inside.codec import is_dict, is_in_stdlib

_FILLED = (list, dict, set, bytearray)
_SCALARS = {type(None), bool, int, float, complex, str, bytes}


def changeable(value) -> bool:
    """Whether a value is a container whose content may change."""
    kind = type(value)
    return kind in _FILLED or is_dict(kind) or _is_deque(kind)


def _is_deque(kind) -> bool:
    return kind.__name__ == "deque" and is_in_stdlib(kind)


def containers(values, sent=lambda _: True) -> list:
    """The containers in some values whose content may change, the outer ones first; those in
    tuples only where `sent(class)` says that the other side has them too."""
    found = []
    for value in values:
        if type(value) in _SCALARS:
            continue
        if changeable(value):
            found.append(value)
            if isinstance(value, dict):
                found += containers(value.values(), sent)
            elif type(value) not in (set, bytearray):
                found += containers(value, sent)
        elif isinstance(value, tuple) and sent(type(value)):
            found += containers(tuple.__iter__(value), sent)
    return found


def given(args, named, sent) -> tuple[list, list]:
    """The arguments of a call that are such containers or have some inside, and all of these but
    for those in tuples that stay with the program: its own code may change them at any time."""
    values = (*args, *named.values())
    return [value for value in values if containers((value,))], containers(values, sent)


def write_back(arguments, changed) -> None:
    """Give the containers of a call the contents that the program left in them; those inside them
    stay the objects that they are, so that other names for them see the change."""
    for mine, theirs in zip(arguments, changed or (), strict=False):
        merged(mine, theirs)


def merged(mine, theirs):
    """The value of the test with the content of the program's, if both are containers of one type,
    else the program's."""
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        parts = [merged(*pair) for pair in zip(mine, theirs, strict=False)]
        same = len(mine) == len(theirs) and all(map(_same, mine, parts))
        return mine if same else theirs
    if type(mine) is not type(theirs) or not changeable(mine):
        return theirs
    fill(mine, theirs)
    return mine


def _same(mine, part) -> bool:
    return mine is part or (type(mine) is type(part) and type(mine) in _SCALARS and mine == part)


def fill(mine, theirs) -> None:
    """Give a container the contents of another of its type."""
    if isinstance(mine, dict):
        kept = {
            key: merged(mine[key], value) if key in mine else value for key, value in theirs.items()
        }
        mine.clear()
        for key, value in kept.items():
            mine[key] = value
    elif isinstance(mine, set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, bytearray):
        mine[:] = theirs
    else:
        both = [merged(*pair) for pair in zip(mine, theirs, strict=False)]
        both += list(theirs)[len(both) :]
        mine.clear()
        mine.extend(both)
