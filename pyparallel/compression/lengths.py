"""Where messages must be of a length that both sides know beforehand."""

from .compressor import AttachPoint, Compressor


def problem_of_lengths(compressor: Compressor, place: AttachPoint) -> str | None:
    """Why messages whose lengths vary cannot serve at a place, as `Compressor.problem`."""
    if place in (AttachPoint.GOSSIP, AttachPoint.PIPELINE):
        return (
            f"compressor must make messages of one length where it serves {place.value}, which are "
            f"received into buffers made beforehand; got {compressor}"
        )
    return None
