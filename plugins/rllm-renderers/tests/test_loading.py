from __future__ import annotations

import json
import urllib.error

import pytest
from pydantic import ValidationError
from rllm_renderers import loading
from rllm_renderers.chat_template import ChatTemplateConfig, ChatTemplateParser

from rllm_core.config import ModelConfig
from rllm_core.errors import ConfigError

ASK = [{"role": "user", "content": "hello"}]


def test_a_model_folder(make_parser, model_folder):
    parser = ChatTemplateParser.from_model(model_folder, ChatTemplateConfig(chat_template_kwargs={"thinking": True}))
    assert parser.get_stop_token_ids() == (2, 0)
    assert parser.render(ASK) == make_parser(chat_template_kwargs={"thinking": True}).render(ASK)


def test_every_parser_has_a_tokenizer_of_its_own(model_folder):
    first, second = (ChatTemplateParser.from_model(str(model_folder)) for _ in range(2))
    assert first.tokenizer is not second.tokenizer
    assert first.render(ASK) == second.render(ASK)


@pytest.mark.parametrize(("configured", "stops"), [(None, (2,)), (0, (2, 0)), ([2], (2,)), ([1, 0, 1], (2, 1, 0))])
def test_stop_tokens_of_the_generation_config(model_folder, configured, stops):
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    assert ChatTemplateParser.from_model(model_folder).get_stop_token_ids() == stops


def test_a_model_without_a_generation_config(model_folder):
    (model_folder / "generation_config.json").unlink()
    assert ChatTemplateParser.from_model(model_folder).get_stop_token_ids() == (2,)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_template(folder):
    (folder / "chat_template.jinja").unlink()


def without_stops(folder):
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()


def with_garbled_generation_config(folder):
    (folder / "generation_config.json").write_text("{")


def with_a_stop_that_is_no_token(folder):
    edit(folder / "generation_config.json", eos_token_id=[2, 151329])


def with_a_list_for_a_generation_config(folder):
    (folder / "generation_config.json").write_text("[]")


def without_files(folder):
    for path in folder.iterdir():
        path.unlink()


def with_code_of_its_own(folder):
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
    )
    (folder / "evil.py").write_text("raise SystemExit('this code must not run')")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (without_template, "has no chat template"),
        (without_stops, "has no token that ends a turn"),
        (with_garbled_generation_config, "generation_config.json of model .* cannot be read"),
        (with_a_stop_that_is_no_token, r"ends a turn with tokens \[151329\], which its tokenizer does not have"),
        (with_a_list_for_a_generation_config, "generation_config.json of model .* cannot be read"),
        (without_files, "has neither tokenizer.json nor tokenizer_config.json; use the folder that has them"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_folder_is_one_clear_line(model_folder, damage, complaint):
    damage(model_folder)
    with pytest.raises(ConfigError, match=complaint) as caught:
        ChatTemplateParser.from_model(model_folder)
    assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_model_does_not_run(model_folder):
    with_code_of_its_own(model_folder)
    with pytest.raises(ConfigError, match="trust_remote_code") as caught:
        ChatTemplateParser.from_model(model_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "nowhere/at-all", "nowhere"])
def test_a_missing_folder_is_one_clear_line(path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=path) as caught:
        ChatTemplateParser.from_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["nope", "a/b/c", "no folder"])
def test_what_is_neither_a_folder_nor_a_hub_name_is_not_asked_for(path, monkeypatch):
    def asked(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("urllib.request.urlopen", asked)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    with pytest.raises(ConfigError, match="does not exist, and it is not a Hugging Face model ID"):
        ChatTemplateParser.from_model(path)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """The Hub's client would retry each file for half a minute."""
    asked = []

    def refuses(request, timeout):
        asked.append((request.full_url, timeout))
        raise urllib.error.URLError("Name or service not known")

    loading._answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("urllib.request.urlopen", refuses)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"owner/nope.*the Hugging Face Hub cannot be reached") as caught:
            ChatTemplateParser.from_model("owner/nope")
        assert "\n" not in str(caught.value)
    assert asked == [("https://hub.invalid", loading.HUB_SECONDS)]


def test_a_hub_that_says_no_has_answered(monkeypatch):
    def refuses(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 403, "no", {}, None)

    monkeypatch.setattr("urllib.request.urlopen", refuses)
    assert loading._answers("https://says-no.invalid")


def test_no_path_at_all():
    with pytest.raises(ConfigError, match=r"model.path is not set"):
        ChatTemplateParser.from_model("")


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match=r"model folder .*model.gguf does not exist"):
        ChatTemplateParser.from_model(tmp_path / "model.gguf")


def test_another_section_is_refused(model_folder):
    with pytest.raises(ValidationError):
        ChatTemplateParser.from_model(model_folder, ModelConfig())
