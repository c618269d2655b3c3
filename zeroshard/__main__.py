"""`python -m zeroshard` is the command `zeroshard`."""

from .cli import main

if __name__ == "__main__":
    main()
