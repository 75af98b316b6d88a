"""``python -m anyaccel`` is the command ``anyaccel``."""

from anyaccel.cli import program

if __name__ == "__main__":
    program()
