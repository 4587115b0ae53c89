"""Errors of the `tokenizers` package as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plait.errors import PlaitError, TokenizerError


@contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Turn what `tokenizers` raises over a bad file into a TokenizerError that begins with `what`.

    It raises plain Exception, and where it did not foresee the input its Rust code panics, which arrives as a
    BaseException of a class that cannot be imported.
    """
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise TokenizerError(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: tokenizers cannot read it ({error})") from None
