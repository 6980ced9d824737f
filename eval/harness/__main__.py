"""`python -m dustin_hf.eval.harness`: lm_eval's own command line, which then knows `--model dustin`."""

import sys


def main() -> None:
    """Run lm_eval with this process's arguments; says which extra to install where it is missing."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import dustin_hf.eval.harness.model  # noqa: F401  # registers the name
    except ModuleNotFoundError as error:
        sys.exit(f"this needs {error.name}: pip install 'dustin_hf[lm-eval]'")
    cli_evaluate()


if __name__ == "__main__":
    main()
