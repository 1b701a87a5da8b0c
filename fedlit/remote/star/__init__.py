"""Star: the transport of a server with sites around it, which may drop out and come back.

All processes go through the same steps, numbered from 1: a step is a meeting, or a swap of messages. In each a site
makes one call over its carrier (none in a swap in which it has no part), and the reply ends the step for it. A call
that breaks off is made again; the server knows what it has received, and sends its reply again. Messages between sites
pass through the server.
"""

from fedlit.remote.star.framing import PROTOCOL
from fedlit.remote.star.server import ServerStar
from fedlit.remote.star.site import DismissedError, ServerLostError, SiteStar

__all__ = ["PROTOCOL", "DismissedError", "ServerLostError", "ServerStar", "SiteStar"]
