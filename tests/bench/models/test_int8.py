"""The report of the bench, on figures that are known. The engines themselves run in the bench."""

from pathlib import Path

from bench.models.int8 import GOLDEN, MARK, PAGE, PROMPTS, Measured, Variant, rows, shared_start


def test_a_variant_is_compared_with_the_float_weights_of_its_engine(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"0" * 2**20)
    variants = [Variant("llama-cpp", "F32", tmp_path), Variant("llama-cpp", "Q8_0", tmp_path)]
    right = [f" {GOLDEN.get(prompt, '')} and so on" for prompt in PROMPTS]
    wrong = [" nothing", *right[1:]]
    found = [Measured(texts, [30.0, 10.0, 20.0], [100.0], 2**21) for texts in (right, wrong)]
    count = len(PROMPTS)
    base, other = rows(variants, found)
    assert base == [
        "llama-cpp, F32",
        "8 of 8",
        f"{count} of {count}",
        "100%",
        "20 (10 to 30)",
        "100 (100 to 100)",
        "1",
        "2",
    ]
    assert other[1:3] == ["7 of 8", f"{count - 1} of {count}"]


def test_a_text_counts_up_to_its_first_difference() -> None:
    assert shared_start("abcd", "abXd") == 0.5
    assert shared_start("abcd", "abcd") == 1.0
    assert shared_start("abcd", "ab") == 0.5


def test_the_page_has_a_place_for_the_figures() -> None:
    assert PAGE.read_text().count(MARK) == 2
