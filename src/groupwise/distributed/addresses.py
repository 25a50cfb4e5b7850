"""The network interface through which processes of several machines reach each other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import psutil


def own_address(other: str) -> str:
    """The address at which other machines reach this one; a host name may resolve to 127.0.1.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))  # Chooses a route; nothing is sent.
        return probe.getsockname()[0]


def interface(address: str) -> str | None:
    """The network interface that has an address."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return name
    return None


def use_route(other: str) -> None:
    """Have `torch.distributed` use the interface that leads to a machine, unless
    `GLOO_SOCKET_IFNAME` names another one: by default it takes that of the host name."""
    with suppress(OSError):  # A name or an IPv6 address, which the default may know.
        if name := interface(own_address(other)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
