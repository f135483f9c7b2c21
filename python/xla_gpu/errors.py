"""The exceptions of the package, for ``except`` clauses."""

from ._errors import CompatibilityError as CompatibilityError
from ._errors import HandlerError as HandlerError
from ._errors import LibraryError as LibraryError
from ._errors import TargetError as TargetError
