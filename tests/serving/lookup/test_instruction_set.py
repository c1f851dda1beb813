"""What is said of FBGEMM's kernels, on processors of other kinds."""

from pathlib import Path

import pytest

from serving.lookup.instruction_set import instruction_set, slow_kernels
from serving.lookup.program import load_fbgemm


@pytest.mark.parametrize(
    ("flags", "vector"),
    [
        pytest.param("flags\t\t: fpu sse4_2 avx avx2 bmi2", "avx2", id="AVX2"),
        pytest.param("Features\t: fp asimd sve i8mm", "sve", id="SVE"),
        pytest.param("flags\t\t: fpu sse4_2 avx", None, id="a processor before AVX2"),
        pytest.param("Features\t: fp asimd", None, id="NEON alone"),
    ],
)
def test_reference_kernels_count_as_slow_only_with_vector_instructions(
    tmp_path: Path, flags: str, vector: str | None
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\nbugs\t\t: avx2_errata\n")
    advice = slow_kernels("anyarch", cpuinfo)
    assert (advice is None) == (vector is None)
    if vector is not None:
        assert f"this processor's {vector}" in str(advice)
        assert "put `import serving` before" in str(advice)


@pytest.mark.parametrize("chosen", ["avx2", "avx512_vnni", "sve", "9", "unknown"])
def test_other_kernels_do_not_count_as_slow(chosen: str) -> None:
    assert slow_kernels(chosen) is None


def test_an_unknown_processor_causes_no_warning(tmp_path: Path) -> None:
    assert slow_kernels("anyarch", tmp_path / "none") is None


def test_fbgemm_says_its_instruction_set() -> None:
    load_fbgemm()
    assert instruction_set() not in {"unknown", ""}
