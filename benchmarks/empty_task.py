"""The empty task of isolation.py, in a module that takes no time to import."""


def run(payload: object, phase: object) -> dict[str, object]:
    return {}
