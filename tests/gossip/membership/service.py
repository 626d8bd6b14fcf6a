"""A membership service of a user's own: an object in one process that others call."""

import socket
from contextlib import closing
from multiprocessing.managers import BaseManager
from threading import Condition, Thread

from pyparallel.gossip.membership import Membership

_KEY = b"tests"


class Service:
    """Collects the texts of all that are alive, and returns them together."""

    def __init__(self):
        self.changed = Condition()
        self.alive, self.texts, self.answers = set(), {}, {}

    def join(self, identity):
        with self.changed:
            self.alive.add(identity)

    def leave(self, identity):
        with self.changed:
            self.alive.discard(identity)
            self.texts.pop(identity, None)
            self._answer()
            self.changed.notify_all()

    def poll(self, identity, text):
        with self.changed:
            if identity not in self.alive:
                return None
            self.texts[identity] = text
            self._answer()
            is_over = lambda: identity in self.answers or identity not in self.alive  # noqa: E731
            self.changed.wait_for(is_over, 10)
            return self.answers.pop(identity, None)

    def _answer(self):
        if self.texts and self.alive == self.texts.keys():
            texts, self.texts = self.texts, {}
            self.answers.update(dict.fromkeys(texts, texts))
            self.changed.notify_all()


class _Server(BaseManager):
    pass


class _Client(BaseManager):
    pass


_Client.register("service")


def serve():
    """Start the service in a thread of this process; return its address."""
    service = Service()
    _Server.register("service", callable=lambda: service, exposed=("join", "leave", "poll"))
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = free.getsockname()
    server = _Server(address, _KEY).get_server()
    Thread(target=server.serve_forever, daemon=True).start()
    return address


class Served(Membership):
    """Membership by the service; ``die`` is what its failure detector would see."""

    def __init__(self, address, name, **options):
        self.address, self.changes = address, []
        super().__init__(name, **{"on_change": self.changes.append} | options)

    def open(self, identity):
        manager = _Client(self.address, _KEY)
        manager.connect()
        self.service, self.identity = manager.service(), identity
        self.service.join(identity)
        return "127.0.0.1"

    def poll(self, text):
        return self.service.poll(self.identity, text)

    def close(self):
        self.die()

    def die(self):
        self.service.leave(self.identity)
