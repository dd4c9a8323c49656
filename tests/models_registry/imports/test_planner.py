"""What an import fetches, and what it refuses to."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.imports.planner import (
    CannotImport,
    ImportLimits,
    ListedFile,
    artifact_path,
    choose_files,
    parse_source,
    retry_after_s,
    usual_engine,
)
from tests.models_registry.imports.hub import as_listed

LIMITS = ImportLimits(bytes=10**12)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def chosen(*paths: str, pattern: str = "", limits: ImportLimits = LIMITS) -> list[str]:
    return [file.path for file in choose_files([as_listed(path) for path in paths], pattern, limits)]


@pytest.mark.parametrize(
    ("source", "hub", "name", "revision"),
    [
        ("hf://org/model", "hf", "org/model", "main"),
        ("hf://org/model@v1.0", "hf", "org/model", "v1.0"),
        ("hf://Org-1/a.model_2@refs/pr/3", "hf", "Org-1/a.model_2", "refs/pr/3"),
        ("modelscope://org/model", "modelscope", "org/model", "master"),
    ],
)
def test_a_source_names_hub_repository_and_revision(source: str, hub: str, name: str, revision: str) -> None:
    found = parse_source(source)
    assert (found.hub, found.name, found.revision) == (hub, name, revision)
    assert parse_source(str(found)) == found


@pytest.mark.parametrize(
    "source",
    [
        "", "org/model", "https://huggingface.co/org/model", "hf://model", "hf://org/model/more", "hf://../model",
        "hf://org/..", "hf://org/model@", "hf://org/model@../main", "hf://org/model@a..b", "hf://org/model@a//b",
        "hf://org/model@main\n", "hf://org/mo del", "hf://org/model?x=1", "hf://org/model@refs/", "s3://org/model",
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused_with_the_form(source: str) -> None:
    with pytest.raises(CannotImport, match="hf://ORG/NAME@REVISION"):
        parse_source(source)


@given(st.text(max_size=60))
def test_no_text_is_read_as_a_source_that_leaves_its_path(text: str) -> None:
    try:
        found = parse_source("hf://" + text)
    except CannotImport:
        return
    path = artifact_path(found, found.revision, "")
    assert ".." not in path.split("/")
    assert path.count("/") == 3


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (["config.json", "model.safetensors", "README.md", "modeling_x.py"], ["config.json", "model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "original/model.safetensors"], ["model.safetensors"]),
        ([*SHARDS, "model.safetensors", "model.safetensors.index.json"], [*SHARDS, "model.safetensors.index.json"]),
        (["adapter_model.safetensors", "adapter_config.json"], ["adapter_config.json", "adapter_model.safetensors"]),
        (["small.Q4_K_M.gguf", "LICENSE"], ["LICENSE", "small.Q4_K_M.gguf"]),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (["model.safetensors", "manifest.json"], ["model.safetensors"]),
    ],
)  # fmt: skip
def test_weights_configuration_and_tokenizer_are_chosen(paths: list[str], wanted: list[str]) -> None:
    assert chosen(*paths) == wanted


def test_a_pattern_names_one_of_several_ggufs() -> None:
    paths = ("config.json", "m.Q4_K_M.gguf", "m.Q8_0.gguf", "BF16/m-00001-of-00001.gguf")
    assert chosen(*paths, pattern="*Q8_0.gguf") == ["config.json", "m.Q8_0.gguf"]
    assert chosen(*paths, pattern="BF16/*.gguf") == ["BF16/m-00001-of-00001.gguf", "config.json"]
    for pattern in ("", "*.gguf"):
        with pytest.raises(CannotImport, match=r"several GGUF files: m\.Q4_K_M\.gguf, m\.Q8_0\.gguf.*; name one"):
            chosen("m.Q4_K_M.gguf", "m.Q8_0.gguf", pattern=pattern)
    with pytest.raises(CannotImport, match=r"no weights match '\*Q2\*'; the repository has m\.Q4_K_M"):
        chosen(*paths, pattern="*Q2*")


def test_a_gguf_is_for_llama_cpp() -> None:
    assert usual_engine(["config.json", "m.Q8_0.gguf"]) == "llama-cpp"
    assert usual_engine(["config.json", "model.safetensors"]) == "vllm"


def test_pickles_are_refused_by_name_unless_allowed() -> None:
    for paths, pattern in ((["pytorch_model.bin"], ""), (["x/model.pth", "model.safetensors"], "*.pth")):
        with pytest.raises(CannotImport, match=rf"{paths[0]} can run code when loaded.*SWITCHYARD_IMPORT_PICKLES=1"):
            chosen(*paths, pattern=pattern)
    assert chosen("pytorch_model.bin", limits=replace(LIMITS, pickles=True)) == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([as_listed("../../etc/passwd")], "'../../etc/passwd', which is outside"),
        ([as_listed("/etc/passwd")], "which is outside"),
        ([as_listed("a\\b")], "which is outside"),
        ([as_listed("a//b")], "which is not a plain path"),
        ([as_listed("a\x00.json")], "which has unprintable characters"),
        ([as_listed("a" * 300)], "which is too long"),
        ([as_listed("config.json"), as_listed("config.json")], "lists 'config.json' twice"),
        ([as_listed("a"), as_listed("a/b/c")], "'a' as a file and as the folder of 'a/b/c'"),
        ([ListedFile("model.safetensors", -1, "0" * 64)], "with -1 bytes"),
        ([ListedFile("model.safetensors", 1)], "without a SHA-256 or git object ID"),
        ([ListedFile("model.safetensors", 1, "XY", "0" * 40)], "without a SHA-256 or git object ID"),
        ([as_listed("README.md")], "no safetensors and no GGUF"),
        ([as_listed(f"m-0000{n}-of-00003.safetensors") for n in (1, 3)], "part 2 of 3 of m.safetensors"),
        ([as_listed("model-00001-of-99999.safetensors")], "part 2 of 99999"),
        ([replace(as_listed("model.safetensors"), size=10**13)], "the limit is 1.0 TB (SWITCHYARD_ARTIFACT_MAX_GIB)"),
        ([as_listed(f"{n}.json") for n in range(10_001)], "more than 10000 files"),
        ([as_listed(f"{n}.safetensors") for n in range(1_001)], "1001 files are needed; the limit is 1000"),
    ],
)  # fmt: skip
def test_hostile_and_impossible_listings_are_refused_by_name(files: Sequence[ListedFile], said: str) -> None:
    with pytest.raises(CannotImport) as refused:
        choose_files(files, "", LIMITS)
    assert said in str(refused.value)


def test_other_choices_of_files_are_other_artifacts() -> None:
    repository = parse_source("hf://org/model@main")
    paths = {artifact_path(repository, "1" * 40, pattern) for pattern in ("", "*Q4.gguf", "*Q8.gguf")}
    assert len(paths) == 3
    assert f"hf/org/model/{'1' * 40}" in paths


def test_failures_are_retried_later_and_later_and_then_no_more() -> None:
    waits = [retry_after_s(troubles) for troubles in range(1, 7)]
    assert waits == [*sorted(filter(None, waits)), None]
