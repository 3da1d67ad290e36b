"""Send values as bytes in messages on authenticated sockets, with one thread for any number of connections."""

from colocate._definitions.codec import explain, pack, unpack
from colocate._definitions.packed import Packed, PackedInArea
from colocate.wire._forks import track, track_socket
from colocate.wire.arriving import IncomingBody
from colocate.wire.event_loop import LOOPBACK, EventLoop, Listener, listen, listen_everywhere, listen_in_range
from colocate.wire.framing import HOLE, FileBody, Frame, Head, Message, ReusableFile, encode, encode_numbered
from colocate.wire.hello import KEY_BYTES, connect, new_key
from colocate.wire.lane import OnClosed, OnMessage, SocketLane
from colocate.wire.peer import PeerChannel
from colocate.wire.tls import (
    CUT_AFTER_S,
    Tls,
    describe_handover,
    restart_tls,
    set_cut_timeout,
    set_default_cut,
    take_over,
)
from colocate.wire.turns import Turns

__all__ = [
    "CUT_AFTER_S",
    "HOLE",
    "KEY_BYTES",
    "LOOPBACK",
    "EventLoop",
    "FileBody",
    "Frame",
    "Head",
    "IncomingBody",
    "Listener",
    "Message",
    "OnClosed",
    "OnMessage",
    "Packed",
    "PackedInArea",
    "PeerChannel",
    "ReusableFile",
    "SocketLane",
    "Tls",
    "Turns",
    "connect",
    "describe_handover",
    "encode",
    "encode_numbered",
    "explain",
    "listen",
    "listen_everywhere",
    "listen_in_range",
    "new_key",
    "pack",
    "restart_tls",
    "set_cut_timeout",
    "set_default_cut",
    "take_over",
    "track",
    "track_socket",
    "unpack",
]
