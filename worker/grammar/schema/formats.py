r"""Patterns of those formats of strings that xgrammar reads too widely.

xgrammar 0.2.8 allows 31 February, `01.2.3.4` and leap seconds at any minute, and in email addresses and JSON pointers
texts that are no valid JSON. The other formats that it knows stay with it. Formats that it does not know restrict nothing,
as JSON Schema has it.
"""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    f"|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]+)?(?:Z|[+\-]{_HOUR}:{_SIXTY})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_WORD, _LABEL = "[a-zA-Z0-9_!#$%&'*+/=?^`{|}~\\-]+", "[A-Za-z0-9](?:[A-Za-z0-9\\-]*[A-Za-z0-9])?"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

# RFC 3339, RFC 2673, RFC 5321 without quoted names, RFC 6901
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": _IPV4,
    "email": rf"{_WORD}(?:\.{_WORD})*@{_LABEL}(?:\.{_LABEL})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
