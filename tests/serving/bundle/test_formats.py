"""Row formats: each packs, unpacks, stays within its bound, and is known to the kernel."""

from unittest import mock

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from export.errors import QuantizeError
from export.rows.quantize import check_dim, quantize, torch_dtype
from export.rows.table_error import rounding_bounds
from serving.bundle.formats import CodeRows, FloatRows, Int8, WeightDtype, scales_and_biases_of
from serving.bundle.plan import COLUMN_MULTIPLE
from serving.bundle.tables import OutputDtype, Pooling
from serving.lookup.tbe_call import Segment, TbeCall
from tests.support import bundle_reader, oracle

every_dtype = pytest.mark.parametrize("dtype", WeightDtype, ids=lambda dtype: dtype.value)


@every_dtype
def test_dtypes_have_the_names_and_bits_of_fbgemm_s_sparse_types(dtype: WeightDtype) -> None:
    sparse_type = SparseType.from_int(dtype.format.sparse_type)
    assert (sparse_type.name, sparse_type.bit_rate()) == (dtype.value, dtype.format.bits)
    assert WeightDtype(dtype.value) is dtype


@every_dtype
@pytest.mark.parametrize("trained", [torch.float32, torch.float16])
@pytest.mark.parametrize("multiples", [1, 5])
def test_packed_rows_unpack_within_their_bound(dtype: WeightDtype, trained: torch.dtype, multiples: int) -> None:
    dim = 8 * multiples
    rows = (torch.randn(100, dim, generator=torch.Generator().manual_seed(dim)) * 3).to(trained)
    floats = rows.float().numpy()
    check_dim("t", dim, dtype)
    stored = quantize("t", 0, rows, dtype).numpy()
    assert stored.shape == (100, dtype.row_bytes(dim))
    numbers = dtype.format.dequantize(stored)
    np.testing.assert_array_equal(numbers, bundle_reader.unpacked(stored.tobytes(), 100, dim, dtype.value))
    error, bounds = np.abs(floats - numbers).max(axis=1), rounding_bounds(floats, stored, dtype)
    assert (error <= bounds).all()
    assert (bounds <= oracle.row_range_bound(floats, dtype.value) * 1.01).all()


@every_dtype
def test_header_is_scale_and_bias(dtype: WeightDtype) -> None:
    rows = torch.tensor([[-1.0, *[0.0] * 6, 2.0]])
    stored = quantize("t", 0, rows, dtype).numpy()
    if not isinstance(dtype.format, CodeRows):
        assert stored.shape[1] * 8 == 8 * dtype.format.bits
        return
    scale, bias = scales_and_biases_of(stored)[0]
    assert (scale, bias) == (np.float16(3 / dtype.format.largest_code), -1)


@every_dtype
def test_dims_that_fbgemm_cannot_pack_are_refused(dtype: WeightDtype) -> None:
    smallest = dtype.format.dim_multiple
    stored = quantize("t", 0, torch.zeros(1, smallest), dtype)
    assert stored.shape == (1, dtype.row_bytes(smallest))
    for dim in range(1, smallest):
        with pytest.raises(QuantizeError, match=f"a multiple of {smallest} for {dtype.value}, got {dim}"):
            check_dim("t", dim, dtype)


@every_dtype
def test_columns_are_cut_at_whole_bytes(dtype: WeightDtype) -> None:
    assert COLUMN_MULTIPLE * dtype.format.bits % 8 == 0


@every_dtype
def test_the_torch_dtype_is_that_of_an_element_or_of_a_byte(dtype: WeightDtype) -> None:
    assert torch_dtype(dtype).itemsize * 8 == max(8, dtype.format.bits)
    assert torch_dtype(dtype).is_floating_point is isinstance(dtype.format, FloatRows)


@every_dtype
def test_the_kernel_gets_the_widest_segment_of_each_dtype(dtype: WeightDtype) -> None:
    segments = [Segment(dtype, width, 0) for width in (8, 24, 16)]
    tbe = TbeCall(segments, Pooling.SUM, OutputDtype.FP32, row_alignment=1)
    schema = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default._schema
    with mock.patch.object(torch.ops.fbgemm, "int_nbit_split_embedding_codegen_lookup_function") as operator:
        tbe(torch.empty(0), torch.empty(0), torch.empty(0), None, None)
    names = [argument.name for argument in schema.arguments]
    arguments = dict(zip(names, operator.call_args.args, strict=False))
    assert arguments["row_alignment"] == 1
    assert arguments["weights_tys"].tolist() == [dtype.format.sparse_type] * 3
    widest = {name: width for name, width in arguments.items() if name.startswith("max_") and width}
    kind = "int" if isinstance(dtype.format, CodeRows) else "float"
    assert widest == {f"max_{kind}{dtype.format.bits}_D": 24}


def test_unknown_width_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8, "max_width_argument", "max_int9_D")
    with pytest.raises(KeyError, match="max_int9_D"):
        TbeCall([Segment(WeightDtype.INT8, 8, 0)], Pooling.SUM, OutputDtype.FP32, row_alignment=1)


@every_dtype
def test_the_kernel_reads_the_same_numbers_as_dequantize(dtype: WeightDtype) -> None:
    stored = quantize("t", 0, torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), dtype)
    tbe = torch.jit.script(TbeCall([Segment(dtype, 8, 0)], Pooling.SUM, OutputDtype.FP32, row_alignment=1))
    answer = tbe(stored.view(-1), torch.arange(16), torch.arange(17), None, None)
    np.testing.assert_allclose(answer.numpy(), dtype.format.dequantize(stored.numpy()), rtol=1e-6, atol=1e-6)
