"""Effects in a SQL database, exactly once: the response is recorded in the transaction that makes the effect.

`table` defines the table and reads it, `effects` has what users call, and `block` is the one-step form. Nothing here
uses Redis: the code needs only the reservation's row, fingerprint and generation.
"""

try:
    import sqlalchemy as _sqlalchemy  # noqa: F401  # here, so that the error names the extra
except ImportError as missing:
    raise ImportError(f"idemredis.sql needs {missing.name}; run pip install 'idemredis[sql]'") from None

from ..errors import EffectDone
from .block import EffectBlock
from .effects import Effects

__all__ = ["EffectBlock", "EffectDone", "Effects"]
