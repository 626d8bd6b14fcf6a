import pytest
import torch

from pyparallel.compression import Collectives, CorruptMessageError
from pyparallel.compression.corrupt_messages import (
    raise_if_any_corrupt,
    refusing_corrupt,
    with_sender,
)


def test_an_op_s_error_about_a_message_is_quoted():
    raises = pytest.raises(
        CorruptMessageError, match=r"from rank 3 \(scales are odd\): discard this"
    )
    with raises, with_sender(3), refusing_corrupt():
        raise RuntimeError("scales are odd\nat some place in a file")


def test_other_errors_are_left_alone():
    with pytest.raises(torch.OutOfMemoryError), refusing_corrupt():
        raise torch.OutOfMemoryError("none left")
    with pytest.raises(TypeError, match="odd"), with_sender(3), refusing_corrupt():
        raise TypeError("odd")


def find_out(rank):
    collectives = Collectives()
    raise_if_any_corrupt(None, collectives)
    try:
        raise_if_any_corrupt(2 if rank == 0 else None, collectives)
    except CorruptMessageError as error:
        return str(error)


def test_all_ranks_raise(ranks):
    sentences = ranks.run(3, find_out)
    assert len(set(sentences)) == 1
    assert "a corrupt one from rank 2" in sentences[0]
