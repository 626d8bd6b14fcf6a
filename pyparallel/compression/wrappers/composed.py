"""Base class of compressors made of others."""

import abc

from typing_extensions import override

from ..compressor import AttachPoint, Compressor


class Composed(Compressor):
    """A compressor made of others, which can do what all of them can."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Compressor, ...]:
        """The others, in order."""

    @property
    @override
    def unbiased(self) -> bool:
        return all(part.unbiased for part in self.parts)

    @property
    @override
    def fixed_length(self) -> bool:
        return all(part.fixed_length for part in self.parts)

    @property
    @override
    def feeds_back(self) -> bool:
        return any(part.feeds_back for part in self.parts)

    @property
    @override
    def takes_residual(self) -> bool:
        return all(part.takes_residual for part in self.parts)

    @override
    def error_at(self, place: AttachPoint) -> str | None:
        if place in self.refusals:
            return super().error_at(place)
        return next(filter(None, (part.error_at(place) for part in self.parts)), None)
