"""`python -m paceline` is the `paceline` command, for machines where the script is not on the path.

It owns nothing: commands, flags and exit codes live in `paceline.cli`.
"""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
