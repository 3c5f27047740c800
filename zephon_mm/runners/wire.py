"""Messages between the trainer, the zygote and the workers: whole, or not there at all.

Laws:
    1. A message is one SOCK_SEQPACKET packet. The kernel queues it completely or not at all, so a
       SIGKILL at any instruction of the sender never leaves half a message.
    2. A payload above `INLINE_BYTES` is written to a memfd first, and the packet that carries the
       descriptor is the commit. A sender that dies before it leaves nothing behind: the kernel
       frees the memfd with its last descriptor. So no mailbox has to be shared, sized or reclaimed.
    3. At most two packets are under way in each direction, which is far below a socket's buffer: a
       sender blocks (or gets BlockingIOError) only when the other side broke the rules.

Cost: 4 us a small message there and back; a large one 15 us and a copy in and out (0.4 ms a MB).

Imports: nothing from the package. Used by: the other files of this package.
"""

import array
import os
import socket
from collections.abc import Sequence
from struct import Struct

INLINE_BYTES = 4096
"""Largest payload that travels inside a packet."""

REQUEST = Struct("<Q")
"""Header of a task: its number, from 1."""

REPLY = Struct("<QB")
"""Header of a reply: the task's number; 1 for a result, 0 for an exception."""

_PACKET_BYTES = 64 * 1024
_MAX_FDS = 2


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the trainer's end, which never blocks, and the other end, which does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def send(sock: socket.socket, parts: Sequence[bytes], fds: Sequence[int] = ()) -> None:
    """Send one packet; the receiver gets duplicates of `fds`, which stay the caller's.

    Raises:
        BlockingIOError: The other side does not read (only on a socket that never blocks).
        ConnectionError: The other side is gone.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg(parts, rights)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet with the descriptors in it, which become the caller's.

    The packet is empty at the end of the stream.

    Raises:
        BlockingIOError: There is none now (only on a socket that never blocks).
        OSError: The descriptors did not fit under this process's limit of open files.
    """
    room = socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize)
    while True:
        try:
            data, ancillary, flags, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            break
        except ConnectionResetError:
            # The peer died with a packet of ours unread. The kernel reports that once, ahead of
            # the packets which the peer had sent; those are complete and count.
            continue
    fds = array.array("i")
    for _, _, rights in ancillary:
        fds.frombytes(rights)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError("a descriptor was lost: too many open files. Raise `ulimit -n`.")
    return data, list(fds)


def post(sock: socket.socket, header: bytes, payload: bytes) -> None:
    """Send a header with a payload of any size.

    Raises:
        BlockingIOError: As for `send`.
        ConnectionError: As for `send`.
        OSError: There is no memory or no descriptor for a large payload.
    """
    if len(payload) <= INLINE_BYTES:
        send(sock, (header, payload))
        return
    fd = store(payload)
    try:
        send(sock, (header,), (fd,))
    finally:
        os.close(fd)


def collect(sock: socket.socket, header_bytes: int) -> tuple[bytes, bytes]:
    """Return the header and the payload of the next packet; both are empty at the end.

    Raises:
        BlockingIOError: As for `receive`.
        OSError: As for `receive`.
    """
    data, fds = receive(sock)
    if not fds:
        return data[:header_bytes], data[header_bytes:]
    with open(fds[0], "rb", buffering=0) as file:
        file.seek(0)
        return data[:header_bytes], file.readall()


def store(payload: bytes) -> int:
    """Return a new anonymous file that holds the payload."""
    fd = os.memfd_create("zephon-mm")
    try:
        rest = memoryview(payload)
        while rest:  # one write takes at most 2 GiB
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.close(fd)
        raise
    return fd
