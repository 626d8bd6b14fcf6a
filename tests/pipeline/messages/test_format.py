import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.pipeline.messages import tensors_of
from pyparallel.pipeline.messages.format import (
    HEADER_BYTES,
    HEADER_WORDS,
    BatchMeta,
    Header,
    Refusal,
    RefusalKind,
    describe,
    has_arrived,
    new_header,
    read_header,
)
from pyparallel.pipeline.messages.packing import pack, pack_behind, unpack
from tests.pipeline.messages.headers import write_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, shape).to(dtype)
    if draw(st.booleans()) and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


def send_and_receive(value):
    header = Header(3, 7, 11, describe(value), isinstance(value, torch.Tensor))
    payload = pack(value)
    assert payload.numel() == header.num_bytes
    message = header.to_tensor(header.num_bytes)
    assert message.nbytes == HEADER_BYTES + header.num_bytes
    pack_behind(message, value)
    arrived = read_header(message)
    assert arrived == header
    behind = unpack(message, arrived, HEADER_BYTES)
    found = unpack(payload.clone(), arrived)
    for left, right in zip(tensors_of(behind), tensors_of(found), strict=True):
        assert torch.equal(left, right)
        assert (left.dtype, left.requires_grad) == (right.dtype, right.requires_grad)
    return found


@given(st.lists(tensors(), max_size=5).map(tuple))
def test_a_tuple_is_received_as_sent(value):
    arrived = send_and_receive(value)
    assert isinstance(arrived, tuple)
    assert len(arrived) == len(value)
    for left, right in zip(value, arrived, strict=True):
        assert torch.equal(left, right)
        assert (left.dtype, left.requires_grad) == (right.dtype, right.requires_grad)


@given(tensors())
def test_a_tensor_is_received_as_sent(value):
    arrived = send_and_receive(value)
    assert isinstance(arrived, torch.Tensor)
    assert torch.equal(value, arrived)


def test_an_aligned_contiguous_tensor_is_packed_without_a_copy():
    value = torch.randn(4, 16)
    assert pack(value).data_ptr() == value.data_ptr()
    assert pack(value.t()).data_ptr() != value.data_ptr()


def test_received_tensors_are_leaves_that_accumulate_gradients():
    (arrived,) = tensors_of(send_and_receive(torch.randn(3, requires_grad=True)))
    arrived.square().sum().backward()
    assert torch.equal(arrived.grad, 2 * arrived)


def test_a_refusal_is_received_as_sent_and_cut_to_a_header():
    for kind in RefusalKind:
        header = Header(3, 7, 11, refusal=Refusal(kind, "rank 0: b\u00e4d inputs"))
        assert read_header(header.to_tensor()) == header
    batch = BatchMeta(3, 8, has_short_form=True, target=-0.1)
    assert read_header(Header(3, 7, 11, batch=batch).to_tensor()).batch == batch
    for refusal in (None, Refusal(RefusalKind.EMPTY, "")):
        assert read_header(Header(3, 7, 11, refusal=refusal, loss=0.1).to_tensor()).loss == 0.1
    long = Header(3, 7, 11, refusal=Refusal(RefusalKind.TYPE, "x" * HEADER_BYTES))
    assert read_header(long.to_tensor()).refusal.text == "x" * (HEADER_BYTES - 136)


def test_a_new_header_has_not_arrived_until_it_is_written():
    header = new_header(capacity=128)
    assert header.nbytes == HEADER_BYTES + 128
    assert not has_arrived(header)
    sent = Header(2, 5, 1).to_tensor()
    header[: len(sent)] = sent
    assert has_arrived(header)
    assert read_header(header) == Header(2, 5, 1)


def test_a_failure_is_cut_to_the_room_of_a_header():
    for text in ("stage 1 failed: ü", "", "x" * 5000):
        header = read_header(Header(0, 0, 0, failure=text).to_tensor())
        assert header.failure == text[: 8 * (HEADER_WORDS - 17)]


def test_unsupported_dtypes_and_too_many_tensors_are_refused():
    sub_byte = Header(0, 0, 0, describe(torch.empty(2).to(torch.float8_e4m3fn)))
    with pytest.raises(ValueError, match="must be of a plain dtype, got torch"):
        sub_byte.to_tensor()
    with pytest.raises(ValueError, match="must have at most about 20 tensors, got 60"):
        Header(0, 0, 0, describe(tuple(torch.ones(60, 1)))).to_tensor()


MALFORMED = {  # index of a word of a header of one float32 (2, 3), and what it is instead
    "count": (3, [2, 9, 2**40, 2**62, -9, -(2**63)]),
    "via host": (4, [-1, 2, 2**40]),
    "dtype": (11, [-1, 12, 2**40, -(2**63)]),
    "differentiable": (12, [-1, 2]),
    "dimensions": (13, [-1, 124, 2**40]),
    "size": (14, [-1, 2**40, 2**62]),
}


def test_every_changed_word_is_a_wrong_checksum():
    for index in range(HEADER_WORDS):
        for flipped in (1, 2**40, -(2**63)):
            header = Header(3, 7, 11, describe(torch.ones(2, 3)), single=True).to_tensor()
            header[index] ^= flipped
            with pytest.raises(ValueError, match=r"^a wrong checksum$"):
                read_header(header)


def test_malformed_headers_are_refused(subtests):
    for name, (index, words) in MALFORMED.items():
        for word in words:
            with subtests.test(name, word=word):
                header = Header(3, 7, 11, describe(torch.ones(2, 3)), single=True).to_tensor()
                header[index] = word
                with pytest.raises(ValueError, match=r"^a wrong checksum$"):
                    read_header(header)
                write_checksum(header)
                if (name, word) == ("count", 2):  # a tuple of one
                    assert read_header(header).tensors
                    continue
                with pytest.raises(ValueError, match="a "):
                    read_header(header)
    integers = Header(3, 7, 11, describe(torch.ones(2, dtype=torch.int64))).to_tensor()
    integers[12] = 1
    write_checksum(integers)
    with pytest.raises(ValueError, match=r"a tensor of torch\.int64 that requires a gradient"):
        read_header(integers)


def test_conjugate_and_negative_views_are_resolved():
    value = torch.randn(8, 8, dtype=torch.complex64).conj()
    for view in (value, value.imag):
        header = Header(0, 0, 0, describe(view), single=True)
        assert torch.equal(unpack(pack(view), header), view)
        message = header.to_tensor(header.num_bytes)
        pack_behind(message, view)
        assert torch.equal(unpack(message, header, HEADER_BYTES), view)
