"""The code that is sent into the sandbox. It imports nothing but the standard library, lazily.

Start-up is paid for every program that is judged, so modules that take milliseconds to load (json,
ctypes, signal, typing, even __future__) are not used, and most annotations are left out, which
would need them.
"""
