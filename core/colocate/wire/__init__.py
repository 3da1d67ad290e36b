"""Send values as bytes in messages on authenticated sockets, with one thread for any number of connections."""

from colocate._definitions.codec import explain, pack, unpack
from colocate._definitions.packed import InArea, Packed
from colocate.wire._forks import track, track_socket
from colocate.wire.arriving import Arriving
from colocate.wire.event_loop import LOOPBACK, EventLoop, Listener, listen, listen_widely, listening_within
from colocate.wire.framing import HOLE, Area, Frame, Head, InFile, Message, encode, numbered
from colocate.wire.hello import KEY_BYTES, connect, new_key
from colocate.wire.lane import OnClosed, OnMessage, SocketLane
from colocate.wire.peer import PeerChannel
from colocate.wire.tls import CUT_AFTER_S, Tls, anew, cut_after, cut_here_after, hand_on, take_over
from colocate.wire.turns import Turns

__all__ = [
    "CUT_AFTER_S",
    "HOLE",
    "KEY_BYTES",
    "LOOPBACK",
    "Area",
    "Arriving",
    "EventLoop",
    "Frame",
    "Head",
    "InArea",
    "InFile",
    "Listener",
    "Message",
    "OnClosed",
    "OnMessage",
    "Packed",
    "PeerChannel",
    "SocketLane",
    "Tls",
    "Turns",
    "anew",
    "connect",
    "cut_after",
    "cut_here_after",
    "encode",
    "explain",
    "hand_on",
    "listen",
    "listen_widely",
    "listening_within",
    "new_key",
    "numbered",
    "pack",
    "take_over",
    "track",
    "track_socket",
    "unpack",
]
